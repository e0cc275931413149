"""Prefix keys and hash rings."""

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from penstock.router.policy.prefixes import (
    BLOCK_BYTES,
    MAX_BLOCKS,
    SUB_BLOCK_KEYS,
    prompt_keys,
    render_chat,
    space_seed,
    token_keys,
)
from penstock.router.policy.rings import VIRTUAL_NODES, DualRing, HashRing
from penstock.router.policy.routing_policy import WorkerLoad

NAMES = [f"w{i}" for i in range(8)]
KEYS = [key * 0x9E3779B97F4A7C15 % 2**64 for key in range(2000)]


@given(st.binary(max_size=600), st.binary(max_size=600), st.integers(1, 64))
def test_a_longer_prompt_keeps_the_keys_of_its_whole_blocks(start, more, block_bytes):
    """What a conversation adds changes no key before it."""
    whole = len(start) // block_bytes

    shorter = prompt_keys(start, block_bytes=block_bytes, sub_block_keys=1)
    longer = prompt_keys(start + more, block_bytes=block_bytes, sub_block_keys=1)

    assert shorter[:whole] == longer[:whole]


@given(st.binary(min_size=1, max_size=200), st.integers(0, 199))
def test_a_changed_byte_changes_every_key_from_its_block_on(prompt, position):
    """Chaining: equal keys mean equal prefixes."""
    position %= len(prompt)
    changed = prompt[:position] + bytes([prompt[position] ^ 1]) + prompt[position + 1 :]

    before = prompt_keys(prompt, block_bytes=16, sub_block_keys=1)
    after = prompt_keys(changed, block_bytes=16, sub_block_keys=1)

    block = position // 16
    assert before[:block] == after[:block]
    assert all(old != new for old, new in zip(before[block:], after[block:], strict=True))


def test_a_huge_prompt_is_bounded():
    """A million tokens cost as many keys as the longest useful prefix."""
    assert len(prompt_keys(bytes(4_000_000))) == MAX_BLOCKS - 1 + SUB_BLOCK_KEYS


@given(st.integers(0, 3 * BLOCK_BYTES), st.integers(0, BLOCK_BYTES))
def test_a_growing_chat_keeps_its_parts(length, more):
    """Within the first block every 256 bytes have a key, so that short chats are told from each other."""
    text = bytes(range(256)) * 40
    part = BLOCK_BYTES // SUB_BLOCK_KEYS
    shorter, longer = prompt_keys(text[:length]), prompt_keys(text[: length + more])
    whole = length // part if length < BLOCK_BYTES else SUB_BLOCK_KEYS - 1 + length // BLOCK_BYTES

    assert shorter[:whole] == longer[:whole]
    assert len(shorter) == (
        -(-length // part) if length <= BLOCK_BYTES else SUB_BLOCK_KEYS - 1 - (-length // BLOCK_BYTES)
    )


def test_keys_that_collide_cost_a_prefill_and_nothing_else():
    """Two prompts with equal keys look alike to the index: a wrong guess, no error, and counters stay right."""
    from penstock.router.core.dispatch_queue import DispatchQueue
    from penstock.router.core.waiting import QueueSettings
    from penstock.router.policy.policies import PrefixCost
    from penstock.router.policy.routing_policy import Arrival

    queues = DispatchQueue(PrefixCost(), QueueSettings())
    queues.set_workers(map(WorkerLoad, ["a", "b"]), 0.0)
    for item in ("one", "other"):
        queues.submit(item, Arrival((7, 7, 7), 1500), 0.0)
        list(queues.dispatch(0.0))
        queues.prefilled(item, 1.0, cached_tokens=0)

    assert queues.waiting == 0
    assert queues.workers.load_of("a", 1.0)[0] == queues.workers.load_of("b", 1.0)[0] == 0


def test_token_ids_give_one_key_per_block_of_512():
    """The exact mode counts tokens, not bytes."""
    assert len(token_keys(list(range(1025)))) == 3
    assert token_keys(list(range(1024))) == token_keys(list(range(1025)))[:2]


def test_pairs_are_distinct():
    """Two candidates are two workers, for every key."""
    ring = DualRing()
    for name in NAMES:
        ring.add(name)

    pairs = [ring.pair(key) for key in KEYS]

    assert all(len(pair) == 2 and pair[0] != pair[1] for pair in pairs)


@pytest.mark.parametrize(("names", "expected"), [([], ()), (["only"], ("only",))])
def test_a_pair_is_as_large_as_the_fleet_allows(names, expected):
    """No worker, no candidate; one worker, one."""
    ring = DualRing()
    for name in names:
        ring.add(name)

    assert expected == ring.pair(7)


@given(st.permutations(NAMES), st.lists(st.sampled_from(NAMES), max_size=20))
def test_positions_depend_on_who_is_there_and_not_on_history(order, flapping):
    """Routers that saw joins and leaves in another order agree."""
    one, other = DualRing(), DualRing()
    for name in NAMES:
        one.add(name)
    for name in order:
        other.add(name)
    for name in flapping:
        other.remove(name)
        other.add(name)

    assert [one.pair(key) for key in KEYS[:50]] == [other.pair(key) for key in KEYS[:50]]


def test_shares_are_roughly_even():
    """Virtual nodes keep the fullest worker below twice its fair share."""
    ring = HashRing(seed=2)
    for name in NAMES:
        ring.add(name)
    counts = dict.fromkeys(NAMES, 0)
    for key in KEYS:
        counts[ring.find(key)] += 1

    assert max(counts.values()) < 2 * len(KEYS) / len(NAMES)


TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
]


@pytest.mark.parametrize("tools", [None, [{"type": "function"}]])
def test_a_longer_conversation_keeps_its_prefix(tools):
    """Appending messages changes no byte before them."""
    longer = [*TURNS, {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]

    assert render_chat(longer, tools).startswith(render_chat(TURNS, tools))
    assert render_chat(TURNS, tools) != render_chat(TURNS[:1], tools)


def test_key_spaces_do_not_meet():
    """Prompts with another salt share no cache, and no key."""
    salted = prompt_keys(b"x" * 100, seed=space_seed("salt"))

    assert prompt_keys(b"x" * 100) == prompt_keys(b"x" * 100, seed=space_seed(""))
    assert salted != prompt_keys(b"x" * 100)


@pytest.mark.parametrize("count", [1, 2, 8, 300])
def test_lookup_agrees_with_the_definition(count):
    """The first anchor at or after the key's point, the first of all after the last."""
    ring = HashRing(seed=1)
    names = [f"n{i}" for i in range(count)]
    for name in names:
        ring.add(name)
    digest = xxhash.xxh3_64_intdigest
    anchors = sorted((digest(f"{n}#{i}".encode(), 1), n) for n in names for i in range(VIRTUAL_NODES))
    for key in KEYS[:200]:
        point = digest(key.to_bytes(8, "little"), 1)

        assert next((n for a, n in anchors if a >= point), anchors[0][1]) == ring.find(key)
