"""Turns what the API server and the libraries below report into Penstock's own errors; the only place that does."""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import aiohttp
import orjson
from aiohttp.http_exceptions import HttpProcessingError

from penstock.core.errors import (
    ClusterError,
    ConfigError,
    ConflictError,
    ExpiredError,
    ForbiddenError,
    InvalidObjectError,
    NotFoundError,
    UnavailableError,
)

FOREIGN: Final = (
    aiohttp.ClientError,
    HttpProcessingError,
    ssl.SSLError,
    OSError,
)
"""All that a call of the API server may raise."""

NOT_SENT: Final = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, aiohttp.ClientHttpProxyError)
"""The server has seen nothing of the request, so any request may be repeated."""

_TEXT_LIMIT: Final = 400
"""Chosen: characters of a body that is not a Status, enough for a proxy's message."""


@contextmanager
def penstock_errors(about: str) -> Iterator[None]:
    """Map foreign exceptions raised inside.

    Args:
        about: What was tried, for the message: ``GET /api/v1/pods``.

    Raises:
        ClusterError: or the subclass that fits.
    """
    try:
        yield
    except FOREIGN as exc:
        raise cluster_error(exc, about) from exc


def cluster_error(exc: BaseException, about: str) -> ClusterError | ConfigError:
    """Return Penstock's error for one foreign exception."""
    if isinstance(exc, (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError)):
        return ConfigError(f"{about}: {exc}: not an address; correct the cluster's server in the kubeconfig")
    if isinstance(exc, aiohttp.TooManyRedirects):
        return ClusterError(f"{about}: {type(exc).__name__}: {exc}")
    text = str(exc) or type(exc).__name__
    return UnavailableError(f"{about}: the API server does not answer: {text}")


def status_error(status: int, body: bytes, headers: Mapping[str, str], about: str) -> ClusterError:
    """Return the error for an answer of status 400 or more; the message is the server's own."""
    message = f"{about}: {_message(status, body)}"
    if status in {401, 403}:
        return ForbiddenError(message)
    if status == 404:
        return NotFoundError(message)
    if status == 409:
        return ConflictError(message)
    if status == 410:
        return ExpiredError(message)
    if status in {408, 429} or status >= 500:
        return UnavailableError(message, retry_after_s=_retry_after_s(headers))
    return InvalidObjectError(message)


def event_error(status: Mapping[str, Any], about: str) -> ClusterError:
    """Return the error that a watch's ERROR event carries."""
    code = status.get("code")
    return status_error(code if isinstance(code, int) else 500, orjson.dumps(status), {}, about)


def _message(status: int, body: bytes) -> str:
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        answer = None
    if isinstance(answer, dict) and isinstance(answer.get("message"), str) and answer["message"]:
        return f"{status}: {answer['message']}"
    return f"{status}: {body[:_TEXT_LIMIT].decode('utf-8', 'replace').strip() or 'no message'}"


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    # The API server sends whole seconds; a proxy's date form is not worth a parser.
    text = headers.get("retry-after", "")
    return float(text) if text.isdigit() else None
