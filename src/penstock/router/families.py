"""Builds Prometheus families from rows at scrape time; the router's metrics modules call it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from penstock.core.histogram import BucketCounts

Label = TypeVar("Label", bound=str)

Rows = Iterable[tuple[Sequence[str], float | None]]
"""Label values, and the value; a row whose value is None is left out."""


def counter(name: str, text: str, labels: Sequence[str], rows: Rows) -> CounterMetricFamily:
    """Return a counter's family."""
    family = CounterMetricFamily(name, text, labels=labels)
    for key, value in rows:
        if value is not None:
            family.add_metric(key, value)
    return family


def gauge(name: str, text: str, labels: Sequence[str], rows: Rows) -> GaugeMetricFamily:
    """Return a gauge's family."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for key, value in rows:
        if value is not None:
            family.add_metric(key, value)
    return family


def by_label(label: str, name: str, text: str, counts: Mapping[Label, int]) -> CounterMetricFamily:
    """Return a counter's family with one label."""
    return counter(name, text, [label], (([key], count) for key, count in counts.items()))


def histogram(
    name: str, text: str, label: str, counts: Iterable[tuple[str, BucketCounts]]
) -> HistogramMetricFamily:
    """Return a histogram's family with one label."""
    family = HistogramMetricFamily(name, text, labels=[label])
    for key, buckets in counts:
        family.add_metric([key], buckets.labelled(), buckets.total)
    return family
