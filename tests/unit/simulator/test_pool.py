"""Graphs that share GPUs in one virtual time: the pool's GPUs hold at every event, and giving back loses no request."""

from dataclasses import replace

import numpy as np
import pytest

from penstock.api import Role
from penstock.gpu_pool.allocator import Grant, PoolTerms
from penstock.simulator.baselines import configured
from penstock.simulator.fleet import BudgetExceededError
from penstock.simulator.pool import PooledGraph, PoolSimulation
from penstock.simulator.scenario import BudgetChange, PoolSpec, ProfiledModel, Scenario, unbounded_router
from penstock.workload.synthetic import parse_synthetic, synthesise
from penstock_planner.decide.config import DecideConfig, Mode

MODEL = ProfiledModel("a100-llama-8b-bf16-tp1")
APART = (PoolSpec(Role.PREFILL, 1, MODEL), PoolSpec(Role.DECODE, 1, MODEL))
TERMS = PoolTerms(8, startup_s=60.0)


def crowd(from_s, rate, seconds=100.0, *, seed=0):
    """Return the requests of a crowd that comes at a time and leaves."""
    spec = f"poisson:rate={rate},count={int(rate * seconds)},input_tokens=4096,output_tokens=200"
    made = synthesise(parse_synthetic(spec), np.random.default_rng(seed))
    return [replace(each, arrival_s=each.arrival_s + from_s) for each in made]


def graph(requests, *, guaranteed=2, mode=Mode.ADAPTIVE, **terms):
    """Return a graph whose planner has no budget but the pool's."""
    config = DecideConfig(mode=mode, max_gpu_budget=None)
    scenario = Scenario(
        pools=APART,
        router=unbounded_router("prefix-cost"),
        planner=configured(config, mode, APART),
        cold_start_s=20.0,
    )
    requests = sorted(requests, key=lambda each: each.arrival_s)
    return PooledGraph(scenario, requests, guaranteed, **terms)


@pytest.fixture(scope="module", params=[Mode.ADAPTIVE, pytest.param(Mode.SLA, marks=pytest.mark.nightly)])
def evening(request):
    """A crowd at the first graph, then one at the second, whose priority is higher; each is more than the pool can serve."""
    graphs = {
        "day": graph(crowd(0.0, 14.0), mode=request.param),
        "late": graph(
            [*crowd(0.0, 0.2, 150.0, seed=1), *crowd(80.0, 14.0, seed=2)], mode=request.param, priority=1
        ),
    }
    return PoolSimulation(TERMS, graphs).run()


def test_a_graph_borrows_what_the_other_does_not_need_and_gives_it_back(evening):
    """Beyond its guarantee of two the first holds six; when the second's crowd comes, the second does."""
    at = {sample.at_s: sample.held for sample in evening.samples}
    assert at[60.0] == {"day": 6, "late": 2}
    assert at[150.0] == {"day": 2, "late": 6}


def test_giving_back_loses_no_request(evening):
    """Workers are drained: every request of both graphs is served."""
    assert all(each.requests.is_ok.all() for each in evening.recordings.values())
    assert any("the pool grants" in each.sentence for each in evening.recordings["day"].changes)


def test_the_graphs_never_hold_more_than_the_pool(evening):
    """Not in a sample; the run itself compares them after every event."""
    assert max(sum(sample.held.values()) for sample in evening.samples) == TERMS.gpus


def test_more_than_the_pool_ends_the_run():
    """A body that grants more than there is would be found at once."""

    def generous(_pool, graphs, state, _now_s):
        return {name: Grant(9, 1, 9, 9) for name in graphs}, state

    graphs = {"a": graph(crowd(0.0, 14.0)), "b": graph(crowd(0.0, 14.0, seed=1))}
    with pytest.raises(BudgetExceededError, match="GPUs are held, the pool has 8"):
        PoolSimulation(TERMS, graphs, allocator=generous).run()


@pytest.mark.slow
def test_a_pool_that_shrinks_takes_from_the_borrower_first():
    """Two of eight GPUs go at second 60: the graph within its guarantee keeps it, the borrower drains, nothing is lost."""
    graphs = {
        "owner": graph(crowd(0.0, 12.0, seed=1), guaranteed=4),
        "borrower": graph(crowd(0.0, 12.0), guaranteed=2),
    }
    run = PoolSimulation(TERMS, graphs, changes=(BudgetChange(60.0, 6),)).run()
    before, after = ({s.at_s: s.held for s in run.samples}[at_s] for at_s in (59.0, 90.0))
    assert before["owner"] + before["borrower"] == 8, "the pool is full"
    assert before["owner"] >= 4
    assert before["borrower"] > 2
    assert (after["owner"], after["borrower"]) == (4, 2)
    assert all(each.requests.is_ok.all() for each in run.recordings.values())


def long_streams(*, continuations=1):
    """Return an owner whose crowd comes at second 80, and a borrower whose answers take a minute and more."""
    streams = "poisson:rate=3,count=240,input_tokens=2048,output_tokens=4000"
    borrower = graph(synthesise(parse_synthetic(streams), np.random.default_rng(0)))
    router = unbounded_router("prefix-cost", retries={"maxContinuations": continuations})
    borrower = replace(borrower, scenario=replace(borrower.scenario, router=router))
    return {"owner": graph(crowd(80.0, 10.0, 40.0, seed=1), guaranteed=6), "borrower": borrower}


def waited(run):
    """Seconds in which the owner held less of its guarantee than it wanted."""
    return sum(each.held["owner"] < min(6, each.grants["owner"].wanted) for each in run.samples)


@pytest.mark.slow
def test_a_drain_that_lasts_longer_than_the_pool_waits_is_cut():
    """The owner has its GPU earlier than streams of a minute and more let it; those of the worker continue on another."""
    drained = PoolSimulation(TERMS, long_streams()).run()
    cut = PoolSimulation(TERMS, long_streams(), reclaim_s=10.0).run()
    assert not any(drained.cuts.values())
    assert cut.cuts["owner"] == ()
    (drain,) = cut.cuts["borrower"]
    assert 10 <= waited(cut) < waited(drained) - 10
    assert all(each.requests.is_ok.all() for each in cut.recordings.values())
    assert set(drain.requests) == set(np.flatnonzero(cut.recordings["borrower"].requests.is_continued))


@pytest.mark.slow
def test_streams_that_may_not_go_on_are_lost_with_a_cut_drain_and_with_nothing_else():
    """Those that its worker had at that moment, none of the owner's."""
    run = PoolSimulation(TERMS, long_streams(continuations=0), reclaim_s=10.0).run()
    (drain,) = run.cuts["borrower"]
    assert set(drain.requests) == set(np.flatnonzero(~run.recordings["borrower"].requests.is_ok))
    assert run.recordings["owner"].requests.is_ok.all()


def test_a_graph_alone_in_a_pool_holds_no_more_than_its_most():
    """Five, though eight are there."""
    run = PoolSimulation(TERMS, {"a": graph(crowd(0.0, 14.0), max_gpus=5)}).run()
    assert max(sample.held["a"] for sample in run.samples) == 5


def test_the_same_pool_gives_the_same_run():
    """Nothing but the workloads and the terms decides."""
    graphs = {"a": graph(crowd(0.0, 10.0, 20.0)), "b": graph(crowd(10.0, 10.0, 20.0, seed=1))}
    first, second = (PoolSimulation(TERMS, graphs).run() for _ in range(2))
    assert first.samples == second.samples
    assert [each.changes for each in first.recordings.values()] == [
        each.changes for each in second.recordings.values()
    ]
