"""The Prometheus text parser."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from penstock.core.errors import ObservationError
from penstock.core.exposition import parse_samples
from penstock.core.histogram import (
    TOKEN_GAP_BOUNDS_S,
    BucketCounts,
)

PAGE = """\
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="a}\\"b\\\\c"} 0.25
vllm:num_requests_waiting{engine="0"} 3.0 1700000000000
vllm:num_requests_waiting_by_reason{reason="capacity"} 2
up 1
"""


def test_only_wanted_names_are_returned_with_their_labels():
    """Labels with braces, quotes and backslashes arrive unescaped."""
    samples = parse_samples(PAGE, {"vllm:kv_cache_usage_perc"})

    assert [(s.name, s.value) for s in samples] == [("vllm:kv_cache_usage_perc", 0.25)]
    assert samples[0].labels == {"engine": "0", "model_name": 'a}"b\\c'}


def test_a_name_that_is_a_prefix_of_another_does_not_match_it():
    """num_requests_waiting is not num_requests_waiting_by_reason."""
    samples = parse_samples(PAGE, {"vllm:num_requests_waiting"})

    assert [s.value for s in samples] == [3.0]


@pytest.mark.parametrize(("text", "check"), [("NaN", math.isnan), ("+Inf", math.isinf), ("-Inf", math.isinf)])
def test_non_finite_values_are_kept_for_the_reader(text, check):
    """The parser judges form; whoever reads the value judges sense."""
    (sample,) = parse_samples(f"up {text}\n", {"up"})

    assert check(sample.value)


@pytest.mark.parametrize(
    "line",
    [
        'up{a="b"} 5 # {trace_id="0af7"} 0.43 1700000000.123',
        'up{a="b"} 5 1700000000.5 # {trace_id="x # {y"} 0.43',
        'up{a="b"}\t5  #  {} 1\r',
        'up{a="b"} 5.0 1700000000.25',
    ],
)
def test_an_exemplar_behind_a_value_is_passed_over(line):
    """A worker that answers OpenMetrics has them on counters and buckets; the value is the page's."""
    (sample,) = parse_samples(line + "\n", {"up"})

    assert (sample.labels, sample.value) == ({"a": "b"}, 5.0)


def test_a_label_that_looks_like_an_exemplar_is_a_label():
    """Quotes end a label, whatever is in it."""
    (sample,) = parse_samples('up{a="b} 7 # {c"} 5 1700000000\n', {"up"})

    assert (sample.labels, sample.value) == ({"a": "b} 7 # {c"}, 5.0)


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ('vllm:gpu_cache_usage_perc{engine="0"} 0.5\n', [0.5]),
        ('vllm:gpu_cache_usage_perc{engine="0"} 0.5\nvllm:kv_cache_usage_perc{engine="0"} 0.25\n', [0.25]),
    ],
)
def test_the_kv_usage_of_vllm_0_9_is_known(page, expected):
    """Under its name of then; a page with both names counts no engine twice."""
    name = "vllm:kv_cache_usage_perc"
    samples = parse_samples(page, [name])

    assert [(each.name, each.value) for each in samples] == [(name, value) for value in expected]
    assert parse_samples(page, ["up"]) == []


@pytest.mark.parametrize("line", ["up", "up{a=1} 2", "up one", 'up{a="x} 1'])
def test_an_unreadable_wanted_line_is_an_error_that_quotes_it(line):
    """A broken line of a wanted metric is never taken for absence."""
    with pytest.raises(ObservationError, match="metrics page") as caught:
        parse_samples(line + "\n", {"up"})

    assert line in str(caught.value)


@settings(max_examples=50)
@given(
    st.dictionaries(st.text(max_size=12), st.floats(allow_nan=False), min_size=1, max_size=8),
)
def test_whatever_the_official_client_writes_is_read_back(series):
    """Round trip through prometheus_client for arbitrary label text and values."""
    registry = CollectorRegistry()
    gauge = Gauge("penstock_test", "synthetic", ["label"], registry=registry)
    for label, value in series.items():
        gauge.labels(label).set(value)

    samples = parse_samples(generate_latest(registry).decode(), {"penstock_test"})

    assert series == {s.labels["label"]: s.value for s in samples}


def test_bounds_are_inclusive_and_counts_cumulative():
    """A sample on a bound counts below it; what exceeds all bounds counts in the last number only."""
    histogram = BucketCounts((1.0, 2.0))
    histogram.observe(1.0, 3)
    histogram.observe(1.5)
    histogram.observe(9.0, 2)
    assert histogram.cumulative() == [3, 4, 6]
    assert histogram.total == 22.5


@given(st.lists(st.tuples(st.floats(0, 200), st.integers(0, 50))))
def test_cumulative_counts_rise_to_the_number_of_samples(samples):
    """Whatever is observed, counts never fall from bucket to bucket and end at the number of samples."""
    histogram = BucketCounts(TOKEN_GAP_BOUNDS_S)
    for value, count in samples:
        histogram.observe(value, count)
    counts = histogram.cumulative()
    assert counts == sorted(counts)
    assert counts[-1] == sum(count for _, count in samples)
