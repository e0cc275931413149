"""A floor of hindsight that the budget did not allow in time is not grown to once what asked for it is over."""

from __future__ import annotations

from dataclasses import replace

from sla_load import ADAPTIVE, NO_LOAD, SERVED, decided_after, step_of

from penstock.api import Role
from penstock_planner.decide.decision import Action, Reason
from penstock_planner.decide.objective.shadow_fleets import Growth, Hindsight
from penstock_planner.decide.policies.adaptive.memory import AdaptiveMemory

P = Role.PREFILL
FULL = replace(ADAPTIVE, max_gpu_budget=4)
STEADY = {**SERVED, "prefill": 1, "decode": 3}
OVERLOAD = {
    **STEADY,
    "rate": 3.0,
    "prefilled_tokens": 4000.0,
    "ttft_sum_s": 40.0,
    "ttft_late": 2.0,
    "waiting": 40.0,
    "waiting_tokens": 80_000.0,
    "oldest_wait_s": 20.0,
}
NOTHING = {**NO_LOAD, "prefill": 1, "decode": 3}


def _overloaded():
    """Return the state after ten minutes that one worker serves and ten that ask for more than the budget has."""
    _, state = decided_after(600, config=FULL, **STEADY)
    found, state = decided_after(600, state, start_s=600, config=FULL, **OVERLOAD)
    assert found[P].reason is Reason.GPU_BUDGET
    assert AdaptiveMemory.read(state.learned).hindsight[P].floor == 3
    return state


def test_gpus_that_come_free_in_silence_are_left_to_others():
    """Another graph gives its GPUs up two and a half minutes after the last request: the floor of three is not a reason to take them."""
    _, state = decided_after(150, _overloaded(), start_s=1200, config=FULL, **NOTHING)
    for at_s in range(1350, 1800, 5):
        found, state = decided_after(5, state, start_s=at_s, config=ADAPTIVE, **NOTHING)
        assert all(each.action is not Action.UP for each in found.values())
    assert step_of(found[P], "hindsight").outcome.startswith("pass")


def test_gpus_that_come_free_while_it_lasts_are_taken():
    """The same GPUs at once, while requests still come."""
    found, _ = decided_after(5, _overloaded(), start_s=1200, config=ADAPTIVE, **OVERLOAD)
    assert found[P].action is Action.UP


def test_what_comes_again_is_prepared_for_in_the_calm_before_it():
    """A recurring fleet's replicas start before they are needed; so does what was idle for less than a replica is kept."""
    known = Hindsight(floor=2, idle_s=(0.0, 500.0), needed_s=(0.0, 0.0), since_s=(0.0, 900.0))
    assert known.is_past(2, 130.0)
    assert not known.is_past(2, 600.0)
    assert not known.is_past(3, 130.0)
    assert not replace(known, growth=Growth.SCHEDULED).is_past(2, 130.0)
