"""What the tries of a request prove: its assignments to workers, lost KV transfers, and whether it is tried again. Pure.

A retry that leaves a failing worker for a sound one adds no load where there is none to spare, so it takes nothing
out of the budget: the budget protects a pool that fails entirely. Of a lost KV transfer either end may be at fault; the
request shows which, once it is served over other ends.

A vLLM 0.32 decode worker does not notice that it reads blocks after their lease: it answers 200 with text made from
whatever the blocks hold by then. The prefill worker's answer does not say until when the lease runs, but that worker counts
leases that ran out. So a first token within the lease is trusted; a later one only if that count has not grown since.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from typing import Any, Final, Generic, TypeVar

from penstock.api import Role
from penstock.api.lease_rules import DISPATCH_FRACTION
from penstock.api.router_workers import RetriesConfig
from penstock.router.core.limits import RETRIES, RETRY_BUDGET
from penstock.router.core.worker import Worker, WorkerPool

T = TypeVar("T")


class Verdict(StrEnum):
    """What a request says of its worker; each is a method of `Assignment`."""

    PROVED = "proved"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    UNPROVEN = "unproven"
    CONVICTED = "convicted"
    PARDONED = "pardoned"
    CLEARED = "cleared"


def _ignore(verdict: Verdict, cause: str) -> None:
    """Report nothing."""


@dataclass(frozen=True, slots=True)
class RunningAt:
    """Where a request runs that another router has dispatched.

    Attributes:
        tokens: Prompt tokens, and what was generated so far.
        queued_s: How long it waited, simulated seconds.
    """

    worker: str
    tokens: int
    is_prefilled: bool = False
    queued_s: float = 0.0
    reason: str = ""


class Assignment(Generic[T]):
    """A request's stay at a worker, from its dispatch until `RouterCore.release`.

    A verdict (`succeeded`, `failed`) reaches the worker's circuit at once and only the first one counts; the share of
    the worker's counters is given back by `end`, exactly once.

    Attributes:
        tokens: Prompt tokens, known or estimated, and what was generated so far.
        since_s: When it was dispatched, simulated seconds.
        is_cleared: It is not a suspect any more; see `penstock.router.core.suspects`.
        is_computed: Its complete answer shows that its prompt was computed; `RouterCore.release` records it.
        on_verdict: Called with each verdict and its cause; for a router whose picker is another one.
    """

    def __init__(
        self, item: T, worker: Worker, tokens: int, *, now_s: float, queued_s: float = 0.0, reason: str = ""
    ) -> None:
        self.item = item
        self.worker = worker
        self.tokens = tokens
        self.since_s = now_s
        self.queued_s = queued_s
        self.reason = reason
        self.is_open = True
        self.is_cleared = False
        self.is_computed = False
        self.on_verdict: Callable[[Verdict, str], None] = _ignore
        self._has_verdict = False
        self._is_counted = False
        breaker = worker.breaker
        self._probe = not breaker.is_closed and breaker.sent(now_s)
        self._openings = breaker.openings
        worker.inflight_requests += 1
        worker.inflight_tokens += tokens

    @property
    def role(self) -> Role:
        """Role of the worker."""
        return self.worker.spec.role

    def grow(self, tokens: int, gap_s: float | None = None) -> None:
        """Count generated tokens, and the simulated seconds since those before; None: they are the first."""
        worker = self.worker
        self.tokens += tokens
        worker.inflight_tokens += tokens
        if gap_s is not None:
            worker.speed.output_tokens += tokens
            worker.speed.decode_s += gap_s

    def computed(self, cached_tokens: int, now_s: float) -> None:
        """Count its prompt for the worker's speed, except for what is known to have been cached."""
        self.worker.speed.prefilled(max(1, self.tokens - cached_tokens), now_s - self.since_s)

    def proved(self) -> None:
        """Record the correct beginning of an answer: a probe lets others in before the end of its stream."""
        if self._has_verdict:
            return
        self.worker.has_answered = self.worker.has_ever_answered = True
        if self._probe:
            self.worker.answered(probe=True, is_complete=False)
            self._probe = False
        self.on_verdict(Verdict.PROVED, "")

    def succeeded(self) -> None:
        """Record a correct answer, or one whose error is the client's."""
        if not self._has_verdict:
            self._has_verdict = True
            self.worker.answered(probe=self._probe)
            self.on_verdict(Verdict.SUCCEEDED, "")

    def failed(self, now_s: float, cause: str, *, proven: bool = True) -> None:
        """Record a failure and its cause, for the log and `/workers`.

        It is ``proven`` if the worker is at fault without doubt; else `convict` or `pardon` follows.
        """
        if not self._has_verdict:
            self._has_verdict = True
            self._is_counted = self.worker.failed(
                now_s, cause, probe=self._probe, proven=proven, openings=self._openings
            )
            self.on_verdict(Verdict.FAILED if proven else Verdict.UNPROVEN, cause)

    def convict(self, now_s: float) -> None:
        """Prove a failure: another worker has served the request."""
        if self._is_counted:
            self.worker.convicted(now_s)
        self.on_verdict(Verdict.CONVICTED, "")

    def pardon(self, now_s: float) -> None:
        """Take the failure back: it followed the request to other workers."""
        if self._is_counted:
            self._is_counted = False
            self.worker.breaker.pardoned(now_s, probe=self._probe)
        self.on_verdict(Verdict.PARDONED, "")

    def clear(self) -> None:
        """Record that the suspect did not kill its worker."""
        self.is_cleared = True
        self.on_verdict(Verdict.CLEARED, "")

    def end(self) -> None:
        """Give the share back; without a verdict the worker's circuit stays as it is. Does nothing the second time."""
        if not self.is_open:
            return
        self.is_open = False
        if not self._has_verdict:
            self._has_verdict = True
            self.worker.breaker.abandoned(probe=self._probe)
        self.worker.inflight_requests -= 1
        self.worker.inflight_tokens -= self.tokens


class RefusalReason(Enum):
    """Why a request gets no worker."""

    QUEUE_FULL = auto()
    QUEUE_TIMEOUT = auto()
    NO_WORKER = auto()
    SHED = auto()
    ALL_BUSY = auto()


@dataclass(frozen=True, slots=True)
class Refuse(Generic[T]):
    """A request gets no worker.

    Attributes:
        role: Of the stage that has no worker for it.
        message: For the client: what was exceeded or is missing, and the remedy.
        retry_after_s: When there is expected to be room, simulated seconds from now; None: unknown.
    """

    item: T
    role: Role
    reason: RefusalReason
    message: str
    retry_after_s: float | None = None


Effects = list[Assignment[T] | Refuse[T]]
"""Each `Assignment` is a request that goes to its worker now; `RouterCore.release` ends it."""


@dataclass(frozen=True, slots=True)
class KvTransfer:
    """The two ends of one KV transfer."""

    prefill: Worker
    decode: Worker

    def lost(self) -> None:
        """Record that it did not arrive."""
        self.prefill.lost_transfers += 1
        self.decode.lost_transfers += 1

    def arrived(self, lost: Iterable[KvTransfer], now_s: float) -> None:
        """Record that it arrived, and eject workers at fault for the same request's ``lost`` transfers, oldest first."""
        self.prefill.lost_transfers = self.decode.lost_transfers = 0
        for each in lost:
            worker = end_at_fault(each, self)
            if worker is not None and worker.loses_transfers:
                worker.eject(now_s, f"{worker.lost_transfers} KV transfers in a row were lost")


def end_at_fault(lost: KvTransfer, arrived: KvTransfer) -> Worker | None:
    """Return the end at which a transfer was lost, given that the same request's later one arrived.

    The end that the two do not share, as the shared one has just worked; of two such ends the one with more losses
    since something last arrived there, None for as many.
    """
    decode_differs, prefill_differs = lost.decode is not arrived.decode, lost.prefill is not arrived.prefill
    if decode_differs and prefill_differs:
        difference = lost.prefill.lost_transfers - lost.decode.lost_transfers
        if difference == 0:
            return None
        return lost.prefill if difference > 0 else lost.decode
    if decode_differs:
        return lost.decode
    return lost.prefill if prefill_differs else None


TRUSTED_FRACTION: Final = DISPATCH_FRACTION
"""The lease begins before the prefill's answer has come here; what is left of it covers that way."""


@dataclass(frozen=True, slots=True)
class KvLease:
    """The hold on the blocks of one KV transfer.

    Attributes:
        granted_s: When the prefill worker's answer came, simulated seconds.
        expired_before: That worker's count of expired leases by then; None when it was not known.
    """

    worker: Worker
    granted_s: float
    expired_before: float | None

    def is_within(self, lease_s: float, now_s: float) -> bool:
        """Return whether blocks read by now were certainly held, given the length of a first lease."""
        return now_s - self.granted_s < TRUSTED_FRACTION * lease_s

    def is_intact(self, expired: float | None) -> bool:
        """Return whether no lease has expired since, given the worker's newest count; None: not known."""
        return expired is not None and expired == self.expired_before


_WINDOW_S = 10.0
"""Chosen: the floor may be saved up over this many simulated seconds, Finagle's window for its budgets."""
_REMEMBERED_REQUESTS = 1000
"""Chosen: a worker that dies with a full batch (max_num_seqs is 256 by default) can be retried elsewhere
at a fraction of 0.2-0.3, and traffic of the past buys no more than this many requests' worth."""


class RetryBudget:
    """Two token buckets: every request pays a fraction of a retry in, and every second a floor.

    Over a long time retries are at most ``budget_fraction`` of the requests plus ``min_per_second`` a simulated second.
    """

    def __init__(self, config: RetriesConfig, now_s: float) -> None:
        self._fraction = config.budget_fraction
        self._min_per_s = config.min_per_second
        self._earned = 0.0
        self._floor = self._min_per_s * _WINDOW_S
        self._seen_s = now_s

    def request_arrived(self) -> None:
        """Pay in for one request (not for its retries)."""
        self._earned = min(self._earned + self._fraction, self._fraction * _REMEMBERED_REQUESTS)

    def take(self, now_s: float) -> bool:
        """Spend one retry; False when none is left."""
        saved = self._floor + max(0.0, now_s - self._seen_s) * self._min_per_s
        self._floor = min(saved, self._min_per_s * _WINDOW_S)
        self._seen_s = now_s
        if self._earned >= 1:
            self._earned -= 1
            return True
        if self._floor >= 1:
            self._floor -= 1
            return True
        return False


MOST_PAUSES: Final = 20
"""Chosen: a begun stream asks a worker that is away once a second, without a bound on how often."""


class RetryScope(Enum):
    """Where a request that failed before its first byte may be tried again."""

    NOWHERE = auto()
    """The failure is the client's doing, or there is no time left."""
    ELSEWHERE = auto()
    """The same worker would say the same; another one shows whose fault it is."""
    ANYWHERE = auto()
    """The worker is leaving, restarting or out of reach: it may answer the next time."""


@dataclass(frozen=True, slots=True)
class FailedTry:
    """One failed try of a request.

    Attributes:
        reason: Bounded word for metrics.
        workers: Which failed; none when it was not a worker, two when either end of a KV transfer may have.
        is_timeout: A time-out after connecting: tried again at most once.
        unproven: A failure that counts against the worker only if another one serves the request.
    """

    reason: str
    scope: RetryScope
    workers: tuple[Worker, ...] = ()
    is_timeout: bool = False
    unproven: Assignment[Any] | None = None


@dataclass(slots=True)
class RequestTries:
    """What the tries of one request have shown so far; ``avoid`` names the workers that have failed it."""

    retries: int = 0
    timeouts: int = 0
    avoid: frozenset[str] = frozenset()
    unproven: tuple[Assignment[Any], ...] = ()
    lost_transfers: tuple[KvTransfer, ...] = ()


class RetryRules:
    """Allows retries and settles unproven failures, for all requests of one router, from ``now_s`` on (simulated)."""

    def __init__(self, pool: WorkerPool, config: RetriesConfig, now_s: float) -> None:
        self._pool = pool
        self._max_per_request = config.max_per_request
        self.budget = RetryBudget(config, now_s)

    def retry(
        self, tries: RequestTries, failure: FailedTry, now_s: float, *, left_s: float, begun: bool = False
    ) -> int | None:
        """Return how many back-off pauses to wait before the next try; None: the failure is final.

        That is 0 where another worker can take it, else the number of retries including the next one, at most
        `MOST_PAUSES`. The failure is of the request's last try, before its first byte, or of a ``begun`` stream;
        ``left_s`` is what is left of its time, simulated seconds.
        """
        tries.timeouts += failure.is_timeout
        if failure.unproven is not None:
            tries.unproven = (*tries.unproven, failure.unproven)
        avoid = tries.avoid | _to_avoid(tries, failure)
        has_others = any(self._others(each, avoid, now_s) for each in failure.workers)
        if failure.scope is RetryScope.NOWHERE or left_s <= 0:
            return None
        if RETRIES.binds(begun=begun) and (
            (failure.scope is RetryScope.ELSEWHERE and not has_others)
            or tries.retries >= self._max_per_request
            or (failure.is_timeout and tries.timeouts > 1)
        ):
            return None
        if RETRY_BUDGET.binds(begun=begun) and not (
            self._leaves_the_failing(failure, avoid, now_s) or self.budget.take(now_s)
        ):
            return None
        tries.retries += 1
        tries.avoid = avoid
        waits = not has_others and (begun or bool(failure.workers))
        return min(tries.retries, MOST_PAUSES) if waits else 0

    def served(self, tries: RequestTries, worker: Worker, now_s: float) -> None:
        """Prove the failures that other workers of a role had with a request: this one has served it."""
        if not tries.unproven:
            return
        rest = []
        for each in tries.unproven:
            if each.role is not worker.spec.role:
                rest.append(each)
            elif each.worker is not worker:
                each.convict(now_s)
        tries.unproven = tuple(rest)

    def settle(self, tries: RequestTries, now_s: float) -> tuple[str, ...]:
        """Withdraw unproven verdicts at the end of a request; returns the workers if it failed on several."""
        unproven, tries.unproven = tries.unproven, ()
        if not unproven:
            return ()
        for each in unproven:
            each.pardon(now_s)
        names = sorted({each.worker.name for each in unproven})
        return tuple(names) if len(names) > 1 else ()

    def has_worked(self, role: Role) -> bool:
        """Return whether a worker of a role has ever answered; one that breaks everything off says nothing of a request."""
        return any(each.has_ever_answered for each in self._pool if each.spec.role is role)

    def _others(self, worker: Worker, avoid: Collection[str], now_s: float) -> list[Worker]:
        routable = self._pool.routable(worker.spec.role, now_s)
        return [each for each in routable if each is not worker and each.name not in avoid]

    def _leaves_the_failing(self, failure: FailedTry, avoid: Collection[str], now_s: float) -> bool:
        """Return whether a retry goes from a worker that fails request after request, or is gone, to one that does not."""
        return any(
            (each.is_failing or not each.takes_requests)
            and not all(other.is_failing for other in self._others(each, avoid, now_s))
            for each in failure.workers
        )


def _to_avoid(tries: RequestTries, failure: FailedTry) -> set[str]:
    """Return the names of workers that the next try passes over.

    Of a lost KV transfer that is the decode worker at first: over the same prefill worker, which has the prompt
    in its cache, the next try shows which of them is at fault.
    """
    passed_over = failure.workers if len(tries.lost_transfers) > 1 else failure.workers[:1]
    return {each.name for each in passed_over}
