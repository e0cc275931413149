"""Times as Kubernetes writes them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.stamps import seconds, stamp


@pytest.mark.parametrize("text", [None, 5, "", "yesterday", "2026-13-01T00:00:00Z"])
def test_what_is_no_time_is_unknown(text):
    """A hand-made annotation cannot break the operator."""
    assert seconds(text) is None


@given(st.integers(0, 4_000_000_000))
def test_times_survive_the_round_trip(at_s):
    """What is written on a pod is read back as the same second."""
    assert seconds(stamp(at_s + 0.5)) == at_s
