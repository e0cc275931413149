"""The router's view of its workers: discovery, health, drains, circuit and what is in flight there.

One thread, one event loop: everything here is changed by callbacks and read by policies between awaits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from typing import Protocol

from penstock_core.errors import NotFoundError
from penstock_core.logs import get_logger
from penstock_graph.models import BreakerConfig, Role
from penstock_router.discovery.spec import WorkerSpec
from penstock_router.policy.breaker import Circuit, CircuitBreaker
from penstock_router.policy.candidate import Candidate

log = get_logger(__name__)

KV_MAX_AGE_S = 10.0
"""Chosen: ten scrapes; an older KV reading says nothing about now, so policies fall back on tokens."""


class WorkerState(StrEnum):
    """One word for a worker, as ``/workers`` shows it."""

    READY = "ready"
    UNHEALTHY = "unhealthy"
    CIRCUIT_OPEN = "circuit_open"
    DRAINING = "draining"


class Worker:
    """One worker and everything the router knows of it.

    Attributes:
        spec: As discovery reports it.
        breaker: Its circuit.
        drained: Told to take nothing new, by ``POST /workers/NAME/drain``.
        health_problem: Why the newest health checks failed for too long, or None.
        inflight_requests: Requests under way.
        inflight_tokens: Their tokens.
        kv_usage_fraction: Last reading, 0-1; None when unknown.
        expired_leases: KV leases that ran out there since its start, last reading; None when unknown.
        scraped_tokens: ``inflight_tokens`` at that reading.
        metrics_at_s: When its metrics were last read, modelled seconds; None: never.
        failed_checks: Health checks failed in a row.
    """

    __slots__ = (
        "breaker",
        "drained",
        "expired_leases",
        "failed_checks",
        "health_problem",
        "inflight_requests",
        "inflight_tokens",
        "kv_usage_fraction",
        "metrics_at_s",
        "scraped_tokens",
        "spec",
    )

    def __init__(self, spec: WorkerSpec, breaker: CircuitBreaker) -> None:
        self.spec = spec
        self.breaker = breaker
        self.drained = False
        # Whoever supervises a worker has seen its health before calling it ready; a fixed list has not.
        self.health_problem: str | None = None if spec.supervised else "not checked yet"
        self.failed_checks = 0
        self.inflight_requests = 0
        self.inflight_tokens = 0
        self.kv_usage_fraction: float | None = None
        self.expired_leases: float | None = None
        self.scraped_tokens = 0
        self.metrics_at_s: float | None = None

    @property
    def name(self) -> str:
        """Unique name."""
        return self.spec.name

    def state(self, now_s: float) -> tuple[WorkerState, str]:
        """Return the state and its reason, which is empty for ready."""
        if self.spec.draining or self.drained:
            return WorkerState.DRAINING, "leaving the graph" if self.spec.draining else "drained on request"
        if not self.spec.ready:
            return WorkerState.UNHEALTHY, self.spec.reason or "not ready"
        if self.health_problem is not None:
            return WorkerState.UNHEALTHY, self.health_problem
        if self.breaker.state(now_s) is not Circuit.CLOSED:
            return WorkerState.CIRCUIT_OPEN, "too many failed requests in a row"
        return WorkerState.READY, ""

    def is_routable(self, now_s: float) -> bool:
        """Return whether a request may be sent there now; one may while its circuit is half-open."""
        spec = self.spec
        return (
            spec.ready
            and not spec.draining
            and not self.drained
            and self.health_problem is None
            and self.breaker.allows(now_s)
        )

    def suspect(self, problem: str) -> None:
        """Send nothing new there until a health check succeeds; for a refused connection."""
        if self.health_problem is None:
            log.info("worker suspected", worker=self.name, problem=problem)
        self.health_problem = problem

    @property
    def is_expected(self) -> bool:
        """Whether it will serve again without anybody's help: worth waiting for."""
        return self.spec.supervised and not self.drained

    def metrics_age_s(self, now_s: float) -> float | None:
        """Return the age of its metrics in modelled seconds; None if they were never read."""
        return None if self.metrics_at_s is None else max(0.0, now_s - self.metrics_at_s)

    def candidate(self, now_s: float) -> Candidate:
        """Return what policies may know of it."""
        usage = self.kv_usage_fraction
        if usage is not None and (self.metrics_at_s is None or now_s - self.metrics_at_s > KV_MAX_AGE_S):
            usage = None
        spec = self.spec
        return Candidate(
            spec.name, spec.role, self.inflight_requests, self.inflight_tokens, usage, self.scraped_tokens
        )


class Computed(Protocol):
    """Told once that a worker has computed a prompt."""

    def __call__(self, cached_tokens: int | None, *, measured: bool) -> None:
        """Take what `InFlight.computed` was told."""


class InFlight:
    """One request's share of a worker's counters; given back exactly once, whatever happened."""

    __slots__ = ("_on_computed", "_on_end", "_open", "_probe", "tokens", "worker")

    def __init__(
        self,
        worker: Worker,
        tokens: int,
        *,
        now_s: float,
        on_end: Callable[[], None] | None = None,
        on_computed: Computed | None = None,
    ) -> None:
        """Count a request in.

        Args:
            worker: Where it goes.
            tokens: Prompt tokens, known or estimated.
            now_s: Modelled seconds.
            on_end: Called when the request has left the worker.
            on_computed: Called at most once, with what `computed` is told.
        """
        self.worker = worker
        self.tokens = tokens
        self._open = True
        self._on_end = on_end
        self._on_computed = on_computed
        self._probe = worker.breaker.sent(now_s)
        worker.inflight_requests += 1
        worker.inflight_tokens += tokens

    def computed(self, cached_tokens: int | None = None, *, measured: bool = True) -> None:
        """Note that the worker has computed the prompt; what follows is decoding.

        Args:
            cached_tokens: Prompt tokens that it found in its cache; None: not known.
            measured: Whether this is noticed as it happens, and not only at the end of the answer.
        """
        on_computed, self._on_computed = self._on_computed, None
        if self._open and on_computed is not None:
            on_computed(cached_tokens, measured=measured)

    def grow(self, tokens: int) -> None:
        """Count generated tokens."""
        self.tokens += tokens
        self.worker.inflight_tokens += tokens

    def succeeded(self) -> None:
        """End with an answer below 500."""
        if self._open:
            self.worker.breaker.succeeded(probe=self._probe)
            self._end()

    def failed(self, now_s: float) -> None:
        """End with a 5xx, a time-out or a broken or refused connection."""
        if self._open:
            self.worker.breaker.failed(now_s, probe=self._probe)
            self._end()

    def abandon(self) -> None:
        """End without a verdict on the worker; does nothing after another end."""
        if self._open:
            self.worker.breaker.abandoned(probe=self._probe)
            self._end()

    def _end(self) -> None:
        self._open = False
        self.worker.inflight_requests -= 1
        self.worker.inflight_tokens -= self.tokens
        if self._on_end is not None:
            self._on_end()


class Fleet:
    """All workers by name, and those that discovery has dropped while requests were under way."""

    def __init__(self, breaker: BreakerConfig, *, is_supervised: bool = False) -> None:
        """Start without workers.

        Args:
            breaker: Of their circuits.
            is_supervised: Somebody sees to it that there are workers, so one may be waited for even while none
                is known.
        """
        self._breaker = breaker
        self._is_supervised = is_supervised
        self._workers: dict[str, Worker] = {}
        self._leaving: list[Worker] = []
        self._listeners: list[Callable[[], None]] = []

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call back after every change of who may be routed to."""
        self._listeners.append(listener)

    def changed(self) -> None:
        """Tell the listeners; called by whoever changes a worker's health."""
        for listener in self._listeners:
            listener()

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def get(self, name: str) -> Worker | None:
        """Return a worker by name."""
        return self._workers.get(name)

    def apply(self, specs: Iterable[WorkerSpec]) -> None:
        """Take over what discovery reports; requests under way go on where they are."""
        wanted = {spec.name: spec for spec in specs}
        for name in [name for name in self._workers if name not in wanted]:
            log.info("worker left", worker=name)
            self._let_go(self._workers.pop(name))
        for name, spec in wanted.items():
            worker = self._workers.get(name)
            if worker is None or (worker.spec.url, worker.spec.role) != (spec.url, spec.role):
                if worker is not None:
                    self._let_go(worker)
                self._workers[name] = Worker(spec, self._new_breaker())
                log.info("worker joined", worker=name, role=spec.role.value, url=spec.url, ready=spec.ready)
            elif worker.spec != spec:
                self._update(worker, spec)
        self.changed()

    def routable(self, role: Role, now_s: float) -> list[Worker]:
        """Return the workers of a role that may be sent a request now."""
        return [each for each in self._workers.values() if each.spec.role is role and each.is_routable(now_s)]

    def expects(self, role: Role) -> bool:
        """Return whether a worker of the role serves or will serve without anybody's help."""
        return self._is_supervised or any(
            each.spec.role is role and each.is_expected for each in self._workers.values()
        )

    def inflight_requests(self, name: str) -> int:
        """Return the requests under way at every worker of that name, one that was replaced included.

        Raises:
            NotFoundError: no worker has or had that name.
        """
        self._leaving = [each for each in self._leaving if each.inflight_requests]
        found = [each for each in (*self._workers.values(), *self._leaving) if each.name == name]
        if not found:
            raise NotFoundError(f"worker {name!r} is not known; GET /workers lists the names")
        return sum(each.inflight_requests for each in found)

    def set_drained(self, name: str, *, drained: bool) -> None:
        """Stop, or start again, sending new requests to a worker.

        Raises:
            NotFoundError: no worker has that name.
        """
        worker = self._workers.get(name)
        if worker is None:
            raise NotFoundError(f"worker {name!r} is not known; GET /workers lists the names")
        if worker.drained is not drained:
            worker.drained = drained
            log.info("worker drained" if drained else "worker undrained", worker=name)
            self.changed()

    def _let_go(self, worker: Worker) -> None:
        self._leaving = [each for each in self._leaving if each.inflight_requests]
        if worker.inflight_requests:
            self._leaving.append(worker)

    def _update(self, worker: Worker, spec: WorkerSpec) -> None:
        old = worker.spec
        worker.spec = spec
        if old.incarnation != spec.incarnation:
            worker.breaker.reset()
            worker.kv_usage_fraction = None
            worker.expired_leases = None
        if spec.ready and not old.ready:
            worker.health_problem = None
            worker.failed_checks = 0
        if (old.ready, old.draining) != (spec.ready, spec.draining):
            log.info(
                "worker changed",
                worker=spec.name,
                ready=spec.ready,
                draining=spec.draining,
                reason=spec.reason,
            )

    def _new_breaker(self) -> CircuitBreaker:
        return CircuitBreaker(
            consecutive_failures=self._breaker.consecutive_failures, open_s=self._breaker.open_seconds
        )
