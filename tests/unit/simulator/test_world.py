"""Whole worlds: every request ends once, the same way each time, and never above the GPU budget."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api import Role
from penstock.simulator.jobs import JobOutcome
from penstock.simulator.kernel import Kernel, Order
from penstock.simulator.scenario import (
    PoolSpec,
    ProfiledModel,
    Resize,
    Scenario,
    WorkerFailure,
    unbounded_router,
)
from penstock.simulator.simulation import Simulation


def outcomes(world):
    """Count how the jobs ended."""
    return {
        outcome: sum(job.outcome is outcome for job in world.jobs)
        for outcome in JobOutcome
        if any(j.outcome is outcome for j in world.jobs)
    }


def test_one_request_takes_prefill_transfer_and_decode(split_world, request_at):
    """TTFT = prefill step + transfer + one decode step, as profile and link say."""
    world = Simulation(split_world(1, 1), [request_at(0.0, 1000, 10)])

    recording = world.run()

    prefill_s = (6.1 + 15 + 0.0504 * 1000 + 1.69e-6 * 1000**2) / 1e3
    transfer_s = 0.005 + 1000 * 131072 / 25e9
    decode_s = 1.08 * (10.9 + 0.0245 + 7.88e-5 * 1000) / 1e3
    assert recording.requests.ttft_s[0] == pytest.approx(prefill_s + transfer_s + decode_s, rel=0.002)
    assert outcomes(world) == {JobOutcome.OK: 1}


def test_leases_are_renewed_while_a_decode_waits_for_room(split_world, request_at):
    """A decode worker too small for everybody keeps prompts waiting past their 30 s lease; none is lost."""
    model = ProfiledModel("a100-llama-8b-bf16-tp1", kv_tokens=9000)
    pools = (
        PoolSpec(Role.PREFILL, 2, ProfiledModel("a100-llama-8b-bf16-tp1")),
        PoolSpec(Role.DECODE, 1, model),
    )
    world = Simulation(Scenario(pools=pools), [request_at(i * 0.1, 4000, 1500) for i in range(6)])

    world.run()

    assert outcomes(world) == {JobOutcome.OK: 6}
    assert sum(job.tries.retries for job in world.jobs) == 0
    waited = [job.first_token_s - job.prefilled_s for job in world.jobs]
    assert max(waited) > 30


def test_a_request_that_can_never_fit_is_rejected_at_once(split_world, request_at):
    """Its prompt and output exceed the cache of a worker."""
    model = ProfiledModel("a100-llama-8b-bf16-tp1", kv_tokens=2048)
    world = Simulation(split_world(1, 1, model=model), [request_at(0.0, 2040, 100), request_at(0.1, 1000, 5)])

    world.run()

    assert [job.outcome for job in world.jobs] == [JobOutcome.REJECTED, JobOutcome.OK]


# -- joins, leaves, deaths


def test_a_join_serves_after_its_cold_start(simple_world, request_at):
    """Asked for at 1 s and 2 s cold, the second server takes its first request at 3 s."""
    requests = [request_at(i * 0.1, 1000) for i in range(10)]
    world = Simulation(
        simple_world(1, resizes=(Resize(1.0, Role.AGGREGATED, 2),), cold_start_s=2.0), requests
    )

    world.run()

    first = min(job.dispatched_s for job in world.jobs if job.worker == "aggregated-1")
    assert first == 3.0
    assert {job.worker for job in world.jobs} == {"aggregated-0", "aggregated-1"}


def test_a_death_before_the_first_token_is_retried(simple_world, request_at):
    """The job starts over on the other server, from its arrival."""
    failures = (WorkerFailure(0.5, "aggregated-0", 5.0),)
    world = Simulation(simple_world(2, failures=failures), [request_at(0.0, 1000)])

    recording = world.run()

    assert outcomes(world) == {JobOutcome.OK: 1}
    assert world.jobs[0].tries.retries == 1
    assert world.jobs[0].worker == "aggregated-1"
    assert recording.requests.ttft_s[0] == pytest.approx(1.5)


@pytest.mark.parametrize("is_split", [True, False])
def test_a_stream_goes_on_at_another_worker_where_its_own_dies(split_world, request_at, is_split):
    """As live: one request with the TTFT of its beginning, each token generated once, behind a prompt with what was said."""
    scenario = split_world(1, 2)
    if not is_split:
        pool = PoolSpec(Role.AGGREGATED, 2, scenario.pool(Role.DECODE).model)
        scenario = Scenario(pools=(pool,), router=unbounded_router("least-loaded"))
    prompt = request_at(0.0, 1000, 500)
    probe = Simulation(scenario, [prompt])
    undisturbed = probe.run()
    broken = probe.jobs[0].decoder or probe.jobs[0].worker
    world = Simulation(replace(scenario, failures=(WorkerFailure(2.0, broken),)), [prompt])

    recording = world.run()

    (job,) = world.jobs
    assert job.outcome is JobOutcome.OK
    assert (job.decoder or job.worker) != broken
    assert 0 < job.emitted_tokens < 500
    assert (job.prompt_tokens, job.outputs_left) == (1000 + job.emitted_tokens, 500 - job.emitted_tokens)
    last = world.fleet[job.decoder or job.worker].server.engine.counters
    assert last.generation_tokens == job.outputs_left
    assert recording.requests.ttft_s == undisturbed.requests.ttft_s
    assert recording.requests.e2e_s[0] > undisturbed.requests.e2e_s[0]
    assert recording.requests.output_tokens[0] == 500


@pytest.mark.parametrize(
    ("most", "died", "outcome"),
    [
        (0, [(2.0, "decode-0")], JobOutcome.FAILED),
        (1, [(2.0, "decode-0"), (3.0, "decode-1"), (3.0, "decode-2")], JobOutcome.FAILED),
        (3, [(2.0, "decode-0"), (3.0, "decode-1"), (3.0, "decode-2")], JobOutcome.OK),
    ],
)
def test_a_stream_ends_with_its_worker_by_the_limits_of_the_router(
    split_world, request_at, most, died, outcome
):
    """`maxContinuations` holds; two deaths at which it was present prove nothing, and it continues alone."""
    failures = tuple(WorkerFailure(at_s, name, at_s + 0.5) for at_s, name in died)
    router = unbounded_router("least-loaded", retries={"maxContinuations": most})
    world = Simulation(split_world(1, 3, router=router, failures=failures), [request_at(0.0, 1000, 500)])

    world.run()

    assert outcomes(world) == {outcome: 1}
    assert world.jobs[0].first_token_s is not None


def test_a_prefill_that_dies_with_its_blocks_makes_the_decode_start_over(split_world, request_at):
    """The KV was never read: the router tries again on the other prefill worker."""
    probe = Simulation(split_world(2, 1), [request_at(0.0, 60_000, 50)])
    probe.run()
    prefilled_s, first_s = probe.jobs[0].prefilled_s, probe.jobs[0].first_token_s
    failure = WorkerFailure((prefilled_s + first_s) / 2, "prefill-0", 1000.0)

    world = Simulation(split_world(2, 1, failures=(failure,)), [request_at(0.0, 60_000, 50)])
    world.run()

    assert probe.jobs[0].worker == "prefill-0"
    assert outcomes(world) == {JobOutcome.OK: 1}
    assert (world.jobs[0].tries.retries, world.jobs[0].worker) == (1, "prefill-1")


@pytest.mark.parametrize(("max_retries", "outcome"), [(2, JobOutcome.OK), (0, JobOutcome.REJECTED)])
def test_a_prompt_that_waits_too_long_for_decode_is_freed_and_computed_again(
    split_world, request_at, max_retries, outcome
):
    """As live: its lease is given back at once, not left to run out, and the retry waits before its prefill."""
    prompt = request_at(0.0, 60_000, 50)
    probe = Simulation(split_world(1, 1), [prompt])
    probe.run()
    failure = WorkerFailure(probe.jobs[0].prefilled_s / 2, "decode-0", 30.0)
    router = unbounded_router(
        "least-loaded", decodeQueue={"maxWaitSeconds": 3.0}, retries={"maxPerRequest": max_retries}
    )
    world = Simulation(split_world(1, 1, failures=(failure,), router=router), [prompt])

    world.run()

    (job,) = world.jobs
    assert job.outcome is outcome
    counters = world.fleet["prefill-0"].server.engine.counters
    assert counters.lease_expiries.total() == 0
    if outcome is JobOutcome.OK:
        assert job.tries.retries == 1
        assert job.dispatched_s == pytest.approx(30.0)
    else:
        assert job.ended_s == pytest.approx(probe.jobs[0].prefilled_s + 3.0)


def test_a_worker_that_comes_back_serves_with_an_empty_cache(simple_world, request_at):
    """The same prompt is computed in full again."""
    requests = [request_at(0.0, 1024, ids=(1, 2)), request_at(10.0, 1024, ids=(1, 2))]
    world = Simulation(simple_world(1, failures=(WorkerFailure(3.0, "aggregated-0", 4.0),)), requests)

    world.run()

    assert [job.cached_tokens for job in world.jobs] == [0, 0]


def test_without_any_worker_left_the_run_still_ends(simple_world, request_at):
    """The only server never comes back: its requests fail when patience is over."""
    failures = (WorkerFailure(0.5, "aggregated-0"),)
    world = Simulation(simple_world(1, failures=failures), [request_at(0.0), request_at(0.2)])

    recording = world.run()

    assert outcomes(world) == {JobOutcome.FAILED: 2}
    assert np.isnan(recording.requests.ttft_s).all()


def test_joins_beyond_the_budget_are_refused(simple_world, request_at):
    """Three are allowed: of five asked for, two are refused and counted."""
    resizes = (Resize(0.1, Role.AGGREGATED, 5),)
    world = Simulation(simple_world(1, resizes=resizes, max_gpus=3), [request_at(0.0), request_at(100.0)])

    recording = world.run()

    assert recording.refused_joins == 2
    assert recording.samples[-1].gpus == 3


def drain(kernel):
    """Run everything."""
    while kernel.step():
        pass


@pytest.mark.parametrize("time_s", [0.9, float("nan")])
def test_the_past_is_refused(time_s):
    """Neither a past time nor a number that is none can be scheduled."""
    kernel = Kernel()
    kernel.at(1.0, Order.MESSAGE, lambda: None)
    kernel.step()

    with pytest.raises(ValueError, match="cannot schedule"):
        kernel.at(time_s, Order.MESSAGE, lambda: None)


@given(st.lists(st.tuples(st.sampled_from([0.0, 1.0, 2.0]), st.sampled_from(list(Order))), max_size=30))
def test_events_run_in_a_total_order(wanted):
    """Sorted by time, rank and sequence, whatever the order of scheduling."""
    kernel, seen = Kernel(), []
    for sequence, (time_s, order) in enumerate(wanted):
        kernel.at(time_s, order, seen.append, (time_s, order, sequence))

    drain(kernel)

    assert seen == sorted(seen)
    assert len(seen) == len(wanted)
