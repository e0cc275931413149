"""Which points are measured."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import ConfigError
from penstock.performance.quality import GAP_RATIO
from penstock.performance.recommend import Targets
from penstock.performance.sweep import DecodePoint
from penstock.profiler import points
from penstock.profiler.points import Limits


@given(st.integers(1, 20_000), st.integers(1, 2000), st.integers(500, 500_000), st.integers(256, 131_072))
def test_points_fit_and_leave_no_gap(isl, osl, kv_tokens, max_context):
    """Whatever is asked for: inside the cache, increasing, without a gap that a check would complain of."""
    targets, limits = Targets(isl, osl, 1, 1), Limits(kv_tokens, 256, max_context)
    if isl + osl > min(kv_tokens, max_context):
        with pytest.raises(ConfigError, match="--isl"):
            points.prompt_lengths(targets, limits)
        return
    for chosen in (points.prompt_lengths(targets, limits), points.contexts(targets, limits)):
        assert chosen == sorted(set(chosen))
        assert chosen[0] >= 1
        assert chosen[-1] < min(kv_tokens, max_context)
    lengths = points.prompt_lengths(targets, limits)
    inside = [each for each in lengths if each >= points.LEAST_PROMPT]
    assert all(right <= GAP_RATIO * left for left, right in pairwise(inside))
    for context in points.contexts(targets, limits):
        assert points.most_in_flight(context, limits) * context <= kv_tokens or kv_tokens < context + 48


@pytest.mark.parametrize(
    ("most", "sizes"), [(1, [1]), (3, [1, 2, 3]), (6, [1, 2, 3, 4, 5, 6]), (101, [1, 21, 41, 61, 81, 101])]
)
def test_batches_run_from_one_to_what_the_cache_holds(most, sizes):
    """Evenly spaced, both ends included."""
    assert points.batch_sizes(most) == sizes


def row(*measured):
    """Points of one context: (requests in flight, ITL in ms)."""
    return [DecodePoint(1000, count, itl_ms / 1000, 1) for count, itl_ms in measured]


@pytest.mark.parametrize(
    ("measured", "wanted"),
    [
        (row((1, 10), (29, 21), (57, 30)), 15),
        (row((1, 10), (15, 16), (29, 21)), 22),
        (row((27, 19.9), (28, 20.1)), None),
        (row((100, 19), (107, 21)), None),
        (row((1, 30), (29, 40)), None),
        (row((1, 10), (29, 15)), None),
    ],
)
def test_the_step_across_the_target_is_halved(measured, wanted):
    """Until both sides are close; not where the target lies outside."""
    assert points.refinement(measured, 0.02) == wanted


def test_refining_ends():
    """From any row of six batches, in as many steps as are allowed at most."""
    counts = dict.fromkeys(points.batch_sizes(256))
    for _ in range(points.MAX_REFINEMENTS + 1):
        found = points.refinement(row(*((n, 10 + n / 10) for n in sorted(counts))), 0.0201)
        if found is None:
            break
        counts[found] = None
    assert found is None
