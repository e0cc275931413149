"""Paged blocks: references, prefix hits, eviction order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.core.kv_blocks import BlockPool


def test_released_keyed_block_is_found_again():
    """A released block keeps its content until it is evicted."""
    pool = BlockPool(4)
    blocks = pool.claim((), 2)
    pool.register(blocks, (11, 22))
    pool.release(blocks)
    assert pool.used == 0
    assert pool.count_hits([11, 22, 33], 3) == 2
    assert pool.claim([11, 22], 3)[:2] == blocks


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
        assert pool.cached <= capacity
    for blocks in held:
        pool.release(blocks)
    assert pool.used == 0
