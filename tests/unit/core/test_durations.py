"""Durations as text, and the seconds that they are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.durations import duration_text, examples_for, seconds_of


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("500ms", 0.5), ("2s", 2.0), ("10m", 600.0), ("1h30m", 5400.0), ("12.5ms", 0.0125), ("0s", 0.0)],
)
def test_a_duration_is_a_number_of_seconds(text, seconds):
    """Units may be combined, and numbers may have fractions."""
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "5 s", "-1s", "1d", "s", "1s,", "1" * 32 + "s", "5S", "1e3s"])
def test_other_text_is_refused(text):
    """Also text that is too long."""
    with pytest.raises(ValueError, match="is not a duration"):
        seconds_of(text)


@given(st.floats(0, 86_400))
def test_what_is_written_is_read_back_exactly(seconds):
    """Whatever the fraction, as long as the text is short enough."""
    text = duration_text(seconds)
    if len(text) <= 32:
        assert seconds_of(text) == seconds


@pytest.mark.parametrize(
    ("value", "examples"),
    [
        (5000, "5s or 5000ms"),
        ("200", "200ms or 200s"),
        (2, "2s or 2000ms"),
        (0.5, "0.5s or 500ms"),
        (True, "a number with its unit, such as 500ms, 2s, 10m or 1h30m"),
        (-1, "a number with its unit, such as 500ms, 2s, 10m or 1h30m"),
        ("soon", "a number with its unit, such as 500ms, 2s, 10m or 1h30m"),
    ],
)
def test_a_number_without_a_unit_is_shown_with_one(value, examples):
    """What the user probably meant comes first."""
    assert examples_for(value) == examples
