"""Prefix keys, and the index of a worker's prefixes alongside a plain one, and its memory."""

import gc
import random
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.router.policy.prefixes import (
    BLOCK_BYTES,
    MAX_BLOCKS,
    SUB_BLOCK_KEYS,
    Prefix,
    PrefixIndex,
    prompt_keys,
    render_chat,
    space_seed,
    token_keys,
)


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


def test_token_ids_give_one_key_per_block_of_512():
    """The exact mode counts tokens, not bytes."""
    assert len(token_keys(list(range(1025)))) == 3
    assert token_keys(list(range(1024))) == token_keys(list(range(1025)))[:2]


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


class PlainIndex:
    """What the index is to do, as a dict of runs in order of use: head -> keys."""

    def __init__(self, capacity):
        self.capacity, self.runs = capacity, {}

    def walk(self, keys):
        """Return the heads of the runs along a prompt, with how far each agrees with it."""
        place, steps = 0, []
        while place < len(keys) and (run := self.runs.get(keys[place])):
            pairs = list(zip(run, keys[place:], strict=False))
            same = next((i for i, (one, other) in enumerate(pairs) if one != other), len(pairs))
            steps.append((keys[place], same))
            place += same
        return steps, place

    def use(self, keys):
        """Remember a prompt; what ran on differently ages by itself, and ancestors are the youngest."""
        steps, place = self.walk(keys)
        at = 0
        for head, same in steps:
            at += same
            rest = self.runs[head][same:]
            if rest and at < len(keys):
                self.runs[head] = self.runs[head][:same]
                self.runs.setdefault(rest[0], rest)
        if place < len(keys):
            self.runs[keys[place]] = keys[place:]
        for head, _ in reversed(steps):
            self.runs[head] = self.runs.pop(head)
        if len(self) > self.capacity:
            excess = len(self) - self.capacity + self.capacity // 32
            for head, run in list(self.runs.items()):
                self.cut(head, max(0, len(run) - max(0, excess)))
                excess -= len(run)
        return place

    def truncate(self, keys, blocks):
        """Cut every run along a prompt where it goes beyond ``blocks``."""
        skipped = blocks if blocks < len(keys) and keys[blocks] in self.runs else 0
        steps, _ = self.walk(keys[skipped:])
        at = skipped
        for head, same in steps:
            if at + same > blocks:
                self.cut(head, max(0, blocks - at))
            at += same

    def cut(self, head, blocks):
        """Shorten a run, or drop it."""
        self.runs[head] = self.runs[head][:blocks]
        if not self.runs[head]:
            del self.runs[head]

    def __len__(self):
        return sum(map(len, self.runs.values()))


def prompt(rng, fan_out, longest, shift):
    """Return chained keys of a random prompt; ``shift`` low bits are the same in all of them."""
    texts = [rng.randrange(fan_out) for _ in range(rng.randint(0, longest))]
    return tuple((hash(tuple(texts[: i + 1])) << shift) % 2**64 for i in range(len(texts)))


@pytest.mark.parametrize("shift", [0, 5, 40], ids=["spread", "few parts", "one part"])
@pytest.mark.parametrize(
    ("capacity", "fan_out", "longest"), [(1, 3, 4), (20, 2, 12), (150, 3, 8), (600, 1000, 2), (3000, 40, 3)]
)
def test_flat_arrays_say_what_a_plain_dict_says(capacity, fan_out, longest, shift):
    """Uses, questions, limits and restarts at random: hits and counts agree, however keys fall into the table."""
    rng = random.Random(capacity)
    index, plain = PrefixIndex(capacity), PlainIndex(capacity)
    for step in range(1500):
        keys = prompt(rng, fan_out, longest, shift)
        prefix = Prefix(keys)
        blocks = rng.randint(0, longest)
        if step % 5 == 4:
            index.truncate(prefix, blocks)
            plain.truncate(keys, blocks)
        elif step % 5 == 3:
            assert index.held(prefix) == plain.walk(keys)[1]
        else:
            assert index.use(prefix) == plain.use(keys)
        if step == 1000:
            index.clear()
            plain.runs.clear()

        assert index.count == len(plain)


@pytest.mark.no_cover  # Coverage's own records would count as the index's memory.
@pytest.mark.parametrize(
    "blocks",
    [
        (1,),
        (24, 1),
        *(pytest.param(each, marks=pytest.mark.nightly) for each in ((2,), (4,), (24,), (1, 2), (1, 4))),
    ],
    ids=str,
)
def test_a_full_index_takes_at_most_64_bytes_a_block(blocks):
    """All memory told, from prompts of one new block on, and where their length changes once it is full."""
    rng = random.Random(1)
    # Just beyond a power of two, where the table has the most parts a run.
    capacity = 4200
    tracemalloc.start()
    try:
        index = PrefixIndex(capacity)
        for each in blocks:
            for _ in range(2 * capacity // each):
                index.use(Prefix(tuple(rng.getrandbits(64) for _ in range(each))))
        known = index.count
        gc.collect()  # Tuples that the interpreter keeps for reuse are not the index's.
        full, _ = tracemalloc.get_traced_memory()
        # What goes with the index was the index's; other threads and coverage allocate alongside it.
        del index
        gc.collect()
        empty, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    used = full - empty
    assert known > 0.9 * capacity
    assert used / known <= 64


def test_what_is_too_much_is_forgotten_at_once():
    """The least recently used first."""
    index = PrefixIndex(100)
    for prompt in range(5):
        index.use(Prefix(tuple(range(100 * prompt, 100 * prompt + 20))))
    index.resize(40)
    assert index.count == 40
    assert index.held(Prefix(tuple(range(400, 420)))) == 20
    assert index.held(Prefix(tuple(range(20)))) == 0
