"""Reads the facts for `check` from the API server and, through its proxy, from pods; writes nothing.

Everything is bounded: each answer in time, pages and calls in number. Two readings, `Scope.interval_s` seconds apart,
show whether Leases are being renewed and metrics are being scraped.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar
from urllib.parse import quote, urlsplit

from penstock.api.crd import definitions
from penstock.api.runtimes import DEFAULT_RUNTIME, traits_of
from penstock.core import metric_names as names
from penstock.core.errors import ClusterError, ForbiddenError, NotFoundError
from penstock.core.ports import WORKER_PORT
from penstock.core.worker_metrics import names_on_page
from penstock.kube.client import KubeClient
from penstock.kube.kinds import (
    ACCESS_REVIEW,
    CLUSTER_GPU_POOL,
    CRD,
    DEPLOYMENT,
    GRAPH_DEPLOYMENT,
    LEASE,
    NODE,
    POD,
    PROFILE_REQUEST,
    SUBJECT_REVIEW,
    Kind,
)
from penstock.kube.objects.names import (
    FINISHED_PHASES,
    GRAPH_LABEL,
    HTTP_PORT,
    child_name,
    scheme_of,
)
from penstock.kube.objects.quantity import quantity
from penstock_operator.doctor.check import component_of, lease_of, scope_of
from penstock_operator.doctor.check_pools import Requested
from penstock_operator.doctor.facts import Facts, GraphFacts, LeaseFact, Object, Page, RightsFact, Unreadable
from penstock_operator.plan.pods import pod_view
from penstock_operator.rbac import (
    CLUSTER_OPERATOR_RIGHTS,
    OPERATOR_RIGHTS,
    PLANNER_RIGHTS,
    USER_RIGHTS,
    Right,
)

ANSWER_S: Final = 10.0
"""Maximum wall-clock seconds to wait for one answer. Chosen: healthy servers answer within milliseconds."""

MAX_PAGES: Final = 64
"""Maximum number of pods of one graph whose metrics are read. Chosen: more would load the API server's proxy."""

MAX_CALLS: Final = 16
"""Maximum number of concurrent calls. Chosen."""

_PART_OF: Final = {"app.kubernetes.io/part-of": "penstock"}
_IN_CLUSTER: Final = re.compile(r"^(?P<name>[a-z0-9-]+)\.(?P<namespace>[a-z0-9-]+)(\.svc(\.[a-z0-9.-]+)?)?$")

_REQUEST: Final = re.compile(r"^[A-Z]+ /\S*: ")

T = TypeVar("T")

LeaseName = tuple[str, str, str]
"""Component (operator or planner), namespace and name of a Lease."""


@dataclass(frozen=True, slots=True)
class Scope:
    """What `penstock doctor` inspects.

    Attributes:
        namespace: Namespace of the graphs to inspect; None means all.
        graph: Name of the only graph to inspect; None means all.
        interval_s: Wall-clock seconds between the two readings of each Lease and metrics page, which show what has
            changed meanwhile.
        release: Penstock version of this program.
    """

    namespace: str | None
    graph: str | None
    interval_s: float
    release: str


async def gather(client: KubeClient, scope: Scope) -> Facts:
    """Read the cluster, and return all facts from which `penstock doctor` makes its findings; a failed read is `Unreadable`.

    Leases and metrics pages are read twice, to see whether they change.

    Args:
        client: Client of the Kubernetes API.
        scope: Namespace and graph to inspect, and the wall-clock seconds between the two readings.
    """
    return await _Gatherer(client, scope).gather()


class _Gatherer:
    def __init__(self, client: KubeClient, scope: Scope) -> None:
        self._client = client
        self._scope = scope
        self._slots = asyncio.Semaphore(MAX_CALLS)

    async def gather(self) -> Facts:
        scope = self._scope
        found = await self._readable(self._client.raw_get("/version"))
        version = found if isinstance(found, Unreadable) else str(found.get("gitVersion"))
        facts = Facts(self._client.server, version, time.time(), scope.interval_s, scope.release)
        if isinstance(version, Unreadable):
            return facts
        skew_s = await self._skew_s()
        crds, deployments, graphs, profiles, pools, (nodes, requested) = await asyncio.gather(
            self._crds(),
            self._deployments(),
            self._graphs(),
            self._profiles(),
            self._cluster_gpu_pools(),
            self._nodes(),
        )
        wanted = _wanted_leases(deployments)
        first, seen, rights = await asyncio.gather(
            self._leases(wanted), self._each(graphs, self._first_reading), self._rights(deployments)
        )
        if wanted or (not isinstance(seen, Unreadable) and any(each.pages for each in seen)):
            await asyncio.sleep(scope.interval_s)
        later, graphs = await asyncio.gather(self._leases(wanted), self._each(seen, self._second_reading))
        return replace(
            facts,
            now_s=time.time() - (skew_s or 0.0),
            skew_s=skew_s,
            crds=crds,
            deployments=deployments,
            leases=tuple(
                LeaseFact(*name, before, after)
                for name, before, after in zip(wanted, first, later, strict=True)
            ),
            rights=rights,
            graphs=graphs,
            profiles=profiles,
            cluster_gpu_pools=pools,
            nodes=nodes,
            requested=requested,
        )

    async def _readable(self, call: Awaitable[T]) -> T | Unreadable:
        """Wait for an answer for at most `ANSWER_S`; return a failure as Unreadable."""
        async with self._slots:
            try:
                async with asyncio.timeout(ANSWER_S):
                    return await call
            except TimeoutError:
                return Unreadable(f"no answer within {ANSWER_S:.0f} s")
            except ForbiddenError as exc:
                return Unreadable(_message(exc), is_forbidden=True)
            except ClusterError as exc:
                return Unreadable(_message(exc))

    async def _readable_or_none(self, call: Awaitable[T]) -> T | Unreadable | None:
        async def found() -> T | None:
            try:
                return await call
            except NotFoundError:
                return None

        return await self._readable(found())

    async def _skew_s(self) -> float | None:
        before_s = time.time()
        server_s = await self._readable(self._client.server_time_s())
        # The Date header is truncated to seconds, so the server's clock is half a second later on average.
        return None if isinstance(server_s, Unreadable) else (before_s + time.time()) / 2 - (server_s + 0.5)

    async def _crds(self) -> dict[str, Object | Unreadable | None]:
        wanted = list(definitions())
        found = await asyncio.gather(
            *(self._readable_or_none(self._client.get(CRD, each)) for each in wanted)
        )
        return dict(zip(wanted, found, strict=True))

    async def _deployments(self) -> tuple[Object, ...] | Unreadable:
        found = await self._readable(self._client.list(DEPLOYMENT, namespace=None, labels=_PART_OF))
        if isinstance(found, Unreadable) and found.is_forbidden:
            own = self._scope.namespace or self._client.namespace
            found = await self._readable(self._client.list(DEPLOYMENT, namespace=own, labels=_PART_OF))
        return found if isinstance(found, Unreadable) else tuple(found.items)

    async def _graphs(self) -> tuple[GraphFacts, ...] | Unreadable:
        found = await self._listed(GRAPH_DEPLOYMENT, lambda each: each["metadata"]["name"])
        return found if isinstance(found, Unreadable) else tuple(map(GraphFacts, found))

    async def _profiles(self) -> tuple[Object, ...] | Unreadable:
        return await self._listed(PROFILE_REQUEST, lambda each: each["spec"].get("graph"))

    async def _cluster_gpu_pools(self) -> tuple[Object, ...] | Unreadable:
        found = await self._readable_or_none(self._client.list(CLUSTER_GPU_POOL, namespace=None))
        if isinstance(found, Unreadable):
            return found
        return () if found is None else tuple(found.items)

    async def _listed(
        self, kind: Kind, graph_of: Callable[[Object], str | None]
    ) -> tuple[Object, ...] | Unreadable:
        found = await self._readable_or_none(self._client.list(kind, namespace=self._scope.namespace))
        if isinstance(found, Unreadable):
            return found
        items = () if found is None else found.items
        return tuple(each for each in items if self._scope.graph in (None, graph_of(each)))

    async def _nodes(self) -> tuple[tuple[Object, ...] | Unreadable, Requested]:
        nodes = await self._readable(self._client.list(NODE, namespace=None))
        if isinstance(nodes, Unreadable):
            return nodes, nodes
        requested: dict[str, dict[str, int]] = {}
        # A cluster has many pods, so they are summed up while their pages arrive, and are not stored.
        read = self._client.read_pages(
            POD,
            namespace=None,
            selector="",
            take=lambda pod: _add_requests(requested, pod),
            restart=requested.clear,
        )
        version = await self._readable(read)
        return tuple(nodes.items), version if isinstance(version, Unreadable) else requested

    async def _leases(self, wanted: Sequence[LeaseName]) -> list[Object | Unreadable | None]:
        calls = (self._client.get(LEASE, name, namespace=namespace) for _, namespace, name in wanted)
        return await asyncio.gather(*map(self._readable_or_none, calls))

    async def _rights(self, deployments: tuple[Object, ...] | Unreadable) -> tuple[RightsFact, ...]:
        readings = [self._rights_of("you", "", self._scope.namespace, USER_RIGHTS)]
        for each in () if isinstance(deployments, Unreadable) else deployments:
            component, scope = component_of(each), scope_of(each)
            of_operator = CLUSTER_OPERATOR_RIGHTS if scope is None else OPERATOR_RIGHTS
            rights = {"operator": of_operator, "planner": PLANNER_RIGHTS}.get(component)
            if rights is not None:
                account = each["spec"]["template"]["spec"].get("serviceAccountName", "default")
                who = f"system:serviceaccount:{each['metadata']['namespace']}:{account}"
                readings.append(self._rights_of(who, component, scope, rights))
        return tuple(await asyncio.gather(*readings))

    async def _rights_of(
        self, who: str, component: str, namespace: str | None, rights: Sequence[Right]
    ) -> RightsFact:
        user = who if component else None
        answers = await asyncio.gather(*(self._is_allowed(user, namespace, each) for each in rights))
        unreadable = next((each for each in answers if isinstance(each, Unreadable)), None)
        missing = tuple(right for right, each in zip(rights, answers, strict=True) if each is False)
        return RightsFact(who, component, namespace, len(rights), missing, unreadable)

    async def _is_allowed(self, user: str | None, namespace: str | None, right: Right) -> bool | Unreadable:
        resource, _, sub = right.resource.partition("/")
        attributes = {"group": right.group, "resource": resource, "subresource": sub, "verb": right.verb}
        spec: dict[str, Any] = {"resourceAttributes": {**attributes, "namespace": namespace or ""}}
        kind = ACCESS_REVIEW
        if user is not None:
            _, _, account_namespace, _ = user.split(":")
            accounts = "system:serviceaccounts"
            groups = [accounts, f"{accounts}:{account_namespace}", "system:authenticated"]
            spec |= {"user": user, "groups": groups}
            kind = SUBJECT_REVIEW
        call = self._client.create(kind.of({}, spec=spec), field_manager="penstock-doctor")
        answer = await self._readable(call)
        return answer if isinstance(answer, Unreadable) else bool(answer.get("status", {}).get("allowed"))

    async def _each(
        self,
        graphs: tuple[GraphFacts, ...] | Unreadable,
        fetch: Callable[[GraphFacts], Awaitable[GraphFacts | None]],
    ) -> tuple[GraphFacts, ...] | Unreadable:
        if isinstance(graphs, Unreadable):
            return graphs
        return tuple(each for each in await asyncio.gather(*map(fetch, graphs)) if each is not None)

    async def _first_reading(self, facts: GraphFacts) -> GraphFacts:
        graph = facts.graph
        namespace, name = graph["metadata"]["namespace"], graph["metadata"]["name"]
        found = await self._readable(self._client.list(POD, namespace=namespace, labels={GRAPH_LABEL: name}))
        if isinstance(found, Unreadable):
            return GraphFacts(graph, found)
        # Followers of a multi-node replica have no metrics page; pods that are not ready are diagnosed by their state.
        views = [(each, pod_view(each)) for each in found.items]
        read = [(each, view) for each, view in views if view.ready and not view.worker_index][:MAX_PAGES]
        pages = await self._pages([each for each, _ in read])
        ready = await self._texts([each for each, view in read if view.role == "router"], "/ready")
        return GraphFacts(
            graph,
            tuple(found.items),
            ready=ready,
            pages={name: Page(text, text) for name, text in pages.items()},
            prometheus=await self._prometheus(graph),
        )

    async def _second_reading(self, facts: GraphFacts) -> GraphFacts | None:
        """Read the metrics again and drop pods that were deleted meanwhile; return None if the graph itself was deleted."""
        if not isinstance(facts.pods, Unreadable):
            read = [each for each in facts.pods if each["metadata"]["name"] in facts.pages]
            texts = await self._pages(read)
            pages = {name: Page(facts.pages[name].first, text) for name, text in texts.items()}
            facts = await self._without_deleted_pods(replace(facts, pages=pages))
        metadata = facts.graph["metadata"]
        now = await self._readable_or_none(
            self._client.get(GRAPH_DEPLOYMENT, metadata["name"], namespace=metadata["namespace"])
        )
        if isinstance(now, Unreadable):
            return facts
        return facts if now is not None and now["metadata"]["uid"] == metadata["uid"] else None

    async def _without_deleted_pods(self, facts: GraphFacts) -> GraphFacts:
        """Return the facts without deleted pods; a pod that is no longer ready is replaced by its current state."""
        metadata = facts.graph["metadata"]
        labels = {GRAPH_LABEL: metadata["name"]}
        found = await self._readable(self._client.list(POD, namespace=metadata["namespace"], labels=labels))
        if isinstance(found, Unreadable) or isinstance(facts.pods, Unreadable):
            return facts
        now = {each["metadata"]["uid"]: each for each in found.items}
        # The pages of a pod that became ready meanwhile were not read, so its earlier state remains.
        pods = tuple(
            each if pod_view(now[uid]).ready else now[uid]
            for each in facts.pods
            if (uid := each["metadata"]["uid"]) in now
            and not (now[uid]["metadata"].get("deletionTimestamp") and _answers_nothing(facts, each))
        )
        ready_names = {each["metadata"]["name"] for each in pods if pod_view(each).ready}
        pages = {name: page for name, page in facts.pages.items() if name in ready_names}
        return replace(facts, pods=pods, pages=pages)

    async def _pages(self, pods: list[Object]) -> dict[str, str | Unreadable]:
        """Return the metrics page of each pod, by pod name."""
        texts = await asyncio.gather(*(self._pod_text(each, pod_view(each).metrics_path) for each in pods))
        return {each["metadata"]["name"]: text for each, text in zip(pods, texts, strict=True)}

    async def _texts(self, pods: list[Object], path: str) -> dict[str, str | Unreadable]:
        """Return the response of each pod at ``path``, by pod name."""
        texts = await asyncio.gather(*(self._pod_text(each, path) for each in pods))
        return {each["metadata"]["name"]: text for each, text in zip(pods, texts, strict=True)}

    async def _pod_text(self, pod: Object, path: str) -> str | Unreadable:
        metadata = pod["metadata"]
        scheme = scheme_of(metadata.get("annotations"))
        named = f"{'' if scheme == 'http' else 'https:'}{metadata['name']}:{_http_port(pod)}"
        proxy = POD.path(metadata["namespace"], named, subresource="proxy")
        return await self._readable(self._client.raw_text(f"{proxy}{path}"))

    async def _prometheus(self, graph: Object) -> int | Unreadable | None:
        url = graph["spec"].get("planner", {}).get("metrics", {}).get("prometheusUrl")
        if url is None:
            return None
        parts = urlsplit(url)
        inside = _IN_CLUSTER.match(parts.hostname or "")
        if inside is None:
            return Unreadable("is outside the cluster, so it is not queried from here", is_forbidden=True)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        own = traits_of(graph["spec"].get("runtime", DEFAULT_RUNTIME)).metric_names
        metric = names_on_page(names.VLLM_RUNNING, own)[0]
        query = quote(f"count(count by (pod) ({metric}{{{pod_selector(graph)}}}))")
        service = f"{parts.scheme}:{inside['name']}:{port}"
        path = f"/api/v1/namespaces/{inside['namespace']}/services/{service}/proxy{parts.path.rstrip('/')}"
        answer = await self._readable(self._client.raw_text(f"{path}/api/v1/query?query={query}"))
        return answer if isinstance(answer, Unreadable) else _count_of(answer)


def _answers_nothing(facts: GraphFacts, pod: Object) -> bool:
    """Return whether the last request to a pod failed; a terminating pod may stop answering."""
    name = pod["metadata"]["name"]
    page = facts.pages.get(name)
    return isinstance(facts.ready.get(name), Unreadable) or (
        page is not None and isinstance(page.later, Unreadable)
    )


def _wanted_leases(deployments: tuple[Object, ...] | Unreadable) -> list[LeaseName]:
    """Return the Leases of the operators and planners that are not scaled to 0, without duplicates."""
    found: dict[LeaseName, None] = {}
    for each in () if isinstance(deployments, Unreadable) else deployments:
        lease = lease_of(each)
        if lease is not None and each["spec"].get("replicas", 1):
            found[component_of(each), *lease] = None
    return list(found)


def pod_selector(graph: Object) -> str:
    """Return the PromQL label matchers, as text, that select the metrics of a graph's pods.

    They match no pods of another graph whose name begins with the graph's, such as ``chat-2`` for ``chat``.
    """
    name, namespace = graph["metadata"]["name"], graph["metadata"]["namespace"]
    services = "|".join(child_name(name, service) for service in sorted(graph["spec"]["services"]))
    return f'namespace="{namespace}",pod=~"({services})-[a-z0-9]+(-[a-z0-9]+)?"'


def _message(error: ClusterError) -> str:
    """Return the API server's message without the request at its start."""
    return _REQUEST.sub("", str(error))


def _count_of(answer: str) -> int | Unreadable:
    """Return the value of a Prometheus instant query's response; 0 if it has no sample, Unreadable if it is malformed."""
    try:
        result = json.loads(answer)["data"]["result"]
        return int(float(result[0]["value"][1])) if result else 0
    except (ValueError, KeyError, TypeError, IndexError):
        return Unreadable(f"its response cannot be parsed: {answer[:100]!r}")


def _http_port(pod: Object) -> int:
    """Return the pod's port named http, or the default worker port if it has none."""
    for container in pod["spec"].get("containers", ()):
        for port in container.get("ports", ()):
            if port.get("name") == HTTP_PORT:
                return int(port["containerPort"])
    return WORKER_PORT


def _add_requests(requested: dict[str, dict[str, int]], pod: Object) -> None:
    """Add a pod's requested extended resources to those of its node; finished and unassigned pods are ignored."""
    node = pod.get("spec", {}).get("nodeName")
    if not node or pod.get("status", {}).get("phase") in FINISHED_PHASES:
        return
    on_node = requested.setdefault(node, {})
    for container in pod["spec"].get("containers", ()):
        for resource, amount in container.get("resources", {}).get("requests", {}).items():
            if "/" in resource:
                on_node[resource] = on_node.get(resource, 0) + int(quantity(amount) or 0)
