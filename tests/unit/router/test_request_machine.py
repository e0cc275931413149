"""The request machine over the router's real core: every end, and a client that leaves at every step."""

from dataclasses import replace
from itertools import count

import pytest

from penstock.api import Role, RouterConfig
from penstock.core.kv_transfers import TransferResult
from penstock.router.core.build import SPLIT, TOGETHER, build_router
from penstock.router.core.request import BROKEN, CONNECT, MOVED, RequestMachine, RequestPlan
from penstock.router.core.request_steps import (
    COMPLETE,
    Began,
    Choose,
    Computed,
    ComputedBeside,
    Confirm,
    CountTransfer,
    Deadly,
    Deliver,
    End,
    EndKind,
    GiveBack,
    LeavePrefill,
    Lost,
    PrefillFailed,
    Problem,
    PromptComputed,
    ReadRest,
    Relay,
    Release,
    Rest,
    Retry,
    Send,
    Settle,
    TurnedAway,
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

KV = PromptComputed(0, has_kv=True)
STREAM = Began(is_stream=True, may_go_on=True)
DONE = None
CRASH = "crash"
"""The worker breaks off."""
LATER = "later"
"""The prefill goes on, until the next step that may see its end."""
UNREACHED = "unreached"
"""No connection to the worker."""


class Driver:
    """Carries steps out on a core; a script answers those that ask, by their type's name, in turn."""

    def __init__(self, *, is_split, is_concurrent=False, workers=3, most=3, retries=3):
        roles = SPLIT if is_split else TOGETHER
        config = RouterConfig.model_validate({"retries": {"maxPerRequest": retries}})
        self.core = build_router(config, roles, is_supervised=True)
        specs = [
            WorkerSpec(f"{role}-{n}", role, "", supervised=True) for role in roles for n in range(workers)
        ]
        self.core.set_workers(specs, 0.0)
        self.rules = RetryRules(self.core.pool, config.retries, 0.0)
        plan = RequestPlan(self.core.entry, is_split, is_concurrent, lease_s=30.0, max_continuations=most)
        self.is_concurrent, self.is_prefilling, self.prefill = is_concurrent, False, None
        self.machine = RequestMachine(plan, self.rules, RequestTries(), lambda: 0.0)
        self.steps = []
        self.assignments = []
        self.item = "request"

    def _choose(self, step):
        arrival = Arrival((), 100, self.machine.tries.avoid)
        (effect,) = self.core.acquire(self.item, step.role, arrival, 0.0, again=step.again)
        if not isinstance(effect, Assignment):
            return effect.reason
        self.assignments.append(effect)
        if self.is_concurrent and step.role is Role.PREFILL:
            self.prefill = effect
        return effect

    def _do(self, newest):
        """Carry out the steps before the newest; return that one."""
        self._do_told()
        self.steps.append(newest)
        return newest

    def _do_told(self):
        for step in self.machine.steps:
            self.steps.append(step)
            if isinstance(step, Release):
                self.core.release(self.assignments[-1], 0.0)
            elif isinstance(step, Computed):
                self.core.prefilled(self.assignments[-1], 0.0, cached_tokens=step.cached_tokens)
            elif isinstance(step, ComputedBeside):
                self.core.prefilled(self.prefill, 0.0, cached_tokens=step.cached_tokens)
            elif isinstance(step, LeavePrefill):
                self.core.release(self.prefill, 0.0)
            elif isinstance(step, TurnedAway):
                self.core.refused_at_capacity(step.worker, 0.0)
        self.machine.steps.clear()

    def run(self, script, leave_at=None):
        """Return the end; the client leaves instead of the ``leave_at``-th answer."""
        left = {name: iter(answers) for name, answers in script.items()}
        step = self._do(self.machine.answer(None))
        for number in count():
            if isinstance(step, End):
                return step
            if number == leave_at:
                return self._do(self.machine.leave())
            step = self._do(self.machine.answer(self._answer(step, left)))
        raise AssertionError

    def _answer(self, step, left):
        name = type(step).__name__
        if isinstance(step, Choose):
            given = next(left.get(name, iter(())), None)
            return self._choose(step) if given is None else given
        if isinstance(step, Send) and step.role is Role.PREFILL:
            name = "Prefill"
            if self.is_concurrent:
                self.is_prefilling = True
                return None
        if isinstance(step, Send | Settle) and self.is_prefilling:
            failed = self._end_prefill(left)
            if isinstance(step, Settle) or failed is not None:
                return failed
        defaults = {"Prefill": KV, "Send": STREAM, "Confirm": True, "ReadRest": Rest.READY}
        given = next(left.get(name, iter(())), defaults.get(name))
        if given == MOVED:
            return FailedTry(MOVED, RetryScope.ANYWHERE, (self.assignments[-1].worker,))
        if given in (CRASH, UNREACHED):
            assignment = self.assignments[-1]
            assignment.failed(0.0, given)
            return FailedTry(BROKEN if given == CRASH else CONNECT, RetryScope.ANYWHERE, (assignment.worker,))
        return given

    def _end_prefill(self, left):
        """Let the prefill beside decode end; return how it failed."""
        came = next(left.get("Prefill", iter(())), KV)
        if came == LATER:
            return None
        self.is_prefilling = False
        if came == CRASH:
            self.prefill.failed(0.0, came)
            came = FailedTry(BROKEN, RetryScope.ANYWHERE, (self.prefill.worker,))
        self.machine.prefill_ended(came)
        self._do_told()
        return None if isinstance(came, PromptComputed) else PrefillFailed(came)

    def of(self, *kinds):
        """Return the steps of some kinds."""
        return [each for each in self.steps if isinstance(each, kinds)]

    def check_nothing_is_held(self):
        """Every share is given back once, and no prompt's KV is kept for a decode that never comes."""
        assert len(self.of(Release, LeavePrefill)) == len(self.assignments)
        assert not any(each.is_open for each in self.assignments)
        for worker in self.core.pool:
            assert (worker.inflight_requests, worker.inflight_tokens) == (0, 0), worker.name
        assert not any(queue.waiting for queue in self.core.queues.values())
        kept = [each for each in self.of(Send) if each.role is Role.DECODE and each.reads_kv]
        assert self.machine._is_kept is False
        assert self.machine._source is None
        assert len(self.of(GiveBack)) <= len(self.of(Send)) - len(kept) + len(self.of(TurnedAway, Retry))


SCRIPTS = {
    "served": ({}, EndKind.SERVED),
    "complete": ({"Send": [COMPLETE]}, EndKind.SERVED),
    "crashed before the first token": ({"Send": [CRASH]}, EndKind.SERVED),
    "crashed until retries are exhausted": ({"Send": [CRASH] * 9}, EndKind.FAILED),
    "the client's fault": ({"Send": [FailedTry("upstream_4xx", RetryScope.NOWHERE)]}, EndKind.FAILED),
    "at capacity once": ({"Send": [Problem.AT_CAPACITY]}, EndKind.SERVED),
    "at capacity everywhere": ({"Send": [Problem.AT_CAPACITY] * 9}, EndKind.REFUSED),
    "no connection left": ({"Send": [Problem.SATURATED]}, EndKind.SATURATED),
    "no worker": ({"Choose": [RefusalReason.NO_WORKER]}, EndKind.REFUSED),
    "continued": ({"Relay": [CRASH]}, EndKind.SERVED),
    "died of twice": ({"Relay": [CRASH, CRASH]}, EndKind.FAILED),
    "left a draining worker": ({"Relay": [MOVED]}, EndKind.SERVED),
    "all said": ({"Relay": [CRASH], "ReadRest": [Rest.NOTHING]}, EndKind.SERVED),
    "said what cannot go on": ({"Relay": [CRASH], "ReadRest": [Rest.UNKNOWN]}, EndKind.FAILED),
}
SPLIT_SCRIPTS = SCRIPTS | {
    "prefill crashed": ({"Prefill": [CRASH]}, EndKind.SERVED),
    "prefill crashed for good": ({"Prefill": [CRASH] * 9}, EndKind.FAILED),
    "prefill without KV": ({"Prefill": [PromptComputed(None, has_kv=False)]}, EndKind.SERVED),
    "prefill at capacity": ({"Prefill": [Problem.AT_CAPACITY]}, EndKind.SERVED),
    "decode not reached": ({"Send": [UNREACHED]}, EndKind.SERVED),
    "KV lost": ({"Send": [Problem.KV_LOST]}, EndKind.SERVED),
    "KV distrusted": ({"Confirm": [False]}, EndKind.SERVED),
    "no decode worker": ({"Choose": [None, RefusalReason.ALL_BUSY]}, EndKind.REFUSED),
    "no decode worker in time": ({"Choose": [None, RefusalReason.QUEUE_TIMEOUT]}, EndKind.SERVED),
}
MEETING_SCRIPTS = SCRIPTS | {
    "prefill crashed": ({"Prefill": [CRASH]}, EndKind.SERVED),
    "prefill crashed for good": ({"Prefill": [CRASH] * 9}, EndKind.FAILED),
    "prefill at capacity": ({"Prefill": [Problem.AT_CAPACITY]}, EndKind.SERVED),
    "prefill at capacity everywhere": ({"Prefill": [Problem.AT_CAPACITY] * 9}, EndKind.REFUSED),
    "prefill answers behind decode": ({"Prefill": [LATER]}, EndKind.SERVED),
    "prefill never answers": ({"Prefill": [LATER] * 9}, EndKind.SERVED),
    "KV lost": ({"Send": [Problem.KV_LOST]}, EndKind.SERVED),
    "no decode worker": ({"Choose": [None, RefusalReason.ALL_BUSY]}, EndKind.REFUSED),
    "no decode worker in time": ({"Choose": [None, RefusalReason.QUEUE_TIMEOUT]}, EndKind.SERVED),
}
CASES = [(False, name) for name in SCRIPTS] + [(True, name) for name in SPLIT_SCRIPTS]


@pytest.mark.parametrize(("is_split", "name"), CASES)
def test_every_end_holds_nothing(is_split, name):
    """Whatever happens, the request ends as it should, and neither a worker's share nor KV is left behind."""
    script, kind = SPLIT_SCRIPTS[name]
    driver = Driver(is_split=is_split)

    end = driver.run(script)

    assert end.kind is kind
    assert driver.steps[-1] is end
    driver.check_nothing_is_held()


@pytest.mark.parametrize(("is_split", "name"), CASES)
def test_a_client_that_leaves_at_any_step_leaves_nothing_behind(is_split, name):
    """In place of each answer in turn: shares, load counters and KV are given back, and nothing is asked any more."""
    script, _ = SPLIT_SCRIPTS[name]
    driver = Driver(is_split=is_split)
    driver.run(script)
    asked = len(driver.of(Choose, Send, Confirm, Relay, ReadRest, Retry))
    assert asked

    for leave_at in range(asked):
        driver = Driver(is_split=is_split)
        end = driver.run(script, leave_at)
        assert end.kind is EndKind.LEFT, (name, leave_at)
        driver.check_nothing_is_held()


def test_a_complete_answer_is_delivered_once_and_before_its_worker_is_left():
    """The worker's share is given back even where the client could not be written to."""
    driver = Driver(is_split=False)
    driver.run({"Send": [COMPLETE]})

    assert [type(each) for each in driver.steps] == [Choose, Send, Deliver, Release, End]


@pytest.mark.parametrize("name", MEETING_SCRIPTS)
def test_two_that_meet_hold_nothing_at_any_end(name):
    """Prefill and decode are asked at once; each one's share is given back once, whoever fails or leaves, at any step."""
    script, kind = MEETING_SCRIPTS[name]
    driver = Driver(is_split=True, is_concurrent=True)

    assert driver.run(script).kind is kind
    driver.check_nothing_is_held()

    for leave_at in range(len(driver.of(Choose, Send, Relay, Settle, ReadRest, Retry))):
        driver = Driver(is_split=True, is_concurrent=True)
        assert driver.run(script, leave_at).kind is EndKind.LEFT, (name, leave_at)
        driver.check_nothing_is_held()


def test_kv_is_given_back_where_no_decode_worker_was_asked_for_it():
    """Between prefill and decode, after a decode that was not reached, and never once a worker fetches it."""
    given = {}
    for name, script in {
        "no decode": {"Choose": [None, RefusalReason.NO_WORKER]},
        "saturated": {"Send": [Problem.SATURATED]},
        "served": {},
        "crashed": {"Send": [FailedTry(BROKEN, RetryScope.NOWHERE)]},
    }.items():
        driver = Driver(is_split=True)
        driver.run(script)
        given[name] = len(driver.of(GiveBack))

    assert given == {"no decode": 1, "saturated": 1, "served": 0, "crashed": 0}

    driver = Driver(is_split=True)
    driver.run({}, leave_at=2)  # the third question: choose a decode worker
    assert [type(each) for each in driver.steps[-3:]] == [Choose, GiveBack, End]


def test_a_lost_transfer_tries_another_decode_worker_and_counts_both_ends():
    """The prompt is computed once more; the first decode worker is passed over."""
    driver = Driver(is_split=True)
    driver.run({"Send": [Problem.KV_LOST]})

    decodes = [each.worker for each in driver.assignments if each.role is Role.DECODE]
    assert decodes[0] is not decodes[1]
    assert [each.result for each in driver.of(CountTransfer)] == [TransferResult.LOST]
    assert driver.of(Retry) == [Retry("kv_lost", 0, is_rest=False)]


def test_a_refusal_for_lack_of_room_costs_no_retry_and_asks_each_worker_once():
    """Then no worker has room."""
    driver = Driver(is_split=False, workers=3)
    end = driver.run({"Send": [Problem.AT_CAPACITY] * 9})

    assert end.kind in {EndKind.ALL_BUSY, EndKind.REFUSED}
    assert len({each.worker.name for each in driver.of(TurnedAway)}) == 3
    assert driver.machine.tries.retries == 0


def test_a_stream_goes_on_elsewhere_with_retries_of_its_own_and_ends_with_the_second_death():
    """Retries before the first token do not count against the rest; what killed two engines gets no third."""
    driver = Driver(is_split=False, workers=4, retries=1)
    end = driver.run({"Send": [CRASH], "Relay": [CRASH]})
    assert end.kind is EndKind.SERVED
    assert [each.is_rest for each in driver.of(Retry)] == [False, True]
    assert driver.machine.continuations == 1

    driver = Driver(is_split=False, workers=4)
    end = driver.run({"Relay": [CRASH, CRASH]})
    assert (end.kind, end.failure.reason) == (EndKind.FAILED, BROKEN)
    assert driver.of(Lost) == [Lost("deaths", BROKEN)]


@pytest.mark.parametrize(
    ("is_split", "script", "is_deadly"),
    [
        (False, {"Send": [CRASH, CRASH]}, True),
        (True, {"Prefill": [CRASH, CRASH]}, True),
        (True, {"Prefill": [CRASH], "Send": [CRASH]}, True),
        (True, {"Prefill": [CRASH], "Relay": [CRASH]}, True),
        (False, {"Send": [CRASH, UNREACHED]}, False),
        (False, {"Send": [CRASH, MOVED]}, False),
    ],
)
def test_what_kills_two_workers_at_any_stage_gets_no_third(is_split, script, is_deadly):
    """Before its first token, too: workers that had answered others, and broke off at it."""
    driver = Driver(is_split=is_split, workers=4)
    for worker in driver.core.pool:
        worker.has_answered = True
    end = driver.run(script)
    assert (end.kind is EndKind.FAILED) is is_deadly
    assert driver.of(Deadly) == [Deadly(2)] * is_deadly
    driver.check_nothing_is_held()


@pytest.mark.parametrize(("answered", "fell_s"), [(False, None), (False, -1.5)])
def test_a_worker_that_breaks_everything_off_says_nothing_of_a_request(answered, fell_s):
    """It has answered nothing yet, or fell before; the request is tried as often as it may."""
    driver = Driver(is_split=False, workers=4)
    for worker in driver.core.pool:
        worker.has_answered, worker.fell_s = answered, fell_s
    assert driver.run({"Send": [CRASH] * 3}).kind is EndKind.SERVED
    assert driver.of(Deadly) == []


def test_a_new_process_has_answered_nothing():
    """What its predecessor did is forgotten."""
    driver = Driver(is_split=False, workers=1)
    driver.run({"Send": [COMPLETE]})
    (worker,) = driver.core.pool
    assert worker.has_answered
    driver.core.set_workers([replace(worker.spec, incarnation="next")], 0.0)
    assert (worker.has_answered, worker.fell_s) == (False, None)


def test_a_stream_that_leaves_a_draining_worker_takes_no_retry_and_counts_no_death():
    """It goes on elsewhere though no retry is allowed, and is charged to no worker; two deaths may still follow."""
    driver = Driver(is_split=False, workers=4, retries=0)
    assert not driver.machine.may_move
    end = driver.run({"Relay": [MOVED]})
    assert end.kind is EndKind.SERVED
    assert driver.of(Retry) == [Retry(MOVED, 0, is_rest=True)]
    first, second = (each.worker for each in driver.assignments)
    assert first is not second
    assert (driver.machine.deaths, driver.machine.continuations, first.failures) == (0, 1, 0)
    assert driver.machine.may_move
    assert not Driver(is_split=False, most=0).machine.may_move


@pytest.mark.parametrize(
    ("most", "began", "failures", "why"),
    [
        (0, Began(is_stream=True), [CRASH], "request"),
        (1, STREAM, [FailedTry("upstream_timeout_idle", RetryScope.ANYWHERE)] * 2, "limit"),
        (3, STREAM, [FailedTry("upstream_timeout_total", RetryScope.NOWHERE)], "limit"),
    ],
)
def test_a_stream_that_cannot_go_on_says_why(most, began, failures, why):
    """Each under its own word."""
    driver = Driver(is_split=False, most=most)
    end = driver.run({"Send": [began] * 3, "Relay": failures})

    assert end.kind is EndKind.FAILED
    assert [each.why for each in driver.of(Lost)] == [why]


def test_after_its_deadline_nothing_is_tried_again():
    """The deadline may be moved while the request is under way."""
    driver = Driver(is_split=False)
    driver.machine.deadline_s = 0.0
    assert driver.run({"Send": [CRASH]}).kind is EndKind.FAILED
    assert not driver.of(Retry)


def test_a_prompt_waited_for_longer_than_its_lease_is_computed_again():
    """Its blocks may be gone; they are given back, and no decode worker reads them."""
    driver = Driver(is_split=True)
    choose = driver._choose

    def slow(step):
        got = choose(step)
        if step.role is Role.DECODE and len(driver.of(Choose)) == 2:
            got.queued_s = 29.0
        return got

    driver._choose = slow
    assert driver.run({}).kind is EndKind.SERVED
    assert [each.reason for each in driver.of(Retry)] == ["lease_expired"]
    assert len(driver.of(GiveBack)) == 1
