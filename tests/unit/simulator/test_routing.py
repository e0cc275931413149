"""Routers in the world: the live bodies behind one port, side by side, and with old news."""

from random import Random

import pytest

from penstock.api import QueueOrder, Role
from penstock.router.core.worker_spec import WorkerSize
from penstock.simulator.jobs import Job, JobOutcome, PrefixChains
from penstock.simulator.routing import VirtualRouter
from penstock.simulator.scenario import RouterGroup, WorkerFailure, unbounded_router
from penstock.simulator.simulation import Simulation
from penstock.workload.traces import TraceRequest


def placed(policy="dualmap", order="arrival", **section):
    """Make a router section whose queues order by arrival."""
    return unbounded_router(policy, prefillQueue={"order": order}, **section)


def routing(config, slot_requests=1):
    """Make a router over servers of 100,000 cached tokens, by default of one request at a time."""
    return VirtualRouter(config, {Role.AGGREGATED: WorkerSize(100_000, slot_requests=slot_requests)})


class Server:
    """A worker as a router is told of it."""

    incarnation = 0

    def __init__(self, name, role=Role.AGGREGATED):
        self.name = name
        self.role = role


def dispatched(router, job, now_s):
    """Let a job come, and return the name of the worker that it goes to at once."""
    (effect,) = router.acquire(job, now_s)
    job.assignment = effect.assignment
    return effect.assignment.worker.name


def test_equal_prefixes_meet_again_across_routers(simple_world, request_at):
    """Two routers that never hear of each other send one prefix to one pair: rings need no news."""
    requests = [request_at(i * 3.0, 1024, ids=(7, 100 + i), line=i) for i in range(1, 21)]
    world = Simulation(simple_world(8, router=placed(), routers=RouterGroup(2)), requests)

    world.run()

    assert len({job.worker for job in world.jobs}) <= 2


def test_routers_hear_of_each_other_s_load_late(simple_world, request_at):
    """All at once to four servers by least-pending: two routers pile up until the first scrape tells them."""
    requests = [request_at(0.1, 1000, line=line) for line in range(1, 9)]

    ends = {}
    for routers in (1, 2):
        world = Simulation(
            simple_world(4, router=placed("least-pending"), routers=RouterGroup(routers)), requests
        )
        ends[routers] = float(world.run().requests.ttft_s.max())

    assert ends == {1: pytest.approx(2.0), 2: pytest.approx(2.0)}


@pytest.fixture
def at_the_knee(request_at):
    """Synthetic: 600 prompts of 40 beginnings, Poisson arrivals that eight servers just keep up with."""
    random, at_s, requests = Random(7), 0.0, []
    for line in range(1, 601):
        at_s += random.expovariate(4.3)
        shared = 1 + min(39, int(random.expovariate(0.12)))
        beginning = tuple(shared * 100 + block for block in range(4))
        own = tuple(100_000 + line * 10 + block for block in range(2 * random.randint(0, 3)))
        ids = beginning + own
        requests.append(request_at(at_s, 512 * len(ids), ids=ids, line=line))
    return requests


def in_time(world):
    """Return the share of a world's requests whose TTFT is within 5 s."""
    ttft_s = world.run().requests.ttft_s
    return float((ttft_s <= 5.0).mean())


def test_routers_that_share_queues_out_serve_about_as_many_in_time_as_one(simple_world, at_the_knee):
    """At the knee, where an order and knowledge of its own for each router make most of them late."""
    router = placed("prefix-cost", QueueOrder.IN_TIME_FIRST)
    share = {
        owners: in_time(
            Simulation(simple_world(8, router=router, routers=RouterGroup(8, owners)), at_the_knee)
        )
        for owners in (1, 8, None)
    }

    assert share[8] > share[1] - 0.05
    assert share[None] < share[1] - 0.2


def test_a_chosen_worker_that_dies_loses_no_job(simple_world, at_the_knee):
    """Its jobs are tried elsewhere by the router that keeps its queue."""
    router = placed("prefix-cost", retries={"maxPerRequest": 5, "budgetFraction": 1.0})
    failures = (WorkerFailure(20.0, "aggregated-1", 40.0), WorkerFailure(30.0, "aggregated-2"))
    world = Simulation(
        simple_world(8, router=router, routers=RouterGroup(4, 4), failures=failures), at_the_knee[:200]
    )

    world.run()

    assert {job.outcome for job in world.jobs} == {JobOutcome.OK}


def test_news_count_other_routers_jobs(request_at):
    """What another router has pending at "a" sends the next request to "b"."""
    router = routing(placed("least-pending"))
    router.set_workers([Server("a"), Server("b")], 0.0)
    router.core.set_peer_tokens({"a": 5000, "b": 10}, 0.0, asked_s=0.0)
    request = request_at(0.0)

    assert dispatched(router, Job(0, request, PrefixChains(0).chain(request)), 0.0) == "b"
    assert router.core.entry_queue.pending_tokens("b", 0.0) == 1000


def test_rebalancing_moves_what_would_wait_too_long(simple_world, request_at):
    """One prefix in a burst: both of its pair are late, and its queue is shared out between them."""
    requests = [request_at(0.01 * i, 1000, ids=(1, 500 + i), line=i + 1) for i in range(40)]
    router = placed("dualmap")
    moving = Simulation(simple_world(4, router=router), requests)

    moving.run()

    assert len({job.worker for job in moving.jobs}) >= 2


def test_without_slots_an_answer_weighs_until_it_ends(request_at):
    """As live: an aggregated worker whose prompts are computed is not idle while it answers."""
    router, chains = routing(placed("least-loaded"), slot_requests=None), PrefixChains(0)
    router.set_workers([Server("a"), Server("b")], 0.0)
    jobs = [
        Job(index, each, chains.chain(each)) for index, each in enumerate([request_at(0.0), request_at(1.0)])
    ]
    first = dispatched(router, jobs[0], 0.0)
    router.prefilled(jobs[0], 0.5)

    assert router.core.entry_queue.pending_tokens(first, 0.5) == 1000
    assert dispatched(router, jobs[1], 1.0) != first

    router.left_entry(jobs[0], 2.0)
    assert router.core.entry_queue.pending_tokens(first, 0.5) == 0


def test_least_loaded_looks_at_the_gauges_that_it_was_told():
    """KV in use decides before tokens in flight, once every worker's is known."""
    size = WorkerSize(100_000)
    router = VirtualRouter(placed("least-loaded"), {Role.PREFILL: size, Role.DECODE: size})
    assert router.reads_usage
    servers = [Server("a", Role.PREFILL), Server("b", Role.PREFILL), Server("d", Role.DECODE)]
    router.set_workers(servers, 0.0)
    router.set_usage({"a": 0.5, "b": 0.0}, router.core.entry_queue.inflight_tokens(), 0.0)
    request = TraceRequest(0.0, 1000, 10, None, 1)
    for index in range(2):
        job = Job(index, request, (1, 2))
        assert dispatched(router, job, 0.0) == "b"
        router.prefilled(job, 0.0)
