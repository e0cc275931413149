"""The picker's side: queues the requests of other routers in this router's core, per connection.

Requests on a connection are only processed after the other router has sent that it follows this one in the present term;
earlier messages, and those of an older term, are ignored.
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
"""Chosen: maximum number of requests of one router; more than its maximum number of client connections."""
_MAX_UNSETTLED: Final = 1024
"""Chosen: maximum number of ended requests of one router whose failure is still unproven; each has a client that waits for a
retry."""
_SILENT_TICKS: Final = 10
"""Chosen: number of ticks after which a silent relay counts as gone; twice the number for a picker, whose silence costs more."""


@dataclass(slots=True, eq=False)
class RelayedRequest:
    """A request that another router's client has sent, and for which this router chooses the worker.

    Attributes:
        session: Connection of the router from which the request comes.
        number: Number of the request, unique on the connection.
        role: Role of the requested worker.
        arrival: The request as policies see it.
        assignment: Assignment of the request to a worker; None while the request waits.
    """

    session: Session
    number: int
    role: Role
    arrival: Arrival
    assignment: LiveAssignment | None = None

    def assigned(self, assignment: LiveAssignment) -> bool:
        """Send the assignment to the router whose client sent the request; return False if the request no longer exists."""
        self.assignment = assignment
        session, server = self.session, self.session.server
        if session.requests.get(self.number) is not self or not session.is_followed:
            return False
        worker = assignment.worker.name
        session.channel.send(
            wire.Assigned(server.term, self.number, worker, assignment.queued_s, assignment.reason)
        )
        if assignment.role is server.picker.core.entry:
            server.computed(worker, self.arrival, session)
        return True

    def refused(self, refuse: Refuse[Waiter]) -> None:
        """Send the rejection ``refuse`` to the router whose client sent the request, unless the request no longer exists."""
        if self.session.requests.pop(self.number, None) is None:
            return
        why = refuse.role, refuse.reason, refuse.message, refuse.retry_after_s
        self.session.channel.send(wire.Refused(self.session.server.term, self.number, *why))


class Session:
    """A connection of another router to this one, whose requests this router serves as the picker.

    The picker is the router that chooses the workers for all routers of the graph.

    Attributes:
        server: Object that has all connections of other routers.
        requests: Requests of the router that wait or run, by number.
        channel: The connection itself, which sends messages.
        term: Election term in which the router follows this one; None if it does not.
        seniority: Start time and instance of the router, by which routers are compared: the smallest value is the oldest
            router.
    """

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
        self.seniority = (0.0, "")

    @property
    def is_followed(self) -> bool:
        """Whether the other router accepts this one as the picker (the router that chooses workers for all) of the present term."""
        return self.term is not None and self.term == self.server.term

    def tick(self) -> None:
        """Disconnect the other router if it has been silent for too long; called every 0.1 real seconds."""
        if self.channel.tick() >= self.server.patience.ticks and self.term is not None:
            self.server.disconnected_instance = self.seniority[1]
            self.channel.abort()

    def drop(self) -> None:
        """Release the requests of the router on this connection.

        Called when this router is no longer the picker (the router that chooses workers for all), or when the other
        router is gone.
        """
        requests, self.requests, self.term = self.requests, {}, None
        self._unsettled.clear()
        # Waiting requests first, so that none of them gets the capacity that a running one frees.
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
                self.term, self.seniority = message.term, (message.since_s, message.follower)
                if message.follower == self.server.disconnected_instance:
                    self.server.patience.record_false_alarm()
                    self.server.disconnected_instance = ""
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
            is_retry=message.is_retry,
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
            case Verdict.FIRST_PART_OK:
                assignment.first_part_ok()
            case Verdict.SUCCEEDED:
                assignment.succeeded()
            case Verdict.FAILED:
                assignment.failed(now_s, message.cause)
            case Verdict.UNPROVEN:
                assignment.failed(now_s, message.cause, proven=False)
                self._unsettled.put(message.number, assignment)
            case Verdict.CONFIRMED:
                self._unsettled.forget(message.number)
                assignment.confirm_failure(now_s)
            case Verdict.RETRACTED:
                self._unsettled.forget(message.number)
                assignment.retract_failure(now_s)
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
    """The connections of other routers to this one, which is or may become the picker: the router that chooses the workers for all.

    Attributes:
        picker: Picker of this router.
        now_s: Returns the current time in simulated seconds.
        instance: Instance name of this router.
        followed: Called when another router has accepted this one as the picker (follows it).
        term: Election term in which this router is the picker; 0 if it is not.
        sessions: Connections of other routers.
        patience: Number of ticks (0.1 s each) for which another router may be silent before it is disconnected; doubled if
            a router was disconnected that was only slow.
        disconnected_instance: Instance of the router that was last disconnected for its silence; empty if there is none.
    """

    picker: RemotePicker
    now_s: Callable[[], float]
    instance: str
    followed: Callable[[], None]
    term: int = 0
    sessions: set[Session] = field(default_factory=set)
    patience: SilencePatience = field(default_factory=lambda: SilencePatience(_SILENT_TICKS, random.random))
    disconnected_instance: str = ""
    _successor: Session | None = None

    @property
    def successor(self) -> str:
        """Instance of the successor, which receives all prompts so that it can take over as the picker; empty if there is none."""
        return "" if self._successor is None else self._successor.seniority[1]

    def choose_successor(self) -> None:
        """Choose the successor: the oldest router that accepts this one as the picker, which would be the picker next.

        The picker is the router that chooses the workers for all. A new successor is sent the recent prompts, so that it knows
        what the workers have cached.
        """
        followers = (each for each in self.sessions if each.is_followed)
        successor = min(followers, key=lambda each: each.seniority, default=None)
        if successor is self._successor:
            return
        self._successor = successor
        if successor is not None:
            for worker, arrival in self.picker.recent:
                successor.channel.send(wire.ComputedPrompt(worker, wire.prompt_of(arrival)))

    def computed(self, worker: str, arrival: Arrival, source: Session | None = None) -> None:
        """Tell the successor (the router that would be the picker next) which worker computes a prompt.

        The successor so knows what each worker has cached.

        Args:
            worker: Name of the worker.
            arrival: The request with the prompt's prefix keys.
            source: Connection of the router from which it comes, which knows it already; None for this router's own clients.
        """
        if source is not None:
            self.picker.recent.add(worker, arrival)
        successor = self._successor
        if successor is not None and successor is not source and (arrival.chain or arrival.session):
            successor.channel.send(wire.ComputedPrompt(worker, wire.prompt_of(arrival)))

    @property
    def followers(self) -> int:
        """Number of routers that accept this one as the picker (the router that chooses workers for all) in the present term."""
        return sum(each.is_followed for each in self.sessions)

    def open(self) -> Session:
        """Return a new session, which serves the requests from a new connection of another router, and add it to `sessions`."""
        session = Session(self)
        self.sessions.add(session)
        return session

    def end(self) -> None:
        """Stop being the picker (the router that chooses workers for all), and release the requests of other routers.

        Those routers send their requests to the next picker.
        """
        self.term, self._successor = 0, None
        for session in self.sessions:
            session.drop()

    def tick(self) -> None:
        """Disconnect routers that have been silent for too long; called every 0.1 real seconds."""
        self.patience.tick()
        for session in tuple(self.sessions):
            session.tick()

    def broadcast(self, message: wire.Message, *, followers_only: bool = False) -> None:
        """Send ``message`` to all connected routers, or (``followers_only``) to those that accept this one as the picker."""
        for session in self.sessions:
            if session.is_followed or not followers_only:
                session.channel.send(message)

    def close(self) -> None:
        """Close all connections at once."""
        for session in tuple(self.sessions):
            session.channel.abort()
