"""What other routers of the graph have in flight at each worker: asked of them as often as of the workers.

Each tells its own share alone (`own_load`), so shares add up. A router that does not answer counts as last heard, for as
long as a worker's metrics do; then it is taken to be gone.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from penstock_core.clock import SimulatedClock
from penstock_core.errors import PenstockError
from penstock_core.logs import get_logger
from penstock_router.admission import Admission
from penstock_router.policy.load import KV_MAX_AGE_S
from penstock_wire.client import ConnectionPool, Timeouts

log = get_logger(__name__)

PATH: Final = "/peer_load"
_MAX_TOKENS: Final = 1 << 53


@dataclass(frozen=True, slots=True)
class PeerLoad:
    """One router's share.

    Attributes:
        instance: Unique name of its process.
        tokens: By worker, tokens >= 0; absent means none.
        heard_s: When it was told, simulated seconds.
    """

    instance: str
    tokens: Mapping[str, int]
    heard_s: float


class Peers:
    """Tells this router's share to others, and theirs to its core.

    Attributes:
        instance: Unique name of this process, by which it knows itself among the addresses.
    """

    def __init__(
        self,
        admission: Admission,
        pool: ConnectionPool,
        urls: Callable[[], tuple[str, ...]],
        clock: SimulatedClock,
        *,
        timeout_real_s: float,
    ) -> None:
        """Prepare; nothing is asked before `ask`.

        Args:
            admission: Takes the others' shares.
            pool: Connections.
            urls: Tells the routers' base URLs; this one's own may be among them.
            clock: Simulated time.
            timeout_real_s: Longest wait for one router, real seconds.
        """
        self.instance = uuid.uuid4().hex
        self._admission = admission
        self._pool = pool
        self._urls = urls
        self._clock = clock
        self._timeouts = Timeouts.each(timeout_real_s)
        self._heard: dict[str, PeerLoad] = {}

    def own_load(self) -> bytes:
        """Return ``{"instance", "tokens": {worker: tokens}}``: what this router alone has at the first stage's workers."""
        return orjson.dumps({"instance": self.instance, "tokens": self._admission.core.own_tokens()})

    async def ask(self) -> None:
        """Ask every router once, and tell the core what all others have together."""
        urls = self._urls()
        found = await asyncio.gather(*(self._ask_one(url) for url in urls))
        now_s = self._clock.now_s()
        self._heard.update({url: load for url, load in zip(urls, found, strict=True) if load is not None})
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

    async def _ask_one(self, url: str) -> PeerLoad | None:
        try:
            response = await self._pool.request("GET", url + PATH, timeouts=self._timeouts)
        except PenstockError as exc:
            log.debug("router did not answer", url=url, problem=str(exc))
            return None
        return None if response.status != 200 else read_load(response.body, self._clock.now_s())


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
    return PeerLoad(told["instance"], tokens, heard_s)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_TOKENS
