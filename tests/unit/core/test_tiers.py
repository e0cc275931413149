"""A tier is one number on the way to an engine."""

import pytest

from penstock.core.tiers import TierPriority, priority_of, tier_of


def test_lower_runs_first_and_no_tier_counts_as_premium():
    """System goes before premium, standard, background; vLLM's default of 0 is premium."""
    order = [priority_of(tier) for tier in ("system", "premium", "standard", "background")]
    assert order == sorted(order) == [-1, 0, 1, 2]
    assert tier_of(0) is TierPriority.PREMIUM


@pytest.mark.parametrize("tier", TierPriority)
def test_the_mapping_goes_both_ways(tier):
    """What the router writes, the engine's metrics read."""
    assert tier_of(priority_of(tier.name.lower())) is tier


@pytest.mark.parametrize(("priority", "tier"), [(-7, TierPriority.SYSTEM), (9, TierPriority.BACKGROUND)])
def test_numbers_beyond_the_tiers_belong_to_the_outermost(priority, tier):
    """A client of the engine may send any integer; a metric's label stays one of four."""
    assert tier_of(priority) is tier


def test_an_unknown_tier_is_named():
    """With those that there are."""
    with pytest.raises(ValueError, match="'gold' is unknown; choose one of system, premium"):
        priority_of("gold")
