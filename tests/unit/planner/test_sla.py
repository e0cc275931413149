"""Mode sla: replicas by a performance profile, targets for TTFT and ITL, and what is observed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sla_load import CONFIG, SPEED, decided_after, itl_s_of, pull_of, step_of

from penstock.api import Predictor, Role
from penstock.core.errors import ConfigError
from penstock_planner.decide.decision import Action, Reason
from penstock_planner.decide.demand.observation import Window
from penstock_planner.decide.pipeline import decide
from penstock_planner.decide.state import PlannerState


def test_without_a_profile_it_says_what_to_run():
    """No guess: the message names the command."""
    with pytest.raises(ConfigError, match="penstock profile"):
        decided_after(5, config=replace(CONFIG, performance=None))


def test_it_knows_its_workers_before_it_has_seen_them_work():
    """18 requests/s of 1,000 tokens on two workers of 10,000: it grows, where adaptive must learn first."""
    found, _ = decided_after(10, rate=18.0, prefilled_tokens=0.0, prefilling_workers=0.0)
    assert (found[Role.PREFILL].action, found[Role.PREFILL].reason) == (
        Action.UP,
        Reason.DEMAND_ABOVE_CAPACITY,
    )
    assert step_of(found[Role.PREFILL], "demand").inputs["worker_tokens_per_s"] == pytest.approx(SPEED)


def test_a_tighter_ttft_leaves_less_room_to_wait():
    """The same load on the same workers: the share of them that demand may fill follows from the target."""
    shares = []
    for slo_s in (5.0, 1.0, 0.2):
        found, _ = decided_after(60, config=replace(CONFIG, ttft_slo_s=slo_s))
        shares.append(step_of(found[Role.PREFILL], "demand").threshold)
    assert shares[0] > shares[1] > shares[2] > 0


def test_decode_grows_until_the_itl_is_held():
    """24 requests/s of 100 tokens on two engines: their KV is a third full, yet 30 requests each make an ITL of 25 ms."""
    found, _ = decided_after(60, rate=24.0, prefill=10, running=60.0, kv=0.05)
    decode = found[Role.DECODE]
    assert (decode.action, decode.reason) == (Action.UP, Reason.ITL_ABOVE_TARGET)
    assert step_of(decode, "itl").inputs["itl_s_ahead"] > 0.020
    calm, _ = decided_after(60, rate=10.0, prefill=10, running=12.0, kv=0.05)
    assert calm[Role.DECODE].action is not Action.UP


@pytest.mark.parametrize("speed", [0.7, 1.0, 1.3])
def test_a_wrong_profile_is_corrected_by_what_is_observed(speed):
    """Engines of 0.7 or 1.3 times the profile's speed are known for it within five minutes."""
    _, state = decided_after(300, speed=speed, itl_s=itl_s_of(4.8 / 2) / speed)
    found, _ = decided_after(5, state, start_s=300, speed=speed, itl_s=itl_s_of(4.8 / 2) / speed)
    inputs = step_of(found[Role.PREFILL], "profile").inputs
    assert inputs["prefill_factor"] == pytest.approx(1 / speed, rel=0.08)
    assert inputs["itl_factor"] == pytest.approx(1 / speed, rel=0.08)
    able = step_of(found[Role.PREFILL], "demand").inputs["worker_tokens_per_s"]
    assert able == pytest.approx(SPEED * speed, rel=0.08)


def test_a_correction_is_bounded():
    """Engines that seem to stand still are not taken for more than three times as slow as their profile."""
    _, state = decided_after(600, prefilled_tokens=10.0, prefilling_workers=2.0)
    found, _ = decided_after(5, state, start_s=600, prefilled_tokens=10.0, prefilling_workers=2.0)
    assert step_of(found[Role.PREFILL], "profile").inputs["prefill_factor"] == pytest.approx(3.0)


def test_prompts_outside_the_profile_hold_to_its_edge_and_are_named():
    """Prompts of 50,000 tokens on a profile up to 20,000."""
    found, _ = decided_after(30, rate=0.2, isl=50_000.0)
    said = step_of(found[Role.PREFILL], "profile").outcome
    assert (
        "uncached ISL 50000 is outside the profile's range of 100 to 20000: its nearest end is used" in said
    )
    assert step_of(found[Role.PREFILL], "demand").inputs["worker_tokens_per_s"] == pytest.approx(
        SPEED, rel=0.15
    )


def test_the_constant_predictor_expects_no_rise_to_go_on():
    """Arrivals rise by 0.1/s each second: the trend follows two thirds of that for 30 s, constant none."""
    ahead = {}
    for predictor in Predictor:
        config, state = replace(CONFIG, predictor=predictor), PlannerState()
        for end in range(5, 105, 5):
            pulls = tuple(pull_of(float(s), prefill=9, rate=4.0 + 0.1 * s) for s in range(end - 4, end + 1))
            decision, state = decide(Window(end - 5.0, float(end), pulls), state, config)
        prefill = next(each for each in decision.roles if each.role is Role.PREFILL)
        ahead[predictor] = step_of(prefill, "demand").inputs["tokens_per_s_ahead"]
    assert ahead[Predictor.TREND] - ahead[Predictor.CONSTANT] == pytest.approx(2000, rel=0.1)


def test_unknown_demand_holds_every_role():
    """Without the frontend's counters nothing is decided, and what was learnt stays."""
    _, state = decided_after(60)
    pulls = tuple(replace(pull_of(float(s)), demand=None) for s in range(61, 66))
    decision, after = decide(Window(60.0, 65.0, pulls), state, CONFIG)
    assert {role.action for role in decision.roles} == {Action.HOLD}
    assert after.learned["sla"] == state.learned["sla"]


@pytest.mark.parametrize(("rate", "needed"), [(2.0, 1), (18.0, 3), (45.0, 5)])
def test_the_replicas_that_profile_and_targets_need_are_astep_of(rate, needed):
    """Whatever runs: 18 prompts/s of 0.1 s keep 1.8 workers busy, and two are too few for the wait; of 45/s five suffice."""
    for prefill in (1, 2, 8):
        found, _ = decided_after(60, rate=rate, prefill=prefill, prefilled_tokens=0.0, prefilling_workers=0.0)
        inputs = step_of(found[Role.PREFILL], "needed").inputs
        assert (inputs["replicas"], inputs["replicas_now"]) == (needed, prefill)
