"""A floor of hindsight that the budget did not allow in time is not grown to once what asked for it is over."""

from __future__ import annotations

from dataclasses import replace

from sla_load import decided_after, step_of

from penstock.api import Role
from penstock_planner.decide.adaptive.hindsight import Growth, Hindsight
from penstock_planner.decide.adaptive.memory import AdaptiveMemory
from penstock_planner.decide.config import DecideConfig, Mode
from penstock_planner.decide.decision import Action, Reason

P, D = Role.PREFILL, Role.DECODE
CONFIG = DecideConfig(mode=Mode.ADAPTIVE, adjustment_interval_s=5.0, max_gpu_budget=8, ttft_slo_s=5.0)
FULL = replace(CONFIG, max_gpu_budget=4)
STEADY = {
    "rate": 0.8,
    "isl": 2000.0,
    "prefill": 1,
    "decode": 3,
    "prefilling_workers": 1.0,
    "prefilled_tokens": 1600.0,
    "ttft_sum_s": 0.4,
    "ttft_late": 0.0,
    "in_flight": {P: 1.0, D: 4.0},
    "in_flight_tokens": 2000.0,
}
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
NOTHING = {
    **STEADY,
    **dict.fromkeys(
        ("rate", "prefilling_workers", "prefilled_tokens", "ttft_sum_s", "in_flight_tokens"), 0.0
    ),
    "in_flight": {P: 0.0, D: 0.0},
}


def _overloaded():
    """Return the state after ten minutes that one worker serves and ten that ask for more than the budget has."""
    _, state = decided_after(600, config=FULL, **STEADY)
    found, state = decided_after(600, state, start_s=600, config=FULL, **OVERLOAD)
    assert found[P].reason is Reason.GPU_BUDGET
    assert AdaptiveMemory.read(state.memory).hindsight[P].floor == 3
    return state


def test_gpus_that_come_free_in_silence_are_left_to_others():
    """Another graph gives its GPUs up two and a half minutes after the last request: the floor of three is no reason to take them."""
    _, state = decided_after(150, _overloaded(), start_s=1200, config=FULL, **NOTHING)
    for at_s in range(1350, 1800, 5):
        found, state = decided_after(5, state, start_s=at_s, config=CONFIG, **NOTHING)
        assert all(each.action is not Action.UP for each in found.values())
    assert step_of(found[P], "hindsight").outcome.startswith("pass")


def test_gpus_that_come_free_while_it_lasts_are_taken():
    """The same GPUs at once, while requests still come."""
    found, _ = decided_after(5, _overloaded(), start_s=1200, config=CONFIG, **OVERLOAD)
    assert found[P].action is Action.UP


def test_what_comes_again_is_prepared_for_in_the_calm_before_it():
    """A recurring fleet's replicas start before they are needed; so does what was idle for less than a replica is kept."""
    known = Hindsight(floor=2, idle_s=(0.0, 500.0), needed_s=(0.0, 0.0), since_s=(0.0, 900.0))
    assert known.is_past(2, 130.0)
    assert not known.is_past(2, 600.0)
    assert not known.is_past(3, 130.0)
    assert not replace(known, growth=Growth.RECURRING).is_past(2, 130.0)
