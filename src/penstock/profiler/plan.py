"""What a profile will do, from what the user asked for: which engines, under which conditions; touches no network."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.api import GraphDeployment, Role
from penstock.core.errors import ConfigError
from penstock.core.flags import flag
from penstock.engine import profiles
from penstock.performance.recommend import Targets
from penstock.profiler.candidates import (
    DEFAULT_MAX_CONCURRENCY,
    Candidate,
    WorkerSetup,
    candidates,
    measured_services,
)
from penstock.profiler.points import DEFAULT_MAX_CONTEXT, Limits, Phase


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
        unset="powers of two, or the latency profiles there are, that fit",
    )
    gpus: int | None = flag(
        "GPUs of this machine.", ge=1, unset="detected; for simulated workers the graph's maxGpuBudget"
    )
    max_gpus: int | None = flag("Most GPUs of one engine.", ge=1, unset="all")
    max_context: int | None = flag(
        "Longest prompt plus output to measure, tokens.",
        ge=256,
        unset="16384, or twice --isl plus --osl if that is more",
    )
    max_concurrency: int | None = flag(
        "Most requests in flight.", ge=1, unset="the graph's maxRunningRequests, or 256"
    )
    kv_tokens: int | None = flag("KV cache, tokens.", ge=1, unset="the engine says it")
    speed: float | None = flag(
        "Time scale of simulated workers while they decode, or of the server at --endpoint; prompts are timed at 1.",
        gt=0,
        unset="4; 1 with --endpoint",
    )
    model: str | None = flag("Model to ask --endpoint for.", unset="the first that it lists")
    api_key: str | None = flag(
        "File with --endpoint's bearer token, which is never written to another.",
        default=None,
        key_variable="PENSTOCK_API_KEY",
    )
    timeout_s: float = flag("Longest request, simulated seconds.", default=600.0, gt=0)


@dataclass(frozen=True, slots=True)
class PlannedEngine:
    """One engine size to measure.

    Attributes:
        conditions: What its points depend on.
        candidate: How it is started; None: it runs.
    """

    gpus: int
    name: str
    conditions: dict[str, str]
    candidate: Candidate | None = None

    def servers(self) -> list[tuple[WorkerSetup | None, tuple[Phase, ...]]]:
        """Return what is started in turn, and what is measured of it."""
        if self.candidate is None:
            return [(None, (Phase.PREFILL, Phase.DECODE))]
        prefill, decode = self.candidate.prefill, self.candidate.decode
        if prefill.is_same_as(decode):
            return [(decode, (Phase.PREFILL, Phase.DECODE))]
        return [(prefill, (Phase.PREFILL,)), (decode, (Phase.DECODE,))]


@dataclass(frozen=True, slots=True)
class ProfilePlan:
    """What will be measured.

    Attributes:
        model: Name of the model that the profile is of; None: the server says it.
        notes: What was chosen for the user, and why.
    """

    config: ProfileConfig
    engines: tuple[PlannedEngine, ...]
    model: str | None
    notes: tuple[str, ...]

    @property
    def is_aggregated(self) -> bool:
        """Whether one service of the graph does both phases."""
        graph = self.config.graph
        return graph is not None and not graph.spec.is_disaggregated

    def limits(self, kv_tokens: float) -> Limits:
        """Return what is measured of an engine at most."""
        config, graph = self.config, self.config.graph
        targets = config.targets
        longest = config.max_context or max(DEFAULT_MAX_CONTEXT, 2 * (targets.isl + targets.osl))
        if graph is not None and graph.spec.model.context_tokens is not None:
            longest = min(longest, graph.spec.model.context_tokens)
        running = graph.spec.engine.max_running_requests if graph is not None else None
        most = config.max_concurrency or running or DEFAULT_MAX_CONCURRENCY
        return Limits(int(kv_tokens), most, longest)


def plan_profile(config: ProfileConfig, *, detect: Callable[[], int | None]) -> ProfilePlan:
    """Return what will be measured.

    Args:
        config: As asked.
        detect: Returns the number of GPUs of this machine; None: it cannot be told.

    Raises:
        ConfigError: what is asked for contradicts itself, or cannot be measured here.
    """
    if (config.graph is None) == (config.endpoint is None):
        raise ConfigError(
            "give one of --config GRAPH, whose workers are started, and --endpoint URL, a server that runs"
        )
    if config.endpoint is not None:
        return _endpoint_plan(config, config.endpoint)
    assert config.graph is not None  # noqa: S101 - checked above
    graph = config.graph
    for spelling, value in (("--model", config.model), ("--api-key-file, PENSTOCK_API_KEY", config.api_key)):
        if value is not None:
            raise ConfigError(f"{spelling}: belongs to --endpoint; leave it out with --config")
    gpus, note = _gpus(config, graph, detect)
    chosen = candidates(graph, python=sys.executable, gpus=gpus, sizes=config.sizes, speed=config.speed)
    engines = tuple(PlannedEngine(each.gpus, each.name, each.conditions(), each) for each in chosen)
    notes = (note, *_simulated_notes(graph, chosen))
    return ProfilePlan(config, engines, graph.spec.model.name, notes)


def _endpoint_plan(config: ProfileConfig, url: str) -> ProfilePlan:
    if config.sizes is None or len(config.sizes) != 1:
        raise ConfigError("--tp: say with how many GPUs the engine at --endpoint runs, as one number")
    for spelling, value in (("--gpus", config.gpus), ("--max-gpus", config.max_gpus)):
        if value is not None:
            raise ConfigError(f"{spelling}: belongs to --config; the engine at --endpoint runs already")
    conditions = {"endpoint": url, "model": config.model or "", "speed": f"{config.speed or 1:g}"}
    engine = PlannedEngine(config.sizes[0], f"TP{config.sizes[0]} at {url}", conditions)
    return ProfilePlan(config, (engine,), config.model, ())


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


def _simulated_notes(graph: GraphDeployment, chosen: tuple[Candidate, ...]) -> tuple[str, ...]:
    if not graph.spec.traits.is_simulated:
        return ()
    names = ", ".join(each.name for each in chosen)
    _, service = measured_services(graph)[Role.DECODE]
    own = profiles.load(service.profile or graph.spec.engine.profile)
    note = f"sizes from the latency profiles of {own.model} on {own.gpu}, {own.precision}: {names}"
    return (note,)
