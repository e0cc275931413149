"""Why a request fails, and what the client is told; one mapping for every error that can happen. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from penstock_core.errors import (
    NoEndpointsError,
    PenstockError,
    SaturatedError,
    StreamBroken,
    UpstreamConnectError,
    UpstreamError,
    UpstreamTimeout,
)
from penstock_router.gate import QueueTimeout
from penstock_wire.problem import error_body

RETRIED_STATUSES = frozenset({502, 503})
"""What a worker that is leaving or restarting answers; 500 and 504 may be the request's own doing."""

KV_LOST = (b'"KVLoadError"', b'"InternalServerError"')
"""In the 500 of a decode worker, simulated or vLLM, that could not fetch a hand-over's KV: the prefill worker is
gone, or was out of reach for longer than its lease. Neither the request nor the decode worker is at fault; a new
prefill may work."""


@dataclass(frozen=True, slots=True)
class WorkerAnswer:
    """An answer of a worker that is not a success; passed on as it is."""

    status: int
    content_type: str
    body: bytes
    retry_after: bytes | None = None


class StageFailed(Exception):  # noqa: N818 - carried between stages of one request, never further
    """A stage failed before the client got a byte.

    Attributes:
        reason: Bounded word for metrics.
        worker: Name of the worker.
        may_retry: Whether trying elsewhere makes sense.
        timed_out: A time-out: tried again at most once.
        error: What happened, when no answer came.
        answer: The worker's answer, when one came.
    """

    def __init__(
        self,
        reason: str,
        *,
        worker: str,
        may_retry: bool,
        error: UpstreamError | NoEndpointsError | None = None,
        answer: WorkerAnswer | None = None,
    ) -> None:
        self.reason = reason
        self.worker = worker
        self.may_retry = may_retry
        self.timed_out = isinstance(error, UpstreamTimeout) and error.phase != "connect"
        self.error = error
        self.answer = answer
        super().__init__(reason)


@dataclass(frozen=True, slots=True)
class Problem:
    """An error answer.

    Attributes:
        status: HTTP status.
        reason: Bounded word: metric label and the body's ``code``.
        kind: The body's ``type``.
        message: What to tell.
        retry_after: Whether to send Retry-After.
    """

    status: int
    reason: str
    kind: str
    message: str
    retry_after: bool = False

    def body(self) -> bytes:
        """Return the OpenAI-style body."""
        return error_body(self.message, kind=self.kind, code=self.reason)


def reason_of(error: PenstockError) -> str:
    """Return the bounded word for an upstream error."""
    if isinstance(error, UpstreamConnectError):
        return "upstream_connect"
    if isinstance(error, UpstreamTimeout):
        return f"upstream_timeout_{error.phase}"
    return "upstream_broken"


def failed_stage(error: UpstreamError, worker: str) -> StageFailed:
    """Return the failure of a stage whose worker gave no whole answer.

    A ``total`` time-out is the request's own deadline: there is no time left for another try.
    """
    out_of_time = isinstance(error, UpstreamTimeout) and error.phase == "total"
    return StageFailed(reason_of(error), worker=worker, may_retry=not out_of_time, error=error)


def problem_of(error: PenstockError | StageFailed) -> Problem:
    """Return what the client is told."""
    if isinstance(error, StageFailed):
        if error.error is None:
            return Problem(502, error.reason, "server_error", "the worker gave no usable answer")
        return problem_of(error.error)
    for kind, (status, reason, retry_after) in _PROBLEMS.items():
        if isinstance(error, kind):
            public = _public_message(error) if isinstance(error, UpstreamError) else str(error)
            body_type = "rate_limit_error" if status == 429 else "server_error"
            return Problem(status, reason or reason_of(error), body_type, public, retry_after)
    return Problem(500, "internal_error", "server_error", "internal error; see the router's log")


# By error: status, reason (None: from the error) and whether to send Retry-After; the first match counts.
_PROBLEMS: Final[dict[type[PenstockError], tuple[int, str | None, bool]]] = {
    SaturatedError: (429, "queue_full", True),
    QueueTimeout: (503, "queue_timeout", True),
    NoEndpointsError: (503, "no_worker", True),
    UpstreamConnectError: (503, None, True),
    UpstreamTimeout: (504, None, False),
    StreamBroken: (502, None, False),
}


def _public_message(error: PenstockError) -> str:
    """Return a message without the worker's address, which is nobody's business outside."""
    if isinstance(error, UpstreamConnectError):
        return "no connection to the worker; retry later"
    if isinstance(error, UpstreamTimeout):
        return f"the worker did not answer in time ({error.phase})"
    return "the worker broke off before its answer was complete"
