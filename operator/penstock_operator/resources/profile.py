"""Builds the objects of a ProfileRequest: the Job that runs `penstock profile`, and its inputs, outputs and rights.

The Job's pod is not a worker of the graph: it has the request's label instead of the graph's, gets no user requests,
and occupies GPUs by its own declaration (``maxGpus``) in addition to the graph's budget. It occupies as many as the
largest measured size needs: the workers under test are its child processes, started one size after another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final

import yaml

from penstock.api import GraphDeployment, NodePool, ProfileRequest, Role
from penstock.core.durations import duration_text
from penstock.core.errors import InvalidSpecError, ManifestProblem
from penstock.kube.kinds import (
    CONFIG_MAP,
    GRAPH_DEPLOYMENT,
    JOB,
    NETWORK_POLICY,
    ROLE,
    ROLE_BINDING,
    SERVICE_ACCOUNT,
)
from penstock.kube.objects.names import (
    GPUS_ANNOTATION,
    MANAGED_BY_LABEL,
    OPERATOR,
    PROFILE_GRAPH_FILE,
    PROFILE_LABEL,
    profile_name,
)
from penstock.runtimes import runtime_of
from penstock_operator.resources.metadata import BuildContext, owned_by, recommended_labels, release_label
from penstock_operator.resources.node_pool import (
    TEMPORARY,
    Mounted,
    folders,
    home_variables,
    on_nodes,
    read_only,
)
from penstock_operator.resources.overlay import MAIN, Counted, overlaid
from penstock_operator.resources.privileges import RESTRICTED, container_security

OUTPUT_FOLDER: Final = f"{TEMPORARY}/profile"
"""Folder in which the Job stores its measurements; it is lost with a failed try."""

GRACE_S: Final = 30
"""Seconds from SIGTERM to SIGKILL. Chosen: the workers under test serve no clients."""

USAGE_EXIT: Final = 2
"""Exit code of `penstock` for invalid options or manifests, which a retry cannot correct."""

_TEMPLATE: Final = "spec.podTemplate"
_REQUESTS: Final = {"cpu": "1", "memory": "1Gi"}
"""Resource requests for simulated workers. Chosen: a simulated engine and its load generator use one core."""

_Env = list[dict[str, Any]]


def profile_objects(
    request: ProfileRequest, graph: GraphDeployment, context: BuildContext
) -> list[dict[str, Any]]:
    """Return the objects of a ProfileRequest that measures a graph, the Job last; equal arguments give equal objects.

    Args:
        request: The request.
        graph: The graph to measure.
        context: Settings from which the objects are built.

    Raises:
        InvalidSpecError: The request does not fit the graph: it names a node pool that the graph does not have, there
            is no image for its runtime, or its podTemplate cannot be merged into the pod's.
    """
    # The value of managed-by differs from that of graphs' children, so that the watches of children do not select it.
    names = {PROFILE_LABEL: request.name, MANAGED_BY_LABEL: OPERATOR}
    labels = {**recommended_labels(request.name, "profile"), **names}
    own = {"namespace": context.namespace, "labels": labels | release_label(), **owned_by(request, context)}
    name = profile_name(request.name)
    metadata = {"name": name, **own}
    rights = {
        "apiGroups": [""],
        "resources": ["configmaps"],
        "resourceNames": [request.config_map],
        "verbs": ["get", "patch"],
    }
    account = {"kind": SERVICE_ACCOUNT.kind, "name": name, "namespace": context.namespace}
    # The workers under test need no key, so no client may reach them.
    closed = {
        "podSelector": {"matchLabels": {PROFILE_LABEL: request.name}},
        "policyTypes": ["Ingress"],
        "ingress": [],
    }
    return [
        SERVICE_ACCOUNT.of(metadata, automountServiceAccountToken=False),
        ROLE.of(metadata, rules=[rights]),
        ROLE_BINDING.of(
            metadata, roleRef={"apiGroup": ROLE.group, "kind": ROLE.kind, "name": name}, subjects=[account]
        ),
        CONFIG_MAP.of(metadata, data=_graph_file(graph)),
        # Created empty, so that the Job only needs the right to patch this one object, and cannot create others.
        CONFIG_MAP.of({"name": request.config_map, **own}),
        NETWORK_POLICY.of(metadata, spec=closed),
        _job(_Work(request, graph, context, labels), metadata),
    ]


@dataclass(frozen=True, slots=True)
class _Work:
    """Input from which a Job is built; ``labels`` are those of its pods."""

    request: ProfileRequest
    graph: GraphDeployment
    context: BuildContext
    labels: Mapping[str, str]

    @property
    def is_simulated(self) -> bool:
        """Whether the workers under test are Penstock's own simulated workers."""
        return self.graph.spec.traits.is_simulated

    @property
    def gpus(self) -> int:
        """Maximum number of GPUs that the workers under test occupy together."""
        return max(self.request.spec.sizes)

    @property
    def pool(self) -> NodePool | None:
        """Node pool in which to measure; None if any node is suitable."""
        spec = self.graph.spec
        worker = spec.service(Role.DECODE) or spec.service(Role.AGGREGATED)
        name = self.request.spec.node_pool or (worker[1].node_pool if worker is not None else None)
        if name is None:
            return None
        if name not in spec.node_pools:
            known = ", ".join(sorted(spec.node_pools)) or "none"
            message = f"{name} is not a node pool of graph {self.graph.name} ({known}); choose one of them"
            raise InvalidSpecError([ManifestProblem(path="spec.nodePool", message=message)])
        return spec.node_pools[name]

    @property
    def gpu_resource(self) -> str:
        """Extended resource that the pod requests; empty for workers that only simulate GPUs and can run on any node."""
        if self.graph.spec.models_gpus and self.pool is None:
            return ""
        return (self.pool or NodePool()).gpu_resource_name


def _graph_file(graph: GraphDeployment) -> dict[str, str]:
    manifest = GRAPH_DEPLOYMENT.of({"name": graph.name}, spec=graph.spec.to_manifest())
    return {PurePosixPath(PROFILE_GRAPH_FILE).name: yaml.safe_dump(manifest, sort_keys=False, width=110)}


def _job(work: _Work, metadata: Mapping[str, Any]) -> dict[str, Any]:
    if work.graph.spec.traits.frontend is not None:
        message = (
            f"workers of runtime {work.graph.spec.runtime} answer through a frontend alone; serve the graph, and run `penstock profile "
            "--endpoint URL --tp N --config-map NAME` against it"
        )
        raise InvalidSpecError([ManifestProblem(path="spec.graph", message=message)])
    never_right = {"containerName": MAIN, "operator": "In", "values": [USAGE_EXIT]}
    rules: list[dict[str, Any]] = [
        {"action": "FailJob", "onExitCodes": never_right},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    spec = {
        "parallelism": 1,
        "completions": 1,
        "backoffLimit": work.request.spec.retries,
        "activeDeadlineSeconds": work.request.spec.timeout_seconds,
        # Two pods at the same time would occupy twice the GPUs.
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": rules},
        "template": _pod_template(work),
    }
    return JOB.of(metadata, spec=spec)


def _pod_template(work: _Work) -> dict[str, Any]:
    name, pool = profile_name(work.request.name), work.pool
    mounted = folders(pool, is_own=work.is_simulated)
    folder = str(PurePosixPath(PROFILE_GRAPH_FILE).parent)
    mounted.insert(1, read_only("graph", folder, configMap={"name": name}))
    own = {"labels": dict(work.labels), "annotations": {GPUS_ANNOTATION: str(work.gpus)}}
    spec = {
        "restartPolicy": "Never",
        "containers": [_container(work, mounted)],
        "volumes": [volume for volume, _ in mounted],
        "serviceAccountName": name,
        "automountServiceAccountToken": True,
        "terminationGracePeriodSeconds": GRACE_S,
        **RESTRICTED,
        **on_nodes(pool),
    }
    template = overlaid(
        {"metadata": own, "spec": spec},
        work.request.spec.pod_template,
        _TEMPLATE,
        counted=Counted(work.gpus, work.gpu_resource, "spec.maxGpus", work.context.gpu_resources),
        allowed=work.context.allowed,
    )
    # Set the labels and fields that selectors and the Job rely on again, whatever the overlay changed.
    metadata = template.get("metadata", {})
    marks = {key: {**metadata.get(key, {}), **each} for key, each in own.items()}
    spec = {**template["spec"], "restartPolicy": "Never"}
    return {**template, "metadata": {**metadata, **marks}, "spec": spec}


def _container(work: _Work, mounted: list[Mounted]) -> dict[str, Any]:
    spec = work.graph.spec
    sources = (*spec.env_from, *(each for service in spec.workers.values() for each in service.env_from))
    container = {
        "name": MAIN,
        "image": _image(work),
        "imagePullPolicy": work.context.image_pull_policy,
        "command": ["penstock"],
        "args": _arguments(work),
        "env": _environment(work),
        "envFrom": [each.to_manifest() for each in dict.fromkeys(sources)],
        "resources": _resources(work),
        "securityContext": container_security(is_root_read_only=work.is_simulated),
        "volumeMounts": [mount for _, mount in mounted],
        # The last output lines of a failed try are shown in the request's status.
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    return {key: value for key, value in container.items() if value}


def _arguments(work: _Work) -> list[str]:
    spec, slo = work.request.spec, work.graph.spec.slo
    ttft_s = slo.ttft_seconds if spec.slo.ttft_seconds is None else spec.slo.ttft_seconds
    itl_s = slo.itl_seconds if spec.slo.itl_seconds is None else spec.slo.itl_seconds
    if itl_s is None:
        message = "null, and the graph's slo.itl is null too; write the ITL to plan for, such as 50ms"
        raise InvalidSpecError([ManifestProblem(path="spec.slo.itl", message=message)])
    arguments = ["profile", "--config", PROFILE_GRAPH_FILE, "--output-dir", OUTPUT_FOLDER]
    arguments += ["--isl", str(spec.isl), "--osl", str(spec.osl)]
    arguments += ["--ttft-slo", duration_text(ttft_s), "--itl-slo", duration_text(itl_s)]
    arguments += ["--gpus", str(work.gpus)]
    if spec.tensor_parallel:
        arguments += ["--tp", ",".join(map(str, spec.sizes))]
    return [*arguments, "--config-map", work.request.config_map]


def _image(work: _Work) -> str:
    own = work.request.spec.image
    if own is not None:
        return own
    graph = work.graph
    if not work.is_simulated:
        message = (
            f"null, but the release's image holds no {graph.spec.runtime}; name one with Penstock and "
            f"{graph.spec.runtime}, such as FROM {graph.spec.image_of(next(iter(graph.spec.workers)))} with "
            "`pip install 'penstock[kubernetes]'`"
        )
        raise InvalidSpecError([ManifestProblem(path="spec.image", message=message)])
    return graph.spec.image or work.context.penstock_image or graph.spec.planner_image


def _environment(work: _Work) -> _Env:
    """Return the pod's own variables, and those variables of the workers that only Kubernetes can supply.

    Literal values are in the graph file, from which the workers under test read them.
    """
    found: dict[str, dict[str, Any]] = {
        "POD_NAMESPACE": {"valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}}
    }
    for name, value in home_variables(work.pool, is_own=work.is_simulated).items():
        found[name] = {"value": value}
    spec = work.graph.spec
    for each in (*spec.env, *(env for service in spec.workers.values() for env in service.env)):
        if each.value_from is not None:
            found[each.name] = {"valueFrom": dict(each.value_from)}
    return [{"name": name, **value} for name, value in found.items()]


def _resources(work: _Work) -> dict[str, Any]:
    spec = work.graph.spec
    of_engine = runtime_of(spec.runtime).pod_requests(spec, Role.AGGREGATED, work.gpus)
    requests = dict(_REQUESTS) if work.is_simulated else dict(of_engine)
    if not work.gpu_resource:
        return {"requests": requests} if requests else {}
    gpus = {work.gpu_resource: str(work.gpus)}
    return {"requests": {**requests, **gpus}, "limits": gpus}
