"""Which engines a graph could run, how each is started to be measured, and what a profile will do; touches no network.

A worker that prefills or decodes in a graph is measured as one that does both: alone it needs no partner, and each phase is
measured while the other rests.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.api import GraphDeployment, Role, ServiceSpec
from penstock.api.planner import PlannerConfig
from penstock.core.errors import ConfigError
from penstock.core.flags import flag
from penstock.engine import profiles
from penstock.engine.serve.settings import ServeSettings
from penstock.performance.recommend import Targets
from penstock.performance.sweep import KvTransferCost
from penstock.profiler.points import DEFAULT_MAX_CONTEXT, PHASES, Grid, grid_of
from penstock.profiler.simulated import simulated_settings, transfer_of
from penstock.runtimes import ProcessSpec, RuntimeContext, masked_argv, process_specs

_MAX_CONCURRENCY = 256
"""Requests in one batch where the graph sets none: the default of vLLM and of simulated workers."""
_LARGEST_TP = 64


@dataclass(frozen=True, slots=True)
class Server:
    """One server that is measured.

    Attributes:
        process: What is started; None: it runs already, or is simulated.
        speed: Its time scale.
        phases: What is measured of it.
        simulated: Of an engine that is measured in virtual time, without a process.
    """

    process: ProcessSpec | None
    speed: float
    phases: tuple[Role, ...]
    simulated: ServeSettings | None = None


@dataclass(frozen=True, slots=True)
class PlannedEngine:
    """One engine size to measure.

    Attributes:
        conditions: What its points depend on, to compare with an earlier run's.
        servers: Measured in turn.
        kv_tokens: KV cache of simulated workers, tokens; None where the engine has to say it.
        transfer: Of a prompt to simulated workers that decode apart; None where it is not known.
    """

    gpus: int
    name: str
    conditions: dict[str, str]
    servers: tuple[Server, ...]
    kv_tokens: int | None = None
    transfer: KvTransferCost | None = None


def _candidates(graph: GraphDeployment, config: ProfileConfig, gpus: int) -> tuple[PlannedEngine, ...]:
    """Return every engine size that is to be measured, by GPUs."""
    spec = graph.spec
    if spec.traits.frontend is not None:
        raise ConfigError(
            f"{graph.name}: spec.runtime: {spec.runtime}'s workers answer through its own frontend only; serve the graph and"
            " profile that with --endpoint URL --tp N"
        )
    by_size = _profiles_of(graph) if spec.traits.is_simulated else None
    chosen = _sizes(graph, gpus, config.sizes, by_size)
    return tuple(_planned(graph, size, (by_size or {}).get(size)) for size in chosen)


def measured_services(graph: GraphDeployment) -> dict[Role, tuple[str, ServiceSpec]]:
    """Return the services that prefill and decode; the same one twice in an aggregated graph.

    Raises:
        ConfigError: the graph has no workers of a phase, several services of one, or replicas of several nodes.
    """
    found: dict[Role, tuple[str, ServiceSpec]] = {}
    for phase in PHASES:
        services = graph.spec.services_of(phase) or graph.spec.services_of(Role.AGGREGATED)
        if len(services) != 1:
            names = ", ".join(services) or "none"
            raise ConfigError(
                f"{graph.name}: spec.services: {names} for {phase.value}, where one service is profiled; keep one"
            )
        name, service = next(iter(services.items()))
        if service.nodes_per_replica > 1:
            raise ConfigError(
                f"{graph.name}: spec.services.{name}.nodesPerReplica: {service.nodes_per_replica}, but one machine"
                " starts engines of one node; serve the graph and profile it with --endpoint URL --tp N"
            )
        found[phase] = (name, service)
    return found


def family(name: str) -> dict[int, str]:
    """Return the shipped latency profiles that differ from ``name`` in tensor parallelism alone, by its size.

    Raises:
        ConfigError: there is no such profile.
    """
    own = profiles.load(name)
    if name not in profiles.names():
        return {own.tensor_parallel: name}
    found = {}
    for other_name in profiles.names():
        other = profiles.load(other_name)
        if _kind(other) == _kind(own):
            found[other.tensor_parallel] = other_name
    return dict(sorted(found.items()))


def _kind(profile: profiles.Profile) -> tuple[str, ...]:
    return profile.gpu, profile.model, profile.precision, profile.prefill.kind, profile.decode.kind


def _profiles_of(graph: GraphDeployment) -> dict[int, dict[Role, str]]:
    by_phase = {
        phase: family(service.profile or graph.spec.engine.profile)
        for phase, (_, service) in measured_services(graph).items()
    }
    common = set.intersection(*(set(found) for found in by_phase.values()))
    return {size: {phase: found[size] for phase, found in by_phase.items()} for size in sorted(common)}


def _sizes(
    graph: GraphDeployment, gpus: int, sizes: Sequence[int] | None, by_size: dict[int, dict[Role, str]] | None
) -> list[int]:
    known = list(by_size) if by_size is not None else [2**power for power in range(_LARGEST_TP.bit_length())]
    fitting = [size for size in known if size <= gpus]
    if sizes is None:
        if not fitting:
            smallest = (
                f"the smallest engine takes {min(known)}" if known else "no latency profile fits both roles"
            )
            raise ConfigError(
                f"{graph.name}: no engine fits {gpus} GPUs: {smallest}; raise --gpus or --max-gpus"
            )
        return fitting
    for size in sizes:
        if size > gpus:
            raise ConfigError(
                f"--tp: {size} exceeds the {gpus} GPUs; take less, or raise --gpus or --max-gpus"
            )
        if by_size is not None and size not in by_size:
            listed = ", ".join(map(str, known)) or "none"
            raise ConfigError(
                f"--tp: {size}: no latency profile of {graph.spec.engine.profile}'s model has that size; there is {listed}"
            )
    return sorted(set(sizes))


def _planned(graph: GraphDeployment, size: int, by_phase: Mapping[Role, str] | None) -> PlannedEngine:
    """Return one size; two workers that start alike are one, because loading a model takes minutes.

    Real workers have no latency profiles. Simulated ones are not started: their points are found in virtual time.
    """
    conditions: dict[str, str] = {}
    servers: list[Server] = []
    names: set[str] = set()
    for phase in PHASES:
        profile = None if by_phase is None else by_phase[phase]
        process = _alone(graph, phase, size, profile=profile)
        conditions[phase.value] = " ".join(masked_argv(process.argv)[1:])
        names |= set(process.env)
        if profile is not None:
            conditions[phase.value] += ", in virtual time"
            servers.append(Server(None, 1.0, (phase,), simulated_settings(graph.spec, profile)))
        elif servers and _is_alike(servers[-1].process, process):
            servers = [Server(process, 1.0, PHASES)]
        else:
            servers.append(Server(process, 1.0, (phase,)))
    conditions["environment"] = json.dumps(sorted(names))
    decoder = servers[-1].simulated
    if by_phase is None or decoder is None:
        return PlannedEngine(size, f"TP{size}", conditions, tuple(servers))
    return PlannedEngine(
        size,
        f"TP{size} ({by_phase[Role.DECODE]})",
        conditions,
        tuple(servers),
        decoder.engine.longest_tokens(),
        transfer_of(decoder) if graph.spec.is_disaggregated else None,
    )


def _is_alike(one: ProcessSpec | None, other: ProcessSpec) -> bool:
    return one is not None and (one.argv, one.env) == (other.argv, other.env)


def _alone(graph: GraphDeployment, phase: Role, gpus: int, *, profile: str | None) -> ProcessSpec:
    """Return one worker that does both phases, without what would bound or disturb a measurement."""
    spec = graph.spec
    name, service = measured_services(graph)[phase]
    worker = service.model_copy(
        update={
            "role": Role.AGGREGATED,
            "replicas": 1,
            "scaling": None,
            "gpus_per_replica": gpus,
            "profile": profile or service.profile,
            "startup_seconds": 0,
        }
    )
    update = {
        "services": {name: worker},
        "engine": spec.engine.model_copy(update={"request_limit": None, "tls": None}),
        "router": spec.router.model_copy(update={"kv_events_port": None}),
        "planner": PlannerConfig(enabled=False),
    }
    alone = graph.model_copy(update={"spec": spec.model_copy(update=update)})
    context = RuntimeContext(
        python=sys.executable, graph_file="", discovery="profile", namespace=graph.name, speed=1.0
    )
    (process,) = process_specs(alone, context)
    return process


@dataclass(frozen=True, slots=True)
class ProfileConfig:
    """Everything a user can choose about a profile; the help of its fields is the command line's.

    Attributes:
        graph: Whose workers are started; exactly one of this and ``endpoint``.
    """

    targets: Targets
    output_dir: Path
    graph: GraphDeployment | None = None
    endpoint: str | None = flag(
        "Measure an OpenAI server that runs already, instead; say its size with --tp.",
        metavar="URL",
        default=None,
    )
    sizes: tuple[int, ...] | None = flag(
        "Tensor-parallel sizes to measure.",
        name="--tp",
        metavar="N[,N...]",
        is_separated=True,
        ge=1,
        unset="powers of two (simulated: sizes that have a latency profile) that fit the GPUs",
    )
    gpus: int | None = flag(
        "GPUs of this machine.", ge=1, unset="detected; for simulated workers the graph's maxGpuBudget"
    )
    max_gpus: int | None = flag("Maximum number of GPUs of one engine.", ge=1, unset="all")
    max_context: int | None = flag(
        "Longest prompt plus output to measure, tokens.",
        ge=256,
        unset="16384, or twice --isl plus --osl if that is more",
    )
    max_concurrency: int | None = flag(
        "Maximum number of requests in flight.", ge=1, unset="the graph's maxRunningRequests, or 256"
    )
    kv_tokens: int | None = flag("KV cache, tokens.", ge=1, unset="the engine says it")
    speed: float | None = flag("Time scale, a factor, of the server at --endpoint.", gt=0, unset="1")
    model: str | None = flag("Model to ask --endpoint for.", unset="the first that it lists")
    api_key: str | None = flag(
        "File with --endpoint's bearer token, which is never written to another.",
        default=None,
        key_variable="PENSTOCK_API_KEY",
    )
    timeout_s: float = flag("Longest request, simulated seconds.", default=600.0, gt=0)


@dataclass(frozen=True, slots=True)
class ProfilePlan:
    """What will be measured.

    Attributes:
        model: Name of the model that the profile is of; None: the server says it.
        note: Which engines were chosen for the user, and why; may be empty.
    """

    config: ProfileConfig
    engines: tuple[PlannedEngine, ...]
    model: str | None
    note: str

    @property
    def is_aggregated(self) -> bool:
        """Whether one service of the graph does both phases."""
        graph = self.config.graph
        return graph is not None and not graph.spec.is_disaggregated

    def grid(self, kv_tokens: float) -> Grid:
        """Return the points of an engine with a KV cache of this many tokens.

        Raises:
            ConfigError: a request of the target's lengths does not fit.
        """
        config, graph = self.config, self.config.graph
        targets = config.targets
        longest = config.max_context or max(DEFAULT_MAX_CONTEXT, 2 * (targets.isl + targets.osl))
        if graph is not None and graph.spec.model.context_tokens is not None:
            longest = min(longest, graph.spec.model.context_tokens)
        running = graph.spec.engine.max_running_requests if graph is not None else None
        most = config.max_concurrency or running or _MAX_CONCURRENCY
        return grid_of(targets, kv_tokens=int(kv_tokens), max_concurrency=most, max_context=longest)

    def describe(self) -> dict[str, Any]:
        """Return the plan as JSON: points by engine, none where it must say first what its cache holds.

        Raises:
            ConfigError: a request of the target's lengths does not fit.
        """
        engines = []
        for each in self.engines:
            kv_tokens = self.config.kv_tokens or each.kv_tokens
            grid = Grid([], {}, 0) if kv_tokens is None else self.grid(kv_tokens)
            batches = {str(context): counts for context, counts in grid.batches.items()}
            points = {"prompt_tokens": grid.prompts, "in_flight_by_context": batches}
            engines.append({"gpus": each.gpus, "name": each.name, "conditions": each.conditions, **points})
        return {"dry_run": True, "note": self.note, "engines": engines}


def plan_profile(config: ProfileConfig, *, detect: Callable[[], int | None]) -> ProfilePlan:
    """Return what will be measured; ``detect`` returns the number of GPUs of this machine, None where it is unknown.

    Raises:
        ConfigError: the options contradict each other, or cannot be measured here.
    """
    if (config.graph is None) == (config.endpoint is None):
        raise ConfigError(
            "give one of --config GRAPH, whose workers are started, and --endpoint URL, a server that runs"
        )
    if config.endpoint is not None:
        return _endpoint_plan(config, config.endpoint)
    assert config.graph is not None  # noqa: S101 - checked above
    graph = config.graph
    for spelling, value in (
        ("--model", config.model),
        ("--speed", config.speed),
        ("--api-key-file, PENSTOCK_API_KEY", config.api_key),
    ):
        if value is not None:
            raise ConfigError(f"{spelling}: belongs to --endpoint; leave it out with --config")
    gpus, note = _gpus(config, graph, detect)
    services = dict(measured_services(graph).values())
    given = [name for name, service in services.items() if service.args]
    if graph.spec.traits.is_simulated and given:
        note += f"; the args of {' and '.join(given)} are not simulated, spec.engine is"
    return ProfilePlan(config, _candidates(graph, config, gpus), graph.spec.model.name, note)


def _endpoint_plan(config: ProfileConfig, url: str) -> ProfilePlan:
    if config.sizes is None or len(config.sizes) != 1:
        raise ConfigError("--tp: say with how many GPUs the engine at --endpoint runs, as one number")
    for spelling, value in (("--gpus", config.gpus), ("--max-gpus", config.max_gpus)):
        if value is not None:
            raise ConfigError(f"{spelling}: belongs to --config; the engine at --endpoint runs already")
    conditions = {"endpoint": url, "model": config.model or "", "speed": f"{config.speed or 1:g}"}
    servers = (Server(None, config.speed or 1.0, PHASES),)
    engine = PlannedEngine(config.sizes[0], f"TP{config.sizes[0]} at {url}", conditions, servers)
    return ProfilePlan(config, (engine,), config.model, "")


def _gpus(config: ProfileConfig, graph: GraphDeployment, detect: Callable[[], int | None]) -> tuple[int, str]:
    found, origin = config.gpus, "--gpus"
    if found is None and graph.spec.traits.is_simulated:
        found, origin = graph.spec.planner.max_gpu_budget, "the graph's maxGpuBudget"
    if found is None:
        found, origin = detect(), "found on this machine"
    if found is None:
        raise ConfigError(
            "--gpus: nvidia-smi finds no GPU here; give their number, or profile a server that runs"
            " elsewhere with --endpoint URL --tp N"
        )
    if config.max_gpus is not None and config.max_gpus < found:
        return config.max_gpus, f"engines of at most {config.max_gpus} GPUs (--max-gpus)"
    return found, f"engines of at most {found} GPUs ({origin})"
