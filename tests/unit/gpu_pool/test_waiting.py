"""Who holds what a graph lacks: tables of literals."""

from __future__ import annotations

import pytest

from penstock.gpu_pool.allocator import Grant
from penstock.gpu_pool.waiting import DrainTimes, GraphHolding, shortage_message, waits_for


def holding(guaranteed, held, gpus, target, wanted, *, returns_s=None):
    """Return what a graph has, in GPUs."""
    return GraphHolding(guaranteed, held, Grant(gpus, 1, target, wanted), returns_s)


SATED = holding(2, 2, 2, 2, 2)
GIVING = holding(2, 4, 2, 2, 4, returns_s=90.0)


@pytest.mark.parametrize(
    ("own", "other", "expected"),
    [
        (SATED, SATED, ""),
        (holding(4, 2, 2, 4, 4), GIVING, "2 more GPUs will follow: b returns 2, expected at 90"),
        (
            holding(4, 2, 2, 4, 4),
            holding(2, 4, 2, 2, 4),
            "2 more GPUs will follow: b returns 2",
        ),
        (holding(4, 2, 2, 4, 4), SATED, "2 more GPUs will follow: they are free at the next allocation"),
        (
            holding(2, 4, 4, 4, 6),
            SATED,
            "2 more are not available until another graph needs fewer: b holds 2 (guaranteed 2)",
        ),
        (
            holding(2, 4, 4, 4, 6),
            holding(2, 0, 0, 0, 0),
            "2 more are not available because the pool has no more",
        ),
        (
            holding(2, 2, 2, 3, 5),
            GIVING,
            (
                "1 more GPU will follow: b returns 2, expected at 90; "
                "2 more are not available until another graph needs fewer: b holds 4 and will hold 2 (guaranteed 2)"
            ),
        ),
    ],
)
def test_a_graph_hears_who_holds_what_it_lacks_and_when_it_comes(own, other, expected):
    """What drains for it apart from what stays with others; nothing where it lacks nothing."""
    assert shortage_message("a", {"a": own, "b": other}, lambda at_s: f"at {at_s:.0f}") == expected


def test_a_graph_above_its_target_lacks_what_it_wants_beyond_its_grant():
    """Its grant is on its way down: of the rest it hears who holds it."""
    own = holding(2, 4, 4, 2, 5)
    assert (
        shortage_message("a", {"a": own, "b": SATED}, str)
        == "1 more is not available until another graph needs fewer: b holds 2 (guaranteed 2)"
    )


def test_a_graph_waits_for_those_who_give_back_alone():
    """Not for itself, nor for those who keep what they hold."""
    holdings = {"a": holding(4, 2, 2, 4, 4), "b": GIVING, "c": SATED}
    assert waits_for("a", holdings) == ("b",)
    assert waits_for("b", holdings) == ()


def test_drain_times_are_learnt_from_drains_that_end():
    """The first as it was, the next ones by half; what is expected follows the drain that began last."""
    times = DrainTimes().updated({"p": 10.0, "q": 20.0}, 20.0)
    assert (times.duration_s, times.expected_end_s) == (None, None)
    times = times.updated({"q": 20.0}, 40.0)
    assert (times.duration_s, times.expected_end_s) == (30.0, 50.0)
    times = times.updated({}, 70.0)
    assert (times.duration_s, times.expected_end_s) == (40.0, None)


def test_a_clock_that_steps_back_makes_no_drain_shorter_than_nothing():
    """Zero at least."""
    assert DrainTimes({"p": 10.0}).updated({}, 5.0).duration_s == 0.0
