"""The planner's copies of cluster objects: graphs, their ScalingAdapters and their pods, kept by three watches.

All graphs share the watches. Objects are reduced to the fields that the planner reads, and pods are parsed once when they change, so
that reading a graph costs no more than iterating over its pods.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final

from penstock.api import Role
from penstock.kube.client import KubeClient
from penstock.kube.informer import Informer
from penstock.kube.kinds import GRAPH_DEPLOYMENT, POD, SCALING_ADAPTER
from penstock.kube.objects.names import (
    GRAPH_LABEL,
    MANAGED_BY,
    MANAGED_BY_LABEL,
    OPERATOR_CLASS,
    REPLICA_FAILURE,
    child_name,
    is_of_class,
)
from penstock.kube.objects.served import stored_spec, with_spec
from penstock_planner.targets.pods import PodFacts, pod_facts

PLANNER_CONDITION: Final = "PlannerActive"

HPA: Final = "hpa (kube-controller-manager)"
_HPA_MANAGER: Final = "kube-controller-manager"
"""Field manager of Kubernetes' HorizontalPodAutoscalers, also those of KEDA; nothing else uses it to write /scale of an adapter."""

Key = tuple[str, str]
"""Namespace and name of a graph or adapter."""

Object = dict[str, Any]

_METADATA = (
    "name",
    "namespace",
    "uid",
    "generation",
    "resourceVersion",
    "deletionTimestamp",
    "annotations",
)


class Watch:
    """Copies of the graphs, ScalingAdapters and pods that the planner reads; `run` keeps them current."""

    def __init__(
        self,
        client: KubeClient,
        *,
        namespace: str | None,
        graph: str | None = None,
        operator_class: str = OPERATOR_CLASS,
    ) -> None:
        """Create a watch that has no copies yet; `run` fills and updates them.

        Args:
            client: Kubernetes client.
            namespace: Namespace to watch; None watches all.
            graph: Name of the only graph that is planned; None for all.
            operator_class: Name of the Penstock installation whose graphs are planned.
        """
        self._only = graph
        self._operator_class = operator_class
        self._on_graph: Callable[[Key], None] = lambda _key: None
        self._pods: dict[Key, dict[str, PodFacts]] = {}
        ours = {MANAGED_BY_LABEL: MANAGED_BY}
        self._graphs = Informer(
            client, GRAPH_DEPLOYMENT, namespace=namespace, trim=_trim_graph, on_change=self._graph_changed
        )
        self._adapters = Informer(client, SCALING_ADAPTER, namespace=namespace, trim=_trim_adapter)
        self._pod_informer = Informer(
            client, POD, namespace=namespace, labels=ours, trim=_trim_pod, on_change=self._pod_changed
        )
        self._informers = {"graphs": self._graphs, "adapters": self._adapters, "pods": self._pod_informer}

    def subscribe(self, on_graph: Callable[[Key], None]) -> None:
        """Have ``on_graph`` called with a graph's namespace and name whenever the graph is added, changed or deleted.

        Call this before `run`.
        """
        self._on_graph = on_graph

    async def run(self) -> None:
        """Keep the copies of graphs, ScalingAdapters and pods current until cancelled."""
        async with asyncio.TaskGroup() as group:
            for informer in self._informers.values():
                group.create_task(informer.run())

    async def synced(self) -> None:
        """Wait until all graphs, ScalingAdapters and pods were listed for the first time."""
        for informer in self._informers.values():
            await informer.synced.wait()

    def problem(self) -> str | None:
        """Return the reason for which the copies of graphs, ScalingAdapters and pods may be outdated; None while all watches work."""
        for name, informer in self._informers.items():
            if informer.problem is not None:
                return f"{name}: {informer.problem}"
            if not informer.synced.is_set():
                return f"{name}: not listed yet"
        return None

    def graph(self, key: Key) -> Object | None:
        """Return the watched graph object, or None if it does not exist, is being deleted, or is planned by another planner.

        Args:
            key: Namespace and name of the graph.
        """
        found = self._graphs.objects.get(key)
        if found is None or "deletionTimestamp" in found["metadata"] or not self._is_ours(found):
            return None
        return found

    def live(self, key: Key) -> Object | None:
        """Return the watched graph object, even if it is being deleted; None if it does not exist.

        Args:
            key: Namespace and name of the graph.
        """
        return self._graphs.objects.get(key)

    def of(self, key: Key) -> GraphWatch:
        """Return a view of one graph's ScalingAdapters, pods, and the GPUs that its GPU pool lets it hold.

        The view follows later changes in the cluster.

        Args:
            key: Namespace and name of the graph.
        """
        return GraphWatch(self, key)

    def adapter(self, key: Key) -> Object | None:
        """Return the ScalingAdapter with this namespace and name, or None if it does not exist.

        Args:
            key: Namespace and name of the ScalingAdapter.
        """
        return self._adapters.objects.get(key)

    def pods(self, key: Key) -> Mapping[str, PodFacts]:
        """Return a graph's pods by pod name; empty if the graph has none.

        The mapping follows later changes, and the caller must not change it.

        Args:
            key: Namespace and name of the graph.
        """
        return self._pods.get(key, {})

    def _graph_changed(self, _what: str, obj: Object) -> None:
        if self._is_ours(obj):
            self._on_graph((obj["metadata"]["namespace"], obj["metadata"]["name"]))

    def _is_ours(self, graph: Object) -> bool:
        is_planned = self._only in {None, graph["metadata"]["name"]}
        return is_planned and is_of_class(graph["spec"], self._operator_class)

    def _pod_changed(self, what: str, obj: Object) -> None:
        key, facts = obj["key"], obj["facts"]
        pods = self._pods.setdefault(key, {})
        if what == "DELETED":
            pods.pop(facts.name, None)
            if not pods:
                del self._pods[key]
        else:
            pods[facts.name] = facts


class GraphWatch:
    """View of one graph's ScalingAdapters, pods, and the GPUs that its GPU pool lets it hold; it follows changes in the cluster.

    The returned objects must not be changed.
    """

    def __init__(self, watch: Watch, key: Key) -> None:
        self._watch = watch
        self._key = key

    def problem(self) -> str | None:
        """Return the reason for which this view of the graph's objects may be outdated; None while all watches work."""
        return self._watch.problem()

    def adapter(self, service: str) -> Object | None:
        """Return the ScalingAdapter (object with the desired replicas) of a service, or None if it does not exist.

        The object has two additional keys: ``owner``, the field manager (the writer named in managedFields) that set
        the number of replicas last, and ``refused``, the reason for which the API server creates no further pods of the
        service (empty if it creates them).

        Args:
            service: Name of the service in the graph.
        """
        return self._watch.adapter((self._key[0], child_name(self._key[1], service)))

    def grant(self) -> int | None:
        """Return the number of GPUs that the graph's GPU pool lets it hold now.

        Returns None if the graph is in no pool, or if the operator has not reported a grant yet.
        """
        pool = self._pool()
        return None if pool is None else int(pool["grantedGpus"])

    def guaranteed(self) -> int | None:
        """Return the number of GPUs that the graph's GPU pool guarantees.

        Returns None if the graph is in no pool, or if the operator does not report the guarantee.
        """
        guaranteed = (self._pool() or {}).get("guaranteedGpus")
        return None if guaranteed is None else int(guaranteed)

    def grant_note(self) -> str:
        """Return the name of the graph's GPU pool with the operator's message about the GPUs that the pool grants.

        Empty if the graph is in no pool.
        """
        pool = self._pool()
        if pool is None:
            return ""
        return ": ".join(
            filter(None, (f"{pool.get('kind', 'GpuPool')} {pool['name']}", pool.get("message") or ""))
        )

    def _pool(self) -> Object | None:
        graph = self._watch.live(self._key)
        return None if graph is None else graph["status"]["pool"]

    def pods(self) -> Mapping[str, PodFacts]:
        """Return the graph's pods by pod name, including the pods of its routers."""
        return self._watch.pods(self._key)

    def routers(self) -> list[str]:
        """Return the sorted base URLs of the graph's ready routers."""
        return sorted(
            pod.url
            for pod in self.pods().values()
            if pod.role is Role.ROUTER and pod.ready and pod.url and not pod.leaving
        )


def _trim_graph(obj: Object) -> Object:
    """Return the graph's active spec, the planner's own part of its status, and its grant from a GPU pool.

    The active spec is the newest one, unless the operator still serves an earlier one because it refuses the newest or has not seen it.
    """
    status = obj.get("status") or {}
    conditions = [each for each in status.get("conditions") or () if each.get("type") == PLANNER_CONDITION]
    metadata = {key: obj["metadata"][key] for key in _METADATA if key in obj["metadata"]}
    newest = obj.get("spec") or {}
    spec = newest
    if (
        status.get("servedGeneration") != metadata.get("generation")
        and (kept := stored_spec(obj)) is not None
    ):
        metadata["generation"] = kept.generation
        # The newest spec decides which installation owns the graph.
        owner = {"operatorClass": newest.get("operatorClass", OPERATOR_CLASS)}
        spec = with_spec(obj, kept)["spec"] | owner
    return {
        "apiVersion": obj["apiVersion"],
        "kind": obj["kind"],
        "metadata": metadata,
        "spec": spec,
        "status": {
            "planner": status.get("planner") or {},
            "pool": status.get("pool"),
            "conditions": conditions,
        },
    }


def _trim_adapter(obj: Object) -> Object:
    """Return the number of replicas, the manager that set it, and the reason for which the API server refuses pods."""
    metadata = {key: obj["metadata"][key] for key in _METADATA if key in obj["metadata"]}
    return {"metadata": metadata, "spec": obj["spec"], "owner": _owner(obj), "refused": _refused(obj)}


def _refused(obj: Object) -> str:
    """Return the operator's reason for which no further pod can be created; empty if pods are created."""
    for each in (obj.get("status") or {}).get("conditions") or ():
        if each.get("type") == REPLICA_FAILURE and each.get("status") == "True":
            return str(each.get("message") or each.get("reason") or "the API server rejects its pods")
    return ""


def _owner(obj: Object) -> str:
    """Return the field manager that set the number of replicas last; empty if unknown."""
    owners = [
        each
        for each in obj["metadata"].get("managedFields") or ()
        if "f:replicas" in ((each.get("fieldsV1") or {}).get("f:spec") or {})
    ]
    if not owners:
        return ""
    manager = str(max(owners, key=lambda each: each.get("time", ""))["manager"])
    return HPA if manager == _HPA_MANAGER else manager


def _trim_pod(obj: Object) -> Object:
    """Return the fields of a pod that the planner reads, with the graph that its label names."""
    metadata = obj["metadata"]
    graph = (metadata.get("labels") or {}).get(GRAPH_LABEL, "")
    return {
        "metadata": {"name": metadata["name"], "namespace": metadata["namespace"]},
        "key": (metadata["namespace"], graph),
        "facts": pod_facts(obj),
    }
