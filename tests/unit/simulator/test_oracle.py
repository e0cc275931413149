"""The schedule that knows every arrival."""

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from penstock_api import Role
from penstock_simulator.baselines import baseline_settings
from penstock_simulator.oracle import Utilisation, needs, schedule
from penstock_simulator.workload import WorkloadSpec, prepare
from penstock_simulator.world import World

AT = Utilisation(0.8, 0.9)


def steady(rate, **more):
    """Equal prompts of 8,000 tokens, 0.532 s each, at equal gaps."""
    keys = "".join(f",{key}={value}" for key, value in more.items())
    text = f"constant:rate={rate},duration_s=300,input_tokens=8000,output_tokens=100,length_cv=0{keys}"
    return prepare(WorkloadSpec(text), seed=0).requests


def at(resizes, role, at_s):
    """The size that a schedule has at a time."""
    return [each.replicas for each in resizes if each.role is role and each.at_s <= at_s][-1]


def test_needs_are_the_work_of_the_arrivals(split_world):
    """3/s x 0.532 s / 0.8 are two prefill workers; decoding needs a part of one."""
    found = needs(steady(3), split_world(), AT)

    assert found[Role.PREFILL][50:250].mean() == pytest.approx(3 * 0.532 / 0.8, rel=0.02)
    assert 0 < found[Role.DECODE][50:250].mean() < 1
    assert found[Role.PREFILL][320:].max() == 0


def test_replicas_are_asked_for_their_start_up_before_they_are_needed(split_world):
    """The rate triples at 200 s: with 60 s to start, prefill grows at 140 s."""
    requests = prepare(
        WorkloadSpec(
            "step:rate=2,peak=3,step_s=200,step_length_s=100,duration_s=400,input_tokens=8000,length_cv=0"
        ),
        seed=0,
    ).requests

    resizes = schedule(requests, split_world(cold_start_s=60.0), AT)

    assert at(resizes, Role.PREFILL, 120) < at(resizes, Role.PREFILL, 150)
    assert at(resizes, Role.PREFILL, 150) >= 4


def test_a_gap_shorter_than_a_start_up_is_kept(split_world):
    """Bursts 50 s apart: with 60 s to start nothing is given back between them, with 5 s it is."""
    text = "stairs:rate=0.2,peak=20,steps=1,step_length_s=50,duration_s=350,input_tokens=8000,length_cv=0"
    requests = prepare(WorkloadSpec(text), seed=0).requests

    slow, fast = (schedule(requests, split_world(cold_start_s=cold_s), AT) for cold_s in (60.0, 5.0))

    assert min(at(slow, Role.PREFILL, at_s) for at_s in range(60, 280)) >= 2
    assert min(at(fast, Role.PREFILL, at_s) for at_s in range(60, 280)) == 1


def test_the_schedule_keeps_the_budget_and_serves(split_world):
    """At most 4 GPUs at any time; with enough of them all are in time."""
    requests = steady(3)
    tight = schedule(requests, split_world(1, 1, max_gpus=4), AT)
    world = World(split_world(1, 1, max_gpus=8, resizes=schedule(requests, split_world(), AT)), requests)

    assert max(at(tight, Role.PREFILL, s) + at(tight, Role.DECODE, s) for s in range(0, 300, 10)) <= 4
    ttft = world.run().requests.ttft_s
    assert np.mean(ttft[200:] < 5) > 0.99


def test_settings_of_others_come_from_the_profile(split_world, simple_world):
    """A prefill step of 8,192 tokens, the KV cache; the simple server's constants."""
    split, simple = baseline_settings(split_world().pools), baseline_settings(simple_world().pools)

    assert split.prefill_tokens_per_s == pytest.approx(14_900, rel=0.02)
    assert split.kv_tokens == pytest.approx(437_000, rel=0.02)
    assert (simple.prefill_tokens_per_s, simple.kv_tokens) == (1000.0, 100_000.0)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    gaps=st.lists(st.floats(0, 2), min_size=1, max_size=40),
    tokens=st.sampled_from([500, 8000, 60_000]),
    outputs=st.integers(1, 2000),
    budget=st.integers(2, 12),
    cold_s=st.sampled_from([0.0, 7.5, 60.0]),
    itl_slo_s=st.sampled_from([None, 0.011]),
)
@example(gaps=[0.2] * 40, tokens=60_000, outputs=10, budget=3, cold_s=7.5, itl_slo_s=0.011)
def test_a_schedule_can_be_carried_out(
    split_world, request_at, *, gaps, tokens, outputs, budget, cold_s, itl_slo_s
):
    """At each second every role has a replica and all together the GPUs that there are; nothing is lost by it."""
    times = np.cumsum(gaps)
    requests = [
        request_at(float(at_s), tokens, outputs, line=line) for line, at_s in enumerate(times, start=1)
    ]
    terms = {"max_gpus": budget, "cold_start_s": cold_s, "itl_slo_s": itl_slo_s}
    resizes = schedule(requests, split_world(1, 1, **terms), AT)

    assert min(each.replicas for each in resizes) >= 1
    for second in {each.at_s for each in resizes}:
        assert sum(at(resizes, role, second) for role in (Role.PREFILL, Role.DECODE)) <= budget
    assert World(split_world(1, 1, resizes=resizes, **terms), requests).run().requests.is_ok.all()
