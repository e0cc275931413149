"""The simple server against queueing theory: what a simulator must reproduce before it is believed."""

from itertools import pairwise

import numpy as np
import pytest

from penstock.api import Role
from penstock.engine import profiles
from penstock.simulator.scenario import PoolSpec, ProfiledModel, Scenario, unbounded_router
from penstock.simulator.simulation import Simulation
from penstock.workload.traces import TraceRequest

COUNT = 8000


def workload(rate, lengths, seed=1):
    """Poisson arrivals of prompts that share nothing."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / rate, COUNT))
    tokens = lengths(rng)
    return [
        TraceRequest(float(at_s), max(1, int(length)), 1, None, line)
        for line, (at_s, length) in enumerate(zip(arrivals, tokens, strict=True), start=1)
    ]


def mean_wait(scenario, requests):
    """Mean time in the router's queue and the server's, without service; the first tenth is left out."""
    recording = Simulation(scenario, requests).run()
    service = recording.requests.prompt_tokens * scenario.pools[0].model.prefill_s_per_token
    return float((recording.requests.ttft_s - service)[COUNT // 10 :].mean())


def test_waits_follow_lindley_s_recursion_to_the_digit(simple_world):
    """W' = max(0, W + S - gap): what formulas give on average holds for each request."""
    requests = workload(0.8, lambda rng: np.ceil(rng.exponential(1000, COUNT)))[:1000]

    recording = Simulation(simple_world(sample_s=1000.0), requests).run()

    waited_s, expected = 0.0, []
    for before, request in pairwise([requests[0], *requests]):
        gap_s = request.arrival_s - before.arrival_s
        waited_s = max(0.0, waited_s + before.input_tokens * 0.001 - gap_s) if expected else 0.0
        expected.append(waited_s + request.input_tokens * 0.001)
    assert np.allclose(recording.requests.ttft_s, expected)


def test_two_servers_with_one_queue_wait_as_in_m_m_2(simple_world):
    """Erlang's C at a load of 0.7 over two servers."""
    requests = workload(1.4, lambda rng: np.ceil(rng.exponential(1000, COUNT)))
    offered = 1.4
    blocked = offered**2 / 2 / (1 - offered / 2)
    queues = blocked / (1 + offered + blocked)

    waited_s = mean_wait(simple_world(2, sample_s=1000.0), requests)

    assert waited_s == pytest.approx(queues / (2 - offered), rel=0.15)


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
