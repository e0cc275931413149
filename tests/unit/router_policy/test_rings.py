"""Hash rings, and the tree that makes their keys longer where traffic is hot."""

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from penstock.router.policy.rings import VIRTUAL_NODES, HashRing, HotnessTree, pair

NAMES = [f"w{i}" for i in range(8)]
KEYS = [key * 0x9E3779B97F4A7C15 % 2**64 for key in range(2000)]


def filled(ring, names):
    """Return a ring with workers."""
    for name in names:
        ring.add(name)
    return ring


def two_rings(names):
    """Return two rings with independent hashes."""
    return filled(HashRing(seed=1), names), filled(HashRing(seed=2), names)


@pytest.mark.parametrize("names", [[], ["only"], NAMES], ids=len)
def test_a_pair_is_as_large_as_the_fleet_allows(names):
    """No worker, no candidate; one worker, one; else two that differ, for every key."""
    rings = two_rings(names)

    assert {len(set(pair(*rings, key))) for key in KEYS} == {min(2, len(names))}


@given(st.permutations(NAMES), st.lists(st.sampled_from(NAMES), max_size=20))
def test_positions_depend_on_who_is_there_and_not_on_history(order, flapping):
    """Routers that saw joins and leaves in another order agree."""
    one, other = two_rings(NAMES), two_rings(order)
    for name in flapping:
        for ring in other:
            ring.remove(name)
            ring.add(name)

    assert [pair(*one, key) for key in KEYS[:50]] == [pair(*other, key) for key in KEYS[:50]]


def test_shares_are_roughly_even():
    """Virtual nodes keep the fullest worker below twice its fair share."""
    ring = filled(HashRing(seed=2), NAMES)
    homes = [ring.find(key) for key in KEYS]

    assert max(map(homes.count, NAMES)) < 2 * len(KEYS) / len(NAMES)


@pytest.mark.parametrize("count", [1, 2, 8, 300])
def test_lookup_agrees_with_the_definition(count):
    """The first anchor at or after the key's point, the first of all after the last."""
    names = [f"n{i}" for i in range(count)]
    ring = filled(HashRing(seed=1), names)
    digest = xxhash.xxh3_64_intdigest
    anchors = sorted((digest(f"{n}#{i}".encode(), 1), n) for n in names for i in range(VIRTUAL_NODES))
    for key in KEYS[:200]:
        point = digest(key.to_bytes(8, "little"), 1)

        assert next((n for a, n in anchors if a >= point), anchors[0][1]) == ring.find(key)


def test_a_prefix_that_everybody_shares_makes_keys_longer():
    """A system prompt before all requests is hot, so the second block tells them apart."""
    tree = HotnessTree(window=100)
    keys = [tree.key((1, 100 + i, 5), workers=8) for i in range(60)]

    assert keys[-1] == 159


@pytest.mark.parametrize(
    ("window", "workers", "chain_of"),
    [
        (100, 4, lambda i: (i % 20, 7, 8)),
        (50, 2, lambda i: (1, 2, 3)),
        (200, 1024, lambda i: (i, 1_000_000 + i)),
    ],
    ids=["spread evenly", "every pair holds both workers", "the window grows with the workers"],
)
def test_without_a_prefix_above_its_share_keys_stay_short(window, workers, chain_of):
    """Of two workers 2/n is all; at 1,024 workers 2/n of 200 requests would be less than one."""
    tree = HotnessTree(window=window)
    keys = [(tree.key(chain_of(i), workers=workers), chain_of(i)[0]) for i in range(3000)]

    assert all(key == first for key, first in keys[100:])


def test_a_hot_prefix_stays_hot_until_below_one_nth():
    """Hysteresis: between 1/n and 2/n the key keeps the length it had."""
    tree = HotnessTree(window=100)
    for _ in range(100):
        tree.key((1, 2), workers=8)
    for i in range(85):
        tree.key((1000 + i,), workers=8)

    still_long = tree.key((1, 2), workers=8)
    for i in range(100):
        tree.key((2000 + i,), workers=8)
    short_again = tree.key((1, 2), workers=8)

    assert still_long == 2
    assert short_again == 1


def test_given_shares_stand_in_for_those_of_the_number_of_workers():
    """A tenth of the traffic is cold among eight workers, and hot above 6% until it falls below 2%."""
    by_count, by_share = HotnessTree(window=100), HotnessTree(window=100, hot_share=0.06, cold_share=0.02)
    keys = [
        (by_count.key((i % 10, 50), workers=8), by_share.key((i % 10, 50), workers=8)) for i in range(200)
    ]

    for i in range(96):
        by_share.key((1000 + i,), workers=8)
    at_four_percent = by_share.key((9, 50), workers=8)
    for i in range(100):
        by_share.key((2000 + i,), workers=8)

    assert keys[-1] == (9, 50)
    assert at_four_percent == 50
    assert by_share.key((9, 50), workers=8) == 9


def test_an_empty_prompt_has_a_key_and_leaves_no_trace():
    """It goes somewhere, always the same."""
    assert HotnessTree().key((), workers=8) == 0


def test_a_long_shared_prompt_is_told_apart_as_soon_as_it_is_hot():
    """Twelve shared blocks: the window is counted deeper at once, instead of one block per 2/n of new traffic."""
    tree = HotnessTree(window=200)
    shared = tuple(range(1, 13))
    keys = [tree.key((*shared, 100 + i), workers=8) for i in range(60)]

    first_deep = next(i for i, key in enumerate(keys) if key >= 100)
    assert first_deep < 20
    assert all(key >= 100 for key in keys[first_deep:])


def test_hotness_follows_the_number_of_instances():
    """A fifth of all traffic is cold among four workers, hot among sixteen, and cold again."""
    tree = HotnessTree(window=200)

    def share(workers):
        keys = [tree.key((i % 5, 50 + i % 5), workers=workers) for i in range(400)]
        return keys[-1] >= 50

    assert [share(4), share(16), share(4)] == [False, True, False]


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), max_size=300), st.integers(1, 16))
def test_the_tree_is_bounded_by_its_window(chains, workers):
    """However prompts look, no more nodes than blocks of the requests in the window."""
    tree = HotnessTree(window=20)
    for chain in chains:
        tree.key(tuple(chain), workers=workers)

    assert len(tree) <= max(20, 16 * workers) * 6
