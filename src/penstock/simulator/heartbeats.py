"""KV transfer between simulated engines: lease heartbeats while a decode waits for the KV, its release after the read, and failures."""

from __future__ import annotations

from collections.abc import Callable

from penstock.engine.core.lease import HeartbeatSchedule
from penstock.simulator.fleet import SimulatedFleet, SimulatedWorker
from penstock.simulator.jobs import Job
from penstock.simulator.kernel import Kernel, Order
from penstock.simulator.servers import SimulatedEngine


class Heartbeats:
    """Sends the heartbeats of all decode workers; a heartbeat extends the lease on the KV that the decode worker waits for.

    A lease is the time for which a prefill worker keeps a prompt's KV for a decode worker. Messages take no simulated time; KV transfers
    take the time that the link model of each engine computes.
    """

    def __init__(
        self,
        kernel: Kernel,
        fleet: SimulatedFleet,
        *,
        settle: Callable[[SimulatedWorker], None],
        lost: Callable[[SimulatedWorker, Job], None],
    ) -> None:
        """Start without leases.

        Args:
            kernel: Events and virtual time.
            fleet: All existing workers.
            settle: Callback that receives a prefill worker whose leases have changed, so that the next call of its server is scheduled.
            lost: Callback that receives a decode worker and a job whose KV was lost.
        """
        self._kernel = kernel
        self._fleet = fleet
        self._settle = settle
        self._lost = lost
        self._schedules: dict[str, HeartbeatSchedule] = {}
        self._by_name: dict[str, Job] = {}

    def track(self, decoder: SimulatedWorker, job: Job) -> None:
        """Let the decode worker ``decoder`` send heartbeats for a request (``job``) from now on, until `read` is called or the lease is lost.

        Each heartbeat extends the lease, the time for which the request's prefill worker keeps the prompt's KV for the decode worker.
        """
        schedule = self._schedules.get(decoder.name)
        if schedule is None:
            interval_s = _engine(decoder).engine.settings.lease.heartbeat_interval_s
            schedule = self._schedules[decoder.name] = HeartbeatSchedule(interval_s)
        was_idle = schedule.next_s() is None
        schedule.track(_engine_id(job), job.name)
        self._by_name[job.name] = job
        if was_idle:
            self._arm(decoder, schedule)

    def read(self, decoder: SimulatedWorker, job: Job) -> None:
        """Record that the KV of a request (``job``) has arrived at the decode worker ``decoder``, and free the KV on the prefill worker.

        If the prefill worker has died, or has dropped the KV because its lease (keeping time) has expired, the request is lost, and the
        router decides whether it is retried.
        """
        self._untrack(decoder, job)
        source = self._source(job)
        now_s = self._kernel.now_s
        unknown = [job.name] if source is None else _engine(source).end_leases([job.name], now_s)
        if unknown:
            self._lose(decoder, job)
        if source is not None:
            self._settle(source)

    def release(self, job: Job) -> None:
        """Free the KV of a request's prompt on its prefill worker, since no decode worker was found for the request."""
        source = self._source(job)
        if source is not None:
            _engine(source).end_leases([job.name], self._kernel.now_s)
            self._settle(source)

    def forget(self, worker: SimulatedWorker) -> None:
        """Stop the heartbeats that a worker which died was sending for its requests."""
        self._schedules.pop(worker.name, None)
        for job in worker.jobs.values():
            self._by_name.pop(job.name, None)

    def _arm(self, decoder: SimulatedWorker, schedule: HeartbeatSchedule) -> None:
        due_s = schedule.next_s()
        if due_s is not None:
            self._kernel.at(max(due_s, self._kernel.now_s), Order.MESSAGE, self._send, decoder, schedule)

    def _send(self, decoder: SimulatedWorker, schedule: HeartbeatSchedule) -> None:
        if self._schedules.get(decoder.name) is not schedule:
            return
        now_s = self._kernel.now_s
        for names in schedule.due(now_s).values():
            jobs = [self._by_name[name] for name in names]
            source = self._source(jobs[0])
            lost = set(names) if source is None else set(_engine(source).extend_leases(names, now_s))
            if source is not None:
                self._settle(source)
            for job in jobs:
                if job.name in lost:
                    self._untrack(decoder, job)
                    self._lose(decoder, job)
        self._arm(decoder, schedule)

    def _source(self, job: Job) -> SimulatedWorker | None:
        source = self._fleet.get(job.worker)
        return source if source is not None and source.incarnation == job.incarnation else None

    def _lose(self, decoder: SimulatedWorker, job: Job) -> None:
        """Abort a job whose KV cannot be fetched. The decode fails, as vLLM does by default, and the router tries again."""
        _engine(decoder).abort(job.name, self._kernel.now_s)
        self._lost(decoder, job)

    def _untrack(self, decoder: SimulatedWorker, job: Job) -> None:
        self._by_name.pop(job.name, None)
        schedule = self._schedules.get(decoder.name)
        if schedule is not None:
            schedule.untrack(_engine_id(job), job.name)


def _engine_id(job: Job) -> str:
    return f"{job.worker}#{job.incarnation}"


def _engine(worker: SimulatedWorker) -> SimulatedEngine:
    server = worker.server
    assert isinstance(server, SimulatedEngine)  # noqa: S101 - both stages run the engine core
    return server
