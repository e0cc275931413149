"""One worker as the router knows it: discovery, health, drains, circuit, and what is in flight there. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from penstock.core.engine_progress import NO_PROGRESS_KNOWN, EngineProgress
from penstock.router.core.worker_spec import WorkerSpec
from penstock.router.policy.breaker import Circuit, CircuitBreaker
from penstock.router.policy.load import WorkerLoad


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
        drained: Told to take nothing new, by ``POST /workers/NAME/drain``.
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
        """Begin as discovery reports it.

        Args:
            spec: As discovery reports it.
            breaker: Its circuit, closed.
            record: Takes what happens to it.
            touched: Called when its health changes.
        """
        super().__init__(spec.name)
        self.spec = spec
        self._record = record
        self._touched = touched
        self.breaker = breaker
        self.drained = False
        # Whoever supervises a worker has seen its health before calling it ready; a fixed list has not.
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
        """Whether its last requests failed, as many as open a circuit; it may be in use all the same."""
        return self.breaker.is_failing or self.loses_transfers

    def suspect(self, problem: str) -> None:
        """Send nothing new there until a health check succeeds; for a refused connection."""
        if self.health_problem is None:
            self._record(WorkerEvent(WorkerChange.SUSPECTED, self.name, {"problem": problem}))
        self.health_problem = problem

    def failed(self, now_s: float, cause: str, *, probe: bool, proven: bool, openings: int) -> bool:
        """Take note of a failed request; returns whether its circuit counts it.

        Args:
            now_s: Simulated seconds.
            cause: What the worker did.
            probe: Whether the request is the probe.
            proven: As in `CircuitBreaker.failed`.
            openings: Of the circuit when the request was sent; one from before the last says nothing about it now.
        """
        self.failures += 1
        if openings != self.breaker.openings:
            return False
        self.last_failure = cause
        counted = self.breaker.failed(now_s, probe=probe, proven=proven)
        self._note_verdict(openings, now_s, is_due=proven and self.breaker.is_failing)
        return counted

    def convicted(self, now_s: float) -> None:
        """Take note that a failed request was its own fault: another worker has served it."""
        openings = self.breaker.openings
        self.breaker.convicted(now_s)
        self._note_verdict(openings, now_s, is_due=self.breaker.is_failing)

    def answered(self, *, probe: bool, is_complete: bool = True) -> None:
        """Take note of a right answer, or, where it is not complete, of the right beginning of the probe's."""
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
        """Record an ejection, and one that is due and may not be.

        Args:
            openings: Times that the circuit had opened before the verdict.
            now_s: Simulated seconds.
            is_due: Whether the verdict should have ejected the worker.
        """
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
        """Whether it will serve again by itself: worth waiting for; an open circuit is."""
        return (self.spec.supervised and not self.drained) or self.takes_requests

    @property
    def keeps_its_cache(self) -> bool:
        """Whether it comes back as it was while it takes nothing, or else as a process known to be new."""
        return self.spec.supervised or self.health_problem is None

    def metrics_age_s(self, now_s: float) -> float | None:
        """Return the age of its metrics in simulated seconds; None if they were never read."""
        return None if self.metrics_at_s is None else max(0.0, now_s - self.metrics_at_s)
