"""The picker's side: other routers' requests in this one's core, by connection.

A connection counts once its router has said that it follows this one in the term that holds; what comes before, or in an
older term, is not answered.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.api import Role
from penstock.core.lru_cache import LruCache
from penstock.router.admission import LiveAssignment, Waiter
from penstock.router.core.retries import Refuse, RunningAt, Verdict
from penstock.router.picker import messages as wire
from penstock.router.picker.links import Channel
from penstock.router.picker.relay import RemotePicker
from penstock.router.picker.silence import SilencePatience
from penstock.router.policy.arrival import Arrival

_MAX_REQUESTS: Final = 1 << 16
"""Chosen: of one router, more than it may have connections of clients."""
_MAX_UNSETTLED: Final = 1024
"""Chosen: ended requests of one router whose failure is still to be proved; each has a client that waits for a retry."""
_SILENT_TICKS: Final = 10
"""Chosen: a relay silent for this many ticks is gone; twice as many as for a picker, whose silence costs more."""


@dataclass(slots=True, eq=False)
class RelayedRequest:
    """One request of another router's, as the core queues it; see `admission.RemoteWaiter`."""

    session: Session
    number: int
    role: Role
    arrival: Arrival
    assignment: LiveAssignment | None = None

    def assigned(self, assignment: LiveAssignment) -> bool:
        """Notify its router; returns whether that still wants it."""
        self.assignment = assignment
        session, server = self.session, self.session.server
        if session.requests.get(self.number) is not self or not session.is_followed:
            return False
        worker = assignment.worker.name
        session.channel.send(
            wire.Go(server.term, self.number, worker, assignment.queued_s, assignment.reason)
        )
        if assignment.role is server.picker.core.entry:
            server.computed(worker, self.arrival, session)
        return True

    def refused(self, refuse: Refuse[Waiter]) -> None:
        """Notify its router, which has it no more."""
        if self.session.requests.pop(self.number, None) is None:
            return
        why = refuse.role, refuse.reason, refuse.message, refuse.retry_after_s
        self.session.channel.send(wire.Refused(self.session.server.term, self.number, *why))


class Session:
    """One connection of another router, whose ``age`` is ``(since_s, name)``; ``term``: it follows this one in it."""

    def __init__(self, picker_server: PickerServer) -> None:
        self.server = picker_server
        self._own = picker_server.picker.own
        self._core = picker_server.picker.core
        self._now_s = picker_server.now_s
        self.requests: dict[int, RelayedRequest] = {}
        self._unsettled: LruCache[int, LiveAssignment] = LruCache(_MAX_UNSETTLED)
        self._handlers: dict[type, Callable[[Any], None]] = {
            wire.Ask: self._ask,
            wire.InFlight: self._in_flight,
            wire.ComputedPrompt: self._computed_prompt,
            wire.Prefilled: self._prefilled,
            wire.WorkerOutcome: self._worker_outcome,
            wire.Release: self._release,
            wire.Progress: self._progress,
            wire.AtCapacity: self._at_capacity,
            wire.TierOutcome: self._tier_outcome,
        }
        self.channel = Channel(self._take, self._lost)
        self.term: int | None = None
        self.age = (0.0, "")

    @property
    def is_followed(self) -> bool:
        """Whether its router takes this one for the picker of the term that holds."""
        return self.term is not None and self.term == self.server.term

    def tick(self) -> None:
        """Cut off a relay that has been silent for too long."""
        if self.channel.tick() >= self.server.patience.ticks and self.term is not None:
            self.server.given_up = self.age[1]
            self.channel.abort()

    def drop(self) -> None:
        """Forget its requests, as this router picks no more or the other one is gone."""
        requests, self.requests, self.term = self.requests, {}, None
        self._unsettled.clear()
        # None that waits may get the place of one that runs.
        for request in sorted(requests.values(), key=lambda each: each.assignment is not None):
            self._end(request)

    def _end(self, request: RelayedRequest) -> None:
        if request.assignment is None:
            self._core.cancel(request, request.role, self._now_s())
        else:
            self._own.release(request.assignment)

    # ------------------------------------------------------------------ called by the relay

    def _lost(self) -> None:
        self.drop()
        self.server.sessions.discard(self)

    def _take(self, message: wire.Message) -> None:
        if isinstance(message, wire.Follow):
            if message.instance == self.server.instance:
                self.drop()
                self.term, self.age = message.term, (message.since_s, message.follower)
                if message.follower == self.server.given_up:
                    self.server.patience.was_wrong()
                    self.server.given_up = ""
                self.server.followed()
        elif self.is_followed and type(message) in self._handlers:
            self._handlers[type(message)](message)

    def _ask(self, message: wire.Ask) -> None:
        request = self.requests[message.number] = self._new_request(message)
        effects = self._core.acquire(
            request,
            request.role,
            request.arrival,
            self._now_s(),
            again=message.again,
            waited_s=message.waited_s,
        )
        self._own.apply(effects)

    def _in_flight(self, message: wire.InFlight) -> None:
        request = self._new_request(message)
        running_at = RunningAt(message.worker, message.tokens, is_prefilled=message.is_prefilled)
        request.assignment = self._core.adopt(
            request, request.role, request.arrival, running_at, self._now_s()
        )
        if request.assignment is not None:
            self.requests[message.number] = request

    def _new_request(self, message: wire.Ask | wire.InFlight) -> RelayedRequest:
        number, role = message.number, message.role
        if role not in self._core.queues or number in self.requests or len(self.requests) >= _MAX_REQUESTS:
            raise wire.ProtocolError(
                f"request {number}: not of this graph, or held already, or one more than {_MAX_REQUESTS}"
            )
        return RelayedRequest(self, number, role, wire.arrival_of(message.prompt))

    def _computed_prompt(self, message: wire.ComputedPrompt) -> None:
        arrival = wire.arrival_of(message.prompt)
        self._core.learn(message.worker, arrival)
        self.server.computed(message.worker, arrival, self)

    def _prefilled(self, message: wire.Prefilled) -> None:
        assignment = self._assignment(message.number)
        if assignment is not None:
            self._own.prefilled(assignment, message.cached_tokens, measured=message.is_measured)

    def _worker_outcome(self, message: wire.WorkerOutcome) -> None:
        assignment = self._assignment(message.number) or self._unsettled.get(message.number)
        if assignment is None:
            return
        now_s = self._now_s()
        if message.is_unreachable:
            assignment.worker.suspect("refused a connection of another router")
        match message.verdict:
            case Verdict.PROVED:
                assignment.proved()
            case Verdict.SUCCEEDED:
                assignment.succeeded()
            case Verdict.FAILED:
                assignment.failed(now_s, message.cause)
            case Verdict.UNPROVEN:
                assignment.failed(now_s, message.cause, proven=False)
                self._unsettled.put(message.number, assignment)
            case Verdict.CONVICTED:
                self._unsettled.forget(message.number)
                assignment.convict(now_s)
            case Verdict.PARDONED:
                self._unsettled.forget(message.number)
                assignment.pardon(now_s)
            case Verdict.CLEARED:
                assignment.clear()

    def _release(self, message: wire.Release) -> None:
        request = self.requests.pop(message.number, None)
        if request is not None:
            self._end(request)

    def _progress(self, message: wire.Progress) -> None:
        for number, tokens in zip(message.numbers, message.tokens, strict=False):
            assignment = self._assignment(number)
            if assignment is not None:
                assignment.grow(tokens - assignment.tokens)

    def _at_capacity(self, message: wire.AtCapacity) -> None:
        worker = self._core.pool.get(message.worker)
        if worker is not None and worker.spec.role in self._core.queues:
            self._core.refused_at_capacity(worker, self._now_s())

    def _tier_outcome(self, message: wire.TierOutcome) -> None:
        self._own.record_tier_event(message.tier, ttft_s=message.ttft_s, ended=message.ended)

    def _assignment(self, number: int) -> LiveAssignment | None:
        request = self.requests.get(number)
        return None if request is None else request.assignment


@dataclass(eq=False)
class PickerServer:
    """All connections of other routers to this one.

    Attributes:
        followed: Called when another router has begun to follow this one.
        term: In which it picks; 0: it does not.
        given_up: The relay that was cut off last for its silence; empty: none.
    """

    picker: RemotePicker
    now_s: Callable[[], float]
    instance: str
    followed: Callable[[], None]
    term: int = 0
    sessions: set[Session] = field(default_factory=set)
    patience: SilencePatience = field(default_factory=lambda: SilencePatience(_SILENT_TICKS, random.random))
    given_up: str = ""
    _successor: Session | None = None

    @property
    def successor(self) -> str:
        """The router that receives all prompts, so that it knows what this one does; empty without one."""
        return "" if self._successor is None else self._successor.age[1]

    def choose_successor(self) -> None:
        """Make the oldest follower the successor; a new one receives the latest prompts."""
        followers = (each for each in self.sessions if each.is_followed)
        successor = min(followers, key=lambda each: each.age, default=None)
        if successor is self._successor:
            return
        self._successor = successor
        if successor is not None:
            for worker, arrival in self.picker.recent:
                successor.channel.send(wire.ComputedPrompt(worker, wire.prompt_of(arrival)))

    def computed(self, worker: str, arrival: Arrival, source: Session | None = None) -> None:
        """Send the successor a prompt and its worker; ``source`` knows it already, None: this router's own clients sent it."""
        if source is not None:
            self.picker.recent.add(worker, arrival)
        successor = self._successor
        if successor is not None and successor is not source and (arrival.chain or arrival.session):
            successor.channel.send(wire.ComputedPrompt(worker, wire.prompt_of(arrival)))

    @property
    def followers(self) -> int:
        """Routers that follow this one in its term."""
        return sum(each.is_followed for each in self.sessions)

    def open(self) -> Session:
        """Return the session of a new connection."""
        session = Session(self)
        self.sessions.add(session)
        return session

    def end(self) -> None:
        """Stop picking; other routers send their requests elsewhere."""
        self.term, self._successor = 0, None
        for session in self.sessions:
            session.drop()

    def tick(self) -> None:
        """Cut off relays that are silent."""
        self.patience.tick()
        for session in tuple(self.sessions):
            session.tick()

    def broadcast(self, message: wire.Message, *, followers_only: bool = False) -> None:
        """Send a message on all connections."""
        for session in self.sessions:
            if session.is_followed or not followers_only:
                session.channel.send(message)

    def close(self) -> None:
        """Cut all connections off."""
        for session in tuple(self.sessions):
            session.channel.abort()
