"""Why a request fails, and what the client is told; one mapping for every error that can happen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

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
from penstock.core.http.problem import error_body
from penstock.router.admission import AllBusy, QueueFull, QueueTimeout, RetryLater, Shed
from penstock.router.core.retries import FailedTry, RetryScope
from penstock.router.core.worker import Worker

QUEUE_TIMEOUT: Final = "queue_timeout"
"""Reason of a request that waited for a worker as long as it may."""

SHED: Final = "shed"
"""Reason of a request that was refused so that higher tiers keep their SLO."""

ALL_WORKERS_BUSY: Final = "all_workers_busy"
"""Reason of a request that was rejected because no worker takes new ones."""

REJECTIONS: Final = frozenset({ALL_WORKERS_BUSY})
"""Reasons of requests that the router turns away to protect the others; each is counted by model and endpoint."""

AT_CAPACITY: Final = "worker_at_capacity"
"""Reason of a try that a worker refused for want of room."""

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
        message: What to tell.
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
    """Return the failure of a stage whose worker gave no whole answer, or one that is no completion.

    A ``total`` time-out is the request's own deadline: there is no time left for another try.
    """
    scope = RetryScope.ELSEWHERE if isinstance(error, WrongAnswer) else RetryScope.ANYWHERE
    is_timeout = False
    if isinstance(error, UpstreamTimeout):
        is_timeout = error.phase != "connect"
        scope = RetryScope.NOWHERE if error.phase == "total" else scope
    return StageFailed(FailedTry(reason_of(error), scope, (worker,), is_timeout), error=error)


def error_response_of(error: PenstockError | StageFailed) -> ErrorResponse:
    """Return what the client is told."""
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
    """Return a message without the worker's address, which is nobody's business outside."""
    if isinstance(error, UpstreamConnectError):
        return "no connection to the worker; retry later"
    if isinstance(error, UpstreamTimeout):
        return f"the worker did not answer in time ({error.phase})"
    if isinstance(error, WrongAnswer):
        return "the worker's answer is not one of this model; GET /workers names it"
    return "the worker broke off before its answer was complete"
