"""Classifies why the API server refused a write, with a message and a remedy.

Pure. Every refusal of every write of the operator is classified only here, and so are refusals of a workload's pods,
which the workload's controller repeats in its status.

Source of the messages: k8s.io/apiserver (admission plugins policy/validating, webhook and resourcequota;
pkg/endpoints/handlers/patch.go) and k8s.io/pod-security-admission of v1.34.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from penstock.core.errors import (
    ClusterError,
    ConflictError,
    ForbiddenError,
    InvalidObjectError,
    NotFoundError,
    UnavailableError,
)


class RefusalKind(StrEnum):
    """Kinds of refused writes, the most serious first; the values are a public interface (condition reasons, Events).

    Attributes:
        NAMESPACE_GOING: The namespace is being deleted.
        RIGHTS: The operator's account lacks a right.
        ADMISSION: An admission policy, webhook, pod security level or LimitRange refused it.
        QUOTA: A ResourceQuota is exceeded, or requires resources that the pod does not name.
        REJECTED: The API server refused it for another reason.
        CONFLICT: Another writer was first.
        GONE: The object no longer exists in the expected form, so the write is not needed any more.
    """

    NAMESPACE_GOING = "NamespaceTerminating"
    RIGHTS = "Forbidden"
    ADMISSION = "AdmissionDenied"
    QUOTA = "QuotaExceeded"
    REJECTED = "ApplyFailed"
    CONFLICT = "Conflict"
    GONE = "Gone"

    @property
    def is_permanent(self) -> bool:
        """Whether a person has to act; False for a conflict, which passes, and for GONE, which needs no write any more."""
        return self not in {RefusalKind.CONFLICT, RefusalKind.GONE}


_SEVERITY: Final = {kind: rank for rank, kind in enumerate(RefusalKind)}

_PATTERNS: Final = (
    (
        r"exceeded quota: ([^,]+)",
        RefusalKind.QUOTA,
        r"raise ResourceQuota \1 of the namespace, or lower replicas",
    ),
    (
        r"failed quota: ([^:]+)",
        RefusalKind.QUOTA,
        r"set in podTemplate the resources that ResourceQuota \1 requires",
    ),
    (
        r"it is being terminated|namespaces \"[^\"]*\" not found",
        RefusalKind.NAMESPACE_GOING,
        "the namespace is being deleted, and the graph with it",
    ),
    (
        r"ValidatingAdmissionPolicy '([^']+)'",
        RefusalKind.ADMISSION,
        r"ask the owner of ValidatingAdmissionPolicy \1 to allow Penstock's operator, or change podTemplate",
    ),
    (
        r'webhook "([^"]+)"',
        RefusalKind.ADMISSION,
        r"ask the owner of admission webhook \1, or change podTemplate",
    ),
    (
        "violates PodSecurity",
        RefusalKind.ADMISSION,
        "change podTemplate or cacheMount to what the namespace's pod security level allows",
    ),
    (
        r"(?:minimum|maximum) \S+ usage|limit to request ratio",
        RefusalKind.ADMISSION,
        "set resources in podTemplate within the namespace's LimitRange",
    ),
    (
        r"cannot \w+ resource|not currently held|Unauthorized",
        RefusalKind.RIGHTS,
        "grant the operator's account that right: upgrade the chart, and see penstock doctor",
    ),
)
"""Patterns in the API server's message, each with the kind and the remedy; the first match applies."""

_STALE: Final = re.compile(r"rejected our request due to an error in our request|UID in precondition")
"""Matches the message if a test of a JSON patch failed, or if another object now has the name."""

_NO_ANSWER: Final = "does not answer"


@dataclass(frozen=True, slots=True)
class WriteRefusal:
    """One write that the API server refused.

    Attributes:
        kind: Kind of the refusal.
        write: Object or part that was to be written, such as ``Service g-decode``.
        step: Step of the operator, one word, used as an Event's action.
        message: The API server's message.
        remedy: Action that a user can take; empty if the message already names it.
    """

    kind: RefusalKind
    write: str
    step: str
    message: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.write}: {self.message}{'; ' if self.remedy else ''}{self.remedy}"


def refusal_of(error: ClusterError, write: str, step: str) -> WriteRefusal | None:
    """Return the refusal that ``error`` means for one write; None if the failure would concern every write.

    Args:
        error: Error of the write.
        write: Object or part that was to be written, for messages.
        step: Step of the operator, one word.

    Returns:
        The refusal with its remedy; None if the server does not answer or this process must not write.
    """
    text = str(error)
    if isinstance(error, UnavailableError) and _NO_ANSWER in text:
        return None
    kind, remedy = kind_of_message(text)
    if isinstance(error, ConflictError):
        kind = RefusalKind.GONE if _STALE.search(text) else RefusalKind.CONFLICT
    elif (isinstance(error, InvalidObjectError) and _STALE.search(text)) or (
        isinstance(error, NotFoundError) and kind is None
    ):
        kind = RefusalKind.GONE
    elif isinstance(error, ForbiddenError):
        kind = kind or RefusalKind.RIGHTS
    elif isinstance(error, InvalidObjectError | UnavailableError | NotFoundError):
        kind = kind or RefusalKind.REJECTED
    else:
        return None
    return WriteRefusal(kind, write, step, text, remedy)


def kind_of_message(message: str) -> tuple[RefusalKind | None, str]:
    """Return the kind of refusal that a message names, with its remedy; ``(None, "")`` if it names none."""
    for pattern, kind, remedy in _PATTERNS:
        match = re.search(pattern, message)
        if match is not None:
            return kind, match.expand(remedy)
    return None, ""


@dataclass(slots=True)
class Attempt:
    """State of one write, filled in when the write has ended.

    Attributes:
        refusal: The refusal; None if the write was not refused.
        may_have_succeeded: Whether the server failed in a way that leaves open whether the write was executed.
    """

    refusal: WriteRefusal | None = None
    may_have_succeeded: bool = False


@dataclass(slots=True)
class Refusals:
    """Collects the writes of one reconcile that were refused, so that each step continues without them.

    Attributes:
        found: Refusals in the order of the writes, without those of kind GONE.
    """

    found: list[WriteRefusal] = field(default_factory=list)

    @contextmanager
    def of(self, write: str, step: str) -> Iterator[Attempt]:
        """Context manager for one write: adds a refusal to `found` instead of raising it, and yields the `Attempt`.

        Args:
            write: Object or part that is written, for messages.
            step: Step of the operator, one word.

        Raises:
            ClusterError: The failure does not concern this write; see `refusal_of`.
        """
        attempt = Attempt()
        try:
            yield attempt
        except ClusterError as exc:
            attempt.refusal = refusal = refusal_of(exc, write, step)
            if refusal is None:
                raise
            attempt.may_have_succeeded = (
                isinstance(exc, UnavailableError) and refusal.kind is RefusalKind.REJECTED
            )
            if refusal.kind is not RefusalKind.GONE:
                self.found.append(refusal)

    @property
    def permanent(self) -> Sequence[WriteRefusal]:
        """Refusals that a person has to act on, the most serious kind first."""
        found = [each for each in self.found if each.kind.is_permanent]
        return sorted(found, key=lambda each: (_SEVERITY[each.kind], each.write))
