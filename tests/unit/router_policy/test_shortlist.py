"""In a large fleet a few workers are asked, and the choice is as good as if all were."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.router.core.dispatch_queue import DispatchQueue
from penstock.router.core.waiting import QueueSettings
from penstock.router.policy.policies import ALL_UP_TO, PrefixCost, prefix_cost
from penstock.router.policy.routing_policy import Arrival, WorkerLoad

FLEET = 100
_NOISE = 0.02


def fleet_of(count):
    """Workers that have nothing to do; throughput is known."""
    queues = DispatchQueue(PrefixCost(), QueueSettings(tokens_per_s=10_000.0))
    queues.set_workers([WorkerLoad(f"w{number}") for number in range(count)], 0.0)
    return queues


def submit(queues, item, chain, tokens, now_s=0.0, **more):
    """Place a request, and return its worker."""
    queues.submit(item, Arrival(tuple(chain), tokens, **more), now_s)
    list(queues.dispatch(now_s))
    return queues.worker_of(item)


def test_a_conversation_comes_back_to_its_worker():
    """Each turn adds a block; among 100 workers, with 300 others between two turns."""
    queues = fleet_of(FLEET)
    chain = [1, 2, 3]
    home = submit(queues, "first", chain, 1500)
    queues.prefilled("first", 0.1)
    for turn in range(6):
        for other in range(300):
            item = f"{turn}/{other}"
            submit(queues, item, [1000 * turn + other + 50], 100, 1.0 + turn)
            queues.prefilled(item, 1.0 + turn)
        chain.append(10_000 + turn)
        assert submit(queues, turn, chain, 512 * len(chain), 2.0 + turn) == home
        queues.prefilled(turn, 2.5 + turn)


def test_idle_workers_are_found_however_many_are_busy():
    """All but one of 100 were given 50,000 tokens; within one turn the idle one is found."""
    queues = fleet_of(FLEET)
    for number in range(FLEET - 1):
        avoid = frozenset(f"w{each}" for each in range(FLEET) if each != number)
        submit(queues, number, [number + 10], 50_000, avoid=avoid)
    found = {submit(queues, f"r{number}", [5000 + number], 10) for number in range(FLEET // 8 + 1)}
    assert f"w{FLEET - 1}" in found


@settings(max_examples=25)
@given(st.integers(0, 1 << 30), st.integers(1, 4))
def test_the_choice_is_as_good_as_a_full_scan(seed, holders):
    """Exactly, but for the policy's own noise: with four holders of a beginning at most, and each load seen once as it is."""
    rng = random.Random(seed)
    policy = PrefixCost()
    queues = DispatchQueue(policy, QueueSettings(tokens_per_s=10_000.0))
    names = [f"w{number}" for number in range(FLEET)]
    queues.set_workers([WorkerLoad(name) for name in names], 0.0)
    homes = [rng.sample(names, holders) for _ in range(20)]
    for item in range(200):
        family = rng.randrange(len(homes))
        chain = [family, 100 + rng.randrange(60), 1000 + item][: rng.randrange(1, 4)]
        away = frozenset(names) - frozenset(homes[family])
        submit(queues, item, chain, rng.randrange(1, 20_000), avoid=away)
    for probe in range(20):
        chain = (probe, 100 + rng.randrange(60), 9000 + probe)
        arrival = Arrival(chain, rng.randrange(1, 20_000))
        see_each_load(queues)
        costs = {
            name: prefix_cost(each, arrival, each.uncached(arrival), queues.workers.estimates)
            for name, each in queues.workers.eligible.items()
        }
        chosen = submit(queues, f"probe {probe}", chain, arrival.tokens)
        assert costs[chosen] <= min(costs.values()) * (1 + _NOISE)


def see_each_load(queues):
    """Let one turn of the fleet pass in which nothing is placed."""
    for item in range(FLEET // 8 + 1):
        queues.submit(("look", item), Arrival((), 0), 0.0)
        queues.cancel(("look", item))


def test_small_fleets_are_asked_whole():
    """Nothing is left to chance up to 64 workers: the one idle of 64 is found at once."""
    queues = fleet_of(ALL_UP_TO)
    for number in range(ALL_UP_TO - 1):
        submit(queues, number, [number + 10], 5000, avoid=frozenset({"w63"}))
    assert submit(queues, "r", [99], 10) == "w63"


def test_workers_that_failed_a_request_are_not_listed():
    """Unless there is no other."""
    queues = fleet_of(FLEET)
    home = submit(queues, "first", [1, 2], 1000)
    assert submit(queues, "again", [1, 2], 1000, avoid=frozenset({home})) != home
    everybody = frozenset(f"w{number}" for number in range(FLEET))
    assert submit(queues, "any", [1, 2], 1000, avoid=everybody)


def test_workers_that_leave_are_forgotten():
    """What they held is nobody's."""
    queues = fleet_of(FLEET)
    home = submit(queues, "first", [1, 2], 1000)
    left = [WorkerLoad(f"w{number}") for number in range(FLEET) if f"w{number}" != home]
    queues.set_workers(left, 1.0)
    assert submit(queues, "next", [1, 2], 1000, 1.0) != home
