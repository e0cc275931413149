"""A request that a worker gives up for a higher tier ends in the simulation as it does live: failed, and once."""

from penstock.api import Role
from penstock.engine.serve.settings import PreemptionFlag
from penstock.simulator.scenario import PoolSpec, ProfiledModel, Scenario
from penstock.simulator.simulation import Simulation
from penstock.workload.traces import TraceRequest


def world(preemption, tokens=4096):
    """Make a small worker, a long background request and a premium one that needs its blocks."""
    model = ProfiledModel(
        "h200-llama-3.1-8b-tp1", kv_tokens=tokens, block_size=16, preemption=PreemptionFlag(**preemption)
    )
    requests = [TraceRequest(0.0, 3000, 500, None, 1), TraceRequest(1.0, 2000, 4, None, 2)]
    made = Simulation(Scenario([PoolSpec(Role.AGGREGATED, 1, model)]), requests)
    made.jobs[0].priority = 2
    return made


def test_background_gives_way_and_comes_back():
    """Premium's first token does not wait for the 500 outputs; background ends later, in full."""
    requests = world({"premiumReservedFraction": 0.0}).run().requests
    assert requests.is_ok.all()
    assert requests.ttft_s[1] < 0.5 < requests.e2e_s[0]


def test_a_dropped_request_fails_and_nothing_waits_for_it():
    """Its worker is free and the run ends."""
    requests = world({"premiumReservedFraction": 0.0, "dropAboveSeconds": 0.001}).run().requests
    assert list(requests.is_ok) == [False, True]


def test_without_reserve_or_tiers_nobody_is_moved():
    """A request that cannot have the reserve's blocks waits, and the other is not thrown out by an equal."""
    made = world({"premiumReservedFraction": 0.0})
    made.jobs[1].priority = 2
    requests = made.run().requests
    assert requests.is_ok.all()
    assert requests.ttft_s[1] > 1.0
