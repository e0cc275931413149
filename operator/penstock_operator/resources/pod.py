"""Builds the pod template of one service: process, environment, probes and hooks, merged with the user's podTemplate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, Final

from penstock.api import Environment, GraphDeployment, Role, RouterConfig
from penstock.api.planner import DEFAULT_GPU_BUDGET
from penstock.api.runtimes import RuntimeTraits
from penstock.core.errors import InvalidSpecError, ManifestProblem
from penstock.core.metric_names import VLLM_KV_USAGE, VLLM_RUNNING, VLLM_WAITING
from penstock.core.ports import EVERY_ADDRESS, SIDE_CHANNEL_PORT, WORKER_PORT
from penstock.core.worker_metrics import METRICS_PATH, names_on_page
from penstock.kube.objects.names import (
    API_KEYS_FOLDER,
    BUDGET_GATE,
    CONFIG_ANNOTATION,
    EXT_PROC_PORT,
    GATEWAY_TLS_FOLDER,
    GPUS_ANNOTATION,
    GRAPH_FILE,
    GRAPH_SECRET_VARIABLE,
    HTTP_PORT,
    METRICS_PATH_ANNOTATION,
    SCHEME_ANNOTATION,
    SERVING,
    SERVING_LABEL,
    TIER_KEYS_FOLDER,
    WORKER_AUTH_FOLDER,
    WORKER_TLS_FOLDER,
    child_name,
    status_pool,
)
from penstock.runtimes import (
    PORT,
    ProcessSpec,
    RuntimeContext,
    filled_argv,
    filled_env,
    process_specs,
    runtime_of,
)
from penstock.runtimes.engine_flags import split_of
from penstock.runtimes.protocol import OWN_REQUESTS
from penstock.runtimes.protocol import SIDE_CHANNEL_PORT as SIDE_CHANNEL_PLACEHOLDER
from penstock_operator.resources.accelerators import claimed_gpus
from penstock_operator.resources.metadata import (
    ROUTER_SUFFIX,
    WORKER_SUFFIX,
    BuildContext,
    recommended_labels,
    service_labels,
)
from penstock_operator.resources.node_pool import (
    Mounted,
    folders,
    gpu_request,
    gpus_per_pod,
    home_variables,
    placement,
    pool_of,
    read_only,
)
from penstock_operator.resources.overlay import MAIN, Counted, overlaid
from penstock_operator.resources.privileges import HOST_NAMESPACES, RESTRICTED, container_security
from penstock_operator.resources.router_config import config_digest, graph_secret_variable

PORTS: Mapping[str, int] = {PORT: WORKER_PORT, SIDE_CHANNEL_PLACEHOLDER: SIDE_CHANNEL_PORT}
"""Values of the port placeholders in commands and variables."""

_IDENTITY: Mapping[str, str] = {"POD_IP": "status.podIP", "POD_NAME": "metadata.name"}


def environment(graph: GraphDeployment, spec: ProcessSpec, context: BuildContext) -> list[dict[str, Any]]:
    """Return the environment variables of a service's container, as entries of its ``env``.

    The pod's own address and name come first, because other variables refer to them, such as ``$(POD_IP)``. A name
    that is set twice is listed once, at its first position with its last value.

    Args:
        graph: The graph.
        spec: Process of the service.
        context: Settings from which the objects are built.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, path in {**_IDENTITY, **runtime_of(graph.spec.runtime).cluster.fields}.items():
        found[name] = {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
    pool, is_own = pool_of(graph, spec.service), _is_own(graph, spec.service)
    of_runtime = runtime_of(graph.spec.runtime).pod_environment(graph.spec.services[spec.service].role)
    literal = {**home_variables(pool, is_own=is_own), **of_runtime, **filled_env(spec, PORTS)}
    for name, value in literal.items():
        found[name] = {"name": name, "value": value}
    if spec.role == Role.ROUTER and graph.spec.traits.frontend is None:
        found[GRAPH_SECRET_VARIABLE] = graph_secret_variable(graph, context)
    for each in spec.env_sources:
        found[each.name] = {"name": each.name, "valueFrom": dict(each.value_from or {})}
    return list(found.values())


def _is_own(graph: GraphDeployment, service: str) -> bool:
    """Return whether the service runs Penstock's own program, which writes only below /tmp and finishes its requests at SIGTERM."""
    return graph.spec.runs_penstock(graph.spec.services[service])


def volumes(graph: GraphDeployment, service: str) -> list[Mounted]:
    """Return every volume that the pods of a graph's service have, with its mount in the container, as pairs.

    They are folders to write to, the model cache, and files that ConfigMaps and Secrets contain.
    """
    is_own, is_worker = _is_own(graph, service), graph.spec.services[service].role.is_worker
    found = folders(pool_of(graph, service), is_own=is_own, is_worker=is_worker)
    found += _worker_tls(graph, is_worker=is_worker)
    if not is_own or is_worker:
        return found
    source = {"name": child_name(graph.name, ROUTER_SUFFIX)}
    found.append(read_only("graph", str(PurePosixPath(GRAPH_FILE).parent), configMap=source))
    router = graph.spec.router
    if router.auth.api_keys_secret is not None:
        keys = {"secretName": router.auth.api_keys_secret}
        found.append(read_only("api-keys", API_KEYS_FOLDER, secret=keys))
    if router.tiers.enabled and router.tiers.keys_secret is not None:
        keys = {"secretName": router.tiers.keys_secret}
        found.append(read_only("tier-keys", TIER_KEYS_FOLDER, secret=keys))
    if _has_gateway_secret(router):
        secret = {"secretName": router.gateway.tls.secret}
        found.append(read_only("gateway-tls", GATEWAY_TLS_FOLDER, secret=secret))
    return found


def _worker_tls(graph: GraphDeployment, *, is_worker: bool) -> list[Mounted]:
    """Return the volume with the workers' certificate and key; routers get only the token."""
    tls = graph.spec.engine.tls
    if tls is None:
        return []
    keys = ("tls.crt", "tls.key") if is_worker else (tls.token_key,)
    items = [{"key": key, "path": key} for key in keys if key is not None]
    folder = WORKER_TLS_FOLDER if is_worker else WORKER_AUTH_FOLDER
    source = {"secretName": tls.secret, "items": items}
    return [read_only("worker-tls", folder, secret=source)] if items else []


_STARTUP_PERIOD_S = 2
"""Seconds between startup probes. Chosen: a worker gets requests at most this long after it could take them."""

_LIVENESS_PERIOD_S = 10

_KILL_GRACE_S = 30
"""Termination grace period in seconds after a failed liveness probe: such a process has no requests to finish, while
the pod's own grace period can be many minutes."""


def probes(
    role: Role, path: str, startup_s: float, liveness_s: float, *, scheme: str = "http"
) -> dict[str, Any]:
    """Return the container fields ``startupProbe``, ``readinessProbe`` and ``livenessProbe``.

    Args:
        role: Role of the service; routers are probed more often.
        path: HTTP path that answers 200 while the process can serve.
        startup_s: Maximum seconds from the container's start until the first 200.
        liveness_s: Maximum seconds without a 200 after that, before the container is restarted.
        scheme: ``http`` or ``https``.
    """
    get = {"path": path, "port": HTTP_PORT, **({} if scheme == "http" else {"scheme": scheme.upper()})}
    return {
        "startupProbe": {
            "httpGet": get,
            "periodSeconds": _STARTUP_PERIOD_S,
            "timeoutSeconds": 5,
            "failureThreshold": max(1, math.ceil(startup_s / _STARTUP_PERIOD_S)),
        },
        "readinessProbe": {
            "httpGet": get,
            "periodSeconds": 1 if role is Role.ROUTER else 2,
            "timeoutSeconds": 5,
            "failureThreshold": 3,
        },
        # A worker in a long engine step answers late, so a single timeout of 10 s is not a failure.
        "livenessProbe": {
            "httpGet": get,
            "periodSeconds": _LIVENESS_PERIOD_S,
            "timeoutSeconds": _LIVENESS_PERIOD_S,
            "failureThreshold": math.ceil(liveness_s / _LIVENESS_PERIOD_S),
            "terminationGracePeriodSeconds": _KILL_GRACE_S,
        },
    }


SETTLE_S = 5
"""Wall-clock seconds until every router has seen that the pod is terminating. Chosen: several times the delay of a watch."""

_REQUEST_SERIES = (VLLM_RUNNING, VLLM_WAITING)
"""Gauges that are all zero, together with the runtime's own gauge if it has one, when no request is running or
waiting."""

_LEASE_SERIES = VLLM_KV_USAGE
"""Gauge that is above zero without requests on a prefill worker if blocks are leased, because decode still has to
read them."""

_WAIT_UNTIL_IDLE = f"""\
import %(more)stime, urllib.request
SERIES = %(series)r
time.sleep({SETTLE_S})
idle = 0
while idle < 2:
    try:
        page = urllib.request.urlopen("%(url)s", timeout=10%(context)s).read().decode()
    except Exception as problem:
        if isinstance(getattr(problem, "reason", None), ConnectionRefusedError):
            break
        idle = 0
    else:
        busy = [line for line in page.splitlines() if line.startswith(SERIES) and float(line.split()[-1]) > 0]
        idle = 0 if busy else idle + 1
    time.sleep(1)
"""
"""Script that ends when two readings one second apart find the worker idle, or when the worker no longer listens.

It runs in images that have Python but not Penstock. The pod's grace period limits its duration."""


def lifecycle(
    *,
    finishes_requests: bool,
    grace_s: int,
    keeps_leases: bool = False,
    traits: RuntimeTraits,
    scheme: str = "http",
    is_ipv6: bool = False,
) -> dict[str, Any]:
    """Return the container's lifecycle hooks: a preStop hook that delays SIGTERM; empty if ``grace_s`` leaves no time for it.

    For workers that do not finish their requests at SIGTERM, the hook waits until the worker is idle. For other
    processes it sleeps for a few seconds, until routers have seen that the pod is terminating.

    Args:
        finishes_requests: Whether the process itself finishes its requests at SIGTERM.
        grace_s: The pod's termination grace period in seconds, which includes the hook's duration.
        keeps_leases: Whether the hook must also wait until other workers have read the KV blocks that this worker keeps
            for them (leased blocks). False for decode workers, whose blocks without a request are only a cache for the
            next turn.
        traits: Traits of the runtime, whose workers may have their own gauges.
        scheme: Scheme of the process's HTTP endpoints: ``http`` or ``https``.
        is_ipv6: Whether the process may listen on IPv6 addresses only.
    """
    if not finishes_requests:
        wanted = (*_REQUEST_SERIES, *((_LEASE_SERIES,) if keeps_leases else ()))
        series = tuple(each for name in wanted for each in names_on_page(name, traits.metric_names))
        series += () if traits.request_gauge is None else (traits.request_gauge,)
        is_tls = scheme == "https"
        parameters = {
            "more": "ssl, " if is_tls else "",
            "series": series,
            "url": f"{scheme}://{'[::1]' if is_ipv6 else '127.0.0.1'}:{WORKER_PORT}{traits.metrics_path}",
            "context": ", context=ssl._create_unverified_context()" if is_tls else "",
        }
        return {"preStop": {"exec": {"command": ["python3", "-c", _WAIT_UNTIL_IDLE % parameters]}}}
    settle_s = min(SETTLE_S, grace_s - 1)  # Kubernetes requires less than the grace period
    return {"preStop": {"sleep": {"seconds": settle_s}}} if settle_s > 0 else {}


_ROUTER_LIMITS: Final = {"memory": "2Gi"}
"""Resource limits of a router. Chosen: four times the memory for the request bodies that a router stores, and for the
data derived from them; a podTemplate can raise it."""


_ROUTER_CPU: Final = "1"
"""CPU request of a router with real workers: a router is one process on one core, which relays 34,000 tokens/s
(docs/capacity.md), and a router without CPU time delays all requests. It is independent of the number of workers,
whose changes must not restart routers."""


def has_budget(graph: GraphDeployment, context: BuildContext) -> bool:
    """Return whether a GPU budget limits the graph's workers, from its manifest or from a GPU pool (which ``context`` says).

    The workers' pods then wait at a scheduling gate until the operator removes it.
    """
    planner = graph.spec.planner
    return planner.enabled and (context.in_pool or planner.max_gpu_budget is not None)


def stated_gpu_ceiling(raw: Mapping[str, Any]) -> int | None:
    """Return the GPU limit in a GraphDeployment, whose specification may be invalid; None if it has no limit.

    A graph outside of GPU pools that does not name a limit has the default limit.
    """
    planner = raw["spec"].get("planner") or {}
    default = DEFAULT_GPU_BUDGET if status_pool(raw) is None else None
    ceiling = planner.get("maxGpuBudget", default)
    return ceiling if isinstance(ceiling, int) and planner.get("enabled", True) else None


def processes(graph: GraphDeployment, context: BuildContext) -> dict[str, ProcessSpec]:
    """Return the process (command, arguments, environment) that runs in the pods of each service, by service name.

    The planner is not included, because one planner serves all graphs. ``context`` gives namespace and address family.
    """
    runtime = RuntimeContext(
        python="python",
        graph_file=GRAPH_FILE,
        discovery="kubernetes",
        namespace=f"{context.namespace}-{graph.name}",  # the runtime's internal namespace, one per graph
        host=EVERY_ADDRESS if context.is_ipv6 else "0.0.0.0",  # noqa: S104 - a pod is reached at its address
        own_host=EVERY_ADDRESS,
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
    """Return the pod template (metadata and pod specification) of a service.

    Args:
        graph: The graph.
        spec: Process of the service.
        context: Settings from which the objects are built.
        follows: Whether the template is for the followers (all pods except the first) of a multi-node replica;
            followers answer no requests, so they have no probes and belong to no Service.
        more_args: Command-line arguments to insert before those that the user set.

    Raises:
        InvalidSpecError: The service's podTemplate cannot be merged into the template, or uses privileges that the
            operator does not allow.
    """
    service = graph.spec.services[spec.service]
    path = f"spec.services.{spec.service}.podTemplate"
    own_labels, is_worker = service_labels(graph, spec.service), service.role.is_worker
    if is_worker and not follows:
        own_labels[SERVING_LABEL] = SERVING
    built = {
        "metadata": {
            "labels": {**recommended_labels(graph.name, service.role.value), **own_labels},
            "annotations": {},
        },
        "spec": {
            "containers": [_container(graph, spec, context, follows=follows, more_args=more_args)],
            "volumes": [volume for volume, _ in volumes(graph, spec.service)],
            "serviceAccountName": child_name(graph.name, WORKER_SUFFIX if is_worker else ROUTER_SUFFIX),
            # Routers watch EndpointSlices; workers of some runtimes register themselves at the API server.
            "automountServiceAccountToken": not is_worker
            or bool(runtime_of(graph.spec.runtime).cluster.verbs),
            "terminationGracePeriodSeconds": service.termination_grace_period_seconds,
            **RESTRICTED,
            **placement(graph, spec.service),
        },
    }
    resource, _ = gpu_request(graph, spec.service) or ("", 0)
    gpus, held = gpus_per_pod(graph, spec.service), claimed_gpus(graph, spec.service, context.claimed_gpus)
    if held and held != gpus:
        message = (
            f"hold {held} GPUs in each pod, but the budget counts {gpus}; set gpusPerReplica: "
            f"{held * service.nodes_per_replica}"
        )
        raise InvalidSpecError([ManifestProblem(path=f"{path}.spec.resourceClaims", message=message)])
    counted = Counted(0 if held else gpus, resource, "gpusPerReplica", context.gpu_resources)
    template = overlaid(built, service.pod_template, path, counted=counted, allowed=context.allowed)
    _refuse_uncounted_split(graph, spec.service, template)
    return _with_own_marks(graph, spec.service, template, own_labels, context)


def _refuse_uncounted_split(graph: GraphDeployment, name: str, template: Mapping[str, Any]) -> None:
    """Refuse an engine whose own arguments split it over more GPUs than the budget counts, such as those of a claim."""
    service = graph.spec.services[name]
    (main,) = [each for each in template["spec"]["containers"] if each["name"] == MAIN]
    argv = main.get("args")
    if not service.role.is_worker or graph.spec.models_gpus or not isinstance(argv, list):
        return
    sizes = split_of([str(word) for word in argv])
    if math.prod(sizes) > service.gpus:
        message = (
            f"split an engine over {math.prod(sizes)} GPUs (tensor {sizes[0]} x pipeline {sizes[1]}), but the budget counts"
            f" {service.gpus}; remove the flags and set gpusPerReplica: {math.prod(sizes)}"
        )
        raise InvalidSpecError([ManifestProblem(path=f"spec.services.{name}.args", message=message)])


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
    is_own = _is_own(graph, spec.service)
    container: dict[str, Any] = {
        "name": MAIN,
        "image": _image(graph, spec, context),
        "imagePullPolicy": context.image_pull_policy,
        "command": [argv[0]],
        "args": [*argv[1:split], *_key_args(graph, service.role), *more_args, *argv[split:]],
        "env": environment(graph, spec, context),
        "envFrom": [each.to_manifest() for each in spec.env_from],
        "ports": _ports(graph, service.role),
        "resources": _resources(graph, spec.service, context),
        "securityContext": container_security(is_root_read_only=is_own),
        "volumeMounts": [mount for _, mount in volumes(graph, spec.service)],
    }
    if not follows:
        container |= probes(
            service.role, spec.health_path or "/health", spec.startup_s, spec.liveness_s, scheme=spec.scheme
        )
        grace_s = service.termination_grace_period_seconds
        container["lifecycle"] = lifecycle(
            finishes_requests=is_own or not service.role.is_worker,
            grace_s=grace_s,
            keeps_leases=service.role is Role.PREFILL,
            traits=graph.spec.traits,
            scheme=spec.scheme,
            is_ipv6=context.is_ipv6,
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
    if is_default and context.penstock_image is not None and _is_own(graph, spec.service):
        return context.penstock_image
    return spec.image


def _key_args(graph: GraphDeployment, role: Role) -> list[str]:
    router = graph.spec.router
    if role is not Role.ROUTER or graph.spec.traits.frontend is not None:
        return []
    args = [] if router.auth.api_keys_secret is None else ["--api-keys-file", API_KEYS_FOLDER]
    if router.tiers.enabled and router.tiers.keys_secret is not None:
        args += ["--tier-keys-file", TIER_KEYS_FOLDER]
    if _has_gateway_secret(router):
        args += ["--ext-proc-tls", GATEWAY_TLS_FOLDER]
    return args


def _has_gateway_secret(router: RouterConfig) -> bool:
    gateway = router.gateway
    return gateway.enabled and gateway.tls.enabled and gateway.tls.secret is not None


def _resources(graph: GraphDeployment, service: str, context: BuildContext) -> dict[str, Any]:
    role, spec = graph.spec.services[service].role, graph.spec
    if role is Role.ROUTER and _is_own(graph, service):
        cpu = {} if spec.models_gpus else {"cpu": _ROUTER_CPU}
        return {"requests": {**OWN_REQUESTS, **cpu}, "limits": dict(_ROUTER_LIMITS)}
    requests = runtime_of(spec.runtime).pod_requests(spec, role, gpus_per_pod(graph, service))
    # A pod whose claims hold its GPUs must not request the extended resource: it would get twice as many GPUs.
    asked = None if claimed_gpus(graph, service, context.claimed_gpus) else gpu_request(graph, service)
    gpus = {} if asked is None else {asked[0]: str(asked[1])}
    found = {"requests": {**requests, **gpus}, "limits": gpus}
    return {key: value for key, value in found.items() if value}


def _with_own_marks(
    graph: GraphDeployment,
    service: str,
    template: dict[str, Any],
    labels: Mapping[str, str],
    context: BuildContext,
) -> dict[str, Any]:
    """Set the labels, annotations and gates that selectors, budget and rollouts rely on, whatever the overlay changed."""
    metadata = template.get("metadata", {})
    annotations = dict(metadata.get("annotations", {}))
    # Explicitly false, so that an edit by someone else is detected; the API server does not store false.
    spec = {**dict.fromkeys(HOST_NAMESPACES, False), **template["spec"]}
    if graph.spec.services[service].role.is_worker:
        annotations[GPUS_ANNOTATION] = str(gpus_per_pod(graph, service))
        if graph.spec.traits.metrics_path != METRICS_PATH:
            annotations[METRICS_PATH_ANNOTATION] = graph.spec.traits.metrics_path
        if graph.spec.engine.tls is not None:
            annotations[SCHEME_ANNOTATION] = graph.spec.worker_scheme
        if has_budget(graph, context):
            others = [each for each in spec.get("schedulingGates", []) if each["name"] != BUDGET_GATE]
            spec["schedulingGates"] = [{"name": BUDGET_GATE}, *others]
    elif graph.spec.traits.frontend is None:
        annotations[CONFIG_ANNOTATION] = config_digest(graph)
    own_metadata = {
        **metadata,
        "labels": {**metadata.get("labels", {}), **labels},
        "annotations": annotations,
    }
    if not annotations:
        del own_metadata["annotations"]
    return {**template, "metadata": own_metadata, "spec": spec}
