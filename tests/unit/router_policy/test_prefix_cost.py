"""Prefix cost: a recomputed token weighs as much as four waiting ones."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.api import QueueOrder, Tier, TiersConfig
from penstock.router.core.dispatch_queue import DispatchQueue
from penstock.router.core.waiting import QueueSettings
from penstock.router.policy.dualmap import DualMap, DualMapSettings, PairChoice
from penstock.router.policy.policies import MinTtft, PrefixCost, cheapest, prefix_cost
from penstock.router.policy.routing_policy import Arrival, WorkerLoad

CHAIN = tuple(range(11, 19))


def filled(placer, waiting_tokens):
    """Two workers: "a" has the prefix cached and that many tokens waiting, "b" has nothing."""
    placement = DispatchQueue(placer, QueueSettings(slot_requests=1))
    placement.set_workers(map(WorkerLoad, ["a"]), 0.0)
    placement.submit("first", Arrival(CHAIN, 4000, block_tokens=1000), 0.0)
    list(placement.dispatch(0.0))
    placement.prefilled("first", 1.0)
    placement.submit("load", Arrival((21,), waiting_tokens), 1.0)
    list(placement.dispatch(1.0))
    placement.set_workers(map(WorkerLoad, ["a", "b"]), 1.0)
    return placement


@pytest.mark.parametrize(("waiting_tokens", "expected"), [(15_000, "a"), (17_000, "b")])
@pytest.mark.parametrize(
    "placer", [PrefixCost, lambda: DualMap(DualMapSettings(choice=PairChoice.PREFIX_COST, rebalance=False))]
)
def test_a_hit_is_worth_four_times_its_tokens_of_waiting(placer, waiting_tokens, expected):
    """4,000 cached tokens outweigh just under 16,000 waiting ones; all of two workers or a pair alike."""
    placement = filled(placer(), waiting_tokens)

    placement.submit("r", Arrival(CHAIN, 4000, block_tokens=1000), 1.0)

    assert expected in {handed.worker for handed in list(placement.dispatch(1.0)) if handed.item == "r"} or (
        placement.workers.queued_tokens(expected) > 0
    )


def test_a_clearly_slower_instance_costs_more():
    """At a third of the rate, 4,000 tokens cached there are no longer worth 4,000 waiting ones."""
    placement = DispatchQueue(PrefixCost(), QueueSettings())
    placement.set_workers(map(WorkerLoad, ["slow", "fast"]), 0.0)
    for step in range(40):
        for name, rate in (("slow", 1000), ("fast", 3000)):
            item = f"{name} {step}"
            away = frozenset({"slow", "fast"} - {name})
            placement.submit(item, Arrival((hash(item) & 0xFFFFFF,), 300, away), float(step))
            list(placement.dispatch(float(step)))
            placement.prefilled(item, step + 300 / rate)
    slow, fast = (
        placement.workers.eligible["slow"].relative_slowdown,
        placement.workers.eligible["fast"].relative_slowdown,
    )

    assert slow > 1.25
    assert fast < 0.9


def test_equal_paces_that_measure_differently_cost_the_same():
    """Ten percent are noise."""
    placement = DispatchQueue(PrefixCost(), QueueSettings())
    placement.set_workers(map(WorkerLoad, ["a", "b"]), 0.0)
    for step in range(20):
        for name, took_s in (("a", 0.10), ("b", 0.11)):
            item = f"{name} {step}"
            placement.submit(item, Arrival((step,), 300, frozenset({"a", "b"} - {name})), float(step))
            list(placement.dispatch(float(step)))
            placement.prefilled(item, step + took_s)

    assert {each.relative_slowdown for each in placement.workers.eligible.values()} == {1.0}


@pytest.mark.parametrize("policy", [PrefixCost, MinTtft])
def test_cold_prompts_fill_idle_caches_evenly(policy):
    """Nothing waits anywhere: sixteen prefixes over four workers are four each."""
    placement = DispatchQueue(policy(), QueueSettings())
    placement.set_workers(map(WorkerLoad, "abcd"), 0.0)
    homes = []
    for item in range(16):
        placement.submit(item, Arrival((item,), 512), float(item))
        homes += [handed.worker for handed in list(placement.dispatch(float(item)))]
        placement.prefilled(item, item + 0.5)

    assert sorted(homes.count(name) for name in "abcd") == [4, 4, 4, 4]


def measured(counts, **tokens_per_s):
    """Two workers, idle since second 60: up to then each has computed so many prompts of 1,000 tokens at such throughputs."""
    queue = DispatchQueue(PrefixCost(), QueueSettings())
    queue.set_workers(map(WorkerLoad, tokens_per_s), 0.0)
    times = []
    for (name, rate), count in zip(tokens_per_s.items(), counts, strict=True):
        times += [(60.0 - (left + 1) * 1000 / rate, 60.0 - left * 1000 / rate, name) for left in range(count)]
    for item, (begin_s, end_s, name) in enumerate(sorted(times, key=lambda each: each[1])):
        queue.submit(item, Arrival((500 + item,), 1000, frozenset(tokens_per_s) - {name}), begin_s)
        list(queue.dispatch(begin_s))
        queue.prefilled(item, end_s)
        queue.release(item, end_s)
    return queue


@pytest.mark.parametrize(("waiting_tokens", "expected"), [(2_000, "fast"), (6_000, "slow")])
def test_a_slower_worker_is_used_before_the_wait_elsewhere_exceeds_its_own_slowness(waiting_tokens, expected):
    """4,000 new tokens take 4 s more at half the speed: behind 2 s of waiting the fast one is sooner, behind 6 s it is not.

    What recomputing does to caches costs as much on either.
    """
    placement = measured((10, 20), slow=500, fast=1000)
    placement.submit("load", Arrival((21,), waiting_tokens, frozenset({"slow"})), 60.0)
    list(placement.dispatch(60.0))

    placement.submit("r", Arrival((31, 32, 33, 34), 4000, block_tokens=1000), 60.0)

    assert placement.worker_of("r") == expected


@pytest.mark.parametrize(
    ("idle_s", "expected"), [(0.0, range(20, 26)), (300.0, range(11, 17))], ids=["at once", "after 5 min"]
)
def test_a_slow_measurement_of_an_idle_worker_is_forgotten(idle_s, expected):
    """Of a burst of 26 equal prompts an equal worker that was measured slow once gets its half after some minutes again."""
    placement = measured((1, 20), once=50, twin=1000)
    now_s = 60.0 + idle_s
    for item in range(26):
        placement.submit(item, Arrival((1000 + item,), 1000), now_s)

    assert [placement.worker_of(item) for item in range(26)].count("twin") in expected


def full_scan(pool, arrival, estimates):
    """The choice as it is defined: every cost is computed, then of those within 2% the one that remembers least is taken."""
    costs = [prefix_cost(each, arrival, each.uncached(arrival), estimates) for each in pool]
    as_good = min(costs) * 1.02
    _, at = min((pool[at].index.count, at) for at, cost in enumerate(costs) if cost <= as_good)
    return pool[at], pool[at].uncached(arrival)


@settings(max_examples=60)
@given(st.integers(0, 1 << 30), st.sampled_from([None, TiersConfig()]), st.sampled_from([None, 4000]))
def test_the_choice_is_that_of_a_full_scan(seed, tiers, slots):
    """Whatever waits, runs, decodes or is late at workers of unlike throughput, and whatever they hold."""
    rng = random.Random(seed)
    rules = QueueSettings(slot_tokens=slots, order=QueueOrder.IN_TIME_FIRST, slo_s=0.5, tiers=tiers)
    queue = DispatchQueue(PrefixCost(), rules)
    paces = {name: rng.choice([5_000, 10_000, 30_000]) for name in "abcdefgh"}
    queue.set_workers(map(WorkerLoad, paces), 0.0)
    now_s, running = 0.0, []
    for item in range(60):
        now_s += rng.expovariate(40)
        chain = (rng.randrange(3), 10 + rng.randrange(6), 100 + rng.randrange(12), 1000 + item)
        arrival = Arrival(
            chain[: rng.randrange(5)],
            rng.randrange(1, 4000),
            tier=rng.choice(list(Tier)),
            tenant=rng.choice("xy"),
        )
        queue.workers.estimates.now_s = now_s
        pool = list(queue.workers.eligible.values())
        assert cheapest(pool, arrival, queue.workers.estimates) == full_scan(
            pool, arrival, queue.workers.estimates
        )
        queue.submit(item, arrival, now_s)
        running += [(each.item, each.uncached / paces[each.worker]) for each in queue.dispatch(now_s)]
        while running and rng.random() < 0.5:
            done, took_s = running.pop(rng.randrange(len(running)))
            now_s += took_s * rng.random()
            queue.prefilled(done, now_s)
            if rng.random() < 0.5:
                queue.release(done, now_s)


@pytest.mark.parametrize(
    ("tokens", "blocks", "expected"), [(600, 1, 88), (600, 2, 1), (0, 0, 0), (1024, 2, 1)]
)
def test_cached_tokens_are_whole_blocks(tokens, blocks, expected):
    """A partial last block counts its own tokens; at least one token of a prompt is computed."""
    chain = tuple(range(-(-tokens // 512)))

    assert expected == Arrival(chain, tokens).uncached(blocks)


@pytest.mark.parametrize(("held", "expected"), [(0, 1500), (4, 1244), (8, 988), (9, 476), (10, 1)])
def test_parts_of_the_first_block_count_for_their_share(held, expected):
    """Eight keys of 64 tokens, then keys of 512."""
    arrival = Arrival(tuple(range(10)), 1500, sub_block_keys=8)

    assert expected == arrival.uncached(held)
