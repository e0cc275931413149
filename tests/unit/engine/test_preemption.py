"""What a victim costs, in right units, and who the victims are."""

import pytest

from penstock.engine.core.latency import QuadraticPrefill
from penstock.engine.core.preemption import Candidate, PreemptionCosts, PreemptionKind, choose_victims
from penstock.engine.core.requests import EngineRequest, RequestState
from penstock.engine.core.transfer import LinkTerms

KV_BYTES = 80 * 4096
"""Llama-3-70B: 80 layers of 8 heads of 128 values, key and value, 2 bytes each."""

A100 = PreemptionCosts(KV_BYTES, LinkTerms(0.0, 25e9), QuadraticPrefill(0.0, 1e-4, 0.0))
"""PCIe 4.0 at 25 GB/s and 10,000 prefill tokens/s, as the document that the tiers follow has them."""


def test_costs_have_the_units_of_their_parts():
    """522 tokens: 171 MB twice over 25 GB/s are 13.7 ms; prefilling them takes 52.2 ms."""
    assert A100.swap_s(522) == pytest.approx(0.013684, rel=1e-4)
    assert A100.recompute_s(522) == pytest.approx(0.0522)


@pytest.mark.parametrize(
    ("latency_s", "bytes_per_s", "crossover"),
    [
        (0.0, 25e9, 1),
        # 2 L = n (100 us - 26.2 us) at L = 10 ms.
        (0.010, 25e9, 272),
        # 6.4 GB/s: 102.4 us a token both ways, more than the prefill's 100.
        (0.0, 6.4e9, None),
    ],
)
def test_the_crossover_follows_from_link_prefill_and_latency(latency_s, bytes_per_s, crossover):
    """Both costs are straight lines here: one overtakes the other once, or never."""
    costs = PreemptionCosts(KV_BYTES, LinkTerms(latency_s, bytes_per_s), QuadraticPrefill(0.0, 1e-4, 0.0))
    if crossover is None:
        assert costs.cheapest(131_072, can_swap=True)[0] is PreemptionKind.RECOMPUTE
    elif crossover > 1:
        assert costs.cheapest(crossover - 1, can_swap=True)[0] is PreemptionKind.RECOMPUTE
    if crossover:
        assert costs.cheapest(crossover, can_swap=True)[0] is PreemptionKind.SWAP


def test_no_host_memory_no_swap_and_dropping_needs_a_bound():
    """Recompute is what is left; an error comes only where it was allowed, above its bound."""
    assert A100.cheapest(522, can_swap=False) == (PreemptionKind.RECOMPUTE, pytest.approx(0.0522))
    assert A100.cheapest(32_000, can_swap=False, drop_above_s=3.3)[0] is PreemptionKind.RECOMPUTE
    assert A100.cheapest(34_000, can_swap=False, drop_above_s=3.3)[0] is PreemptionKind.DROP
    assert A100.cheapest(34_000, can_swap=True, drop_above_s=3.3)[0] is PreemptionKind.SWAP


def candidate(index, *, priority=2, preemptions=0, freed=4, remaining=10, restore_s=1.0):
    """Make a running request."""
    state = RequestState(EngineRequest(f"r{index}", 8, 20, 0.0, (), priority), index, 8, remote_pending=False)
    state.preemptions = preemptions
    return Candidate(state, freed, remaining, restore_s)


def chosen(candidates, *, blocks=1, places=0):
    """Return the indices of the victims."""
    return [each.state.index for each in choose_victims(candidates, blocks=blocks, places=places)]


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ({"priority": 2, "preemptions": 2}, {"priority": 1}),
        ({"preemptions": 0, "freed": 1}, {"preemptions": 1, "freed": 9}),
        ({"freed": 8}, {"freed": 4}),
        ({"remaining": 20}, {"remaining": 1}),
        ({"restore_s": 0.5}, {"restore_s": 1.0}),
        ({}, {}),
    ],
    ids=["tier", "preemptions", "KV freed", "remaining work", "cost", "the latest of equals"],
)
def test_order_of_victims(better, worse):
    """Each criterion decides where those before it are equal."""
    assert chosen([candidate(0, **worse), candidate(1, **better)]) == [1]


def test_nobody_is_thrown_out_in_vain():
    """Seven blocks cannot be had of six, so none goes; nor does one whose blocks others share."""
    assert chosen([candidate(0), candidate(1, freed=2)], blocks=7) == []
    assert chosen([candidate(0), candidate(1, freed=0)], blocks=4) == [0]


def test_no_victim_is_spare():
    """The first choice of one block is not needed beside the one of nine."""
    cheap, large = candidate(0, freed=1, restore_s=0.01), candidate(1, freed=9)
    assert chosen([cheap, large], blocks=1) == [0]
    assert chosen([cheap, large], blocks=9) == [1]
    assert chosen([cheap, large], blocks=10) == [0, 1]


def test_a_place_alone_takes_one_victim():
    """Blocks do not matter then."""
    assert chosen([candidate(0, freed=0), candidate(1, freed=0)], blocks=0, places=1) == [1]
