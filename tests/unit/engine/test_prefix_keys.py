"""The simulated tokenizer and the chained keys."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.core.prefix_keys import count_tokens, prefix_keys


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
