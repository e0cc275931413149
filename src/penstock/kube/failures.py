"""Converts exceptions of the official client and the libraries below it into Penstock's errors; the only module that does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Final

import aiohttp
import orjson
from aiohttp.http_exceptions import HttpProcessingError
from kubernetes.aio.client import ApiException
from kubernetes.aio.config import ConfigException
from kubernetes.aio.utils.retry import retry_after_seconds

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

FOREIGN: Final = (ApiException, ConfigException, aiohttp.ClientError, HttpProcessingError, OSError)
"""All exceptions that a call of the API server can raise; TLS errors and timeouts are OSErrors."""

NOT_SENT: Final = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, aiohttp.ClientHttpProxyError)
"""Exceptions after which the server has certainly not received the request, so any request can be repeated."""

_TEXT_LIMIT: Final = 400
"""Maximum number of characters that are quoted from a body that is not a Status. Chosen: enough for a proxy's
message."""

_ERRORS: Final[Mapping[int, type[ClusterError]]] = MappingProxyType(
    {
        401: ForbiddenError,
        403: ForbiddenError,
        404: NotFoundError,
        408: UnavailableError,
        409: ConflictError,
        410: ExpiredError,
        429: UnavailableError,
    }
)
"""Error class by HTTP status. Any other 4xx is an InvalidObjectError, and from 500 on it is an UnavailableError."""


_REMEDIES: Final[Mapping[int | None, str]] = MappingProxyType(
    {
        401: "; the API server refuses the token or certificate, which was read again: log in, or restore the pod's token"
    }
)
"""Remedy by HTTP status, for answers whose message has none."""


@contextmanager
def penstock_errors(about: str) -> Iterator[None]:
    """Context manager that converts foreign exceptions raised inside.

    Args:
        about: Attempted action, for messages, such as ``GET /api/v1/pods``.
    """
    try:
        yield
    except FOREIGN as exc:
        raise cluster_error(exc, about) from exc


def cluster_error(exc: BaseException, about: str) -> ClusterError | ConfigError:
    """Return Penstock's error for ``exc``, one of `FOREIGN`; ``about`` is the attempted action, for the message."""
    if isinstance(exc, ApiException):
        message = f"{about}: {exc.status}: {_message(exc.body or '')}{_expired(exc) or _REMEDIES.get(exc.status, '')}"
        error = _error_class(exc.status or 500)(message)
        if isinstance(error, UnavailableError):
            error.retry_after_s = retry_after_seconds(exc)
        return error
    if isinstance(exc, (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError)):
        return ConfigError(f"{about}: {exc}: not an address; correct the cluster's server in the kubeconfig")
    if isinstance(exc, aiohttp.TooManyRedirects):
        return ClusterError(f"{about}: {type(exc).__name__}: {exc}")
    text = str(exc) or type(exc).__name__
    return UnavailableError(f"{about}: the API server does not answer: {text}{_expired(exc)}")


def _expired(exc: BaseException) -> str:
    """Return the notes that `Transport` added about expired credentials, with a remedy; empty if there are none."""
    notes = getattr(exc, "__notes__", ())
    return f"; {', '.join(notes)}: renew it, or log in again" if notes else ""


def event_error(status: Mapping[str, Any], about: str) -> ClusterError:
    """Return the error for ``status``, the object of a watch's ERROR event; without a code it counts as a server failure."""
    code = status.get("code")
    code = code if isinstance(code, int) else 500
    return _error_class(code)(f"{about}: {code}: {status.get('message') or 'no message'}")


def _error_class(status: int) -> type[ClusterError]:
    return _ERRORS.get(status, UnavailableError if status >= 500 else InvalidObjectError)


def _message(body: str) -> str:
    """Return the message of a Status; if the body is not a Status, the start of the body."""
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        answer = None
    message = answer.get("message") if isinstance(answer, dict) else None
    return str(message or body[:_TEXT_LIMIT].strip() or "no message")
