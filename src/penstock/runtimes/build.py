"""A graph becomes the list of its processes: routers first, then workers, then the planner.

Pure: the interpreter, paths, host and speed come in the context; ports and GPU ids are chosen by what starts the processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from penstock.api.enums import KvConnector, Role
from penstock.api.graph import GraphDeployment, GraphSpec
from penstock.api.graph_rules import PLANNER_SERVICE
from penstock.api.service import ServiceSpec
from penstock.core.errors import ConfigError, ManifestProblem
from penstock.core.simulated_tokens import SIMULATED
from penstock.core.worker_metrics import METRICS_PATH
from penstock.runtimes.engine_flags import MOONCAKE_CONNECTOR, connectors
from penstock.runtimes.protocol import (
    ENGINE_LIVENESS_S,
    LIVENESS_S,
    PLANNER_ROLE,
    PORT,
    ProcessSpec,
    RuntimeContext,
    WorkerCommand,
    runtime_of,
)

_NIXL = "Nixl"
"""Begin of the names of vLLM's connectors whose prefill answers where the KV is."""
PLANNER_GRACE_S = 30.0
"""The planner ends between two ticks; chosen as one adjustment interval."""


def process_specs(graph: GraphDeployment, context: RuntimeContext) -> list[ProcessSpec]:
    """Return every kind of process that ``graph`` runs.

    Raises:
        ConfigError: The speed is not 1, though the runtime's workers run in real time.
    """
    _check_speed(graph.spec, context)
    specs = []
    for name, service in sorted(graph.spec.services.items(), key=lambda item: item[1].role.is_worker):
        if service.role.is_worker:
            command = runtime_of(graph.spec.runtime).worker(graph.spec, service, context)
        else:
            command = _router(graph.spec, service, context)
        specs.append(_service_process(graph.spec, name, service, context, command))
    if graph.spec.planner.enabled:
        specs.append(_planner(graph, context))
    return specs


def _check_speed(spec: GraphSpec, context: RuntimeContext) -> None:
    if context.speed != 1 and not spec.models_gpus:
        raise ConfigError(
            f"--speed: {context.speed:g}, but workers of runtime {spec.runtime} run in real time; "
            "use --speed 1 or runtime: simulated"
        )


def _router(spec: GraphSpec, service: ServiceSpec, context: RuntimeContext) -> WorkerCommand:
    if spec.traits.frontend is not None:
        return runtime_of(spec.runtime).frontend(spec, service, context)
    gateway = spec.router.gateway
    verb = ["pick", "--ext-proc", str(gateway.port)] if gateway.enabled else ["serve"]
    argv = [context.python, "-m", "penstock.cli", "router", *verb, "--graph", context.graph_file]
    if context.followed_file is not None:
        argv += ["--follow", context.followed_file]
    argv += ["--discovery", context.discovery, "--host", context.own_host, "--port", "{port}"]
    return WorkerCommand(argv=(*argv, "--speed", f"{context.speed:g}"), takes_socket=True)


def _planner(graph: GraphDeployment, context: RuntimeContext) -> ProcessSpec:
    argv = [context.python, "-m", "penstock.cli", "planner", "run", "--graph", context.graph_file]
    argv += ["--namespace", context.namespace, "--environment", context.environment.value]
    argv += ["--speed", f"{context.speed:g}", "--metrics-port", f"{{{PORT}}}"]
    if context.log_dir is not None:
        argv += ["--log-dir", context.log_dir]
    argv += context.planner_args
    return ProcessSpec(
        name=f"{context.namespace}_{PLANNER_SERVICE}",
        service=PLANNER_SERVICE,
        role=PLANNER_ROLE,
        argv=tuple(argv),
        ports=(PORT,),
        health_path=None,
        image=graph.spec.planner_image,
        startup_s=60.0,
        grace_s=PLANNER_GRACE_S,
    )


def _service_process(
    spec: GraphSpec,
    name: str,
    service: ServiceSpec,
    context: RuntimeContext,
    command: WorkerCommand,
) -> ProcessSpec:
    shared = spec if service.role.is_worker else None
    variables = {each.name: each for each in (*(shared.env if shared else ()), *service.env)}
    replicas = service.replicas_in(context.environment)
    literals = {each.name: each.value or "" for each in variables.values() if each.value_from is None}
    return ProcessSpec(
        name=f"{context.namespace}_{name}",
        service=name,
        role=service.role.value,
        argv=(*command.argv, *service.args),
        env={**command.env, **literals},
        env_sources=tuple(each for each in variables.values() if each.value_from is not None),
        env_from=(*(shared.env_from if shared else ()), *service.env_from),
        ports=command.ports,
        gpus=service.gpus,
        nodes=service.nodes_per_replica,
        replicas=replicas,
        bounds=(replicas, replicas) if service.scaling is None else service.replica_bounds,
        health_path=command.health_path,
        image=spec.image_of(name),
        startup_s=service.startup_timeout_seconds,
        grace_s=float(service.termination_grace_period_seconds),
        liveness_s=_liveness_s(spec, service),
        stall_s=spec.stall_real_s,
        metrics_path=METRICS_PATH if spec.runs_penstock(service) else spec.traits.metrics_path,
        scheme=spec.worker_scheme if service.role.is_worker else "http",
        takes_socket=command.takes_socket,
    )


def _liveness_s(spec: GraphSpec, service: ServiceSpec) -> float:
    if service.liveness_timeout_seconds is not None:
        return service.liveness_timeout_seconds
    return LIVENESS_S if spec.runs_penstock(service) else ENGINE_LIVENESS_S


def connector_warnings(graph: GraphDeployment) -> Iterator[ManifestProblem]:
    """Yield the services whose own arguments replace the connector by which the router hands KV from prefill to decode."""
    if graph.spec.traits.frontend is not None:
        return
    is_mooncake = graph.spec.engine.kv_connector is KvConnector.MOONCAKE
    known = MOONCAKE_CONNECTOR if is_mooncake else _NIXL
    for name, service in graph.spec.workers.items():
        given = connectors(service.args)
        if service.role is Role.AGGREGATED or given is None or any(each.startswith(known) for each in given):
            continue
        named = "MooncakeConnector" if is_mooncake else "NixlConnector"
        remedy = f"remove --kv-transfer-config, or name {named} in it, alone or within a MultiConnector"
        if MOONCAKE_CONNECTOR in given:
            remedy = "set engine.kvConnector: mooncake"
        message = (
            f"connector {given[0]} gives the router no kv_transfer_params that decode can read, so every prompt is computed "
            f"twice; {remedy}"
        )
        yield ManifestProblem(f"spec.services.{name}.args", message)


def missing_extras(graph: GraphDeployment, *, with_planner: bool = True) -> list[ManifestProblem]:
    """Return the settings whose packages the graph's router or planner would import and that are not installed here."""
    planner, router = graph.spec.planner, graph.spec.router
    has_router = graph.spec.traits.frontend is None  # else its router is the engine's frontend
    is_read = with_planner and planner.enabled and planner.metrics.prometheus_url is not None
    has_tokenizer = has_router and router.tokenizer not in {None, SIMULATED}
    has_events = has_router and router.kv_events_port is not None
    needs = {
        "planner.metrics.prometheusUrl": (is_read, "prometheus", ("prometheus_api_client",)),
        "router.tokenizer": (has_tokenizer, "tokenizer", ("jinja2", "tokenizers")),
        "router.kvEventsPort": (has_events, "kv-events", ("zmq",)),
        "router.gateway.enabled": (
            has_router and router.gateway.enabled,
            "gateway",
            ("grpc", "envoy", "cryptography"),
        ),
    }
    problems = []
    for path, (is_needed, extra, modules) in needs.items():
        missing = ", ".join(module for module in modules if is_needed and find_spec(module) is None)
        if missing:
            process, remedy = path.partition(".")[0], f"pip install 'penstock[{extra}]'"
            message = f"the {process} needs {missing}, not installed here; {remedy}"
            problems.append(ManifestProblem(f"spec.{path}", message))
    return problems
