"""Which engines a graph could run, and how each is started to be measured: alone, doing both phases, one per role. Pure.

A worker that prefills or decodes in a graph is measured as one that does both: alone it needs no partner, and each phase is
measured while the other rests.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from penstock.api import GraphDeployment, Role, ServiceSpec
from penstock.api.planner import PlannerConfig
from penstock.core.errors import ConfigError
from penstock.engine import profiles
from penstock.runtimes import ProcessSpec, RuntimeContext, masked_argv, process_specs

PREFILL_SPEED: Final = 1.0
"""Simulated TTFTs last tens of milliseconds, and each millisecond of the client counts N-fold at speed N."""
DECODE_SPEED: Final = 4.0
"""Simulated ITLs are means over many tokens, so that the client's time falls out. Chosen: two cores keep up with it."""
WARM_SPEEDUP: Final = 100.0
"""Prompts that simulated workers compute before decode is measured take so much less than by their profile. Nothing of
them is measured, and of three 70B sizes they were half of the time. Chosen: they then take a second or two."""
_STREAM_INTERVAL: Final = 8
"""Tokens per event of simulated workers. Chosen: hundreds of streams then cost the measuring machine little."""
DEFAULT_MAX_CONCURRENCY: Final = 256
"""Requests in one batch where the graph does not say: the default of vLLM and of simulated workers."""
_LARGEST_TP = 64


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """One worker process that is measured."""

    process: ProcessSpec
    speed: float

    def is_same_as(self, other: WorkerSetup) -> bool:
        """Tell whether both start the same program in the same way, whatever service they are of."""
        mine, its = self.process, other.process
        return (mine.argv, mine.env, self.speed) == (its.argv, its.env, other.speed)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One engine size.

    Attributes:
        prefill: Whose TTFT is measured.
        decode: Whose ITL is measured.
        profile: Latency profile of simulated workers, for the graph that is written back; None for others.
    """

    gpus: int
    name: str
    prefill: WorkerSetup
    decode: WorkerSetup
    profile: str | None = None

    def conditions(self) -> dict[str, str]:
        """Return what a measurement depends on, to compare with an earlier run's."""
        return {
            "prefill": _shown(self.prefill),
            "decode": _shown(self.decode),
            "environment": json.dumps(sorted(set(self.prefill.process.env) | set(self.decode.process.env))),
        }


def candidates(
    graph: GraphDeployment, *, python: str, gpus: int, sizes: Sequence[int] | None, speed: float | None
) -> tuple[Candidate, ...]:
    """Return every engine size that is to be measured, by GPUs.

    Args:
        graph: Valid.
        python: Interpreter that has Penstock installed.
        gpus: GPUs of this machine, or what a simulated graph may hold.
        sizes: Tensor-parallel sizes; None: all that fit.
        speed: Time scale of simulated workers while they decode; None: `DECODE_SPEED`.

    Raises:
        ConfigError: the graph's workers cannot be started alone, or no size fits.
    """
    spec = graph.spec
    if spec.traits.frontend is not None:
        raise ConfigError(
            f"{graph.name}: spec.runtime: {spec.runtime}'s workers answer through its own frontend only; serve the graph and"
            " profile that with --endpoint URL --tp N"
        )
    if speed is not None and not spec.traits.is_simulated:
        raise ConfigError(
            f"--speed: {speed:g}, but workers of runtime {spec.runtime} run in real time; leave it out"
        )
    by_size = _profiles_of(graph) if spec.traits.is_simulated else None
    chosen = _sizes(graph, gpus, sizes, by_size)
    return tuple(_candidate(graph, size, by_size, python, speed or DECODE_SPEED) for size in chosen)


def measured_services(graph: GraphDeployment) -> dict[Role, tuple[str, ServiceSpec]]:
    """Return the services that prefill and decode; the same one twice in an aggregated graph.

    Raises:
        ConfigError: the graph has no workers of a phase, several services of one, or replicas of several nodes.
    """
    found: dict[Role, tuple[str, ServiceSpec]] = {}
    for phase in (Role.PREFILL, Role.DECODE):
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


def _candidate(
    graph: GraphDeployment,
    size: int,
    by_size: dict[int, dict[Role, str]] | None,
    python: str,
    decode_speed: float,
) -> Candidate:
    is_simulated = by_size is not None
    setups = {}
    for phase, (name, service) in measured_services(graph).items():
        profile = by_size[size][phase] if by_size is not None else None
        speed = 1.0 if not is_simulated else PREFILL_SPEED if phase is Role.PREFILL else decode_speed
        args = ("--prefill-speedup", f"{WARM_SPEEDUP:g}") if is_simulated and phase is Role.DECODE else ()
        alone = _alone(graph, name, service, size, profile, args=args)
        context = RuntimeContext(
            python=python, graph_file="", discovery="profile", namespace=graph.name, speed=speed
        )
        (process,) = process_specs(alone, context)
        setups[phase] = WorkerSetup(process, speed)
    profile = by_size[size][Role.DECODE] if by_size is not None else None
    name = f"TP{size}" if profile is None else f"TP{size} ({profile})"
    return Candidate(size, name, setups[Role.PREFILL], setups[Role.DECODE], profile)


def _alone(
    graph: GraphDeployment,
    name: str,
    service: ServiceSpec,
    gpus: int,
    profile: str | None,
    *,
    args: tuple[str, ...],
) -> GraphDeployment:
    """Return a graph of one worker that does both phases, without what would bound or disturb a measurement."""
    spec = graph.spec
    worker = service.model_copy(
        update={
            "role": Role.AGGREGATED,
            "replicas": 1,
            "scaling": None,
            "gpus_per_replica": gpus,
            "profile": profile or service.profile,
            "startup_seconds": 0,
            "args": (*service.args, *args),
        }
    )
    engine: dict[str, object] = {"request_limit": None}
    if spec.traits.is_simulated:
        engine["stream_interval_tokens"] = max(_STREAM_INTERVAL, spec.engine.stream_interval_tokens)
    update = {
        "services": {name: worker},
        "engine": spec.engine.model_copy(update=engine),
        "router": spec.router.model_copy(update={"kv_events_port": None}),
        "planner": PlannerConfig(enabled=False),
    }
    return graph.model_copy(update={"spec": spec.model_copy(update=update)})


def _shown(setup: WorkerSetup) -> str:
    return f"{' '.join(masked_argv(setup.process.argv)[1:])} at speed {setup.speed:g}"
