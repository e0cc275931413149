"""KV events that correct the prefix index."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_router.policy.keys import Prefix, exact_keys, token_keys
from penstock_router.policy.kv_events import KvEvents
from penstock_router.policy.prefix_index import PrefixIndex

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


def test_stored_blocks_are_held_by_the_routers_own_keys():
    """Ten engine blocks of 4 tokens fill two of the router's blocks of 16 and begin a third."""
    index, events = feed()
    events.stored(names(0, 10), None, TOKENS)

    assert index.held(prefix(TOKENS)) == 2
    assert index.held(prefix(TOKENS[:16] + [0] * 16)) == 1


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
    """Any jump forgets, also back to where an engine's second life was first set_peer_tokens of; then it is followed."""
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


def test_lost_events_forget_what_they_might_have_removed():
    """Better to prefill once more than to send requests after a cache that is gone."""
    index, events = feed()
    events.numbered(1)
    events.stored(names(0, 8), None, TOKENS[:32])
    events.numbered(3)

    assert index.held(prefix(TOKENS[:32])) == 0


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

    assert (len(index), len(events)) == (0, 0)


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


def test_the_exact_mode_counts_and_hashes_tokens():
    """The tokenizer is the caller's."""
    count, keys = exact_keys("abcdefgh", lambda text: [ord(each) for each in text], block_tokens=4)

    assert count == 8
    assert keys == token_keys([97, 98, 99, 100, 101, 102, 103, 104], block_tokens=4)
