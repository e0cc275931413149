"""A graph becomes the statefile that its arbiter starts from, and an entry the command, ports and environment of a process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from penstock.api import GatewayFailureMode, GraphDeployment, GraphSpec, Role
from penstock.core.errors import ConfigError, InvalidSpecError, ManifestProblem
from penstock.core.flags import flag, time_scale
from penstock.core.local_state import EntryState
from penstock.local.liveness import MARK_VARIABLE
from penstock.local.ports import choose_port, is_free
from penstock.local.statefile import (
    ArbiterInfo,
    GpuShortageError,
    ProcessEntry,
    StateFile,
    base_name,
    request_replica,
)
from penstock.runtimes import (
    CACHE_FOLDER,
    PLANNER_ROLE,
    PORT,
    ProcessSpec,
    RuntimeContext,
    fill,
    process_specs,
    runtime_of,
)

GPU_VARIABLE = "CUDA_VISIBLE_DEVICES"


def ports_for(entry: ProcessEntry, entries: Iterable[ProcessEntry]) -> dict[str, int]:
    """Return a port for each placeholder: the router's stays, a worker's stays while no other process took it."""
    taken = {port for other in entries for port in other.ports.values()}
    ports: dict[str, int] = {}
    for placeholder in entry.placeholders:
        kept = entry.ports.get(placeholder)
        if kept is None or not (entry.role == Role.ROUTER or is_free(kept)):
            kept = choose_port(taken)
        ports[placeholder] = kept
        taken.add(kept)
    return ports


def argv_of(entry: ProcessEntry) -> list[str]:
    """Return the command with the chosen ports filled in."""
    return [fill(argument, entry.ports) for argument in entry.cmd]


def environment_of(
    entry: ProcessEntry, statefile: str, cache: Path, inherited: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables to set on top of ``inherited``: the entry's own, its GPUs and the arbiter's mark.

    Args:
        entry: Of the process, its ports chosen.
        statefile: Path of the graph's.
        cache: The process' own folder for what it compiles.
        inherited: The arbiter's variables.
    """
    values: dict[str, str | int] = {**entry.ports, CACHE_FOLDER: str(cache)}
    environment = {name: fill(value, values) for name, value in entry.env.items()}
    environment[MARK_VARIABLE] = statefile
    if entry.is_worker:
        environment[GPU_VARIABLE] = visible_devices(entry.gpus, inherited.get(GPU_VARIABLE))
    return environment


def visible_devices(gpus: tuple[int, ...], inherited: str | None) -> str:
    """Return ``CUDA_VISIBLE_DEVICES`` for ids of the allocator.

    The ids count the devices that the arbiter itself may see, so an inherited list is indexed.
    """
    labels = [label.strip() for label in inherited.split(",") if label.strip()] if inherited else []
    return ",".join(labels[gpu] if gpu < len(labels) else str(gpu) for gpu in gpus)


_MAKE = "`penstock make-model` makes a small one (docs/vllm.md)"


def check_model(spec: GraphSpec) -> None:
    """Refuse a model that is written as a path and is neither folder nor file: its workers would end at their start."""
    name = spec.model.name
    if _is_absent(spec) and name.startswith(("/", "./", "../")):
        raise InvalidSpecError(
            [ManifestProblem(path="spec.model.name", message=f"{name} is not a folder or file here; {_MAKE}")]
        )


def model_warnings(spec: GraphSpec) -> Iterator[ManifestProblem]:
    """Hint at a model that may be meant as a folder: few ids on Hugging Face have no slash."""
    name = spec.model.name
    if _is_absent(spec) and "/" not in name:
        message = f"{name} is not a folder here, so workers will look for it on Hugging Face; {_MAKE}"
        yield ManifestProblem(path="spec.model.name", message=message)


def _is_absent(spec: GraphSpec) -> bool:
    return not spec.traits.is_simulated and not Path(spec.model.name).exists()


DEFAULT_GPUS = 8
"""GPUs of the host when neither --gpus nor the graph's budget sets it: the planner document's default budget."""


@dataclass(frozen=True, slots=True)
class PoolPlace:
    """Where a graph begins in a GPU pool: its name, its GPUs, the ids that earlier graphs start on, and its bound of drains."""

    name: str
    gpus: int
    taken: frozenset[int] = frozenset()
    reclaim_s: float | None = None


@dataclass(frozen=True, slots=True)
class UpOptions:
    """The options of the command line, whose help is that of the fields; and the place in a pool, None: in none."""

    namespace: str | None = flag("Name of the graph on this machine.", unset="metadata.name")
    speed: float = time_scale(more=", for simulated workers")
    port: int = flag("The router's TCP port on 127.0.0.1.", default=8000, ge=1, le=65535)
    gpus: int | None = flag("GPUs of this machine.", ge=0, unset="planner.maxGpuBudget, else 8")
    log_dir: Path | None = flag(
        "Folder of logs, ledger and dashboard.", path="folder", unset="~/.penstock/log/NAMESPACE"
    )
    timeout_s: float | None = flag(
        "Maximum time to wait for the graph to become ready, real seconds.",
        name="--timeout",
        gt=0,
        unset="the longest startupTimeoutSeconds, at least 300",
    )
    with_planner: bool = flag("Do not start the graph's planner.", name="--no-planner", default=True)
    planner: Mapping[str, str] = field(default_factory=dict)
    pool: PoolPlace | None = None


def initial_state(
    graph: GraphDeployment,
    options: UpOptions,
    context: RuntimeContext,
    *,
    log_dir: Path,
    environment: Mapping[str, str],
) -> StateFile:
    """Return the first statefile of a graph: all replicas requested, their GPUs allocated."""
    specs = [
        spec for spec in process_specs(graph, context) if spec.role != PLANNER_ROLE or options.with_planner
    ]
    if not any(spec.role == Role.ROUTER for spec in specs):
        raise ConfigError(
            f"{graph.name}: spec.services: no service with role: router, which `penstock up` needs; "
            "add `frontend: {role: router}`"
        )
    if graph.spec.router.gateway.failure_mode is GatewayFailureMode.OPEN:
        raise ConfigError(
            f"{graph.name}: spec.router.gateway.failureMode: FailOpen, but on one machine there is no InferencePool that "
            "says so to a Gateway; remove it, and set failure_mode_allow in Envoy's own configuration"
        )
    if graph.spec.engine.tls is not None and graph.spec.engine.tls.folder is None:
        raise ConfigError(
            f"{graph.name}: spec.engine.tls.folder: null, and on one machine workers take tls.crt and tls.key from there; "
            "name the folder"
        )
    state = StateFile(_arbiter(graph, specs, options, context, str(log_dir)), {})
    _check_gpus(specs, state.arbiter)
    has_router = False
    for spec in specs:
        _check(graph.name, spec, environment)
        entry = _entry(spec, options.port)
        if spec.role == Role.ROUTER and has_router:
            continue
        has_router = has_router or spec.role == Role.ROUTER
        state = _with_replicas(state, spec, entry, options.pool)
    return state


def _check_gpus(specs: Iterable[ProcessSpec], arbiter: ArbiterInfo) -> None:
    """Refuse a graph whose first replicas do not fit; nothing runs yet that would make room."""
    asked = [(spec.service, spec.replicas, spec.gpus) for spec in specs if spec.gpus]
    needed = sum(replicas * gpus for _, replicas, gpus in asked)
    if needed > arbiter.budget:
        bound = "planner.maxGpuBudget" if arbiter.budget < arbiter.gpus else "--gpus"
        parts = ", ".join(f"{service} {replicas} x {gpus}" for service, replicas, gpus in asked)
        raise ConfigError(
            f"{bound}: {arbiter.budget}; the graph starts with {needed} GPUs ({parts}); give {needed}, or fewer replicas"
        )


def _arbiter(
    graph: GraphDeployment,
    specs: list[ProcessSpec],
    options: UpOptions,
    context: RuntimeContext,
    log_dir: str,
) -> ArbiterInfo:
    ceiling = graph.spec.planner.max_gpu_budget if graph.spec.planner.enabled else None
    gpus = options.gpus if options.gpus is not None else (ceiling or DEFAULT_GPUS)
    if options.pool is not None:  # until its planner claims more, a graph holds what it starts with
        gpus, ceiling = options.pool.gpus, sum(spec.replicas * spec.gpus for spec in specs)
    return ArbiterInfo(
        namespace=context.namespace,
        graph=context.followed_file or context.graph_file,
        model=graph.spec.served_name,
        speed=options.speed,
        log_dir=log_dir,
        gpus=gpus,
        budget=gpus if ceiling is None else min(gpus, ceiling),
        router_url=f"http://127.0.0.1:{options.port}",
        runtime=graph.spec.runtime,
        discovery_folder=str(context.discovery_folder)
        if runtime_of(graph.spec.runtime).has_discovery_folder
        else None,
        pool="" if options.pool is None else options.pool.name,
        reclaim_s=None if options.pool is None else options.pool.reclaim_s,
        planner_log_dir=context.log_dir if any(spec.role == PLANNER_ROLE for spec in specs) else None,
    )


def _with_replicas(
    state: StateFile, spec: ProcessSpec, entry: ProcessEntry, pool: PoolPlace | None
) -> StateFile:
    name = base_name(state.arbiter.namespace, spec.service)
    if not entry.is_worker:
        return state.with_entry(name, replace(entry, order=state.next_order()))
    state = state.with_entry(name, replace(entry, state=EntryState.STOPPED))
    for _ in range(spec.replicas):
        try:
            state, _ = request_replica(state, entry, () if pool is None else pool.taken)
        except GpuShortageError as exc:
            place = f"spec.services.{spec.service}.replicas"
            raise ConfigError(f"{place}: {spec.replicas}: one replica {exc}") from exc
    return state


def _entry(spec: ProcessSpec, router_port: int) -> ProcessEntry:
    is_router = spec.role == Role.ROUTER
    return ProcessEntry(
        service=spec.service,
        role=spec.role,
        cmd=spec.argv,
        env=dict(spec.env),
        url=f"http://127.0.0.1:{router_port}" if is_router else None,
        placeholders=spec.ports,
        ports={PORT: router_port} if is_router else {},
        health_path=spec.health_path,
        metrics_path=spec.metrics_path,
        scheme=spec.scheme,
        gpus_per_replica=spec.gpus,
        grace_s=spec.grace_s,
        startup_s=spec.startup_s,
        liveness_s=spec.liveness_s,
        stall_s=spec.stall_s,
        takes_socket=spec.takes_socket,
    )


def _check(graph: str, spec: ProcessSpec, environment: Mapping[str, str]) -> None:
    place = f"{graph}: spec.services.{spec.service}"
    if spec.nodes > 1:
        raise ConfigError(f"{place}.nodesPerReplica: {spec.nodes}, but this is one machine; set 1")
    for source in spec.env_sources:
        if source.name not in environment:
            raise ConfigError(
                f"{place}.env: {source.name} takes its value from Kubernetes (valueFrom); "
                f"export {source.name} before `penstock up`, or give a literal value"
            )
