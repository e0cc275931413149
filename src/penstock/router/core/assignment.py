"""One request's share of a worker: its counters, and what its end says of the worker. Pure."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Generic, TypeVar

from penstock.api import Role
from penstock.router.core.worker import Worker

T = TypeVar("T")


class Verdict(StrEnum):
    """What a request says of its worker; each is a method of `Assignment`."""

    PROVED = "proved"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    UNPROVEN = "unproven"
    CONVICTED = "convicted"
    PARDONED = "pardoned"


class Assignment(Generic[T]):
    """A request's stay at a worker, from its dispatch until `RouterCore.release`.

    A verdict (`succeeded`, `failed`) reaches the worker's circuit at once and only the first one counts; the share of
    the worker's counters is given back by `end`, exactly once.

    Attributes:
        item: The request, as the caller queued it.
        worker: Where it went.
        tokens: Prompt tokens, known or estimated, and what was generated so far.
        since_s: When it was dispatched, simulated seconds.
        queued_s: How long it waited, simulated seconds.
        reason: Why this worker, one short phrase.
        is_open: It has not been given back.
        on_verdict: Is told each verdict and its cause, where another router picks; None: nobody is.
    """

    __slots__ = (
        "_has_verdict",
        "_is_counted",
        "_openings",
        "_probe",
        "is_open",
        "item",
        "on_verdict",
        "queued_s",
        "reason",
        "since_s",
        "tokens",
        "worker",
    )

    def __init__(
        self, item: T, worker: Worker, tokens: int, *, now_s: float, queued_s: float = 0.0, reason: str = ""
    ) -> None:
        """Count a request in."""
        self.item = item
        self.worker = worker
        self.tokens = tokens
        self.since_s = now_s
        self.queued_s = queued_s
        self.reason = reason
        self.is_open = True
        self.on_verdict: Callable[[Verdict, str], None] | None = None
        self._has_verdict = False
        self._is_counted = False
        self._probe = worker.breaker.sent(now_s)
        self._openings = worker.breaker.openings
        worker.inflight_requests += 1
        worker.inflight_tokens += tokens

    @property
    def role(self) -> Role:
        """Role of the worker."""
        return self.worker.spec.role

    def grow(self, tokens: int) -> None:
        """Count generated tokens."""
        self.tokens += tokens
        self.worker.inflight_tokens += tokens

    def proved(self) -> None:
        """Note the right beginning of an answer: a probe lets others in before the end of its stream."""
        if not self._has_verdict and self._probe:
            self.worker.answered(probe=True, is_complete=False)
            self._probe = False
        if self.on_verdict is not None and not self._has_verdict:
            self.on_verdict(Verdict.PROVED, "")

    def succeeded(self) -> None:
        """Note a right answer, or one whose error is the client's."""
        if not self._has_verdict:
            self._has_verdict = True
            self.worker.answered(probe=self._probe)
            if self.on_verdict is not None:
                self.on_verdict(Verdict.SUCCEEDED, "")

    def failed(self, now_s: float, cause: str, *, proven: bool = True) -> None:
        """Note a failure.

        Args:
            now_s: Simulated seconds.
            cause: What the worker did, for the log and `/workers`.
            proven: Whether the worker is at fault without doubt; else `convict` or `pardon` follows.
        """
        if not self._has_verdict:
            self._has_verdict = True
            self._is_counted = self.worker.failed(
                now_s, cause, probe=self._probe, proven=proven, openings=self._openings
            )
            if self.on_verdict is not None:
                self.on_verdict(Verdict.FAILED if proven else Verdict.UNPROVEN, cause)

    def convict(self, now_s: float) -> None:
        """Prove a failure: another worker has served the request."""
        if self._is_counted:
            self.worker.convicted(now_s)
        if self.on_verdict is not None:
            self.on_verdict(Verdict.CONVICTED, "")

    def pardon(self, now_s: float) -> None:
        """Take the failure back: it followed the request to other workers."""
        if self._is_counted:
            self._is_counted = False
            self.worker.breaker.pardoned(now_s, probe=self._probe)
        if self.on_verdict is not None:
            self.on_verdict(Verdict.PARDONED, "")

    def end(self) -> None:
        """Give the share back; without a verdict the worker is judged neither way. Does nothing the second time."""
        if not self.is_open:
            return
        self.is_open = False
        if not self._has_verdict:
            self._has_verdict = True
            self.worker.breaker.abandoned(probe=self._probe)
        self.worker.inflight_requests -= 1
        self.worker.inflight_tokens -= self.tokens
