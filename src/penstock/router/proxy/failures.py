"""Classifies failed requests, and builds the error responses for clients. Pure.

A worker of the right model answers with a completion object, or with an error object and a matching status. Every other
response (an HTML page, a redirect, the 404 of a server with another model) is replaced before the client sees it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, isfinite
from typing import Final, NamedTuple

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
"""Reasons for which the router rejects requests to protect others; each rejection is counted by model and endpoint."""
SATURATED: Final = "router_saturated"
INTERNAL: Final = "internal_error"
AT_CAPACITY: Final = "worker_at_capacity"
"""Reason of a try that a worker refused for lack of capacity."""

MAX_RETRY_AFTER_S: Final = 60
"""Maximum of Retry-After if it is derived from a measured drain rate. Chosen: the longest pause of the client in Dynamo's document;
a rate measured just before a scale-up is not a good prediction of later. A measured startup time is not limited."""
_KV_LOST: Final = (b'"KVLoadError"', b'"InternalServerError"', b'"internal_error"')
"""In the 500 response of a decode worker, simulated or vLLM, that could not fetch a transfer's KV: the prefill worker is gone or
was unreachable for longer than its lease, or the decode worker cannot reach any prefill worker. A new prefill may work. The last
mark is vLLM's in a stream of Anthropic's API."""
_AT_CAPACITY_MARKS: Final = (
    b"worker at capacity",
    b"The request queue is full.",
    b"The request is aborted by a higher priority request.",
)
"""In the 503 response of a worker whose engine and queue are full. Sources: NVIDIA Dynamo's document "Request Rejection"; SGLang
0.5.23, ``managers/scheduler.py`` (``--max-queued-requests``)."""
_LEAVING: Final = frozenset({502, 503})
"""Statuses with which a worker answers that is shutting down or restarting."""
_UNKNOWN_HERE: Final = frozenset({404, 405})
"""The router has checked path, method and model: a worker that does not know them serves something else."""
_NOT_IMPLEMENTED: Final = 501
"""Status with which vLLM 0.32 answers if its model does not support the API."""
_OF_MODEL: Final = "does not exist"
"""Text in a worker's 404 that concerns the model or an adapter."""
_CREDENTIALS: Final = frozenset({401, 403})
_PASSED_GATEWAY: Final = frozenset({503, 504})
_MAX_MESSAGE_CHARS: Final = 2000
"""Maximum length of a worker's message in an error response. Chosen: vLLM's longest have a few hundred characters."""


@dataclass(frozen=True, slots=True)
class ErrorResponse:
    """An error response to a client.

    Attributes:
        status: HTTP status.
        reason: Reason from a fixed set of values: the metric label and the body's ``code``.
        body: Body of the response.
        wants_retry: Whether to send Retry-After.
        retry_after: The worker's own Retry-After value; None if it sent none.
        retry_after_s: Time until capacity, or a worker, is expected, in simulated seconds; None if unknown.
        is_rate: Whether `retry_after_s` is derived from the rate at which workers become available, as measured now,
            which does not predict the distant future.
    """

    status: int
    reason: str
    body: bytes
    wants_retry: bool = False
    retry_after: bytes | None = None
    retry_after_s: float | None = None
    is_rate: bool = False


def no_usable_answer(reason: str) -> ErrorResponse:
    """Return the error response to a request whose last try failed, without a response of a worker that could be passed on.

    ``reason`` is the failure reason, from a fixed set of values, which the response contains as its ``code``.
    """
    return ErrorResponse(502, reason, _body(502, "the worker gave no usable answer", reason))


def failed_try(error: UpstreamError, worker: Worker) -> tuple[FailedTry, ErrorResponse]:
    """Return the failure of a request at ``worker`` for the decision about retries, and the error response if it is not retried.

    ``error`` is the reason for which there is no complete response. A timeout of the entire request (``total``) is not
    retried, because no time is left for another try. The message in the error response does not contain the worker's address,
    which must not leave the cluster.
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
    """Return the error response to a request that the router rejects, because it has no worker for it.

    ``error`` contains the reason and the message. The body of a rejection for overload (`REJECTIONS`), which protects
    requests in progress, is a flat object, as Dynamo's documentation describes it.
    """
    status, reason = _REFUSALS[error.reason]
    body, is_rejection = _body(status, str(error), reason), reason in REJECTIONS
    if is_rejection:
        body = orjson.dumps({"message": str(error), "type": "service_unavailable", "code": status})
    return ErrorResponse(status, reason, body, True, None, error.retry_after_s, is_rejection)


def saturated() -> ErrorResponse:
    """Return the error response of a router that has as many connections to workers open as it may have."""
    body = _body(503, "the router has no connection left; retry later", SATURATED)
    return ErrorResponse(503, SATURATED, body, wants_retry=True)


def internal_error() -> ErrorResponse:
    """Return the response to a request that failed because of a fault in the router itself."""
    body = _body(500, "internal error of the router; see its log", INTERNAL)
    return ErrorResponse(500, INTERNAL, body)


def retry_after(expected_real_s: float | None, *, floor_s: int, is_rate: bool) -> bytes:
    """Return the value of Retry-After: real seconds until capacity is expected, rounded up.

    Args:
        expected_real_s: Expected time in real seconds; None if it is unknown, and ``floor_s`` is returned.
        floor_s: Minimum value, ``router.admission.retryAfterSeconds``; it takes precedence over the maximum of 60 s.
        is_rate: Whether the time is derived from the rate at which workers become available, as measured now; it is then
            limited to 60 s (`MAX_RETRY_AFTER_S`).
    """
    if expected_real_s is None or not isfinite(expected_real_s):
        return str(floor_s).encode()
    ceiling_s = ceil(max(0.0, expected_real_s))
    return str(max(floor_s, min(MAX_RETRY_AFTER_S, ceiling_s) if is_rate else ceiling_s)).encode()


def error_event_of(path: str, response: ErrorResponse) -> bytes:
    """Return the server-sent event (as bytes) by which the router tells the client that a stream that has started has failed.

    It contains the body of ``response``, because the status of the HTTP response was sent already. ``path`` is the path of
    the request; it determines the format: that of Anthropic's Messages API or that of OpenAI's APIs.
    """
    if is_anthropic(path):
        return error_event(anthropic_error(response.status, response.body))
    if response.reason in REJECTIONS:
        # In a stream, clients look for the error under the key ``error``.
        return encode_event(_body(response.status, orjson.loads(response.body)["message"], response.reason))
    return encode_event(response.body)


class TryFailure(NamedTuple):
    """Failure of one try of a request.

    Attributes:
        problem: Exception that ended the try.
        response: Error response for the client if no other try follows; None if the failure's reason determines it.
    """

    problem: Exception
    response: ErrorResponse | None = None


class ErrorReply(Exception):  # noqa: N818 - what the worker said, not a fault of the router
    """An error response of a worker: a status of 400 to 599 with its body, or an error event before a stream's first token.

    Attributes:
        status: HTTP status, or the status that the event implies.
        content: Body of the response, or data of the event.
        retry_after: Value of the worker's Retry-After header; None if the response has no such header.
    """

    def __init__(self, status: int, content: bytes, retry_after: bytes | None = None) -> None:
        self.status = status
        self.content = content
        self.retry_after = retry_after
        super().__init__(f"error reply of status {status}")

    @property
    def is_at_capacity(self) -> bool:
        """Whether the worker has refused the request for lack of capacity, and is neither shutting down nor broken."""
        return self.status == 503 and any(mark in self.content for mark in _AT_CAPACITY_MARKS)

    @property
    def is_kv_lost(self) -> bool:
        """Whether a decode worker reports that it did not receive the prompt's KV from the prefill worker."""
        return self.status == 500 and any(mark in self.content for mark in _KV_LOST)

    @property
    def is_of_model(self) -> bool:
        """Whether the worker reports that it does not serve the requested model."""
        return self.status == 404 and _OF_MODEL.encode() in self.content

    def shown(self, path: str) -> tuple[ErrorResponse, bool]:
        """Return the error response for a client of ``path``, and whether the worker's body was an error object.

        A worker's message is converted to the router's own form, so that clients see only one: vLLM's ``type`` is a Python
        class and its ``code`` the status, while OpenAI's are words. FastAPI's ``detail`` and vLLM's form before 0.10 are read
        as well. Any other body is replaced, and a 5xx without an error object becomes 502.
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
        # Anthropic's form names no parameter; the 404 of a response can concern an earlier response.
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
    """Return where a request may be retried after an error response: nowhere, on another worker only, or on any worker.

    Args:
        status: Status of the error response, 400 to 599.
        endpoint: API endpoint of the request.
        is_error_object: Whether the body is an error object, as a model server writes it.
        sent_credentials: Whether the client's own credentials were sent to the worker.
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
