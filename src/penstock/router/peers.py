"""What the routers of a graph tell each other: what each has in flight at each worker, and which of them keep queues.

Each is asked for its own share alone (`own_load`), so shares add up; where several keep queues, also for the prompts that it
has queued since it was asked before. A router that does not answer counts as last heard,
for as long as a worker's metrics do; then it is taken to be gone. It keeps no queue as soon as it misses three
answers or refuses a connection. Those that requests wait for are asked as long as they are waited for, listed or not, so
that their silence is noticed.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import orjson

from penstock.core.clock import SimulatedClock
from penstock.core.errors import PenstockError, StreamBroken, UpstreamConnectError, UpstreamTimeout
from penstock.core.http.client import ConnectionPool, Timeouts
from penstock.core.http.messages import Request
from penstock.core.logs import get_logger
from penstock.kube.objects.names import GRAPH_SECRET_VARIABLE
from penstock.router.admission import Admission
from penstock.router.busy_cores import BusyCores
from penstock.router.graph_thresholds import GraphThresholds
from penstock.router.peer_load import PeerLoad, read_load, told_prompts
from penstock.router.policy.arrival import Arrival
from penstock.router.policy.load import KV_MAX_AGE_S
from penstock.router.policy.queue_owner import QueueOwners, RouterState, owners_among
from penstock.router.policy.routing_policy import AssignTime
from penstock.router.proxy.auth import GraphSecret
from penstock.router.proxy.refusal import RequestRefused
from penstock.router.silence import ASK_REAL_S, SilenceWatch

log = get_logger(__name__)

PATH: Final = "/peer_load"
_PROMPTS: Final = "prompts"
"""Query parameter, by which prompts are asked for from a number on."""
_DIGITS: Final = 16
"""Chosen: of such a number, more than ever are; `int` refuses one of thousands."""
_MISSES: Final = 3
"""Chosen: answers in a row that a router may miss before others decide in its place; one may be lost to a pause."""


class Peers:
    """Tells this router's share to others, and theirs to its core.

    Attributes:
        instance: Unique name of this process, by which it knows itself among the addresses.
        secret: By which routers know each other.
        forwards: Whether requests are passed on between routers; turned off while this one stops.
        silence: Ends waits for routers that answer no more.
    """

    def __init__(
        self,
        admission: Admission,
        pool: ConnectionPool,
        urls: Callable[[], tuple[str, ...]],
        clock: SimulatedClock,
        *,
        secret: GraphSecret,
        timeout_real_s: float,
        interval_real_s: float,
        forwards: bool = False,
        thresholds: GraphThresholds,
    ) -> None:
        """Prepare; nothing is asked before `ask`.

        Args:
            admission: Takes the others' shares.
            pool: Connections.
            urls: Tells the routers' base URLs; this one's own may be among them.
            clock: Simulated time.
            secret: By which routers know each other.
            timeout_real_s: Longest wait for one router, real seconds; at most `ASK_REAL_S` counts.
            interval_real_s: Between two calls of `ask`, real seconds.
            forwards: Whether requests are passed on between routers.
            thresholds: Of the graph, which routers tell each other.
        """
        self.instance = uuid.uuid4().hex
        self.secret = secret
        self.forwards = forwards
        self._since_s = time.time()
        self._busy = BusyCores()
        self._admission = admission
        self._pool = pool
        self._urls = urls
        self._clock = clock
        self.silence = SilenceWatch(interval_real_s)
        self._timeouts = Timeouts.each(min(timeout_real_s, ASK_REAL_S))
        self._heard: dict[str, PeerLoad] = {}
        self._missed: Counter[str] = Counter()
        self._own_urls: set[str] = set()
        self._has_warned = False
        self._next_prompt: dict[str, int] = {}
        self._reads_prompts = admission.core.entry_queue.policy.assigns is AssignTime.ON_ARRIVAL
        self._owners = QueueOwners()
        self._url_of: dict[str, str] = {}
        self._thresholds = thresholds

    def own_load(self, request: Request) -> bytes:
        """Return what this router tells of itself.

        ``{"instance", "tokens": {worker: tokens}, "decides": {"since", "busy_cores"}, "thresholds", "prompts"}``: what it
        alone has at the first stage's workers; what the choice of routers that keep queues goes by, absent where it
        passes nothing on; the graph's thresholds, absent while they are the file's; and where they are asked for, the
        prompts that it has queued (`told_prompts`).

        Raises:
            RequestRefused: the request comes from no router of the graph.
        """
        if not self.is_router(request):
            raise RequestRefused(
                403, "path: /peer_load is for routers of the graph, which share its secret", code="no_router"
            )
        now_s = self._clock.now_s()
        told: dict[str, Any] = {
            "instance": self.instance,
            "tokens": self._admission.core.own_tokens(now_s),
        }
        if self.forwards:
            told["decides"] = {"since": self._since_s, "busy_cores": round(self._busy.cores, 3)}
        if self._thresholds.state.version:
            told["thresholds"] = self._thresholds.state.told()
        since = request.query.get(_PROMPTS, "")
        if since.isdecimal() and len(since) <= _DIGITS:
            told["prompts"] = told_prompts(*self._admission.core.sharing.log.since(int(since)))
        return orjson.dumps(told)

    def is_router(self, request: Request) -> bool:
        """Return whether a request comes from a router of the graph."""
        return self.secret.holds(request.headers)

    @property
    def share_queues(self) -> bool:
        """Whether several routers keep the workers' queues, each some of them."""
        return self._reads_prompts and len(self._owners) > 1

    def owner_url(self, worker: str = "") -> str | None:
        """Return the base URL of the router that keeps a worker's queue; None: this one does.

        Args:
            worker: Its name; empty while none is chosen: then only a sole keeper is returned.
        """
        owner = self._owners.owner(worker)
        return None if owner is None else self._url_of.get(owner)

    def choose(self, arrival: Arrival) -> str:
        """Return the worker that a request is to wait for; empty: its queue chooses."""
        return self._admission.core.choose(arrival, self._clock.now_s())

    def passed_on(self, worker: str, arrival: Arrival) -> None:
        """Take note that a request is passed on to the router that keeps a worker's queue."""
        self._admission.core.passed_on(worker, arrival, self._clock.now_s())

    def lost(self, url: str) -> None:
        """Take note that a router could not be reached: it keeps no queue until it answers again."""
        self._missed[url] = _MISSES
        self._choose_owners()

    async def ask(self) -> None:
        """Ask every other router once, and tell the core what they have together."""
        self._busy.measure(time.process_time(), time.monotonic())
        asked_s = self._clock.now_s()
        listed = self._urls()
        self._own_urls.intersection_update(listed)
        urls = frozenset(listed) - self._own_urls
        if len(listed) > 1 and not self.secret.headers and not self._has_warned:
            self._has_warned = True
            log.warning(
                "other routers are not known: set the same secret in all", variable=GRAPH_SECRET_VARIABLE
            )
        asked = urls | self.silence.urls
        await asyncio.gather(*(self._ask_one(url) for url in asked))
        self.silence.forget_all_but(asked)
        # One that is listed no more, as it stops, decides about nothing, though it may still answer.
        self._missed = Counter({url: self._missed[url] for url in urls})
        now_s = self._clock.now_s()
        self._heard = {
            url: load
            for url, load in self._heard.items()
            if now_s - load.heard_s <= KV_MAX_AGE_S and load.instance != self.instance
        }
        known = {load.instance for load in self._heard.values()}
        self._next_prompt = {name: at for name, at in self._next_prompt.items() if name in known}
        total: Counter[str] = Counter()
        # A router may be reached by several addresses, and counts once.
        for load in {each.instance: each for each in self._heard.values()}.values():
            total.update(load.tokens)
        self._admission.set_peer_tokens(total, asked_s=asked_s)
        self._choose_owners()

    def _choose_owners(self) -> None:
        states: dict[str, RouterState] = {}
        self._url_of = {}
        if self.forwards:
            states[self.instance] = RouterState(self.instance, self._since_s, self._busy.cores)
            for url, load in sorted(self._heard.items(), reverse=True):
                if load.state is not None and self._missed.get(url, _MISSES) < _MISSES:
                    states[load.instance] = load.state
                    self._url_of[load.instance] = url
        self._owners.set_owners(owners_among(states.values(), len(self._owners)))
        others = {load.instance: load for load in self._heard.values()}.values()
        core, is_scattered = self._admission.core, not self.forwards and bool(others)
        core.sharing.is_on = self.forwards and self._reads_prompts and bool(others)
        # Where each worker's queue is kept by one router, only such dispatch beside it as pass nothing on.
        has_keepers = self.forwards and (self._reads_prompts or len(self._owners) == 1)
        beside = sum(load.state is None for load in others) if has_keepers else len(others)
        self._admission.set_deciders(1 + beside, is_scattered=is_scattered)

    async def _ask_one(self, url: str) -> None:
        began_s = time.monotonic()
        path = PATH
        if self.share_queues:
            known = self._heard.get(url)
            path += f"?{_PROMPTS}={0 if known is None else self._next_prompt.get(known.instance, 0)}"
        try:
            response = await self._pool.request(
                "GET", url + path, headers=self.secret.headers, timeouts=self._timeouts
            )
        except PenstockError as exc:
            self._missed[url] += _MISSES if isinstance(exc, UpstreamConnectError) else 1
            if _shows_life(exc):
                self.silence.heard(url)
            elif isinstance(exc, UpstreamTimeout | UpstreamConnectError):
                self.silence.missed(url, time.monotonic() - began_s)
            log.debug("router did not answer", url=url, problem=str(exc))
            return
        self.silence.heard(url)
        load = None if response.status != 200 else read_load(response.body, self._clock.now_s())
        if load is None:
            self._missed[url] += 1
        elif load.instance == self.instance:
            self._own_urls.add(url)
        else:
            self._heard[url] = replace(load, prompts=())
            self._missed[url] = 0
            if load.thresholds is not None:
                self._thresholds.heard(load.thresholds)
            if path != PATH:
                self._next_prompt[load.instance] = load.next_prompt
                self._admission.core.prompts_told(load.prompts)


def _shows_life(problem: PenstockError) -> bool:
    """Return whether a failed ask was turned down by a machine that is there, as a router that stops does."""
    is_refused = isinstance(problem, UpstreamConnectError) and problem.is_refused
    return is_refused or isinstance(problem, StreamBroken)
