"""Connects one router to the others of its graph: elects the picker, and follows it or becomes it.

The oldest router that a majority sees claims the next term (a fencing number that only increases), and is the picker once a
majority follows it. While a majority follows it, it stays the picker, even if an older router comes back; a router that was away
steps down. A router that loses the picker and sees no majority chooses the workers for its own requests and claims nothing.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from typing import Final, NamedTuple

from penstock.core.http.messages import Request, Responder
from penstock.core.http.own_lag import PatientTimeout
from penstock.core.logs import get_logger
from penstock.router.context import RouterContext
from penstock.router.picker import messages as wire
from penstock.router.picker.links import NAME, RouterLink
from penstock.router.picker.messages import Status
from penstock.router.picker.relay import RemotePicker
from penstock.router.picker.server import PickerServer
from penstock.router.proxy.auth import GraphSecret
from penstock.router.proxy.completion import RequestRefused
from penstock.router.thresholds import GraphThresholds


class Leader(NamedTuple):
    """The picker (the router that chooses the workers for all routers of the graph), as one router sees it.

    Attributes:
        instance: Instance name of the picker's process.
        term: Election term, >= 1; it increases with each election, so that messages of an earlier picker are recognized and
            ignored.
    """

    instance: str
    term: int


def majority(members: int) -> int:
    """Return the smallest number of routers that is more than half of ``members``, as the election of a picker requires.

    For 1 it is 1, for 2: 2, for 3: 2, for 4: 3.
    """
    return members // 2 + 1


def elect(own: Status, peers: Iterable[Status], members: int) -> Leader | None:
    """Return the picker (the router that chooses the workers for all) that this router accepts now, and its term.

    That is the picker that a majority follows, else the newest claim, else the oldest router that a majority sees. Returns
    None if this router can accept none now, because no majority sees one.

    If the result is this router itself and ``own`` has no claim yet, this router claims the returned term.

    Args:
        own: Status of this router.
        peers: Statuses of the routers from which a heartbeat was recently received.
        members: Number of routers of the graph, this one included, except those known to be gone; >= 1.
    """
    views = {each.instance: each for each in (*peers, own)}
    voters = [each for each in views.values() if each.instance in own.sees]
    needed = majority(members)

    def is_seen(instance: str) -> bool:
        return sum(instance in each.sees for each in voters) >= needed

    claims = [each for each in voters if each.is_leader and not each.is_stopping]
    # A picker that a majority follows stays. Otherwise routers that do not see each other would claim one term after another.
    active = [each for each in claims if each.is_active]
    if active:
        found = max(active, key=lambda each: (each.term, -each.since_s, each.instance))
        return Leader(found.instance, found.term)
    followed = Counter(each.leader for each in voters if each is not own and each.leader not in views)
    if any(leader and 1 + count >= needed for leader, count in followed.items()):
        return None
    term = max(each.term for each in voters)
    for claim in sorted(claims, key=lambda each: (each.since_s, each.instance)):
        if claim.term == term and is_seen(claim.instance):
            return Leader(claim.instance, term)
    eligible = [each for each in voters if not each.is_stopping and is_seen(each.instance)]
    oldest = min(eligible, key=lambda each: (each.since_s, each.instance), default=None)
    if oldest is None or oldest.instance != own.instance:
        return None
    return Leader(own.instance, term + 1)


log = get_logger(__name__)

_LOADS_TICKS: Final = 5
"""Chosen: the loads that relays know are at most half a second old; relays choose workers by them for a second at most."""
CONFIRM_REAL_S: Final = 2.0
"""Maximum wait for a confirmation in real seconds. Chosen: a heartbeat comes every 0.1 s; an administrator's client waits a few
seconds at most."""
_START_REAL_S: Final = 0.5
"""Chosen: maximum wait at the start for the other routers' first heartbeat, which takes milliseconds."""


class PeerGroup:
    """This router as one of the routers of its graph, which elect one of them as the picker: it chooses the workers for all.

    Attributes:
        instance: Unique name of this router's process.
        picker: Chooses workers for this router's requests; this group sets whether that is the router's own core or another
            router.
    """

    def __init__(
        self,
        context: RouterContext,
        picker: RemotePicker,
        secret: GraphSecret,
        thresholds: GraphThresholds,
    ) -> None:
        """Create the group; nothing is connected before `start`.

        Args:
            context: Shared objects of the router.
            picker: Picker of this router.
            secret: Secret of the graph.
            thresholds: This router's copy of the graph's busy thresholds.
        """
        self.instance = uuid.uuid4().hex
        self._since_s = time.time()
        self._discovery = context.discovery
        self._secret = secret
        self._thresholds = thresholds
        self.picker = picker
        self._links: dict[str, RouterLink] = {}
        self._now_s = context.clock.now_s
        self._server = PickerServer(picker, self._now_s, self.instance, self._update)
        self._successor = ""
        self._term = 0
        self._leader: Leader | None = None
        self._is_active = False
        self._is_stopping = False
        self._ticks = 0
        self._met = asyncio.Event()
        self._heard = asyncio.Event()
        picker.join(context.metrics.picks, self._server.computed)

    @property
    def is_picker(self) -> bool:
        """Whether this router is the one that chooses the workers for all routers of the graph."""
        return self._leader is not None and self._leader.instance == self.instance

    @property
    def is_relay(self) -> bool:
        """Whether another router chooses the workers for this router's requests, and therefore counts them as in flight."""
        return self.picker.channel is not None

    def accept(self, request: Request, responder: Responder) -> None:
        """Accept another router's connection: switch it from HTTP to the routers' own protocol.

        Raises:
            RequestRefused: 403, the request does not contain the graph's secret.
        """
        if not self._secret.holds(request.headers):
            message = "path: /picker is for routers of the graph, which share its secret"
            raise RequestRefused(403, message, code="no_router")
        session = self._server.open()
        responder.upgrade(session.channel, NAME)
        session.channel.send(self._status())

    async def start(self) -> None:
        """Connect to the other routers, so that the first request can go to the picker."""
        self._follow_discovery()
        await asyncio.gather(*(link.connect() for link in self._links.values()))
        try:
            async with PatientTimeout(_START_REAL_S):
                if self._is_waiting:
                    await self._met.wait()
        except TimeoutError:
            log.warning("another router has not said who it is")
        self._update()

    def tick(self) -> None:
        """Maintain the connections, send the heartbeat, and elect the picker; called every 0.1 real seconds."""
        self._ticks += 1
        self._heard.set()
        self._follow_discovery()
        for link in self._links.values():
            link.tick()
        self._server.tick()
        self._update()
        self.picker.report_progress()
        self._server.broadcast(self._status())
        if self._ticks % _LOADS_TICKS == 0 and self._is_active and self._server.followers:
            loads = wire.Loads(self._term, self.picker.core.loads(self._now_s()))
            self._server.broadcast(loads, followers_only=True)

    async def confirm_thresholds(self) -> bool:
        """Return whether another router has this router's busy thresholds (or newer ones), so that they survive this process.

        Above a threshold, a worker gets no new requests.

        Waits for 2 real seconds (`CONFIRM_REAL_S`) at most. Returns True if there is no other router.
        """
        self._server.broadcast(self._status())
        with suppress(TimeoutError):
            async with PatientTimeout(CONFIRM_REAL_S):
                while not self._are_thresholds_known() and self._expects_others():
                    self._heard.clear()
                    await self._heard.wait()
        return self._are_thresholds_known() or not self._alive()

    def _expects_others(self) -> bool:
        return self._server.followers > 0 or any(each.is_expected for each in self._links.values())

    def _are_thresholds_known(self) -> bool:
        known = self._thresholds.are_known_to
        return any(known(peer.thresholds, peer.threshold_versions) for _, peer in self._alive())

    def stop(self) -> None:
        """Tell the other routers that this one is shutting down, so that another one becomes the picker.

        The picker is the router that chooses the workers for all. Requests in flight continue.
        """
        self._is_stopping = True
        self._update()
        self._server.broadcast(self._status())

    async def close(self) -> None:
        """Close the connections to and from all other routers; this router is then alone."""
        links, self._links = self._links, {}
        for link in links.values():
            await link.close()
        self._server.close()

    # ------------------------------------------------------------------ within

    def _follow_discovery(self) -> None:
        """Create links to newly listed routers, and drop those to routers that are no longer listed."""
        wanted = set(self._discovery.routers or ())
        for url in self._links.keys() - wanted:
            # A connection attempt under way ends with its timeout.
            self._links.pop(url).drop()
        for url in wanted - self._links.keys():
            self._links[url] = RouterLink(url, self._secret, self._take)

    def _alive(self) -> list[tuple[RouterLink, Status]]:
        """Return the routers from which a heartbeat was recently received, each once even if it has several addresses."""
        found = {each.status.instance: (each, each.status) for each in self._links.values() if each.status}
        return list(found.values())

    @property
    def _is_waiting(self) -> bool:
        """Whether a connected router has not sent its first heartbeat yet."""
        return any(each.channel is not None and each.status is None for each in self._links.values())

    def _take(self, link: RouterLink, message: wire.Message) -> None:
        if not isinstance(message, wire.Status):
            if link.channel is self.picker.channel:
                self.picker.take(message)
            return
        if not self._is_waiting:
            self._met.set()
        if message.instance == self.instance:
            link.drop_own_connection()
            return
        if message.thresholds is not None and self._thresholds.received(
            message.thresholds, message.threshold_versions
        ):
            self._server.broadcast(self._status())
        self._heard.set()
        self._update()

    def _status(self) -> wire.Status:
        leader, (thresholds, versions) = self._leader, self._thresholds.published()
        return wire.Status(
            self.instance,
            self._since_s,
            leader.term if leader is not None and self.is_picker else self._term,
            self.is_picker,
            self._is_active,
            self._is_stopping,
            (self.instance, *(status.instance for _, status in self._alive())),
            self._server.successor,
            thresholds,
            "" if leader is None else leader.instance,
            versions,
        )

    def _update(self) -> None:
        """Elect the picker, and become it or follow it."""
        before = self._leader, self._is_active
        peers = self._alive()
        silent = sum(each.has_vote and each.status is None for each in self._links.values())
        members = 1 + len(peers) + silent
        leader = elect(self._status(), [status for _, status in peers], members)
        self._term = max(self._term, 0 if leader is None else leader.term, *(each.term for _, each in peers))
        if self.is_picker and leader != self._leader:
            log.info("this router picks no more", term=self._term)
            self._server.end()
        self._leader = leader
        if leader is None:
            self._is_active = False
            self.picker.picker_lost()
        elif leader.instance == self.instance:
            self._pick(leader, members, is_new=leader != before[0])
        else:
            self._follow(leader, next(each for each in peers if each[1].instance == leader.instance))
        if (self._leader, self._is_active) != before:
            self._server.broadcast(self._status())

    def _pick(self, leader: Leader, members: int, *, is_new: bool) -> None:
        if is_new:
            log.info("this router picks", term=leader.term, routers=members)
            self.picker.picker_lost()
            self._server.term = leader.term
        self._server.choose_successor()
        self._is_active = 1 + self._server.followers >= majority(members)
        if self._is_active:
            self.picker.pick_for_all()

    def _follow(self, leader: Leader, found: tuple[RouterLink, wire.Status]) -> None:
        link, status = found
        self._is_active = False
        if link.channel is None:
            return
        if self.picker.channel is not link.channel or self.picker.term != leader.term:
            log.info("another router picks", term=leader.term, url=link.url)
            follow = wire.Follow(leader.term, leader.instance, self.instance, self._since_s)
            self.picker.follow(link.channel, follow, is_successor=leader.instance == self._successor)
        self._successor = status.successor
        if status.is_active and status.is_leader and status.term == leader.term:
            self.picker.answered()
