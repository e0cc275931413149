"""Why the API server did not take a write, as one word and as text, with the remedy.

Pure. Every refusal of every write of the operator is classified here and nowhere else, and so are those of a
workload's pods, which the workload's controller repeats in its status.

Source of the words: k8s.io/apiserver (admission plugins policy/validating, webhook and resourcequota;
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
    """What refused a write, gravest first; names are a contract (condition reasons, Events)."""

    NAMESPACE_GOING = "NamespaceTerminating"
    RIGHTS = "Forbidden"
    ADMISSION = "AdmissionDenied"
    QUOTA = "QuotaExceeded"
    REJECTED = "ApplyFailed"
    CONFLICT = "Conflict"
    GONE = "Gone"

    @property
    def is_lasting(self) -> bool:
        """Whether a person has to act; a conflict passes, and what is gone needs no write any more."""
        return self not in {RefusalKind.CONFLICT, RefusalKind.GONE}


_SEVERITY: Final = {kind: rank for rank, kind in enumerate(RefusalKind)}

_WORDS: Final = (
    (
        r"exceeded quota: ([^,]+)",
        RefusalKind.QUOTA,
        r"raise ResourceQuota \1 of the namespace, or lower replicas",
    ),
    (
        r"failed quota: ([^:]+)",
        RefusalKind.QUOTA,
        r"set in podTemplate the resources that ResourceQuota \1 asks for",
    ),
    (
        r"it is being terminated|namespaces \"[^\"]*\" not found",
        RefusalKind.NAMESPACE_GOING,
        "the namespace is being deleted, and the graph with it",
    ),
    (
        r"ValidatingAdmissionPolicy '([^']+)'",
        RefusalKind.ADMISSION,
        r"ask the owner of ValidatingAdmissionPolicy \1 to let Penstock's operator through, or change podTemplate",
    ),
    (
        r'webhook "([^"]+)"',
        RefusalKind.ADMISSION,
        r"ask who runs admission webhook \1, or change podTemplate",
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
"""Words of the API server, the kind, and the remedy; the first row that is found counts."""

_STALE: Final = re.compile(r"rejected our request due to an error in our request|UID in precondition")
"""Said where a JSON patch's test fails, or another object has the name now."""

_NO_ANSWER: Final = "does not answer"


@dataclass(frozen=True, slots=True)
class WriteRefusal:
    """One write that the API server did not take.

    Attributes:
        write: What was to be written, such as ``Service g-decode``.
        step: What the operator was doing, one word for an Event's action.
        words: The server's own.
        remedy: What a person can do; empty where the server's words say it.
    """

    kind: RefusalKind
    write: str
    step: str
    words: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.write}: {self.words}{'; ' if self.remedy else ''}{self.remedy}"


def refusal_of(error: ClusterError, write: str, step: str) -> WriteRefusal | None:
    """Return what a failed write means for that write alone.

    Returns:
        None where the failure is not about the write: the server does not answer, or this process may not write.
    """
    text = str(error)
    if isinstance(error, UnavailableError) and _NO_ANSWER in text:
        return None
    kind, remedy = kind_of_words(text)
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


def kind_of_words(words: str) -> tuple[RefusalKind | None, str]:
    """Return the kind that a refusal's words name, with its remedy; None and empty where they name none."""
    for pattern, kind, remedy in _WORDS:
        match = re.search(pattern, words)
        if match is not None:
            return kind, match.expand(remedy)
    return None, ""


@dataclass(slots=True)
class Attempt:
    """One write under way.

    Attributes:
        refusal: Once it was refused.
        may_have_happened: Whether the server failed in a way that leaves that open.
    """

    refusal: WriteRefusal | None = None
    may_have_happened: bool = False


@dataclass(slots=True)
class Refusals:
    """The writes of one reconcile that were refused, so that each step continues without them.

    Attributes:
        found: In the order of the writes, without those that are not needed any more.
    """

    found: list[WriteRefusal] = field(default_factory=list)

    @contextmanager
    def of(self, write: str, step: str) -> Iterator[Attempt]:
        """Run a write; keep why it was refused in place of raising it.

        Raises:
            ClusterError: the failure is not about this write, see `refusal_of`.
        """
        attempt = Attempt()
        try:
            yield attempt
        except ClusterError as exc:
            attempt.refusal = refusal = refusal_of(exc, write, step)
            if refusal is None:
                raise
            attempt.may_have_happened = (
                isinstance(exc, UnavailableError) and refusal.kind is RefusalKind.REJECTED
            )
            if refusal.kind is not RefusalKind.GONE:
                self.found.append(refusal)

    @property
    def lasting(self) -> Sequence[WriteRefusal]:
        """Return those that a person has to do something about, the gravest kind first."""
        kept = [each for each in self.found if each.kind.is_lasting]
        return sorted(kept, key=lambda each: (_SEVERITY[each.kind], each.write))
