"""Penstock's exceptions; every component raises and catches these, never a library's own."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Error numbers of a disk without room for more."""

_UNWRITABLE: Final = {
    **dict.fromkeys(FULL, "free some space"),
    errno.ENOTDIR: "one of its parents is a file; choose another folder",
    errno.EEXIST: "a file of this name exists; choose another folder",
    errno.ENOENT: "create its folder",
}


def unwritable(what: str, exc: OSError) -> str:
    """Return what a message says of an output that cannot be written: which, why, and the remedy that fits."""
    remedy = _UNWRITABLE.get(exc.errno or 0, "choose a folder that you may write to")
    return f"{what}: cannot be written to: {exc.strerror}; {remedy}"


class PenstockError(Exception):
    """Root of all errors that Penstock raises on purpose."""


class ConfigError(PenstockError):
    """The user's configuration is wrong; the message names key, value, bound and remedy."""


@dataclass(frozen=True, slots=True)
class ManifestProblem:
    """One thing wrong with a manifest.

    Attributes:
        path: Key path, for example ``spec.planner.maxGpuBudget``.
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
    """Return problems as one line of a condition."""
    return "; ".join(f"{each.path}: {each.message}" if each.path else each.message for each in problems)


class InvalidSpecError(ConfigError):
    """A manifest breaks the API's rules; carries all problems at once."""

    def __init__(self, problems: Sequence[ManifestProblem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class PortInUseError(ConfigError):
    """The address to listen on is taken."""


class ObservationError(PenstockError):
    """A metric cannot be trusted."""


class ClusterError(PenstockError):
    """The backend (cluster or local arbiter) refused or failed."""


class ConflictError(ClusterError):
    """Another writer changed the object first."""


class NotFoundError(ClusterError):
    """The object is not there."""


class ForbiddenError(ClusterError):
    """The credentials are not accepted, or do not allow it."""


class InvalidObjectError(ClusterError):
    """The object or request breaks the server's rules; the message is the server's own."""


class ExpiredError(ClusterError):
    """The collection's version, or the page, that was requested is no longer kept: list again."""


class UnavailableError(ClusterError):
    """The server is too busy, fails or does not answer.

    Attributes:
        retry_after_s: Seconds after which the server accepts a retry; None when it does not say.
    """

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class UpstreamError(PenstockError):
    """A worker failed, as its client sees it."""


class UpstreamConnectError(UpstreamError):
    """No connection could be made; the request was not sent."""


class UpstreamTimeout(UpstreamError):  # noqa: N818 - named like the fact it reports
    """The worker did not answer in time.

    Attributes:
        phase: ``connect``, ``first_byte``, ``idle`` or ``total``.
    """

    def __init__(self, message: str, *, phase: str) -> None:
        self.phase = phase
        super().__init__(message)


class StreamBroken(UpstreamError):  # noqa: N818 - named like the fact it reports
    """The connection ended, or carried garbage, before the message was complete."""


class StreamMoved(StreamBroken):
    """This process has broken the stream off itself, to have it continue elsewhere."""


class WrongAnswer(UpstreamError):  # noqa: N818 - named like the fact it reports
    """The message is complete but not an answer of this model's workers: a page of HTML, a redirect."""


class ClientDisconnected(PenstockError):  # noqa: N818 - named like the fact it reports
    """The caller closed the connection; there is no one to answer."""


class SaturatedError(PenstockError):
    """This process has no connection or file left: the caller should retry later (503)."""


class NoEndpointsError(PenstockError):
    """No worker can serve this request now (503)."""


class LedgerError(PenstockError):
    """A decision could not be recorded, so it was not taken."""


class LedgerFileError(LedgerError, ConfigError):
    """A file is not a ledger, or cannot be read."""
