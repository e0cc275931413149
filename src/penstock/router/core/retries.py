"""A request's assignments to workers, its KV transfers, and the rules by which a failed request is retried. Pure.

A retry that leaves a failing worker for a sound one adds no load where capacity is short, so it takes nothing out of the
retry budget: the budget protects a pool all of whose workers fail. If a KV transfer is lost, either end can be at fault;
which one is shown when the request is served with other workers.

A vLLM 0.32 decode worker does not notice that it reads blocks after their lease has expired: it answers 200 with text
generated from whatever the blocks then contain. The prefill worker's answer does not contain the end of the lease, but that
worker counts expired leases. So a first token within the lease is trusted; a later one only if that count has not grown since
the lease began.
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
    """What a request says about its worker, for the worker's circuit breaker; `Assignment` has a method for each value.

    Attributes:
        FIRST_PART_OK: The first part of the response was correct.
        SUCCEEDED: The response was correct, or its error is the client's.
        FAILED: The worker failed, without doubt.
        UNPROVEN: The worker failed, perhaps because of the request.
        CONFIRMED: An unproven failure was the worker's fault.
        RETRACTED: An unproven failure was not the worker's fault.
        CLEARED: The request is no longer suspected of crashing workers.
    """

    FIRST_PART_OK = "first_part_ok"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    UNPROVEN = "unproven"
    CONFIRMED = "confirmed"
    RETRACTED = "retracted"
    CLEARED = "cleared"


def _ignore(verdict: Verdict, cause: str) -> None:
    """Report nothing."""


@dataclass(frozen=True, slots=True)
class RunningAt:
    """The worker to which another router has sent a request, and the request's progress there.

    Attributes:
        worker: Name of the worker.
        tokens: Prompt tokens plus the tokens generated so far.
        is_prefilled: Whether the worker has computed the prompt.
        queued_s: Time that the request waited in the queue, in simulated seconds.
        reason: Why the request was routed to this worker, for logs.
    """

    worker: str
    tokens: int
    is_prefilled: bool = False
    queued_s: float = 0.0
    reason: str = ""


class Assignment(Generic[T]):
    """A request's assignment to a worker, from its dispatch until `RouterCore.release`.

    A verdict (`succeeded`, `failed`) is reported to the worker's circuit breaker at once, and only the first one counts.
    Creating an assignment, at ``now_s`` in simulated seconds, adds the request to the worker's in-flight counters; `end`
    subtracts it, exactly once.

    Attributes:
        item: The request.
        worker: The worker to which it was dispatched.
        tokens: Prompt tokens, known or estimated, plus the tokens generated so far.
        since_s: Time of the dispatch to the worker, in simulated seconds.
        queued_s: Time that the request waited in the queue, in simulated seconds.
        reason: Why the request was routed to this worker, for logs.
        is_open: Whether the request still counts as in flight at the worker.
        is_cleared: Whether the request was suspected of crashing workers and no longer is, because it has run past the
            point at which it was broken off before.
        is_computed: Whether a complete response has shown that the prompt was computed; `RouterCore.release` then records
            it.
        on_verdict: Called with each `Verdict` on the worker and the cause of a failure; used to forward both to the router
            that chose the worker.
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
        """Count newly generated tokens of the request: for the load of its worker, and for the worker's measured decode speed.

        Args:
            tokens: Number of new tokens.
            gap_s: Simulated seconds since the previous tokens; None for the first tokens, which do not count for the decode
                speed.
        """
        worker = self.worker
        self.tokens += tokens
        worker.inflight_tokens += tokens
        if gap_s is not None:
            worker.speed.output_tokens += tokens
            worker.speed.decode_s += gap_s

    def computed(self, cached_tokens: int, now_s: float) -> None:
        """Count the request's prompt, now computed, for the worker's measured prefill speed.

        Args:
            cached_tokens: Prompt tokens that the worker found in its cache, which do not count; 0 if unknown.
            now_s: Time at which the prefill ended, in simulated seconds.
        """
        self.worker.speed.prefilled(max(1, self.tokens - cached_tokens), now_s - self.since_s)

    def first_part_ok(self) -> None:
        """Record that the first part of the response was correct.

        If the request is the probe (test request) of a worker whose circuit breaker is open, the circuit closes already
        now, before the end of the stream.
        """
        if self._has_verdict:
            return
        self.worker.has_answered_since_failure = self.worker.has_ever_answered = True
        if self._probe:
            self.worker.answered(probe=True, is_complete=False)
            self._probe = False
        self.on_verdict(Verdict.FIRST_PART_OK, "")

    def succeeded(self) -> None:
        """Record a correct response, or an error that is the client's fault; does nothing after an earlier success or failure."""
        if not self._has_verdict:
            self._has_verdict = True
            self.worker.answered(probe=self._probe)
            self.on_verdict(Verdict.SUCCEEDED, "")

    def failed(self, now_s: float, cause: str, *, proven: bool = True) -> None:
        """Record that the worker failed the request; does nothing after an earlier success or failure.

        Args:
            now_s: Current time in simulated seconds.
            cause: Cause of the failure, for the log and ``/workers``.
            proven: Whether the worker is at fault without doubt; otherwise `confirm_failure` or `retract_failure` must follow.
        """
        if not self._has_verdict:
            self._has_verdict = True
            self._is_counted = self.worker.failed(
                now_s, cause, probe=self._probe, proven=proven, openings=self._openings
            )
            self.on_verdict(Verdict.FAILED if proven else Verdict.UNPROVEN, cause)

    def confirm_failure(self, now_s: float) -> None:
        """Record that a failure recorded as unproven was the worker's fault, because another worker has served the request.

        ``now_s`` is the current time in simulated seconds.
        """
        if self._is_counted:
            self.worker.failure_confirmed(now_s)
        self.on_verdict(Verdict.CONFIRMED, "")

    def retract_failure(self, now_s: float) -> None:
        """Take back a failure recorded as unproven, because the request failed on other workers as well.

        The request itself is then probably at fault. The worker's circuit breaker no longer counts the failure. ``now_s`` is
        the current time in simulated seconds.
        """
        if self._is_counted:
            self._is_counted = False
            self.worker.breaker.failure_retracted(now_s, probe=self._probe)
        self.on_verdict(Verdict.RETRACTED, "")

    def clear(self) -> None:
        """Record that the request, which was suspected of crashing workers, did not crash this worker.

        Other requests can then be sent to the worker again.
        """
        self.is_cleared = True
        self.on_verdict(Verdict.CLEARED, "")

    def end(self) -> None:
        """Remove the request from the worker's in-flight counters; does nothing on repeated calls.

        If neither a success nor a failure was recorded, the worker's circuit breaker does not count the request.
        """
        if not self.is_open:
            return
        self.is_open = False
        if not self._has_verdict:
            self._has_verdict = True
            self.worker.breaker.abandoned(probe=self._probe)
        self.worker.inflight_requests -= 1
        self.worker.inflight_tokens -= self.tokens


class RefusalReason(Enum):
    """Why the router has no worker for a request.

    Attributes:
        QUEUE_FULL: As many requests wait as may wait in the queue.
        QUEUE_TIMEOUT: The request waited longer than its limit.
        NO_WORKER: No worker serves, and none is expected in time.
        SHED: Requests of its tier are shed to protect the SLO of higher tiers.
        ALL_BUSY: All workers of a stage are busy.
    """

    QUEUE_FULL = auto()
    QUEUE_TIMEOUT = auto()
    NO_WORKER = auto()
    SHED = auto()
    ALL_BUSY = auto()


@dataclass(frozen=True, slots=True)
class Refuse(Generic[T]):
    """The rejection of a request.

    Attributes:
        item: The request.
        role: Role of the stage that has no worker for it.
        reason: Why the request is rejected.
        message: Text for the client: what was exceeded or is missing, and the remedy.
        retry_after_s: Time until capacity is expected, in simulated seconds from now; None if unknown.
    """

    item: T
    role: Role
    reason: RefusalReason
    message: str
    retry_after_s: float | None = None


Effects = list[Assignment[T] | Refuse[T]]
"""Actions for the driver. Each `Assignment` is a request to send to its worker now, which ends with `RouterCore.release`; each
`Refuse` is a request to reject."""


@dataclass(frozen=True, slots=True)
class KvTransfer:
    """One KV transfer of a prompt.

    Attributes:
        prefill: Worker that computed the prompt and holds its KV blocks.
        decode: Worker that fetches the blocks.
    """

    prefill: Worker
    decode: Worker

    def lost(self) -> None:
        """Count this transfer as lost, at the prefill worker and at the decode worker."""
        self.prefill.lost_transfers += 1
        self.decode.lost_transfers += 1

    def arrived(self, lost: Iterable[KvTransfer], now_s: float) -> None:
        """Record that this transfer succeeded, and eject (stop sending requests to) workers that are at fault for lost ones.

        Args:
            lost: Lost transfers of the same request, the oldest first; empty if none was lost.
            now_s: Current time in simulated seconds.
        """
        self.prefill.lost_transfers = self.decode.lost_transfers = 0
        for each in lost:
            worker = end_at_fault(each, self)
            if worker is not None and worker.loses_transfers:
                worker.eject(now_s, f"{worker.lost_transfers} KV transfers in a row were lost")


def end_at_fault(lost: KvTransfer, arrived: KvTransfer) -> Worker | None:
    """Return the worker at fault for the transfer ``lost``, given that the same request's later transfer ``arrived`` succeeded.

    If the two transfers share a worker, the other worker of the lost transfer is at fault, because the shared one has just
    worked. If they share none, the worker with more lost transfers since its last success is at fault; None if both have the
    same number, or if the two transfers are between the same workers.
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
"""Fraction (0.8) of a lease within which the KV is trusted. The lease begins before the prefill's answer has arrived here; the
remaining fraction covers that delay."""


@dataclass(frozen=True, slots=True)
class KvLease:
    """The lease under which a prefill worker holds the blocks of one KV transfer.

    Attributes:
        worker: Prefill worker that holds the blocks.
        granted_s: Time at which the prefill worker's answer arrived, in simulated seconds.
        expired_before: The worker's cumulative number of expired leases at that time, so that a later number shows whether
            any lease has expired since; None if unknown.
    """

    worker: Worker
    granted_s: float
    expired_before: float | None

    def is_within(self, lease_s: float, now_s: float) -> bool:
        """Return whether less than 0.8 of the lease has passed at ``now_s``, so that the blocks were certainly held until then.

        The lease is ``lease_s`` simulated seconds long. The remaining fraction covers the delay of the message that
        granted it.
        """
        return now_s - self.granted_s < TRUSTED_FRACTION * lease_s

    def is_intact(self, expired: float | None) -> bool:
        """Return whether no lease of the prefill worker has expired since this one was granted.

        ``expired`` is the newest cumulative number of leases that expired there; None (unknown) returns False.
        """
        return expired is not None and expired == self.expired_before


_WINDOW_S = 10.0
"""Chosen: unused retries of the floor accumulate for at most this long, in simulated seconds; Finagle's window for its budgets."""
_REMEMBERED_REQUESTS = 1000
"""Chosen: with this many requests, the retries of a worker that dies with a full batch (max_num_seqs is 256 by default) can be paid
at a fraction of 0.2-0.3, and past traffic does not pay for more."""


class RetryBudget:
    """Retry budget with two token buckets: each request adds a fraction of a retry, and each second adds a constant (the floor).

    ``config`` contains both rates, and ``now_s`` is the time of creation in simulated seconds. Over a long time, retries are
    at most ``budget_fraction`` of the requests plus ``min_per_second`` per simulated second.
    """

    def __init__(self, config: RetriesConfig, now_s: float) -> None:
        self._fraction = config.budget_fraction
        self._min_per_s = config.min_per_second
        self._earned = 0.0
        self._floor = self._min_per_s * _WINDOW_S
        self._refilled_s = now_s

    def request_arrived(self) -> None:
        """Add to the budget the fraction of a retry that one new request earns (``budget_fraction``); not called for retries."""
        self._earned = min(self._earned + self._fraction, self._fraction * _REMEMBERED_REQUESTS)

    def take(self, now_s: float) -> bool:
        """Take one retry from the budget at ``now_s`` (simulated seconds); return False, and take nothing, if less than one is left."""
        saved = self._floor + max(0.0, now_s - self._refilled_s) * self._min_per_s
        self._floor = min(saved, self._min_per_s * _WINDOW_S)
        self._refilled_s = now_s
        if self._earned >= 1:
            self._earned -= 1
            return True
        if self._floor >= 1:
            self._floor -= 1
            return True
        return False


MAX_PAUSES: Final = 20
"""Maximum number of back-off pauses before a try. Chosen: a stream that is to be resumed then asks an unavailable worker once a
second, without a limit on the number of times."""


class RetryScope(Enum):
    """Where a request that failed may be tried again.

    Attributes:
        NOWHERE: It is not retried.
        ELSEWHERE: It is retried on another worker only.
        ANYWHERE: It is retried on any worker, the failed one included.
    """

    NOWHERE = auto()
    """It is not retried: the failure is the client's fault, or no time is left."""
    ELSEWHERE = auto()
    """On another worker only: the same worker would fail again, and another one shows whether the request is at fault."""
    ANYWHERE = auto()
    """On any worker: the failed worker is draining, restarting or unreachable, and can succeed the next time."""


@dataclass(frozen=True, slots=True)
class FailedTry:
    """One failed try of a request.

    Attributes:
        reason: Failure reason, from a fixed set of values, for metrics.
        scope: Where the request may be retried.
        workers: Workers that failed: none if no worker is at fault, two if either end of a KV transfer can be.
        is_timeout: Whether the failure was a timeout after connecting, which is retried at most once.
        unproven: Assignment whose failure counts against its worker only if another worker serves the request; None if the
            failure is proven or is not a worker's.
    """

    reason: str
    scope: RetryScope
    workers: tuple[Worker, ...] = ()
    is_timeout: bool = False
    unproven: Assignment[Any] | None = None


@dataclass(slots=True)
class RequestTries:
    """The failures and retries of one request so far.

    Attributes:
        retries: Number of retries.
        timeouts: Number of tries that failed by a timeout.
        avoid: Names of the workers that have failed the request; the next try uses other workers if there are any.
        unproven: Assignments with failures that are not proven to be the worker's fault yet.
        lost_transfers: KV transfers of the request that were lost, the oldest first; a later successful transfer shows
            which worker was at fault.
    """

    retries: int = 0
    timeouts: int = 0
    avoid: frozenset[str] = frozenset()
    unproven: tuple[Assignment[Any], ...] = ()
    lost_transfers: tuple[KvTransfer, ...] = ()


class RetryRules:
    """Decides about retries, and settles unproven failures, for all requests of one router.

    A failure is unproven if it may be the request's fault instead of the worker's. ``pool`` contains all workers, ``config``
    the limits on retries; ``now_s`` is the time of creation in simulated seconds, at which the retry budget starts.
    """

    def __init__(self, pool: WorkerPool, config: RetriesConfig, now_s: float) -> None:
        self._pool = pool
        self._max_per_request = config.max_per_request
        self.budget = RetryBudget(config, now_s)

    def retry(
        self,
        tries: RequestTries,
        failure: FailedTry,
        now_s: float,
        *,
        left_s: float,
        is_interrupted: bool = False,
    ) -> int | None:
        """Return the number of back-off pauses before a failed request is retried; None if it is not retried.

        A back-off pause is a unit of waiting; the driver (the code that does the I/O for a request) knows its length. The
        number is 0 if another worker can take the request, else the number of retries including the next one, at most 20
        (`MAX_PAUSES`). ``tries`` is updated.

        Args:
            tries: Failures and retries of the request so far.
            failure: Failure of the last try, before or after the first token.
            now_s: Current time in simulated seconds.
            left_s: Simulated seconds until the request's deadline; it is not retried if this is <= 0.
            is_interrupted: Whether the client has received the first part of the response. The limits on retries and the retry
                budget do not apply then.
        """
        tries.timeouts += failure.is_timeout
        if failure.unproven is not None:
            tries.unproven = (*tries.unproven, failure.unproven)
        avoid = tries.avoid | _to_avoid(tries, failure)
        has_others = any(self._others(each, avoid, now_s) for each in failure.workers)
        if failure.scope is RetryScope.NOWHERE or left_s <= 0:
            return None
        if RETRIES.applies(is_interrupted=is_interrupted) and (
            (failure.scope is RetryScope.ELSEWHERE and not has_others)
            or tries.retries >= self._max_per_request
            or (failure.is_timeout and tries.timeouts > 1)
        ):
            return None
        if RETRY_BUDGET.applies(is_interrupted=is_interrupted) and not (
            self._leaves_failing_worker(failure, avoid, now_s) or self.budget.take(now_s)
        ):
            return None
        tries.retries += 1
        tries.avoid = avoid
        waits = not has_others and (is_interrupted or bool(failure.workers))
        return min(tries.retries, MAX_PAUSES) if waits else 0

    def served(self, tries: RequestTries, worker: Worker, now_s: float) -> None:
        """Record that ``worker`` has served a request: its failures on other workers of the role were those workers' fault.

        Only failures that were not proven before are changed. ``tries`` contains them; ``now_s`` is in simulated seconds.
        """
        if not tries.unproven:
            return
        rest = []
        for each in tries.unproven:
            if each.role is not worker.spec.role:
                rest.append(each)
            elif each.worker is not worker:
                each.confirm_failure(now_s)
        tries.unproven = tuple(rest)

    def settle(self, tries: RequestTries, now_s: float) -> tuple[str, ...]:
        """At the end of a request, take back those of its failures that are not proven to be the fault of a worker.

        ``tries`` contains the failures. Returns the names of the workers on which the request failed, sorted, if there are
        several; else an empty tuple. A request that failed on several workers is probably at fault itself, so that the
        names are for the log only.
        """
        unproven, tries.unproven = tries.unproven, ()
        if not unproven:
            return ()
        for each in unproven:
            each.retract_failure(now_s)
        names = sorted({each.worker.name for each in unproven})
        return tuple(names) if len(names) > 1 else ()

    def has_worked(self, role: Role) -> bool:
        """Return whether any worker of the role has ever answered a request.

        If no worker of the role has, a request that broke off is not suspected of crashing workers, because the workers of
        the role may fail every request.
        """
        return any(each.has_ever_answered for each in self._pool if each.spec.role is role)

    def _others(self, worker: Worker, avoid: Collection[str], now_s: float) -> list[Worker]:
        routable = self._pool.routable(worker.spec.role, now_s)
        return [each for each in routable if each is not worker and each.name not in avoid]

    def _leaves_failing_worker(self, failure: FailedTry, avoid: Collection[str], now_s: float) -> bool:
        """Return whether a retry leaves a worker that fails all its requests, or is unavailable, for one that does not fail."""
        return any(
            (each.is_failing or not each.takes_requests)
            and not all(other.is_failing for other in self._others(each, avoid, now_s))
            for each in failure.workers
        )


def _to_avoid(tries: RequestTries, failure: FailedTry) -> set[str]:
    """Return the names of workers that the next try passes over.

    After a first lost KV transfer this is the decode worker alone: with the same prefill worker, which has the prompt in its
    cache, the next try shows which of the two is at fault.
    """
    passed_over = failure.workers if len(tries.lost_transfers) > 1 else failure.workers[:1]
    return {each.name for each in passed_over}
