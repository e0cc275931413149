"""Kubernetes quantities."""

import pytest

from penstock.operator.plan.drift import quantity


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1000m", "1"),
        (1, "1"),
        (0.5, "500m"),
        ("0.5Gi", "512Mi"),
        ("1024Ki", "1Mi"),
        ("1e3", "1k"),
        ("1E3", "1000"),
        ("1E", "1000P"),
        ("+2", "2"),
        (".5", "500m"),
        ("5.", "5"),
        ("0.0000000001", "1n"),
    ],
)
def test_equal_quantities_are_equal(one, other):
    """Different spellings of an amount are the same amount; below nano is rounded up."""
    assert quantity(one) == quantity(other)
    assert quantity(one) is not None


@pytest.mark.parametrize("value", ["", "GB", "1 Gi", "1KB", "one", None, True, [], "1ki", "--1", "1e9999"])
def test_other_things_are_no_quantity(value):
    """What the API server would refuse is None."""
    assert quantity(value) is None
