"""What the routers of a graph tell each other: what each has in flight at each worker, and which of them decide.

Each is asked for its own share alone (`own_load`), so shares add up. A router that does not answer counts as last heard,
for as long as a worker's metrics do; then it is taken to be gone. It decides about nothing as soon as it misses three
answers or refuses a connection. Those that requests wait for are asked as long as they are waited for, listed or not, so
that their silence is noticed.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Final

import orjson

from penstock_core.clock import SimulatedClock
from penstock_core.errors import PenstockError, StreamBroken, UpstreamConnectError, UpstreamTimeout
from penstock_core.logs import get_logger
from penstock_router.admission import Admission
from penstock_router.busy_cores import BusyCores
from penstock_router.policy.load import KV_MAX_AGE_S
from penstock_router.policy.prefix_owner import PrefixOwners, RouterState, owners_among
from penstock_router.silence import ASK_REAL_S, SilenceWatch
from penstock_wire.client import ConnectionPool, Timeouts

log = get_logger(__name__)

PATH: Final = "/peer_load"
_MAX_TOKENS: Final = 1 << 53
_MAX_CORES: Final = 1 << 16
_MISSES: Final = 3
"""Chosen: answers in a row that a router may miss before others decide in its place; one may be lost to a pause."""


@dataclass(frozen=True, slots=True)
class PeerLoad:
    """One router's share.

    Attributes:
        instance: Unique name of its process.
        tokens: By worker, tokens >= 0; absent means none.
        heard_s: When it was told, simulated seconds.
        state: By which it may be chosen to decide; None: it decides about nothing that others pass on.
    """

    instance: str
    tokens: Mapping[str, int]
    heard_s: float
    state: RouterState | None = None


class Peers:
    """Tells this router's share to others, and theirs to its core.

    Attributes:
        instance: Unique name of this process, by which it knows itself among the addresses.
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
        timeout_real_s: float,
        interval_real_s: float,
        forwards: bool = False,
    ) -> None:
        """Prepare; nothing is asked before `ask`.

        Args:
            admission: Takes the others' shares.
            pool: Connections.
            urls: Tells the routers' base URLs; this one's own may be among them.
            clock: Simulated time.
            timeout_real_s: Longest wait for one router, real seconds; at most `ASK_REAL_S` counts.
            interval_real_s: Between two calls of `ask`, real seconds.
            forwards: Whether requests are passed on between routers.
        """
        self.instance = uuid.uuid4().hex
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
        self._owners = PrefixOwners()
        self._url_of: dict[str, str] = {}

    def own_load(self) -> bytes:
        """Return what this router tells of itself.

        ``{"instance", "tokens": {worker: tokens}, "decides": {"since", "busy_cores"}}``: what it alone has at the first
        stage's workers, and what the choice of deciding routers goes by; that is absent where it passes nothing on.
        """
        now_s = self._clock.now_s()
        told: dict[str, Any] = {
            "instance": self.instance,
            "tokens": self._admission.core.own_tokens(now_s),
        }
        if self.forwards:
            told["decides"] = {"since": self._since_s, "busy_cores": round(self._busy.cores, 3)}
        return orjson.dumps(told)

    def owner_url(self, chain: Sequence[int]) -> str | None:
        """Return the base URL of the router that decides about a prompt; None: this one does.

        Args:
            chain: Chained prefix keys; empty while they are not known: then only a sole owner is returned.
        """
        owner = self._owners.owner(chain)
        return None if owner is None else self._url_of.get(owner)

    def lost(self, url: str) -> None:
        """Take note that a router could not be reached: it decides about nothing until it answers again."""
        self._missed[url] = _MISSES
        self._choose_owners()

    async def ask(self) -> None:
        """Ask every other router once, and tell the core what they have together."""
        self._busy.measure(time.process_time(), time.monotonic())
        listed = self._urls()
        self._own_urls.intersection_update(listed)
        urls = frozenset(listed) - self._own_urls
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
        total: Counter[str] = Counter()
        # A router may be reached by several addresses, and counts once.
        for load in {each.instance: each for each in self._heard.values()}.values():
            total.update(load.tokens)
        self._admission.set_peer_tokens(total)
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
        apart = len({load.instance for load in self._heard.values() if load.state is None})
        is_scattered = not self.forwards and bool(self._heard)
        deciders = 1 + len(self._heard) if is_scattered else max(1, len(self._owners)) + apart
        self._admission.set_deciders(deciders, is_scattered=is_scattered)

    async def _ask_one(self, url: str) -> None:
        began_s = time.monotonic()
        try:
            response = await self._pool.request("GET", url + PATH, timeouts=self._timeouts)
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
            self._heard[url] = load
            self._missed[url] = 0


def _shows_life(problem: PenstockError) -> bool:
    """Return whether a failed ask was turned down by a machine that is there, as a router that stops does."""
    is_refused = isinstance(problem, UpstreamConnectError) and problem.is_refused
    return is_refused or isinstance(problem, StreamBroken)


def read_load(body: bytes, heard_s: float) -> PeerLoad | None:
    """Return what a router tells of its share; None if it is none: an older router, or something else."""
    try:
        told = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(told, dict) or not isinstance(told.get("instance"), str):
        return None
    tokens: Any = told.get("tokens")
    if not isinstance(tokens, dict) or not all(_is_count(each) for each in tokens.values()):
        return None
    name = told["instance"]
    return PeerLoad(name, tokens, heard_s, _read_state(name, told.get("decides")))


def _read_state(name: str, told: object) -> RouterState | None:
    if not isinstance(told, dict):
        return None
    since_s, cores = _number(told.get("since")), _number(told.get("busy_cores"))
    if since_s is None or cores is None or not 0 <= cores <= _MAX_CORES:
        return None
    return RouterState(name, since_s, cores)


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if isfinite(value) else None


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_TOKENS
