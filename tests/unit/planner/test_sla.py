"""Mode sla: replicas by a performance profile, targets for TTFT and ITL, and what is observed."""

from __future__ import annotations

from dataclasses import replace

import orjson
import pytest

from penstock_api import Predictor, Role
from penstock_core.errors import ConfigError
from penstock_performance.profile import PerformanceProfile
from penstock_performance.tables import DecodeTable, PrefillTable
from penstock_planner.decide.codec import config_from, state_from, to_plain, window_from
from penstock_planner.decide.config import DecideConfig, Mode
from penstock_planner.decide.decision import Action, Reason
from penstock_planner.decide.observation import Demand, Observation, PoolCounts, Window, summarise
from penstock_planner.decide.pipeline import decide
from penstock_planner.decide.reading import judge
from penstock_planner.decide.state import PlannerState

SPEED = 10_000.0
"""Prompt tokens/s of one engine in these tests."""
KV_TOKENS = 100_000.0


def _itl_s(batch):
    return 0.010 + 0.0005 * batch


def _profile(speed=1.0):
    """Return an engine of 10,000 prompt tokens/s and an ITL of 10 ms + 0.5 ms per request, times ``speed``."""
    usage = tuple(percent / 100 for percent in range(1, 101))
    contexts = (100.0, 1050.0, 20_000.0)
    batches = [[max(1.0, share * KV_TOKENS / context) for share in usage] for context in contexts]
    return PerformanceProfile(
        PrefillTable((100.0, 20_000.0), (100 / SPEED / speed, 20_000 / SPEED / speed)),
        DecodeTable(
            contexts,
            usage,
            tuple(tuple(_itl_s(batch) / speed for batch in row) for row in batches),
            tuple(tuple(batch / _itl_s(batch) * speed for batch in row) for row in batches),
            KV_TOKENS,
        ),
    )


CONFIG = DecideConfig(
    mode=Mode.SLA,
    adjustment_interval_s=5.0,
    max_gpu_budget=64,
    ttft_slo_s=1.0,
    itl_slo_s=0.020,
    performance=_profile(),
)


def _pull(at_s, *, prefill=2, decode=2, rate=4.0, isl=1000.0, speed=1.0, itl_s=None, kv=0.1, **demand):
    """Return one second's pull: ``rate`` requests/s of ``isl`` and 100 tokens, served as the profile says."""
    busy = min(prefill, rate * isl / SPEED / speed)
    running = demand.pop("running", rate * 100 * 0.012)
    seen = Demand(
        **{
            "period_s": 1.0,
            "arrivals": rate,
            "prompt_tokens": rate * isl,
            "uncached_tokens": rate * isl,
            "prefilled_tokens": busy * SPEED * speed,
            "prefilling_workers": busy,
            "completed": rate,
            "output_tokens": rate * 100,
            "ttft_count": rate,
            "ttft_sum_s": rate * isl / SPEED / speed,
            "itl_count": rate * 100,
            "itl_sum_s": rate * 100 * (itl_s or _itl_s(max(1.0, running / decode))),
            "in_flight": {Role.DECODE: running},
            **demand,
        }
    )
    usage = {f"d{i}": judge(kv, age_s=0, max_age_s=10, source="t", upper=1.0) for i in range(decode)}
    waits = {name: judge(0.0, age_s=0, max_age_s=10, source="t") for name in usage}
    pools = {Role.PREFILL: PoolCounts(prefill, gpus=1), Role.DECODE: PoolCounts(decode, gpus=1)}
    queue = judge(seen.waiting, age_s=0, max_age_s=10, source="t")
    return summarise(Observation(at_s, pools, usage, queue, seen, waits))


def _after(seconds, state=None, *, start_s=0, config=CONFIG, **load):
    """Decide every 5 s under one load; return the last decision by role, and the state."""
    state = state or PlannerState()
    for end in range(start_s + 5, start_s + seconds + 1, 5):
        pulls = tuple(_pull(float(s), **load) for s in range(end - 4, end + 1))
        decision, state = decide(Window(end - 5.0, float(end), pulls), state, config)
    return {role.role: role for role in decision.roles}, state


def _step(decided, name):
    return next(step for step in decided.steps if step.name == name)


def test_without_a_profile_it_says_what_to_run():
    """No guess: the message names the command."""
    with pytest.raises(ConfigError, match="penstock profile"):
        _after(5, config=replace(CONFIG, performance=None))


def test_it_knows_its_workers_before_it_has_seen_them_work():
    """18 requests/s of 1,000 tokens on two workers of 10,000: it grows, where adaptive must learn first."""
    found, _ = _after(10, rate=18.0, prefilled_tokens=0.0, prefilling_workers=0.0)
    assert (found[Role.PREFILL].action, found[Role.PREFILL].reason) == (
        Action.UP,
        Reason.DEMAND_ABOVE_CAPACITY,
    )
    assert _step(found[Role.PREFILL], "demand").inputs["worker_tokens_per_s"] == pytest.approx(SPEED)


def test_a_tighter_ttft_leaves_less_room_to_wait():
    """The same load on the same workers: the share of them that demand may fill follows from the target."""
    shares = []
    for slo_s in (5.0, 1.0, 0.2):
        found, _ = _after(60, config=replace(CONFIG, ttft_slo_s=slo_s))
        shares.append(_step(found[Role.PREFILL], "demand").threshold)
    assert shares[0] > shares[1] > shares[2] > 0


def test_decode_grows_until_the_itl_is_held():
    """24 requests/s of 100 tokens on two engines: their KV is a third full, yet 30 requests each make an ITL of 25 ms."""
    found, _ = _after(60, rate=24.0, prefill=10, running=60.0, kv=0.05)
    decode = found[Role.DECODE]
    assert (decode.action, decode.reason) == (Action.UP, Reason.ITL_ABOVE_TARGET)
    assert _step(decode, "itl").inputs["itl_s_ahead"] > 0.020
    calm, _ = _after(60, rate=10.0, prefill=10, running=12.0, kv=0.05)
    assert calm[Role.DECODE].action is not Action.UP


def test_without_an_itl_target_decode_goes_by_kv_alone():
    """The same load without a target: nothing to grow for."""
    found, _ = _after(
        60, rate=24.0, prefill=10, running=60.0, kv=0.05, config=replace(CONFIG, itl_slo_s=None)
    )
    assert found[Role.DECODE].action is not Action.UP
    assert not [step for step in found[Role.DECODE].steps if step.name.startswith("itl")]


@pytest.mark.parametrize("speed", [0.7, 1.0, 1.3])
def test_a_wrong_profile_is_corrected_by_what_is_observed(speed):
    """Engines of 0.7 or 1.3 times the profile's speed are known for it within five minutes."""
    _, state = _after(300, speed=speed, itl_s=_itl_s(4.8 / 2) / speed)
    found, _ = _after(5, state, start_s=300, speed=speed, itl_s=_itl_s(4.8 / 2) / speed)
    inputs = _step(found[Role.PREFILL], "profile").inputs
    assert inputs["prefill_factor"] == pytest.approx(1 / speed, rel=0.08)
    assert inputs["itl_factor"] == pytest.approx(1 / speed, rel=0.08)
    able = _step(found[Role.PREFILL], "demand").inputs["worker_tokens_per_s"]
    assert able == pytest.approx(SPEED * speed, rel=0.08)


def test_a_correction_is_bounded():
    """Engines that seem to stand still are not taken for more than three times as slow as their profile."""
    _, state = _after(600, prefilled_tokens=10.0, prefilling_workers=2.0)
    found, _ = _after(5, state, start_s=600, prefilled_tokens=10.0, prefilling_workers=2.0)
    assert _step(found[Role.PREFILL], "profile").inputs["prefill_factor"] == pytest.approx(3.0)


def test_prompts_outside_the_profile_hold_to_its_edge_and_are_named():
    """Prompts of 50,000 tokens on a profile up to 20,000."""
    found, _ = _after(30, rate=0.2, isl=50_000.0)
    said = _step(found[Role.PREFILL], "profile").outcome
    assert "uncached ISL 50000 lies outside the profile's 100 to 20000: its edge holds" in said
    assert _step(found[Role.PREFILL], "demand").inputs["worker_tokens_per_s"] == pytest.approx(
        SPEED, rel=0.15
    )


def test_replay_is_bit_for_bit():
    """State, window and configuration through JSON give the same decision: what was learnt is in the state."""
    _, state = _after(120, rate=9.0)
    window = Window(120.0, 121.0, (_pull(121.0, rate=12.0),))
    plain = orjson.loads(orjson.dumps([to_plain(window), to_plain(state), to_plain(CONFIG)]))
    again = decide(window_from(plain[0]), state_from(plain[1]), config_from(plain[2]))
    assert orjson.dumps(to_plain(decide(window, state, CONFIG))) == orjson.dumps(to_plain(again))


def test_the_constant_predictor_expects_no_rise_to_go_on():
    """Arrivals rise by 0.1/s each second: the trend follows two thirds of that for 30 s, constant none."""
    ahead = {}
    for predictor in Predictor:
        config, state = replace(CONFIG, predictor=predictor), PlannerState()
        for end in range(5, 105, 5):
            pulls = tuple(_pull(float(s), prefill=9, rate=4.0 + 0.1 * s) for s in range(end - 4, end + 1))
            decision, state = decide(Window(end - 5.0, float(end), pulls), state, config)
        prefill = next(each for each in decision.roles if each.role is Role.PREFILL)
        ahead[predictor] = _step(prefill, "demand").inputs["tokens_per_s_ahead"]
    assert ahead[Predictor.TREND] - ahead[Predictor.CONSTANT] == pytest.approx(2000, rel=0.1)


def test_unknown_demand_holds_every_role():
    """Without the door's counters nothing is decided, and what was learnt stays."""
    _, state = _after(60)
    pulls = tuple(replace(_pull(float(s)), demand=None) for s in range(61, 66))
    decision, after = decide(Window(60.0, 65.0, pulls), state, CONFIG)
    assert {role.action for role in decision.roles} == {Action.HOLD}
    assert after.memory["sla"] == state.memory["sla"]


@pytest.mark.parametrize(("rate", "needed"), [(2.0, 1), (18.0, 3), (45.0, 5)])
def test_the_replicas_that_profile_and_targets_need_are_a_step(rate, needed):
    """Whatever runs: 18 prompts/s of 0.1 s keep 1.8 workers busy, and two are too few for the wait; of 45/s five suffice."""
    for prefill in (1, 2, 8):
        found, _ = _after(60, rate=rate, prefill=prefill, prefilled_tokens=0.0, prefilling_workers=0.0)
        inputs = _step(found[Role.PREFILL], "needed").inputs
        assert (inputs["replicas"], inputs["replicas_now"]) == (needed, prefill)


def test_what_was_read_off_the_profile_is_a_step():
    """Its edges beside the load, a prompt's own time, and what the target leaves for waiting."""
    found, _ = _after(60)
    inputs = _step(found[Role.PREFILL], "profile").inputs
    assert (inputs["profile_isl_least"], inputs["profile_isl_most"]) == (100.0, 20_000.0)
    assert (inputs["profile_context_least"], inputs["profile_context_most"]) == (100.0, 20_000.0)
    assert inputs["context"] == pytest.approx(1050)
    assert inputs["prompt_s"] == pytest.approx(0.1, rel=0.01)
    assert inputs["may_wait_s"] == pytest.approx(0.9, rel=0.01)
    assert (inputs["attainment"], inputs["predictor"]) == (0.99, "trend")


def test_nothing_is_needed_of_what_cannot_be_looked_up_yet():
    """Without an answer so far nobody knows how long requests decode."""
    found, _ = _after(10, completed=0.0, output_tokens=0.0)
    assert "needed" not in {step.name for step in found[Role.DECODE].steps}
    assert "needed" in {step.name for step in found[Role.PREFILL].steps}
