"""Paged blocks: references, prefix hits, eviction order."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.core.kv_blocks import (
    BlockPool,
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    count_tokens,
    prefix_keys,
)
from penstock.engine.core.requests import EngineRequest


@pytest.mark.parametrize(("limit", "expected"), [(0, 0), (1, 1), (2, 2), (5, 2)])
def test_hits_stop_at_the_limit_and_at_the_first_miss(limit, expected):
    """Only a leading run of cached keys counts."""
    pool = BlockPool(4)
    blocks = pool.claim((), 3)
    pool.register(blocks, (1, 2, 4))
    assert pool.count_hits([1, 2, 3, 4], limit) == expected


def test_blank_blocks_go_before_cached_ones_and_tails_before_heads():
    """Eviction takes the end of the least recently released request first."""
    pool = BlockPool(4)
    blocks = pool.claim((), 3)
    pool.register(blocks, (1, 2, 3))
    pool.release(blocks)
    assert pool.claim((), 1) == [3]
    assert pool.count_hits([1, 2, 3], 3) == 3
    assert pool.claim((), 1) == [blocks[2]]
    assert pool.count_hits([1, 2, 3], 3) == 2


def test_double_release_is_refused():
    """Releasing a block twice is a bug that must not pass."""
    pool = BlockPool(1)
    blocks = pool.claim((), 1)
    pool.release(blocks)
    with pytest.raises(ValueError, match="released more often"):
        pool.release(blocks)


@given(
    st.integers(1, 12),
    st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(0, 3)), max_size=60),
)
def test_free_and_used_blocks_always_add_up(capacity, actions):
    """Whatever is claimed, keyed and released, free + used = capacity, and all come back."""
    pool = BlockPool(capacity)
    held = []
    for is_claim, size, family in actions:
        if is_claim:
            keys = [family * 10 + position for position in range(size)]
            hits = pool.count_hits(keys, size)
            blocks = pool.claim(keys[:hits], size)
            if blocks is not None:
                assert len(set(blocks)) == size
                pool.register(blocks, keys)
                held.append(blocks)
        elif held:
            pool.release(held.pop(size % len(held)))
        in_use = {block for blocks in held for block in blocks}
        assert pool.used == len(in_use)
        assert pool.free + pool.used == capacity
    for blocks in held:
        pool.release(blocks)
    assert pool.used == 0


BLOCK = 4
WIDTH = 4 * BLOCK
"""Bytes of a block's tokens."""


def text(name, blocks):
    """Return a prompt of whole blocks that no other name shares."""
    return b"".join(f"{name}{number}".ljust(WIDTH, ".").encode() for number in range(blocks))


def request(name, prompt, *, outputs=1, **options):
    """Return a request for a prompt."""
    keys = prefix_keys(prompt, BLOCK)
    return EngineRequest(name, len(prompt) // 4, outputs, 0.0, keys, prompt=prompt, **options)


@pytest.fixture
def timeline(make_timeline):
    """Make an engine that keeps a journal, of a few blocks of 4 tokens, on a timeline."""
    return lambda blocks=8, budget=64: make_timeline(blocks=blocks, budget=budget, records_cache_changes=True)


def run(timeline, run_all, *requests):
    """Run requests to their ends; return the facts."""
    for each in requests:
        timeline.submit(each)
    run_all(timeline)
    return timeline.engine.take_kv_facts()


def stored(prompt, first, end):
    """Return the fact that blocks [first, end) of a prompt were stored."""
    keys = prefix_keys(prompt, BLOCK)
    parent = keys[first - 1] if first else None
    return BlocksStored(tuple(keys[first:end]), parent, prompt[first * WIDTH : end * WIDTH])


def test_full_blocks_are_stored_once_and_name_the_block_before_them(timeline, run_all):
    """A budget of two blocks a step: two facts; a prompt with the same beginning adds what follows, a repeated one nothing."""
    one, other = text("a", 4) + b"rest", text("a", 2) + text("b", 1)
    line = timeline(budget=8)

    assert run(line, run_all, request("1", one)) == [stored(one, 0, 2), stored(one, 2, 4)]
    assert run(line, run_all, request("2", other), request("3", one)) == [stored(other, 2, 3)]


def test_clearing_forgets_all_at_once(timeline, run_all):
    """Not while a request reads its blocks. What was not yet taken no longer matters; the next request stores again."""
    prompt = text("a", 2)
    line = timeline()
    line.submit(request("1", prompt))
    line.run_until(0.0, max_steps=1)
    assert not line.engine.pool.clear()
    assert line.engine.pool.count_hits(prefix_keys(prompt, BLOCK)) == 2
    run_all(line)

    assert line.engine.pool.clear()
    assert line.engine.take_kv_facts() == [CacheCleared()]
    assert line.engine.pool.count_hits(prefix_keys(prompt, BLOCK)) == 0
    assert run(line, run_all, request("2", prompt)) == [stored(prompt, 0, 2)]


def replay(known, facts):
    """Let ``known``, blocks' tokens by key, follow the facts."""
    for fact in facts:
        match fact:
            case BlocksStored(keys, _, tokens):
                assert not known.keys() & set(keys)
                assert len(tokens) == WIDTH * len(keys)
                known.update((key, tokens[at * WIDTH :][:WIDTH]) for at, key in enumerate(keys))
            case BlocksRemoved(keys):
                for key in keys:
                    del known[key]


@pytest.mark.parametrize("seed", range(20))
def test_facts_add_up_to_the_cache(timeline, run_all, seed):
    """Replayed, they leave exactly the prompts' blocks that the engine would hit, through preemptions, too."""
    rng = random.Random(seed)
    prompts = [text(rng.choice("ab"), 2) + text(f"{number}", rng.randint(0, 3)) for number in range(12)]
    line, known = timeline(blocks=rng.randint(8, 20), budget=rng.choice([8, 16, 64])), {}
    for number in range(40):
        line.submit(request(str(number), rng.choice(prompts), outputs=rng.randint(1, 9)))
        if rng.random() < 0.5:
            run_all(line)
        replay(known, line.engine.take_kv_facts())
    run_all(line)
    replay(known, line.engine.take_kv_facts())

    for prompt in prompts:
        keys = prefix_keys(prompt, BLOCK)
        held = next((place for place, key in enumerate(keys) if key not in known), len(keys))
        assert held == line.engine.pool.count_hits(keys)
        assert [known[key] for key in keys[:held]] == [prompt[at * WIDTH :][:WIDTH] for at in range(held)]


@pytest.mark.parametrize(
    ("length", "tokens", "blocks"),
    [
        (0, 0, 0),
        (1, 1, 0),
        (4, 1, 0),
        (5, 2, 0),
        (60, 15, 0),
        (61, 16, 1),
        (64, 16, 1),
        (65, 17, 1),
        (128, 32, 2),
    ],
)
def test_four_bytes_are_a_token_and_sixteen_tokens_a_block(length, tokens, blocks):
    """A partial token counts as one; only full blocks have keys."""
    prompt = b"x" * length
    assert count_tokens(prompt) == tokens
    assert len(prefix_keys(prompt, 16)) == blocks


@given(st.binary(max_size=600), st.binary(max_size=200), st.sampled_from([1, 4, 16]))
def test_equal_prefixes_have_equal_keys(prefix, suffix, block_size):
    """Appending to a prompt keeps the keys of its whole blocks."""
    whole = len(prefix) // (4 * block_size)
    assert prefix_keys(prefix + suffix, block_size)[:whole] == prefix_keys(prefix, block_size)[:whole]
