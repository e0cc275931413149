"""Where stops end a text, and how likely its words are."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.simulated_tokens import token_ids
from penstock.engine.serve.vocabulary import WORDS, Stop, alternatives, find_stop, words

SALT = 7


def said(tokens):
    """Return the beginning of the text."""
    return b"".join(words(SALT, 0, tokens)).decode()


def found(*strings, ids=(), min_tokens=0, is_shown=False):
    """Find a stop."""
    return find_stop(SALT, strings, ids, min_tokens=min_tokens, is_shown=is_shown)


def test_words_need_no_escape_and_do_not_depend_on_how_they_are_cut():
    """256 different words of 4 ASCII bytes, all of which come before one comes again."""
    whole = words(SALT, 0, 300)
    assert len(set(whole)) == len(set(WORDS)) == 256
    assert words(SALT, 0, 100) + words(SALT, 100, 300) == whole
    assert all(json.dumps(word.decode()) == f'"{word.decode()}"' and len(word) == 4 for word in WORDS)


@given(st.integers(0, 300), st.integers(1, 30), st.integers(0, 40))
def test_a_stop_is_where_the_text_first_holds_it(start, length, min_tokens):
    """Found without writing the text; the token that completes it is the last."""
    text = said(1000)
    string = text[start : start + length]
    at = text.find(string)
    while -(-(at + length) // 4) < min_tokens:
        at = text.find(string, at + 1)

    assert found(string, min_tokens=min_tokens) == Stop(-(-(at + length) // 4), at, string)


@pytest.mark.parametrize(("is_shown", "text_bytes"), [(False, 9), (True, 11)])
def test_a_stop_string_is_cut_off_unless_it_is_to_be_shown(is_shown, text_bytes):
    """Its token counts all the same."""
    string = said(3)[9:11]

    assert found(string, is_shown=is_shown) == Stop(3, text_bytes, string)


@pytest.mark.parametrize(("is_shown", "text_bytes"), [(False, 16), (True, 20)])
def test_a_stop_token_ends_the_text(is_shown, text_bytes):
    """A token is its four bytes as a number."""
    token = token_ids(words(SALT, 4, 5)[0])[0]

    assert found(ids=[token], is_shown=is_shown) == Stop(5, text_bytes, token)
    assert found(ids=[token], min_tokens=6, is_shown=is_shown).tokens == 261


def test_the_chosen_word_is_the_likeliest():
    """Each alternative has half the probability of the one before."""
    likely = alternatives(words(SALT, 0, 1)[0], 3)

    assert likely[0][0] == words(SALT, 0, 1)[0]
    assert [round(math.exp(value), 6) for _, value in likely] == [0.5, 0.25, 0.125]
    assert len({word for word, _ in likely}) == 3
    assert alternatives(b"????", 0) == []
