"""The router's workers: what discovery reports of each, its health, drains, circuit, and requests in flight. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from penstock.api import BreakerConfig, Role
from penstock.core.errors import NotFoundError
from penstock.core.worker_metrics import NO_PROGRESS_KNOWN, EngineProgress
from penstock.router.core.breaker import Circuit, CircuitBreaker, may_eject
from penstock.router.core.speeds import SpeedCounts
from penstock.router.policy.routing_policy import WorkerLoad


@dataclass(frozen=True, slots=True)
class WorkerSize:
    """What a worker of one role holds.

    Attributes:
        kv_tokens: In its KV cache, >= 1; None: read from its metrics.
        batch_tokens: Most tokens of one step; None: it has no such bound, or it is unknown.
        requests: Most requests in its engine; None: likewise.
        slot_requests: Requests dispatched to it at a time, where it computes this many; None: slots are counted in tokens.
    """

    kv_tokens: int | None = None
    batch_tokens: int | None = None
    requests: int | None = None
    slot_requests: int | None = None


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """A worker that exists or is about to.

    Attributes:
        name: Unique name; the local backend's entry name.
        url: Base URL without a trailing slash.
        supervised: It is restarted when it dies, so requests may wait for it.
        incarnation: Changes with every start of the process; what was learnt about the last one is void.
        reason: Why it is not ready, or empty.
        kv_events: Where it publishes KV events; None: at its host on the graph's port, if at all.
        kv_replay: Where it answers for what it published before; of meaning alongside ``kv_events``. None: nowhere.
        side_channel_port: At its host, where KV transfers are arranged; None: not known.
    """

    name: str
    role: Role
    url: str
    ready: bool = True
    draining: bool = False
    supervised: bool = False
    incarnation: str = ""
    reason: str = ""
    kv_events: str | None = None
    kv_replay: str | None = None
    side_channel_port: int | None = None


OUTAGE_S: Final = 5.0
"""Until it is known that a worker died: three health checks in a row. Chosen; simulated seconds."""


class WorkerChange(StrEnum):
    """What happened to a worker, in the words of the log."""

    JOINED = "worker joined"
    LEFT = "worker left"
    CHANGED = "worker changed"
    DRAINED = "worker drained"
    UNDRAINED = "worker undrained"
    SUSPECTED = "worker suspected"
    EJECTED = "worker ejected"
    KEPT = "worker fails and is kept: too many of its role are ejected"
    RECOVERED = "worker answers again"


Recorder = Callable[..., None]
"""Takes a change, the worker's name, and further facts by key, for the log; may not call back."""


def ignore(change: WorkerChange, worker: str, **facts: object) -> None:
    """Record nothing."""


class WorkerState(StrEnum):
    """One word for a worker, as ``/workers`` shows it."""

    READY = "ready"
    UNHEALTHY = "unhealthy"
    CIRCUIT_OPEN = "circuit_open"
    DRAINING = "draining"


class Worker(WorkerLoad):
    """One worker and everything the router knows of it.

    Attributes:
        drained: Takes nothing new since ``POST /workers/NAME/drain``.
        waiting_requests: That wait in it for room, last reading; None when unknown.
        expired_leases: KV leases that ran out there since its start, last reading; None when unknown.
        silent_real_s: How long health checks have had no answer; summed over them, so that a pause of this process is
            not taken for the worker's.
        last_failure: What the newest of them was; empty without one.
        version: Of its engine, as it says; None: it does not, or has not been asked.
        kv_engine: By which its engine introduces itself to those that fetch its KV; None: not known since its process came.
        is_version_read: It has been asked since its process came.
        speed: What it has done, by this router's count.
        lost_transfers: KV transfers to or from it that were lost, since the last that arrived.
        has_answered: Something of an answer that was right, since its last failure.
        has_ever_answered: It has answered, in this process or in one before under the same name.
        fell_s: When it failed after it had answered; None: it has not, since its process began or its health came back.
        failed_at: When a request last failed there, and the outages by then; None: none has since it was seen to be there.
        outages: How often it was seen to be gone: a new process, no health, not ready, dropped without a drain.
        recoveries: How often it was seen to be there after a failure.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        breaker: CircuitBreaker,
        *,
        record: Recorder = ignore,
        touched: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(spec.name)
        self.spec = spec
        self._record = record
        self._touched = touched
        self.breaker = breaker
        self.drained = False
        # A supervisor checks a worker's health before calling it ready; a fixed list does not.
        self._health_problem: str | None = None if spec.supervised else "not checked yet"
        self.failed_checks = 0
        self.silent_real_s = 0.0
        self.progress: EngineProgress = NO_PROGRESS_KNOWN
        self.version: str | None = None
        self.is_version_read = False
        self.kv_engine: str | None = None
        self.waiting_requests: float | None = None
        self.expired_leases: float | None = None
        self.failures = 0
        self.last_failure = ""
        self.lost_transfers = 0
        self.has_answered = False
        self.has_ever_answered = False
        self.fell_s: float | None = None
        self.failed_at: tuple[float, int] | None = None
        self.outages = self.recoveries = 0
        self.speed = SpeedCounts()
        self._is_kept = False

    @property
    def health_problem(self) -> str | None:
        """Why the newest health checks failed for too long, or None."""
        return self._health_problem

    @health_problem.setter
    def health_problem(self, problem: str | None) -> None:
        if problem is not None and self._health_problem is None:
            self.outages += 1
        self._health_problem = problem
        self._touched()

    def state(self, now_s: float) -> tuple[WorkerState, str]:
        """Return the state and its reason, which is empty for ready unless the last answers were failures."""
        if self.spec.draining or self.drained:
            return WorkerState.DRAINING, "leaving the graph" if self.spec.draining else "drained on request"
        if not self.spec.ready:
            return WorkerState.UNHEALTHY, self.spec.reason or "not ready"
        if self.health_problem is not None:
            return WorkerState.UNHEALTHY, self.health_problem
        breaker = self.breaker
        if breaker.state(now_s) is not Circuit.CLOSED:
            wait_s = breaker.probe_in_s(now_s)
            when = f"next try in {wait_s:.0f} s" if wait_s else "being tried"
            return WorkerState.CIRCUIT_OPEN, f"{self._failing()}; {when}"
        return WorkerState.READY, self._failing() if self.is_failing else ""

    @property
    def takes_requests(self) -> bool:
        """Whether requests would be sent there if its circuit were closed."""
        spec = self.spec
        return spec.ready and not spec.draining and not self.drained and self.health_problem is None

    @property
    def loses_transfers(self) -> bool:
        """Whether as many KV transfers in a row were lost as failures open a circuit."""
        return self.lost_transfers >= self.breaker.threshold

    @property
    def is_failing(self) -> bool:
        """Whether as many of its last requests failed as open a circuit; it may still be in use."""
        return self.breaker.is_failing or self.loses_transfers

    def is_there(self) -> None:
        """Record a healthy answer that was asked for after its last failure: it lives, or lives again."""
        if self.failed_at is not None:
            self.failed_at = self.fell_s = None
            self.recoveries += 1

    def may_be_gone(self, now_s: float) -> bool:
        """Return whether a request has just failed there, and it is not known yet whether the worker died with it."""
        if self.failed_at is None:
            return False
        failed_s, outages = self.failed_at
        return outages == self.outages and now_s - failed_s < OUTAGE_S

    def suspect(self, problem: str) -> None:
        """Send nothing new there until a health check succeeds; for a refused connection."""
        if self.health_problem is None:
            self._record(WorkerChange.SUSPECTED, self.name, problem=problem)
        self.health_problem = problem

    def failed(self, now_s: float, cause: str, *, probe: bool, proven: bool, openings: int) -> bool:
        """Record a failed request; return whether its circuit counts it; see `CircuitBreaker.failed`.

        ``openings`` are those of the circuit when the request was sent; one from before the last no longer counts.
        """
        self.failures += 1
        self.failed_at = now_s, self.outages
        if self.has_answered:
            self.has_answered, self.fell_s = False, now_s
        if openings != self.breaker.openings:
            return False
        self.last_failure = cause
        counted = self.breaker.failed(now_s, probe=probe, proven=proven)
        self._note_verdict(openings, now_s, is_due=proven and self.breaker.is_failing)
        return counted

    def convicted(self, now_s: float) -> None:
        """Record that a failed request was its own fault: another worker has served it."""
        openings = self.breaker.openings
        self.breaker.convicted(now_s)
        self._note_verdict(openings, now_s, is_due=self.breaker.is_failing)

    def answered(self, *, probe: bool, is_complete: bool = True) -> None:
        """Record a correct answer or, while it is incomplete, the correct beginning of the probe's."""
        self.has_answered = self.has_ever_answered = True
        breaker = self.breaker
        if not (probe or breaker.failures or breaker.is_on_probation) and breaker.is_closed:
            return
        was_failing = breaker.is_failing
        if is_complete:
            breaker.succeeded(probe=probe)
        else:
            breaker.began()
        if was_failing and not breaker.is_failing:
            self._is_kept = False
            self._record(WorkerChange.RECOVERED, self.name, role=self.spec.role.value)

    def eject(self, now_s: float, cause: str) -> None:
        """Send nothing there for a while, if its pool can spare it."""
        self.last_failure = cause
        openings = self.breaker.openings
        self.breaker.trip(now_s)
        self._note_verdict(openings, now_s, is_due=True)

    def _note_verdict(self, openings: int, now_s: float, *, is_due: bool) -> None:
        facts: dict[str, object] = {
            "role": self.spec.role.value,
            "failures": self.breaker.failures,
            "cause": self.last_failure,
        }
        if self.breaker.openings > openings:
            self._is_kept = False
            facts["next_try_s"] = round(self.breaker.probe_in_s(now_s), 3)
            self._record(WorkerChange.EJECTED, self.name, **facts)
        elif is_due and self.breaker.is_closed and not self._is_kept:
            self._is_kept = True
            self._record(WorkerChange.KEPT, self.name, **facts)

    def _failing(self) -> str:
        count = self.breaker.failures
        if count:
            return f"{count} failed requests in a row, last: {self.last_failure}"
        if self.loses_transfers:
            return f"{self.lost_transfers} KV transfers in a row were lost"
        return self.last_failure

    @property
    def is_expected(self) -> bool:
        """Whether it will serve again by itself and is worth waiting for, as with an open circuit."""
        return (self.spec.supervised and not self.drained) or self.takes_requests

    @property
    def keeps_its_cache(self) -> bool:
        """Whether it comes back as it was while it takes nothing, or else as a process known to be new."""
        return self.spec.supervised or self.health_problem is None

    def metrics_age_s(self, now_s: float) -> float | None:
        """Return the age of its metrics in simulated seconds; None if they were never read."""
        return None if self.metrics_at_s is None else max(0.0, now_s - self.metrics_at_s)


class WorkerPool:
    """All workers by name, including those that discovery dropped while they had requests.

    Attributes:
        versions_differ: Two of them have said different versions.
    """

    def __init__(
        self, breaker: BreakerConfig, *, is_supervised: bool = False, record: Recorder = ignore
    ) -> None:
        self._breaker = breaker
        self._is_supervised = is_supervised
        self._record = record
        self._workers: dict[str, Worker] = {}
        self._leaving: list[Worker] = []
        self.versions_differ = False
        # Kept until a worker joins, leaves, or changes its health, drain or circuit: every request asks.
        self._serving_by_role: dict[Role, Sequence[Worker]] = {}
        self._closed: dict[Role, Sequence[Worker]] = {}

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    @property
    def leaving(self) -> Sequence[Worker]:
        """The workers that discovery has dropped while requests are under way there."""
        self._leaving = [each for each in self._leaving if each.inflight_requests]
        return self._leaving

    def learn_version(self, worker: Worker, version: str | None) -> None:
        """Note what a worker says of its version."""
        worker.version, worker.is_version_read = version, True
        self.versions_differ = len({each.version for each in self if each.version is not None}) > 1

    def get(self, name: str) -> Worker | None:
        """Return a worker by name."""
        return self._workers.get(name)

    def apply(self, specs: Iterable[WorkerSpec]) -> list[Worker]:
        """Apply what discovery reports; return the workers whose process is a new one, under a name known before.

        Requests under way continue where they are.
        """
        wanted = {spec.name: spec for spec in specs}
        restarted = []
        self._touch()
        for name in [name for name in self._workers if name not in wanted]:
            self._record(WorkerChange.LEFT, name)
            left = self._workers.pop(name)
            left.outages += left.takes_requests
            self._leaving = [*self.leaving, left]
        for name, spec in wanted.items():
            worker = self._workers.get(name)
            if worker is None or (worker.spec.url, worker.spec.role) != (spec.url, spec.role):
                joined = self._workers[name] = self._new_worker(spec)
                if worker is not None:
                    worker.outages += 1
                    joined.has_ever_answered = worker.has_ever_answered
                    self._leaving = [*self.leaving, worker]
                    restarted.append(joined)
                self._record(WorkerChange.JOINED, name, role=spec.role.value, url=spec.url, ready=spec.ready)
            elif worker.spec != spec:
                if worker.spec.incarnation != spec.incarnation:
                    restarted.append(worker)
                self._update(worker, spec)
        # Policies see workers in discovery's order.
        self._workers = {name: self._workers[name] for name in wanted}
        return restarted

    def routable(self, role: Role, now_s: float) -> Sequence[Worker]:
        """Return the workers of a role that may be sent a request now.

        Of a half-open circuit that is one request at a time. While every worker of the role is ejected, each is
        probed after the first ejection time, however long its own has grown.
        """
        known = self._closed.get(role)
        if known is not None:
            return known
        if self.are_closed(role):
            return self._closed[role]
        pool = self._serving(role)
        found = [each for each in pool if each.breaker.allows(now_s)]
        return found or [each for each in pool if each.breaker.allows(now_s, is_last=True)]

    def are_closed(self, role: Role) -> bool:
        """Return whether the circuits of all serving workers of a role are closed."""
        if role in self._closed:
            return True
        pool = self._serving(role)
        if not all(each.breaker.is_closed for each in pool):
            return False
        self._closed[role] = pool
        return True

    def expects(self, role: Role) -> bool:
        """Return whether a worker of the role serves or is expected to."""
        return self._is_supervised or any(
            each.spec.role is role and each.is_expected for each in self._workers.values()
        )

    def knows_any(self, roles: Collection[Role]) -> bool:
        """Return whether a worker of one of the roles is known, ready or not, that is not about to leave."""
        return any(
            each.spec.role in roles and not each.spec.draining and not each.drained
            for each in self._workers.values()
        )

    def inflight_requests(self, name: str) -> int:
        """Return the requests under way at every worker of that name, one that was replaced included.

        Raises:
            NotFoundError: no worker has or had that name.
        """
        found = [each for each in (*self._workers.values(), *self.leaving) if each.name == name]
        if not found:
            raise _unknown(name)
        return sum(each.inflight_requests for each in found)

    def set_drained(self, name: str, *, drained: bool) -> None:
        """Stop, or start again, sending new requests to a worker.

        Raises:
            NotFoundError: no worker has that name.
        """
        worker = self._workers.get(name)
        if worker is None:
            raise _unknown(name)
        if worker.drained is not drained:
            worker.drained = drained
            self._touch()
            self._record(WorkerChange.DRAINED if drained else WorkerChange.UNDRAINED, name)

    def _update(self, worker: Worker, spec: WorkerSpec) -> None:
        old = worker.spec
        worker.spec = spec
        if old.incarnation != spec.incarnation:
            worker.breaker.reset()
            worker.lost_transfers = 0
            worker.has_answered, worker.fell_s = False, None
            worker.outages += 1
            worker.is_version_read = False
            worker.kv_engine = None
            worker.speed = SpeedCounts()
            worker.kv_usage_fraction = None
            worker.waiting_requests = None
            worker.expired_leases = None
            worker.progress = NO_PROGRESS_KNOWN
        worker.outages += old.ready and not (spec.ready or spec.draining)
        if spec.ready and not old.ready:
            worker.health_problem = None
            worker.failed_checks = 0
        if (old.ready, old.draining) != (spec.ready, spec.draining):
            state = {"ready": spec.ready, "draining": spec.draining, "reason": spec.reason}
            self._record(WorkerChange.CHANGED, spec.name, **state)

    def _serving(self, role: Role) -> Sequence[Worker]:
        serving = self._serving_by_role.get(role)
        if serving is None:
            serving = [
                each for each in self._workers.values() if each.spec.role is role and each.takes_requests
            ]
            self._serving_by_role[role] = serving
        return serving

    def _new_worker(self, spec: WorkerSpec) -> Worker:
        config = self._breaker

        def may_open() -> bool:
            pool = self._serving(spec.role)
            ejected = sum(not each.breaker.is_closed for each in pool)
            return may_eject(ejected=ejected, pool=len(pool), max_fraction=config.max_ejected_fraction)

        breaker = CircuitBreaker(config, may_open=may_open, touched=self._touch)
        return Worker(spec, breaker, record=self._record, touched=self._touch)

    def _touch(self) -> None:
        self._serving_by_role.clear()
        self._closed.clear()


def _unknown(name: str) -> NotFoundError:
    return NotFoundError(f"worker {name!r} is not known; GET /workers lists the names")
