"""Prefix cost: a recomputed token weighs as much as four waiting ones."""

import pytest

from penstock_router.policy.dualmap import DualMap, DualMapSettings, PairChoice
from penstock_router.policy.placement import Placement, PlacementSettings
from penstock_router.policy.placer import Arrival
from penstock_router.policy.prefix_cost import PrefixCost

CHAIN = tuple(range(11, 19))


def filled(placer, waiting_tokens):
    """Two instances: "a" has the prefix cached and that many tokens waiting, "b" has nothing."""
    placement = Placement(placer, PlacementSettings(slot_requests=1))
    placement.set_instances(["a"], 0.0)
    placement.submit("first", Arrival(CHAIN, 4000, block_tokens=1000), 0.0)
    placement.take(0.0)
    placement.computed("first", 1.0)
    placement.submit("load", Arrival((21,), waiting_tokens), 1.0)
    placement.set_instances(["a", "b"], 1.0)
    return placement


@pytest.mark.parametrize(("waiting_tokens", "expected"), [(15_000, "a"), (17_000, "b")])
@pytest.mark.parametrize(
    "placer", [PrefixCost, lambda: DualMap(DualMapSettings(choice=PairChoice.PREFIX_COST, rebalance=False))]
)
def test_a_hit_is_worth_four_times_its_tokens_of_waiting(placer, waiting_tokens, expected):
    """4,000 cached tokens outweigh just under 16,000 waiting ones; all of two instances or a pair alike."""
    placement = filled(placer(), waiting_tokens)

    placement.submit("r", Arrival(CHAIN, 4000, block_tokens=1000), 2.0)

    assert expected in {handed.instance for handed in placement.take(2.0) if handed.item == "r"} or (
        placement.queued_tokens(expected) > 0
    )


def test_without_hits_the_less_loaded_is_chosen():
    """It is least-pending then."""
    placement = filled(PrefixCost(), 10)

    placement.submit("r", Arrival((31, 32), 1000), 2.0)

    assert [h.instance for h in placement.take(2.0) if h.item == "r"] == ["b"]


def test_an_instance_that_failed_the_request_is_avoided():
    """Unless there is no other."""
    placement = filled(PrefixCost(), 10)

    placement.submit("r", Arrival(CHAIN, 4000, avoid=frozenset({"a"})), 2.0)

    assert [h.instance for h in placement.take(2.0) if h.item == "r"] == ["b"]
