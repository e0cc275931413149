"""The frontend's counters in virtual time: what the planner is shown of arrivals, queues and answers."""

from dataclasses import replace

import pytest

from penstock.api import Role
from penstock.planner.decide.config import DecideConfig
from penstock.simulator.frontend import FrontendCounters, GapHistogram
from penstock.simulator.jobs import Job
from penstock.simulator.planning import VirtualPlanner
from penstock.simulator.simulation import Simulation
from penstock.simulator.workload import WorkloadSpec, prepare
from penstock.workload.traces import TraceRequest


class _Recorder(VirtualPlanner):
    """Keeps every observation and decides nothing."""

    def __init__(self) -> None:
        super().__init__(DecideConfig(adjustment_interval_s=1e9))
        self.seen = []

    def tick(self, now_s, seen, scale):
        self.seen.append(seen)
        return super().tick(now_s, seen, scale)


def _job(index, arrival_s, tokens=100):
    return Job(index, TraceRequest(arrival_s, tokens, 7, (index,), index), (index,))


def test_a_request_is_counted_once_on_its_way():
    """It arrives, waits, is computed and answered; each pull shows what was new since the last."""
    frontend = FrontendCounters(GapHistogram())
    job = _job(0, 1.0)
    frontend.arrived(job, 60)
    frontend.queued(job)

    first = frontend.take(3.0, {})
    frontend.given(job, "prefill-0")
    second = frontend.take(4.0, {})
    frontend.prefilled(job)
    frontend.first_token(job, 5.0)
    frontend.completed(job)
    third = frontend.take(6.0, {})

    assert (
        first.period_s,
        first.arrivals,
        first.prompt_tokens,
        first.uncached_tokens,
        first.waiting,
        first.waiting_tokens,
        first.oldest_wait_s,
    ) == (3.0, 1, 100, 60, 1, 60, 2.0)
    assert (
        second.arrivals,
        second.waiting,
        second.oldest_wait_s,
        second.in_flight_tokens,
        second.prefilling_workers,
    ) == (0, 0, None, 60, 1)
    assert (
        third.prefilled_tokens,
        third.ttft_count,
        third.ttft_sum_s,
        third.completed,
        third.output_tokens,
        third.prefilling_workers,
    ) == (60, 1, 4.0, 1, 7, 0)


def test_a_job_whose_worker_died_waits_again_and_is_no_second_arrival():
    """The dead worker has computed nothing."""
    frontend = FrontendCounters(GapHistogram())
    job = _job(0, 0.0)
    frontend.arrived(job, 100)
    frontend.queued(job)
    frontend.given(job, "prefill-0")
    frontend.lost(job)
    frontend.queued(job)

    demand = frontend.take(2.0, {})

    assert (demand.arrivals, demand.waiting, demand.prefilled_tokens, demand.in_flight_tokens) == (1, 1, 0, 0)


@pytest.mark.parametrize("aggregated", [False, True])
def test_a_world_shows_its_planner_every_request(split_world, aggregated):
    """Over a run the sums are the workload's, and tokens that arrived were computed, wait or are in flight."""
    workload = prepare(WorkloadSpec("mooncake", limit=120), seed=0)
    scenario = split_world(2, 1, planner=DecideConfig(max_gpu_budget=None))
    if aggregated:
        pool = replace(scenario.pool(Role.PREFILL), role=Role.AGGREGATED)
        scenario = replace(scenario, pools=(pool,))
    world = Simulation(scenario, workload.requests)
    world.control.planner = recorder = _Recorder()

    world.run()

    seen = [each.demand for each in recorder.seen]
    balance = 0.0
    for demand in seen:
        balance += demand.uncached_tokens - demand.prefilled_tokens
        assert balance == demand.waiting_tokens + demand.in_flight_tokens
    assert sum(demand.arrivals for demand in seen) == 120
    assert sum(demand.prompt_tokens for demand in seen) == sum(r.input_tokens for r in workload.requests)
    assert any(demand.prefilling_workers == 2 for demand in seen)
    role = Role.AGGREGATED if aggregated else Role.DECODE
    assert any(demand.in_flight[role] for demand in seen)
    assert all(count >= 0 for each in recorder.seen for count in each.worker_waiting.values())
