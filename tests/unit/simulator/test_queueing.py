"""The simple server against queueing theory: what a simulator must reproduce before it is believed."""

from itertools import pairwise

import numpy as np
import pytest

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


@pytest.mark.parametrize("load", [0.5, 0.7])
def test_exponential_prompts_wait_as_in_m_m_1(simple_world, load):
    """Wq = rho / (1 - rho) mean service times."""
    requests = workload(load, lambda rng: np.ceil(rng.exponential(1000, COUNT)))

    waited_s = mean_wait(simple_world(sample_s=1000.0), requests)

    assert waited_s == pytest.approx(load / (1 - load), rel=0.15)


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
