"""A pool bounds the drains by which it takes GPUs back, and says so."""

import pytest

from penstock.gpu_pool.reclaim import CUT_SHOWN_S, cut_drain_message, drain_grace_s, with_cut_drain


@pytest.mark.parametrize(
    ("reclaim", "is_above", "expected"),
    [(None, True, 900), (30, True, 30), (30, False, 900), (9000, True, 900)],
)
def test_the_pool_bounds_drains_by_which_it_takes_back(reclaim, is_above, expected):
    """Other scale-downs keep the worker's own bound."""
    assert drain_grace_s(900, reclaim_s=reclaim, is_above=is_above) == expected


def test_a_cut_is_said_for_a_while():
    """Behind what the pool says anyway."""
    sentence = cut_drain_message("b_decode", 60)
    assert sentence == (
        "b_decode has drained for 60 s, the pool's reclaim.graceSeconds, and is terminated; its streams are resumed on another worker or lost"
    )
    assert with_cut_drain("GpuPool p", sentence, CUT_SHOWN_S) == f"GpuPool p; {sentence}"
    assert with_cut_drain("GpuPool p", sentence, CUT_SHOWN_S + 1) == "GpuPool p"
    assert with_cut_drain("GpuPool p", "", 0.0) == "GpuPool p"
