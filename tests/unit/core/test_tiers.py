"""A tier is one number on the way to an engine."""

import pytest

from penstock.core.tiers import TierPriority, priority_of, tier_of


@pytest.mark.parametrize(("priority", "tier"), [(-7, TierPriority.SYSTEM), (9, TierPriority.BACKGROUND)])
def test_numbers_beyond_the_tiers_belong_to_the_outermost(priority, tier):
    """A client of the engine may send any integer; a metric's label stays one of four."""
    assert tier_of(priority) is tier


def test_an_unknown_tier_is_named():
    """With those that there are."""
    with pytest.raises(ValueError, match="'gold' is unknown; choose one of system, premium"):
        priority_of("gold")
