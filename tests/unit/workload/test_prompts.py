"""Text of hash ids: exact lengths, equal ids give equal text."""

import orjson
from hypothesis import given
from hypothesis import strategies as st

from penstock.workload.prompts import PromptMaker, block_text
from penstock.workload.traces import TraceRequest


def _request(tokens, ids, line=1):
    return TraceRequest(0.0, tokens, 1, ids, line)


@given(st.integers(1, 5000), st.integers(0, 10**9), st.booleans())
def test_a_prompt_has_four_bytes_a_token(tokens, seed, has_ids):
    """The simulated tokenizer counts exactly the trace's tokens, whatever the length."""
    ids = tuple(range(-(-tokens // 512))) if has_ids else None

    assert len(PromptMaker(seed).make(_request(tokens, ids))) == 4 * tokens


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=4), st.lists(st.integers(0, 3), min_size=1, max_size=4)
)
def test_prompts_share_text_exactly_as_far_as_their_ids_agree(left, right):
    """Equal ids give equal blocks, different ids give different ones, wherever they stand."""
    maker = PromptMaker(3)
    one = maker.make(_request(512 * len(left), tuple(left)))
    two = maker.make(_request(512 * len(right), tuple(right)))

    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        block = slice(2048 * index, 2048 * (index + 1))
        assert (one[block] == two[block]) == (a == b)


def test_a_partial_block_is_the_beginning_of_the_whole_one():
    """A conversation that grows keeps its prefix."""
    maker = PromptMaker(0)

    assert maker.make(_request(612, (8, 9))) == block_text(0, 8) + block_text(0, 9)[:400]


def test_seeds_and_lines_give_other_texts():
    """Another seed starts a warm server cold; requests without ids are all different."""
    unique = PromptMaker(0)

    assert block_text(0, 1) != block_text(1, 1)
    assert unique.make(_request(50, None, line=1)) != unique.make(_request(50, None, line=2))
    assert unique.make(_request(50, None, line=1)) != PromptMaker(1).make(_request(50, None, line=1))
    assert unique.make(_request(50, None, line=1)) == PromptMaker(0).make(_request(50, None, line=1))


def test_the_text_is_the_same_in_every_process():
    """A second load generator, or a later run, sends the same bytes."""
    assert block_text(0, 0)[:16] == b"jiRI8zJCvxLtk+Nd"


def test_the_text_stands_in_json_as_it_is():
    """The replayer pastes it between quotes without escaping."""
    prompt = PromptMaker(5).make(_request(3000, (1, 2, 3, 4, 5, 6)))

    assert orjson.loads(b'"' + prompt + b'"').encode() == prompt


def test_a_small_cache_changes_nothing_but_speed():
    """Blocks that fell out are made again, the same."""
    ids = tuple(range(10))

    assert PromptMaker(0, cached_blocks=2).make(_request(5120, ids)) == PromptMaker(0).make(
        _request(5120, ids)
    )
