"""The router's view of its workers: which there are, and which may be sent a request. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from penstock.api import BreakerConfig, Role
from penstock.core.errors import NotFoundError
from penstock.core.worker_metrics import NO_PROGRESS_KNOWN
from penstock.router.core.worker import (
    CircuitBreaker,
    Recorder,
    Worker,
    WorkerChange,
    WorkerEvent,
    ignore,
    may_eject,
)
from penstock.router.core.worker_spec import WorkerSpec


class WorkerPool:
    """All workers by name, including those that discovery dropped while they had requests."""

    def __init__(
        self, breaker: BreakerConfig, *, is_supervised: bool = False, record: Recorder = ignore
    ) -> None:
        self._breaker = breaker
        self._is_supervised = is_supervised
        self._record = record
        self._workers: dict[str, Worker] = {}
        self._leaving: list[Worker] = []
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

    def get(self, name: str) -> Worker | None:
        """Return a worker by name."""
        return self._workers.get(name)

    def apply(self, specs: Iterable[WorkerSpec]) -> list[Worker]:
        """Apply what discovery reports; requests under way continue where they are.

        Returns:
            The workers whose process is a new one, under a name that was known before.
        """
        wanted = {spec.name: spec for spec in specs}
        restarted = []
        self._touch()
        for name in [name for name in self._workers if name not in wanted]:
            self._note(WorkerChange.LEFT, name)
            self._let_go(self._workers.pop(name))
        for name, spec in wanted.items():
            worker = self._workers.get(name)
            if worker is None or (worker.spec.url, worker.spec.role) != (spec.url, spec.role):
                joined = self._workers[name] = self._new_worker(spec)
                if worker is not None:
                    self._let_go(worker)
                    restarted.append(joined)
                self._note(WorkerChange.JOINED, name, role=spec.role.value, url=spec.url, ready=spec.ready)
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
            self._touch()
            self._note(WorkerChange.DRAINED if drained else WorkerChange.UNDRAINED, name)

    def _note(self, change: WorkerChange, name: str, **facts: object) -> None:
        self._record(WorkerEvent(change, name, facts))

    def _let_go(self, worker: Worker) -> None:
        self._leaving = [*self.leaving, worker]

    def _update(self, worker: Worker, spec: WorkerSpec) -> None:
        old = worker.spec
        worker.spec = spec
        if old.incarnation != spec.incarnation:
            worker.breaker.reset()
            worker.lost_transfers = 0
            worker.kv_usage_fraction = None
            worker.waiting_requests = None
            worker.expired_leases = None
            worker.progress = NO_PROGRESS_KNOWN
        if spec.ready and not old.ready:
            worker.health_problem = None
            worker.failed_checks = 0
        if (old.ready, old.draining) != (spec.ready, spec.draining):
            self._note(
                WorkerChange.CHANGED,
                spec.name,
                ready=spec.ready,
                draining=spec.draining,
                reason=spec.reason,
            )

    def _serving(self, role: Role) -> Sequence[Worker]:
        """Return the workers of a role that would be sent requests if their circuits were closed."""
        serving = self._serving_by_role.get(role)
        if serving is None:
            serving = [
                each for each in self._workers.values() if each.spec.role is role and each.takes_requests
            ]
            self._serving_by_role[role] = serving
        return serving

    def _new_worker(self, spec: WorkerSpec) -> Worker:
        return Worker(spec, self._new_breaker(spec.role), record=self._record, touched=self._touch)

    def _touch(self) -> None:
        """Forget which workers may be sent requests."""
        self._serving_by_role.clear()
        self._closed.clear()

    def _new_breaker(self, role: Role) -> CircuitBreaker:
        config = self._breaker

        def may_open() -> bool:
            pool = self._serving(role)
            ejected = sum(not each.breaker.is_closed for each in pool)
            return may_eject(ejected=ejected, pool=len(pool), max_fraction=config.max_ejected_fraction)

        return CircuitBreaker(
            consecutive_failures=config.consecutive_failures,
            open_s=config.open_seconds,
            max_open_s=config.max_open_seconds,
            may_open=may_open,
            touched=self._touch,
        )
