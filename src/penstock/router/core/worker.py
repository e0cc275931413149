"""The router's workers: discovery data, health, drains, circuit breaker, and requests in flight of each worker. Pure."""

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
    """Capacity of each worker of one role.

    Attributes:
        kv_tokens: Tokens that the worker's KV cache can store, >= 1; None reads it from the worker's metrics.
        batch_tokens: Maximum tokens of one engine step; None if there is no such limit or it is unknown.
        requests: Maximum requests in the engine at a time; None if there is no such limit or it is unknown.
        slot_requests: Number of prompts that the worker computes at a time, for engines that count requests; that many
            requests are dispatched to it. None if dispatch is limited by tokens instead.
    """

    kv_tokens: int | None = None
    batch_tokens: int | None = None
    requests: int | None = None
    slot_requests: int | None = None


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Description of a worker from discovery, ready or not.

    Attributes:
        name: Unique name; for the local backend, the name of the state file's entry.
        role: Role of the worker.
        url: Base URL without a trailing slash.
        ready: Whether discovery reports the worker as ready.
        draining: Whether the worker finishes its requests and must not get new ones.
        supervised: Whether something restarts the worker when it dies, so that requests can wait for it.
        incarnation: Identifier of the worker's process; if it changes, everything learned about the previous process is
            discarded.
        reason: Why the worker is not ready; empty if it is ready or the reason is unknown.
        kv_events: Endpoint at which the worker publishes KV events; None uses the worker's host and the graph's port, if the
            graph has one.
        kv_replay: Endpoint at which the worker replays earlier KV events; only used together with ``kv_events``. None if it
            has none.
        side_channel_port: Port on the worker's host where KV transfers are negotiated; None if unknown.
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
"""Time after which it is known whether a worker died, in simulated seconds. Chosen: three consecutive health checks."""


class WorkerChange(StrEnum):
    """A change of a worker, as the router logs it; the values are the log messages, which say what has changed."""

    JOINED = "worker joined"
    LEFT = "worker left"
    CHANGED = "worker changed"
    DRAINED = "worker drained"
    UNDRAINED = "worker undrained"
    SUSPECTED = "worker suspected"
    EJECTED = "worker ejected"
    KEPT = "failing worker not ejected: too many workers of its role are ejected"
    RECOVERED = "worker answers again"


Recorder = Callable[..., None]
"""Receives a `WorkerChange`, the worker's name, and further facts as keyword arguments, for the log; must not call back into the
pool."""


def ignore(change: WorkerChange, worker: str, **facts: object) -> None:
    """Do nothing; to be passed where a function receives the changes of workers for the log, if nothing is to be logged."""


class WorkerState(StrEnum):
    """State of a worker, as ``/workers`` shows it.

    Attributes:
        READY: The worker gets requests.
        UNHEALTHY: Discovery or health checks report that it cannot serve.
        CIRCUIT_OPEN: It gets no requests, or one test request at a time, because several requests in a row have failed.
        DRAINING: It finishes its requests and gets no new ones.
    """

    READY = "ready"
    UNHEALTHY = "unhealthy"
    CIRCUIT_OPEN = "circuit_open"
    DRAINING = "draining"


class Worker(WorkerLoad):
    """One worker and everything that the router knows about it. Times are in simulated seconds unless they are called real.

    Attributes:
        spec: Description from discovery.
        breaker: Circuit breaker of the worker.
        drained: Whether ``POST /workers/NAME/drain`` has stopped new requests.
        failed_checks: Number of consecutive failed health checks.
        silent_real_s: Real seconds for which health checks have got no answer. It is the sum over the checks, so that a
            pause of the router's own process does not count.
        progress: Progress counters from the engine's metrics at the last scrape.
        waiting_requests: Number of requests that wait inside the engine, at the last scrape; None if unknown.
        expired_leases: Cumulative number of KV leases that expired on the worker since its start, at the last scrape; None
            if unknown.
        failures: Cumulative number of failed requests.
        last_failure: Cause of the newest failure that was reported to the circuit breaker; empty if there is none.
        version: Version that the engine reports; None if it reports none or was not requested yet.
        is_version_read: Whether the version was requested since the process started.
        kv_engine: Identifier by which the engine introduces itself to workers that fetch its KV; None if unknown since the
            process started.
        speed: Tokens and durations of the worker's prefills and decodes, as this router measured them.
        lost_transfers: Number of KV transfers to or from the worker that were lost since the last successful one.
        has_answered_since_failure: Whether the worker has sent part of a correct response since its last failure.
        has_ever_answered: Whether the worker has ever sent part of a correct response, in this process or an earlier one
            with the same name.
        last_failure_after_success_s: Time of the last failure that followed a correct response, in simulated seconds; None
            if there was none since the process started or the worker's health recovered.
        failed_at: Time of the last failed request in simulated seconds, and the number of outages at that time; None if no
            request has failed since the worker was last seen alive.
        outages: Number of times that the worker was seen to be gone: new process, failed health checks, not ready, or
            removed by discovery without a drain.
        recoveries: Number of times that the worker was seen to be alive after a failed request.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        breaker: CircuitBreaker,
        *,
        record: Recorder = ignore,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(spec.name)
        self.spec = spec
        self._record = record
        self._on_change = on_change
        self.breaker = breaker
        self.drained = False
        # A supervisor checks a worker's health before it reports the worker as ready; a fixed list of workers does not.
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
        self.has_answered_since_failure = False
        self.has_ever_answered = False
        self.last_failure_after_success_s: float | None = None
        self.failed_at: tuple[float, int] | None = None
        self.outages = self.recoveries = 0
        self.speed = SpeedCounts()
        self._is_kept_in_use = False

    @property
    def health_problem(self) -> str | None:
        """Why the newest health checks failed for too long; None if the worker is healthy."""
        return self._health_problem

    @health_problem.setter
    def health_problem(self, problem: str | None) -> None:
        if problem is not None and self._health_problem is None:
            self.outages += 1
        self._health_problem = problem
        self._on_change()

    def state(self, now_s: float) -> tuple[WorkerState, str]:
        """Return the worker's state at ``now_s`` (simulated) and the reason of the state, as text.

        The reason of a ready worker is empty unless its last responses were failures.
        """
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
        """Whether the worker is ready, healthy and not draining, so that only its circuit breaker can keep requests from it."""
        spec = self.spec
        return spec.ready and not spec.draining and not self.drained and self.health_problem is None

    @property
    def loses_transfers(self) -> bool:
        """Whether as many KV transfers in a row were lost as requests in a row must fail to open the circuit breaker, or more."""
        return self.lost_transfers >= self.breaker.threshold

    @property
    def is_failing(self) -> bool:
        """Whether enough requests or KV transfers in a row have failed to open the circuit breaker; the worker can still be in use."""
        return self.breaker.is_failing or self.loses_transfers

    def confirm_alive(self) -> None:
        """Record that the worker has answered a health check that was sent after its last failed request: it is alive."""
        if self.failed_at is not None:
            self.failed_at = self.last_failure_after_success_s = None
            self.recoveries += 1

    def may_be_gone(self, now_s: float) -> bool:
        """Return whether a request failed at the worker within the last 5 simulated seconds (`OUTAGE_S`), and the worker may have died.

        False as soon as it is known whether it died.
        """
        if self.failed_at is None:
            return False
        failed_s, outages = self.failed_at
        return outages == self.outages and now_s - failed_s < OUTAGE_S

    def suspect(self, problem: str) -> None:
        """Treat the worker as unhealthy, so that it gets no requests, until a health check succeeds.

        Called for example after a refused connection.

        ``problem`` is the reason for logs and ``/workers``.
        """
        if self.health_problem is None:
            self._record(WorkerChange.SUSPECTED, self.name, problem=problem)
        self.health_problem = problem

    def failed(self, now_s: float, cause: str, *, probe: bool, proven: bool, openings: int) -> bool:
        """Record a failed request; return whether the circuit breaker counts it.

        Args:
            now_s: Current time in simulated seconds.
            cause: Cause of the failure, for logs and ``/workers``.
            probe: Whether the request was the probe: the single request that tests a circuit after its ejection time.
            proven: Whether the worker is at fault without doubt.
            openings: The circuit breaker's `openings` when the request was sent. If the circuit has opened since, the
                failure is not counted.
        """
        self.failures += 1
        self.failed_at = now_s, self.outages
        if self.has_answered_since_failure:
            self.has_answered_since_failure, self.last_failure_after_success_s = False, now_s
        if openings != self.breaker.openings:
            return False
        self.last_failure = cause
        counted = self.breaker.failed(now_s, probe=probe, proven=proven)
        self._note_verdict(openings, now_s, is_due=proven and self.breaker.is_failing)
        return counted

    def failure_confirmed(self, now_s: float) -> None:
        """Record that an earlier failure of a request here was the worker's fault, because another worker has served the request.

        Until then it was possible that the request itself caused the failure.
        """
        openings = self.breaker.openings
        self.breaker.failure_confirmed(now_s)
        self._note_verdict(openings, now_s, is_due=self.breaker.is_failing)

    def answered(self, *, probe: bool, is_complete: bool = True) -> None:
        """Record a correct response, or the correct first part of a probe's response (``is_complete=False``).

        ``probe`` says whether the request was the probe: the single request that tests a circuit after its ejection time. Its
        first part closes the circuit until the next failure, which opens it again at once; a complete response ends that.
        """
        self.has_answered_since_failure = self.has_ever_answered = True
        breaker = self.breaker
        if not (probe or breaker.failures or breaker.is_on_probation) and breaker.is_closed:
            return
        was_failing = breaker.is_failing
        if is_complete:
            breaker.succeeded(probe=probe)
        else:
            breaker.probe_started_ok()
        if was_failing and not breaker.is_failing:
            self._is_kept_in_use = False
            self._record(WorkerChange.RECOVERED, self.name, role=self.spec.role.value)

    def eject(self, now_s: float, cause: str) -> None:
        """Send the worker no more requests for some time (open its circuit), unless too many of its role are excluded already.

        ``cause`` is the cause for logs and ``/workers``; ``now_s`` is in simulated seconds.
        """
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
            self._is_kept_in_use = False
            facts["next_try_s"] = round(self.breaker.probe_in_s(now_s), 3)
            self._record(WorkerChange.EJECTED, self.name, **facts)
        elif is_due and self.breaker.is_closed and not self._is_kept_in_use:
            self._is_kept_in_use = True
            self._record(WorkerChange.KEPT, self.name, **facts)

    def _failing(self) -> str:
        count = self.breaker.failures
        if count:
            return f"{self.last_failure} ({count} failed requests in a row)"
        if self.loses_transfers:
            return f"{self.lost_transfers} KV transfers in a row were lost"
        return self.last_failure

    @property
    def is_expected(self) -> bool:
        """Whether the worker serves or will serve again without intervention, so that requests can wait for it.

        A worker that is only excluded for some time after failed requests (its circuit is open) counts as well.
        """
        return (self.spec.supervised and not self.drained) or self.takes_requests

    @property
    def keeps_its_cache(self) -> bool:
        """Whether the prefix index (assumed cache contents) of a worker that takes no requests now should be kept.

        It should if the worker will return with the same cache, or as a process that is known to be new (which clears the
        index).
        """
        return self.spec.supervised or self.health_problem is None

    def metrics_age_s(self, now_s: float) -> float | None:
        """Return the age of the worker's metrics in simulated seconds; None if they were never read."""
        return None if self.metrics_at_s is None else max(0.0, now_s - self.metrics_at_s)


class WorkerPool:
    """All workers by name: the present ones, which discovery lists, and those that it removed while they had requests.

    Iteration yields the present workers. ``breaker`` contains the settings of their circuit breakers; ``is_supervised`` says
    that something outside the router restarts workers; ``record`` is called with each change of a worker, for the log. All
    times are in simulated seconds.

    Attributes:
        versions_differ: Whether workers have reported different engine versions, so that some pairs of prefill and decode
            worker cannot transfer KV.
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
        # Caches, cleared when a worker joins, leaves, or changes its health, drain or circuit, because every request reads
        # them.
        self._serving_by_role: dict[Role, Sequence[Worker]] = {}
        self._closed: dict[Role, Sequence[Worker]] = {}

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    @property
    def leaving(self) -> Sequence[Worker]:
        """The workers that discovery no longer lists, but at which requests are still in flight."""
        self._leaving = [each for each in self._leaving if each.inflight_requests]
        return self._leaving

    def learn_version(self, worker: Worker, version: str | None) -> None:
        """Record the engine version that a worker's engine reports, and update `versions_differ`; None if it reports no version.

        Workers of different versions cannot transfer KV to each other.
        """
        worker.version, worker.is_version_read = version, True
        self.versions_differ = len({each.version for each in self if each.version is not None}) > 1

    def get(self, name: str) -> Worker | None:
        """Return a worker that discovery lists, by name; None if discovery lists no such worker."""
        return self._workers.get(name)

    def apply(self, specs: Iterable[WorkerSpec]) -> list[Worker]:
        """Apply ``specs``, the complete list of workers from discovery; return the workers that have a new process.

        Only workers that were in the previous list are returned. Workers that are missing from the list are removed.
        Requests in flight continue on their worker.
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
        # Policies see the workers in the order that discovery reports.
        self._workers = {name: self._workers[name] for name in wanted}
        return restarted

    def routable(self, role: Role, now_s: float) -> Sequence[Worker]:
        """Return the workers of a role that can be sent a request now.

        A worker whose circuit breaker is half-open (being tested after failures) can be sent one request at a time. While
        every worker of the role is ejected (excluded after failures), each one is tested after the first ejection time,
        however long its own ejection time has become.
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
        """Return whether the circuit breakers of all serving workers of a role are closed, so that each can be sent any request.

        A circuit that is not closed excludes its worker after failures, or admits one request as a test. Returns True if no
        worker serves.
        """
        if role in self._closed:
            return True
        pool = self._serving(role)
        if not all(each.breaker.is_closed for each in pool):
            return False
        self._closed[role] = pool
        return True

    def expects(self, role: Role) -> bool:
        """Return whether a worker of the role serves, or will without intervention; always True if workers are supervised.

        Workers are supervised if something outside the router, such as Kubernetes, starts and restarts them.
        """
        return self._is_supervised or any(
            each.spec.role is role and each.is_expected for each in self._workers.values()
        )

    def knows_any(self, roles: Collection[Role]) -> bool:
        """Return whether discovery lists a worker of one of the roles that is not draining; it does not have to be ready."""
        return any(
            each.spec.role in roles and not each.spec.draining and not each.drained
            for each in self._workers.values()
        )

    def inflight_requests(self, name: str) -> int:
        """Return the number of requests in flight at all workers named ``name``, including one that was replaced or removed.

        Raises:
            NotFoundError: discovery lists no worker of that name, and no request is in flight at one that it listed
                before.
        """
        found = [each for each in (*self._workers.values(), *self.leaving) if each.name == name]
        if not found:
            raise _unknown(name)
        return sum(each.inflight_requests for each in found)

    def set_drained(self, name: str, *, drained: bool) -> None:
        """Stop sending new requests to a worker (``drained=True``), or start again; does nothing if that is the case already.

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
            worker.has_answered_since_failure, worker.last_failure_after_success_s = False, None
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

        breaker = CircuitBreaker(config, may_open=may_open, on_change=self._touch)
        return Worker(spec, breaker, record=self._record, on_change=self._touch)

    def _touch(self) -> None:
        self._serving_by_role.clear()
        self._closed.clear()


def _unknown(name: str) -> NotFoundError:
    return NotFoundError(f"worker {name!r} is not known; GET /workers lists the names")
