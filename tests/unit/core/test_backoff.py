"""Pauses after failures in a row."""

from __future__ import annotations

import pytest

from penstock.core.backoff import Backoff


@pytest.mark.parametrize(
    ("failures", "expected_s"), [(1, 0.5), (2, 1.0), (3, 2.0), (4, 4.0), (5, 5.0), (10_000, 5.0)]
)
def test_pauses_double_up_to_the_limit(failures, expected_s):
    """However many failures there were."""
    assert Backoff(first_s=0.5, limit_s=5.0).pause_s(failures) == expected_s
