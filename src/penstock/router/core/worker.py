"""One worker as the router knows it: discovery, health, drains, circuit, and requests in flight. Pure.

After failures in a row a worker is ejected, then tried with one request. A circuit opens for ``open_s`` times the number of
its openings of late, at most ``max_open_s``; its owner may forbid the opening, because too much of the pool is ejected
already. The beginning of one probe's answer then closes it, because answers may last minutes; until the first answer is
complete, one failure opens it again. What counts as a failure is `penstock.router.proxy.failures`' to say.

Source: Envoy's outlier detection (consecutive failures, base and maximum ejection time, maximum ejected share).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from penstock.core.worker_metrics import NO_PROGRESS_KNOWN, EngineProgress
from penstock.router.core.worker_spec import WorkerSpec
from penstock.router.policy.worker_queue import WorkerLoad


class Circuit(StrEnum):
    """States of a breaker."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


def may_eject(*, ejected: int, pool: int, max_fraction: float) -> bool:
    """Return whether one more worker of a pool may be ejected.

    Args:
        ejected: Workers of the pool that are ejected, >= 0.
        pool: Workers that would serve if no circuit were open, these included, >= 0.
        max_fraction: Largest share of the pool, 0-1; one worker may be ejected however small the pool is.
    """
    return ejected < max(1, int(pool * max_fraction))


class CircuitBreaker:
    """Counts failures in a row; ``now_s`` is always an argument, in simulated seconds.

    Attributes:
        threshold: Failures in a row that open the circuit.
        failures: Failures since the last success, including those that opened the circuit.
        openings: Times that the circuit has opened.
    """

    __slots__ = (
        "_ejections",
        "_is_on_probation",
        "_max_open_s",
        "_may_open",
        "_open_s",
        "_open_until_s",
        "_opened_s",
        "_probing",
        "_state",
        "_touched",
        "failures",
        "openings",
        "threshold",
    )

    def __init__(
        self,
        *,
        consecutive_failures: int,
        open_s: float,
        max_open_s: float | None = None,
        may_open: Callable[[], bool] = lambda: True,
        touched: Callable[[], None] = lambda: None,
    ) -> None:
        """Start closed.

        Args:
            consecutive_failures: Failures in a row that open the circuit, >= 1.
            open_s: Time that it stays open at first, > 0.
            max_open_s: Most that it stays open; None: always ``open_s``.
            may_open: Asked before it opens.
            touched: Called when the state changes.
        """
        self.threshold = consecutive_failures
        self._open_s = open_s
        self._max_open_s = open_s if max_open_s is None else max(open_s, max_open_s)
        self._may_open = may_open
        self._touched = touched
        self.openings = 0
        self.reset()

    def reset(self) -> None:
        """Forget everything; for a worker whose process is a new one."""
        self._enter(Circuit.CLOSED)
        self.failures = 0
        self._is_on_probation = False
        self._ejections = 0
        self._opened_s = 0.0
        self._open_until_s = 0.0
        self._probing = False

    def state(self, now_s: float) -> Circuit:
        """Return the state; an open circuit becomes half-open when its time is over."""
        if self._state is Circuit.OPEN and now_s >= self._open_until_s:
            return Circuit.HALF_OPEN
        return self._state

    @property
    def is_closed(self) -> bool:
        """Whether the worker is not ejected."""
        return self._state is Circuit.CLOSED

    @property
    def is_failing(self) -> bool:
        """Whether its last answers were failures, as many as open a circuit, opened or not."""
        return not self.is_closed or self.failures >= self.threshold

    def probe_in_s(self, now_s: float) -> float:
        """Return how long an open circuit admits no probe yet; 0 when it is not open."""
        return max(0.0, self._open_until_s - now_s) if self._state is Circuit.OPEN else 0.0

    def allows(self, now_s: float, *, is_last: bool = False) -> bool:
        """Return whether a request may be sent: closed, or half-open without a probe under way.

        Args:
            now_s: Simulated seconds.
            is_last: No other worker can take the request: an open circuit is probed after ``open_s``, however
                often it has opened.
        """
        if self._state is Circuit.OPEN:
            return now_s >= (self._first_probe_s() if is_last else self._open_until_s)
        return self.is_closed or not self._probing

    def sent(self, now_s: float) -> bool:
        """Record a request sent; returns whether it is the probe of a half-open circuit."""
        if self.is_closed or self._probing or not self.allows(now_s, is_last=True):
            return False
        self._enter(Circuit.HALF_OPEN)
        self._probing = True
        return True

    def began(self) -> None:
        """Record the correct beginning of the probe's answer: the circuit closes, and the next failure opens it."""
        self._enter(Circuit.CLOSED)
        self._probing = False
        self._is_on_probation = True
        self.failures = self.threshold - 1

    def succeeded(self, *, probe: bool) -> None:
        """Record a correct answer; only the probe closes an opened circuit."""
        if probe:
            self.began()
        if self.is_closed:
            self.failures = 0
            self._is_on_probation = False

    def failed(self, now_s: float, *, probe: bool, proven: bool = True) -> bool:
        """Record a failure; those of requests sent before the circuit opened change nothing.

        Args:
            now_s: Simulated seconds.
            probe: Whether it is the probe's.
            proven: Whether it is the worker's without doubt; else the circuit of one that is not being probed
                stays closed until `convicted`.

        Returns:
            Whether the failure was counted.
        """
        if not probe and not self.is_closed:
            return False
        self.failures += 1
        if probe or proven:
            self.convicted(now_s, probe=probe)
        return True

    def convicted(self, now_s: float, *, probe: bool = False) -> None:
        """Open the circuit if the failures in a row, one of them proven now, suffice."""
        if probe or self.failures >= self.threshold:
            self.trip(now_s)

    def trip(self, now_s: float) -> bool:
        """Open the circuit if that is allowed: for longer each time, unless it served for long in between.

        Returns:
            Whether it has opened now.
        """
        if self._state is Circuit.OPEN or (self.is_closed and not self._may_open()):
            return False
        if self.is_closed:
            served_s = 0.0 if self._is_on_probation else max(0.0, now_s - self._open_until_s)
            self._ejections = max(0, self._ejections - int(served_s / self._open_s))
        self._ejections += 1
        self.openings += 1
        self._enter(Circuit.OPEN)
        self._opened_s = now_s
        self._open_until_s = now_s + min(self._max_open_s, self._open_s * self._ejections)
        self._probing = False
        return True

    def pardoned(self, now_s: float, *, probe: bool) -> None:
        """Take back a counted failure that was not the worker's; an opening that rests on it is undone.

        Args:
            now_s: Simulated seconds.
            probe: Whether the failure was a probe's; the circuit is then half-open again.
        """
        self.failures = max(0, self.failures - 1)
        if self._state is not Circuit.OPEN or (self.failures >= self.threshold and not probe):
            return
        self._ejections = max(0, self._ejections - 1)
        self._enter(Circuit.HALF_OPEN if probe else Circuit.CLOSED)
        self._open_until_s = now_s

    def abandoned(self, *, probe: bool) -> None:
        """Record that a request ended without a verdict, such as a client that left."""
        if probe:
            self._probing = False

    def _enter(self, state: Circuit) -> None:
        self._state = state
        self._touched()

    def _first_probe_s(self) -> float:
        return min(self._open_until_s, self._opened_s + self._open_s)


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


@dataclass(frozen=True, slots=True)
class WorkerEvent:
    """One change of a worker, for the log.

    Attributes:
        change: What happened.
        worker: Name.
        facts: Further facts for the log line, by key.
    """

    change: WorkerChange
    worker: str
    facts: Mapping[str, object]


Recorder = Callable[[WorkerEvent], None]
"""Takes worker events; may not call back."""


def ignore(event: WorkerEvent) -> None:
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
        spec: As discovery reports it.
        breaker: Its circuit.
        drained: Takes nothing new since ``POST /workers/NAME/drain``.
        waiting_requests: That wait in it for room, last reading; None when unknown.
        expired_leases: KV leases that ran out there since its start, last reading; None when unknown.
        failed_checks: Health checks failed in a row.
        silent_real_s: How long health checks have had no answer; summed over them, so that a pause of this process is
            not taken for the worker's.
        progress: Whether its engine gets on, by its readings.
        failures: Failed requests since it joined.
        last_failure: What the newest of them was; empty without one.
        lost_transfers: KV transfers to or from it that were lost, since the last that arrived.
    """

    __slots__ = (
        "_health_problem",
        "_is_kept",
        "_record",
        "_touched",
        "breaker",
        "drained",
        "expired_leases",
        "failed_checks",
        "failures",
        "last_failure",
        "lost_transfers",
        "progress",
        "silent_real_s",
        "spec",
        "waiting_requests",
    )

    def __init__(
        self,
        spec: WorkerSpec,
        breaker: CircuitBreaker,
        *,
        record: Recorder = ignore,
        touched: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin as discovery reports it."""
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
        self.waiting_requests: float | None = None
        self.expired_leases: float | None = None
        self.failures = 0
        self.last_failure = ""
        self.lost_transfers = 0
        self._is_kept = False

    @property
    def health_problem(self) -> str | None:
        """Why the newest health checks failed for too long, or None."""
        return self._health_problem

    @health_problem.setter
    def health_problem(self, problem: str | None) -> None:
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

    def suspect(self, problem: str) -> None:
        """Send nothing new there until a health check succeeds; for a refused connection."""
        if self.health_problem is None:
            self._record(WorkerEvent(WorkerChange.SUSPECTED, self.name, {"problem": problem}))
        self.health_problem = problem

    def failed(self, now_s: float, cause: str, *, probe: bool, proven: bool, openings: int) -> bool:
        """Record a failed request; returns whether its circuit counts it.

        Args:
            now_s: Simulated seconds.
            cause: What the worker did.
            probe: Whether the request is the probe.
            proven: As in `CircuitBreaker.failed`.
            openings: Of the circuit when the request was sent; one from before the last no longer counts.
        """
        self.failures += 1
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
        was_failing = self.breaker.is_failing
        if is_complete:
            self.breaker.succeeded(probe=probe)
        else:
            self.breaker.began()
        if was_failing and not self.breaker.is_failing:
            self._is_kept = False
            self._record(WorkerEvent(WorkerChange.RECOVERED, self.name, {"role": self.spec.role.value}))

    def eject(self, now_s: float, cause: str) -> None:
        """Send nothing there for a while, if its pool can spare it."""
        self.last_failure = cause
        openings = self.breaker.openings
        self.breaker.trip(now_s)
        self._note_verdict(openings, now_s, is_due=True)

    def _note_verdict(self, openings: int, now_s: float, *, is_due: bool) -> None:
        """Record an ejection, and one that is due and may not be."""
        facts: dict[str, object] = {
            "role": self.spec.role.value,
            "failures": self.breaker.failures,
            "cause": self.last_failure,
        }
        if self.breaker.openings > openings:
            self._is_kept = False
            facts["next_try_s"] = round(self.breaker.probe_in_s(now_s), 3)
            self._record(WorkerEvent(WorkerChange.EJECTED, self.name, facts))
        elif is_due and self.breaker.is_closed and not self._is_kept:
            self._is_kept = True
            self._record(WorkerEvent(WorkerChange.KEPT, self.name, facts))

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
