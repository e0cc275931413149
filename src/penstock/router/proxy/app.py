"""The router's HTTP interface: the OpenAI API, health, metrics and administration of workers.

Every request is passed to `RouterApp.handle`, which the HTTP server calls in a task of its own; that is the only task of a
request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Collection
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import orjson

from penstock.core.errors import ClientDisconnected, NotFoundError
from penstock.core.http.anthropic import error_body_for
from penstock.core.http.content_encoding import GZIP, MalformedBodyError, gunzip
from penstock.core.http.intake import Intake
from penstock.core.http.messages import REQUEST_ID, Headers, request_id
from penstock.core.http.server import Request, Responder
from penstock.core.kv_transfers import TransferResult
from penstock.core.logs import bind_task, get_logger
from penstock.core.tracing import Tracing, trace_context
from penstock.router.access_log import AccessLog
from penstock.router.context import RouterContext
from penstock.router.core.request import QUEUE_TIMEOUT
from penstock.router.core.worker import Worker
from penstock.router.metrics_page import MetricsPage
from penstock.router.picker.group import CONFIRM_REAL_S, PeerGroup
from penstock.router.picker.links import PATH as PICKER_PATH
from penstock.router.picker.messages import SESSION_BYTES
from penstock.router.proxy.auth import (
    AdminCheck,
    Cors,
    GraphSecret,
    KeyCheck,
    credentials,
    is_from_this_machine,
)
from penstock.router.proxy.call import CompletionCall, RequestTrace
from penstock.router.proxy.completion import (
    SMALL_BYTES,
    CompletionRequest,
    RequestRefused,
    check_size,
    not_served,
    parse_completion,
    unknown_model,
)
from penstock.router.proxy.failures import AT_CAPACITY, REJECTIONS, SATURATED
from penstock.router.proxy.handler import CompletionHandler
from penstock.router.proxy.prefix import PromptReader
from penstock.router.proxy.responses import RESPONSES, check_follow_up, not_relayed
from penstock.router.proxy.routes import PATHS, ApiEndpoint
from penstock.router.proxy.tiers import LiveTiers
from penstock.router.thresholds import BusyThresholdApi, GraphThresholds, unconfirmed
from penstock.router.ui.live_page import LivePage

log = get_logger(__name__)
_DEBUG_LOGGER = logging.getLogger(__name__)
"""Checked before a log line is built, so that details of requests cost nothing if they are not logged."""

_CLIENT_LEFT = 499
"""nginx's status code for a client that has disconnected; no client receives it."""
_OVERLOADED = (429, 503)
"""Statuses of requests that are rejected for lack of capacity."""
_WATCHED = frozenset({"/metrics", "/health", "/ping", "/ready", "/version", "/load", "/ui", PICKER_PATH})
_POSTED_TOO = "/ping"
"""SageMaker's probe, for which vLLM accepts either method."""
_JSON_TYPE = (b"content-type", b"application/json")
_ENCODING = b"content-encoding"
_IDENTITY = b"identity"


@dataclass(eq=False)
class RouterApp:
    """Answers the router's HTTP requests; an attribute is None if the graph does not have that part.

    Attributes:
        context: Objects that the parts of the router share, such as settings, clock and connections.
        handler: Serves completion requests.
        page: Renders ``/metrics``.
        live_page: Serves ``/ui``.
        thresholds: This router's copy of the graph's busy thresholds.
        secret: Secret by which the graph's routers authenticate to each other.
        group: Connections to the other routers of the graph.
        reader: Makes the prefix keys of prompts, by which policies recognize common prefixes; None if the policy does not
            use such keys.
        access_log: Log with one line per request.
        tiers: Determines the tier (priority class) of each request.
        tracing: Creates tracing spans.
        intake: Limits on the number and size of incoming requests, for HTTP and gateways together.
        is_stopping: Whether the router is shutting down and must not be ready.
        load: Number of API requests that have arrived and whose response is not complete yet.
    """

    context: RouterContext
    handler: CompletionHandler
    page: MetricsPage
    live_page: LivePage
    thresholds: GraphThresholds
    secret: GraphSecret
    group: PeerGroup | None
    reader: PromptReader | None
    access_log: AccessLog | None
    tiers: LiveTiers | None
    tracing: Tracing | None
    intake: Intake
    is_stopping: bool = False
    load: int = 0

    def __post_init__(self) -> None:
        """Read the settings that each request needs."""
        settings = self.context.settings
        self._model = settings.model
        self._adapters = settings.adapters
        self._transfer_keys = settings.kv_transfer.keys
        self._own_aliases = settings.aliases
        self._metrics = self.context.metrics
        self._speed = settings.speed
        self._busy_threshold = BusyThresholdApi(self.thresholds, settings.model)
        # A key that selects a tier authenticates as well; a router without API keys accepts all clients.
        keys = settings.api_keys | settings.tier_keys.keys
        self._keys = KeyCheck(keys) if settings.api_keys else None
        self._admin = AdminCheck(settings.admin_keys, is_local=settings.is_local)
        origins = settings.config.cors_allowed_origins
        self._cors = Cors(origins) if origins else None
        self._session_header = (settings.config.session_header or "").lower().encode()
        self._version = orjson.dumps({"version": version("penstock")})
        self._model_card = {
            "id": settings.model,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "penstock",
            "max_model_len": None if settings.graph is None else settings.graph.model.context_tokens,
        }

    def wants_body(self, request: Request) -> bool:
        """Return whether a request's body must be read; False if its method, path and headers suffice to reject or answer it."""
        try:
            if request.path in PATHS:
                self._check(request)
            elif request.path == "/busy_threshold":
                self._admin.check(request.headers)
            else:
                return False
        except RequestRefused:
            return False
        return True

    def handle(self, request: Request, responder: Responder) -> Awaitable[None]:
        """Return the awaitable that answers the HTTP request ``request``, writing the response by means of ``responder``."""
        if request.path in PATHS and request.method != "OPTIONS":
            return self._complete(request.path, request, responder)
        return self._answer(request.path, request, responder)

    def _answer_headers(self, request: Request) -> Headers:
        """Return the headers of a response; the first is the request's id."""
        own_id = (REQUEST_ID, request_id(request.headers.get(REQUEST_ID)))
        return (
            (own_id,) if self._cors is None else (own_id, *self._cors.headers(request.path, request.headers))
        )

    # ------------------------------------------------------------------ completions

    async def _complete(self, path: str, request: Request, responder: Responder) -> None:
        arrived_real_s = time.monotonic()
        headers = self._answer_headers(request)
        own_id = headers[0][1].decode()
        bind_task(request_id=own_id)
        call: CompletionCall | None = None
        unpacked_bytes = 0
        self.load += 1
        try:
            if not request.body:
                # A request whose head is rejected has no body: see `wants_body`.
                self._check(request)
            responder.cancel_on_disconnect()
            unpacked_bytes = await self._unpack(request)
            is_small = len(request.body) <= SMALL_BYTES
            parsed = self._parse(path, request) if is_small else await self._parse_apart(path, request)
            if parsed.endpoint is ApiEndpoint.RESPONSES:
                check_follow_up(parsed.body, self.context.admission.core.pool)
            call = self._call(parsed, request, responder, headers, arrived_real_s)
            self.handler.queries_of_death.check(call.request.raw)
            if self.tracing is not None:
                call.trace = RequestTrace(self.tracing, request, call)
            if self.reader is not None and not parsed.endpoint.is_relayed:
                keyed = self.reader.read_at_once(call.request) or await self.reader.read(call.request)
                call.set_keys(keyed)
            await self.handler.serve(call)
        except RequestRefused as refusal:
            self._metrics.errors[refusal.code] += 1
            _refuse(path, refusal, responder, headers)
        except (asyncio.CancelledError, ClientDisconnected):
            if call is not None and not call.is_delivered:
                call.error = "client_left" if responder.disconnected else "shutdown"
            raise
        except Exception:
            if call is not None:
                call.error = "internal_error"
            raise
        finally:
            self.load -= 1
            self.intake.release(unpacked_bytes)
            self._record(PATHS[path], own_id, call, responder, arrived_real_s)

    def _check(self, request: Request) -> None:
        """Check the head of a request to an API path.

        Raises:
            RequestRefused: the method, key or content encoding is not accepted.
        """
        _require(request, "POST")
        self._check_key(request)
        encoding = request.headers.get(_ENCODING, _IDENTITY).lower()
        if encoding != _IDENTITY and encoding not in GZIP:
            shown = encoding.decode("latin-1")[:100]
            raise RequestRefused(
                415,
                f"content-encoding: {shown}: send the body compressed by gzip, or uncompressed",
                code="unsupported_media_type",
                headers=((b"accept-encoding", b"gzip"),),
            )

    async def _unpack(self, request: Request) -> int:
        """Decompress a body, within the limits of an uncompressed body; return the number of bytes to release from `intake` later.

        Raises:
            RequestRefused: 400, the body is not gzip; 413 or 503, the body, or all bodies together, are too large. At most
                256 KiB beyond the limit are decompressed.
        """
        if not request.body or request.headers.get(_ENCODING, _IDENTITY).lower() not in GZIP:
            return 0
        pieces: list[bytes] = []
        held_bytes = 0
        try:
            for piece in gunzip(request.body):
                pieces.append(piece)
                held_bytes += len(piece)
                self.intake.hold(len(piece))
                self._check_unpacked(held_bytes)
                await asyncio.sleep(0)
        except BaseException as problem:
            self.intake.release(held_bytes)
            if isinstance(problem, MalformedBodyError):
                raise RequestRefused(
                    400, f"content-encoding: {problem}", code="invalid_encoding"
                ) from problem
            raise
        request.body = b"".join(pieces)
        return held_bytes

    def _check_unpacked(self, size_bytes: int) -> None:
        """Check the size of a body after decompression.

        Raises:
            RequestRefused: the body, or all bodies together, are too large.
        """
        refusal = self.intake.body_refusal(size_bytes)
        if refusal is not None:
            shown = replace(refusal, message=f"after decompression: {refusal.message}")
            raise RequestRefused(
                shown.status, shown.message, code=shown.code, headers=shown.headers, body=shown.body
            )

    def _check_key(self, request: Request) -> None:
        if self._keys is not None:
            self._keys.check(credentials(request.headers))

    def _call(
        self,
        parsed: CompletionRequest,
        request: Request,
        responder: Responder,
        headers: Headers,
        arrived_real_s: float,
    ) -> CompletionCall:
        identity = None
        if self.tiers is not None:
            identity = self.tiers.identify(request.headers, parsed.body.get("model"))
            parsed = self.tiers.for_worker(parsed, identity.tier)
        session = request.headers.get(self._session_header, b"") if self._session_header else b""
        return CompletionCall(
            parsed,
            responder,
            arrived_real_s,
            parsed.prompt_ids or self.context.prompt_costs.estimate(parsed.prompt_bytes, parsed.parts),
            headers,
            self._upstream_headers(request, headers[0]),
            session[:SESSION_BYTES].decode("latin-1"),
            identity,
        )

    def _parse(self, path: str, request: Request) -> CompletionRequest:
        content_type = request.headers.get(b"content-type")
        return parse_completion(
            path,
            content_type,
            request.body,
            model=self._model,
            aliases=self._aliases,
            adapters=self._adapters,
            transfer_keys=self._transfer_keys,
        )

    async def _parse_apart(self, path: str, request: Request) -> CompletionRequest:
        """Parse a large body in steps and in a thread, so that the streams of other requests are not delayed."""
        for _ in check_size(request.body):
            await asyncio.sleep(0)
        return await asyncio.to_thread(self._parse, path, request)

    @property
    def _aliases(self) -> Collection[str]:
        """Further names of the model: its own aliases, and the names that select a tier."""
        if self.tiers is None:
            return self._own_aliases
        return (
            (*self._own_aliases, *self.tiers.config.models) if self._own_aliases else self.tiers.config.models
        )

    def _upstream_headers(self, request: Request, own_id: tuple[bytes, bytes]) -> Headers:
        headers = (_JSON_TYPE, own_id, *trace_context(request.headers))
        key = credentials(request.headers)
        if key is None or self._keys is not None:
            return headers
        # Without API keys the router passes the client's key on, because the workers may require one.
        is_own = self.tiers is not None and self.tiers.keys.of(key) is not None
        return headers if is_own else (*headers, (b"authorization", key))

    def _record(
        self,
        endpoint: ApiEndpoint,
        own_id: str,
        call: CompletionCall | None,
        responder: Responder,
        arrived_real_s: float,
    ) -> None:
        metrics = self._metrics
        has_left = responder.disconnected and not (call is not None and call.is_delivered)
        answered = call.failed_status if call is not None and call.failed_status else responder.status
        status = _CLIENT_LEFT if has_left else answered or 500
        e2e_s = (time.monotonic() - arrived_real_s) * self._speed
        metrics.requests[endpoint, status] += 1
        if call is not None:
            self._count(endpoint, call, status, e2e_s)
            if call.trace is not None:
                call.trace.finish(call, status, e2e_s, metrics)
            if call.error is not None and _failed_at_worker(call, status):
                log.warning(
                    "request failed",
                    error=call.error,
                    status=status,
                    prefill_worker=call.prefill_worker,
                    worker=call.worker,
                    retries=call.tries.retries,
                )
        if self.access_log is not None or _DEBUG_LOGGER.isEnabledFor(logging.DEBUG):
            line = _access_line(endpoint, own_id, status, e2e_s, call)
            log.debug("request answered", **line)
            if self.access_log is not None:
                self.access_log.write(line)

    def _count(self, endpoint: ApiEndpoint, call: CompletionCall, status: int, e2e_s: float) -> None:
        metrics = self._metrics
        if self.tiers is not None:
            self.tiers.ended(call, status, e2e_s)
        metrics.generation_tokens += call.output_tokens
        if status == 200 and endpoint.runs_model:
            metrics.prompt_tokens += call.prompt_tokens
            metrics.cached_tokens += call.cached_tokens or 0
            if call.error is None:
                metrics.e2e.observe(e2e_s)
                metrics.completed += 1
                metrics.completed_tokens += call.output_tokens
        if call.error is not None:
            metrics.errors[call.error] += 1
        if not endpoint.runs_model or status == 200:
            return
        if call.error == QUEUE_TIMEOUT:
            metrics.queue_timeouts += 1
        elif call.error in REJECTIONS:
            metrics.refused += 1
            metrics.rejections[endpoint, call.error] += 1
        elif status in _OVERLOADED and not (call.worker or call.prefill_worker):
            metrics.refused += 1

    # ------------------------------------------------------------------ the rest

    async def _answer(self, path: str, request: Request, responder: Responder) -> None:
        preflight = (
            None if self._cors is None else self._cors.preflight(request.method, path, request.headers)
        )
        if preflight is not None:
            responder.send(204, b"", headers=preflight)
            return
        if path in PATHS:
            await self._complete(path, request, responder)
            return
        headers, endpoint = self._answer_headers(request), ApiEndpoint.OTHER
        try:
            if path.startswith("/v1/models"):
                endpoint = ApiEndpoint.MODELS
                responder.send(200, self._models(request), headers=headers)
            elif path == "/workers" or path.startswith("/workers/"):
                endpoint = ApiEndpoint.WORKERS
                responder.send(200, self._workers(request), headers=headers)
            elif path.startswith(RESPONSES):
                endpoint = ApiEndpoint.RESPONSES
                self._check_key(request)
                raise not_relayed(path)
            elif path == "/busy_threshold":
                responder.send(200, await self._thresholds(request), headers=headers)
            elif path in _WATCHED or path.startswith("/ui/"):
                if path != _POSTED_TOO or request.method != "POST":
                    _require(request, "GET")
                await self._answer_watcher(path, request, responder)
                return
            else:
                _refuse(path, not_served(path), responder, headers)
        except RequestRefused as refusal:
            _refuse(path, refusal, responder, headers)
        self._metrics.requests[endpoint, responder.status] += 1

    async def _answer_watcher(self, path: str, request: Request, responder: Responder) -> None:
        """Answer requests of probes and scrapers, which are repeated and not counted among the requests."""
        if path == PICKER_PATH:
            if self.group is None:
                raise not_served(path)
            self.group.accept(request, responder)
        elif path == "/metrics":
            accept = b"" if self.tracing is None else request.headers.get(b"accept", b"")
            page, content_type = self.page.render(accept.decode("latin-1"))
            responder.send(200, page, content_type=content_type)
        elif path in {"/health", "/ping"}:
            responder.send(200, b'{"status":"ok"}')
        elif path == "/version":
            responder.send(200, self._version)
        elif path == "/load":
            responder.send(200, orjson.dumps({"server_load": self.load}))
        elif path == "/ready":
            reasons = self._reasons_not_ready()
            status = "not ready" if reasons else "ready"
            responder.send(503 if reasons else 200, orjson.dumps({"status": status, "reasons": reasons}))
        else:
            await self.live_page.answer(request, responder, self._admin)

    def _reasons_not_ready(self) -> list[str]:
        reasons = self.context.admission.problems()
        if self.is_stopping:
            reasons.append("the router is stopping")
        problem = self.context.discovery.problem
        if problem is not None and reasons:
            reasons.append(f"discovery: {problem}")
        return reasons

    def _models(self, request: Request) -> bytes:
        _require(request, "GET")
        self._check_key(request)
        names = [self._model, *self._aliases, *self._adapters]
        if request.path == "/v1/models":
            return orjson.dumps({"object": "list", "data": [self._card(name) for name in names]})
        asked = request.path.removeprefix("/v1/models/")
        if asked not in names:
            raise unknown_model(asked, self._model, self._aliases, self._adapters)
        return orjson.dumps(self._card(asked))

    def _card(self, name: str) -> dict[str, Any]:
        """Return the description of one model name; an adapter's has the model as its parent, as in vLLM."""
        path = self._adapters.get(name)
        of_adapter = {} if path is None else {"root": path, "parent": self._model}
        return {**self._model_card, "id": name, **of_adapter}

    def _workers(self, request: Request) -> bytes:
        parts = request.path.strip("/").split("/")
        if len(parts) == 1:
            _require(request, "GET")
            is_admin = self._admin.allows(request.headers)
            if not (is_admin or is_from_this_machine(request) or self.secret.holds(request.headers)):
                self._check_key(request)
            return self._listed_workers(shows_urls=is_admin)
        if len(parts) != 3 or parts[2] not in {"drain", "undrain"}:
            raise not_served(request.path)
        _require(request, "POST")
        self._admin.check(request.headers)
        name, admission = parts[1], self.context.admission
        try:
            admission.set_drained(name, drained=parts[2] == "drain")
            inflight = admission.core.pool.inflight_requests(name)
        except NotFoundError as exc:
            raise RequestRefused(404, str(exc), code="worker_not_found") from exc
        return orjson.dumps({"name": name, "inflight_requests": inflight})

    def _listed_workers(self, *, shows_urls: bool) -> bytes:
        context, core = self.context, self.context.admission.core
        now_s, queue = context.clock.now_s(), core.entry_queue
        _, slow = self.live_page.speeds(now_s)

        def shown(worker: Worker) -> dict[str, Any]:
            state, reason = worker.state(now_s)
            return {
                "name": worker.name,
                "role": worker.spec.role.value,
                **({"url": worker.spec.url} if shows_urls else {}),
                "state": state.value,
                "inflight_requests": core.pool.inflight_requests(worker.name),
                "inflight_tokens": worker.inflight_tokens,
                "kv_usage_fraction": worker.kv_usage_fraction,
                "reason": reason,
                "slow": slow.get(worker.name),
            }

        return orjson.dumps(
            {
                "workers": [shown(worker) for worker in core.pool],
                "prefill_queue": {
                    "requests": len(queue),
                    "tokens": queue.tokens,
                    "oldest_s": round(queue.oldest_s(now_s), 6),
                },
                "traffic": self.live_page.history.traffic(now_s),
                "kv_transfers": {
                    result.value: context.metrics.kv_transfers[result] for result in TransferResult
                }
                if context.settings.disaggregated
                else None,
                "discovery_problem": context.discovery.problem,
                "lag_p99_s": context.metrics.lag.p99_s(),
                "speed": context.clock.speed,
            }
        )

    async def _thresholds(self, request: Request) -> bytes:
        _require(request, "GET", "POST")
        if request.method == "POST":
            self._admin.check(request.headers)
            shown = self._busy_threshold.change(request.headers.get(b"content-type"), request.body)
            if self.group is not None and not await self.group.confirm_thresholds():
                raise unconfirmed(CONFIRM_REAL_S)
            return shown
        if self._admin.is_keyed:
            self._admin.check(request.headers)
        return self._busy_threshold.listed()


def _refuse(path: str, refusal: RequestRefused, responder: Responder, headers: Headers) -> None:
    if responder.closed:
        return  # an early head was sent: the handler has ended the stream in this error
    body = error_body_for(path, refusal.status, refusal.body)
    responder.send(refusal.status, body, headers=(*headers, *refusal.headers))


def _require(request: Request, *methods: str) -> None:
    if request.method in methods or (request.method == "HEAD" and "GET" in methods):
        return
    allowed = ", ".join([*methods, *(["HEAD"] if "GET" in methods else [])])
    raise RequestRefused(
        405,
        f"method: {request.method} is not allowed here; use {' or '.join(methods)}",
        code="method_not_allowed",
        headers=((b"allow", allowed.encode()),),
    )


def _failed_at_worker(call: CompletionCall, status: int) -> bool:
    """Return whether a dispatched request failed, other than for lack of capacity or by its client's fault."""
    if not (call.worker or call.prefill_worker):
        return False
    return call.error not in {AT_CAPACITY, QUEUE_TIMEOUT, SATURATED, "shutdown", *REJECTIONS} and (
        status >= 500 or status == 200
    )


def _access_line(
    endpoint: ApiEndpoint, own_id: str, status: int, e2e_s: float, call: CompletionCall | None
) -> dict[str, Any]:
    line = {"request_id": own_id, "endpoint": endpoint.value, "status": status, "e2e_s": round(e2e_s, 6)}
    return line if call is None else {**line, **call.shown()}
