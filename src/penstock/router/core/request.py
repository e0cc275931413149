"""The state machine of one request, without I/O: it yields steps, and the driver sends back the result of each step. Pure.

It covers prefill, KV transfer, decode, refusals for lack of capacity, retries, and the continuation of a broken stream on
another worker. `penstock.router.proxy.handler` drives it. It is a generator, so whatever a step occupies (capacity of a
worker, the KV blocks of a prompt) is released by the ``finally`` next to it, also if the client disconnects.

Once the first token of a stream has arrived from a worker, the request can only be continued, not
restarted.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import cache
from math import inf
from typing import Any, Final, TypeAlias

from penstock.api import Role
from penstock.core.kv_transfers import TransferResult
from penstock.router.core import versions
from penstock.router.core.limits import (
    CAPACITY,
    CONNECTIONS,
    CONTINUATIONS,
    MAX_WORKER_WAIT_S,
    QUERY_OF_DEATH_LIMIT,
    QUEUE_WAIT,
    REQUEST_TIME,
    WORKER_WAIT,
)
from penstock.router.core.request_steps import (
    CLIENT_DISCONNECTED,
    AcquireWorker,
    AwaitOutage,
    AwaitPrefill,
    BuildContinuation,
    ConcurrentPrefillEnded,
    ConcurrentPrefillFinished,
    ConfirmLease,
    Continuation,
    CountTransfer,
    End,
    EndKind,
    Event,
    Notification,
    PrefillFailed,
    PrefillFinished,
    PrefillOutcome,
    Problem,
    PromptComputed,
    QueryOfDeath,
    RefusedAtCapacity,
    RelayStream,
    ReleaseKv,
    ReleasePrefillWorker,
    ReleaseWorker,
    ResponseStarted,
    Retry,
    SendEnding,
    SendRequest,
    SendResponse,
    Step,
    StreamEnding,
    StreamLost,
)
from penstock.router.core.retries import (
    MAX_PAUSES,
    TRUSTED_FRACTION,
    Assignment,
    FailedTry,
    KvTransfer,
    RefusalReason,
    RequestTries,
    RetryRules,
    RetryScope,
)
from penstock.router.core.suspects import DeathRecord, is_trial
from penstock.router.core.worker import Worker

SAME_DEATH_WINDOW_S: Final = 1.0
"""Maximum time between the first and the last broken request of a worker that dies, in simulated seconds. Chosen."""

DEAD_ON_DISPATCH_S: Final = 0.05
"""Time since dispatch within which a broken continuation shows that its worker was already dead, as after the loss of a node; in
simulated seconds. Chosen: less than it takes to compute the prompt."""

QUEUE_TIMEOUT: Final = "queue_timeout"
LEASE_EXPIRED: Final = "lease_expired"
KV_LOST: Final = "kv_lost"
BROKEN: Final = "upstream_broken"
"""Failure reason: the worker died, or its stream broke off, while it answered."""
MOVED: Final = "drain"
"""Failure reason: the stream was moved away from a draining worker."""
CONNECT: Final = "upstream_connect"
"""Failure reason: the worker could not be reached, so it has nothing of the request."""

TOTAL_TIMEOUT: Final = "upstream_timeout_total"
"""Failure reason: the worker was still answering when the request's total timeout passed."""


class ClientGone(Exception):  # noqa: N818 - thrown into the generator, which ends
    """The client has disconnected; raised inside the generator that yields the steps of one request, which then ends."""


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """The stages that a request passes, and its limits.

    A router has one plan for requests whose prompt's KV can be transferred to a decode worker, and one for all others.

    Attributes:
        entry: Role of the router's first stage.
        is_split: Whether a prefill worker computes the prompt, and a decode worker generates the response.
        is_concurrent: Whether the decode worker is called at the same time as the prefill worker, instead of after it.
        lease_s: Length of the first lease of a prefilled prompt's KV blocks, in simulated seconds; inf if it does not expire.
        max_continuations: Maximum number of times that the request's stream is resumed on another worker.
        worker_wait_s: Maximum time that a stream whose first token has arrived waits for a worker that resumes it, in
            simulated seconds.
    """

    entry: Role
    is_split: bool
    is_concurrent: bool = False
    lease_s: float = inf
    max_continuations: int = 0
    worker_wait_s: float = MAX_WORKER_WAIT_S

    @property
    def answering(self) -> Role:
        """Role of the workers that generate the response: decode if a prefill worker computes the prompt, else aggregated."""
        return Role.DECODE if self.entry is Role.PREFILL else self.entry


_Result: TypeAlias = PromptComputed | PrefillFailed | FailedTry | RefusalReason | Problem | End | None
_Refused: TypeAlias = RefusalReason | Problem | End
_StageSteps: TypeAlias = Generator[Step, Any, _Result]


# Steps that are the same for every request are created once.
_acquire = cache(AcquireWorker)
_SERVED: Final = End(EndKind.SERVED)


class RequestMachine:
    """The state machine of one request, from its admission to its end.

    The driver (the code that does the I/O for a request, `penstock.router.proxy.handler`) calls `advance` with the result
    of the last step, carries out `steps`, then the returned step, and so on until an `End`. ``plan`` contains the stages of
    the request and its limits, and ``now_s`` returns the current time. All times are in simulated seconds.

    Attributes:
        steps: Notifications (steps without a result, such as `ReleaseWorker`) that precede the newest returned step; the driver
            removes and carries them out in order.
        rules: Rules that decide about retries; if another router becomes responsible for the request, the driver replaces
            the rules by those of that router.
        tries: Failures and retries of the request so far.
        alone_at: Roles on whose workers the request must run alone, because it is suspected of crashing workers; empty if
            it is not suspected.
        deadline_s: Time after which nothing is retried, in simulated seconds; the driver may change it.
        continuations: Number of failures of workers after the stream's first token; limited by `limits.CONTINUATIONS`.
        moves: Number of times that the stream has left a draining worker.
    """

    __slots__ = (
        "_can_resume",
        "_concurrent_prefill",
        "_death_record",
        "_dispatched_s",
        "_has_first_token",
        "_holds_kv",
        "_is_streaming",
        "_kv",
        "_last_death_s",
        "_now_s",
        "_plan",
        "_prefill",
        "_response",
        "_run_steps",
        "_source",
        "_step",
        "_trials",
        "_waits_since_s",
        "_was_trial",
        "alone_at",
        "continuations",
        "deadline_s",
        "moves",
        "rules",
        "steps",
        "tries",
    )

    def __init__(
        self,
        plan: RequestPlan,
        rules: RetryRules,
        tries: RequestTries,
        now_s: Callable[[], float],
        *,
        deadline_s: float = inf,
    ) -> None:
        self.steps: list[Notification] = []
        self.tries = tries
        self.deadline_s = deadline_s
        self.continuations = 0
        self.moves = 0
        self.alone_at: tuple[Role, ...] = ()
        self._death_record: DeathRecord | None = None
        # Assignments, by role, in which the request runs or last ran alone as a suspect, with the worker's outages at that
        # time.
        self._was_trial = False
        self._trials: dict[Role, tuple[Assignment[Any], int]] = {}
        self._plan = plan
        self.rules = rules
        self._now_s = now_s
        # The worker that keeps the prompt's KV for decode, and whether this router must still release that KV because no
        # decode worker has fetched it.
        self._source: Worker | None = None
        self._holds_kv = False
        # Values of the driver that later steps need: the location of that KV, the prefill that runs concurrently, and the
        # response of the assigned worker.
        self._kv: Any = None
        self._prefill: Any = None
        self._response: Any = None
        # The assignment to the prefill worker that computes concurrently with decode, until that worker has answered.
        self._concurrent_prefill: Assignment[Any] | None = None
        self._has_first_token = self._is_streaming = False
        self._dispatched_s = self._last_death_s = self._waits_since_s = -inf
        self._can_resume = False
        self._step: Step | End = _SERVED
        self._run_steps = self._run()

    def advance(self, event: Event) -> Step | End:
        """Take in the next ``event`` of the request, and return the step that the driver has to carry out now.

        The driver is the code that does the I/O for the request. It must carry out `steps` (notifications without a result)
        before the returned step. An `End` is the last step.

        Args:
            event: The result of the last step, None to start the request. Two other events can come while any step is under
                way: `CLIENT_DISCONNECTED` ends the request, and `steps` then release everything that it occupies;
                `ConcurrentPrefillEnded` leaves the step under way as it is, and returns it again.
        """
        if isinstance(event, ConcurrentPrefillEnded):
            self._end_concurrent_prefill(event.outcome)
            return self._step
        try:
            self._step = (
                self._run_steps.throw(ClientGone)
                if event is CLIENT_DISCONNECTED
                else self._run_steps.send(event)
            )
        except StopIteration as end:
            self._step = self._ended(end.value)
        except ClientGone:
            self._step = self._ended(End(EndKind.CLIENT_DISCONNECTED))
        return self._step

    def _ended(self, end: End) -> End:
        failed_on = self.rules.settle(self.tries, self._now_s()) if self.tries.unproven else ()
        return end._replace(failed_on=failed_on) if failed_on else end

    @property
    def may_move(self) -> bool:
        """Whether the stream may be moved from a draining worker (which gets no new requests) to another one now.

        It may if another worker could resume it, the request's deadline has not passed, and the stream has been moved fewer
        times than it may be resumed.
        """
        is_in_time = self._now_s() < self.deadline_s
        return self._can_resume and is_in_time and self.moves < self._plan.max_continuations

    @property
    def waits_until_s(self) -> float:
        """Time until which a stream that was broken off waits for a worker that resumes it, in simulated seconds.

        inf if no token has arrived yet: the wait limits of the router's queues apply then.
        """
        if not self._has_first_token:
            return inf
        return min(self.deadline_s, self._waits_since_s + self._plan.worker_wait_s)

    # -- tries ----------------------------------------------------------------------------------------

    def _run(self) -> Generator[Step, Any, End]:
        plan = self._plan
        answering = plan.answering
        is_admission = answering is not plan.entry
        while True:
            if plan.is_split:
                result = yield from (
                    self._prefill_concurrently() if plan.is_concurrent else self._prefill_and_decode()
                )
            else:
                result = yield from self._stage(answering, self._generate, is_admission=is_admission)
            if result is None:
                return _SERVED
            if not isinstance(result, FailedTry):
                assert isinstance(result, RefusalReason | Problem | End)  # noqa: S101 - stages give nothing else
                if self._is_final(result):
                    return _end_of(result)
                result = FailedTry(_refusal_of(result), RetryScope.ANYWHERE)
            end = yield from self._after_failure(result)
            if end is not None:
                return end
            is_admission = False

    def _is_final(self, result: _Refused) -> bool:
        """Return whether the lack of a worker, of room at one or of a connection ends the request."""
        limit = QUEUE_WAIT if isinstance(result, RefusalReason) else CAPACITY
        if result is Problem.SATURATED:
            limit = CONNECTIONS
        return limit.applies(is_interrupted=self._has_first_token)

    def _prefill_and_decode(self) -> _StageSteps:
        computed = yield from self._stage(self._plan.entry, self._prefill_stage)
        if not isinstance(computed, PromptComputed):
            return computed
        try:
            result = yield from self._stage(Role.DECODE, self._generate)
        finally:
            if self._holds_kv:
                self.steps.append(ReleaseKv(self._kv))
            self._source, self._kv, self._holds_kv = None, None, False
        if result is RefusalReason.QUEUE_TIMEOUT:
            # The lease of the KV is not renewed while decode waits. The retry waits in the first stage's queue, without a
            # lease.
            return FailedTry(QUEUE_TIMEOUT, RetryScope.ANYWHERE)
        return result

    def _end_concurrent_prefill(self, result: PrefillOutcome) -> None:
        """Record the ``result`` of a prefill that ran concurrently with decode; does nothing if no such prefill is under way."""
        assignment, self._concurrent_prefill = self._concurrent_prefill, None
        if assignment is None:
            return
        if isinstance(result, PromptComputed):
            assignment.succeeded()
            self.steps.append(ConcurrentPrefillFinished(assignment, result.cached_tokens))
            self.rules.served(self.tries, assignment.worker, self._now_s())
        self._release_prefill_worker(assignment)

    def _release_prefill_worker(self, assignment: Assignment[Any]) -> None:
        self.steps.append(ReleasePrefillWorker(assignment, self._prefill))
        self._prefill = None

    def _prefill_concurrently(self) -> _StageSteps:
        """Run a prefill and a decode worker concurrently; try other prefill workers while they refuse for lack of capacity."""
        tries = self.tries
        while True:
            got = yield AcquireWorker(Role.PREFILL, self._is_retry)
            if isinstance(got, RefusalReason):
                return got
            self._concurrent_prefill, worker = got, got.worker
            self._record_dispatch(got)
            try:
                self._kv, self._prefill = yield SendRequest(Role.PREFILL, got)
                result = yield from self._stage(Role.DECODE, self._generate)
                if result is None and self._concurrent_prefill is not None:
                    yield AwaitPrefill(self._prefill)
            finally:
                if self._concurrent_prefill is not None:
                    self._release_prefill_worker(self._concurrent_prefill)
                    self._concurrent_prefill = None
                self._kv = None
            if result is RefusalReason.QUEUE_TIMEOUT:
                # The prefill worker does not keep the KV any longer than this either.
                return FailedTry(QUEUE_TIMEOUT, RetryScope.ANYWHERE)
            if not isinstance(result, PrefillFailed):
                return result
            if result.failure is not Problem.AT_CAPACITY:
                return result.failure
            self.steps.append(RefusedAtCapacity(worker))
            if worker.name in tries.avoid and not self._may_wait_for_capacity():
                return End(EndKind.ALL_BUSY, role=Role.PREFILL)
            tries.avoid |= {worker.name}

    def _stage(
        self, role: Role, serve: Callable[[Assignment[Any]], _StageSteps], *, is_admission: bool = False
    ) -> _StageSteps:
        """Have a worker of a role serve the request; try another one while workers refuse it for lack of capacity.

        Such a refusal is not a failure: it costs no retry budget, and does not count against the worker. A stream that is
        resumed waits until a worker has capacity.
        """
        tries, is_entry = self.tries, role is self._plan.entry
        while True:
            is_retry = is_entry and self._is_retry
            got = yield (
                _acquire(role, is_retry, is_admission)
                if self._kv is None
                else AcquireWorker(role, is_retry, is_admission, self._kv)
            )
            if isinstance(got, RefusalReason):
                return got
            self._record_dispatch(got)
            try:
                result = yield from serve(got)
            finally:
                self.steps.append(ReleaseWorker(got, self._response))
                self._response = None
            if result is not Problem.AT_CAPACITY:
                return result
            is_admission, name = False, got.worker.name
            self.steps.append(RefusedAtCapacity(got.worker))
            if name in tries.avoid and not self._may_wait_for_capacity():
                return End(EndKind.ALL_BUSY, role=role)
            tries.avoid |= {name}

    @property
    def _is_retry(self) -> bool:
        """Whether the request was admitted before."""
        return self._has_first_token or bool(self.tries.retries or self.tries.avoid)

    def _may_wait_for_capacity(self) -> bool:
        """Return whether workers that refused for lack of capacity are tried again: only for an interrupted stream, within its limit."""
        return (
            not CAPACITY.applies(is_interrupted=self._has_first_token) and self._now_s() < self.waits_until_s
        )

    def _prefill_stage(self, assignment: Assignment[Any]) -> _StageSteps:
        if assignment.role is Role.DECODE:
            # Prefill deflection: the decode worker computes the prompt itself.
            return (yield from self._generate(assignment))
        result: _Result = yield SendRequest(assignment.role, assignment)
        if isinstance(result, PromptComputed):
            assignment.succeeded()
            self.steps.append(PrefillFinished(assignment, result.cached_tokens))
            self.rules.served(self.tries, assignment.worker, self._now_s())
            if result.kv is not None:
                self._source, self._kv, self._holds_kv = assignment.worker, result.kv, True
            else:
                self.steps.append(CountTransfer(TransferResult.NONE))
        return result

    def _generate(self, assignment: Assignment[Any]) -> _StageSteps:
        reads_kv = self._source is not None and self._reads_kv(assignment, self._source)
        if reads_kv is None:
            return FailedTry(LEASE_EXPIRED, RetryScope.ANYWHERE)
        is_concurrent = self._plan.is_concurrent and self._plan.is_split
        kv = self._kv if reads_kv or is_concurrent else None
        result = yield SendRequest(assignment.role, assignment, kv, self._prefill)
        if not isinstance(result, ResponseStarted):
            return self._not_started(assignment, result, reads_kv=reads_kv)
        self._response = result.response
        assignment.first_part_ok()
        if reads_kv and not (yield ConfirmLease(kv)):
            return FailedTry(LEASE_EXPIRED, RetryScope.ANYWHERE)
        if reads_kv and self._source is not None:
            transfer = KvTransfer(self._source, assignment.worker)
            transfer.arrived(self.tries.lost_transfers, self._now_s())
        elif is_concurrent:
            self.steps.append(CountTransfer(TransferResult.DONE))
        if self.tries.unproven:
            self.rules.served(self.tries, assignment.worker, self._now_s())
        if not result.is_stream:
            assignment.succeeded()
            self.steps.append(SendResponse(result.response))
        else:
            self.steps.append(PrefillFinished(assignment, None))
            self._has_first_token, self._can_resume = True, result.can_resume
            self._is_streaming = True
            failure: FailedTry | None = yield RelayStream(assignment, result.response)
            if failure is not None:
                return failure
            assignment.succeeded()
        return None

    def _not_started(self, assignment: Assignment[Any], result: Any, *, reads_kv: bool) -> _Result:
        if result is Problem.KV_LOST:
            return self._kv_lost(assignment)
        is_reached = isinstance(result, FailedTry) and result.reason != CONNECT
        self._holds_kv |= reads_kv and not is_reached
        return result  # type: ignore[no-any-return] # the driver's answer

    def _reads_kv(self, assignment: Assignment[Any], source: Worker) -> bool | None:
        """Return whether a decode worker fetches the prompt's KV (True) or computes the prompt (False); None if the KV may have expired."""
        if not versions.are_compatible(source, assignment.worker):
            # Only decode workers with another engine version are available; they compute the prompt themselves.
            self.steps.append(CountTransfer(TransferResult.NONE))
            return False
        if assignment.queued_s >= TRUSTED_FRACTION * self._plan.lease_s:
            self.steps.append(CountTransfer(TransferResult.LOST))
            return None
        self._holds_kv = False
        return True

    def _kv_lost(self, assignment: Assignment[Any]) -> FailedTry:
        self.steps.append(CountTransfer(TransferResult.LOST))
        if self._source is None:
            return FailedTry(KV_LOST, RetryScope.ANYWHERE, (assignment.worker,))
        transfer = KvTransfer(self._source, assignment.worker)
        transfer.lost()
        self.tries.lost_transfers = (*self.tries.lost_transfers, transfer)
        return FailedTry(KV_LOST, RetryScope.ANYWHERE, (transfer.decode, transfer.prefill))

    # -- after a failure ------------------------------------------------------------------------------

    def _after_failure(self, failure: FailedTry) -> Generator[Step, Any, End | None]:
        """Decide the next step after a failed try: return None if the request may be retried or its stream resumed, else its end."""
        self._was_trial = False
        died = self._worker_that_died(failure) if failure.reason == BROKEN else None
        is_query_of_death = died is not None and (yield from self._has_killed_alone(died))
        if died is not None and not is_query_of_death:
            self._death_record = self._death_record or DeathRecord()
            self._death_record.record_death(died)
            self.alone_at = self._death_record.alone_at
        if self._has_first_token:
            return (yield from self._after_first_token(failure, is_query_of_death=is_query_of_death))
        if is_query_of_death:
            return End(EndKind.FAILED, failure)
        now_s = self._now_s()
        pauses = self.rules.retry(self.tries, failure, now_s, left_s=self.deadline_s - now_s)
        if pauses is None:
            return End(EndKind.FAILED, failure)
        yield Retry(failure.reason, self._pauses_before_retry(pauses), is_continuation=False)
        return None

    # -- what it has killed ---------------------------------------------------------------------------

    def clear(self) -> None:
        """Record that a request that is suspected of crashing workers has got past the point where it was broken off.

        It is no longer suspected then, and other requests can be sent to its worker again. Does nothing if the request is
        not suspected.
        """
        if self._death_record is not None:
            self._death_record.clear()
            self.alone_at = ()
        for assignment, _ in self._trials.values():
            assignment.clear()
        self._trials.clear()

    def _record_dispatch(self, assignment: Assignment[Any]) -> None:
        self._dispatched_s = assignment.since_s
        if self.alone_at and is_trial(assignment):
            self._trials[assignment.role] = assignment, assignment.worker.outages

    def _pauses_before_retry(self, pauses: int) -> int:
        """Return the number of pauses before the next try; a suspect pauses until deaths at the same moment are known."""
        return MAX_PAUSES if self.alone_at else pauses

    def _worker_that_died(self, failure: FailedTry) -> Worker | None:
        """Return the worker that died while this request ran there; None if it was dead before, or has never been shown to work.

        If two workers die at once, a stream can be sent to the second one, which is already dead, right after the first.
        """
        now_s, before_s, self._last_death_s = self._now_s(), self._last_death_s, -inf
        is_continued = self._has_first_token and not self._is_streaming
        if (
            is_continued
            and now_s - self._dispatched_s <= DEAD_ON_DISPATCH_S
            and now_s - before_s <= SAME_DEATH_WINDOW_S
        ):
            return None
        worker = failure.workers[0] if failure.workers else None
        if worker is None or not (
            self.rules.has_worked(worker.spec.role)
            if worker.last_failure_after_success_s is None
            else now_s - worker.last_failure_after_success_s <= SAME_DEATH_WINDOW_S
        ):
            return None
        self._last_death_s = now_s
        return worker

    def _has_killed_alone(self, worker: Worker) -> Generator[Step, Any, bool]:
        """Return whether the request has killed a worker on which it ran alone; waits until it is known whether the worker died."""
        trial, outages = self._trials.pop(worker.spec.role, (None, 0))
        if trial is None or trial.worker is not worker or self._death_record is None:
            return False
        self._was_trial = True
        if worker.outages == outages:
            yield AwaitOutage(worker)
        if worker.outages == outages:
            # The worker is alive: only its stream was broken off.
            return False
        before = [each.worker for each in self._death_record.deaths]
        self.steps.append(QueryOfDeath(tuple(before), worker.name))
        return True

    # -- after the first token ------------------------------------------------------------------------

    def _after_first_token(
        self, failure: FailedTry, *, is_query_of_death: bool
    ) -> Generator[Step, Any, End | None]:
        """Decide the next step after the failure of a stream that has begun: return None if it may be resumed, else its end.

        If no worker was available, the stream has not been continued: it waits for a worker until `waits_until_s`.
        """
        has_sent_tokens, self._is_streaming = self._is_streaming, False
        is_moved = failure.reason == MOVED
        # A suspect's stream that breaks while it runs alone may have killed its worker unnoticed, so it counts: it must not
        # try for ever.
        counts = (
            has_sent_tokens or self._was_trial or failure.scope is RetryScope.ELSEWHERE or failure.is_timeout
        )
        now_s = self._now_s()
        if has_sent_tokens:
            self._waits_since_s = now_s
        why = QUERY_OF_DEATH_LIMIT.name if is_query_of_death else ""
        why = why or self._why_lost(failure, now_s, counts=counts and not is_moved)
        if has_sent_tokens and not why:
            rest = yield BuildContinuation()
            if isinstance(rest, StreamEnding):
                self.steps.append(SendEnding(rest.events))
                return _SERVED
            why = "" if rest is Continuation.READY else "response"
        if why:
            self.steps.append(StreamLost(why, failure.reason))
            return End(EndKind.FAILED, failure)
        if has_sent_tokens:
            # Retries before the first token, or before this break, are no evidence about the workers that it can be sent to
            # now.
            self.tries.retries = 0
        if is_moved:
            # A move is not a retry, because nothing has failed.
            self.tries.avoid |= {each.name for each in failure.workers}
            self.moves += 1
            yield Retry(MOVED, 0, is_continuation=True)
            return None
        left_s = self.waits_until_s - now_s
        pauses = self.rules.retry(self.tries, failure, now_s, left_s=left_s, is_interrupted=True)
        assert pauses is not None  # noqa: S101 - its own limits were asked before
        self.continuations += counts
        yield Retry(failure.reason, self._pauses_before_retry(pauses), is_continuation=has_sent_tokens)
        return None

    def _why_lost(self, failure: FailedTry, now_s: float, *, counts: bool) -> str:
        """Return why an interrupted stream ends here, as the name of a limit if there is one; empty if it may be resumed."""
        if not self._can_resume:
            return "request"
        if failure.reason == TOTAL_TIMEOUT or now_s >= self.deadline_s:
            return REQUEST_TIME.name
        if failure.scope is RetryScope.NOWHERE:
            return "worker_refusal"
        if counts and self.continuations >= self._plan.max_continuations:
            return CONTINUATIONS.name
        return WORKER_WAIT.name if now_s >= self.waits_until_s else ""


def _end_of(result: _Refused) -> End:
    if isinstance(result, End):
        return result
    return End(EndKind.REFUSED if isinstance(result, RefusalReason) else EndKind.SATURATED)


def _refusal_of(result: _Refused) -> str:
    """Return the failure reason of a try that found no worker, no capacity on a worker, or no connection."""
    return (result.kind if isinstance(result, End) else result).name.lower()
