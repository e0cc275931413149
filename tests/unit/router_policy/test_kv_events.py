"""KV events that correct the prefix index."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.router.policy.arrival import Arrival
from penstock.router.policy.kv_events import KvEvents
from penstock.router.policy.prefixes import Prefix, PrefixIndex, token_keys
from penstock.router.policy.routing_policy import LOAD_COST, WorkerLoad, WorkerQueue

UNIT, BLOCK = 4, 16


def feed(capacity=1000):
    """Return an index and the events that fill it."""
    index = PrefixIndex(capacity)
    return index, KvEvents(index, engine_block_tokens=UNIT, block_tokens=BLOCK)


def prefix(tokens):
    """Return the router's keys of the same tokens."""
    return Prefix(token_keys(tokens, block_tokens=BLOCK, engine_block_tokens=UNIT))


def names(start, stop):
    """Return an engine's names of consecutive blocks."""
    return [f"b{number}" for number in range(start, stop)]


TOKENS = list(range(100, 140))


def test_blocks_stored_one_event_at_a_time_chain_through_their_parents():
    """Each event names the block before it."""
    index, events = feed()
    for number in range(8):
        parent = None if number == 0 else f"b{number - 1}"
        events.stored([f"b{number}"], parent, TOKENS[number * 4 : number * 4 + 4])

    assert index.held(prefix(TOKENS[:32])) == 2


def test_a_removed_end_takes_its_block_with_it():
    """Engines free from the end: the second block is no longer whole, the first is."""
    index, events = feed()
    events.stored(names(0, 8), None, TOKENS[:32])
    events.removed(["b7"])

    assert index.held(prefix(TOKENS[:32])) == 1
    assert len(events) == 7


def test_cleared_forgets_everything():
    """AllBlocksCleared."""
    index, events = feed()
    events.stored(names(0, 8), None, TOKENS[:32])
    events.cleared()

    assert (index.held(prefix(TOKENS[:32])), len(events)) == (0, 0)


@pytest.mark.parametrize(
    ("numbers", "gaps", "held"),
    [
        ([5, 6, 7], 0, [5, 6, 7]),
        ([5, 7], 1, [7]),
        ([5, 6, 0, 1], 1, [0, 1]),
        ([5, 6, 2, 3], 1, [2, 3]),
    ],
)
def test_numbers_tell_lost_events_and_fresh_starts(numbers, gaps, held):
    """Any jump forgets, also back to where an engine's second life was first heard of; then it is followed."""
    index, events = feed()
    found = 0
    for number in numbers:
        found += events.numbered(number)
        events.stored(names(number * 8, number * 8 + 8), None, [number] * 32)

    assert gaps == found
    assert held == [number for number in sorted(numbers) if index.held(prefix([number] * 32))]


def test_a_long_prompts_blocks_may_come_in_one_event():
    """A step of 16,384 tokens stores 1,024 engine blocks of 16 at once; all of them are learnt."""
    index = PrefixIndex(1000)
    events = KvEvents(index, engine_block_tokens=16)
    tokens = list(range(16_384))
    events.stored(names(0, 1024), None, tokens)

    assert len(events) == 1024
    assert index.held(Prefix(token_keys(tokens, engine_block_tokens=16))) == 32


@pytest.mark.parametrize(
    ("parent", "tokens"),
    [
        ("unknown", TOKENS[:16]),
        (None, TOKENS[:15]),
        (None, [-1] * 16),
        (None, ["x"] * 16),
        (None, [2**40] * 16),
    ],
)
def test_malformed_events_change_nothing(parent, tokens):
    """An unknown parent, too few ids, or what is no id."""
    index, events = feed()
    events.stored(names(0, 4), parent, tokens)
    events.removed(["never stored"])

    assert (index.count, len(events)) == (0, 0)


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=60),
    st.lists(st.integers(0, 3), min_size=1, max_size=60),
)
def test_events_and_keys_agree_on_any_two_prompts(one, other):
    """What is held of the second prompt is what both share, in whole blocks."""
    index, events = feed()
    whole = len(one) // UNIT
    events.stored(names(0, whole), None, one[: whole * UNIT])
    shared = 0
    while shared < min(whole * UNIT, len(other)) and one[shared] == other[shared]:
        shared += 1

    assert shared // BLOCK == index.held(prefix(other[: len(other) // BLOCK * BLOCK]))


def queue_of(index):
    """Return a worker's queue with this index."""
    found = WorkerQueue(WorkerLoad("a"), cache_blocks=10, now_s=0.0)
    found.index = index
    return found


def uncached(index, tokens=TOKENS[:32]):
    """Return what a prompt would cost there, tokens."""
    found = prefix(tokens)
    return queue_of(index).uncached(Arrival(found.keys, len(tokens), block_tokens=BLOCK))


def test_blocks_in_other_memory_are_a_hit_that_costs_its_loading():
    """Evicted from the GPU, still on the host: cheaper than to compute, dearer than held; gone there, it costs all."""
    index, events = feed()
    events.stored(names(0, 8), None, TOKENS[:32])
    events.copied(names(0, 8))
    assert uncached(index) == 1

    events.removed(names(4, 8)[::-1])
    assert index.held(prefix(TOKENS[:32])) == 1
    assert uncached(index) == 1 + int(LOAD_COST * 15)

    events.removed(names(4, 8)[::-1], is_offloaded=True)
    assert uncached(index) == 16
    assert len(events) == 4


def test_blocks_stored_in_other_memory_with_their_tokens_need_no_event_of_the_gpus():
    """A late router hears of them from there alone; computed again they are held by both."""
    index, events = feed()
    events.stored(names(0, 8), None, TOKENS[:32], is_offloaded=True)
    assert (index.count, uncached(index)) == (0, 1 + int(LOAD_COST * 31))

    events.stored(names(0, 8), None, TOKENS[:32])
    events.removed(names(0, 8)[::-1], is_offloaded=True)
    assert (index.count, uncached(index)) == (2, 1)


def test_what_is_dropped_elsewhere_is_still_held_on_the_gpu():
    """And what the GPU gives up then is nowhere."""
    index, events = feed()
    events.stored(names(0, 8), None, TOKENS[:32])
    events.copied(names(0, 8))
    events.removed(names(0, 8)[::-1], is_offloaded=True)
    assert uncached(index) == 1

    events.removed(names(0, 8)[::-1])
    assert (uncached(index), len(events)) == (32, 0)


def test_unknown_blocks_in_other_memory_teach_nothing():
    """Neither do they cost anything."""
    index, events = feed()
    events.copied(names(0, 8))
    events.removed(names(0, 8), is_offloaded=True)

    assert (index.anywhere, uncached(index)) == (None, 32)


def test_a_cleared_cache_is_cleared_in_all_memories():
    """To believe less costs a prefill at most."""
    index, events = feed()
    events.stored(names(0, 8), None, TOKENS[:32], is_offloaded=True)
    events.cleared()

    assert uncached(index) == 32


@pytest.mark.parametrize("hashes", [["a", "a"], ["a", "b", "a"]])
def test_blocks_that_follow_themselves_come_to_an_end(hashes):
    """An engine that names one block twice in a row of blocks costs hits, and no endless loop."""
    index = PrefixIndex(100)
    events = KvEvents(index, engine_block_tokens=16, block_tokens=16)
    events.stored(hashes, None, range(16 * len(hashes)))
    events.stored(["a"], "b", range(16))
    events.removed(hashes)
    assert len(events) == 0
