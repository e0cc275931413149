"""A request that the router refuses by itself; everything before the dispatch raises it, ``app`` answers it."""

from __future__ import annotations

from penstock.core.http.messages import Headers


class RequestRefused(Exception):  # noqa: N818 - a refusal is an answer, not a fault of the router
    """The request cannot be served as it is.

    Attributes:
        status: HTTP status, 4xx.
        message: Key, value, bound and remedy.
        code: Machine-readable word; also the reason in ``penstock_router_errors_total``.
        headers: Of the answer, besides those that every answer has.
    """

    def __init__(self, status: int, message: str, *, code: str, headers: Headers = ()) -> None:
        self.status = status
        self.message = message
        self.code = code
        self.headers = headers
        super().__init__(message)
