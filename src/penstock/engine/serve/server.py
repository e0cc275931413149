"""HTTP server of a simulated worker: routes, life cycle and draining; `serve` runs one worker until it is stopped."""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeAlias

import orjson

from penstock.core.clock import SimulatedClock
from penstock.core.errors import PenstockError
from penstock.core.http.anthropic import MESSAGES, is_anthropic
from penstock.core.http.loop import ended_or_stopped
from penstock.core.http.messages import REQUEST_ID, Headers, error_body, well_formed_id
from penstock.core.http.server import HttpServer, Request, Responder, ServerLimits
from penstock.core.http.tls import server_context
from penstock.core.logs import bind_task, get_logger
from penstock.core.tracing import Tracing
from penstock.engine.core.request_slots import RequestSlots, SlotState
from penstock.engine.serve import metrics, notifications, protocol, tokenizer
from penstock.engine.serve.choices import ChoiceTally
from penstock.engine.serve.fields import RequestError
from penstock.engine.serve.message_answers import message_error
from penstock.engine.serve.protocol import Api, EngineCall
from penstock.engine.serve.remote_kv import rejected_remote
from penstock.engine.serve.settings import ServeSettings
from penstock.engine.serve.streams import Reply
from penstock.engine.serve.trace import EngineTrace
from penstock.engine.serve.worker import ServedWorker

Ticket: TypeAlias = "asyncio.Future[bool]"
"""Future that becomes True when its queued request can run, and False if its client disconnects first."""


class EngineFull(Exception):  # noqa: N818 - named like the fact it reports
    """A request was rejected because engine and queue are full. Routers recognise the message of this error."""

    def __init__(self) -> None:
        super().__init__("Server overloaded: worker at capacity")


class RequestGate:
    """Admission of requests to one worker's engine.

    Attributes:
        slots: Requests that run or wait.
    """

    def __init__(self, limit: int | None, queue: int) -> None:
        self.slots: RequestSlots[Ticket] = RequestSlots(limit, queue)

    @property
    def is_empty(self) -> bool:
        """Whether no request runs or waits."""
        return not self.slots.running and not self.slots.queued

    @asynccontextmanager
    async def enter(self, responder: Responder, priority: int) -> AsyncIterator[bool]:
        """Context manager that occupies a slot for its block; yields whether the client is still connected.

        If the engine is full, the request waits in the queue, from which the request with the lowest priority value
        runs next.

        Raises:
            EngineFull: The queue is full too.
        """
        ticket: Ticket = asyncio.get_running_loop().create_future()
        state = self.slots.enter(ticket, priority)
        if state is SlotState.REJECTED:
            raise EngineFull
        try:
            if state is SlotState.QUEUED:
                responder.on_disconnect(lambda: self._give_up(ticket))
                yield await ticket and not responder.disconnected
            else:
                yield True
        finally:
            self._leave(ticket)

    def _give_up(self, ticket: Ticket) -> None:
        if not ticket.done():
            self._leave(ticket)
            ticket.set_result(False)

    def _leave(self, ticket: Ticket) -> None:
        following = self.slots.leave(ticket)
        if following is not None and not following.done():
            following.set_result(True)


log = get_logger(__name__)

_LIMITS = ServerLimits(max_body_bytes=64 * 1024 * 1024, drain_idle_s=1.0)
"""Limits of the HTTP server. A prompt of a million tokens has 4 MB of text or up to 7 MB of token IDs. Chosen: a
draining worker refuses all new requests, and its routers retry on another worker a request that meets a closing
connection, so that GPUs do not have to wait for idle connections."""
_DRAIN_POLL_S = 0.02
_CLOSE_GRACE_S = 5.0
_RETRY_AFTER_S = b"1"
"""Value of retry-after in seconds. Chosen: the minimum that HTTP allows; the worker does not know when a slot becomes
free."""
_ID_PREFIXES = {Api.COMPLETIONS: "cmpl-", Api.CHAT: "chatcmpl-", Api.RESPONSES: "resp_", Api.MESSAGES: "msg_"}

Route = Callable[[Request, Responder], Awaitable[None]]


class EngineServer:
    """HTTP server of one simulated worker.

    Attributes:
        settings: Settings of the worker.
        state: ``starting``, then ``ready``, then ``draining``; requests are accepted only in state ``ready``.
        worker: The engine and its clients.
    """

    def __init__(
        self, settings: ServeSettings, group: asyncio.TaskGroup, tracing: Tracing | None = None
    ) -> None:
        self.settings = settings
        self.state = "starting"
        flags = settings.flags
        self._gate = RequestGate(flags.engine_request_limit, flags.engine_request_queue)
        self.worker = ServedWorker(settings, SimulatedClock(flags.speed), group, self._gate.slots)
        self._http = HttpServer(
            self._handle, limits=_LIMITS, is_vital=lambda request: not request.path.startswith("/v1/")
        )
        self._serial = itertools.count()
        role = settings.engine.role.value
        self._trace = None if tracing is None else EngineTrace(tracing, self.worker.clock, role=role)
        self._created_s = int(time.time())
        self._routes: dict[tuple[str, str], Route] = {
            ("POST", "/v1/completions"): partial(self._generate, api=Api.COMPLETIONS),
            ("POST", "/v1/chat/completions"): partial(self._generate, api=Api.CHAT),
            ("POST", "/v1/responses"): partial(self._generate, api=Api.RESPONSES),
            ("POST", MESSAGES): partial(self._generate, api=Api.MESSAGES),
            ("GET", "/v1/models"): self._models,
            ("GET", "/health"): self._health,
            ("GET", "/metrics"): self._metrics,
            ("POST", "/kv/notify"): self._notify,
            ("POST", "/reset_prefix_cache"): self._reset_prefix_cache,
            **{("POST", path): self._answer_tokenizer for path in tokenizer.ANSWERS},
        }

    @property
    def port(self) -> int:
        """Port that the server listens on."""
        return self._http.port

    @property
    def url(self) -> str:
        """Base URL of the worker."""
        return f"{self.settings.scheme}://{self.settings.flags.host}:{self.port}"

    async def start(self) -> None:
        """Start to listen, and become ready after the simulated startup time (`ServeFlags.startup_s`)."""
        flags = self.settings.flags
        if self.worker.publisher is not None:
            self.worker.publisher.start()
        certificate, key = flags.ssl_certfile, flags.ssl_keyfile
        tls = None if certificate is None or key is None else server_context(certificate, key)
        await self._http.start(flags.host, flags.port, tls)
        self.worker.port = self.port
        await asyncio.sleep(self.worker.clock.to_real_s(flags.startup_s))
        if self.state == "starting":
            self.state = "ready"

    async def drain(self) -> None:
        """Refuse new requests; return when all streams have ended and all blocks that are kept for other workers are released."""
        self.state = "draining"
        self._http.drain()
        while not (self.worker.is_idle and self._gate.is_empty):  # noqa: ASYNC110 - four conditions; an event for each would cost more
            await asyncio.sleep(_DRAIN_POLL_S)

    async def close(self, *, grace_s: float = _CLOSE_GRACE_S) -> None:
        """Stop listening and close.

        Args:
            grace_s: Wall-clock seconds for connections to receive the last bytes.
        """
        self.state = "draining"
        await self._http.close(grace_s=grace_s)
        await self.worker.close()

    # -- routes ---------------------------------------------------------------------------------------

    async def _handle(self, request: Request, responder: Responder) -> None:
        route = self._routes.get((request.method, request.path))
        if route is None:
            known = ", ".join(method for method, path in self._routes if path == request.path)
            status, kind = (405, "MethodNotAllowedError") if known else (404, "NotFoundError")
            message = f"{request.method} {request.path} is not served here."
            headers = ((b"allow", known.encode()),) if known else ()
            responder.send(status, error_body(message, kind=kind, code=status), headers=headers)
            return
        await route(request, responder)

    async def _generate(self, request: Request, responder: Responder, *, api: Api) -> None:
        given_id = well_formed_id(request.headers.get(REQUEST_ID))
        headers = () if given_id is None else ((REQUEST_ID, given_id),)
        if given_id is not None:
            bind_task(request_id=given_id.decode())
        if self.state != "ready":
            _refuse(request, responder, f"This worker is {self.state}.", headers)
            return
        try:
            calls = protocol.parse(request.body, self.settings, api=api)
        except RequestError as exc:
            remote = rejected_remote(request.body, self.settings)
            if remote is not None:
                self.worker.reading.release(remote)
            responder.send(exc.status, _error_of(request, exc.body()), headers=headers)
            return
        try:
            async with self._gate.enter(responder, calls[0].priority) as is_wanted:
                if is_wanted:
                    await self._reply(calls, request, responder, headers)
        except EngineFull as exc:
            _refuse(request, responder, str(exc), headers)

    async def _reply(
        self,
        calls: Sequence[EngineCall],
        request: Request,
        responder: Responder,
        headers: tuple[tuple[bytes, bytes], ...],
    ) -> None:
        """Answer a request, of which each call is one choice."""
        given_id = dict(headers).get(REQUEST_ID)
        name = uuid.uuid4().hex if given_id is None else given_id.decode("latin-1")
        response_id = f"{_ID_PREFIXES[calls[0].api]}{name}"
        tally = ChoiceTally(len(calls))
        replies = [
            Reply(
                call,
                responder,
                response_id=response_id,
                # Two requests may have the same client ID.
                request_id=f"{response_id}-{next(self._serial):08x}",
                headers=headers,
                interval=self.settings.flags.stream_interval,
                outputs_of=self.worker.engine.batcher.outputs_of,
                kv_params=self.worker.pinned_params,
                tally=tally,
            )
            for call in calls
        ]
        for reply in replies:
            reply.peers = [each for each in replies if each is not reply]
            responder.on_disconnect(partial(self.worker.abort, reply))
        if calls[0].stream:
            responder.on_pause(partial(_each, replies, Reply.pause))
            responder.on_resume(partial(_each, replies, Reply.resume))
        span = None if self._trace is None else self._trace.begin(request)
        for reply in replies:
            self.worker.submit(reply)
        for reply in replies:
            await reply.done
        if self._trace is not None and span is not None:
            self._trace.end(span, replies[0])

    async def _models(self, request: Request, responder: Responder) -> None:  # noqa: ARG002 - a route
        card = {
            "object": "model",
            "created": self._created_s,
            "owned_by": "penstock",
            "root": self.settings.flags.model,
            "parent": None,
            "max_model_len": self.settings.max_model_len,
        }
        names, adapters = self.settings.served_names, self.settings.adapters
        cards = [{"id": name, **card} for name in names]
        cards += [
            {"id": name, **card, "root": path, "parent": names[0], "max_model_len": None}
            for name, path in adapters.items()
        ]
        responder.send(200, orjson.dumps({"object": "list", "data": cards}))

    async def _health(self, request: Request, responder: Responder) -> None:  # noqa: ARG002 - a route
        responder.send(200 if self.state == "ready" else 503, b"")

    async def _metrics(self, request: Request, responder: Responder) -> None:  # noqa: ARG002 - a route
        responder.send(200, self.worker.metrics.render(), content_type=metrics.CONTENT_TYPE)

    async def _reset_prefix_cache(self, request: Request, responder: Responder) -> None:  # noqa: ARG002 - a route
        responder.send(200, orjson.dumps({"success": self.worker.clear_cache()}))

    async def _answer_tokenizer(self, request: Request, responder: Responder) -> None:
        try:
            responder.send(200, tokenizer.ANSWERS[request.path](request.body, self.settings))
        except RequestError as exc:
            responder.send(exc.status, _error_of(request, exc.body()))

    async def _notify(self, request: Request, responder: Responder) -> None:
        try:
            message = notifications.parse(request.body)
        except ValueError as exc:
            self.worker.metrics.ignored[metrics.IgnoredNotification.MALFORMED] += 1
            responder.send(400, error_body(str(exc), kind="BadRequestError", code=400))
            return
        unknown = self.worker.notified(message)
        responder.send(200, orjson.dumps({"unknown": unknown}))


def _each(replies: Sequence[Reply], act: Callable[[Reply], None]) -> None:
    for reply in replies:
        act(reply)


def _error_of(request: Request, body: bytes) -> bytes:
    return message_error(body) if is_anthropic(request.path) else body


def _refuse(request: Request, responder: Responder, message: str, headers: Headers) -> None:
    body = error_body(message, kind="ServiceUnavailableError", code=503)
    responder.send(503, _error_of(request, body), headers=(*headers, (b"retry-after", _RETRY_AFTER_S)))


async def serve(settings: ServeSettings, stop: asyncio.Event, tracing: Tracing | None = None) -> None:
    """Run one worker until ``stop`` is set, then drain it and return.

    Args:
        settings: Settings of the worker.
        stop: Event that stops the worker.
        tracing: Tracer for spans of requests; None disables tracing.
    """
    try:
        async with asyncio.TaskGroup() as group:
            await _serve_until(stop, EngineServer(settings, group, tracing))
    except ExceptionGroup as failures:  # the task group wraps even a single error; unwrap it
        if len(failures.exceptions) == 1 and isinstance(failures.exceptions[0], PenstockError):
            raise failures.exceptions[0] from None
        raise
    finally:
        if tracing is not None:
            await tracing.close()
    log.info("worker stopped")


async def _serve_until(stop: asyncio.Event, server: EngineServer) -> None:
    start = asyncio.create_task(server.start())
    try:
        await ended_or_stopped(start, stop)
        if start.done():
            start.result()
            engine = server.settings.engine
            log.info(
                "worker ready",
                url=server.url,
                role=str(engine.role),
                profile=server.settings.profile.name,
                speed=server.settings.flags.speed,
                kv_blocks=engine.num_blocks,
                max_model_len=server.settings.max_model_len,
                lease_s=engine.lease.duration_s,
            )
        await stop.wait()
        log.info("worker draining", in_flight=server.worker.engine.in_flight)
        await server.drain()
    finally:
        start.cancel()
        await server.close()
