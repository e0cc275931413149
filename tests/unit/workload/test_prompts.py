"""Text of hash ids: exact lengths, equal ids give equal text."""

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
