"""Routers in the world: the live bodies behind one port, side by side, and with old news."""

from random import Random

import pytest

from penstock.api import QueueOrder, Role
from penstock.router.core.worker import WorkerSize
from penstock.simulator.jobs import Job, JobOutcome, PrefixChains
from penstock.simulator.routing import VirtualRouter
from penstock.simulator.scenario import SimpleModel, SimulatedRouters, unbounded_router
from penstock.simulator.servers import SimpleServer
from penstock.simulator.simulation import Simulation
from penstock.simulator.succession import ELECTION_S
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
    job.assignment = effect
    return effect.worker.name


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


def test_routers_with_one_picker_serve_about_as_many_in_time_as_one(simple_world, at_the_knee):
    """At the knee, and the picker's death costs the streams that it relays and little more."""
    router = placed("prefix-cost", QueueOrder.IN_TIME_FIRST)
    share = {}
    for name, group in {
        "one": SimulatedRouters(),
        "eight": SimulatedRouters(8, pick_delay_s=0.001),
        "deaths": SimulatedRouters(8, pick_delay_s=0.001, picker_deaths_s=(40.0, 80.0)),
    }.items():
        world = Simulation(simple_world(8, router=router, routers=group), at_the_knee)
        share[name] = in_time(world)
        lost = [job for job in world.jobs if job.outcome is not JobOutcome.OK]
        assert len(lost) <= len(group.picker_deaths_s) * 600 / 20
        assert all(job.is_orphan or job.ended_s in group.picker_deaths_s for job in lost)

    assert share["eight"] > share["one"] - 0.05
    assert share["deaths"] > share["one"] - 0.08


def test_without_a_picker_arrivals_wait_for_the_next(simple_world, request_at):
    """What comes in between, and what waited before, is picked by the successor; in turn, by the others' routers."""
    requests = [request_at(0.1 * line, 1000, line=line) for line in range(1, 20)]
    group = SimulatedRouters(2, picker_deaths_s=(0.95,))
    world = Simulation(simple_world(1, router=placed("least-pending"), routers=group), requests)

    world.run()

    ended = {job.index: job.outcome for job in world.jobs}
    assert [index for index, outcome in ended.items() if outcome is JobOutcome.FAILED] == [0, 2, 4, 6, 8]
    held = [job for job in world.jobs if 0.95 < job.request.arrival_s < 0.95 + ELECTION_S]
    assert held
    assert all(job.dispatched_s >= 0.95 + ELECTION_S for job in held)


def test_without_slots_an_answer_weighs_until_it_ends(request_at):
    """As live: an aggregated worker whose prompts are computed is not idle while it answers."""
    router, chains = routing(placed("least-loaded"), slot_requests=None), PrefixChains(0)
    router.set_workers([Server("a"), Server("b")], 0.0)
    jobs = [
        Job(index, each, chains.chain(each)) for index, each in enumerate([request_at(0.0), request_at(1.0)])
    ]
    first = dispatched(router, jobs[0], 0.0)
    router.prefilled(jobs[0], 0.5)

    assert router.core.entry_queue.workers.load_of(first, 0.5)[0] == 1000
    assert dispatched(router, jobs[1], 1.0) != first

    router.release(jobs[0], 2.0)
    assert router.core.entry_queue.workers.load_of(first, 0.5)[0] == 0


def test_least_loaded_looks_at_the_gauges_that_it_was_told():
    """KV in use decides before tokens in flight, once every worker's is known."""
    size = WorkerSize(100_000)
    router = VirtualRouter(placed("least-loaded"), {Role.PREFILL: size, Role.DECODE: size})
    assert router.reads_usage
    servers = [Server("a", Role.PREFILL), Server("b", Role.PREFILL), Server("d", Role.DECODE)]
    router.set_workers(servers, 0.0)
    router.set_usage({"a": 0.5, "b": 0.0}, {"a": (0, 0), "b": (0, 0)}, 0.0)
    request = TraceRequest(0.0, 1000, 10, None, 1)
    for index in range(2):
        job = Job(index, request, (1, 2))
        assert dispatched(router, job, 0.0) == "b"
        router.prefilled(job, 0.0)


def job_of(request, index=0, chains=None):
    """Make a job with its keys."""
    return Job(index, request, (chains or PrefixChains(0)).chain(request))


def test_a_cached_prefix_is_not_computed_again(request_at):
    """The second prompt shares one of two blocks; a repeated one still computes its last token."""
    server, chains = SimpleServer(SimpleModel("t", 0.001, 10_000)), PrefixChains(0)
    first = job_of(request_at(0.0, 1024, ids=(1, 2)), 0, chains)
    second = job_of(request_at(0.0, 1024, ids=(1, 3)), 1, chains)
    third = job_of(request_at(0.0, 1024, ids=(1, 2)), 2, chains)
    for job in (first, second, third):
        server.add(job, 0.0)

    ends = []
    while (due_s := server.next_s()) is not None:
        if server.run(due_s):
            ends.append(due_s)

    assert [job.cached_tokens for job in (first, second, third)] == [0, 512, 1023]
    assert [round(end_s, 6) for end_s in ends] == [1.024, 1.536, 1.537]


def test_engine_keys_follow_the_text_of_partial_blocks(request_at):
    """600 tokens are 37 full blocks of 16; a prompt that continues shares exactly those it has in common."""
    chains = PrefixChains(0)
    short = job_of(request_at(0.0, 600, ids=(1, 2)), 0, chains)
    long = job_of(request_at(0.0, 1024, ids=(1, 2)), 1, chains)
    other = job_of(request_at(0.0, 1024, ids=(1, 3)), 2, chains)

    keys = chains.block_keys(short, 16)

    assert len(keys) == 37
    assert chains.block_keys(long, 16)[:37] == keys
    assert len(set(keys) & set(chains.block_keys(other, 16))) == 32
