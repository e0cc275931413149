"""Hands requests to workers: at once where there is room, else through the prefill queue.

The pure parts (policy, queue, slots) decide; this module only ties them to futures and the fleet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from penstock_core.errors import NoEndpointsError, SaturatedError
from penstock_graph.models import Role
from penstock_router.fleet import Fleet, InFlight
from penstock_router.policy.arrival import Arrival
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


class QueueFace(Protocol):
    """What `/workers` and `/metrics` read of a queue."""

    def __len__(self) -> int:
        """Return the waiting requests."""

    @property
    def tokens(self) -> int:
        """Prompt tokens of all waiting requests."""

    def oldest_s(self, now_s: float) -> float:
        """Return how long the longest wait has lasted, modelled seconds; 0 when empty."""


class Entrance(Protocol):
    """The way into the first stage, whatever its queue looks like.

    Attributes:
        reads_prompts: Whether arrivals must carry prefix keys.
    """

    reads_prompts: bool

    @property
    def queue(self) -> QueueFace:
        """Who waits."""

    async def enter(self, arrival: Arrival, *, again: bool = False) -> Stay:
        """Wait for a worker.

        Args:
            arrival: The request.
            again: It was admitted before: it meets no length bound.

        Raises:
            SaturatedError: the queue is full.
            QueueTimeout: it waited as long as it may.
            NoEndpointsError: no worker serves, and none will by itself.
        """

    def pump(self) -> None:
        """Hand workers to those who wait, as long as there is room."""

    def tick(self) -> None:
        """Do what time alone asks for."""

    def problems(self) -> list[str]:
        """Return why a request would not be served now; empty when it would."""


class Stages:
    """The roles that a request needs, all of which must serve."""

    def __init__(self, fleet: Fleet, first: Role, then: Role | None) -> None:
        """Name the roles.

        Args:
            fleet: The workers.
            first: Role of the first stage.
            then: Role of the second stage: nothing starts while none of it can be routed to, because a
                prefill without a decode worker only pins KV blocks.
        """
        self.first = first
        self._fleet = fleet
        self._then = then

    def may_start(self, now_s: float) -> bool:
        """Return whether what is computed in the first stage would find its second."""
        return self._then is None or bool(self._fleet.routable(self._then, now_s))

    def refuse_if_hopeless(self, now_s: float) -> None:
        """Refuse to wait for what nobody will bring back.

        Raises:
            NoEndpointsError: no worker of a role serves, and none will by itself.
        """
        for role in self._roles():
            if not self._fleet.routable(role, now_s) and not self._fleet.expects(role):
                raise NoEndpointsError(f"no {role} worker can take the request; retry later")

    def problems(self, now_s: float) -> list[str]:
        """Return which role no worker serves now, and why."""
        found = []
        for role in self._roles():
            if not self._fleet.routable(role, now_s):
                states = [f"{w.name} {w.state(now_s)[1]}" for w in self._fleet if w.spec.role is role]
                found.append(f"no {role} worker can be routed to: " + ("; ".join(states) or "none known"))
        return found

    def _roles(self) -> tuple[Role, ...]:
        return (self.first,) if self._then is None else (self.first, self._then)


def timed_out(waited_s: float) -> QueueTimeout:
    """Return the error of a request that waited too long."""
    return QueueTimeout(f"no worker took the request within {waited_s:.1f} s; retry later")


def full(waiting: int) -> SaturatedError:
    """Return the error of a request that finds the queue full."""
    return SaturatedError(f"{waiting} requests wait for prefill already; retry later")


async def wait_for(future: asyncio.Future[Stay], leave: Callable[[], None]) -> Stay:
    """Wait for a worker; ``leave`` is called when the client goes first.

    Raises:
        QueueTimeout: it waited as long as it may.
    """
    try:
        return await future
    except asyncio.CancelledError:
        leave()
        # The worker may have been assigned in the very round in which the client left.
        if future.done() and not future.cancelled() and future.exception() is None:
            future.result().inflight.abandon()
        raise


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
    """One queue for all workers; a worker is chosen when it has room."""

    reads_prompts = False

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
            then: Role of the second stage, if there is one.
            now_s: The clock, modelled seconds.
        """
        self.queue = queue
        self._stages = Stages(fleet, picker.role, then)
        self._picker = picker
        self._now_s = now_s
        fleet.on_change(self.pump)

    async def enter(self, arrival: Arrival, *, again: bool = False) -> Stay:
        """Wait for a worker; see `Entrance`. Who was admitted before goes to the front."""
        now_s = self._now_s()
        if again or not len(self.queue):
            stay = self._assign(arrival.tokens, arrival.avoid, now_s, since_s=now_s)
            if stay is not None:
                return stay
        self._stages.refuse_if_hopeless(now_s)
        if self.queue.is_full and not again:
            raise full(len(self.queue))
        future: asyncio.Future[Stay] = asyncio.get_running_loop().create_future()
        key = self.queue.join(Waiting(future, arrival.tokens, now_s, arrival.avoid), front=again)
        return await wait_for(future, lambda: self.queue.leave(key))

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
                waiting.item.set_exception(timed_out(now_s - waiting.since_s))
        self.pump()

    def problems(self) -> list[str]:
        """Return why a request would not be served now; empty when it would."""
        found = [f"prefill queue full: {len(self.queue)} requests wait"] if self.queue.is_full else []
        return found + self._stages.problems(self._now_s())

    def _assign(self, tokens: int, avoid: frozenset[str], now_s: float, *, since_s: float) -> Stay | None:
        if not self._stages.may_start(now_s):
            return None
        picked = self._picker.pick(tokens, now_s=now_s, avoid=avoid, on_end=self.pump)
        if picked is None:
            return None
        inflight, choice = picked
        return Stay(inflight, max(0.0, now_s - since_s), choice.reason)
