"""Reads the state of the graph's planner: from its state file on this machine, or from the graph's status on Kubernetes.

The router cannot command the planner by either; missing values are shown as missing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import orjson

from penstock.api import GraphSpec, Role
from penstock.core.errors import PenstockError
from penstock.core.findings import full_disks, planner_faults
from penstock.core.http.own_lag import PatientTimeout
from penstock.core.local_state import ARBITER_KEY, PLANNER_STATE_FILE
from penstock.core.printable import printable
from penstock.kube.objects.names import status_pool
from penstock.router.discovery.statefile import Discovery
from penstock.router.settings import RouterSettings

_READ_S: Final = 2.0
"""Real seconds for which a response of the API server is reused, and the timeout of a request to it. Chosen."""
_STALE_REAL_S: Final = 10.0
"""Real seconds after which the planner's state counts as stale. Chosen: a planner writes at each of its ticks, but at most five
times a second."""
_STALE_PULLS: Final = 3
"""Chosen: number of ticks that a planner can miss before it counts as gone."""
MALFORMED_ERRORS: Final = (KeyError, TypeError, ValueError, AttributeError)
"""Exceptions that reading another process's data can raise."""


@dataclass(frozen=True, slots=True)
class ShownPlanner:
    """The state of a planner and its graph, as the live page (``/ui``) shows it; None and empty values are unknown.

    Attributes:
        status: ``current``; ``stale``: too old, or the planner reports that it is not running; ``missing``: never read;
            ``off``: the graph has no planner.
        message: Text for the page: why the state is not current, or the planner's own message.
        rules: Mode, thresholds and targets of the planner's decisions.
        gpus_per_replica: Number of GPUs per replica, by role.
        budget: Maximum number of GPUs; None also if there is no maximum.
        phase: Phase of the planner in one word.
        desired: Desired replicas, by role.
        next_decision_s: Time until the next decision in simulated seconds; None also while the planner carries out a
            decision.
        elapsed_s: Simulated seconds since the planner's first start.
        changes: Changes, newest first, each with ``id``, ``sentence``, ``reason``, ``at_s`` (simulated seconds since the
            planner's first start; None if unknown), and on Kubernetes ``time`` (RFC 3339; empty if unknown).
        newest: Sentences that explain the newest decision, whether or not it changed anything.
        problems: Problems that impair the planner's scaling.
        silent_real_s: Real seconds since the planner last wrote its state, if it should have written again since; else
            None.
        pool: The GPU pool in the graph's status; None if the graph is in none.
    """

    status: str
    message: str
    rules: Mapping[str, Any] | None = None
    gpus_per_replica: Mapping[str, int] | None = None
    budget: int | None = None
    phase: str = ""
    desired: Mapping[str, int] = field(default_factory=dict)
    next_decision_s: float | None = None
    elapsed_s: float | None = None
    changes: tuple[Mapping[str, Any], ...] = ()
    newest: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    silent_real_s: float | None = None
    pool: Mapping[str, Any] | None = None

    @classmethod
    def of_graph(cls, status: str, message: str, graph: GraphSpec) -> ShownPlanner:
        """Return the state that is known from a graph's manifest alone, without the planner's own state.

        ``status`` says how current the state is, and ``message`` why; both become the attributes of the same names.
        """
        gpus = None
        if graph.engine_gpus is not None:
            prefill, decode = graph.engine_gpus
            gpus = {Role.PREFILL.value: prefill, Role.DECODE.value: decode, Role.AGGREGATED.value: decode}
        planner = graph.planner
        if not planner.enabled:
            return cls(status, message, None, gpus)
        rules = {
            "mode": planner.mode,
            "kv": [planner.decode_kv_scale_down_threshold, planner.decode_kv_scale_up_threshold],
            "queue": [planner.prefill_queue_scale_down_threshold, planner.prefill_queue_scale_up_threshold],
            "is_queue_per_worker": planner.prefill_queue_per_worker,
            "ttft_s": graph.slo.ttft_seconds,
            "itl_s": graph.slo.itl_seconds,
        }
        return cls(status, message, rules, gpus, planner.max_gpu_budget)


class PlannerReader:
    """Returns a planner's state for the live page (``/ui``): here always the same one, for a graph without a planner.

    Subclasses read the state of a running planner.
    """

    def __init__(self, state: ShownPlanner) -> None:
        self._state = state

    async def read(self) -> ShownPlanner:
        """Return the planner's present state; never raises, and takes 2 real seconds at most."""
        return self._state


def planner_reader(settings: RouterSettings, discovery: Discovery) -> PlannerReader:
    """Return the reader for the planner's state that fits the router's settings.

    On Kubernetes the graph's object is read through discovery, because the router's own manifest contains neither planner nor
    GPUs.
    """
    graph = settings.graph
    if settings.kubernetes is not None:
        return GraphStatusReader(discovery)
    if graph is None:
        return PlannerReader(ShownPlanner("off", "a fixed fleet: the router knows no graph"))
    if not graph.planner.enabled:
        return PlannerReader(ShownPlanner.of_graph("off", "spec.planner.enabled is false", graph))
    if settings.statefile is None:
        message = "a fixed fleet (--worker): nothing scales it"
        return PlannerReader(ShownPlanner.of_graph("off", message, graph))
    pull_real_s = graph.planner.metric_pulling_interval_seconds / settings.speed
    return StateFileReader(settings.statefile, graph, pull_real_s=pull_real_s)


class StateFileReader(PlannerReader):
    """Reads the state file that a local planner writes next to its ledger (the log of its decisions).

    The graph's statefile (in which the local backend lists the graph's processes) names the folder of both.
    """

    def __init__(self, statefile: Path, graph: GraphSpec, *, pull_real_s: float) -> None:
        """Create the reader.

        Args:
            statefile: Statefile of the local backend.
            graph: The graph.
            pull_real_s: Interval between two ticks of the planner, in real seconds.
        """
        super().__init__(ShownPlanner.of_graph("missing", "", graph))
        self._statefile = statefile
        self._stale_s = max(_STALE_REAL_S, _STALE_PULLS * pull_real_s)

    async def read(self) -> ShownPlanner:
        """Return the planner's state, read from the planner's state file, whose folder the graph's statefile names.

        A full disk of either file is added to the state's problems.
        """
        found, folder = self._read()
        disks = {self._statefile.parent, *([Path(folder)] if folder else [])}
        faults = planner_faults(full_disks(disks), found.silent_real_s, found.problems)
        return replace(found, problems=faults)

    def _read(self) -> tuple[ShownPlanner, str | None]:
        """Return the content of the planner's file, and the folder that the statefile names for it (None if unknown)."""
        folder: str | None = None
        try:
            folder = orjson.loads(self._statefile.read_bytes())[ARBITER_KEY].get("planner_log_dir")
            if folder is None:
                off = replace(self._state, status="off", message="started without one (--no-planner)")
                return off, None
            state = printable(orjson.loads((Path(folder) / PLANNER_STATE_FILE).read_bytes()))
            found = planner_state(state, age_s=time.time() - float(state["wall_s"]), stale_s=self._stale_s)
            return replace(found, gpus_per_replica=self._state.gpus_per_replica), folder
        except FileNotFoundError:
            message = "the planner has not written of itself yet"
        except (OSError, *MALFORMED_ERRORS) as exc:
            message = f"the planner's state file is not readable: {exc!r}"
        return replace(self._state, message=message), folder


def planner_state(data: Mapping[str, Any], *, age_s: float, stale_s: float) -> ShownPlanner:
    """Return the state of a planner that ``data`` contains, the JSON object of the planner's state file. Pure.

    The file was written ``age_s`` real seconds ago; above ``stale_s`` real seconds the state counts as stale.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: the data are not those of such a file.
    """
    is_stale = age_s > stale_s
    next_s = data.get("next_decision_s")
    newest = data.get("newest") or {}
    return ShownPlanner(
        status="stale" if is_stale else "current",
        message="",
        silent_real_s=age_s if is_stale else None,
        rules=data["rules"],
        budget=data["max_gpu_budget"],
        phase=str(data["phase"]),
        desired={str(role): int(count) for role, count in data["desired"].items()},
        next_decision_s=None if next_s is None or is_stale else max(0.0, float(next_s) - float(data["at_s"])),
        elapsed_s=float(data["elapsed_s"]),
        changes=tuple(
            {"id": each["id"], "at_s": each["at_s"], "sentence": role["sentence"], "reason": role["reason"]}
            for each in reversed(data["decisions"])
            for role in each["roles"].values()
            if role["current"] != role["desired"]
        ),
        newest=tuple(role["sentence"] for role in newest.get("roles", {}).values()),
        problems=tuple(map(str, data.get("problems", ()))),
    )


class GraphStatusReader(PlannerReader):
    """Reads the graph's object on Kubernetes, to whose status the planner writes its last changes.

    The status does not show when the planner has last run without a change.
    """

    def __init__(self, discovery: Discovery) -> None:
        super().__init__(ShownPlanner("missing", "the graph's status was not read yet"))
        self._discovery = discovery
        self._read_s = float("-inf")
        self._lock = asyncio.Lock()

    async def read(self) -> ShownPlanner:
        """Return the planner's state; the graph's object is read again if the last attempt is at least 2 real seconds ago."""
        async with self._lock:
            if time.monotonic() - self._read_s < _READ_S:
                return self._state
            try:
                async with PatientTimeout(_READ_S):
                    graph = printable(await self._discovery.graph())
                self._state = replace(graph_planner_state(graph), pool=pool_of_status(graph))
            except (PenstockError, TimeoutError, *MALFORMED_ERRORS) as exc:
                why = "no answer in time" if isinstance(exc, TimeoutError) else str(exc).partition("\n")[0]
                status = "stale" if self._state.phase else "missing"
                message = f"the graph's status is not readable: {why}"
                self._state = replace(self._state, status=status, message=message)
            self._read_s = time.monotonic()
            return self._state


def pool_of_status(graph: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the state of the GPU pool of a graph, as the status of its GraphDeployment contains it; None if it is in no pool.

    ``graph`` is the GraphDeployment as the API server returns it. The result contains ``name``, ``gpus`` (size of the pool),
    ``held`` (GPUs in use by all graphs), ``note`` (how many the graph may hold, as text) and ``graphs`` (one entry per graph).
    """
    share = status_pool(graph)
    if share is None:
        return None
    note = f"may hold {share['grantedGpus']} GPUs" + (f"; {share['message']}" if share.get("message") else "")
    graphs = [
        {
            "graph": str(each["name"]),
            **{key: int(each[key]) for key in ("guaranteed", "held", "wanted")},
            "grant": int(each["granted"]),
            "waits_for": list(map(str, each["waitsFor"])),
        }
        for each in share.get("graphs") or ()
    ]
    return {
        "name": share["name"],
        "gpus": share.get("poolGpus"),
        "held": share.get("poolHeldGpus"),
        "note": note,
        "graphs": graphs,
    }


def graph_planner_state(graph: Mapping[str, Any]) -> ShownPlanner:
    """Return the planner's state, as the status of a GraphDeployment contains it. Pure.

    ``graph`` is the GraphDeployment as the API server returns it.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: the data are not those of such an object.
    """
    spec, status = GraphSpec.model_validate(graph["spec"]), graph.get("status") or {}
    if not spec.planner.enabled:
        return ShownPlanner.of_graph("off", "spec.planner.enabled is false", spec)
    planner = status.get("planner") or {}
    last = {**planner, "sentence": planner.get("lastDecision")}
    changes = tuple(
        {
            "id": str(each["decisionId"]),
            "at_s": None,
            "time": str(each.get("decisionTime") or ""),
            "sentence": str(each["sentence"]),
            "reason": "",
        }
        for each in (last, *planner.get("earlier", ()))
        if each.get("decisionId")
    )
    desired: dict[str, int] = {}
    for name, service in (status.get("services") or {}).items():
        if name in spec.workers:
            role = spec.workers[name].role.value
            desired[role] = desired.get(role, 0) + int(service.get("desired", 0))
    found = ShownPlanner.of_graph("missing", "no planner has written to the graph's status", spec)
    budget = found.budget if status_pool(graph) is None else spec.planner.own_gpu_budget
    found = replace(found, desired=desired, changes=changes, budget=budget)
    for condition in status.get("conditions") or ():
        if condition["type"] == "PlannerActive":
            return replace(
                found,
                status="current" if condition["status"] == "True" else "stale",
                message=str(condition["message"]),
                phase=str(condition["reason"]),
            )
    return found
