"""The request machine over the router's real core: every end, and a client that leaves at every step."""

from dataclasses import replace

import pytest
from request_driver import (
    CRASH,
    KILLED,
    MEETING_SCRIPTS,
    RESPONSE_COMPLETE,
    SCRIPTS,
    SPLIT_SCRIPTS,
    STREAM,
    UNREACHED,
    Driver,
)

from penstock.api import Role
from penstock.core.kv_transfers import TransferResult
from penstock.router.core.request import BROKEN, MOVED, RequestPlan
from penstock.router.core.request_steps import (
    AcquireWorker,
    AwaitPrefill,
    BuildContinuation,
    ConfirmLease,
    CountTransfer,
    End,
    EndKind,
    Problem,
    QueryOfDeath,
    RefusedAtCapacity,
    RelayStream,
    ReleaseKv,
    ReleaseWorker,
    ResponseStarted,
    Retry,
    SendRequest,
    SendResponse,
    StreamLost,
)
from penstock.router.core.retries import (
    FailedTry,
    RefusalReason,
    RetryScope,
)

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
    asked = len(driver.of(AcquireWorker, SendRequest, ConfirmLease, RelayStream, BuildContinuation, Retry))
    assert asked

    for leave_at in range(asked):
        driver = Driver(is_split=is_split)
        end = driver.run(script, leave_at)
        assert end.kind is EndKind.CLIENT_DISCONNECTED, (name, leave_at)
        driver.check_nothing_is_held()


def test_a_complete_answer_is_delivered_once_and_before_its_worker_is_left():
    """The worker's share is given back even where the client could not be written to."""
    driver = Driver(is_split=False)
    driver.run({"SendRequest": [RESPONSE_COMPLETE]})

    assert [type(each) for each in driver.steps] == [
        AcquireWorker,
        SendRequest,
        SendResponse,
        ReleaseWorker,
        End,
    ]


@pytest.mark.parametrize("name", MEETING_SCRIPTS)
def test_two_that_meet_hold_nothing_at_any_end(name):
    """Prefill and decode are asked at once; each one's share is given back once, whoever fails or leaves, at any step."""
    script, kind = MEETING_SCRIPTS[name]
    driver = Driver(is_split=True, is_concurrent=True)

    assert driver.run(script).kind is kind
    driver.check_nothing_is_held()

    for leave_at in range(
        len(driver.of(AcquireWorker, SendRequest, RelayStream, AwaitPrefill, BuildContinuation, Retry))
    ):
        driver = Driver(is_split=True, is_concurrent=True)
        assert driver.run(script, leave_at).kind is EndKind.CLIENT_DISCONNECTED, (name, leave_at)
        driver.check_nothing_is_held()


def test_kv_is_given_back_where_no_decode_worker_was_asked_for_it():
    """Between prefill and decode, after a decode that was not reached, and never once a worker fetches it."""
    given = {}
    for name, script in {
        "no decode": {"AcquireWorker": [None, RefusalReason.NO_WORKER]},
        "saturated": {"SendRequest": [Problem.SATURATED]},
        "served": {},
        "crashed": {"SendRequest": [FailedTry(BROKEN, RetryScope.NOWHERE)]},
    }.items():
        driver = Driver(is_split=True)
        driver.run(script)
        given[name] = len(driver.of(ReleaseKv))

    assert given == {"no decode": 1, "saturated": 1, "served": 0, "crashed": 0}

    driver = Driver(is_split=True)
    driver.run({}, leave_at=2)  # the third question: choose a decode worker
    assert [type(each) for each in driver.steps[-3:]] == [AcquireWorker, ReleaseKv, End]


def test_a_lost_transfer_tries_another_decode_worker_and_counts_both_ends():
    """The prompt is computed once more; the first decode worker is passed over."""
    driver = Driver(is_split=True)
    driver.run({"SendRequest": [Problem.KV_LOST]})

    decodes = [each.worker for each in driver.assignments if each.role is Role.DECODE]
    assert decodes[0] is not decodes[1]
    assert [each.result for each in driver.of(CountTransfer)] == [TransferResult.LOST]
    assert driver.of(Retry) == [Retry("kv_lost", 0, is_continuation=False)]


def test_a_refusal_for_lack_of_room_costs_no_retry_and_asks_each_worker_once():
    """Then no worker has room."""
    driver = Driver(is_split=False, workers=3)
    end = driver.run({"SendRequest": [Problem.AT_CAPACITY] * 9})

    assert end.kind is EndKind.REFUSED
    assert len({each.worker.name for each in driver.of(RefusedAtCapacity)}) == 3
    assert driver.machine.tries.retries == 0


def test_a_stream_goes_on_elsewhere_with_retries_of_its_own():
    """Retries before the first token do not count against the rest."""
    driver = Driver(is_split=False, workers=4, retries=1)
    end = driver.run({"SendRequest": [CRASH], "RelayStream": [CRASH]})
    assert end.kind is EndKind.SERVED
    assert [each.is_continuation for each in driver.of(Retry)] == [False, True]
    assert driver.machine.continuations == 1


@pytest.mark.parametrize(
    ("is_split", "script", "is_deadly"),
    [
        (False, {"SendRequest": [CRASH, CRASH, KILLED]}, True),
        (False, {"RelayStream": [CRASH, CRASH, KILLED]}, True),
        (True, {"Prefill": [CRASH, CRASH, KILLED]}, True),
        (True, {"RelayStream": [CRASH, CRASH, KILLED]}, True),
        (True, {"Prefill": [CRASH], "SendRequest": [CRASH, KILLED]}, True),
        # Its stream alone was broken off.
        (False, {"SendRequest": [CRASH, CRASH, CRASH]}, False),
        (False, {"RelayStream": [CRASH, CRASH, CRASH]}, False),
        # It was at two deaths, and not alone at either.
        (False, {"SendRequest": [CRASH, KILLED]}, False),
        (True, {"Prefill": [CRASH], "RelayStream": [KILLED]}, False),
        (False, {"SendRequest": [CRASH, UNREACHED, MOVED]}, False),
    ],
)
def test_only_what_kills_alone_is_convicted(is_split, script, is_deadly):
    """At any stage, before its first token or after it, on workers that had answered others."""
    driver = Driver(is_split=is_split, workers=4)
    for worker in driver.core.pool:
        worker.has_ever_answered = worker.has_answered_since_failure = True
    end = driver.run(script)
    assert (end.kind is EndKind.FAILED) is is_deadly
    convicted = driver.of(QueryOfDeath)
    assert [len(each.before) for each in convicted] == [2] * is_deadly
    assert [each.why for each in driver.of(StreamLost)] == ["query_of_death"] * (
        is_deadly and "RelayStream" in script
    )
    driver.check_nothing_is_held()


@pytest.mark.parametrize(("answered", "last_failure_s"), [(False, None), (True, -1.5)])
def test_a_worker_that_breaks_everything_off_says_nothing_of_a_request(answered, last_failure_s):
    """No worker of the role has ever answered, or this one fell before; the request is tried as often as it may."""
    driver = Driver(is_split=False, workers=4)
    for worker in driver.core.pool:
        worker.has_ever_answered, worker.last_failure_after_success_s = answered, last_failure_s
    assert driver.run({"SendRequest": [KILLED] * 3}).kind is EndKind.SERVED
    assert driver.machine.alone_at == ()


def test_a_suspect_that_is_cleared_is_as_any_other():
    """Two more deaths make it a suspect again."""
    driver = Driver(is_split=False, workers=4)
    relay = driver._answer

    def clear_third(step, left):
        if len(driver.of(RelayStream)) == 3:
            driver.machine.clear()
        return relay(step, left)

    driver._answer = clear_third
    assert driver.run({"RelayStream": [CRASH, CRASH, KILLED]}).kind is EndKind.SERVED
    assert driver.of(QueryOfDeath) == []
    assert driver.verdicts[2] == ["first_part_ok", "cleared", "failed"]


def test_a_new_process_has_answered_nothing():
    """What its predecessor did is forgotten."""
    driver = Driver(is_split=False, workers=1)
    driver.run({"SendRequest": [RESPONSE_COMPLETE]})
    (worker,) = driver.core.pool
    assert worker.has_answered_since_failure
    driver.core.set_workers([replace(worker.spec, incarnation="next")], 0.0)
    assert (worker.has_answered_since_failure, worker.last_failure_after_success_s) == (False, None)


def test_a_stream_that_leaves_a_draining_worker_takes_no_retry_and_counts_no_death():
    """It continues elsewhere though no retry is allowed, and is charged to no worker; two deaths may still follow."""
    driver = Driver(is_split=False, workers=4, retries=0)
    assert not driver.machine.may_move
    end = driver.run({"RelayStream": [MOVED]})
    assert end.kind is EndKind.SERVED
    assert driver.of(Retry) == [Retry(MOVED, 0, is_continuation=True)]
    first, second = (each.worker for each in driver.assignments)
    assert first is not second
    machine = driver.machine
    assert (machine.alone_at, machine.continuations, machine.moves, first.failures) == ((), 0, 1, 0)
    assert driver.machine.may_move
    assert not Driver(is_split=False, most=0).machine.may_move


@pytest.mark.parametrize(
    ("most", "began", "failures", "why"),
    [
        (0, ResponseStarted(is_stream=True), [CRASH], "request"),
        (1, STREAM, [FailedTry("upstream_timeout_idle", RetryScope.ANYWHERE)] * 2, "continuations"),
        (3, STREAM, [FailedTry("upstream_timeout_total", RetryScope.NOWHERE)], "request_time"),
        (3, STREAM, [FailedTry("upstream_4xx", RetryScope.NOWHERE)], "worker_refusal"),
        (
            1,
            STREAM,
            [FailedTry("upstream_timeout_idle", RetryScope.ANYWHERE, is_timeout=True)] * 2,
            "continuations",
        ),
    ],
)
def test_a_stream_that_cannot_go_on_says_why(most, began, failures, why):
    """Each under its own word: of what cannot be continued, or of the limit that ended it."""
    driver = Driver(is_split=False, most=most)
    end = driver.run({"SendRequest": [began] * 3, "RelayStream": failures})

    assert end.kind is EndKind.FAILED
    assert [each.why for each in driver.of(StreamLost)] == [why]


def test_after_its_deadline_nothing_is_tried_again():
    """The deadline may be moved while the request is under way."""
    driver = Driver(is_split=False)
    driver.machine.deadline_s = 0.0
    assert driver.run({"SendRequest": [CRASH]}).kind is EndKind.FAILED
    assert not driver.of(Retry)


def test_a_prompt_waited_for_longer_than_its_lease_is_computed_again():
    """Its blocks may be gone; they are given back, and no decode worker reads them."""
    driver = Driver(is_split=True)
    choose = driver._acquire

    def slow(step):
        got = choose(step)
        if step.role is Role.DECODE and len(driver.of(AcquireWorker)) == 2:
            got.queued_s = 29.0
        return got

    driver._acquire = slow
    assert driver.run({}).kind is EndKind.SERVED
    assert [each.reason for each in driver.of(Retry)] == ["lease_expired"]
    assert len(driver.of(ReleaseKv)) == 1


@pytest.mark.parametrize(
    ("options", "step", "role"),
    [
        ({"is_split": False}, "SendRequest", Role.AGGREGATED),
        ({"is_split": True}, "Prefill", Role.PREFILL),
        ({"is_split": True}, "SendRequest", Role.DECODE),
        ({"is_split": True, "is_concurrent": True}, "Prefill", Role.PREFILL),
        ({"is_split": True, "is_concurrent": True}, "SendRequest", Role.DECODE),
    ],
)
def test_a_worker_that_is_chosen_again_without_room_ends_the_request(options, step, role):
    """By then each of the role has been asked; the end names it."""
    driver = Driver(**options, workers=1)
    driver.core.refused_at_capacity = lambda *_: None

    assert driver.run({step: [Problem.AT_CAPACITY] * 9}) == End(EndKind.ALL_BUSY, role=role)
    assert len(driver.of(RefusedAtCapacity)) == 2
    driver.check_nothing_is_held()


def test_decode_of_another_version_computes_the_prompt_itself():
    """No KV goes between the two; the prefill worker's is given back."""
    driver = Driver(is_split=True, workers=1)
    for worker in driver.core.pool:
        worker.version = worker.name

    assert driver.run({}).kind is EndKind.SERVED
    assert [(each.role, each.kv is not None) for each in driver.of(SendRequest)] == [
        (Role.PREFILL, False),
        (Role.DECODE, False),
    ]
    assert [each.result for each in driver.of(CountTransfer)] == [TransferResult.NONE]
    assert len(driver.of(ReleaseKv)) == 1
    driver.check_nothing_is_held()


REFUSED = {
    "its wait in a queue is over": ({"AcquireWorker": [None, RefusalReason.QUEUE_TIMEOUT]}, EndKind.REFUSED),
    "all are busy": ({"AcquireWorker": [None, RefusalReason.ALL_BUSY]}, EndKind.REFUSED),
    "no connection is left": ({"SendRequest": [STREAM, Problem.SATURATED]}, EndKind.SATURATED),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("broken", [CRASH, MOVED])
def test_what_refuses_a_new_request_makes_a_begun_stream_wait(case, broken):
    """It asks again; the same answers end a request of which the client has nothing."""
    answers, kind = REFUSED[case]
    driver = Driver(is_split=False)
    assert driver.run({"RelayStream": [broken], **answers}).kind is EndKind.SERVED
    assert driver.of(StreamLost) == []
    assert driver.machine.continuations == (broken == CRASH)
    driver.check_nothing_is_held()

    driver = Driver(is_split=False)
    assert driver.run({name: given[1:] for name, given in answers.items()}).kind is kind


def test_a_begun_stream_is_retried_outside_of_the_budget():
    """However many broke before it, and though no retry is allowed at all."""
    driver = Driver(is_split=False, workers=4, retries=0)
    while driver.rules.budget.take(0.0):
        pass
    assert driver.run({"RelayStream": [CRASH]}).kind is EndKind.SERVED
    assert driver.run_again({"SendRequest": [CRASH]}).kind is EndKind.FAILED


@pytest.mark.parametrize(("waits_s", "why"), [(59.0, []), (60.0, ["worker_wait"])])
def test_a_begun_stream_waits_for_a_worker_for_its_own_time_alone(waits_s, why):
    """Workers that cannot be reached are not continuations; after the wait that is configured the stream ends."""
    driver = Driver(is_split=False, wait_s=60.0)
    times = iter([0.0, 0.0])
    driver.machine._now_s = lambda: next(times, waits_s)
    end = driver.run({"RelayStream": [CRASH], "SendRequest": [STREAM, *[UNREACHED] * 7]})

    assert end.kind is (EndKind.FAILED if why else EndKind.SERVED)
    assert [each.why for each in driver.of(StreamLost)] == why
    assert driver.machine.continuations == 1
    driver.check_nothing_is_held()


@pytest.mark.parametrize(
    "options", [{"is_split": False}, {"is_split": True}, {"is_split": True, "is_concurrent": True}]
)
@pytest.mark.parametrize("broken", [CRASH, MOVED])
def test_the_rest_of_a_stream_waits_for_room_as_long_as_its_time_lasts(options, broken):
    """Each worker refuses it, twice; a request without a beginning is refused then, and a stream without time is lost."""

    def made():
        driver = Driver(**options)
        driver.core.refused_at_capacity = lambda *_: None
        return driver

    full = [Problem.AT_CAPACITY] * 6
    driver = made()
    assert driver.run({"RelayStream": [broken], "SendRequest": [STREAM, *full]}).kind is EndKind.SERVED
    assert len(driver.of(RefusedAtCapacity)) == 6
    assert driver.of(StreamLost) == []
    driver.check_nothing_is_held()

    assert made().run({"SendRequest": full}).kind is EndKind.ALL_BUSY
    driver = made()
    driver.machine.deadline_s = 1.0
    now_s = iter([0.0] * 9)
    driver.machine._now_s = lambda: next(now_s, 1.0)
    driver.run({"RelayStream": [MOVED], "SendRequest": [STREAM, *full * 2]})
    assert [each.why for each in driver.of(StreamLost)] == ["request_time"]
    driver.check_nothing_is_held()


@pytest.mark.parametrize(
    "script", [{"RelayStream": [CRASH]}, {"RelayStream": [MOVED]}, {"SendRequest": [CRASH]}]
)
def test_what_decode_alone_answers_is_admitted_once(script):
    """Neither a retry nor the rest of a stream is a new arrival, which thresholds or its tier may turn away."""
    driver = Driver(is_split=True)
    driver.machine._plan = RequestPlan(Role.PREFILL, is_split=False, max_continuations=3)
    assert driver.run(script).kind is EndKind.SERVED
    assert [each.is_admission for each in driver.of(AcquireWorker)] == [True, False]


def test_what_is_left_of_the_time_is_told_by_the_clock():
    """A retry and a move need time before the deadline."""
    driver = Driver(is_split=False)
    driver.machine.deadline_s = 5.0
    driver.machine._now_s = lambda: 5.0
    assert driver.run({"SendRequest": [CRASH]}).kind is EndKind.FAILED

    driver = Driver(is_split=False)
    driver.machine.deadline_s = 5.0
    driver.machine._now_s = lambda: 4.0
    assert driver.run({"SendRequest": [CRASH], "RelayStream": [MOVED]}).kind is EndKind.SERVED
    assert driver.machine.may_move
    driver.machine._now_s = lambda: 5.0
    assert not driver.machine.may_move
