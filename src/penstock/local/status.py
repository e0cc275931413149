"""What is going on in one local graph: statefile, router and the planner's last decisions in one value."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import orjson
from pydantic import TypeAdapter

from penstock.core.errors import NotFoundError
from penstock.core.findings import full_disks
from penstock.core.kv_transfers import KvTransferCounts
from penstock.core.local_state import PLANNER_STATE_FILE, EntryState
from penstock.core.printable import printable
from penstock.local import liveness
from penstock.local.pool import PoolStore, cut_in_words
from penstock.local.probes import NoAnswer, Probes, RouterQueue, RouterView, Traffic, WorkerView, frontend_of
from penstock.local.statefile import ProcessEntry, StateFile
from penstock.local.store import StateStore
from penstock.runtimes import PLANNER_ROLE
from penstock_planner.core.ledger_history import LearnedStateInfo
from penstock_planner.learnt import former_run_in_words
from penstock_planner.ledger import FILE_NAME


class LineFollower:
    """Returns each line once; a torn last line is returned when it is complete."""

    def __init__(self, path: Path, *, first_read_bytes: int | None = None) -> None:
        """Name the file, which may come later.

        Args:
            path: The file.
            first_read_bytes: How far back the first read reaches, bytes; None reads from the beginning. The
                first line may then lack its beginning.
        """
        self._path = path
        self._first_read_bytes = first_read_bytes
        self._offset: int | None = None

    def new_lines(self) -> list[bytes]:
        """Return the lines completed since the last call, without their line ends.

        A file that has shrunk is read as a new one; one that cannot be read has no lines.
        """
        try:
            with self._path.open("rb") as file:
                size = file.seek(0, 2)
                if self._offset is None or self._offset > size:
                    back = size if self._first_read_bytes is None else self._first_read_bytes
                    self._offset = max(0, size - back)
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        return complete.splitlines()


SHOWN_DECISIONS: Final = 8
"""Decisions kept for display. Chosen: what a terminal has room for below the processes."""
_FIRST_READ_BYTES: Final = 8 << 20
"""How far back a long ledger is read at first. Chosen: a thousand decisions, parsed within a tenth of a second."""
_PULL: Final = b'{"type":"pull"'
"""Start of the records that do not matter here, nine of ten."""


@dataclass(frozen=True, slots=True)
class DecisionStatus:
    """One role's part of a recorded decision."""

    id: str
    at_s: float
    role: str
    current: int
    desired: int
    reason: str
    sentence: str


_DECISION: Final = TypeAdapter(DecisionStatus)


class LedgerTail:
    """Follows a planner's ledger without its lock."""

    def __init__(self, folder: str | None, *, with_unchanged: bool = False) -> None:
        """Name the planner's folder."""
        path = Path(os.devnull) if folder is None else Path(folder) / FILE_NAME
        self._lines = LineFollower(path, first_read_bytes=_FIRST_READ_BYTES)
        self._with_unchanged = with_unchanged
        self._origin_s = 0.0
        self._decisions: deque[DecisionStatus] = deque(maxlen=SHOWN_DECISIONS)

    def newest(self) -> tuple[DecisionStatus, ...]:
        """Return the newest decisions, oldest first; none while there is no ledger."""
        for line in self._lines.new_lines():
            if not line.startswith(_PULL):
                with contextlib.suppress(ValueError, TypeError, AttributeError, LookupError):
                    self._take(printable(orjson.loads(line)))
        return tuple(self._decisions)

    def _take(self, record: Any) -> None:
        self._origin_s = record.get("origin_s") or self._origin_s
        if record.get("type") != "decision":
            return
        decision, at_s = record["decision"], record["at_s"] - self._origin_s
        for role in decision["roles"]:
            each = _DECISION.validate_python({**role, "id": decision["id"], "at_s": at_s})
            if self._with_unchanged or each.current != each.desired:
                self._decisions.append(each)


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """One process."""

    name: str
    role: str
    state: str
    gpus: tuple[int, ...]
    pid: int | None
    url: str | None
    restarts: int
    inflight_requests: int | None
    inflight_tokens: float | None
    kv_usage_fraction: float | None
    reason: str | None
    slow: str | None = None


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """Replicas of one role: ``ready`` of ``desired``, plus ``draining`` ones, ``failed`` ones given up."""

    role: str
    ready: int
    desired: int
    draining: int
    failed: int


@dataclass(frozen=True, slots=True)
class PlannerView:
    """The planner, as it last wrote of itself.

    Attributes:
        phase: observing, adjusting or target_unavailable.
        next_decision_s: Simulated seconds from then to the end of the interval; None while adjusting.
        problems: What keeps it from scaling well, as text.
        silent_real_s: How long ago that was, where it should have written since; None: it is recent.
        served: Share in time of the last half hour, and the planner's model's for the same fleet; None: not known.
        memory: What becomes of what a former run had learnt; empty: there was none.
        scheduled: Entries of planner.schedule that hold, and until when, as text.
    """

    phase: str
    next_decision_s: float | None
    lag_p99_s: float | None
    problems: tuple[str, ...] = ()
    silent_real_s: float | None = None
    memory: str = ""
    scheduled: tuple[str, ...] = ()
    served: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class LocalGraphStatus:
    """One graph at one moment.

    Attributes:
        processes: In the file's order, entries without a process left out unless they failed.
        gpus_used: Held by existing workers, draining ones included.
        full_disks: Of the folders that the graph writes to, as text.
        pool: Which GPU pool it draws from, and who holds what it lacks there, as text; empty: none.
        cut: How many drains it cut short for others of that pool, and which last, as text; empty: none.
    """

    namespace: str
    model: str
    speed: float
    running: bool
    stopping: bool
    router_url: str
    log_dir: str
    planner_log_dir: str | None
    processes: tuple[ProcessStatus, ...]
    pools: tuple[PoolStatus, ...]
    queue: RouterQueue | None
    traffic: Traffic | None
    kv_transfers: KvTransferCounts | None
    gpus_used: int
    gpu_budget: int
    planner: PlannerView | None
    lag_p99_s: Mapping[str, float]
    decisions: tuple[DecisionStatus, ...]
    full_disks: tuple[str, ...] = ()
    pool: str = ""
    cut: str = ""


_STALE_REAL_S: Final = 10.0
_STALE_PULLS: Final = 3
"""Chosen, as on the live page: a planner writes at each of its ticks, of which a few may be late."""


def read_planner(folder: str | None, pid: int | None, speed: float = 1.0) -> PlannerView | None:
    """Return what the planner with ``pid`` last wrote at a time scale; None when there is nothing of this process."""
    if folder is None or pid is None:
        return None
    try:
        data = printable(json.loads((Path(folder) / PLANNER_STATE_FILE).read_bytes()))
        if data.get("pid") != pid:
            return None
        age_s = time.time() - float(data.get("wall_s", math.inf))
        stale_s = max(_STALE_REAL_S, _STALE_PULLS * float(data.get("pull_s", 0.0)) / speed)
        next_s, left = data.get("next_decision_s"), data.get("remembered")
        served = (data.get("newest") or {}).get("served")
        return PlannerView(
            phase=str(data["phase"]),
            next_decision_s=None if next_s is None else max(0.0, float(next_s) - float(data["at_s"])),
            lag_p99_s=data.get("lag_p99_s"),
            problems=tuple(map(str, data.get("problems", ()))),
            silent_real_s=age_s if age_s > stale_s else None,
            served=None if served is None else (float(served[0]), float(served[1])),
            memory="" if left is None else former_run_in_words(LearnedStateInfo(**left), folder, time.time()),
            scheduled=tuple(map(str, data.get("scheduled", ()))),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


class StatusReader:
    """Reads the status of one namespace repeatedly over kept connections."""

    def __init__(self, namespace: str, *, with_unchanged: bool = False) -> None:
        """Read ``namespace`` of the configured state folder."""
        self._store = StateStore.of(namespace)
        self._probes = Probes()
        self._with_unchanged = with_unchanged
        self._ledger: LedgerTail | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc_info: object) -> None:
        await self._probes.close()

    async def read(self) -> LocalGraphStatus:
        """Return the graph as it is now."""
        state = self._store.read()
        if state is None:
            name = self._store.path.stem
            raise NotFoundError(f"namespace {name!r}: not running; start it with `penstock up FILE`")
        running = liveness.arbiter_is_alive(state)
        view = (
            await frontend_of(state, self._probes).view(state.entries) if running else NoAnswer.NOT_LISTENING
        )
        if self._ledger is None:
            self._ledger = LedgerTail(state.arbiter.planner_log_dir, with_unchanged=self._with_unchanged)
        planner_pid = next((e.pid for e in state.entries.values() if e.role == PLANNER_ROLE), None)
        return summarise(
            state,
            running=running,
            router=None if isinstance(view, NoAnswer) else view,
            planner=read_planner(state.arbiter.planner_log_dir, planner_pid, state.arbiter.speed),
            decisions=self._ledger.newest(),
            full_disks=self._full_disks(state),
            pool=PoolStore.of(state.arbiter.pool).note(state.arbiter.namespace, state.arbiter.speed)
            if state.arbiter.pool
            else "",
        )

    def _full_disks(self, state: StateFile) -> tuple[str, ...]:
        arbiter = state.arbiter
        folders = {str(self._store.path.parent), arbiter.log_dir, arbiter.planner_log_dir or arbiter.log_dir}
        return full_disks(folders)


def summarise(
    state: StateFile,
    *,
    running: bool,
    router: RouterView | None,
    planner: PlannerView | None,
    decisions: tuple[DecisionStatus, ...],
    full_disks: tuple[str, ...] = (),
    pool: str = "",
) -> LocalGraphStatus:
    """Combine the readings; pure."""
    arbiter = state.arbiter
    workers = {} if router is None else router.workers
    lags = {
        name: source.lag_p99_s
        for name, source in (("router", router), ("planner", planner))
        if source is not None and source.lag_p99_s is not None
    }
    shown = {name: entry for name, entry in state.entries.items() if entry.state is not EntryState.STOPPED}
    processes = tuple(_process(name, entry, workers.get(name)) for name, entry in shown.items())
    roles = list(dict.fromkeys(e.role for e in state.entries.values() if e.is_worker))
    return LocalGraphStatus(
        namespace=arbiter.namespace,
        model=arbiter.model,
        speed=arbiter.speed,
        running=running,
        stopping=arbiter.stopping,
        router_url=arbiter.router_url,
        log_dir=arbiter.log_dir,
        planner_log_dir=arbiter.planner_log_dir,
        processes=processes,
        pools=tuple(_pool(role, state.entries.values(), processes) for role in roles),
        queue=None if router is None else router.queue,
        traffic=None if router is None else router.traffic,
        kv_transfers=None if router is None else router.kv_transfers,
        gpus_used=len(state.gpus_in_use()),
        gpu_budget=arbiter.budget,
        planner=planner,
        lag_p99_s=lags,
        decisions=decisions,
        full_disks=full_disks,
        pool=pool,
        cut=cut_in_words(arbiter),
    )


def _process(name: str, entry: ProcessEntry, view: WorkerView | None) -> ProcessStatus:
    state, reason = entry.state.value, entry.reason
    if view is not None and entry.state is EntryState.READY and view.state != "ready":
        state, reason = view.state, view.reason
    elif view is not None and entry.state is EntryState.STARTING and entry.served and reason:
        state = view.state  # It was ready before, and has a fault.
    return ProcessStatus(
        name=name,
        role=entry.role,
        state=state,
        gpus=entry.gpus,
        pid=entry.pid,
        url=entry.url,
        restarts=entry.restarts,
        inflight_requests=None if view is None else view.inflight_requests,
        inflight_tokens=None if view is None else view.inflight_tokens,
        kv_usage_fraction=None if view is None else view.kv_usage_fraction,
        reason=reason,
        slow=None if view is None else view.slow,
    )


def _pool(role: str, entries: Iterable[ProcessEntry], processes: Iterable[ProcessStatus]) -> PoolStatus:
    """Count a pool as it is shown: a worker that the router cannot use is not ready, even if the supervisor says so."""
    states = [process.state for process in processes if process.role == role]
    return PoolStatus(
        role=role,
        ready=states.count(EntryState.READY),
        desired=sum(entry.counts_as(role) for entry in entries),
        draining=states.count(EntryState.DRAINING),
        failed=states.count(EntryState.FAILED),
    )
