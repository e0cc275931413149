"""The picker's side: other routers' requests in this one's core, by connection.

A connection counts once its router has said that it follows this one in the term that holds; what comes before, or in an
older term, is not answered.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

from penstock.api import Role
from penstock.router.admission import (
    Admission,
    LiveAssignment,
    TierEvent,
    TierFirstToken,
    TierTurnedAway,
    Waiter,
)
from penstock.router.core.retries import Refuse, Verdict
from penstock.router.core.router import RunningAt
from penstock.router.picker import messages as wire
from penstock.router.picker.links import Channel
from penstock.router.picker.relay import RecentPrompts
from penstock.router.policy.arrival import Arrival
from penstock.router.policy.slo_monitor import EndedRequest

_MAX_REQUESTS: Final = 1 << 16
"""Chosen: of one router, more than it may have connections of clients."""
_MAX_UNSETTLED: Final = 1024
"""Chosen: ended requests of one router whose failure is still to be proved; each has a client that waits for a retry."""
_SILENT_TICKS: Final = 10
"""Chosen: a relay silent for this many ticks is gone; twice as many as for a picker, whose silence costs more."""


class RelayedRequest:
    """One request of another router's, as the core queues it; see `admission.Waiter`."""

    __slots__ = ("_session", "arrival", "assignment", "number", "role")

    def __init__(self, session: Session, number: int, role: Role, arrival: Arrival) -> None:
        self.arrival = arrival
        self._session = session
        self.number = number
        self.role = role
        self.assignment: LiveAssignment | None = None

    def assigned(self, assignment: LiveAssignment) -> bool:
        """Notify its router; returns whether that still wants it."""
        self.assignment = assignment
        return self._session.assigned(self, assignment)

    def refused(self, refuse: Refuse[Waiter]) -> None:
        """Notify its router."""
        self._session.refused(self, refuse)


class Session:
    """One connection of another router.

    Attributes:
        channel: The connection.
        term: In which its router follows this one; None: it does not.
        age: Of its router, as ``(since_s, name)``.
    """

    def __init__(self, picker_server: PickerServer) -> None:
        self._server = picker_server
        self._requests: dict[int, RelayedRequest] = {}
        self._unsettled: OrderedDict[int, LiveAssignment] = OrderedDict()
        self.channel = Channel(self._take, self._lost)
        self.term: int | None = None
        self.age = (0.0, "")

    @property
    def is_followed(self) -> bool:
        """Whether its router takes this one for the picker of the term that holds."""
        return self.term is not None and self.term == self._server.term

    def tick(self) -> None:
        """Cut off a relay that has been silent for too long."""
        if self.channel.tick() >= _SILENT_TICKS and self.term is not None:
            self.channel.abort()

    # ------------------------------------------------------------------ called by the core

    def assigned(self, request: RelayedRequest, assignment: LiveAssignment) -> bool:
        """Say that a request goes; returns whether anybody still wants it."""
        if self._requests.get(request.number) is not request or not self.is_followed:
            return False
        go = wire.Go(
            self._server.term, request.number, assignment.worker.name, assignment.queued_s, assignment.reason
        )
        self.channel.send(go)
        if request.role is self._server.admission.core.entry:
            self._server.computed(assignment.worker.name, request.arrival, self)
        return True

    def refused(self, request: RelayedRequest, refuse: Refuse[Waiter]) -> None:
        """Say that a request gets no worker."""
        if self._requests.pop(request.number, None) is None:
            return
        why = refuse.role, refuse.reason, refuse.message, refuse.retry_after_s
        self.channel.send(wire.Refused(self._server.term, request.number, *why))

    def drop(self) -> None:
        """Forget its requests, as this router picks no more or the other one is gone."""
        requests, self._requests, self.term = self._requests, {}, None
        self._unsettled.clear()
        admission, now_s = self._server.admission, self._server.now_s
        for request in requests.values():
            if request.assignment is None:
                admission.core.cancel(request, request.role, now_s())
        for request in requests.values():
            if request.assignment is not None:
                admission.apply(admission.core.release(request.assignment, now_s()))

    # ------------------------------------------------------------------ called by the relay

    def _lost(self) -> None:
        self.drop()
        self._server.sessions.discard(self)

    def _take(self, message: wire.Message) -> None:
        if isinstance(message, wire.Follow):
            if message.instance == self._server.instance:
                self.drop()
                self.term, self.age = message.term, (message.since_s, message.follower)
                self._server.followed()
            return
        if not self.is_followed:
            return
        handle = _HANDLERS.get(type(message))
        if handle is not None:
            handle(self, message)

    def _ask(self, message: wire.Ask) -> None:
        role, core = message.role, self._server.admission.core
        if role not in core.queues or not self._is_free(message.number):
            raise wire.ProtocolError(f"request {message.number}: not of this graph, or asked already")
        arrival = wire.arrival_of(message.prompt)
        request = self._requests[message.number] = RelayedRequest(self, message.number, role, arrival)
        effects = core.acquire(
            request,
            role,
            arrival,
            self._server.now_s(),
            again=message.again,
            waited_s=message.waited_s,
        )
        self._server.admission.apply(effects)

    def _in_flight(self, message: wire.InFlight) -> None:
        role, core = message.role, self._server.admission.core
        if role not in core.queues or not self._is_free(message.number):
            raise wire.ProtocolError(f"request {message.number}: not of this graph, or held already")
        arrival = wire.arrival_of(message.prompt)
        request = RelayedRequest(self, message.number, role, arrival)
        running_at = RunningAt(message.worker, message.tokens, is_prefilled=message.is_prefilled)
        request.assignment = core.adopt(request, role, arrival, running_at, self._server.now_s())
        if request.assignment is not None:
            self._requests[message.number] = request

    def _is_free(self, number: int) -> bool:
        return number not in self._requests and len(self._requests) < _MAX_REQUESTS

    def _computed_prompt(self, message: wire.ComputedPrompt) -> None:
        arrival = wire.arrival_of(message.prompt)
        self._server.admission.core.learn(message.worker, arrival)
        self._server.computed(message.worker, arrival, self)

    def _cancel(self, message: wire.Cancel) -> None:
        request = self._requests.get(message.number)
        if request is not None and request.assignment is None:
            del self._requests[message.number]
            self._server.admission.core.cancel(request, request.role, self._server.now_s())

    def _prefilled(self, message: wire.Prefilled) -> None:
        assignment = self._assignment(message.number)
        if assignment is not None:
            self._server.admission.prefilled(assignment, message.cached_tokens, measured=message.is_measured)

    def _worker_outcome(self, message: wire.WorkerOutcome) -> None:
        assignment = self._assignment(message.number) or self._unsettled.get(message.number)
        if assignment is None:
            return
        now_s, verdict = self._server.now_s(), message.verdict
        if message.is_unreachable:
            assignment.worker.suspect("refused a connection of another router")
        if verdict == Verdict.PROVED:
            assignment.proved()
        elif verdict == Verdict.SUCCEEDED:
            assignment.succeeded()
        elif verdict in {Verdict.FAILED, Verdict.UNPROVEN}:
            assignment.failed(now_s, message.cause, proven=verdict == Verdict.FAILED)
            if verdict == Verdict.UNPROVEN:
                self._unsettled[message.number] = assignment
                if len(self._unsettled) > _MAX_UNSETTLED:
                    self._unsettled.popitem(last=False)
        elif verdict in {Verdict.CONVICTED, Verdict.PARDONED}:
            self._unsettled.pop(message.number, None)
            if verdict == Verdict.CONVICTED:
                assignment.convict(now_s)
            else:
                assignment.pardon(now_s)

    def _release(self, message: wire.Release) -> None:
        request = self._requests.pop(message.number, None)
        if request is None:
            return
        if request.assignment is None:
            self._server.admission.core.cancel(request, request.role, self._server.now_s())
        else:
            self._server.admission.release(request.assignment)

    def _progress(self, message: wire.Progress) -> None:
        for number, tokens in zip(message.numbers, message.tokens, strict=False):
            assignment = self._assignment(number)
            if assignment is not None:
                assignment.grow(tokens - assignment.tokens)

    def _at_capacity(self, message: wire.AtCapacity) -> None:
        worker = self._server.admission.core.pool.get(message.worker)
        if worker is not None and worker.spec.role in self._server.admission.core.queues:
            self._server.admission.core.refused_at_capacity(worker, self._server.now_s())

    def _tier_outcome(self, message: wire.TierOutcome) -> None:
        ttft_s, e2e_s, tpot_s = message.seconds
        event: TierEvent = EndedRequest(ttft_s, tpot_s, e2e_s, message.is_failed)
        if message.event == 0:
            event = TierFirstToken(ttft_s or 0.0)
        elif message.event == 2:
            event = TierTurnedAway()
        self._server.admission.record_tier_event(message.tier, event)

    def _assignment(self, number: int) -> LiveAssignment | None:
        request = self._requests.get(number)
        return None if request is None else request.assignment


_HANDLERS: Final[dict[type, Callable[[Session, Any], None]]] = {
    wire.Ask: Session._ask,  # noqa: SLF001 - a table of this class's own
    wire.InFlight: Session._in_flight,  # noqa: SLF001
    wire.ComputedPrompt: Session._computed_prompt,  # noqa: SLF001
    wire.Cancel: Session._cancel,  # noqa: SLF001
    wire.Prefilled: Session._prefilled,  # noqa: SLF001
    wire.WorkerOutcome: Session._worker_outcome,  # noqa: SLF001
    wire.Release: Session._release,  # noqa: SLF001
    wire.Progress: Session._progress,  # noqa: SLF001
    wire.AtCapacity: Session._at_capacity,  # noqa: SLF001
    wire.TierOutcome: Session._tier_outcome,  # noqa: SLF001
}


class PickerServer:
    """All connections of other routers to this one.

    Attributes:
        admission: Whose core picks.
        now_s: Returns simulated seconds.
        instance: This router's name.
        term: In which it picks; None: it does not.
        followed: Called when another router has begun to follow this one.
        recent: The latest prompts, which a new successor receives.
        sessions: The connections.
    """

    def __init__(
        self,
        admission: Admission,
        now_s: Callable[[], float],
        instance: str,
        recent: RecentPrompts,
        followed: Callable[[], None],
    ) -> None:
        self.admission = admission
        self.now_s = now_s
        self.instance = instance
        self.recent = recent
        self.followed = followed
        self.term = 0
        self.sessions: set[Session] = set()
        self._successor: Session | None = None

    @property
    def successor(self) -> str:
        """The router that receives all prompts, so that it knows what this one does; empty without one."""
        return "" if self._successor is None else self._successor.age[1]

    def choose_successor(self) -> None:
        """Make the oldest follower the successor; a new one receives the latest prompts."""
        successor = min(
            (each for each in self.sessions if each.is_followed), key=lambda each: each.age, default=None
        )
        if successor is self._successor:
            return
        self._successor = successor
        if successor is not None:
            for worker, arrival in self.recent:
                successor.channel.send(wire.ComputedPrompt(worker, wire.prompt_of(arrival)))

    def computed(self, worker: str, arrival: Arrival, source: Session | None = None) -> None:
        """Send the successor a prompt and its worker; ``source`` knows it already, None: this router's own clients sent it."""
        if source is not None:
            self.recent.add(worker, arrival)
        if (
            self._successor is not None
            and self._successor is not source
            and (arrival.chain or arrival.session)
        ):
            self._successor.channel.send(wire.ComputedPrompt(worker, wire.prompt_of(arrival)))

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
