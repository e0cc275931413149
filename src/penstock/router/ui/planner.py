"""What a router learns of its graph's planner: from the planner's state file here, from the graph's status on Kubernetes.

Neither lets the router command anything, and what is not there is shown as missing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

import orjson

from penstock.api import GraphSpec, PlannerConfig, PlannerMode, Role
from penstock.core.errors import PenstockError
from penstock.core.local_state import ARBITER_KEY, PLANNER_STATE_FILE
from penstock.core.printable import printable
from penstock.router.settings import RouterSettings

_READ_S: Final = 2.0
"""Real seconds for which the API server's answer is good, and for which it is waited for. Chosen."""
_STALE_REAL_S: Final = 10.0
"""Chosen: a planner writes at each of its ticks, but at most five times a second."""
_STALE_PULLS: Final = 3
"""Chosen: ticks that may be late before a planner counts as gone."""
_SHOWN_CHANGES: Final = 20
"""Chosen: as many as the planner's state file has."""
_WRONG: Final = (KeyError, TypeError, ValueError, AttributeError)
"""What reading somebody else's data may raise."""


@dataclass(frozen=True, slots=True)
class PlannerState:
    """A planner, and the graph that it plans, as the page shows them.

    Attributes:
        standing: ``current``, ``stale``, ``missing`` or ``off``.
        words: Why it is not current, or what it says of itself.
        rules: Mode, thresholds and targets that it decides by; None: unknown.
        gpus_per_replica: By role; None: unknown.
        budget: GPUs allowed; None: no ceiling, or unknown.
        phase: What it does; empty: unknown.
        desired: Replicas by role; empty: unknown.
        next_decision_s: Simulated seconds; None: unknown, or while it adjusts.
        elapsed_s: Simulated seconds since its first start; None: unknown.
        changes: Newest first, each with ``id``, ``sentence``, ``reason`` and ``at_s``, simulated seconds since the
            planner's first start (None: unknown).
        newest: Sentences of the newest decision, whether it changed anything or not.
    """

    standing: str
    words: str
    rules: Mapping[str, Any] | None = None
    gpus_per_replica: Mapping[str, int] | None = None
    budget: int | None = None
    phase: str = ""
    desired: Mapping[str, int] = field(default_factory=dict)
    next_decision_s: float | None = None
    elapsed_s: float | None = None
    changes: tuple[Mapping[str, Any], ...] = ()
    newest: tuple[str, ...] = ()

    @classmethod
    def of_graph(cls, standing: str, words: str, graph: GraphSpec | None) -> PlannerState:
        """Return what a graph shows of a planner without a report of its own."""
        if graph is None:
            return cls(standing, words)
        planner = graph.planner if graph.planner.enabled else None
        return cls(
            standing,
            words,
            None if planner is None else rules_of(planner),
            gpus_of(graph),
            None if planner is None else planner.max_gpu_budget,
        )


def rules_of(planner: PlannerConfig) -> dict[str, Any]:
    """Return what a planner without options of its own decides by, as its state file has it."""
    is_sla = planner.mode == PlannerMode.SLA
    return {
        "mode": planner.mode,
        "kv": [planner.decode_kv_scale_down_threshold, planner.decode_kv_scale_up_threshold],
        "queue": [planner.prefill_queue_scale_down_threshold, planner.prefill_queue_scale_up_threshold],
        "is_queue_per_worker": planner.prefill_queue_per_worker,
        "ttft_s": planner.sla.ttft_seconds if is_sla else None,
        "itl_s": planner.sla.itl_seconds if is_sla else None,
    }


def gpus_of(graph: GraphSpec) -> dict[str, int] | None:
    """Return the GPUs of one replica by role; None without workers."""
    if graph.engine_gpus is None:
        return None
    prefill, decode = graph.engine_gpus
    return {Role.PREFILL.value: prefill, Role.DECODE.value: decode, Role.AGGREGATED.value: decode}


class PlannerReader(Protocol):
    """Where the planner's state comes from."""

    async def read(self) -> PlannerState:
        """Return it as it is now; never raises, and waits no longer than `_READ_S`."""


class NoPlanner:
    """A graph that no planner scales, or whose planner the router does not know."""

    def __init__(self, words: str, graph: GraphSpec | None = None) -> None:
        """Take why."""
        self._state = PlannerState.of_graph("off", words, graph)

    async def read(self) -> PlannerState:
        """Return that there is none."""
        return self._state


@runtime_checkable
class GraphSource(Protocol):
    """Discovery on Kubernetes, as far as the page needs it."""

    async def graph(self) -> dict[str, Any]:
        """Return the graph's object.

        Raises:
            ClusterError: it cannot be read.
        """


def planner_reader(settings: RouterSettings, discovery: object) -> PlannerReader:
    """Return where a router learns of its planner.

    Args:
        settings: The router's.
        discovery: The router's; on Kubernetes it is asked for the graph's object, of which the router's own manifest
            holds neither planner nor GPUs.
    """
    graph = settings.graph
    if isinstance(discovery, GraphSource):
        return GraphStatusReader(discovery)
    if graph is None:
        return NoPlanner("a fixed fleet: the router knows no graph")
    if not graph.planner.enabled:
        return NoPlanner("spec.planner.enabled is false", graph)
    if settings.statefile is None:
        return NoPlanner("a fixed fleet (--worker): nothing scales it", graph)
    pull_real_s = graph.planner.metric_pulling_interval_seconds / settings.speed
    return StateFileReader(settings.statefile, graph, pull_real_s=pull_real_s)


class StateFileReader:
    """Reads what the local planner writes beside its ledger, whose folder the statefile names."""

    def __init__(self, statefile: Path, graph: GraphSpec, *, pull_real_s: float) -> None:
        """Name the local backend's statefile and its graph; ``pull_real_s`` is between two ticks of the planner."""
        self._statefile = statefile
        self._graph = graph
        self._stale_s = max(_STALE_REAL_S, _STALE_PULLS * pull_real_s)

    async def read(self) -> PlannerState:
        """Read the two files, a few KiB each."""
        try:
            folder = orjson.loads(self._statefile.read_bytes())[ARBITER_KEY].get("planner_log_dir")
            if folder is None:
                return PlannerState.of_graph("off", "started without one (--no-planner)", self._graph)
            state = printable(orjson.loads((Path(folder) / PLANNER_STATE_FILE).read_bytes()))
            found = planner_state(state, age_s=time.time() - float(state["wall_s"]), stale_s=self._stale_s)
            return replace(found, gpus_per_replica=gpus_of(self._graph))
        except FileNotFoundError:
            return self._missing("the planner has not written of itself yet")
        except (OSError, *_WRONG) as exc:
            return self._missing(f"the planner's state file is not readable: {exc!r}")

    def _missing(self, words: str) -> PlannerState:
        return PlannerState.of_graph("missing", words, self._graph)


def planner_state(data: Mapping[str, Any], *, age_s: float, stale_s: float) -> PlannerState:
    """Return what a planner's state file says. Pure.

    Args:
        data: Content of the file.
        age_s: Real seconds since it was written.
        stale_s: Age from which the planner counts as gone.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: it is no such file.
    """
    is_stale = age_s > stale_s
    next_s = data.get("next_decision_s")
    newest = data.get("newest") or {}
    return PlannerState(
        standing="stale" if is_stale else "current",
        words=f"the planner last wrote {age_s:,.0f} s ago (real): it hangs or is gone" if is_stale else "",
        rules=data["rules"],
        budget=data["max_gpu_budget"],
        phase=str(data["phase"]),
        desired={str(role): int(count) for role, count in data["desired"].items()},
        next_decision_s=None if next_s is None else max(0.0, float(next_s) - float(data["at_s"])),
        elapsed_s=float(data["elapsed_s"]),
        changes=tuple(
            {"id": each["id"], "at_s": each["at_s"], "sentence": role["sentence"], "reason": role["reason"]}
            for each in reversed(data["decisions"])
            for role in each["roles"].values()
            if role["current"] != role["desired"]
        ),
        newest=tuple(role["sentence"] for role in newest.get("roles", {}).values()),
    )


class GraphStatusReader:
    """Reads the graph's object, in whose status the planner writes its last change.

    The status says neither when the planner last ran nor what it changed before: changes are remembered from the
    router's start.
    """

    def __init__(self, source: GraphSource) -> None:
        """Take where the object comes from."""
        self._source = source
        self._state = PlannerState("missing", "the graph's status was not read yet")
        self._read_s = float("-inf")
        self._lock = asyncio.Lock()

    async def read(self) -> PlannerState:
        """Ask the API server, unless it has just answered or failed."""
        async with self._lock:
            if time.monotonic() - self._read_s < _READ_S:
                return self._state
            try:
                async with asyncio.timeout(_READ_S):
                    graph = printable(await self._source.graph())
                self._state = graph_planner_state(graph, before=self._state)
            except (PenstockError, TimeoutError, *_WRONG) as exc:
                why = "no answer in time" if isinstance(exc, TimeoutError) else str(exc).partition("\n")[0]
                standing = "stale" if self._state.phase else "missing"
                self._state = replace(
                    self._state, standing=standing, words=f"the graph's status is not readable: {why}"
                )
            self._read_s = time.monotonic()
            return self._state


def graph_planner_state(graph: Mapping[str, Any], *, before: PlannerState) -> PlannerState:
    """Return what a graph's object says of its planner. Pure.

    Args:
        graph: The GraphDeployment.
        before: What was said before, whose changes are kept.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: it is no such object.
    """
    spec, status = GraphSpec.model_validate(graph["spec"]), graph.get("status") or {}
    planner = status.get("planner") or {}
    changes = before.changes
    sentence, decision = planner.get("lastDecision"), planner.get("decisionId")
    if sentence and (not changes or changes[0]["id"] != decision):
        change = {"id": decision, "at_s": None, "sentence": sentence, "reason": ""}
        changes = (change, *changes)[:_SHOWN_CHANGES]
    if not spec.planner.enabled:
        return PlannerState.of_graph("off", "spec.planner.enabled is false", spec)
    found = PlannerState.of_graph("missing", "no planner has written to the graph's status", spec)
    desired: dict[str, int] = {}
    for name, service in (status.get("services") or {}).items():
        if name in spec.workers:
            role = spec.workers[name].role.value
            desired[role] = desired.get(role, 0) + int(service.get("desired", 0))
    found = replace(found, desired=desired, changes=changes)
    conditions = (each for each in status.get("conditions") or () if each["type"] == "PlannerActive")
    condition = next(conditions, None)
    if condition is None:
        return found
    return replace(
        found,
        standing="current" if condition["status"] == "True" else "stale",
        words=str(condition["message"]),
        phase=str(condition["reason"]),
    )
