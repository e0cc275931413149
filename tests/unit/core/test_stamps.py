"""Times as Kubernetes writes them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.stamps import micro_stamp, seconds, stamp

T0 = 1_767_225_600.0
"""2026-01-01T00:00:00Z."""


@pytest.mark.parametrize("text", [None, 5, "", "yesterday", "2026-13-01T00:00:00Z"])
def test_what_is_no_time_is_unknown(text):
    """A hand-made annotation cannot break the operator."""
    assert seconds(text) is None


def test_a_time_without_zone_is_utc():
    """Hand-made times are read like the API's."""
    assert seconds("2026-01-01T00:00:00") == T0
    assert seconds("2026-01-01T01:00:00+01:00") == T0


@given(st.integers(0, 4_000_000_000))
def test_times_survive_the_round_trip(at_s):
    """What is written on a pod is read back as the same second."""
    assert seconds(stamp(at_s + 0.5)) == at_s


def test_microseconds_are_written_where_asked_for():
    """Leases and Events have them, statuses do not."""
    assert micro_stamp(T0 + 0.25) == "2026-01-01T00:00:00.250000Z"
    assert stamp(T0 + 0.25) == "2026-01-01T00:00:00Z"
