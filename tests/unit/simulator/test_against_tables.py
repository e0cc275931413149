"""A world against its latency profile: where nothing queues, times are the profile's; where all is busy, its rates."""

import numpy as np
import pytest

from penstock.api import Role
from penstock.engine import profiles
from penstock.simulator.scenario import PoolSpec, ProfiledModel, Scenario, SimpleModel, unbounded_router
from penstock.simulator.simulation import Simulation
from penstock.simulator.workload import WorkloadSpec, prepare

PROFILES = ["a100-llama-8b-bf16-tp1", "h100-llama-3.3-70b-tp4-table", "h200-llama-3.1-8b-tp1-table"]


@pytest.fixture
def whole():
    """Return a function that makes a scenario of one aggregated engine."""

    def make(profile, *, router=None, **options):
        pools = (PoolSpec(Role.AGGREGATED, 1, ProfiledModel(profile)),)
        return Scenario(pools=pools, router=router or unbounded_router("least-loaded"), **options)

    return make


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize(("prompt", "outputs"), [(512, 1), (1000, 10), (8000, 300)])
def test_a_lone_request_takes_what_the_table_says(whole, request_at, profile, prompt, outputs):
    """A prefill of its prompt, then a step for each token with the KV that has grown until then."""
    latency = profiles.load(profile).latency()

    requests = Simulation(whole(profile), [request_at(0.0, prompt, outputs)]).run().requests

    steps = [latency.decode.step_s(1, prompt + made) for made in range(1, outputs)]
    assert requests.ttft_s[0] == pytest.approx(latency.prefill.ttft_s(prompt), rel=1e-6)
    assert requests.e2e_s[0] - requests.ttft_s[0] == pytest.approx(sum(steps), rel=1e-3, abs=1e-9)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("batch", [4, 32])
def test_a_batch_of_equals_shares_the_table_s_step(split_world, request_at, profile, batch):
    """Long answers side by side: the time between tokens is that of a step of their number and their KV."""
    latency = profiles.load(profile).latency()
    scenario = split_world(batch, 1, model=ProfiledModel(profile))

    requests = (
        Simulation(scenario, [request_at(0.0, 1000, 2000, line=i + 1) for i in range(batch)]).run().requests
    )

    between = (requests.e2e_s - requests.ttft_s) / (requests.output_tokens - 1)
    assert between.mean() == pytest.approx(latency.decode.step_s(batch, batch * 2000), rel=0.02)


def test_a_busy_prefill_worker_does_its_prompts_back_to_back(split_world, request_at):
    """Forty prompts of a whole step each: the last is done when forty steps are over."""
    step_s = profiles.load(PROFILES[0]).latency().prefill.ttft_s(8192)
    requests = [request_at(0.0, 8192, 1, line=line) for line in range(1, 41)]
    world = Simulation(split_world(1, 4), requests)

    world.run()

    ends = np.array(sorted(job.prefilled_s for job in world.jobs))
    assert ends == pytest.approx(step_s * np.arange(1, 41), rel=1e-6)


def test_two_workers_in_turn_are_two_worlds(simple_world):
    """Round robin without a queue: every second request waits as if there were nothing else."""
    spec = WorkloadSpec("poisson:rate=1,duration_s=500,input_tokens=1500,output_tokens=1")
    requests = prepare(spec, seed=2).requests
    given = {
        "policy": "round-robin",
        "model": SimpleModel("test", 0.001, 100_000, slot_requests=len(requests)),
    }

    both = Simulation(simple_world(2, **given), requests).run().requests.ttft_s
    alone = Simulation(simple_world(1, **given), requests[::2]).run().requests.ttft_s

    assert both[::2] == pytest.approx(alone)


def test_a_prompt_that_was_seen_costs_its_new_tokens_only(whole, request_at):
    """8,192 tokens of which 7,168 are cached: a step of 1,024 tokens that attend to all."""
    latency = profiles.load(PROFILES[0]).latency()
    first, again = tuple(range(16)), (*range(14), 90, 91)
    requests = [request_at(0.0, 8192, 1, ids=first, line=1), request_at(60.0, 8192, 1, ids=again, line=2)]

    recording = Simulation(whole(PROFILES[0]), requests).run().requests

    assert list(recording.cached_tokens) == [0, 7168]
    expected = latency.step_s([(7168, 8192, True)], 0, 0)
    assert recording.ttft_s[1] == pytest.approx(expected, rel=1e-6)
    assert recording.ttft_s[1] < recording.ttft_s[0] / 3
