"""The pod template of one service: its process, its place, its limits, and the user's overlay on top."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from penstock.api import Environment, GraphDeployment, Role
from penstock.kube.objects.names import (
    API_KEYS_FOLDER,
    BUDGET_GATE,
    CONFIG_ANNOTATION,
    EXT_PROC_PORT,
    GPUS_ANNOTATION,
    GRAPH_FILE,
    HTTP_PORT,
    TIER_KEYS_FOLDER,
    WORKER_PORT,
    child_name,
)
from penstock.operator.resources.config_map import config_digest
from penstock.operator.resources.context import BuildContext
from penstock.operator.resources.environment import PORTS, environment, environment_from
from penstock.operator.resources.labels import pod_labels, recommended_labels
from penstock.operator.resources.lifecycle import lifecycle
from penstock.operator.resources.metadata import ROUTER_SUFFIX, WORKER_SUFFIX
from penstock.operator.resources.overlay import overlay
from penstock.operator.resources.overlay_checks import MAIN, refuse_broken
from penstock.operator.resources.placement import gpu_request, gpus_per_pod, placement
from penstock.operator.resources.privileges import confined
from penstock.operator.resources.probes import probes
from penstock.operator.resources.security import container_security, pod_security
from penstock.operator.resources.volumes import is_penstock_image, volumes
from penstock.runtimes import ProcessSpec, RuntimeContext, filled_argv, process_specs, runtime_of

_OWN_REQUESTS: Final = {"cpu": "100m", "memory": "256Mi"}
"""Chosen for Penstock's own processes: an idle one's need, so that a laptop's cluster holds the samples."""
_ROUTER_LIMITS: Final = {"memory": "2Gi"}
"""Chosen: four times the bodies that a router holds, and what it makes of them; a podTemplate may raise it."""


def gpu_ceiling(graph: GraphDeployment) -> int | None:
    """Return the most GPUs that the graph's workers may hold together; None: no ceiling."""
    planner = graph.spec.planner
    return planner.max_gpu_budget if planner.enabled else None


def stated_gpu_ceiling(raw: Mapping[str, Any]) -> int | None:
    """Return the ceiling that a graph states, one whose specification is invalid too; None: no ceiling is stated."""
    planner = raw["spec"].get("planner") or {}
    ceiling = planner.get("maxGpuBudget")
    return ceiling if isinstance(ceiling, int) and planner.get("enabled", True) else None


def processes(graph: GraphDeployment, context: BuildContext) -> dict[str, ProcessSpec]:
    """Return the process of each service; the planner is none of them, one plans for all graphs."""
    runtime = RuntimeContext(
        python="python",
        graph_file=GRAPH_FILE,
        discovery="kubernetes",
        namespace=f"{context.namespace}-{graph.name}",  # Dynamo's namespace, one per graph
        host="0.0.0.0",  # noqa: S104 - a pod is reached at its address
        peer_host="$(POD_IP)",
        environment=Environment.KUBERNETES,
    )
    services = graph.spec.services
    return {spec.service: spec for spec in process_specs(graph, runtime) if spec.service in services}


def pod_template(
    graph: GraphDeployment,
    spec: ProcessSpec,
    context: BuildContext,
    *,
    follows: bool = False,
    more_args: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the pod template of a service.

    Args:
        graph: The graph.
        spec: The service's process.
        context: Of the build.
        follows: Whether the pod is a follower in a multi-node replica: it answers no requests, so it has
            no probes and is in no Service.
        more_args: Arguments before the user's own.

    Raises:
        InvalidSpecError: the service's podTemplate cannot be laid over the template, or makes privileges of it that
            the operator does not allow.
    """
    service = graph.spec.services[spec.service]
    path = f"spec.services.{spec.service}.podTemplate"
    own_labels = pod_labels(graph, spec.service, is_addressable=not follows)
    built = {
        "metadata": {
            "labels": {**recommended_labels(graph.name, service.role.value), **own_labels},
            "annotations": {},
        },
        "spec": {
            "containers": [_container(graph, spec, context, follows=follows, more_args=more_args)],
            "volumes": [volume for volume, _ in volumes(graph, spec.service)],
            "securityContext": pod_security(),
            "serviceAccountName": _account(graph, service.role),
            "automountServiceAccountToken": _asks_the_api(graph, service.role),
            # Variables such as VLLM_PORT, made of a Service's name, would configure the process.
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": service.termination_grace_period_seconds,
            **placement(graph, spec.service),
        },
    }
    template = overlay(built, service.pod_template, path)
    refuse_broken(
        template,
        path,
        gpus=gpus_per_pod(graph, spec.service),
        resource=(gpu_request(graph, spec.service) or ("", 0))[0],
    )
    if not context.allows_privileges:
        template = confined(built, template, path)
    return _with_own_marks(graph, spec.service, template, own_labels)


def _container(
    graph: GraphDeployment,
    spec: ProcessSpec,
    context: BuildContext,
    *,
    follows: bool,
    more_args: Sequence[str],
) -> dict[str, Any]:
    service = graph.spec.services[spec.service]
    argv = filled_argv(spec, PORTS)
    split = len(argv) - len(service.args)
    is_own = is_penstock_image(graph, spec.service)
    container: dict[str, Any] = {
        "name": MAIN,
        "image": _image(graph, spec, context),
        "imagePullPolicy": context.image_pull_policy,
        "command": [argv[0]],
        "args": [*argv[1:split], *_key_args(graph, service.role), *more_args, *argv[split:]],
        "env": environment(graph, spec, context),
        "envFrom": environment_from(spec),
        "ports": _ports(graph, service.role),
        "resources": _resources(graph, spec.service),
        "securityContext": container_security(is_root_read_only=is_own),
        "volumeMounts": [mount for _, mount in volumes(graph, spec.service)],
    }
    if not follows:
        container |= probes(service.role, spec.health_path or "/health", spec.startup_s, spec.liveness_s)
        grace_s = service.termination_grace_period_seconds
        container["lifecycle"] = lifecycle(
            finishes_requests=is_own or not service.role.is_worker,
            grace_s=grace_s,
            keeps_leases=service.role is Role.PREFILL,
        )
    return {key: value for key, value in container.items() if value}


def _ports(graph: GraphDeployment, role: Role) -> list[dict[str, Any]]:
    ports = {HTTP_PORT: WORKER_PORT}
    if role is Role.ROUTER and graph.spec.router.gateway.enabled:
        ports[EXT_PROC_PORT] = graph.spec.router.gateway.port
    return [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in ports.items()]


def _image(graph: GraphDeployment, spec: ProcessSpec, context: BuildContext) -> str:
    service = graph.spec.services[spec.service]
    is_default = service.image is None and (
        graph.spec.image is None or graph.spec.needs_router_image(service)
    )
    if is_default and context.penstock_image is not None and is_penstock_image(graph, spec.service):
        return context.penstock_image
    return spec.image


def _key_args(graph: GraphDeployment, role: Role) -> list[str]:
    router = graph.spec.router
    if role is not Role.ROUTER or graph.spec.traits.frontend is not None:
        return []
    args = [] if router.auth.api_keys_secret is None else ["--api-keys-file", API_KEYS_FOLDER]
    if router.tiers.enabled and router.tiers.keys_secret is not None:
        args += ["--tier-keys-file", TIER_KEYS_FOLDER]
    return args


def _resources(graph: GraphDeployment, service: str) -> dict[str, Any]:
    resources: dict[str, Any] = {}
    if is_penstock_image(graph, service):
        resources["requests"] = dict(_OWN_REQUESTS)
        if graph.spec.services[service].role is Role.ROUTER:
            resources["limits"] = dict(_ROUTER_LIMITS)
    gpus = gpu_request(graph, service)
    if gpus is not None:
        name, number = gpus
        resources["requests"] = {**resources.get("requests", {}), name: str(number)}
        resources["limits"] = {name: str(number)}
    return resources


def _account(graph: GraphDeployment, role: Role) -> str:
    return child_name(graph.name, ROUTER_SUFFIX if role is Role.ROUTER else WORKER_SUFFIX)


def _asks_the_api(graph: GraphDeployment, role: Role) -> bool:
    """Routers watch EndpointSlices; workers of some runtimes, such as Dynamo's, register themselves as well."""
    return role is Role.ROUTER or bool(runtime_of(graph.spec.runtime).cluster.verbs)


def _with_own_marks(
    graph: GraphDeployment, service: str, template: dict[str, Any], labels: Mapping[str, str]
) -> dict[str, Any]:
    """Set what selectors, budget and rollouts rely on, whatever the overlay made of it."""
    metadata = template.get("metadata", {})
    annotations = dict(metadata.get("annotations", {}))
    spec = dict(template["spec"])
    if graph.spec.services[service].role.is_worker:
        annotations[GPUS_ANNOTATION] = str(gpus_per_pod(graph, service))
        if gpu_ceiling(graph) is not None:
            others = [each for each in spec.get("schedulingGates", []) if each["name"] != BUDGET_GATE]
            spec["schedulingGates"] = [{"name": BUDGET_GATE}, *others]
    elif graph.spec.traits.frontend is None:
        annotations[CONFIG_ANNOTATION] = config_digest(graph)
    marked = {**metadata, "labels": {**metadata.get("labels", {}), **labels}, "annotations": annotations}
    if not annotations:
        del marked["annotations"]
    return {**template, "metadata": marked, "spec": spec}
