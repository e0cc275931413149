"""Why a request fails, what a worker answered instead, and what the client gets. Pure.

A worker of the model answers a completion object, or an error object with a status that fits. Everything else (a
page of HTML, a redirect, the 404 of a server that has another model) is not passed on as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, isfinite
from typing import Any, Final

import orjson

from penstock.core.errors import (
    NoEndpointsError,
    PenstockError,
    SaturatedError,
    StreamBroken,
    UpstreamConnectError,
    UpstreamError,
    UpstreamTimeout,
    WrongAnswer,
)
from penstock.core.http.messages import error_body
from penstock.router.admission import AllBusy, QueueFull, QueueTimeout, RetryLater, Shed
from penstock.router.core.retries import FailedTry, RetryScope
from penstock.router.core.worker import Worker
from penstock.router.proxy.completion import ApiEndpoint

QUEUE_TIMEOUT: Final = "queue_timeout"
"""Reason of a request that waited for a worker until its time limit."""

SHED: Final = "shed"
"""Reason of a request that was refused so that higher tiers keep their SLO."""

ALL_WORKERS_BUSY: Final = "all_workers_busy"
"""Reason of a request that was rejected because no worker takes new ones."""

REJECTIONS: Final = frozenset({ALL_WORKERS_BUSY})
"""Reasons of requests that the router turns away to protect the others; each is counted by model and endpoint."""

AT_CAPACITY: Final = "worker_at_capacity"
"""Reason of a try that a worker refused for lack of room."""

NOT_TAKEN: Final = frozenset({AT_CAPACITY, "upstream_connect"})
"""Reasons of tries that never reached a worker's engine: it holds nothing of the request and gives nothing back."""


@dataclass(frozen=True, slots=True)
class WorkerAnswer:
    """An error answer as it goes to the client; the body is JSON with an ``error`` object."""

    status: int
    body: bytes
    retry_after: bytes | None = None


class StageFailed(Exception):  # noqa: N818 - carried between stages of one request, never further
    """A stage failed before the client got a byte.

    Attributes:
        failure: What failed, and where trying again makes sense.
        error: What happened, when no answer came.
        answer: The worker's answer, when one came.
    """

    def __init__(
        self, failure: FailedTry, *, error: PenstockError | None = None, answer: WorkerAnswer | None = None
    ) -> None:
        self.failure = failure
        self.error = error
        self.answer = answer
        super().__init__(failure.reason)


@dataclass(frozen=True, slots=True)
class ErrorResponse:
    """An error answer.

    Attributes:
        status: HTTP status.
        reason: Bounded word: metric label and the body's ``code``.
        kind: The body's ``type``.
        message: For the client.
        retry_after: Whether to send Retry-After.
        retry_after_s: When there is expected to be room, or a worker; simulated seconds; None: unknown.
        is_rate: That follows from a measured drain rate, which is no good for far ahead.
    """

    status: int
    reason: str
    kind: str
    message: str
    retry_after: bool = False
    retry_after_s: float | None = None
    is_rate: bool = False

    def body(self) -> bytes:
        """Return the OpenAI-style body; a rejection's is flat, as the document of request rejection has it."""
        if self.reason in REJECTIONS:
            return orjson.dumps({"message": self.message, "type": self.kind, "code": self.status})
        return error_body(self.message, kind=self.kind, code=self.reason)


def reason_of(error: PenstockError) -> str:
    """Return the bounded word for an upstream error."""
    if isinstance(error, UpstreamConnectError):
        return "upstream_connect"
    if isinstance(error, UpstreamTimeout):
        return f"upstream_timeout_{error.phase}"
    return "upstream_wrong_answer" if isinstance(error, WrongAnswer) else "upstream_broken"


def failed_stage(error: UpstreamError, worker: Worker) -> StageFailed:
    """Return the failure of a stage whose worker gave no complete answer, or one that is no completion.

    A ``total`` time-out is the request's own deadline: there is no time left for another try.
    """
    scope = RetryScope.ELSEWHERE if isinstance(error, WrongAnswer) else RetryScope.ANYWHERE
    is_timeout = False
    if isinstance(error, UpstreamTimeout):
        is_timeout = error.phase != "connect"
        scope = RetryScope.NOWHERE if error.phase == "total" else scope
    return StageFailed(FailedTry(reason_of(error), scope, (worker,), is_timeout), error=error)


def error_response_of(error: PenstockError | StageFailed) -> ErrorResponse:
    """Return the client's message."""
    if isinstance(error, StageFailed):
        if error.error is None:
            return ErrorResponse(
                502, error.failure.reason, "server_error", "the worker gave no usable answer"
            )
        return error_response_of(error.error)
    if isinstance(error, AllBusy):
        message, wait_s = str(error), error.retry_after_s
        return ErrorResponse(503, ALL_WORKERS_BUSY, "service_unavailable", message, True, wait_s, True)
    if isinstance(error, Shed):
        return ErrorResponse(503, SHED, "server_error", str(error), True, error.retry_after_s, True)
    wait_s = error.retry_after_s if isinstance(error, RetryLater | QueueFull) else None
    for kind, (status, reason, retry_after) in _PROBLEMS.items():
        if isinstance(error, kind):
            public = _public_message(error) if isinstance(error, UpstreamError) else str(error)
            body_type = "rate_limit_error" if status == 429 else "server_error"
            return ErrorResponse(status, reason or reason_of(error), body_type, public, retry_after, wait_s)
    return ErrorResponse(500, "internal_error", "server_error", "internal error; see the router's log")


# By error: status, reason (None: from the error) and whether to send Retry-After; the first match counts.
_PROBLEMS: Final[dict[type[PenstockError], tuple[int, str | None, bool]]] = {
    SaturatedError: (429, "queue_full", True),
    QueueTimeout: (503, QUEUE_TIMEOUT, True),
    NoEndpointsError: (503, "no_worker", True),
    UpstreamConnectError: (503, None, True),
    UpstreamTimeout: (504, None, False),
    StreamBroken: (502, None, False),
    WrongAnswer: (502, None, False),
}


def _public_message(error: PenstockError) -> str:
    """Return a message without the worker's address, which must not leave the cluster."""
    if isinstance(error, UpstreamConnectError):
        return "no connection to the worker; retry later"
    if isinstance(error, UpstreamTimeout):
        return f"the worker did not answer in time ({error.phase})"
    if isinstance(error, WrongAnswer):
        return "the worker's answer is not one of this model; GET /workers names it"
    return "the worker broke off before its answer was complete"


MAX_RETRY_AFTER_S: Final = 60
"""Chosen: the longest pause of the document's own client; a rate measured just before a scale-up says little of later.
A start-up that was timed is given in full."""


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


KV_LOST: Final = (b'"KVLoadError"', b'"InternalServerError"')
"""In the 500 of a decode worker, simulated or vLLM, that could not fetch a transfer's KV: the prefill worker is gone,
was out of reach for longer than its lease, or decode cannot reach any. A new prefill may work."""

AT_CAPACITY_MARK: Final = b"worker at capacity"
"""In the 503 of a worker whose engine and queue are full. Source: NVIDIA Dynamo's document "Request Rejection"."""

_LEAVING: Final = frozenset({502, 503})
"""What a worker that is leaving or restarting answers."""
_UNKNOWN_HERE: Final = frozenset({404, 405})
"""The router has checked path, method and model: a worker that knows them not serves something else."""
_CREDENTIALS: Final = frozenset({401, 403})
_PASSED_GATEWAY: Final = frozenset({503, 504})
_MAX_MESSAGE_CHARS: Final = 2000
"""Of a worker's message. Chosen: vLLM's longest are some hundred."""


class ErrorReply(Exception):  # noqa: N818 - what the worker said, not a fault of the router
    """An error as the worker sent it, by its status or in a stream before the first token.

    Attributes:
        status: 400 to 599; of a stream, what the answer would have had.
        content: Body, or the data of the event.
        retry_after: Header value, or None.
    """

    def __init__(self, status: int, content: bytes, retry_after: bytes | None = None) -> None:
        self.status = status
        self.content = content
        self.retry_after = retry_after
        super().__init__(f"error reply of status {status}")

    @property
    def is_at_capacity(self) -> bool:
        """Whether a worker says that it has no room for another request; it is neither leaving nor broken."""
        return self.status == 503 and AT_CAPACITY_MARK in self.content

    @property
    def is_kv_lost(self) -> bool:
        """Whether a decode worker says that the KV which prefill kept for it did not come."""
        return self.status == 500 and any(mark in self.content for mark in KV_LOST)


def read_completion(content: bytes, content_type: bytes, worker: str) -> dict[str, Any]:
    """Return the completion object of a whole answer, or the Responses API's response object.

    Args:
        content: Body of a 200.
        content_type: Header value, for the message.
        worker: Name, for the message.

    Raises:
        WrongAnswer: it is no JSON object with a list of choices, or of output items.
    """
    try:
        answer = orjson.loads(content)
    except orjson.JSONDecodeError as exc:
        shown = content_type.decode("latin-1") or "no content type"
        raise WrongAnswer(f"{worker} answered 200 with {shown} that is not JSON") from exc
    if not isinstance(answer, dict) or not isinstance(answer.get("choices", answer.get("output")), list):
        raise WrongAnswer(f"{worker} answered 200 with JSON that is no completion")
    return answer


def encoded_again(answer: dict[str, Any]) -> bytes:
    """Return a worker's JSON after a change.

    Raises:
        WrongAnswer: it can be read and not written: it is nested deeper than orjson writes, 254 levels.
    """
    try:
        return orjson.dumps(answer)
    except orjson.JSONEncodeError as exc:
        raise WrongAnswer(f"the answer cannot be written again: {exc}") from exc


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
    if endpoint is ApiEndpoint.RESPONSES and status in _UNKNOWN_HERE:
        return RetryScope.NOWHERE  # a worker of the right model may be too old to have that API
    if status in _LEAVING:
        return RetryScope.ANYWHERE
    if status >= 500 or status in _UNKNOWN_HERE or not is_error_object:
        return RetryScope.ELSEWHERE
    if status in _CREDENTIALS and not sent_credentials:
        return RetryScope.ELSEWHERE
    return RetryScope.NOWHERE


def error_answer(reply: ErrorReply) -> tuple[WorkerAnswer, bool]:
    """Return an error as the client may see it, and whether the worker wrote an error object.

    A worker's message is put into the router's own form, so that clients meet one dialect: vLLM's ``type`` is a Python
    class and its ``code`` the status, where OpenAI's are words. FastAPI's ``detail`` and vLLM's form before 0.10 are
    read too; anything else is replaced, and a 5xx without an error object becomes the 502 of a gateway.
    """
    status, retry_after = reply.status, reply.retry_after
    try:
        answer = orjson.loads(reply.content)
    except orjson.JSONDecodeError:
        answer = None
    if not isinstance(answer, dict):
        shown = 502 if status >= 500 and status not in _PASSED_GATEWAY else status
        return WorkerAnswer(shown, _own_body(status, f"the worker answered {status}"), retry_after), False
    error = answer.get("error")
    details = error if isinstance(error, dict) else {"message": error}
    candidates = (details.get("message"), answer.get("message"), answer.get("detail"))
    message = next((each for each in candidates if isinstance(each, str)), f"the worker answered {status}")
    body = _own_body(
        status, message[:_MAX_MESSAGE_CHARS], code=details.get("code"), param=details.get("param")
    )
    return WorkerAnswer(status, body, retry_after), True


def _own_body(status: int, message: str, *, code: object = None, param: object = None) -> bytes:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return error_body(
        message,
        kind="rate_limit_error" if status == 429 else kind,
        code=code if isinstance(code, str) else "upstream_5xx" if status >= 500 else "upstream_4xx",
        param=param if isinstance(param, str) else None,
    )
