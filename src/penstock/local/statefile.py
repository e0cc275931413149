"""The statefile: its content, how its entries are named and scaled, and how it reads and writes as JSON.

The arbiter, the planner's target and the command line share it; `store` puts it on disk and holds its lock meanwhile. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Final, TypeVar

from pydantic import Field, FiniteFloat, TypeAdapter, ValidationError

from penstock.api import WORKER_ROLES
from penstock.core.errors import ClusterError, ConfigError
from penstock.core.local_state import ARBITER_KEY, EMPTY_STATES, EntryState
from penstock.core.validation import findings
from penstock.core.worker_metrics import METRICS_PATH, STALL_REAL_S
from penstock.runtimes import LIVENESS_S, PORT

REPLICA_STATES: Final = frozenset({EntryState.REQUESTED, EntryState.STARTING, EntryState.READY})
"""States that count towards a pool's replicas; a draining worker is on its way out."""
_Pid = Annotated[int, Field(ge=1, le=2**22)]
"""Up to the largest of 64-bit Linux (proc_sys_kernel(5)); 0 and below would signal complete groups."""
_Port = Annotated[int, Field(ge=1, le=65535)]


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One process for good.

    Attributes:
        started: When it started, as text to compare: this boot of the machine and the clock ticks since then.
            No clock that can be set is part of it.
    """

    pid: int
    started: str


@dataclass(frozen=True, slots=True)
class ArbiterInfo:
    """The background process that owns the file.

    Attributes:
        budget: Most GPUs that workers may hold at once, <= gpus.
        started: When that process started (`ProcessId`); distinguishes a reused pid from the arbiter.
        planner_log_dir: The planner's TensorBoard folder and ledger; None without a planner.
        stopping: True from the moment the graph is being stopped; nothing may be added any more.
        run_id: Which `penstock up` made the file; stays when the arbiter is started again.
        discovery_folder: Where the runtime's processes find each other; None where they do not by files.
        pool: Name of the GPU pool that the graph draws from, whose grant is its budget; empty: none.
        grant_serial: Of that grant.
        reclaim_s: The pool's reclaim.graceSeconds, simulated seconds; None: drains are bounded by grace_s alone.
        cut_drains: Workers that ended for it before they had drained.
        last_cut: What is said of the last of them; empty: none was.
        last_cut_s: When that was, seconds of the simulated clock.
    """

    namespace: str
    gpus: int = 0
    budget: int = 0
    pid: int = 0
    started: str = ""
    endpoint: str = ""
    pubsub_endpoint: str = ""
    graph: str = ""
    model: str = ""
    speed: Annotated[FiniteFloat, Field(gt=0)] = 1.0
    log_dir: str = ""
    router_url: str = ""
    planner_log_dir: str | None = None
    stopping: bool = False
    run_id: str = ""
    restarts: int = 0
    runtime: str = ""
    discovery_folder: str | None = None
    pool: str = ""
    grant_serial: int = 0
    reclaim_s: FiniteFloat | None = None
    cut_drains: int = 0
    last_cut: str = ""
    last_cut_s: FiniteFloat = 0.0

    @property
    def process(self) -> ProcessId:
        """Itself."""
        return ProcessId(self.pid, self.started)


@dataclass(frozen=True, slots=True)
class ProcessEntry:
    """One process: the desired state, and what the supervisor has observed of it.

    Attributes:
        cmd: Arguments with placeholders such as ``{port}``.
        env: Variables on top of the arbiter's own, with placeholders.
        placeholders: Names of the ports that ``cmd`` and ``env`` want filled in.
        ports: Chosen TCP ports by placeholder; empty until the first start.
        health_path: Answers 200 once it serves, or None for a process that does not listen.
        metrics_path: Has a worker's metrics.
        scheme: By which it is reached: http or https.
        grace_s: terminationGracePeriodSeconds, simulated seconds.
        startup_s: Time it may take to answer its first health check, simulated seconds.
        liveness_s: A serving process that gives no healthy answer for this long, real seconds, is killed.
        stall_s: A worker with requests that makes no token for this long, real seconds, is killed.
        served: It has been ready once since it was requested.
        order: Rises with every requested replica; the newest has the largest.
        takes_socket: The arbiter holds the socket on which it listens, and gives it to each of its processes.
        renew: Its process is to finish, and another one to start; for a router.
        takes: The role that it takes once it has drained, with its process and GPUs; None: it keeps its own.
    """

    service: str
    role: str
    cmd: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    state: EntryState = EntryState.REQUESTED
    url: str | None = None
    placeholders: tuple[str, ...] = ()
    ports: Mapping[str, _Port] = field(default_factory=dict)
    health_path: str | None = None
    metrics_path: str = METRICS_PATH
    scheme: str = "http"
    pid: _Pid | None = None
    started: str | None = None
    gpus: tuple[int, ...] = ()
    gpus_per_replica: int = 0
    grace_s: FiniteFloat = 30.0
    startup_s: FiniteFloat = 600.0
    liveness_s: FiniteFloat = LIVENESS_S
    stall_s: FiniteFloat = STALL_REAL_S
    served: bool = False
    restarts: int = 0
    reason: str | None = None
    order: int = 0
    takes: str | None = None
    takes_socket: bool = False
    renew: bool = False

    @property
    def process(self) -> ProcessId | None:
        """Return the recorded process, running or not."""
        return None if self.pid is None or self.started is None else ProcessId(self.pid, self.started)

    @property
    def port(self) -> int | None:
        """The port that `url` names, or None until one is chosen."""
        return self.ports.get(PORT)

    @property
    def is_worker(self) -> bool:
        """True for a process that serves a model, and so is scaled and drained."""
        return self.role in WORKER_ROLES

    @property
    def is_replica(self) -> bool:
        """True while it counts towards its pool."""
        return self.state in REPLICA_STATES

    @property
    def is_switching(self) -> bool:
        """True while it drains to take another role: it counts towards that one's pool."""
        return self.state is EntryState.DRAINING and self.takes is not None

    def counts_as(self, role: str) -> bool:
        """Return whether it is a replica of a role, or will be without a start."""
        return self.takes == role if self.is_switching else self.role == role and self.is_replica


@dataclass(frozen=True, slots=True)
class StateFile:
    """The complete file: its owner and all entries by name, in the order they were made."""

    arbiter: ArbiterInfo
    entries: Mapping[str, ProcessEntry]

    def with_entry(self, name: str, entry: ProcessEntry) -> StateFile:
        """Return a copy in which ``name`` is ``entry``."""
        return replace(self, entries={**self.entries, name: entry})

    def change(self, name: str, **fields: Any) -> StateFile:
        """Return a copy with some fields of one entry replaced; unchanged when the entry is gone."""
        entry = self.entries.get(name)
        return self if entry is None else self.with_entry(name, replace(entry, **fields))

    def gpus_in_use(self) -> frozenset[int]:
        """Return every GPU id that an entry holds, draining ones included."""
        return frozenset(gpu for entry in self.entries.values() for gpu in entry.gpus)

    def next_order(self) -> int:
        """Return the order of the next requested replica."""
        return 1 + max((entry.order for entry in self.entries.values()), default=0)


NO_PROCESS: Final[Mapping[str, Any]] = {
    **dict.fromkeys(("pid", "started", "url", "reason")),
    "ports": {},
    "served": False,
}
"""Fields of an entry whose process is not started yet, or has ended for good."""


def base_name(namespace: str, service: str) -> str:
    """Return the name of a service's first replica, which stays in the file for its command."""
    return f"{namespace}_{service}"


def free_name(state: StateFile, service: str) -> str:
    """Return the name for one more replica of ``service``.

    A name without a process (stopped, failed) is used again before a new one is made, the base name first,
    then the lowest suffix: ``ns_svc``, ``ns_svc_1``, ``ns_svc_2``.
    """
    base = base_name(state.arbiter.namespace, service)
    name, suffix = base, 0
    while name in state.entries and state.entries[name].state not in EMPTY_STATES:
        suffix += 1
        name = f"{base}_{suffix}"
    return name


def retire(state: StateFile, name: str) -> StateFile:
    """Return the file after the process of ``name`` has ended for good.

    The base entry stays as ``stopped``, because its command starts the next replica; others go.
    """
    entry = state.entries.get(name)
    if entry is not None and name == base_name(state.arbiter.namespace, entry.service):
        return state.change(name, state=EntryState.STOPPED, gpus=(), **NO_PROCESS)
    return replace(state, entries={key: each for key, each in state.entries.items() if key != name})


class GpuShortageError(ClusterError):
    """No ids could be given; the message says how many are in use, the bound and the remedy."""


def allocate(
    needed: int, in_use: Collection[int], *, gpus: int, budget: int, others: Collection[int] = ()
) -> tuple[int, ...]:
    """Choose ``needed`` free ids, neighbours if there are such, else the lowest; raises GpuShortageError.

    ``others`` are ids that other graphs of a pool hold: they are not free, and do not count against the budget.

    Neighbours come first because GPUs with adjacent ids usually share the fastest link.
    Among runs of neighbours the shortest that fits is cut, so that long runs stay contiguous.
    """
    if needed <= 0:
        return ()
    ceiling = min(budget, gpus)
    used = len(set(in_use))
    if used + needed > ceiling:
        bound = f"maxGpuBudget {budget}" if budget <= gpus else f"the host's {gpus} GPUs (--gpus)"
        raise GpuShortageError(
            f"needs {needed} GPU{'s' if needed > 1 else ''}, but {used} of {bound} are held by existing workers, "
            "draining ones included; wait for a drain to end, or raise the bound"
        )
    free = sorted(set(range(gpus)) - set(in_use) - set(others))
    if len(free) < needed:
        raise GpuShortageError(
            f"needs {needed} GPUs, but only {len(free)} of the host's {gpus} are free (--gpus)"
        )
    fitting = [run for run in _runs(free) if len(run) >= needed]
    chosen = min(fitting, key=lambda run: (len(run), run[0])) if fitting else free
    return tuple(chosen[:needed])


def _runs(ids: list[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for gpu in ids:
        if runs and runs[-1][-1] == gpu - 1:
            runs[-1].append(gpu)
        else:
            runs.append([gpu])
    return runs


_VICTIM_RANK = {
    EntryState.REQUESTED: 0,
    EntryState.STARTING: 1,
    EntryState.DRAINING: 2,  # it switches to the role
    EntryState.READY: 3,
}


@dataclass(frozen=True, slots=True)
class ScaleOutcome:
    """What one scaling step made of the file."""

    state: StateFile
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    refusal: str | None = None


def template(state: StateFile, role: str) -> ProcessEntry | None:
    """Return the base entry of the service with ``role``: its command starts every replica."""
    namespace = state.arbiter.namespace
    for name, entry in state.entries.items():
        if entry.role == role and name == base_name(namespace, entry.service):
            return entry
    return None


def replicas_of(state: StateFile, role: str) -> dict[str, ProcessEntry]:
    """Return the entries that count as replicas of ``role``, by name; those that switch to it included."""
    return {name: entry for name, entry in state.entries.items() if entry.counts_as(role)}


def request_replica(
    state: StateFile, base: ProcessEntry, others: Collection[int] = ()
) -> tuple[StateFile, str]:
    """Add one ``requested`` entry with its own GPUs, none of which ``others`` hold; raises GpuShortageError."""
    name = free_name(state, base.service)
    gpus = allocate(
        base.gpus_per_replica,
        state.gpus_in_use(),
        gpus=state.arbiter.gpus,
        budget=state.arbiter.budget,
        others=others,
    )
    order = state.next_order()
    entry = replace(base, state=EntryState.REQUESTED, gpus=gpus, restarts=0, order=order, **NO_PROCESS)
    return state.with_entry(name, entry), name


def choose_victim(candidates: Mapping[str, ProcessEntry], inflight_tokens: Mapping[str, float]) -> str:
    """Return the replica whose removal costs least.

    One that does not serve yet goes first (requested before starting, then what switches to the role), then the one with the fewest
    tokens in flight; ties and unknown loads fall to the newest, whose cache is coldest.
    """

    def cost(name: str) -> tuple[int, float, int]:
        entry = candidates[name]
        return _VICTIM_RANK[entry.state], inflight_tokens.get(name, math.inf), -entry.order

    return min(candidates, key=cost)


def remove_replica(state: StateFile, name: str) -> StateFile:
    """Take a replica out of its pool.

    Without a process it leaves the file at once and its GPUs are free; with one it keeps them,
    as ``draining``, until the supervisor has observed the process end.
    """
    entry = state.entries[name]
    if entry.state is EntryState.REQUESTED and entry.pid is None:
        return retire(state, name)
    reason = "removed before it was ready" if entry.state is EntryState.STARTING else None
    return state.change(name, state=EntryState.DRAINING, reason=reason, takes=None)


def scale(
    state: StateFile,
    role: str,
    replicas: int,
    inflight_tokens: Mapping[str, float],
    others: Collection[int] = (),
) -> ScaleOutcome:
    """Bring the pool of ``role`` to ``replicas``, draining and failed ones not counted; twice changes nothing more.

    ``others`` are GPU ids that other graphs hold.
    """
    base = template(state, role)
    added: list[str] = []
    removed: list[str] = []
    while base is not None and len(replicas_of(state, role)) < replicas:
        try:
            state, name = request_replica(state, base, others)
        except GpuShortageError as exc:
            return ScaleOutcome(state, tuple(added), refusal=f"{base.service}: {exc}")
        added.append(name)
    while len(current := replicas_of(state, role)) > replicas:
        victim = choose_victim(current, inflight_tokens)
        state = remove_replica(state, victim)
        removed.append(victim)
    return ScaleOutcome(state, tuple(added), tuple(removed))


@dataclass(frozen=True, slots=True)
class SwitchOutcome:
    """What one request to switch made of the file."""

    state: StateFile
    switching: tuple[str, ...] = ()
    refusal: str | None = None


def switch(
    state: StateFile,
    giver: str,
    taker: str,
    replicas: Mapping[str, int],
    inflight_tokens: Mapping[str, float],
) -> SwitchOutcome:
    """Let ready workers of one role drain to become workers of another, until both have their ``replicas``; twice changes nothing more.

    The base entry stays what it is, as it holds its service's command; so does the last ready worker of the role. Where fewer
    can be taken than are asked for, nothing changes.
    """
    before = state
    missing = replicas[taker] - len(replicas_of(state, taker))
    spare = len(replicas_of(state, giver)) - replicas[giver]
    switching: list[str] = []
    for _ in range(min(missing, spare)):
        ready = {
            name: each for name, each in replicas_of(state, giver).items() if each.state is EntryState.READY
        }
        able = {
            name: each
            for name, each in ready.items()
            if name != base_name(state.arbiter.namespace, each.service)
        }
        if len(ready) < 2 or not able:
            return SwitchOutcome(before, refusal=f"{giver} has no ready worker to spare for {taker}")
        victim = choose_victim(able, inflight_tokens)
        reason = f"switches to {taker}"
        state = state.change(victim, state=EntryState.DRAINING, takes=taker, reason=reason)
        switching.append(victim)
    return SwitchOutcome(state, tuple(switching))


def switched(state: StateFile, name: str) -> StateFile:
    """Return the file after a worker has drained and takes its new role: it is ready once it answers its health check again.

    It keeps its name, process and GPUs; of the new role's service it has the limits, and the command of its next start.
    """
    entry = state.entries.get(name)
    base = None if entry is None or not entry.is_switching else template(state, entry.takes or "")
    if entry is None or base is None:
        return state
    kept = {field: getattr(entry, field) for field in ("url", "ports", "pid", "started", "gpus", "restarts")}
    order = state.next_order()
    return state.with_entry(name, replace(base, **kept, state=EntryState.STARTING, served=False, order=order))


_T = TypeVar("_T")
_ARBITER: Final = TypeAdapter(ArbiterInfo)
_ENTRY: Final = TypeAdapter(ProcessEntry)
_REMEDY: Final = "run `penstock down --now`, or delete the file when nothing runs"


def entry_to_json(entry: ProcessEntry) -> dict[str, Any]:
    """Return one entry as the file spells it; a stopped one carries no resources, as documented."""
    data: dict[str, Any] = _ENTRY.dump_python(entry, mode="json")
    resources = {"gpus": data.pop("gpus")}
    data["port"] = entry.port
    return data if entry.state is EntryState.STOPPED else {**data, "resources": resources}


def to_json(state: StateFile) -> dict[str, Any]:
    """Return the complete file as JSON data, the arbiter first."""
    entries = {name: entry_to_json(entry) for name, entry in state.entries.items()}
    return {ARBITER_KEY: _ARBITER.dump_python(state.arbiter, mode="json"), **entries}


def from_json(data: object, *, source: str) -> StateFile:
    """Read the file; unknown keys are ignored and missing ones get their defaults."""
    if not isinstance(data, dict) or not isinstance(data.get(ARBITER_KEY), dict):
        raise ConfigError(
            f"{source}: not a statefile: key {ARBITER_KEY!r} is missing; delete the file and run `penstock up`"
        )
    fields = {"namespace": source.rsplit("/", 1)[-1].removesuffix(".json"), **data[ARBITER_KEY]}
    fields.setdefault("budget", fields.get("gpus", 0))
    arbiter = _validated(_ARBITER, fields, f"{source}: {ARBITER_KEY}")
    entries = {
        name: _entry(value, f"{source}: {name}") for name, value in data.items() if name != ARBITER_KEY
    }
    return StateFile(arbiter, entries)


def _entry(fields: object, place: str) -> ProcessEntry:
    if not isinstance(fields, dict):
        raise ConfigError(f"{place}: must be an object, not {type(fields).__name__}; {_REMEDY}")
    resources = fields.get("resources")
    gpus = resources.get("gpus", ()) if isinstance(resources, dict) else ()
    return _validated(_ENTRY, {"cmd": (), **fields, "gpus": gpus}, place)


def _validated(adapter: TypeAdapter[_T], fields: Mapping[str, Any], place: str) -> _T:
    try:
        return adapter.validate_python(fields)
    except ValidationError as exc:
        raise ConfigError(f"{place}.{findings(exc, root='', most=1, with_values=True)}; {_REMEDY}") from exc
