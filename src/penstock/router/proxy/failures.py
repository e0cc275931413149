"""Why a request fails, what a worker answered instead, and what the client gets. Pure.

A worker of the model answers a completion object, or an error object with a status that fits. Everything else (a
page of HTML, a redirect, the 404 of a server that has another model) is not passed on as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, isfinite
from typing import Final

import orjson

from penstock.core.errors import UpstreamConnectError, UpstreamError, UpstreamTimeout, WrongAnswer
from penstock.core.http.anthropic import anthropic_error, error_event, is_anthropic
from penstock.core.http.messages import error_body
from penstock.core.http.sse import encode_event
from penstock.router.admission import AdmissionError
from penstock.router.core.request import BROKEN, CONNECT, QUEUE_TIMEOUT
from penstock.router.core.retries import FailedTry, RefusalReason, RetryScope
from penstock.router.core.worker import Worker
from penstock.router.proxy.routes import PATHS, ApiEndpoint, not_served_by_worker

# Reasons of failed requests.
SHED: Final = "shed"
ALL_WORKERS_BUSY: Final = "all_workers_busy"
REJECTIONS: Final = frozenset({ALL_WORKERS_BUSY})
"""Those that the router turns away to protect the others; each is counted by model and endpoint."""
SATURATED: Final = "router_saturated"
INTERNAL: Final = "internal_error"
AT_CAPACITY: Final = "worker_at_capacity"
"""Reason of a try that a worker refused for lack of room."""

MAX_RETRY_AFTER_S: Final = 60
"""Chosen: the longest pause of the document's own client; a rate measured just before a scale-up says little of later.
A start-up that was timed is given in full."""
_KV_LOST: Final = (b'"KVLoadError"', b'"InternalServerError"', b'"internal_error"')
"""In the 500 of a decode worker, simulated or vLLM, that could not fetch a transfer's KV: the prefill worker is gone,
was out of reach for longer than its lease, or decode cannot reach any. A new prefill may work. The last one is what vLLM
makes of it in a stream of Anthropic's API."""
_AT_CAPACITY_MARKS: Final = (
    b"worker at capacity",
    b"The request queue is full.",
    b"The request is aborted by a higher priority request.",
)
"""In the 503 of a worker whose engine and queue are full. Sources: NVIDIA Dynamo's document "Request Rejection"; SGLang 0.5.23,
``managers/scheduler.py`` (``--max-queued-requests``)."""
_LEAVING: Final = frozenset({502, 503})
"""What a worker that is leaving or restarting answers."""
_UNKNOWN_HERE: Final = frozenset({404, 405})
"""The router has checked path, method and model: a worker that knows them not serves something else."""
_NOT_IMPLEMENTED: Final = 501
"""What vLLM 0.32 answers where its model has no such API."""
_OF_MODEL: Final = "does not exist"
"""In a worker's 404 that is of the model, or of an adapter."""
_CREDENTIALS: Final = frozenset({401, 403})
_PASSED_GATEWAY: Final = frozenset({503, 504})
_MAX_MESSAGE_CHARS: Final = 2000
"""Maximum length of a worker's message. Chosen: vLLM's longest are some hundred."""


@dataclass(frozen=True, slots=True)
class ErrorResponse:
    """An error answer to a client.

    Attributes:
        reason: Bounded word: metric label and the body's ``code``.
        wants_retry: Whether to send Retry-After.
        retry_after: The worker's own value of it.
        retry_after_s: When there is expected to be room, or a worker; simulated seconds; None: unknown.
        is_rate: That follows from a measured drain rate, which is not a good for far ahead.
    """

    status: int
    reason: str
    body: bytes
    wants_retry: bool = False
    retry_after: bytes | None = None
    retry_after_s: float | None = None
    is_rate: bool = False


def no_usable_answer(reason: str) -> ErrorResponse:
    """Return the answer to a request whose last try failed without an answer of a worker's."""
    return ErrorResponse(502, reason, _body(502, "the worker gave no usable answer", reason))


def failed_try(error: UpstreamError, worker: Worker) -> tuple[FailedTry, ErrorResponse]:
    """Return the failure of a try whose worker gave no complete answer, or one that is not a completion; and the client's answer.

    A ``total`` time-out is the request's own deadline: there is no time left for another try. Messages hold no
    worker's address, which must not leave the cluster.
    """
    scope, is_timeout = RetryScope.ANYWHERE, False
    if isinstance(error, UpstreamConnectError):
        status, reason, message = 503, CONNECT, "no connection to the worker; retry later"
    elif isinstance(error, UpstreamTimeout):
        is_timeout = error.phase != "connect"
        scope = RetryScope.NOWHERE if error.phase == "total" else scope
        status, reason = 504, f"upstream_timeout_{error.phase}"
        message = f"the worker did not answer in time ({error.phase})"
    elif isinstance(error, WrongAnswer):
        scope, status, reason = RetryScope.ELSEWHERE, 502, "upstream_wrong_answer"
        message = "the worker's answer is not one of this model; GET /workers names it"
    else:
        status, reason = 502, BROKEN
        message = "the worker broke off before its answer was complete"
    response = ErrorResponse(status, reason, _body(status, message, reason), wants_retry=status == 503)
    return FailedTry(reason, scope, (worker,), is_timeout), response


_REFUSALS: Final[dict[RefusalReason, tuple[int, str]]] = {
    RefusalReason.QUEUE_FULL: (429, "queue_full"),
    RefusalReason.QUEUE_TIMEOUT: (503, QUEUE_TIMEOUT),
    RefusalReason.NO_WORKER: (503, "no_worker"),
    RefusalReason.ALL_BUSY: (503, ALL_WORKERS_BUSY),
    RefusalReason.SHED: (503, SHED),
}


def refusal(error: AdmissionError) -> ErrorResponse:
    """Return the answer to a request that gets no worker; a rejection's body is flat, as Dynamo's document has it."""
    status, reason = _REFUSALS[error.reason]
    body, is_rejection = _body(status, str(error), reason), reason in REJECTIONS
    if is_rejection:
        body = orjson.dumps({"message": str(error), "type": "service_unavailable", "code": status})
    return ErrorResponse(status, reason, body, True, None, error.retry_after_s, is_rejection)


def saturated() -> ErrorResponse:
    """Return the answer of a router that has no connection left for a worker."""
    body = _body(503, "the router has no connection left; retry later", SATURATED)
    return ErrorResponse(503, SATURATED, body, wants_retry=True)


def internal_error() -> ErrorResponse:
    """Return the answer to a request that a fault of the router's own ends."""
    body = _body(500, "internal error of the router; see its log", INTERNAL)
    return ErrorResponse(500, INTERNAL, body)


def retry_after(expected_real_s: float | None, *, floor_s: int, is_rate: bool) -> bytes:
    """Return the header's value: whole real seconds until there is expected to be room.

    Args:
        expected_real_s: Real seconds; None: unknown, the floor is used.
        floor_s: ``router.admission.retryAfterSeconds``; a larger one than the bound of 60 s wins over it.
        is_rate: It follows from a measured drain rate, and is bounded.
    """
    if expected_real_s is None or not isfinite(expected_real_s):
        return str(floor_s).encode()
    ceiling_s = ceil(max(0.0, expected_real_s))
    return str(max(floor_s, min(MAX_RETRY_AFTER_S, ceiling_s) if is_rate else ceiling_s)).encode()


def error_event_of(path: str, response: ErrorResponse) -> bytes:
    """Return the event by which a begun stream of a path ends in an error."""
    if is_anthropic(path):
        return error_event(anthropic_error(response.status, response.body))
    if response.reason in REJECTIONS:
        # Within a stream, clients look for an error under its own key.
        return encode_event(_body(response.status, orjson.loads(response.body)["message"], response.reason))
    return encode_event(response.body)


class ErrorReply(Exception):  # noqa: N818 - what the worker said, not a fault of the router
    """An error as the worker sent it: a status of 400 to 599 and a body, or an event before a stream's first token."""

    def __init__(self, status: int, content: bytes, retry_after: bytes | None = None) -> None:
        self.status = status
        self.content = content
        self.retry_after = retry_after
        super().__init__(f"error reply of status {status}")

    @property
    def is_at_capacity(self) -> bool:
        """Whether a worker says that it has no room for another request; it is neither leaving nor broken."""
        return self.status == 503 and any(mark in self.content for mark in _AT_CAPACITY_MARKS)

    @property
    def is_kv_lost(self) -> bool:
        """Whether a decode worker says that the KV which prefill kept for it did not come."""
        return self.status == 500 and any(mark in self.content for mark in _KV_LOST)

    def shown(self, path: str) -> tuple[ErrorResponse, bool]:
        """Return the error as the client of a path may see it, and whether the worker wrote an error object.

        A worker's message is put into the router's own form, so that clients meet one dialect: vLLM's ``type`` is a
        Python class and its ``code`` the status, where OpenAI's are words. FastAPI's ``detail`` and vLLM's form before
        0.10 are read too; anything else is replaced, and a 5xx without an error object becomes the 502 of a gateway.
        """
        status, reason = self.status, "upstream_5xx" if self.status >= 500 else "upstream_4xx"
        message, code, param = f"the worker answered {status}", None, None
        try:
            answer = orjson.loads(self.content)
        except orjson.JSONDecodeError:
            answer = None
        is_object = isinstance(answer, dict)
        if is_object:
            error = answer.get("error")
            details = error if isinstance(error, dict) else {"message": error}
            candidates = (details.get("message"), answer.get("message"), answer.get("detail"))
            message = next((each for each in candidates if isinstance(each, str)), message)
            code, param = details.get("code"), details.get("param")
        endpoint = PATHS[path]
        # Anthropic's form names no parameter; a response's 404 may be of an earlier one.
        is_of_model = param == "model" or _OF_MODEL in message
        is_lacking = endpoint.is_optional and endpoint is not ApiEndpoint.RESPONSES
        if status in _UNKNOWN_HERE and is_lacking and not is_of_model:
            message, code = not_served_by_worker(path), "not_served"
        body = _body(
            status,
            message[:_MAX_MESSAGE_CHARS],
            code if isinstance(code, str) else reason,
            param=param if isinstance(param, str) else None,
        )
        if not is_object and status >= 500 and status not in _PASSED_GATEWAY:
            status = 502
        return ErrorResponse(status, reason, body, status == 503, self.retry_after), is_object


def retry_scope_of(
    status: int, *, endpoint: ApiEndpoint, is_error_object: bool, sent_credentials: bool
) -> RetryScope:
    """Return where a request may be tried again that was answered by an error.

    Args:
        status: 400 to 599.
        endpoint: What was asked for.
        is_error_object: Whether the body is one that the model's server writes.
        sent_credentials: Whether the client's own credentials went to the worker.
    """
    if status == _NOT_IMPLEMENTED or (endpoint.is_optional and status in _UNKNOWN_HERE):
        return RetryScope.NOWHERE
    if status in _LEAVING:
        return RetryScope.ANYWHERE
    if status >= 500 or status in _UNKNOWN_HERE or not is_error_object:
        return RetryScope.ELSEWHERE
    if status in _CREDENTIALS and not sent_credentials:
        return RetryScope.ELSEWHERE
    return RetryScope.NOWHERE


def _body(status: int, message: str, code: str, *, param: str | None = None) -> bytes:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return error_body(message, kind="rate_limit_error" if status == 429 else kind, code=code, param=param)
