"""Where requests are late and the model sees no reason, one replica more is tried, and believed only if it helps."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sla_load import ADAPTIVE, NO_LOAD, SERVED, decided_after, pull_of, step_of

from penstock.api import Role
from penstock_planner.decide.decision import Action, Reason
from penstock_planner.decide.demand.observation import PoolCounts
from penstock_planner.decide.objective.shadow_fleets import ENOUGH, HOLDS_S
from penstock_planner.decide.objective.trial import Lateness, Trial
from penstock_planner.decide.policies.adaptive.memory import AdaptiveMemory
from penstock_planner.decide.state import PlannerState

P, D = Role.PREFILL, Role.DECODE
_after = partial(decided_after, config=ADAPTIVE)

GOOD = {**SERVED, "prefill": 2, "decode": 1}

LATE = {
    **GOOD,
    "ttft_sum_s": 0.8 * 9.0,
    "ttft_late": 0.8,
    "waiting": 7.0,
    "waiting_tokens": 14_000.0,
    "oldest_wait_s": 9.0,
}
"""A TTFT of 9 s, seven waiting and one of two workers idle: nothing that a fluid explains."""


def _warm():
    """Return the state after two minutes of that, in which the workers' throughput was seen."""
    _, state = _after(120, **GOOD)
    return state


def _grown(seconds, state, *, start_s=0, config=ADAPTIVE, **load):
    """Decide until a role grows; return the decision by role, the state and the time; None: none did."""
    for at_s in range(start_s, start_s + seconds, 5):
        found, state = decided_after(5, state, start_s=at_s, config=config, **load)
        if any(each.action is Action.UP for each in found.values()):
            return found, state, at_s + 5
    return None, state, start_s + seconds


LONG = {**LATE, "dispatched_late": 0.8}
"""The same, and all of those are late even from their dispatch on."""


def _aggregated(at_s, **load):
    """Return a pull whose workers compute prompts and answers."""
    return replace(pull_of(at_s, **load), pools={Role.AGGREGATED: PoolCounts(2)}, queue=None)


def test_prompts_that_are_late_by_themselves_grow_nothing():
    """No fleet would have them in time."""
    assert _grown(24 * 60, _warm(), start_s=120, **LONG)[0] is None
    assert _grown(24 * 60, _warm(), start_s=120, **{**LONG, "dispatched_late": None})[0] is not None


def test_late_behind_decode_is_not_late_by_itself():
    """The same requests wait in full decode workers: one more of those is tried."""
    found, _, _ = _grown(24 * 60, _warm(), start_s=120, **LONG, inside=3.0)
    assert (found[D].action, found[D].reason) == (Action.UP, Reason.SERVED_LATE)


def test_an_aggregated_worker_is_not_late_by_itself():
    """What came late from its dispatch on waited there behind other prompts and answers."""
    found, _, _ = _grown(24 * 60, PlannerState(), pull=_aggregated, **LONG)
    assert found[Role.AGGREGATED].action is Action.UP


def test_late_requests_that_nothing_explains_grow_the_role_they_waited_for():
    """24 minutes with a TTFT of 9 s: prefill is tried with one more, and says why, instead of "supply matches demand"."""
    found, _, at_s = _grown(24 * 60, _warm(), start_s=120, **LATE)
    assert at_s < 10 * 60
    prefill = found[P]
    assert (prefill.action, prefill.reason, prefill.desired) == (Action.UP, Reason.SERVED_LATE, 3)
    assert (
        "missed TTFT or ITL for reasons the model does not explain (allowed 1.0%); adding one replica on trial"
        in prefill.sentence
    )
    assert found[D].action is Action.HOLD
    assert step_of(prefill, "served").inputs["late_unexplained"] > 0.3


def test_nothing_is_tried_where_what_is_late_is_within_the_share_allowed():
    """A request in two hundred late: the objective allows it."""
    calm = {**GOOD, "ttft_late": 0.004}
    found, _, _ = _grown(24 * 60, _warm(), start_s=120, **calm)
    assert found is None


def test_nothing_is_tried_once_the_late_requests_are_over():
    """A burst was late while the budget was in use; in the calm after it GPUs come free, and one more would seem to help."""
    full = replace(ADAPTIVE, max_gpu_budget=3)
    _, state = decided_after(600, _warm(), start_s=120, config=full, **LATE)
    none = {**NO_LOAD, "prefill": 2, "decode": 1}
    _, calm = decided_after(90, state, start_s=720, config=full, **none)
    assert _grown(120, calm, start_s=810, **none)[0] is None
    assert _grown(120, state, start_s=720, **LATE)[0] is not None


def test_what_waits_in_decode_workers_is_tried_with_decode():
    """The same first tokens, while requests wait in the decode workers: prefill would not help."""
    state = _warm()
    for start in range(120, 1560, 5):
        found, state = _after(5, state, start_s=start, inside=3.0, **LATE)
        if found[D].reason is Reason.SERVED_LATE:
            break
    assert found[D].action is Action.UP
    assert found[P].reason is not Reason.SERVED_LATE


def test_gaps_between_tokens_that_are_late_are_tried_with_decode():
    """A tenth of them above the ITL in time, every first token in time: one decode replica more, and no prefill replica."""
    config = replace(ADAPTIVE, itl_slo_s=0.05)
    slow = {**GOOD, "itl_count": 80.0, "itl_late": 8.0}
    found, state, at_s = _grown(24 * 60, _warm(), start_s=120, config=config, **slow)
    decode = found[D]
    assert (decode.action, decode.reason, decode.desired) == (Action.UP, Reason.SERVED_LATE, 2)
    assert step_of(decode, "served").inputs["late_unexplained"] > 0.03
    assert found[P].action is Action.HOLD
    more = {**slow, "decode": 2}
    found, state, _ = _grown(int(HOLDS_S) - 60, state, start_s=at_s, config=config, **more)
    assert found is None, "a third does not help where the second did not"
    assert AdaptiveMemory.read(state.learned).trials[D].outcome is False


def test_gaps_whose_lateness_is_not_known_are_no_reason():
    """A source without a histogram of gaps, and a few late ones that the objective allows."""
    for late in (None, 0.4):
        found, _, _ = _grown(24 * 60, _warm(), start_s=120, **{**GOOD, "itl_count": 80.0, "itl_late": late})
        assert found is None


def test_a_replica_that_does_not_help_is_not_asked_for_again_within_the_hour():
    """Three serve as late as two did: no fourth for an hour, and the third may go as demand allows."""
    _, state, at_s = _grown(24 * 60, _warm(), start_s=120, **LATE)
    more = {**LATE, "prefill": 3}
    found, state, _ = _grown(int(HOLDS_S) - 60, state, start_s=at_s, **more)
    assert found is None
    assert AdaptiveMemory.read(state.learned).trials[P].outcome is False


def test_a_replica_that_helps_is_kept_for_an_hour_though_the_model_has_no_use_for_it():
    """With three nothing is late: none goes for half an hour, and one does in the second hour."""
    _, state, at_s = _grown(24 * 60, _warm(), start_s=120, **LATE)
    good = {**GOOD, "prefill": 3}
    downs = []
    for start in range(at_s, at_s + 9000, 5):
        found, state = _after(5, state, start_s=start, **good)
        if found[P].action is Action.DOWN:
            downs.append(start - at_s)
    assert 1800 < min(downs) < 7200


def test_a_tried_replica_goes_to_a_role_that_the_budget_holds_back():
    """Three prefill workers, of which one was tried and kept; decode, one of one, needs a second and no GPU is free."""
    full = replace(ADAPTIVE, max_gpu_budget=4)
    _, state, at_s = _grown(24 * 60, _warm(), start_s=120, config=full, **LATE)
    good = {**GOOD, "prefill": 3}
    calm, state = decided_after(600, state, start_s=at_s, config=full, **good)
    assert (calm[P].desired, AdaptiveMemory.read(state.learned).trials[P].outcome) == (3, True)
    for start_s in range(at_s + 600, at_s + 700, 5):
        found, state = decided_after(5, state, start_s=start_s, config=full, **good, kv=0.95)
        if found[P].action is Action.DOWN:
            break
    assert found[P].desired == 2
    assert found[P].sentence.endswith("; decode lacks GPUs, and one of these replicas is only on trial")
    assert (found[D].reason, step_of(found[D], "rebalance").outcome) == (
        Reason.GPU_BUDGET,
        "waits: prefill releases one replica for it",
    )


def _watched(trial, seconds, *, ready, starting=0, late=0.0, waits_s=0.0, first=10.0):
    for _ in range(int(seconds / 10)):
        trial = trial.followed(PoolCounts(ready, starting), Lateness(10.0, first, late, waits_s), 0.01)
    return trial


def test_late_requests_of_a_smaller_fleet_are_no_reason_for_one_more():
    """One worker serves late while two start: once they are ready it takes a hundred requests of theirs to want a fourth."""
    late = _watched(Trial(), 300, ready=1, starting=2, late=5.0)
    assert late.is_late(0.01)
    grown = _watched(late, 10, ready=3, late=5.0)
    assert (grown.is_late(0.01), grown.tried) == (False, 0)
    assert _watched(grown, 200, ready=3, late=5.0).is_late(0.01)


def test_requests_that_waited_before_a_worker_was_ready_say_nothing_of_it():
    """One has waited for 60 s half a minute after the second worker is ready: what is late by then came to the first alone."""
    late = _watched(Trial(), 300, ready=1, starting=1, late=5.0)
    behind = _watched(late, 120, ready=2, late=5.0, waits_s=150.0)
    assert behind.requests == 0.0
    assert _watched(behind, 150, ready=2, late=5.0, waits_s=60.0).is_late(0.01)


def test_calm_after_a_burst_does_not_show_that_a_replica_helps():
    """Of two in five requests that still come none is late with three: the third goes as if it had not been tried, and another may be."""
    late = _watched(Trial(), 300, ready=2, late=5.0)
    begun = _watched(late, 10, ready=2, starting=1, late=5.0)
    calm = _watched(begun, 600, ready=3, first=4.0)
    assert (calm.tried, calm.outcome, calm.floor, calm.failed_trials) == (0, None, 0, 0)
    as_before = _watched(begun, 600, ready=3)
    assert (as_before.tried, as_before.outcome, as_before.floor) == (3, True, 3)


@pytest.mark.parametrize(("per_s", "floor"), [(30.0, 7), (20.0, 7), (18.0, 7), (10.0, 4), (1.0, 1)])
def test_what_a_trial_found_scales_with_the_load_that_it_was_found_at(per_s, floor):
    """The seventh replica helped at 20 requests/s. At half of them four are kept, at a twentieth one, and seven again at 20."""
    late = _watched(Trial(), 60, ready=6, late=8.0, first=200.0)
    begun = _watched(late, 120, ready=6, starting=1, late=8.0, first=200.0)
    helped = _watched(begun, 60, ready=7, first=200.0)
    assert (helped.outcome, helped.floor) == (True, 7)

    later = _watched(helped, 1800, ready=7, first=10.0 * per_s)

    assert later.floor == floor
    again = _watched(_watched(later, 60, ready=floor, first=10.0 * per_s), 900, ready=7, first=200.0)
    assert again.floor == 7


def test_a_start_that_is_rolled_back_is_no_trial():
    """What never served says nothing: another may be asked for."""
    late = _watched(Trial(), 300, ready=2, late=5.0)
    begun = _watched(late, 10, ready=2, starting=1, late=5.0)
    assert (begun.tried, begun.is_over) == (3, False)
    assert _watched(begun, 10, ready=2, late=5.0).is_over


def test_each_trial_in_vain_doubles_the_pause():
    """An hour after the first, two after the second."""
    trial, pauses = Trial(), []
    for _ in range(2):
        late = _watched(trial, 900, ready=2, late=5.0)
        trial = _watched(late, 900, ready=3, late=5.0)
        assert trial.outcome is False
        waited = 0
        while not trial.is_over:
            trial, waited = _watched(trial, 10, ready=2, late=5.0), waited + 10
        pauses.append(waited)
    assert abs(pauses[0] - HOLDS_S) < 1000
    assert abs(pauses[1] - 2 * HOLDS_S) < 1000


@given(
    st.lists(
        st.tuples(st.integers(0, 6), st.integers(0, 3), st.floats(0.0, 50.0), st.floats(-50.0, 50.0)),
        max_size=60,
    )
)
def test_whatever_is_seen_one_trial_goes_on_at_a_time(windows):
    """A trial is of one replica count, and asks for no further one before its result."""
    trial = Trial()
    for ready, starting, first, late in windows:
        before = trial
        trial = trial.followed(PoolCounts(ready, starting), Lateness(10.0, first, min(first, late)), 0.01)
        if not before.is_over and trial.tried > before.tried:
            raise AssertionError("a second trial began")
        assert 0 <= trial.floor <= trial.tried
        assert 0.0 <= trial.share <= 1.0 or trial.requests == 0.0
        assert replace(trial, requests=min(trial.requests, ENOUGH - 1)).is_late(0.01) is False
