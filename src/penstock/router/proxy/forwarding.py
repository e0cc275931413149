"""Passes requests on to the router that keeps their worker's queue, whole: it queues, dispatches, counts and answers them.

A request is passed on once at most, with the worker's name where several routers keep queues. Where the other router cannot be reached, or breaks off or falls silent before the
first byte, this one decides, which costs a cache miss at worst.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

from penstock.core.errors import ClientDisconnected, PenstockError, StreamBroken, UpstreamTimeout
from penstock.core.http.client import ConnectionPool, StreamingResponse, Timeouts
from penstock.core.http.messages import Headers
from penstock.core.http.problem import EVENT_STREAM, JSON
from penstock.core.http.relay import relay
from penstock.core.http.server import Request, Responder
from penstock.core.http.sse import encode_event
from penstock.core.logs import get_logger
from penstock.router.metrics import RouterMetrics
from penstock.router.peers import Peers
from penstock.router.policy.arrival import Arrival
from penstock.router.proxy.auth import GRAPH_SECRET
from penstock.router.proxy.failures import error_response_of
from penstock.router.proxy.stream_meter import ERROR_EVENT
from penstock.router.proxy.upstream import read_complete
from penstock.router.silence import Wait

log = get_logger(__name__)

FORWARDED: Final = b"x-penstock-forwarded"
"""Header of a request that a router has passed on; a client's is ignored."""
WORKER: Final = b"x-penstock-worker"
"""Header of such a request that names the worker chosen for it."""
_CONNECT_REAL_S: Final = 0.5
"""Chosen: routers of a graph are near each other, and whoever got the request can serve it as well."""
_MARGIN_REAL_S: Final = 5.0
"""Chosen: the router that decides ends a request at its limit first, and says why."""
_OF_THE_CONNECTION: Final = frozenset(
    name.encode()
    for name in [
        "connection",
        "content-length",
        "expect",
        "host",
        "keep-alive",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "x-request-id",
        FORWARDED.decode(),
        GRAPH_SECRET.decode(),
        WORKER.decode(),
    ]
)
"""Headers that are not passed on: they belong to one connection, or are set anew."""

_TOLD: Final = (b"retry-after", b"www-authenticate")
"""Headers of the other router's answer that are passed on, besides its content type."""


@dataclass(slots=True)
class Passage:
    """A request that may be passed on.

    Attributes:
        request: As it came.
        responder: Writes the answer.
        own_id: Its request id, for both routers' logs.
        headers: Headers of the answer.
        is_passed_on: Another router has it: that one counts it.
        last_read: Of the other router's stream.
    """

    request: Request
    responder: Responder
    own_id: bytes
    headers: Headers
    is_passed_on: bool = False
    last_read: bytes = b""

    def observe(self, data: bytes) -> bytes:
        """Remember what was read last, and pass it on."""
        self.last_read = data
        return data


class Forwarder:
    """Finds the router that decides, and relays its answer."""

    def __init__(
        self, peers: Peers, pool: ConnectionPool, metrics: RouterMetrics, *, request_real_s: float
    ) -> None:
        """Tie the parts.

        Args:
            peers: Know who keeps which queue.
            pool: Connections to routers.
            metrics: Count.
            request_real_s: Longest request, real seconds; the other router keeps all other bounds.
        """
        self._peers = peers
        self._pool = pool
        self._metrics = metrics
        longest_s = request_real_s + _MARGIN_REAL_S
        self._timeouts = Timeouts(_CONNECT_REAL_S, longest_s, longest_s, longest_s)

    def owner_url(self, passage: Passage, worker: str = "") -> str | None:
        """Return the router that keeps a request's queue; None: this one.

        Args:
            passage: The request.
            worker: That it is to wait for; empty while none is chosen: then it goes to a sole keeper alone.
        """
        return None if self._is_passed_on(passage.request) else self._peers.owner_url(worker)

    def worker_for(self, request: Request, arrival: Arrival) -> str:
        """Return the worker that a request is to wait for: the one that a router has chosen for it, or this one does.

        Returns:
            Its name; empty: the policy of its queue chooses.
        """
        if not self._is_passed_on(request):
            return self._peers.choose(arrival)
        return request.headers.get(WORKER, b"").decode("utf-8", "replace")

    def _is_passed_on(self, request: Request) -> bool:
        return FORWARDED in request.headers and self._peers.is_router(request)

    async def pass_on(self, passage: Passage, url: str, worker: str = "") -> bool:
        """Let the router at ``url`` answer a request; False, and nothing sent, where this one has to.

        Args:
            passage: The request.
            url: From `owner_url`.
            worker: That it is to wait for; empty: that router's policy chooses.

        Raises:
            ClientDisconnected: the client has left.
        """
        passage.is_passed_on = True
        try:
            await self._exchange_while_heard(passage, url, worker)
        except ClientDisconnected:
            raise
        except PenstockError as exc:
            if self._is_final(passage, exc):
                self._metrics.forwarded["broken"] += 1
                return True
            log.warning("router did not take a request; deciding here", url=url, problem=str(exc))
            self._peers.lost(url)
            self._metrics.forwarded["fell_back"] += 1
            passage.is_passed_on = False
            return False
        self._metrics.forwarded["answered"] += 1
        return True

    def _is_final(self, passage: Passage, problem: PenstockError) -> bool:
        """Answer a request that it is too late to decide here; return whether it was."""
        if passage.responder.started:
            self._break_off(passage, problem)
            return True
        if isinstance(problem, UpstreamTimeout) and problem.phase != "connect":
            answer = error_response_of(problem)
            passage.responder.send(answer.status, answer.body(), headers=passage.headers)
            return True
        return False

    async def _exchange_while_heard(self, passage: Passage, url: str, worker: str) -> None:
        """Exchange, as long as the other router gives signs of life.

        Raises:
            StreamBroken: it has fallen silent.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as limit:
                wait = Wait(lambda: passage.responder.started, lambda: limit.reschedule(loop.time()))
                with self._peers.silence.waiting(url, wait):
                    await self._exchange(passage, url, worker)
        except TimeoutError as exc:
            raise StreamBroken(f"{url} has fallen silent: it does not answer other routers either") from exc

    async def _exchange(self, passage: Passage, url: str, worker: str) -> None:
        request, timeouts = passage.request, self._timeouts
        kept = [(name, value) for name, value in request.headers.items() if name not in _OF_THE_CONNECTION]
        headers = [*kept, (b"x-request-id", passage.own_id), (FORWARDED, b"1"), *self._peers.secret.headers]
        if worker:
            headers.append((WORKER, worker.encode()))
        response = await self._pool.stream(
            "POST", url + request.path, body=request.body, headers=headers, timeouts=timeouts
        )
        async with response:
            await self._answer(passage, response)

    async def _answer(self, passage: Passage, response: StreamingResponse) -> None:
        responder, found = passage.responder, response.headers
        headers = [*passage.headers, *((name, found[name]) for name in _TOLD if name in found)]
        content_type = found.get(b"content-type", JSON.encode()).decode("latin-1")
        if not content_type.lower().startswith(EVENT_STREAM):
            responder.send(
                response.status, await read_complete(response), content_type=content_type, headers=headers
            )
            return
        responder.start(response.status, content_type=content_type, headers=headers)
        await relay(response, responder, observe=passage.observe)
        responder.end()

    def _break_off(self, passage: Passage, problem: PenstockError) -> None:
        """End a stream as broken, with an error event unless the other router has sent its own."""
        if ERROR_EVENT not in passage.last_read:
            passage.responder.write(b"\n\n" + encode_event(error_response_of(problem).body()))
        passage.responder.break_off()
