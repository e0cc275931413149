"""Drives the router's state machine on the event loop: a future for each waiting request, and the clock.

`penstock.router.core` decides; this module only ties its effects to futures, and its worker events to the log.
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
    """A request of another router's, as the core queues it."""

    def assigned(self, assignment: LiveAssignment) -> bool:
        """Notify its router; returns whether that still wants it."""

    def refused(self, refuse: Refuse[Waiter]) -> None:
        """Notify its router."""


Waiter: TypeAlias = "asyncio.Future[LiveAssignment] | RemoteWaiter"
"""What the core queues: it gets the assignment, or the refusal."""
LiveAssignment: TypeAlias = Assignment[Waiter]
LiveCore: TypeAlias = RouterCore[Waiter]


class AdmissionError(PenstockError):
    """A request gets no worker; ``retry_after_s`` is when there is expected to be room, simulated seconds; None: unknown."""

    def __init__(self, reason: RefusalReason, message: str, retry_after_s: float | None = None) -> None:
        self.reason = reason
        self.retry_after_s = retry_after_s
        super().__init__(message)


_WARNINGS: Final = frozenset({WorkerChange.EJECTED, WorkerChange.KEPT})


def log_worker_change(change: WorkerChange, worker: str, **facts: object) -> None:
    """Write a worker's change into the log."""
    write = log.warning if change in _WARNINGS else log.info
    write(change.value, worker=worker, **facts)


class Picker(Protocol):
    """Chooses the workers of a router's own requests, and follows them there."""

    def ask(
        self, waiter: asyncio.Future[LiveAssignment], role: Role, arrival: Arrival, *, again: bool
    ) -> None:
        """Have the waiter get a worker, or the refusal; see `Admission.wait`."""

    def cancel(self, waiter: asyncio.Future[LiveAssignment], role: Role) -> None:
        """Forget a waiter, whose client has left or that was refused."""

    def dispatched(self, assignment: LiveAssignment, role: Role, arrival: Arrival) -> None:
        """Record that a request goes to its worker; an AdmissionError takes it back."""

    def release(self, assignment: LiveAssignment) -> None:
        """Record that a request has left its worker."""

    def prefilled(
        self, assignment: LiveAssignment, cached_tokens: int | None = None, *, measured: bool = True
    ) -> None:
        """Record that a prompt was computed."""

    def refused_at_capacity(self, worker: Worker) -> None:
        """Record that a worker has no room for another request."""

    def record_tier_event(
        self, tier: Tier, *, ttft_s: float | None = None, ended: EndedRequest | None = None
    ) -> None:
        """Record what became of a request of a tier; see `Admission.record_tier_event`."""


class OwnPicker:
    """This router's own core picks."""

    def __init__(self, core: LiveCore, now_s: Callable[[], float]) -> None:
        self.core = core
        self.now_s = now_s

    def ask(
        self, waiter: asyncio.Future[LiveAssignment], role: Role, arrival: Arrival, *, again: bool
    ) -> None:
        """Acquire a worker for the waiter."""
        self.apply(self.core.acquire(waiter, role, arrival, self.now_s(), again=again))

    def cancel(self, waiter: asyncio.Future[LiveAssignment], role: Role) -> None:
        """Take a waiter out of the queue."""
        self.core.cancel(waiter, role, self.now_s())

    def dispatched(self, assignment: LiveAssignment, role: Role, arrival: Arrival) -> None:
        """Do nothing: the core knows where it sent the request."""

    def release(self, assignment: LiveAssignment) -> None:
        """Make room for another request at a worker."""
        effects = self.core.release(assignment, self.now_s())
        if effects:
            self.apply(effects)

    def prefilled(
        self, assignment: LiveAssignment, cached_tokens: int | None = None, *, measured: bool = True
    ) -> None:
        """Record that a prompt was computed; see `RouterCore.prefilled`."""
        now_s = self.now_s()
        self.apply(self.core.prefilled(assignment, now_s, cached_tokens=cached_tokens, measured=measured))

    def refused_at_capacity(self, worker: Worker) -> None:
        """Record that a worker has no room for another request."""
        self.core.refused_at_capacity(worker, self.now_s())

    def record_tier_event(
        self, tier: Tier, *, ttft_s: float | None = None, ended: EndedRequest | None = None
    ) -> None:
        """Record what became of a request of a tier; does nothing where there are no tiers."""
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
        """Wake the waiters; an assignment whose client has left is released, which may make room for another."""
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
    """The way to a worker, which a picker chooses; one thread, one event loop."""

    def __init__(self, core: LiveCore, now_s: Callable[[], float], picker: Picker | None = None) -> None:
        """Begin; without a picker this router's own core picks. ``now_s`` returns simulated seconds."""
        self.core = core
        self._now_s = now_s
        self._own = OwnPicker(core, now_s)
        self._picker: Picker = picker or self._own
        self._listeners: list[Callable[[], None]] = []

    async def wait(self, role: Role, arrival: Arrival, *, again: bool = False) -> LiveAssignment:
        """Wait for a worker; the caller releases the assignment.

        With ``again`` it was admitted before: it meets no length bound, and waits before all others.

        Raises:
            AdmissionError: it gets none.
        """
        waiter: asyncio.Future[LiveAssignment] = asyncio.get_running_loop().create_future()
        try:
            self._picker.ask(waiter, role, arrival, again=again)
            assignment = waiter.result() if waiter.done() else await waiter
            self._picker.dispatched(assignment, role, arrival)
        except BaseException:
            self._picker.cancel(waiter, role)
            # The worker may have been assigned in the very round in which the client left.
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.release(waiter.result())
            raise
        return assignment

    def release(self, assignment: LiveAssignment) -> None:
        """End a request's assignment to its worker, which makes room for another."""
        self._picker.release(assignment)

    def prefilled(self, assignment: LiveAssignment, cached_tokens: int | None = None) -> None:
        """Record that a prompt was computed, before its answer is complete; see `RouterCore.prefilled`."""
        self._picker.prefilled(assignment, cached_tokens)

    def refused_at_capacity(self, worker: Worker) -> None:
        """Record that a worker has no room for another request."""
        self._picker.refused_at_capacity(worker)

    def record_tier_event(
        self, tier: Tier, *, ttft_s: float | None = None, ended: EndedRequest | None = None
    ) -> None:
        """Record what became of a request of a tier; does nothing where there are no tiers.

        Its first token came ``ttft_s`` after its arrival, simulated seconds, or it has ended; neither: it was turned away.
        """
        self._picker.record_tier_event(tier, ttft_s=ttft_s, ended=ended)

    # ------------------------------------------------------------------ workers and time

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call back after every change of the workers."""
        self._listeners.append(listener)

    def set_workers(self, specs: Iterable[WorkerSpec]) -> None:
        """Take over what discovery reports."""
        self._own.apply(self.core.set_workers(specs, self._now_s()))
        self._notify()

    def workers_changed(self) -> None:
        """Record a change in a worker's health."""
        self._own.apply(self.core.workers_changed(self._now_s()))
        self._notify()

    def set_drained(self, name: str, *, drained: bool) -> None:
        """Stop, or start again, sending new requests to a worker.

        Raises:
            NotFoundError: no worker has that name.
        """
        self.core.pool.set_drained(name, drained=drained)
        self.workers_changed()

    def tick(self) -> None:
        """Refuse what has waited too long, and do what time alone asks for; called each 0.1 s."""
        now_s = self._now_s()
        self._own.apply(self.core.expire(now_s))
        self._own.apply(self.core.tick(now_s))

    def load_read(self, worker: Worker) -> None:
        """Record that a worker's metrics were read again."""
        self._own.apply(self.core.load_read(worker, self._now_s()))

    def set_thresholds(self, thresholds: BusyThresholds) -> None:
        """Take new thresholds above which workers are busy; they hold for the next request."""
        self.core.set_thresholds(thresholds, self._now_s())

    def check_capacity(self, role: Role) -> None:
        """Let a new request pass that asks for no worker of the first stage.

        Raises:
            AdmissionError: no worker of the role takes new requests.
        """
        full = self.core.full_stage(role, self._now_s())
        if full is not None:
            raise self.all_busy(full)

    def check_tier(self, tier: Tier) -> None:
        """Count such a request to its tier, and let it pass unless the tier is shed.

        Raises:
            AdmissionError: it is.
        """
        tiers = self.core.tiers
        shed = None if tiers is None else tiers.arrived(tier)
        if shed is not None and tiers is not None:
            self.core.turned_away[self.core.entry].add(self._now_s())
            raise AdmissionError(RefusalReason.SHED, shed, tiers.monitor.tiers.shedding.recover_seconds)

    def all_busy(self, role: Role) -> AdmissionError:
        """Return the refusal of a request that no worker of a role has room for."""
        self.core.turned_away[role].add(self._now_s())
        return AdmissionError(RefusalReason.ALL_BUSY, ALL_BUSY, self.core.busy[role].free_in_s())

    def problems(self) -> list[str]:
        """Return why a request would not be served now; empty when it would."""
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
