"""The best size per role under targets, and bounds by the formulas of the planner's document."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import ConfigError
from penstock.performance.recommend import Bounds, Targets, decode_choices, kv_bounds, queue_bounds, recommend
from penstock.performance.sweep import KvTransferCost

TARGETS = Targets(isl=2000, osl=2000, ttft_s=0.3, itl_s=0.02)


def test_the_best_throughput_per_gpu_of_those_that_meet_the_targets(two_sizes):
    """TTFT 210 and 130 ms: 9,524 and 7,692 tokens/s/GPU. ITL 14 ms with 8, 27 with 41 in flight; 15 with 16, 28 with 41."""
    found = recommend(two_sizes, TARGETS)

    assert (found.prefill.gpus, found.prefill.ttft_s) == (1, pytest.approx(0.21))
    assert found.prefill.tokens_per_s_per_gpu == pytest.approx(2000 / 0.21)
    assert (found.decode.gpus, found.decode.concurrency) == (1, 16)
    assert found.decode.itl_s == pytest.approx(0.018)
    assert found.decode.kv_usage == pytest.approx(16 * 3000 / 100_000)
    assert found.misses == ()


def test_the_four_lines_of_the_document(two_sizes):
    """Its wording, letter for letter; upper bound before lower."""
    assert recommend(two_sizes, TARGETS).lines() == [
        "Suggested prefill TP:1 (TTFT 210.00 ms, throughput 9523.81 tokens/s/GPU)",
        "Suggested planner upper/lower bound for prefill queue size: 0.71/0.14",
        "Suggested decode TP:1 (ITL 18.00 ms, throughput 888.89 tokens/s/GPU)",
        "Suggested planner upper/lower bound for decode kv cache utilization: 0.68/0.28",
    ]


@pytest.mark.parametrize(("is_aggregated", "sizes"), [(False, (2, 1)), (True, (2, 2))])
def test_a_tight_ttft_takes_the_larger_engine(two_sizes, is_aggregated, sizes):
    """Only TP2 reads 2,000 tokens within 150 ms; an aggregated graph decodes on it too, where TP1 would be cheaper."""
    found = recommend(replace(two_sizes, is_aggregated=is_aggregated), replace(TARGETS, ttft_s=0.15))

    assert (found.prefill.gpus, found.decode.gpus) == sizes


def test_what_no_size_meets_names_the_nearest_and_what_it_takes(two_sizes):
    """TP2's 130 ms and its 7.5 ms with one request are the nearest."""
    found = recommend(two_sizes, replace(TARGETS, ttft_s=0.1, itl_s=0.007))

    assert (found.prefill.gpus, found.decode.gpus, found.decode.concurrency) == (2, 2, 1)
    assert "the nearest is TP2 with 130.0 ms; it takes --ttft-slo 130ms" in found.misses[0]
    assert "the nearest is TP2 with 7.5 ms and 1 in flight; it takes --itl-slo 7.5ms" in found.misses[1]


def test_what_is_missed_by_less_than_the_tolerance_counts_as_met_and_is_noted(two_sizes):
    """TP2's 130 and 7.5 ms against 128 and 7.4: no miss, two notes."""
    found = recommend(two_sizes, replace(TARGETS, ttft_s=0.128, itl_s=0.0074))

    assert found.misses == ()
    assert [note.partition(":")[0] for note in found.notes] == [
        "TTFT 128 ms at 2,000 prompt tokens",
        "ITL 7.4 ms at 3,000 tokens of context",
    ]
    assert (found.prefill.meets, found.decode.meets) == (False, False)


def test_what_follows_the_prefill_is_counted_where_the_transfer_is_known(two_sizes):
    """10 ms and 1 us a token, and a step of 10.6 ms: 210 ms become 232.6; the queue's bounds leave it out."""
    transfer = KvTransferCost(0.01, 1e-6)
    known = replace(two_sizes, engines=tuple(replace(each, transfer=transfer) for each in two_sizes.engines))
    found, unknown = recommend(known, TARGETS), recommend(two_sizes, TARGETS)

    assert found.prefill.after_s == pytest.approx(0.012 + 0.010625)
    assert found.prefill.ttft_s == pytest.approx(unknown.prefill.ttft_s + 0.022625)
    assert found.prefill.tokens_per_s_per_gpu == unknown.prefill.tokens_per_s_per_gpu
    assert found.queue == queue_bounds(0.3 - 0.022625, 0.21)
    assert recommend(replace(known, is_aggregated=True), TARGETS).prefill.after_s == 0


@pytest.mark.parametrize(
    ("changes", "key"),
    [({"isl": 20_000, "osl": 1}, "--isl: 20000"), ({"isl": 12_000}, "--isl plus half of --osl")],
)
def test_nothing_is_recommended_beyond_what_was_measured(two_sizes, changes, key):
    """Prompts end at 12,000 tokens, contexts at 9,000."""
    with pytest.raises(ConfigError, match=key):
        recommend(two_sizes, replace(TARGETS, **changes))


def test_a_context_between_two_is_interpolated(engine):
    """ITL depends on requests alone here, and the lines between contexts keep that within a few percent."""
    choices = decode_choices(engine(), Targets(isl=4000, osl=1000, ttft_s=1.0, itl_s=0.1))

    assert [choice.concurrency for choice in choices] == sorted({c.concurrency for c in choices})
    assert choices[0].concurrency >= 1
    for choice in choices:
        assert choice.itl_s == pytest.approx(0.01 + 0.0005 * choice.concurrency, rel=0.1)


@pytest.mark.parametrize(
    ("found", "upper", "lower"),
    [
        (queue_bounds(0.05, 0.04837), 0.24, 0.1),
        (kv_bounds(0.004), 0.2, 0.1),
        (kv_bounds(0.05), 0.25, 0.1),
        (kv_bounds(0.5), 0.7, 0.3),
        (kv_bounds(0.9), 1.0, 0.7),
        (kv_bounds(1.0), 1.0, 0.8),
    ],
)
def test_bounds_by_the_formulas(found, upper, lower):
    """The document's own example is TTFT 48.37 ms and an empty cache: 0.24/0.10 and 0.20/0.10."""
    assert found == Bounds(upper, lower)


SECONDS = st.floats(1e-3, 100)


@given(SECONDS, SECONDS, st.floats(0, 2))
def test_bounds_are_thresholds_that_a_planner_accepts(target_s, ttft_s, kv_usage):
    """Whatever was measured: the upper one above the lower, of KV usage both in (0, 1]."""
    queue, kv = queue_bounds(target_s, ttft_s), kv_bounds(kv_usage)
    assert queue.upper > queue.lower >= 0.1
    assert 0.1 <= kv.lower < kv.upper <= 1
