"""A router's own requests while another router is the picker: asks it for workers, and reports requests to a new picker.

Running requests are also counted in this router's own core, so that it can choose workers itself when necessary: for a short
time while there is no picker, and for all routers when it becomes the picker.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Final

from penstock.api import Role, Tier
from penstock.core.logs import get_logger
from penstock.router.admission import AdmissionError, LiveAssignment, OwnPicker
from penstock.router.core.retries import RunningAt, Verdict
from penstock.router.core.worker import Worker
from penstock.router.picker import messages as wire
from penstock.router.picker.links import SILENT_TICKS, TICK_REAL_S, Channel
from penstock.router.policy.arrival import Arrival
from penstock.router.policy.slo_monitor import EndedRequest

log = get_logger(__name__)

HOLD_TICKS: Final = 9
"""Number of ticks after a picker's last message after which this router chooses workers itself. Chosen: twice the time to elect a
new picker. Ticks are this process's own, so that a pause of this process does not count as silence of others."""
RECENT_KEYS: Final = 1 << 18
"""Maximum number of keys of the recent prompts that a new picker receives. Chosen: 2 MiB; the last four minutes at 25 requests/s of
40 keys."""
_RECENT_PROMPTS: Final = 1 << 14

_Future = asyncio.Future[LiveAssignment]


@dataclass(slots=True)
class _Request:
    """A request of this router's own clients, waiting or running, as it is identified in messages.

    Attributes:
        number: Number in messages, unique on the connection.
        role: Role of the requested worker.
        arrival: The request as policies see it.
        is_retry: Whether a worker has failed it before.
        since_s: Time at which it began to wait, in simulated seconds.
        is_sent: Whether the present picker has received it.
        was_admitted: Whether a picker has received it before.
        is_prefilled: Whether its prompt was computed.
        reported_tokens: Number of tokens last reported to the picker.
    """

    number: int
    role: Role
    arrival: Arrival
    is_retry: bool = False
    since_s: float = 0.0
    is_sent: bool = False
    was_admitted: bool = False
    is_prefilled: bool = False
    reported_tokens: int = 0


class RecentPrompts:
    """The most recent prompts and the workers that computed them, to send to a new picker.

    A picker is the router that chooses the workers for all; it learns from the prompts what each worker has cached. The
    number of prefix keys of all prompts together is limited.
    """

    def __init__(self) -> None:
        self._prompts: deque[tuple[str, Arrival]] = deque()
        self._keys = 0

    def __iter__(self) -> Iterator[tuple[str, Arrival]]:
        return iter(self._prompts)

    def add(self, worker: str, arrival: Arrival) -> None:
        """Add the prompt of ``arrival``, which the worker ``worker`` has computed, and delete the oldest prompts above the limits.

        Does nothing for a prompt without prefix keys and session, from which a new picker could learn nothing.
        """
        if not arrival.chain and not arrival.session:
            return
        self._prompts.append((worker, arrival))
        self._keys += len(arrival.chain)
        while self._keys > RECENT_KEYS or len(self._prompts) > _RECENT_PROMPTS:
            self._keys -= len(self._prompts.popleft()[1].chain)


class RemotePicker:
    """Chooses workers by asking the graph's picker (the router that chooses the workers for all), or this router's own core.

    It asks the own core if this router is the graph's picker, or if there has been no picker for 0.9 s (real seconds).

    Attributes:
        own: The `OwnPicker` that uses this router's own core.
        core: This router's own core.
        recent: Recent prompts, to send to a new picker.
        channel: Connection to the router that this router follows; None if it follows none.
        term: Election term in which it follows, or last followed, another router.
    """

    def __init__(self, own: OwnPicker) -> None:
        """Start without other routers; ``own`` uses this router's core."""
        self.own = own
        self.core = own.core
        self.recent = RecentPrompts()
        self._now_s = own.now_s
        self._picked: Callable[[str, Arrival], None] | None = None
        self._picks: Counter[str] = Counter()
        self._numbers = count(1)
        self._pending: dict[_Future, _Request] = {}
        self._waiters: dict[int, _Future] = {}
        self._running: dict[LiveAssignment, _Request] = {}
        self._is_own = True
        self._lost_ticks = HOLD_TICKS
        self.term = 0
        self._is_answered = False
        self.channel: Channel | None = None

    def join(self, picks: Counter[str], picked: Callable[[str, Arrival], None]) -> None:
        """Become one of several routers, so that another one may be the picker from now on.

        Args:
            picks: Counter for requests whose worker this router did not choose as the picker, by who chose it: ``other``
                for another router, ``alone`` for this router while there was no picker.
            picked: Called with the worker and the prompt of each request of this router's own clients, while this router is
                the picker.
        """
        self._picks, self._picked = picks, picked

    # ------------------------------------------------------------------ requests of this router's own clients

    def picks_here(self) -> bool:
        """Return whether this router chooses workers now: as the picker, or because there has been none for 0.9 s (`HOLD_TICKS`)."""
        is_held = self._is_answered or self._lost_ticks < HOLD_TICKS
        return self._is_own or not is_held

    def ask(self, waiter: _Future, role: Role, arrival: Arrival, *, is_retry: bool) -> None:
        """Queue a request at the picker (the router that chooses the workers for all), or in this router's own core if it picks.

        The future ``waiter`` later receives the assignment of the request to a worker of ``role``, or an `AdmissionError`.
        ``is_retry`` says that the request was admitted before (a retry). While there is no picker, the request is kept for the
        next one.
        """
        if self.picks_here():
            self.own.ask(waiter, role, arrival, is_retry=is_retry)
            return
        number = next(self._numbers)
        pending = _Request(number, role, arrival, is_retry, self._now_s())
        self._pending[waiter] = pending
        self._waiters[number] = waiter
        if self._is_answered:
            self._send_pending(pending)

    def cancel(self, waiter: _Future, role: Role) -> None:
        """Remove a request that waits for a worker from this router's queues and from those of the graph's picker.

        The picker is the router that chooses the workers for all. ``waiter`` is the future that `ask` was called with.
        """
        self.own.cancel(waiter, role)
        pending = self._forget(waiter)
        if pending is not None and pending.is_sent:
            self._send(wire.Release(pending.number))

    def dispatched(self, assignment: LiveAssignment, role: Role, arrival: Arrival) -> None:
        """Remember a request that is sent to its worker, to report it to the picker (the router that chooses workers for all).

        Does nothing for a router that is the only one of its graph.

        Args:
            assignment: The request's assignment to the worker.
            role: Role for which the worker was requested.
            arrival: The request as routing policies see it.
        """
        if self._picked is None:
            return
        running = self._running.get(assignment)
        if running is None:
            running = self._running[assignment] = _Request(next(self._numbers), role, arrival)
            if self.channel is not None:
                # The worker was chosen here because there was no picker; there is one now.
                self._report_running(assignment, running)
        assignment.on_verdict = partial(self._report_outcome, assignment.worker, running.number)
        if assignment.role is self.core.entry:
            self.recent.add(assignment.worker.name, arrival)
            if self._is_own:
                self._picked(assignment.worker.name, arrival)

    def prefilled(
        self, assignment: LiveAssignment, cached_tokens: int | None = None, *, measured: bool = True
    ) -> None:
        """Record that a prompt was computed, in this router's core and at the graph's picker.

        ``cached_tokens`` is the number of prompt tokens that the worker found in its cache (None if unknown). ``measured``
        says whether this is reported at the moment at which the prefill ended, so that its duration is meaningful.
        """
        self._report_prefilled(assignment, cached_tokens, measured=measured)
        self.own.prefilled(assignment, cached_tokens, measured=measured)

    def _report_prefilled(
        self, assignment: LiveAssignment, cached_tokens: int | None, *, measured: bool
    ) -> None:
        running = self._running.get(assignment)
        if running is not None:
            running.is_prefilled = True
            self._send(wire.Prefilled(running.number, cached_tokens, measured))

    def release(self, assignment: LiveAssignment) -> None:
        """Record that a request has left its worker, in this router's core and at the picker (the router that chooses for all)."""
        if assignment.is_computed and assignment.is_open:
            self._report_prefilled(assignment, None, measured=False)
        running = self._running.pop(assignment, None)
        if running is not None:
            self._send(wire.Release(running.number))
        self.own.release(assignment)

    def refused_at_capacity(self, worker: Worker) -> None:
        """Record that a worker has refused a request for lack of capacity, in this router's core and at the graph's picker."""
        self._send(wire.AtCapacity(worker.name))
        self.own.refused_at_capacity(worker)

    def record_tier_event(
        self, tier: Tier, *, ttft_s: float | None = None, ended: EndedRequest | None = None
    ) -> None:
        """Record an event of a request for its tier, in this router's core, or at the picker if this router follows one.

        ``ttft_s`` is the time from arrival to first token in simulated seconds, if the first token has arrived; ``ended``
        contains the latencies if the request has ended. If both are None, the request was rejected.
        """
        if self.channel is None:
            self.own.record_tier_event(tier, ttft_s=ttft_s, ended=ended)
        elif self.core.tiers is not None:
            self._send(wire.TierOutcome(tier, ttft_s, ended))

    # ------------------------------------------------------------------ who picks

    def follow(self, channel: Channel, follow: wire.Follow, *, is_successor: bool) -> None:
        """Accept another router as the picker, and send it this router's requests in flight and recent prompts.

        Args:
            channel: Connection to the picker.
            follow: Message that announces this router to the picker.
            is_successor: Whether the picker was the previous picker's successor, which has received all prompts already.
        """
        self.picker_lost()
        self.channel, self.term = channel, follow.term
        self._send(follow)
        for worker, arrival in () if is_successor else self.recent:
            self._send(wire.ComputedPrompt(worker, wire.prompt_of(arrival)))
        for assignment, running in self._running.items():
            self._report_running(assignment, running)

    def answered(self) -> None:
        """Record that a majority accepts the picker (the router that chooses workers for all), and send it the waiting requests.

        Does nothing on repeated calls for the same picker.
        """
        if self._is_answered:
            return
        self._is_answered = True
        self._take_back_waiting()
        for pending in self._pending.values():
            self._send_pending(pending)

    def picker_lost(self) -> None:
        """Record that there is no picker (router that chooses workers for all) any more; waiting requests are kept for the next one."""
        # Counted from the last picker that was active: a series of claims must not prolong the wait.
        if self.channel is not None and self._is_answered:
            self._lost_ticks = min(self.channel.silent_ticks, SILENT_TICKS)
        self.channel, self._is_answered, self._is_own = None, False, False
        for pending in self._pending.values():
            pending.is_sent = False

    def pick_for_all(self) -> None:
        """Become the picker: choose the workers for the requests of all routers from now on, beginning with those that wait here.

        Does nothing if this router is the picker already.
        """
        if not self._is_own:
            self._is_own = True
            self.core.set_peer_loads({}, self._now_s())
            self._pick_here()

    def report_progress(self) -> None:
        """Report the token counts of requests in flight to the picker (the router that chooses workers for all); called every 0.1 s.

        The message is sent even if no count has changed, because it also shows that this router runs. If there has been no
        picker for 0.9 s (real seconds), the requests that wait for one get a worker from this router's own core.
        """
        self._lost_ticks += 1
        if self._pending and self.picks_here():
            log.warning("no router picks: picking here", requests=len(self._pending))
            self._picks["alone"] += len(self._pending)
            self._pick_here()
        if self.channel is None:
            return
        moved = [
            (running, assignment.tokens)
            for assignment, running in self._running.items()
            if assignment.tokens != running.reported_tokens
        ]
        for running, tokens in moved:
            running.reported_tokens = tokens
        numbers = tuple(running.number for running, _ in moved)
        self._send(wire.Progress(numbers, tuple(tokens for _, tokens in moved)))

    # ------------------------------------------------------------------ what the picker says

    def take(self, message: wire.Message) -> None:
        """Apply a message from the picker (the router that chooses workers for all); one of another election term is ignored."""
        if isinstance(message, wire.ComputedPrompt):
            arrival = wire.arrival_of(message.prompt)
            self.core.learn(message.worker, arrival)
            self.recent.add(message.worker, arrival)
            return
        if isinstance(message, wire.Assigned) and message.term == self.term:
            self._assigned(message)
        elif isinstance(message, wire.Refused) and message.term == self.term:
            self._refused(message)
        elif isinstance(message, wire.Loads) and message.term == self.term:
            self._loads(message)

    def _assigned(self, message: wire.Assigned) -> None:
        waiter = self._waiters.get(message.number)
        pending = None if waiter is None else self._pending[waiter]
        if waiter is None or pending is None or waiter.done():
            self._send(wire.Release(message.number))
            return
        queued_s = self._now_s() - pending.since_s
        running_at = RunningAt(
            message.worker, pending.arrival.tokens, queued_s=queued_s, reason=message.reason
        )
        assignment = self.core.adopt(waiter, pending.role, pending.arrival, running_at, self._now_s())
        if assignment is None:
            # Discovery has not reported the worker to this router yet; the picker is asked again without it.
            self._send(wire.Release(message.number))
            pending.arrival = pending.arrival.avoiding(frozenset({message.worker}))
            pending.number, pending.is_sent = next(self._numbers), False
            del self._waiters[message.number]
            self._waiters[pending.number] = waiter
            asyncio.get_running_loop().call_later(TICK_REAL_S, self._resend_pending, waiter)
            return
        self._forget(waiter)
        pending.reported_tokens = assignment.tokens
        self._running[assignment] = pending
        self._picks["other"] += 1
        waiter.set_result(assignment)

    def _refused(self, message: wire.Refused) -> None:
        waiter = self._waiters.get(message.number)
        if waiter is None:
            return
        self._forget(waiter)
        if not waiter.done():
            waiter.set_exception(AdmissionError(message.reason, message.message, message.retry_after_s))

    def _loads(self, message: wire.Loads) -> None:
        workers, now_s = self.core.entry_queue.workers, self._now_s()
        others = {
            name: (max(0, tokens - workers.load_of(name, now_s)[0] + workers.peer_tokens(name)), tokens_per_s)
            for name, (tokens, tokens_per_s) in message.tokens.items()
        }
        self.core.set_peer_loads(others, now_s)

    # ------------------------------------------------------------------ within

    def _send(self, message: wire.Message) -> None:
        if self.channel is not None:
            self.channel.send(message)

    def _send_pending(self, pending: _Request) -> None:
        waited_s = max(0.0, self._now_s() - pending.since_s) if pending.was_admitted else None
        pending.is_sent = pending.was_admitted = True
        prompt = wire.prompt_of(pending.arrival)
        self._send(wire.Ask(pending.number, pending.role, prompt, pending.is_retry, waited_s))

    def _resend_pending(self, waiter: _Future) -> None:
        pending = self._pending.get(waiter)
        if pending is not None and not pending.is_sent and self._is_answered:
            self._send_pending(pending)

    def _report_running(self, assignment: LiveAssignment, running: _Request) -> None:
        running.reported_tokens = assignment.tokens
        arrival = running.arrival
        if assignment.is_cleared:
            arrival = replace(arrival, alone_at=())
        self._send(
            wire.InFlight(
                running.number,
                running.role,
                assignment.worker.name,
                wire.prompt_of(arrival),
                running.is_prefilled,
                assignment.tokens,
            )
        )

    def _report_outcome(self, worker: Worker, number: int, verdict: Verdict, cause: str) -> None:
        is_unreachable = worker.health_problem is not None
        self._send(wire.WorkerOutcome(number, verdict, cause[:1024], is_unreachable))

    def _forget(self, waiter: _Future) -> _Request | None:
        pending = self._pending.pop(waiter, None)
        if pending is not None:
            del self._waiters[pending.number]
        return pending

    def _take_back_waiting(self) -> None:
        """Remove the requests that wait in this router's own queues, to send them to the picker."""
        core, now_s = self.core, self._now_s()
        for role, queue in core.queues.items():
            for queued in sorted(queue.waiting_requests(), key=lambda queued: queued.since_s):
                waiter = queued.item
                if not isinstance(waiter, asyncio.Future):
                    continue
                core.cancel(waiter, role, now_s)
                number = next(self._numbers)
                self._pending[waiter] = _Request(
                    number, role, queued.arrival, queued.is_retry, queued.since_s, was_admitted=True
                )
                self._waiters[number] = waiter

    def _pick_here(self) -> None:
        for waiter in tuple(self._pending):
            pending = self._forget(waiter)
            if pending is None or waiter.done():
                continue
            now_s = self._now_s()
            waited_s = max(0.0, now_s - pending.since_s) if pending.was_admitted else None
            effects = self.core.acquire(
                waiter, pending.role, pending.arrival, now_s, is_retry=pending.is_retry, waited_s=waited_s
            )
            self.own.apply(effects)
