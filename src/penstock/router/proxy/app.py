"""The router's HTTP surface: the OpenAI API, health, metrics and the workers' drain.

Every request comes through `RouterApp.handle`, which the HTTP server calls in a task of its own; that is
the only task a request has.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Collection
from typing import Any

import orjson

from penstock.core.errors import ClientDisconnected, NotFoundError
from penstock.core.http.messages import REQUEST_ID, Headers, error_body, request_id
from penstock.core.http.server import Request, Responder
from penstock.core.logs import bind_task, get_logger
from penstock.core.tracing import Tracing
from penstock.router.access_log import AccessLog
from penstock.router.metrics import RouterMetrics
from penstock.router.metrics_page import MetricsPage
from penstock.router.picker.group import RouterGroup
from penstock.router.picker.links import PATH as PICKER_PATH
from penstock.router.picker.messages import SESSION_BYTES
from penstock.router.proxy.admin import Admin
from penstock.router.proxy.auth import AdminCheck, Cors, GraphSecret, KeyCheck, is_of_this_machine
from penstock.router.proxy.call import CompletionCall, begin_trace
from penstock.router.proxy.completion import (
    PATHS,
    SMALL_BYTES,
    ApiEndpoint,
    CompletionRequest,
    RequestRefused,
    check_size,
    parse_completion,
)
from penstock.router.proxy.failures import AT_CAPACITY, QUEUE_TIMEOUT, REJECTIONS
from penstock.router.proxy.handler import CompletionHandler
from penstock.router.proxy.prefix import PromptReader, TokenEstimator
from penstock.router.proxy.tiers import LiveTiers
from penstock.router.settings import RouterSettings
from penstock.router.thresholds import BusyThresholdApi, GraphThresholds, ThresholdError
from penstock.router.ui.live_page import LivePage

log = get_logger(__name__)
_DEBUG_LOGGER = logging.getLogger(__name__)
"""Asked before a line is built: per-request detail costs nothing when it is not read."""

_CLIENT_LEFT = 499
"""nginx's code for it; the client sees none."""
_OVERLOADED = (429, 503)
"""Answers to those for whom there is no room."""
_PASSED_ON = (b"traceparent", b"tracestate")
_WATCHED = frozenset({"/metrics", "/health", "/ready", "/ui"})
_JSON_TYPE = (b"content-type", b"application/json")
_REFUSAL_KINDS = {401: "authentication_error", 403: "permission_error"}
"""OpenAI's types of error, by status."""


class RouterApp:
    """Answers requests."""

    def __init__(
        self,
        settings: RouterSettings,
        handler: CompletionHandler,
        admin: Admin,
        page: MetricsPage,
        *,
        metrics: RouterMetrics,
        estimator: TokenEstimator,
        thresholds: GraphThresholds,
        secret: GraphSecret,
        group: RouterGroup | None,
        reader: PromptReader | None,
        access_log: AccessLog | None,
        tiers: LiveTiers | None,
        live_page: LivePage,
        tracing: Tracing | None,
    ) -> None:
        """Tie the parts; None stands for parts that the graph does not have."""
        self._model = settings.model
        self._handler = handler
        self._admin = admin
        self._page = page
        self._metrics = metrics
        self._estimator = estimator
        self._busy_threshold = BusyThresholdApi(
            thresholds, model=settings.model, batch_tokens=settings.batch_tokens
        )
        self._secret = secret
        self._group = group
        self._reader = reader
        self._access_log = access_log
        self._tiers = tiers
        self._live_page = live_page
        self._tracing = tracing
        # A key that carries a tier authenticates, too; a router without keys stays open.
        self._keys = KeyCheck(settings.api_keys and settings.api_keys | settings.tier_keys.keys)
        self._admin_check = AdminCheck(settings.admin_keys, is_local=settings.is_local)
        self._cors = Cors(settings.config.cors_allowed_origins)
        self._speed = settings.speed
        self._session_header = (settings.config.session_header or "").lower().encode()
        self._model_card = {
            "id": settings.model,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "penstock",
            "max_model_len": settings.context_tokens,
        }

    def wants_body(self, request: Request) -> bool:
        """Return whether a request's body is worth reading: not where its head alone is refused or answered."""
        try:
            if request.path in PATHS:
                self._check(request)
            elif request.path == "/busy_threshold":
                self._admin_check.check(request.headers)
            else:
                return False
        except RequestRefused:
            return False
        return True

    def handle(self, request: Request, responder: Responder) -> Awaitable[None]:
        """Return what answers one request."""
        if request.path in PATHS and request.method != "OPTIONS":
            return self._complete(request.path, request, responder)
        return self._answer(request.path, request, responder)

    async def _answer(self, path: str, request: Request, responder: Responder) -> None:
        preflight = self._cors.preflight(request.method, path, request.headers)
        if preflight is not None:
            responder.send(204, b"", headers=preflight)
            return
        if path in PATHS:
            await self._complete(path, request, responder)
            return
        own_id = request_id(request.headers.get(REQUEST_ID))
        headers = ((REQUEST_ID, own_id), *self._cors.headers(path, request.headers))
        endpoint = ApiEndpoint.OTHER
        try:
            if path.startswith("/v1/models"):
                endpoint = ApiEndpoint.MODELS
                self._require(request, "GET")
                self._keys.check(request.headers.get(b"authorization"))
                responder.send(200, self._models(path), headers=headers)
            elif path == PICKER_PATH and self._group is not None:
                self._require(request, "GET")
                self._group.accept(request, responder)
                return
            elif path in _WATCHED or path.startswith("/ui/"):
                self._require(request, "GET")
                await self._answer_watcher(path, request, responder)
                return
            elif path == "/workers" or path.startswith("/workers/"):
                endpoint = ApiEndpoint.WORKERS
                self._answer_workers(path, request, responder, headers)
            elif path == "/busy_threshold":
                self._answer_busy_threshold(request, responder, headers)
            else:
                raise RequestRefused(404, f"path: {path[:200]} is not served here", code="not_found")  # noqa: TRY301 - answered below like all refusals
        except RequestRefused as refusal:
            self._refuse(refusal, responder, headers)
        self._metrics.requests[endpoint, responder.status] += 1

    # ------------------------------------------------------------------ completions

    async def _complete(self, path: str, request: Request, responder: Responder) -> None:
        arrived_real_s = time.monotonic()
        own_id = request_id(request.headers.get(REQUEST_ID))
        bind_task(request_id=own_id.decode())
        headers = ((REQUEST_ID, own_id), *self._cors.headers(path, request.headers))
        call: CompletionCall | None = None
        try:
            if not request.body:
                # Of a request that is refused, no body was read: see `wants_body`.
                self._check(request)
            responder.cancel_on_disconnect()
            is_small = len(request.body) <= SMALL_BYTES
            parsed = self._parse(path, request) if is_small else await self._parse_apart(path, request)
            call = self._call(parsed, request, responder, headers, arrived_real_s)
            if self._tracing is not None:
                call.trace = begin_trace(self._tracing, request, call)
            if self._reader is not None:
                keyed = self._reader.read_at_once(call.request) or await self._reader.read(call.request)
                call.take_keys(keyed)
            await self._handler.serve(call)
        except RequestRefused as refusal:
            self._metrics.errors[refusal.code] += 1
            self._refuse(refusal, responder, headers)
        except (asyncio.CancelledError, ClientDisconnected):
            if call is not None and not call.is_delivered:
                call.error = "client_left" if responder.disconnected else "shutdown"
            raise
        except Exception:
            if call is not None:
                call.error = "internal_error"
            raise
        finally:
            self._record(PATHS[path], own_id, call, responder, arrived_real_s)

    def _check(self, request: Request) -> None:
        """Refuse what no router of the graph would answer."""
        self._require(request, "POST")
        self._keys.check(request.headers.get(b"authorization"))
        if request.headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise RequestRefused(
                415, "content-encoding: send the body as it is", code="unsupported_media_type"
            )

    def _call(
        self,
        parsed: CompletionRequest,
        request: Request,
        responder: Responder,
        headers: Headers,
        arrived_real_s: float,
    ) -> CompletionCall:
        """Return the record of a request; its prompt is not read yet. The first of ``headers`` is its id."""
        identity = None
        if self._tiers is not None:
            identity = self._tiers.admission.identify(request.headers, parsed.body.get("model"))
            parsed = self._tiers.admission.for_worker(parsed, identity.tier)
        return CompletionCall(
            parsed,
            responder,
            arrived_real_s=arrived_real_s,
            prompt_tokens=parsed.prompt_ids or self._estimator.estimate(parsed.prompt_bytes),
            headers=tuple(headers),
            upstream_headers=self._upstream_headers(request, headers[0][1]),
            session=self._session(request),
            identity=identity,
        )

    def _parse(self, path: str, request: Request) -> CompletionRequest:
        content_type = request.headers.get(b"content-type")
        return parse_completion(path, content_type, request.body, model=self._model, aliases=self._aliases)

    async def _parse_apart(self, path: str, request: Request) -> CompletionRequest:
        """Read a large body, in steps and in a thread, so that others' streams go on."""
        for _ in check_size(request.body):
            await asyncio.sleep(0)
        return await asyncio.to_thread(self._parse, path, request)

    @property
    def _aliases(self) -> Collection[str]:
        """Further names of the model, each of a tier."""
        return () if self._tiers is None else self._tiers.admission.config.models

    def _session(self, request: Request) -> str:
        if not self._session_header:
            return ""
        return request.headers.get(self._session_header, b"")[:SESSION_BYTES].decode("latin-1")

    def _upstream_headers(self, request: Request, own_id: bytes) -> tuple[tuple[bytes, bytes], ...]:
        headers: tuple[tuple[bytes, bytes], ...] = (_JSON_TYPE, (REQUEST_ID, own_id))
        sent = request.headers
        for name in _PASSED_ON:
            if name in sent:
                headers += ((name, sent[name]),)
        key = sent.get(b"authorization")
        if key is None or not self._keys.is_open:
            return headers
        # Without keys of its own the router is transparent: the workers may ask for one.
        is_own = self._tiers is not None and self._tiers.admission.keys.of(key) is not None
        return headers if is_own else (*headers, (b"authorization", key))

    def _record(
        self,
        endpoint: ApiEndpoint,
        own_id: bytes,
        call: CompletionCall | None,
        responder: Responder,
        arrived_real_s: float,
    ) -> None:
        metrics = self._metrics
        has_left = responder.disconnected and not (call is not None and call.is_delivered)
        status = _CLIENT_LEFT if has_left else responder.status or 500
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
        if self._access_log is not None or _DEBUG_LOGGER.isEnabledFor(logging.DEBUG):
            line = _access_line(endpoint, own_id, status, e2e_s, call)
            log.debug("request answered", **line)
            if self._access_log is not None:
                self._access_log.write(line)

    def _count(self, endpoint: ApiEndpoint, call: CompletionCall, status: int, e2e_s: float) -> None:
        metrics = self._metrics
        if self._tiers is not None:
            self._tiers.ended(call, status, e2e_s)
        metrics.generation_tokens += call.output_tokens
        if status == 200:
            metrics.prompt_tokens += call.prompt_tokens
            metrics.cached_tokens += call.cached_tokens or 0
            if call.error is None:
                metrics.e2e.observe(e2e_s)
                metrics.completed += 1
                metrics.completed_tokens += call.output_tokens
                return
        if call.error is not None:
            metrics.errors[call.error] += 1
        if call.error == QUEUE_TIMEOUT:
            metrics.queue_timeouts += 1
        elif call.error in REJECTIONS:
            metrics.refused += 1
            metrics.rejections[endpoint, call.error] += 1
        elif status in _OVERLOADED and not (call.worker or call.prefill_worker):
            metrics.refused += 1

    # ------------------------------------------------------------------ the rest

    def _models(self, path: str) -> bytes:
        names = [self._model, *self._aliases]
        if path == "/v1/models":
            cards = [{**self._model_card, "id": name} for name in names]
            return orjson.dumps({"object": "list", "data": cards})
        asked = path.removeprefix("/v1/models/")
        if asked not in names:
            raise RequestRefused(
                404, f"model: {asked[:200]!r} does not exist; this router serves {self._model!r}",
                code="model_not_found",
            )  # fmt: skip
        return orjson.dumps({**self._model_card, "id": asked})

    async def _answer_watcher(self, path: str, request: Request, responder: Responder) -> None:
        """Answer those who ask again and again; they are not counted among the requests."""
        if path == "/metrics":
            accept = b"" if self._tracing is None else request.headers.get(b"accept", b"")
            page, content_type = self._page.render(accept.decode("latin-1"))
            responder.send(200, page, content_type=content_type)
        elif path == "/health":
            responder.send(*self._admin.health())
        elif path == "/ready":
            responder.send(*self._admin.ready())
        else:
            await self._live_page.answer(request, responder, self._admin_check)

    def _answer_workers(self, path: str, request: Request, responder: Responder, headers: Headers) -> None:
        parts = path.strip("/").split("/")
        if len(parts) == 1:
            self._require(request, "GET")
            is_admin = self._admin_check.allows(request.headers)
            if not (is_admin or is_of_this_machine(request) or self._secret.holds(request.headers)):
                self._keys.check(request.headers.get(b"authorization"))
            body = self._admin.workers(shows_urls=is_admin)
            responder.send(200, body, headers=headers)
            return
        if len(parts) != 3 or parts[2] not in {"drain", "undrain"}:
            raise RequestRefused(404, f"path: {path[:200]} is not served here", code="not_found")
        self._require(request, "POST")
        self._admin_check.check(request.headers)
        try:
            body = self._admin.drain(parts[1], drained=parts[2] == "drain")
        except NotFoundError as exc:
            raise RequestRefused(404, str(exc), code="worker_not_found") from exc
        responder.send(200, body, headers=headers)

    def _answer_busy_threshold(self, request: Request, responder: Responder, headers: Headers) -> None:
        self._require(request, "GET", "POST")
        if request.method != "POST":
            self._admin_check.check_reading(request.headers)
            responder.send(200, self._busy_threshold.listed(), headers=headers)
            return
        self._admin_check.check(request.headers)
        try:
            body = self._busy_threshold.change(request.headers.get(b"content-type"), request.body)
        except ThresholdError as exc:
            responder.send(exc.status, exc.body(), headers=headers)
            return
        responder.send(200, body, headers=headers)

    def _require(self, request: Request, *methods: str) -> None:
        if request.method in methods or (request.method == "HEAD" and "GET" in methods):
            return
        allowed = ", ".join([*methods, *(["HEAD"] if "GET" in methods else [])])
        raise RequestRefused(
            405,
            f"method: {request.method} is not allowed here; use {' or '.join(methods)}",
            code="method_not_allowed",
            headers=((b"allow", allowed.encode()),),
        )

    def _refuse(self, refusal: RequestRefused, responder: Responder, headers: Headers) -> None:
        kind = _REFUSAL_KINDS.get(refusal.status, "invalid_request_error")
        body = error_body(refusal.message, kind=kind, code=refusal.code)
        responder.send(refusal.status, body, headers=(*headers, *refusal.headers))


def _failed_at_worker(call: CompletionCall, status: int) -> bool:
    """Return whether a dispatched request failed, other than for lack of room or by its client's fault."""
    if not (call.worker or call.prefill_worker):
        return False
    return call.error not in {AT_CAPACITY, QUEUE_TIMEOUT, "shutdown", *REJECTIONS} and (
        status >= 500 or status == 200
    )


def _access_line(
    endpoint: ApiEndpoint, own_id: bytes, status: int, e2e_s: float, call: CompletionCall | None
) -> dict[str, Any]:
    line: dict[str, Any] = {
        "request_id": own_id.decode("latin-1"),
        "endpoint": endpoint.value,
        "status": status,
        "e2e_s": round(e2e_s, 6),
    }
    if call is None:
        return line
    return {
        **line,
        **({} if call.identity is None else {"tier": call.tier.value, "tenant": call.identity.tenant}),
        "stream": call.request.stream,
        "prompt_tokens": call.prompt_tokens,
        "cached_tokens": call.cached_tokens,
        "output_tokens": call.output_tokens,
        "queued_s": round(call.queued_s, 6),
        "ttft_s": None if call.ttft_s is None else round(call.ttft_s, 6),
        "prefill_worker": call.prefill_worker,
        "worker": call.worker,
        "retries": call.tries.retries,
        "error": call.error,
    }
