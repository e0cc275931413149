"""Drives the request machine over the router's real core by scripts of answers, and the scripts of every end."""

from itertools import count

from penstock.api import Role, RouterConfig
from penstock.router.core.build import SPLIT, TOGETHER, build_router
from penstock.router.core.request import BROKEN, CONNECT, MOVED, RequestMachine, RequestPlan
from penstock.router.core.request_steps import (
    CLIENT_DISCONNECTED,
    AcquireWorker,
    AwaitOutage,
    AwaitPrefill,
    ConcurrentPrefillEnded,
    ConcurrentPrefillFinished,
    Continuation,
    End,
    EndKind,
    PrefillFailed,
    PrefillFinished,
    PrefillStarted,
    Problem,
    PromptComputed,
    RefusedAtCapacity,
    ReleaseKv,
    ReleasePrefillWorker,
    ReleaseWorker,
    ResponseStarted,
    Retry,
    SendRequest,
    StreamEnding,
)
from penstock.router.core.retries import (
    Assignment,
    FailedTry,
    RefusalReason,
    RequestTries,
    RetryRules,
    RetryScope,
)
from penstock.router.core.worker import WorkerSpec
from penstock.router.policy.arrival import Arrival

KV = PromptComputed(0, kv="kv")
RESPONSE_COMPLETE = ResponseStarted(is_stream=False)
STREAM = ResponseStarted(is_stream=True, can_resume=True)
DONE = None
CRASH = "crash"
"""The worker breaks off."""
KILLED = "killed"
"""The worker breaks off, and is seen to be gone."""
LATER = "later"
"""The prefill continues, until the next step that may see its end."""
UNREACHED = "unreached"
"""No connection to the worker."""
UNPROVEN = "unproven"
"""The worker answers with an error that may be the request's own."""


class Driver:
    """Carries steps out on a core; a script answers those that ask, by their type's name, in turn."""

    def __init__(self, *, is_split, is_concurrent=False, workers=3, most=3, retries=3, wait_s=600.0):
        self.now_s = 0.0
        roles = SPLIT if is_split else TOGETHER
        config = RouterConfig.model_validate({"retries": {"maxPerRequest": retries}})
        self.core = build_router(config, roles, is_supervised=True)
        specs = [
            WorkerSpec(f"{role}-{n}", role, "", supervised=True) for role in roles for n in range(workers)
        ]
        self.core.set_workers(specs, 0.0)
        self.rules = RetryRules(self.core.pool, config.retries, 0.0)
        self.plan = RequestPlan(
            self.core.entry,
            is_split,
            is_concurrent,
            lease_s=30.0,
            max_continuations=most,
            worker_wait_s=wait_s,
        )
        self.is_concurrent, self.is_prefilling, self.prefill = is_concurrent, False, None
        self.machine = RequestMachine(self.plan, self.rules, RequestTries(), lambda: self.now_s)
        self.steps = []
        self.assignments = []
        self.verdicts = []
        """Of each assignment, in the order of the assignments."""
        self.item = "request"

    def _acquire(self, step):
        arrival = Arrival((), 100, self.machine.tries.avoid, alone_at=self.machine.alone_at)
        (effect,) = self.core.acquire(self.item, step.role, arrival, self.now_s, is_retry=step.is_retry)
        if not isinstance(effect, Assignment):
            return effect.reason
        self.assignments.append(effect)
        self.verdicts.append(verdicts := [])
        effect.on_verdict = lambda verdict, _: verdicts.append(verdict.name.lower())
        if self.is_concurrent and step.role is Role.PREFILL:
            self.prefill = effect
        return effect

    def _do(self, newest):
        """Carry out the steps before the newest; return that one."""
        self._do_notifications()
        self.steps.append(newest)
        return newest

    def _do_notifications(self):
        for step in self.machine.steps:
            self.steps.append(step)
            if isinstance(step, ReleaseWorker):
                self.core.release(self.assignments[-1], self.now_s)
            elif isinstance(step, PrefillFinished):
                self.core.prefilled(self.assignments[-1], self.now_s, cached_tokens=step.cached_tokens)
            elif isinstance(step, ConcurrentPrefillFinished):
                self.core.prefilled(self.prefill, self.now_s, cached_tokens=step.cached_tokens)
            elif isinstance(step, ReleasePrefillWorker):
                self.core.release(self.prefill, self.now_s)
            elif isinstance(step, RefusedAtCapacity):
                self.core.refused_at_capacity(step.worker, 0.0)
        self.machine.steps.clear()

    def run(self, script, leave_at=None):
        """Return the end; the client leaves instead of the ``leave_at``-th answer."""
        left = {name: iter(answers) for name, answers in script.items()}
        step = self._do(self.machine.advance(None))
        for number in count():
            if isinstance(step, End):
                return step
            if number == leave_at:
                return self._do(self.machine.advance(CLIENT_DISCONNECTED))
            step = self._do(self.machine.advance(self._answer(step, left)))
        raise AssertionError

    def run_again(self, script):
        """Return the end of another request at the same router."""
        self.machine = RequestMachine(self.plan, self.rules, RequestTries(), lambda: self.now_s)
        return self.run(script)

    def _answer(self, step, left):
        name = type(step).__name__
        if isinstance(step, AwaitOutage):
            self.now_s += 5.0
        if isinstance(step, AcquireWorker):
            given = next(left.get(name, iter(())), None)
            return self._acquire(step) if given is None else given
        if isinstance(step, SendRequest) and step.role is Role.PREFILL:
            name = "Prefill"
            if self.is_concurrent:
                self.is_prefilling = True
                return PrefillStarted("kv", "prefill")
        if isinstance(step, SendRequest | AwaitPrefill) and self.is_prefilling:
            failed = self._end_prefill(left)
            if isinstance(step, AwaitPrefill) or failed is not None:
                return failed
        defaults = {
            "Prefill": KV,
            "SendRequest": STREAM,
            "ConfirmLease": True,
            "BuildContinuation": Continuation.READY,
        }
        given = next(left.get(name, iter(())), defaults.get(name))
        return self._failed(given) if given in (MOVED, UNPROVEN, CRASH, KILLED, UNREACHED) else given

    def _failed(self, how):
        """Return a try of the newest worker that failed, once its circuit has the verdict."""
        assignment, scope = self.assignments[-1], RetryScope.ANYWHERE
        workers = (assignment.worker,)
        if how == MOVED:
            return FailedTry(MOVED, scope, workers)
        assignment.failed(self.now_s, how, proven=how != UNPROVEN)
        if how == KILLED:
            assignment.worker.health_problem = "gone"
        if how == UNPROVEN:
            return FailedTry("upstream_5xx", RetryScope.ELSEWHERE, workers, unproven=assignment)
        return FailedTry(CONNECT if how == UNREACHED else BROKEN, scope, workers)

    def _end_prefill(self, left):
        """Let the prefill alongside decode end; return how it failed."""
        came = next(left.get("Prefill", iter(())), KV)
        if came == LATER:
            return None
        self.is_prefilling = False
        if came == CRASH:
            self.prefill.failed(self.now_s, came)
            came = FailedTry(BROKEN, RetryScope.ANYWHERE, (self.prefill.worker,))
        self.machine.advance(ConcurrentPrefillEnded(came))
        self._do_notifications()
        return None if isinstance(came, PromptComputed) else PrefillFailed(came)

    def of(self, *kinds):
        """Return the steps of some kinds."""
        return [each for each in self.steps if isinstance(each, kinds)]

    def check_nothing_is_held(self):
        """Every share is given back once, and no prompt's KV is kept for a decode that never comes."""
        assert len(self.of(ReleaseWorker, ReleasePrefillWorker)) == len(self.assignments)
        assert not any(each.is_open for each in self.assignments)
        for worker in self.core.pool:
            assert (worker.inflight_requests, worker.inflight_tokens) == (0, 0), worker.name
        assert not any(queue.waiting for queue in self.core.queues.values())
        kept = [each for each in self.of(SendRequest) if each.role is Role.DECODE and each.kv is not None]
        assert self.machine._holds_kv is False
        assert self.machine._source is None
        assert len(self.of(ReleaseKv)) <= len(self.of(SendRequest)) - len(kept) + len(
            self.of(RefusedAtCapacity, Retry)
        )


SCRIPTS = {
    "served": ({}, EndKind.SERVED),
    "complete": ({"SendRequest": [RESPONSE_COMPLETE]}, EndKind.SERVED),
    "crashed before the first token": ({"SendRequest": [CRASH]}, EndKind.SERVED),
    "crashed until retries are exhausted": ({"SendRequest": [CRASH] * 9}, EndKind.FAILED),
    "the client's fault": ({"SendRequest": [FailedTry("upstream_4xx", RetryScope.NOWHERE)]}, EndKind.FAILED),
    "at capacity once": ({"SendRequest": [Problem.AT_CAPACITY]}, EndKind.SERVED),
    "at capacity everywhere": ({"SendRequest": [Problem.AT_CAPACITY] * 9}, EndKind.REFUSED),
    "no connection left": ({"SendRequest": [Problem.SATURATED]}, EndKind.SATURATED),
    "no worker": ({"AcquireWorker": [RefusalReason.NO_WORKER]}, EndKind.REFUSED),
    "continued": ({"RelayStream": [CRASH]}, EndKind.SERVED),
    "at two deaths": ({"RelayStream": [CRASH, CRASH]}, EndKind.SERVED),
    "killed alone": ({"RelayStream": [CRASH, CRASH, KILLED]}, EndKind.FAILED),
    "broken off alone": ({"RelayStream": [CRASH, CRASH, CRASH]}, EndKind.SERVED),
    "left a draining worker": ({"RelayStream": [MOVED]}, EndKind.SERVED),
    "an error, and another serves": ({"SendRequest": [UNPROVEN]}, EndKind.SERVED),
    "an error of each": ({"SendRequest": [UNPROVEN] * 9}, EndKind.FAILED),
    "an error of one": (
        {"SendRequest": [UNPROVEN, FailedTry("upstream_4xx", RetryScope.NOWHERE)]},
        EndKind.FAILED,
    ),
    "too late twice": (
        {"SendRequest": [FailedTry("timeout", RetryScope.ANYWHERE, is_timeout=True)] * 2},
        EndKind.FAILED,
    ),
    "all said": ({"RelayStream": [CRASH], "BuildContinuation": [StreamEnding(b"")]}, EndKind.SERVED),
    "said what cannot continue": (
        {"RelayStream": [CRASH], "BuildContinuation": [Continuation.IMPOSSIBLE]},
        EndKind.FAILED,
    ),
}
SPLIT_SCRIPTS = SCRIPTS | {
    "prefill crashed": ({"Prefill": [CRASH]}, EndKind.SERVED),
    "prefill crashed for good": ({"Prefill": [CRASH] * 9}, EndKind.FAILED),
    "prefill's error, and another serves": ({"Prefill": [UNPROVEN]}, EndKind.SERVED),
    "errors of a prefill and a decode": (
        {"Prefill": [UNPROVEN], "SendRequest": [UNPROVEN, FailedTry("upstream_4xx", RetryScope.NOWHERE)]},
        EndKind.FAILED,
    ),
    "prefill without KV": ({"Prefill": [PromptComputed(None, kv=None)]}, EndKind.SERVED),
    "prefill at capacity": ({"Prefill": [Problem.AT_CAPACITY]}, EndKind.SERVED),
    "decode not reached": ({"SendRequest": [UNREACHED]}, EndKind.SERVED),
    "KV lost": ({"SendRequest": [Problem.KV_LOST]}, EndKind.SERVED),
    "KV distrusted": ({"ConfirmLease": [False]}, EndKind.SERVED),
    "no decode worker": ({"AcquireWorker": [None, RefusalReason.ALL_BUSY]}, EndKind.REFUSED),
    "no decode worker in time": ({"AcquireWorker": [None, RefusalReason.QUEUE_TIMEOUT]}, EndKind.SERVED),
}
MEETING_SCRIPTS = SCRIPTS | {
    "prefill crashed": ({"Prefill": [CRASH]}, EndKind.SERVED),
    "prefill crashed for good": ({"Prefill": [CRASH] * 9}, EndKind.FAILED),
    "prefill at capacity": ({"Prefill": [Problem.AT_CAPACITY]}, EndKind.SERVED),
    "prefill at capacity everywhere": ({"Prefill": [Problem.AT_CAPACITY] * 9}, EndKind.REFUSED),
    "prefill answers behind decode": ({"Prefill": [LATER]}, EndKind.SERVED),
    "prefill never answers": ({"Prefill": [LATER] * 9}, EndKind.SERVED),
    "KV lost": ({"SendRequest": [Problem.KV_LOST]}, EndKind.SERVED),
    "no decode worker": ({"AcquireWorker": [None, RefusalReason.ALL_BUSY]}, EndKind.REFUSED),
    "no decode worker in time": ({"AcquireWorker": [None, RefusalReason.QUEUE_TIMEOUT]}, EndKind.SERVED),
}
