"""Builds Prometheus families from rows at scrape time, and those of the tiers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from prometheus_client.core import (
    CounterMetricFamily,
    Exemplar,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from penstock.api import Tier
from penstock.core import metric_names as names
from penstock.core.histogram import BucketCounts
from penstock.router.core.tiers import TierControl

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
        edges = (*map(str, buckets.bounds), "+Inf")
        rows: list[tuple[str, float] | tuple[str, float, Exemplar]] = [
            *zip(edges, map(float, buckets.cumulative()), strict=True)
        ]
        for place, (trace_id, value, at_s) in buckets.exemplars.items():
            rows[place] = (*rows[place][:2], Exemplar({"trace_id": trace_id}, value, at_s))
        family.add_metric([key], rows, buckets.total)
    return family


def tier_families(
    control: TierControl, now_s: float, *, waiting: Mapping[Tier, int], downgraded: Mapping[Tier, int]
) -> Iterator[Metric]:
    """Yield every family with the label ``tier``; requests that wait, and that asked for more than they may, are given."""
    counts, monitor = control.counts, control.monitor
    for name, text, values in (
        (names.ROUTER_TIER_ARRIVALS, "Requests that arrived.", {t: c.arrivals for t, c in counts.items()}),
        (
            names.ROUTER_TIER_REJECTED,
            "Arrivals for which there was no room, no worker or no time.",
            {t: c.rejected for t, c in counts.items()},
        ),
        (
            names.ROUTER_TIER_SHED,
            "Arrivals refused so that higher tiers keep their SLO.",
            {t: c.shed for t, c in counts.items()},
        ),
        (
            names.ROUTER_TIER_DOWNGRADED,
            "Requests that asked for this tier without a key that allows it.",
            downgraded,
        ),
    ):
        yield by_label("tier", name, text, values)
    for name, text, read in (
        (
            names.ROUTER_TIER_WAITING,
            "Requests that wait for the first stage.",
            lambda tier: waiting.get(tier, 0),
        ),
        (
            names.ROUTER_TIER_COMPLIANCE,
            "Share of the requests of the window that kept all targets of their tier, 0-1; absent if none ended.",
            lambda tier: monitor.compliance(tier, now_s),
        ),
        (
            names.ROUTER_TIER_SHED_FRACTION,
            "Share of the arrivals that is shed now, 0-1.",
            monitor.shed_fraction,
        ),
    ):
        yield gauge(name, text, ["tier"], (([tier.value], read(tier)) for tier in Tier))
    for name, text, buckets in (
        (
            names.ROUTER_TIER_TTFT,
            "Arrival to first token of streams; simulated seconds.",
            {t: c.ttft for t, c in counts.items()},
        ),
        (
            names.ROUTER_TIER_E2E,
            "Arrival to last byte; simulated seconds.",
            {t: c.e2e for t, c in counts.items()},
        ),
        (
            names.ROUTER_TIER_QUEUE_TIME,
            "Waits for the first stage; simulated seconds.",
            {t: c.queue_time for t, c in counts.items()},
        ),
    ):
        yield histogram(name, text, "tier", buckets.items())
