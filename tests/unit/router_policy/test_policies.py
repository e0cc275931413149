"""The routing policies: where each sends a request."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placement import arrival, compute, placement, send, where

from penstock.api import QueueOrder, RouterConfig, Tier, TiersConfig
from penstock.core.errors import ConfigError
from penstock.router.policy.dualmap import CacheAffinity, DualMap, PairChoice
from penstock.router.policy.policies import (
    MAX_COMPARED_WORKERS,
    WINDOW_S,
    KvCost,
    LeastPending,
    MinTtft,
    Preble,
    PrebleE2,
    PrefixCost,
    cheapest,
    prefix_cost,
)
from penstock.router.policy.registry import StickySessions, make_policy, policy_names
from penstock.router.policy.routing_policy import Arrival, WorkerLoad

CHAIN = tuple(range(11, 19))
FLEET = 100


@pytest.mark.parametrize("name", policy_names())
def test_equal_prompts_meet_their_cache_while_nothing_is_busy(name):
    """A second equal prompt, once the first is done, goes where its prefix is (load-only policies aside)."""
    queues = placement(make_policy(RouterConfig(policy=name)))
    homes = {compute(queues, item, arrival(1, 2, 3), float(item), item + 0.5) for item in range(4)}

    assert len(homes) == 1 or name in {"least-pending", "least-loaded", "round-robin"}


@pytest.mark.parametrize(
    ("policy", "chains", "expected"),
    [
        (LeastPending, [(1, 2, 3), (1, 2, 3)], "ab"),
        (lambda: DualMap(adaptive_prefix=False), [(1,), (2,)], "ba"),
        (Preble, [(1, 2), (1, 2, 3), (1, 8, 9)], "aab"),
        (CacheAffinity, [(1, 100), (1, 101), (1, 102), (1, 103)], "bbbb"),
        (KvCost, [(1, 2), (9,)], "ab"),
    ],
    ids=[
        "the paper's Least Loaded, whatever is cached",
        "a pair with equal hits takes the less loaded",
        "Preble follows the cache above half, else load",
        "one prefix, one worker, however long its queue",
        "a prompt that runs, though cached, occupies blocks",
    ],
)
def test_where_prompts_go_that_come_at_once(policy, chains, expected):
    """Of two workers, by the policy's own sense of load and cache."""
    queues = placement(policy(), names="ab")

    assert expected == "".join(send(queues, at, arrival(*chain)) for at, chain in enumerate(chains))


def test_min_ttft_weighs_queue_against_hit():
    """512 cached tokens are worth waiting behind 400, not behind 600."""
    queues = placement(MinTtft(), names=("a", "b"))
    home = compute(queues, "warm", arrival(1), 0.0, 0.512)
    queues.workers.set_peer_load(home, 400)
    queues.submit("near", arrival(1, 7), 1.0)
    assert home == where(queues)["near"]

    queues.cancel("near")
    queues.workers.set_peer_load(home, 600)
    queues.submit("far", arrival(1, 8), 1.0)
    assert home != where(queues)["far"]


def test_dualmap_keeps_to_the_cache_until_the_slo_is_at_risk():
    """At 1,000 tokens/s and an SLO of 5 s the hit is followed up to 5,000 pending tokens, then load decides."""
    queues = placement(DualMap(rebalance=False, adaptive_prefix=False))
    homes = []
    for item in range(14):
        queues.submit(item, arrival(1, 2, 3, 100 + item), 0.0)
        homes.append(where(queues)[item])

    # The first computes 2,048 tokens, each further one 512: number 6 would wait 2,048 + 5 x 512 + 512 = 5,120.
    assert len(set(homes[:6])) == 1
    assert homes[6] != homes[0]
    assert len(set(homes)) == 2


@pytest.mark.parametrize("choice", PairChoice)
def test_dualmap_never_leaves_its_pair(choice):
    """A prefix has two homes; rebalancing only moves between them."""
    queues = placement(DualMap(choice=choice, adaptive_prefix=False), names=list("abcdefgh"))
    for item in range(200):
        queues.submit(item, arrival(1, 100 + item), 0.0)

    assert len(set(where(queues).values())) <= 2


def test_who_decodes_much_is_given_less():
    """Nothing pending or cached anywhere: the one whose answers are out gets the next, until they have ended."""
    queues = placement(PrefixCost(), names=("a", "b"))
    homes = [compute(queues, item, arrival(100 + item, tokens=2000)) for item in range(4)]
    assert sorted(homes) == ["a", "a", "b", "b"]

    for item in (each for each in range(4) if homes[each] == "b"):
        queues.release(item, 1.0)
    queues.submit("next", arrival(200, tokens=2000), 1.0)

    assert where(queues)["next"] == "b"


@pytest.mark.parametrize(("others", "expected"), [(0, "b"), (40_000, "a")])
def test_a_hit_is_left_where_decodes_pile_up_and_not_where_all_decode_alike(others, expected):
    """2,048 cached tokens are worth 8,192 of waiting: 40,000 decoded count 4,000, and 11,200 more alongside four idle workers."""
    queue = placement(make_policy(RouterConfig(policy="prefix-cost")), "abcde")
    assert compute(queue, 0, arrival(1, 2, 3, 4)) == "a"
    for name, worker in queue.workers.eligible.items():
        worker.decoding_tokens = 40_000 if name == "a" else others
    assert send(queue, 1, arrival(1, 2, 3, 4)) == expected


def test_sessions_stay_where_they_began():
    """Whatever the policy would say now, as long as the worker is there and has not failed them."""
    queues = placement(StickySessions(LeastPending()), names=("a", "b"))
    homes = []
    for item in range(3):
        queues.submit(item, Arrival((item,), 512, session="s"), 0.0)
        homes.append(where(queues)[item])
    queues.submit("failed", Arrival((9,), 512, frozenset(homes[:1]), session="s"), 0.0)
    queues.submit("none", Arrival((8,), 512), 0.0)

    assert len(set(homes)) == 1
    assert where(queues)["failed"] != homes[0]


def test_a_session_stays_where_another_router_began_it():
    """The picker was told of it, and may now choose for the other router."""
    policy = StickySessions(LeastPending())
    queues = placement(policy, names=("a", "b"))
    policy.prompt_queued(Arrival((0,), 512, session="s"), "b", queues.workers.eligible)
    for item in range(3):
        queues.submit(item, Arrival((item,), 512, session="s"), 0.0)

    assert set(where(queues).values()) == {"b"}


def test_of_too_many_sessions_the_quietest_is_forgotten():
    """Bounded: its next request is placed like a new one."""
    queues = placement(StickySessions(LeastPending(), most=1), names=("a", "b"))
    for item, session in enumerate("stus"):
        queues.submit(item, arrival(item, session=session), 0.0)

    assert where(queues) == {0: "a", 1: "b", 2: "a", 3: "b"}


# ---------------------------------------------------------------------- prefix cost


@pytest.mark.parametrize(("waiting_tokens", "expected"), [(14_500, "a"), (17_000, "b")])
@pytest.mark.parametrize(
    "policy", [PrefixCost, lambda: DualMap(choice=PairChoice.PREFIX_COST, rebalance=False)]
)
def test_a_hit_is_worth_four_times_its_tokens_of_waiting(policy, waiting_tokens, expected):
    """4,000 cached tokens outweigh just under 16,000 waiting ones, with what is decoded; all of two workers or a pair alike."""
    queues = placement(policy(), names=("a",), slot_requests=1, tokens_per_s=None)
    request = Arrival(CHAIN, 4000, block_tokens=1000)
    compute(queues, "first", request, 0.0, 1.0)
    send(queues, "load", Arrival((21,), waiting_tokens), 1.0)
    queues.set_workers(map(WorkerLoad, ["a", "b"]), 1.0)

    assert send(queues, "r", request, 1.0) == expected


@pytest.mark.parametrize(
    ("tokens_per_s", "bounds"),
    [((1000, 3000), ((1.25, 4.0), (0.5, 0.9))), ((3000, 2727), ((1.0, 1.0), (1.0, 1.0)))],
    ids=["a third", "ten percent are noise"],
)
def test_a_clearly_slower_worker_is_known_as_such(tokens_per_s, bounds):
    """Equal throughputs that measure a little differently count as equal."""
    queues = placement(PrefixCost(), names=("a", "b"), tokens_per_s=None)
    for step in range(40):
        for name, rate in zip("ab", tokens_per_s, strict=True):
            request = arrival(1000 * step + rate, tokens=300, avoid=frozenset({"a", "b"} - {name}))
            compute(queues, (name, step), request, float(step), step + 300 / rate)

    for worker, (least, most) in zip(queues.workers.eligible.values(), bounds, strict=True):
        assert least <= worker.relative_slowdown <= most


@pytest.mark.parametrize("policy", [PrefixCost, MinTtft])
def test_cold_prompts_fill_idle_caches_evenly(policy):
    """Nothing waits anywhere: sixteen prefixes over four workers are four each."""
    queues = placement(policy(), tokens_per_s=None)
    homes = [compute(queues, item, arrival(item), float(item), item + 0.5) for item in range(16)]

    assert sorted(homes.count(name) for name in "abcd") == [4, 4, 4, 4]


def measured(counts, **tokens_per_s):
    """Two workers, idle since second 60: up to then each has computed this many prompts of 1,000 tokens at such throughputs."""
    queues = placement(PrefixCost(), tokens_per_s, tokens_per_s=None)
    times = []
    for (name, rate), count in zip(tokens_per_s.items(), counts, strict=True):
        times += [(60.0 - (left + 1) * 1000 / rate, 60.0 - left * 1000 / rate, name) for left in range(count)]
    for item, (begin_s, end_s, name) in enumerate(sorted(times, key=lambda each: each[1])):
        request = Arrival((500 + item,), 1000, frozenset(tokens_per_s) - {name})
        compute(queues, item, request, begin_s, end_s)
        queues.release(item, end_s)
    return queues


@pytest.mark.parametrize(("waiting_tokens", "expected"), [(2_000, "fast"), (6_000, "slow")])
def test_a_slower_worker_is_used_before_the_wait_elsewhere_exceeds_its_own_slowness(waiting_tokens, expected):
    """4,000 new tokens take 4 s more at half the speed: behind 2 s of waiting the fast one is sooner, behind 6 s it is not.

    What recomputing does to caches costs as much on either.
    """
    queues = measured((10, 20), slow=500, fast=1000)
    send(queues, "load", Arrival((21,), waiting_tokens, frozenset({"slow"})), 60.0)

    assert send(queues, "r", Arrival((31, 32, 33, 34), 4000, block_tokens=1000), 60.0) == expected


@pytest.mark.parametrize(
    ("idle_s", "expected"), [(0.0, range(20, 26)), (300.0, range(11, 17))], ids=["at once", "after 5 min"]
)
def test_a_slow_measurement_of_an_idle_worker_is_forgotten(idle_s, expected):
    """Of a burst of 26 equal prompts an equal worker that was measured slow once gets its half after some minutes again."""
    queues = measured((1, 20), once=50, twin=1000)
    for item in range(26):
        queues.submit(item, Arrival((1000 + item,), 1000), 60.0 + idle_s)

    assert list(where(queues).values()).count("twin") in expected


def full_scan(pool, request, estimates):
    """The choice as it is defined: every cost is computed, then of those within 2% the one that remembers least is taken."""
    usual = 1.5 * sum(each.decoding_tokens for each in pool) / len(pool)
    costs = [
        prefix_cost(each, request, each.uncached(request), estimates)
        + 0.4 * max(0.0, each.decoding_tokens - usual)
        for each in pool
    ]
    as_good = min(costs) * 1.02
    _, at = min((pool[at].index.count, at) for at, cost in enumerate(costs) if cost <= as_good)
    return pool[at], pool[at].uncached(request)


@settings(max_examples=60)
@given(st.integers(0, 1 << 30), st.sampled_from([None, TiersConfig()]), st.sampled_from([None, 4000]))
def test_the_choice_is_that_of_a_full_scan(seed, tiers, slots):
    """Whatever waits, runs, decodes or is late at workers of unlike throughput, and whatever they hold."""
    rng = random.Random(seed)
    paces = {name: rng.choice([5_000, 10_000, 30_000]) for name in "abcdefgh"}
    rules = {"slot_tokens": slots, "order": QueueOrder.IN_TIME_FIRST, "slo_s": 0.5, "tiers": tiers}
    queue = placement(PrefixCost(), paces, tokens_per_s=None, **rules)
    now_s, running = 0.0, []
    for item in range(60):
        now_s += rng.expovariate(40)
        chain = (rng.randrange(3), 10 + rng.randrange(6), 100 + rng.randrange(12), 1000 + item)
        tier, tenant = rng.choice(list(Tier)), rng.choice("xy")
        request = Arrival(chain[: rng.randrange(5)], rng.randrange(1, 4000), tier=tier, tenant=tenant)
        queue.workers.estimates.now_s = now_s
        pool = list(queue.workers.eligible.values())
        assert cheapest(pool, request, queue.workers.estimates) == full_scan(
            pool, request, queue.workers.estimates
        )
        queue.submit(item, request, now_s)
        running += [(each.item, each.uncached / paces[each.worker]) for each in queue.dispatch(now_s)]
        while running and rng.random() < 0.5:
            done, took_s = running.pop(rng.randrange(len(running)))
            now_s += took_s * rng.random()
            queue.prefilled(done, now_s)
            if rng.random() < 0.5:
                queue.release(done, now_s)


@pytest.mark.parametrize(
    ("request_", "held", "expected"),
    [
        *((arrival(0, 1, tokens=600), *each) for each in ((0, 600), (1, 88), (2, 1))),
        (arrival(), 0, 0),
        (arrival(0, 1), 2, 1),
        *(
            (arrival(*range(10), tokens=1500, sub_block_keys=8), *each)
            for each in ((0, 1500), (4, 1244), (8, 988), (9, 476), (10, 1))
        ),
    ],
)
def test_cached_tokens_are_those_of_blocks_and_of_parts_of_the_first(request_, held, expected):
    """A partial last block counts its own tokens; eight keys of 64 tokens come first; at least one token is computed."""
    assert request_.uncached(held) == expected


# ---------------------------------------------------------------------- prefix cost in a large fleet


def fleet_of(count=FLEET):
    """Workers that have nothing to do; throughput is known."""
    return placement(PrefixCost(), [f"w{number}" for number in range(count)], tokens_per_s=10_000.0)


def test_a_conversation_comes_back_to_its_worker():
    """Each turn adds a block; among 100 workers, with 300 others between two turns."""
    queues = fleet_of()
    chain = [1, 2, 3]
    home = compute(queues, "first", arrival(*chain), 0.0, 0.1)
    for turn in range(6):
        for other in range(300):
            compute(queues, (turn, other), arrival(1000 * turn + other + 50, tokens=100), 1.0 + turn)
        chain.append(10_000 + turn)
        assert compute(queues, turn, arrival(*chain), 2.0 + turn, 2.5 + turn) == home


def test_idle_workers_are_found_however_many_are_busy():
    """All but one of 100 were given 50,000 tokens; within one turn the idle one is found."""
    queues = fleet_of()
    for number in range(FLEET - 1):
        avoid = frozenset(f"w{each}" for each in range(FLEET) if each != number)
        send(queues, number, arrival(number + 10, tokens=50_000, avoid=avoid))
    found = {
        send(queues, f"r{number}", arrival(5000 + number, tokens=10)) for number in range(FLEET // 8 + 1)
    }
    assert f"w{FLEET - 1}" in found


def see_each_load(queues):
    """Let one turn of the fleet pass in which nothing is placed."""
    for item in range(FLEET // 8 + 1):
        queues.submit(("look", item), Arrival((), 0), 0.0)
        queues.cancel(("look", item))


@settings(max_examples=25)
@given(st.integers(0, 1 << 30), st.integers(1, 4))
def test_the_choice_is_as_good_as_a_full_scan(seed, holders):
    """Exactly, except for the policy's own noise: with four holders of a beginning at most, and each load seen once as it is."""
    rng = random.Random(seed)
    queues = fleet_of()
    names = list(queues.workers.eligible)
    homes = [rng.sample(names, holders) for _ in range(20)]
    for item in range(200):
        family = rng.randrange(len(homes))
        chain = [family, 100 + rng.randrange(60), 1000 + item][: rng.randrange(1, 4)]
        away = frozenset(names) - frozenset(homes[family])
        send(queues, item, arrival(*chain, tokens=rng.randrange(1, 20_000), avoid=away))
    for probe in range(20):
        chain = (probe, 100 + rng.randrange(60), 9000 + probe)
        request = Arrival(chain, rng.randrange(1, 20_000))
        see_each_load(queues)
        costs = {
            name: prefix_cost(each, request, each.uncached(request), queues.workers.estimates)
            for name, each in queues.workers.eligible.items()
        }
        assert costs[send(queues, f"probe {probe}", request)] <= min(costs.values()) * 1.02


def test_small_fleets_are_asked_whole():
    """Nothing is left to chance up to 64 workers: the one idle of 64 is found at once."""
    queues = fleet_of(MAX_COMPARED_WORKERS)
    for number in range(MAX_COMPARED_WORKERS - 1):
        send(queues, number, arrival(number + 10, tokens=5000, avoid=frozenset({"w63"})))
    assert send(queues, "r", arrival(99, tokens=10)) == "w63"


def test_workers_that_failed_a_request_or_left_are_not_listed():
    """Unless there is no other; what a worker that left had held is nowhere."""
    queues = fleet_of()
    home = send(queues, "first", arrival(1, 2))
    assert send(queues, "again", arrival(1, 2, avoid=frozenset({home}))) != home
    everybody = frozenset(f"w{number}" for number in range(FLEET))
    assert send(queues, "any", arrival(1, 2, avoid=everybody))
    queues.set_workers([WorkerLoad(name) for name in everybody - {home}], 1.0)
    assert send(queues, "next", arrival(1, 2), 1.0) != home


# ---------------------------------------------------------------------- Preble's E2


LARGE = ((1, 2, 3, 4), 4000, 0.0, "ab")


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ([LARGE, *(((100 + at,), 400, 1.0 + at, "ab") for at in range(9))], "abbbbbbbbb"),
        ([LARGE, ((5,), 1000, 1.0, "ab"), ((6,), 1000, WINDOW_S, "ab")], "aba"),
        ([LARGE, ((1, 2, 3, 50), 4000, 1.0, "ab")], "aa"),
        ([LARGE, ((1, 2, 50, 51), 4000, 1.0, "ab")], "ab"),
        (
            [(*LARGE[:3], "a"), (*LARGE[:3], "b"), ((9,), 8000, 1.0, "a"), (*LARGE[:2], 2.0, "abc")],
            "abab",
        ),
    ],
    ids=[
        "what was computed weighs for the window",
        "beyond the window it is forgotten",
        "three of four blocks cached outweigh the rest",
        "two of four do not",
        "of several that hold the prefix the less loaded, and no idle one",
    ],
)
def test_preble_e2_weighs_what_was_given_lately(prompts, expected):
    """All are computed at once; each prompt is (keys, tokens, time, workers that may take it)."""
    queues = placement(PrebleE2(), names="abc" if any("c" in each[3] for each in prompts) else "ab")
    found = ""
    for item, (chain, tokens, now_s, names) in enumerate(prompts):
        request = Arrival(chain, tokens, frozenset("abc") - frozenset(names), block_tokens=1000)
        found += compute(queues, item, request, now_s)

    assert found == expected


def test_a_worker_that_came_back_begins_with_nothing_given():
    """What it was given before it left was another time's load."""
    queues = placement(PrebleE2(), names="ab")
    assert compute(queues, "large", Arrival((1, 2, 3, 4), 4000, block_tokens=1000)) == "a"
    queues.set_workers([WorkerLoad("b")], 1.0)
    queues.set_workers(map(WorkerLoad, "ab"), 2.0)
    compute(queues, "small", Arrival((5,), 100, frozenset("a"), block_tokens=1000), 3.0)

    assert compute(queues, "next", Arrival((6,), 1000, block_tokens=1000), 4.0) == "a"


@pytest.mark.parametrize(
    ("parameters", "slo_s", "expected"),
    [
        ({}, 7.0, "idle"),
        ({}, 8.0, "holder"),
        ({"idle_slo_share": 1.0}, 5.0, "idle"),
        ({"idle_slo_share": 1.0}, 7.0, "holder"),
        ({"idle_slo_share": 0.5}, 8.0, "idle"),
        ({"idle_slo_share": None}, 5.0, "holder"),
    ],
    ids=[
        "late by a fifth's error",
        "surely in time",
        "late there",
        "in time there",
        "beyond half of the target",
        "waits",
    ],
)
def test_a_request_leaves_a_hit_that_comes_too_late_for_an_idle_worker(parameters, slo_s, expected):
    """3,000 of 4,000 tokens are cached behind 5,000 that wait: 6 s there and 4 s at an idle worker, costs of 9,000 and 16,000."""
    policy = make_policy(RouterConfig(policy="prefix-cost", policyParameters=parameters))
    queues = placement(policy, names=("holder",), slo_s=slo_s)
    request = Arrival((31, 32, 33, 34), 4000, block_tokens=1000)
    compute(queues, "first", Arrival((31, 32, 33), 3000, block_tokens=1000), 0.0, 3.0)
    queues.release("first", 3.0)
    send(queues, "load", Arrival((21,), 5000), 3.0)
    queues.set_workers(map(WorkerLoad, ["holder", "idle"]), 3.0)

    assert send(queues, "r", request, 3.0) == expected


@pytest.mark.parametrize("busy_tokens", [0, 500])
def test_no_request_leaves_its_hit_for_a_worker_with_work_or_one_that_is_later(busy_tokens):
    """The other worker is idle and takes 7 s for a prompt that its hit serves in 6 s; or it is sooner and has something to do."""
    policy = make_policy(RouterConfig(policyParameters={"idle_slo_share": 1.0}))
    tokens = 4000 if busy_tokens else 7000
    queues = placement(policy, names=("holder",), slo_s=5.0)
    known = tuple(range(100, 100 + tokens // 1000))
    compute(queues, "first", Arrival(known[:-1], tokens - 1000, block_tokens=1000), 0.0, tokens / 1000 - 1)
    queues.release("first", 10.0)
    send(queues, "load", Arrival((21,), 5000), 10.0)
    queues.set_workers(map(WorkerLoad, ["holder", "other"]), 10.0)
    if busy_tokens:
        send(queues, "small", Arrival((41,), busy_tokens, frozenset({"holder"})), 10.0)

    assert send(queues, "r", Arrival(known, tokens, block_tokens=1000), 10.0) == "holder"


@pytest.mark.parametrize("share", [0, 1.5, "much"])
def test_a_share_that_is_none_is_refused(share):
    """The message names key and parameter."""
    with pytest.raises(ConfigError, match=r"router\.policyParameters: .*idle_slo_share"):
        make_policy(RouterConfig(policyParameters={"idle_slo_share": share}))
