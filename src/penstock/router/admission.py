"""Drives the router's state machine on the event loop: a future for each waiting request, and the clock.

`penstock.router.core` makes all decisions; this module only applies its effects to futures, and logs its worker events.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Final, Protocol, TypeAlias

from penstock.api import Role, Tier
from penstock.core.errors import PenstockError
from penstock.core.logs import get_logger
from penstock.router.core.retries import Assignment, Effects, RefusalReason, Refuse
from penstock.router.core.router import RouterCore
from penstock.router.core.worker import Worker, WorkerChange, WorkerSpec
from penstock.router.policy.arrival import Arrival
from penstock.router.policy.busy import ALL_BUSY, BusyThresholds
from penstock.router.policy.slo_monitor import EndedRequest

log = get_logger(__name__)


class RemoteWaiter(Protocol):
    """A request that another router's client has sent, as this router's core queues it."""

    def assigned(self, assignment: LiveAssignment) -> bool:
        """Send the assignment to the router whose client waits for it; return False if that request no longer exists."""

    def refused(self, refuse: Refuse[Waiter]) -> None:
        """Send the rejection ``refuse`` to the router whose client sent the request."""


Waiter: TypeAlias = "asyncio.Future[LiveAssignment] | RemoteWaiter"
"""A request as the router core queues it, by a future or as another router's; it receives the assignment or the rejection."""
LiveAssignment: TypeAlias = Assignment[Waiter]
"""An `Assignment` of the live router."""
LiveCore: TypeAlias = RouterCore[Waiter]
"""The `RouterCore` of the live router."""


class AdmissionError(PenstockError):
    """A request is rejected and gets no worker; its text is the message for the client.

    Attributes:
        reason: Why it is rejected.
        retry_after_s: Time until capacity is expected, in simulated seconds; None if unknown.
    """

    def __init__(self, reason: RefusalReason, message: str, retry_after_s: float | None = None) -> None:
        self.reason = reason
        self.retry_after_s = retry_after_s
        super().__init__(message)


_WARNINGS: Final = frozenset({WorkerChange.EJECTED, WorkerChange.KEPT})


def log_worker_change(change: WorkerChange, worker: str, **facts: object) -> None:
    """Log a change of a worker, as a warning if the worker was ejected or should be.

    Ejected workers get no requests for some time. ``facts`` are further values for the log line.
    """
    write = log.warning if change in _WARNINGS else log.info
    write(change.value, worker=worker, **facts)


class Picker(Protocol):
    """Chooses workers for this router's own requests, and is informed about these requests.

    The choice is made by this router itself, or by the one router that chooses for all routers of the graph. A waiter is
    the future of a request that waits for its assignment. Times are in simulated seconds.
    """

    def ask(
        self, waiter: asyncio.Future[LiveAssignment], role: Role, arrival: Arrival, *, is_retry: bool
    ) -> None:
        """Queue a request for a worker of ``role``; the future ``waiter`` later receives its assignment or an `AdmissionError`.

        ``is_retry`` says that the request was admitted before (a retry), so that no limit on the length of the queue applies.
        """

    def cancel(self, waiter: asyncio.Future[LiveAssignment], role: Role) -> None:
        """Remove a request that waits for a worker, because its client has disconnected or it was rejected.

        ``waiter`` is the future that `ask` was called with. Does nothing if the request does not wait.
        """

    def dispatched(self, assignment: LiveAssignment, role: Role, arrival: Arrival) -> None:
        """Record that a request is about to be sent to its worker; if this raises an AdmissionError, the caller does not send it.

        Args:
            assignment: The request's assignment to the worker.
            role: Role for which the worker was requested.
            arrival: The request as routing policies see it.
        """

    def release(self, assignment: LiveAssignment) -> None:
        """Record that a request has left its worker, which then has capacity for another one."""

    def prefilled(
        self, assignment: LiveAssignment, cached_tokens: int | None = None, *, measured: bool = True
    ) -> None:
        """Record that a worker has computed a request's prompt; other requests may then be sent to the worker.

        ``cached_tokens`` is the number of prompt tokens that the worker found in its cache (None if unknown). ``measured``
        says whether this is reported at the moment at which the prefill ended, so that its duration is meaningful.
        """

    def refused_at_capacity(self, worker: Worker) -> None:
        """Record that a worker has refused a request for lack of capacity."""

    def record_tier_event(
        self, tier: Tier, *, ttft_s: float | None = None, ended: EndedRequest | None = None
    ) -> None:
        """Record an event of a request for its tier.

        ``ttft_s`` is the time from arrival to first token in simulated seconds, if the first token has arrived; ``ended``
        contains the latencies if the request has ended. If both are None, the request was rejected.
        """


class OwnPicker:
    """The picker that uses this router's own core.

    Attributes:
        core: State machine of this router.
        now_s: Returns the current time in simulated seconds.
    """

    def __init__(self, core: LiveCore, now_s: Callable[[], float]) -> None:
        self.core = core
        self.now_s = now_s

    def ask(
        self, waiter: asyncio.Future[LiveAssignment], role: Role, arrival: Arrival, *, is_retry: bool
    ) -> None:
        """Queue a request for a worker of ``role`` in this router's own core.

        The future ``waiter`` later receives its assignment or an `AdmissionError`. ``is_retry`` says that the request was
        admitted before (a retry).
        """
        self.apply(self.core.acquire(waiter, role, arrival, self.now_s(), is_retry=is_retry))

    def cancel(self, waiter: asyncio.Future[LiveAssignment], role: Role) -> None:
        """Remove a request that waits for a worker from the queue; does nothing if it does not wait.

        ``waiter`` is the future that `ask` was called with.
        """
        self.core.cancel(waiter, role, self.now_s())

    def dispatched(self, assignment: LiveAssignment, role: Role, arrival: Arrival) -> None:
        """Do nothing: this router's core has chosen the worker itself, and has already counted the request as running there."""

    def release(self, assignment: LiveAssignment) -> None:
        """Release the worker, and dispatch other requests to it if possible; does nothing on repeated calls."""
        effects = self.core.release(assignment, self.now_s())
        if effects:
            self.apply(effects)

    def prefilled(
        self, assignment: LiveAssignment, cached_tokens: int | None = None, *, measured: bool = True
    ) -> None:
        """Record in this router's core that a prompt was computed, and dispatch waiting requests that fit now.

        ``cached_tokens`` is the number of prompt tokens that the worker found in its cache (None if unknown). ``measured``
        says whether this is reported at the moment at which the prefill ended, so that its duration is meaningful.
        """
        now_s = self.now_s()
        self.apply(self.core.prefilled(assignment, now_s, cached_tokens=cached_tokens, measured=measured))

    def refused_at_capacity(self, worker: Worker) -> None:
        """Record that a worker has refused a request for lack of capacity."""
        self.core.refused_at_capacity(worker, self.now_s())

    def record_tier_event(
        self, tier: Tier, *, ttft_s: float | None = None, ended: EndedRequest | None = None
    ) -> None:
        """Record an event of a request for its tier; does nothing if tiers are disabled.

        ``ttft_s`` is the time from arrival to first token in simulated seconds, if the first token has arrived; ``ended``
        contains the latencies if the request has ended. If both are None, the request was rejected.
        """
        tiers = self.core.tiers
        if tiers is None:
            return
        if ttft_s is not None:
            tiers.first_token(tier, ttft_s, self.now_s())
        elif ended is not None:
            tiers.ended(tier, ended, self.now_s())
        else:
            tiers.rejected(tier)

    def apply(self, effects: Effects[Waiter]) -> None:
        """Pass the assignments and rejections in ``effects``, from the router core, to the requests that wait for them.

        An assignment whose client has disconnected is released, which can lead to further assignments.
        """
        pending = list(effects)
        for effect in pending:
            if isinstance(effect, Assignment):
                if not _is_taken(effect.item, effect):
                    pending += self.core.release(effect, self.now_s())
            elif not isinstance(effect.item, asyncio.Future):
                effect.item.refused(effect)
            elif not effect.item.done():
                effect.item.set_exception(AdmissionError(effect.reason, effect.message, effect.retry_after_s))


class Admission:
    """Acquires workers for requests; used by one thread, on one event loop.

    A picker chooses the workers: this router's own core, or another router of the graph.

    Attributes:
        core: State machine of this router.
    """

    def __init__(self, core: LiveCore, now_s: Callable[[], float], picker: Picker | None = None) -> None:
        """Create the admission of a router.

        Args:
            core: State machine of this router.
            now_s: Returns the current time in simulated seconds.
            picker: Chooses the workers; None uses ``core``.
        """
        self.core = core
        self._now_s = now_s
        self._own = OwnPicker(core, now_s)
        self._picker: Picker = picker or self._own
        self._listeners: list[Callable[[], None]] = []

    async def wait(self, role: Role, arrival: Arrival, *, is_retry: bool = False) -> LiveAssignment:
        """Wait for a worker of a role and return the assignment, which the caller must release.

        ``is_retry`` says that the request was admitted before (a retry): no limit on the queue's length applies, and it is put
        before all others.

        Raises:
            AdmissionError: the request is rejected.
        """
        waiter: asyncio.Future[LiveAssignment] = asyncio.get_running_loop().create_future()
        try:
            self._picker.ask(waiter, role, arrival, is_retry=is_retry)
            assignment = waiter.result() if waiter.done() else await waiter
            self._picker.dispatched(assignment, role, arrival)
        except BaseException:
            self._picker.cancel(waiter, role)
            # The worker may have been assigned in the same turn of the event loop in which the client disconnected.
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.release(waiter.result())
            raise
        return assignment

    def release(self, assignment: LiveAssignment) -> None:
        """End a request's assignment to its worker, so that the worker can take another request."""
        self._picker.release(assignment)

    def prefilled(self, assignment: LiveAssignment, cached_tokens: int | None = None) -> None:
        """Record that a prompt was computed, before its response is complete.

        ``cached_tokens`` is the number of prompt tokens that the worker found in its cache; None if unknown.
        """
        self._picker.prefilled(assignment, cached_tokens)

    def refused_at_capacity(self, worker: Worker) -> None:
        """Record that a worker has refused a request for lack of capacity."""
        self._picker.refused_at_capacity(worker)

    def record_tier_event(
        self, tier: Tier, *, ttft_s: float | None = None, ended: EndedRequest | None = None
    ) -> None:
        """Record an event of a request for its tier; does nothing if tiers are disabled.

        Args:
            tier: Tier of the request.
            ttft_s: Time from arrival to first token, in simulated seconds, if the first token has arrived.
            ended: Latencies of the request, if it has ended. If both are None, the request was rejected.
        """
        self._picker.record_tier_event(tier, ttft_s=ttft_s, ended=ended)

    # ------------------------------------------------------------------ workers and time

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` from now on after every change of the workers (joined, removed, or their state changed)."""
        self._listeners.append(listener)

    def set_workers(self, specs: Iterable[WorkerSpec]) -> None:
        """Apply ``specs``, the complete list of workers that discovery reports, and dispatch the requests that can be sent now."""
        self._own.apply(self.core.set_workers(specs, self._now_s()))
        self._notify()

    def workers_changed(self) -> None:
        """Update the queues after a change in a worker's health, and dispatch the requests that can be sent now."""
        self._own.apply(self.core.workers_changed(self._now_s()))
        self._notify()

    def set_drained(self, name: str, *, drained: bool) -> None:
        """Stop sending new requests to a worker (``drained=True``), or start again.

        Raises:
            NotFoundError: no worker has that name.
        """
        self.core.pool.set_drained(name, drained=drained)
        self.workers_changed()

    def tick(self) -> None:
        """Reject requests whose time limit has passed, and apply the other effects of elapsed time; called every 0.1 real seconds."""
        now_s = self._now_s()
        self._own.apply(self.core.expire(now_s))
        self._own.apply(self.core.tick(now_s))

    def load_read(self, worker: Worker) -> None:
        """Record that a worker's metrics were scraped, and dispatch the requests that can be sent now."""
        self._own.apply(self.core.load_read(worker, self._now_s()))

    def set_thresholds(self, thresholds: BusyThresholds) -> None:
        """Replace the thresholds above which workers are busy. They apply to new requests; no waiting one is rejected."""
        self.core.set_thresholds(thresholds, self._now_s())

    def check_capacity(self, role: Role) -> None:
        """Check that a new request that is sent to a decode worker directly, without a prefill worker, can be admitted.

        Raises:
            AdmissionError: all workers of the role are busy.
        """
        full = self.core.stages.full(role, self._now_s())
        if full is not None:
            raise self.all_busy(full)

    def check_tier(self, tier: Tier) -> None:
        """Count a new request that is sent to a decode worker directly, and check that its tier is not shed.

        Raises:
            AdmissionError: the tier is shed.
        """
        tiers = self.core.tiers
        shed = None if tiers is None else tiers.arrived(tier)
        if shed is not None and tiers is not None:
            self.core.rejections[self.core.entry].add(self._now_s())
            raise AdmissionError(RefusalReason.SHED, shed, tiers.monitor.tiers.shedding.recover_seconds)

    def all_busy(self, role: Role) -> AdmissionError:
        """Count a request as rejected because all workers of ``role`` are busy, and return the exception to raise for it.

        It contains the time until a worker is expected to take requests again, if that is known.
        """
        self.core.rejections[role].add(self._now_s())
        return AdmissionError(RefusalReason.ALL_BUSY, ALL_BUSY, self.core.busy[role].free_in_s())

    def problems(self) -> list[str]:
        """Return the reasons for which a new request would be rejected now; empty if it would be served or wait."""
        return self.core.problems(self._now_s())

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()


def _is_taken(item: Waiter, assignment: LiveAssignment) -> bool:
    if not isinstance(item, asyncio.Future):
        return item.assigned(assignment)
    if item.done():
        return False
    item.set_result(assignment)
    return True
