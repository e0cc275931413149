"""Penstock's exceptions. Every component raises and catches these instead of the exceptions of libraries."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Error numbers that mean that a disk or quota is full."""

_UNWRITABLE: Final = {
    **dict.fromkeys(FULL, "free some space"),
    errno.ENOTDIR: "one of its parents is a file; choose another folder",
    errno.EEXIST: "a file of this name exists; choose another folder",
    errno.ENOENT: "create its folder",
}


def unwritable(what: str, exc: OSError) -> str:
    """Return a message about an output that cannot be written: its name ``what``, the reason, and a remedy for that reason."""
    remedy = _UNWRITABLE.get(exc.errno or 0, "choose a folder that you may write to")
    return f"{what}: cannot be written to: {exc.strerror}; {remedy}"


class PenstockError(Exception):
    """Base class of all errors that Penstock raises intentionally."""


class ConfigError(PenstockError):
    """The user's configuration is invalid; the message names key, value, bound and remedy."""


@dataclass(frozen=True, slots=True)
class ManifestProblem:
    """One problem of a manifest.

    Attributes:
        path: Path of the key, for example ``spec.planner.maxGpuBudget``; empty if the problem concerns no single key.
        message: Description with the remedy.
        file: Name of the file; None if unknown.
        line: Line number in the file; None if unknown.
    """

    path: str
    message: str
    file: str | None = None
    line: int | None = None

    def __str__(self) -> str:
        place = self.file or "manifest"
        if self.line is not None:
            place = f"{place}:{self.line}"
        return f"{place}: {self.path}: {self.message}" if self.path else f"{place}: {self.message}"


def one_line(problems: Iterable[ManifestProblem]) -> str:
    """Return problems as one line of text, for a condition's message."""
    return "; ".join(f"{each.path}: {each.message}" if each.path else each.message for each in problems)


class InvalidSpecError(ConfigError):
    """A manifest violates the API's rules.

    Attributes:
        problems: All problems of the manifest.
    """

    def __init__(self, problems: Sequence[ManifestProblem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class PortInUseError(ConfigError):
    """The address to listen on is in use."""


class ObservationError(PenstockError):
    """A metric cannot be read or trusted."""


class ClusterError(PenstockError):
    """The backend (Kubernetes, or the arbiter that starts the processes of a local graph) refused a request or failed."""


class ConflictError(ClusterError):
    """Another writer changed the object first, so the write was rejected."""


class NotFoundError(ClusterError):
    """The object that a request to the backend names does not exist."""


class ForbiddenError(ClusterError):
    """The credentials are rejected, or lack the necessary right."""


class InvalidObjectError(ClusterError):
    """The object or request violates the API server's rules; the message is the server's."""


class ExpiredError(ClusterError):
    """The requested resource version or list page is no longer available; list again."""


class UnavailableError(ClusterError):
    """The server is overloaded, fails, or does not answer.

    Attributes:
        retry_after_s: Wall-clock seconds after which the server requests a retry; None if it names no time.
    """

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class UpstreamError(PenstockError):
    """A worker failed, from the view of its client."""


class UpstreamConnectError(UpstreamError):
    """The connection could not be opened, so the request was not sent."""


class UpstreamTimeout(UpstreamError):  # noqa: N818 - named like the fact it reports
    """The worker did not answer in time.

    Attributes:
        phase: Timeout that expired: ``connect``, ``first_byte``, ``idle`` or ``total``.
    """

    def __init__(self, message: str, *, phase: str) -> None:
        self.phase = phase
        super().__init__(message)


class StreamBroken(UpstreamError):  # noqa: N818 - named like the fact it reports
    """The connection ended, or delivered invalid data, before the response was complete."""


class StreamMoved(StreamBroken):
    """This process has interrupted the stream of a worker itself, to resume it on another worker."""


class WrongAnswer(UpstreamError):  # noqa: N818 - named like the fact it reports
    """The response is complete but is not one that a worker of the requested model sends, such as an HTML page or a redirect."""


class ClientDisconnected(PenstockError):  # noqa: N818 - named like the fact it reports
    """The client closed the connection, so there is nothing to answer."""


class SaturatedError(PenstockError):
    """This process has no free connection or file descriptor; the caller should retry later (503)."""


class NoEndpointsError(PenstockError):
    """No worker can serve this request now (503)."""


class LedgerError(PenstockError):
    """A decision could not be recorded in the ledger (the planner's decision log), so it was not carried out."""


class LedgerFileError(LedgerError, ConfigError):
    """A file is not a ledger (a planner's decision log), or cannot be read."""
