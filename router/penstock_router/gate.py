"""Hands requests to workers: at once where there is room, else through the prefill queue.

The pure parts (policy, queue, slots) decide; this module only ties them to futures and the fleet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from penstock_core.errors import NoEndpointsError, SaturatedError
from penstock_graph.models import Role
from penstock_router.fleet import Fleet, InFlight
from penstock_router.policy.candidate import Choice, Policy, RoutedRequest
from penstock_router.policy.prefill_queue import PrefillQueue, Waiting, has_free_slot


class QueueTimeout(NoEndpointsError):  # noqa: N818 - named like the fact it reports
    """A request waited for a worker as long as it may."""


@dataclass(frozen=True, slots=True)
class Stay:
    """How a request came to its worker.

    Attributes:
        inflight: Its share of the worker's counters; the receiver must end it.
        queued_s: How long it waited, modelled seconds.
        reason: Why this worker.
    """

    inflight: InFlight
    queued_s: float
    reason: str


class Picker:
    """Chooses a worker of one role that may be routed to."""

    def __init__(self, fleet: Fleet, role: Role, policy: Policy, *, slot_tokens: int | None = None) -> None:
        self.role = role
        self._fleet = fleet
        self._policy = policy
        self._state = policy.new_state()
        self._slot_tokens = slot_tokens

    def pick(
        self,
        tokens: int,
        *,
        now_s: float,
        avoid: frozenset[str] = frozenset(),
        on_end: Callable[[], None] | None = None,
    ) -> tuple[InFlight, Choice] | None:
        """Choose and count in, or return None when no worker may take the request now.

        Args:
            tokens: Prompt tokens, known or estimated.
            now_s: Modelled seconds.
            avoid: Workers that have failed this request; taken only if no other may be routed to.
            on_end: Called when the request has left the worker.
        """
        workers = self._fleet.routable(self.role, now_s)
        others = [each for each in workers if each.name not in avoid] if avoid else workers
        pool = others or workers
        candidates = [each.candidate(now_s) for each in pool]
        free = [each for each in candidates if has_free_slot(each, self._slot_tokens)]
        if not free:
            return None
        choice = self._policy.choose(free, RoutedRequest(prompt_tokens=tokens), self._state)
        worker = next(each for each in pool if each.name == choice.candidate.name)
        return InFlight(worker, tokens, now_s=now_s, on_end=on_end), choice


class Gate:
    """The way into the first stage (prefill, or aggregated), with its queue."""

    def __init__(
        self,
        fleet: Fleet,
        picker: Picker,
        queue: PrefillQueue[asyncio.Future[Stay]],
        *,
        then: Role | None,
        now_s: Callable[[], float],
    ) -> None:
        """Tie queue and fleet.

        Args:
            fleet: The workers.
            picker: Chooses for the first stage.
            queue: Holds those who wait.
            then: Role of the second stage: nothing starts while none of it can be routed to, because a
                prefill without a decode worker only pins KV blocks.
            now_s: The clock, modelled seconds.
        """
        self.queue = queue
        self._fleet = fleet
        self._picker = picker
        self._then = then
        self._now_s = now_s
        fleet.on_change(self.pump)

    async def enter(self, tokens: int, *, avoid: frozenset[str] = frozenset(), again: bool = False) -> Stay:
        """Wait for a worker.

        Args:
            tokens: Prompt tokens, known or estimated.
            avoid: Workers that have failed this request.
            again: The request was admitted before: it goes to the front and meets no length bound.

        Raises:
            SaturatedError: the queue is full.
            QueueTimeout: it waited as long as it may.
            NoEndpointsError: no worker serves, and none will by itself.
        """
        now_s = self._now_s()
        if again or not len(self.queue):
            stay = self._assign(tokens, avoid, now_s, since_s=now_s)
            if stay is not None:
                return stay
        self._refuse_if_hopeless(now_s)
        if self.queue.is_full and not again:
            raise SaturatedError(f"{len(self.queue)} requests wait for prefill already; retry later")
        future: asyncio.Future[Stay] = asyncio.get_running_loop().create_future()
        key = self.queue.join(Waiting(future, tokens, now_s, avoid), front=again)
        try:
            return await future
        except asyncio.CancelledError:
            self.queue.leave(key)
            # The worker may have been assigned in the very round in which the client left.
            if future.done() and not future.cancelled() and future.exception() is None:
                future.result().inflight.abandon()
            raise

    def pump(self) -> None:
        """Hand workers to those who wait, first come first served, as long as there is room."""
        now_s = self._now_s()
        while (head := self.queue.head()) is not None:
            key, waiting = head
            if not waiting.item.done():
                stay = self._assign(waiting.tokens, waiting.avoid, now_s, since_s=waiting.since_s)
                if stay is None:
                    return
                waiting.item.set_result(stay)
            self.queue.leave(key)

    def tick(self) -> None:
        """Send away who has waited too long, and look for room that time alone has made."""
        now_s = self._now_s()
        for waiting in self.queue.take_expired(now_s):
            if not waiting.item.done():
                waited_s = now_s - waiting.since_s
                waiting.item.set_exception(
                    QueueTimeout(f"no worker took the request within {waited_s:.1f} s; retry later")
                )
        self.pump()

    def problems(self) -> list[str]:
        """Return why a request would not be served now; empty when it would."""
        now_s = self._now_s()
        found = []
        if self.queue.is_full:
            found.append(f"prefill queue full: {len(self.queue)} requests wait")
        for role in self._roles():
            if not self._fleet.routable(role, now_s):
                states = [f"{w.name} {w.state(now_s)[1]}" for w in self._fleet if w.spec.role is role]
                found.append(f"no {role} worker can be routed to: " + ("; ".join(states) or "none known"))
        return found

    def _roles(self) -> tuple[Role, ...]:
        return (self._picker.role,) if self._then is None else (self._picker.role, self._then)

    def _refuse_if_hopeless(self, now_s: float) -> None:
        for role in self._roles():
            if not self._fleet.routable(role, now_s) and not self._fleet.expects(role):
                raise NoEndpointsError(f"no {role} worker can take the request; retry later")

    def _assign(self, tokens: int, avoid: frozenset[str], now_s: float, *, since_s: float) -> Stay | None:
        if self._then is not None and not self._fleet.routable(self._then, now_s):
            return None
        picked = self._picker.pick(tokens, now_s=now_s, avoid=avoid, on_end=self.pump)
        if picked is None:
            return None
        inflight, choice = picked
        return Stay(inflight, max(0.0, now_s - since_s), choice.reason)
