"""What a worker answered: a completion, an error of the request's or of its own, or neither. Pure.

A worker of the model answers a completion object, or an error object with a status that fits. Everything else (a
page of HTML, a redirect, the 404 of a server that has another model) is not passed on as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import orjson

from penstock.core.errors import WrongAnswer
from penstock.core.http.problem import error_body
from penstock.router.core.retries import RetryScope
from penstock.router.proxy.completion import ApiEndpoint
from penstock.router.proxy.failures import WorkerAnswer

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


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """An error as the worker sent it, by its status or in a stream.

    Attributes:
        status: 400 to 599.
        content: Body, or the data of the event.
        retry_after: Header value, or None.
    """

    status: int
    content: bytes
    retry_after: bytes | None = None

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
