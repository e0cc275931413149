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
    ("field", "held"),
    [({}, 2), ({"cache_salt": "s"}, 0), ({"lora_id": 3}, 0), ({"lora_name": "sql", "lora_id": 3}, 0)],
)
def test_sglangs_blocks_of_a_salt_or_an_adapter_teach_nothing(field, held):
    """Its maps say so by fields of their own; a plain prompt's are learnt as vLLM's."""
    index, events = feed()
    stored = {"block_hashes": list(range(8)), "parent_block_hash": None, "token_ids": TOKENS[:32]}
    event = {"type": "BlockStored", **stored, "block_size": UNIT, "medium": "GPU", **field}
    assert events.apply(event)
    assert index.held(prefix(TOKENS[:32])) == held
    assert not events.apply({"type": "Unheard", "cache_salt": "s"})


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
    """An unknown parent, too few ids, or what is not an id."""
    index, events = feed()
    events.stored(names(0, 4), parent, tokens)
    events.removed(["never stored"])

    assert (index.count, len(events)) == (0, 0)


@pytest.mark.parametrize("name", ["n" * 200, b"n" * 200])
def test_a_name_of_a_block_is_bounded(name):
    """A million of them are kept: a worker that sends long ones must not fill the memory."""
    _, events = feed()
    assert not events.apply(["BlockStored", [name], None, TOKENS[:4], 4])
    assert not events.apply(["BlockRemoved", [name]])
    assert events.apply(["BlockStored", [name[:32]], None, TOKENS[:4], 4])
    assert len(events) == 1


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=60),
    st.lists(st.integers(0, 3), min_size=1, max_size=60),
    st.integers(1, 15),
)
def test_events_and_keys_agree_on_any_two_prompts(one, other, at_once):
    """What is held of the second prompt is what both share, in whole blocks, in however many events the first came."""
    index, events = feed()
    whole = len(one) // UNIT
    for start in range(0, whole, at_once):
        stop = min(whole, start + at_once)
        parent = f"b{start - 1}" if start else None
        events.stored(names(start, stop), parent, one[start * UNIT : stop * UNIT])
    shared = 0
    while shared < min(whole * UNIT, len(other)) and one[shared] == other[shared]:
        shared += 1

    assert shared // BLOCK == index.held(prefix(other[: len(other) // BLOCK * BLOCK]))


def uncached(index, tokens=TOKENS[:32]):
    """Return what a prompt would cost at a worker with this index, tokens."""
    worker = WorkerQueue(WorkerLoad("a"), now_s=0.0)
    worker.index = index
    return worker.uncached(Arrival(prefix(tokens).keys, len(tokens), block_tokens=BLOCK))


STORED = ("stored", names(0, 8), None, TOKENS[:32])
COPIED = ("copied", names(0, 8))
GONE, END_GONE = ("removed", names(0, 8)[::-1]), ("removed", names(4, 8)[::-1])
ELSEWHERE = {"is_offloaded": True}


@pytest.mark.parametrize(
    ("steps", "held", "cost", "known"),
    [
        ([(STORED, {}), (("removed", ["b7"]), {})], 1, 16, 7),
        ([(STORED, {}), (("cleared",), {})], 0, 32, 0),
        ([(STORED, {}), (COPIED, {})], 2, 1, 8),
        ([(STORED, {}), (COPIED, {}), (END_GONE, {})], 1, 1 + int(LOAD_COST * 15), 8),
        ([(STORED, {}), (COPIED, {}), (END_GONE, {}), (END_GONE, ELSEWHERE)], 1, 16, 4),
        ([(STORED, ELSEWHERE)], 0, 1 + int(LOAD_COST * 31), 8),
        ([(STORED, ELSEWHERE), (STORED, {}), (GONE, ELSEWHERE)], 2, 1, 8),
        ([(STORED, {}), (COPIED, {}), (GONE, ELSEWHERE)], 2, 1, 8),
        ([(STORED, {}), (COPIED, {}), (GONE, ELSEWHERE), (GONE, {})], 0, 32, 0),
        ([(STORED, ELSEWHERE), (("cleared",), {})], 0, 32, 0),
        ([(COPIED, {}), (GONE, ELSEWHERE)], 0, 32, 0),
    ],
    ids=[
        "a removed end takes its block with it",
        "a cleared cache holds nothing",
        "in both memories",
        "evicted from the GPU: cheaper than to compute, dearer than held",
        "gone there too",
        "a late router learns of them from there alone",
        "computed again, and dropped there",
        "dropped there, still held on the GPU",
        "given up by the GPU as well: nowhere",
        "a cleared cache is cleared in all memories",
        "unknown blocks teach nothing",
    ],
)
def test_blocks_are_a_hit_as_far_as_they_are_held_and_in_other_memory_cost_their_loading(
    steps, held, cost, known
):
    """Whatever an engine publishes of them; to believe less costs a prefill at most."""
    index, events = feed()
    for (name, *arguments), options in steps:
        getattr(events, name)(*arguments, **options)

    assert (index.count, uncached(index), len(events)) == (held, cost, known)


@pytest.mark.parametrize("hashes", [["a", "a"], ["a", "b", "a"]])
def test_blocks_that_follow_themselves_come_to_an_end(hashes):
    """An engine that names one block twice in a row of blocks costs hits, and no endless loop."""
    index = PrefixIndex(100)
    events = KvEvents(index, engine_block_tokens=16, block_tokens=16)
    events.stored(hashes, None, range(16 * len(hashes)))
    events.stored(["a"], "b", range(16))
    events.removed(hashes)
    assert len(events) == 0
