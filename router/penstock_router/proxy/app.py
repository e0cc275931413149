"""The router's HTTP surface: the OpenAI API, health, metrics and the workers' drain.

Every request comes through `RouterApp.handle`, which the HTTP server calls in a task of its own; that is
the only task a request has.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import orjson

from penstock_core.errors import ClientDisconnected, NotFoundError
from penstock_core.logs import get_logger
from penstock_router.access_log import AccessLog
from penstock_router.metrics import MetricsPage, RouterMetrics
from penstock_router.policy.token_estimate import TokenEstimator
from penstock_router.proxy.admin import Admin
from penstock_router.proxy.auth import KeyCheck
from penstock_router.proxy.call import Call, request_id
from penstock_router.proxy.completion import PATHS, Endpoint, RequestRefused, parse_completion
from penstock_router.proxy.dispatch import Dispatcher
from penstock_wire.messages import Headers
from penstock_wire.problem import error_body
from penstock_wire.server import Request, Responder

log = get_logger(__name__)
_DEBUG_LOGGER = logging.getLogger(__name__)
"""Asked before a line is built: per-request detail costs nothing when nobody reads it."""

_CLIENT_LEFT = 499
"""nginx's code for it; the client sees none."""
_PASSED_ON = (b"traceparent", b"tracestate")
_SESSION_BYTES = 128
"""Of a session's name; what follows is not looked at, so that clients cannot fill the memory."""
_JSON_TYPE = (b"content-type", b"application/json")


class RouterApp:
    """Answers requests."""

    def __init__(
        self,
        *,
        model: str,
        context_tokens: int | None,
        dispatcher: Dispatcher,
        admin: Admin,
        keys: KeyCheck,
        metrics: RouterMetrics,
        page: MetricsPage,
        estimator: TokenEstimator,
        speed: float,
        access_log: AccessLog | None,
        session_header: str | None = None,
    ) -> None:
        self._model = model
        self._dispatcher = dispatcher
        self._admin = admin
        self._keys = keys
        self._metrics = metrics
        self._page = page
        self._estimator = estimator
        self._speed = speed
        self._access_log = access_log
        self._session_header = (session_header or "").lower().encode()
        self._model_card = {
            "id": model,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "penstock",
            "max_model_len": context_tokens,
        }

    async def handle(self, request: Request, responder: Responder) -> None:
        """Answer one request."""
        path = request.path
        if path in PATHS:
            await self._complete(path, request, responder)
            return
        own_id = request_id(request.headers.get(b"x-request-id"))
        headers = ((b"x-request-id", own_id),)
        endpoint = Endpoint.OTHER
        try:
            if path.startswith("/v1/models"):
                endpoint = Endpoint.MODELS
                self._require(request, "GET")
                self._keys.check(request.headers.get(b"authorization"))
                responder.send(200, self._models(path), headers=headers)
            elif path == "/metrics":
                self._require(request, "GET")
                responder.send(200, self._page.render(), content_type=self._page.content_type)
                return
            elif path in {"/health", "/ready"}:
                self._require(request, "GET")
                responder.send(*(self._admin.health() if path == "/health" else self._admin.ready()))
                return
            elif path == "/workers" or path.startswith("/workers/"):
                endpoint = Endpoint.WORKERS
                self._answer_workers(path, request, responder, headers)
            else:
                raise RequestRefused(404, f"path: {path[:200]} is not served here", code="not_found")  # noqa: TRY301 - answered below like all refusals
        except RequestRefused as refusal:
            self._refuse(refusal, responder, headers)
        self._metrics.requests[endpoint.value, responder.status] += 1

    # ------------------------------------------------------------------ completions

    async def _complete(self, path: str, request: Request, responder: Responder) -> None:
        arrived_real_s = time.monotonic()
        own_id = request_id(request.headers.get(b"x-request-id"))
        headers = ((b"x-request-id", own_id),)
        call: Call | None = None
        try:
            self._require(request, "POST")
            self._keys.check(request.headers.get(b"authorization"))
            if request.headers.get(b"content-encoding", b"identity").lower() != b"identity":
                raise RequestRefused(  # noqa: TRY301 - answered below like all refusals
                    415, "content-encoding: send the body as it is", code="unsupported_media_type"
                )
            parsed = parse_completion(
                path, request.headers.get(b"content-type"), request.body, model=self._model
            )
            tokens = parsed.prompt_ids or self._estimator.estimate(parsed.prompt_bytes)
            call = Call(
                parsed,
                responder,
                arrived_real_s=arrived_real_s,
                prompt_tokens=tokens,
                headers=headers,
                upstream_headers=self._upstream_headers(request, own_id),
                session=self._session(request),
            )
            task = asyncio.current_task()
            if task is not None:
                responder.on_disconnect(lambda: _cancel(task))
            await self._dispatcher.serve(call)
        except RequestRefused as refusal:
            self._metrics.errors[refusal.code] += 1
            self._refuse(refusal, responder, headers)
        except (asyncio.CancelledError, ClientDisconnected):
            if call is not None:
                call.error = "client_left" if responder.disconnected else "shutdown"
            raise
        except Exception:
            if call is not None:
                call.error = "internal_error"
            raise
        finally:
            self._record(PATHS[path], own_id, call, responder, arrived_real_s)

    def _session(self, request: Request) -> str:
        if not self._session_header:
            return ""
        return request.headers.get(self._session_header, b"")[:_SESSION_BYTES].decode("latin-1")

    def _upstream_headers(self, request: Request, own_id: bytes) -> tuple[tuple[bytes, bytes], ...]:
        headers = [_JSON_TYPE, (b"x-request-id", own_id)]
        sent = request.headers
        headers += [(name, sent[name]) for name in _PASSED_ON if name in sent]
        if self._keys.is_open and b"authorization" in sent:
            # Without keys of its own the router is transparent: the workers may ask for one.
            headers.append((b"authorization", sent[b"authorization"]))
        return tuple(headers)

    def _record(
        self,
        endpoint: Endpoint,
        own_id: bytes,
        call: Call | None,
        responder: Responder,
        arrived_real_s: float,
    ) -> None:
        metrics = self._metrics
        status = _CLIENT_LEFT if responder.disconnected else responder.status or 500
        e2e_s = (time.monotonic() - arrived_real_s) * self._speed
        metrics.requests[endpoint.value, status] += 1
        if call is not None:
            if call.error is not None:
                metrics.errors[call.error] += 1
            elif status == 200:
                metrics.e2e.observe(e2e_s)
            metrics.generation_tokens += call.output_tokens
            if status == 200:
                metrics.prompt_tokens += call.prompt_tokens
                metrics.cached_tokens += call.cached_tokens or 0
        if self._access_log is not None or _DEBUG_LOGGER.isEnabledFor(logging.DEBUG):
            line = _access_line(endpoint, own_id, status, e2e_s, call)
            log.debug("request answered", **line)
            if self._access_log is not None:
                self._access_log.write(line)

    # ------------------------------------------------------------------ the rest

    def _models(self, path: str) -> bytes:
        if path == "/v1/models":
            return orjson.dumps({"object": "list", "data": [self._model_card]})
        asked = path.removeprefix("/v1/models/")
        if asked != self._model:
            raise RequestRefused(
                404, f"model: {asked[:200]!r} does not exist; this router serves {self._model!r}",
                code="model_not_found",
            )  # fmt: skip
        return orjson.dumps(self._model_card)

    def _answer_workers(self, path: str, request: Request, responder: Responder, headers: Headers) -> None:
        parts = path.strip("/").split("/")
        if len(parts) == 1:
            self._require(request, "GET")
            responder.send(200, self._admin.workers(), headers=headers)
            return
        if len(parts) != 3 or parts[2] not in {"drain", "undrain"}:
            raise RequestRefused(404, f"path: {path[:200]} is not served here", code="not_found")
        self._require(request, "POST")
        self._keys.check(request.headers.get(b"authorization"))
        try:
            body = self._admin.drain(parts[1], drained=parts[2] == "drain")
        except NotFoundError as exc:
            raise RequestRefused(404, str(exc), code="worker_not_found") from exc
        responder.send(200, body, headers=headers)

    def _require(self, request: Request, method: str) -> None:
        if request.method != method and not (method == "GET" and request.method == "HEAD"):
            raise RequestRefused(
                405, f"method: {request.method} is not allowed here; use {method}", code="method_not_allowed"
            )

    def _refuse(self, refusal: RequestRefused, responder: Responder, headers: Headers) -> None:
        kind = "authentication_error" if refusal.status == 401 else "invalid_request_error"
        extra: list[tuple[bytes, bytes]] = list(headers)
        if refusal.status == 401:
            extra.append((b"www-authenticate", b"Bearer"))
        responder.send(
            refusal.status, error_body(refusal.message, kind=kind, code=refusal.code), headers=extra
        )


def _cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()


def _access_line(
    endpoint: Endpoint, own_id: bytes, status: int, e2e_s: float, call: Call | None
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
        "stream": call.request.stream,
        "prompt_tokens": call.prompt_tokens,
        "cached_tokens": call.cached_tokens,
        "output_tokens": call.output_tokens,
        "queued_s": round(call.queued_s, 6),
        "ttft_s": None if call.ttft_s is None else round(call.ttft_s, 6),
        "prefill_worker": call.prefill_worker,
        "worker": call.worker,
        "retries": call.retries,
        "error": call.error,
    }
