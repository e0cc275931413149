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


Family = TypeVar("Family", CounterMetricFamily, GaugeMetricFamily)


def _filled(family: Family, rows: Rows) -> Family:
    for key, value in rows:
        if value is not None:
            family.add_metric(key, value)
    return family


def counter(name: str, text: str, labels: Sequence[str], rows: Rows) -> CounterMetricFamily:
    """Return a counter's family."""
    return _filled(CounterMetricFamily(name, text, labels=labels), rows)


def gauge(name: str, text: str, labels: Sequence[str], rows: Rows) -> GaugeMetricFamily:
    """Return a gauge's family."""
    return _filled(GaugeMetricFamily(name, text, labels=labels), rows)


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


_TIER_COUNTERS = (
    (names.ROUTER_TIER_ARRIVALS, "Requests that arrived.", "arrivals"),
    (names.ROUTER_TIER_REJECTED, "Arrivals for which there was no room, no worker or no time.", "rejected"),
    (names.ROUTER_TIER_SHED, "Arrivals refused so that higher tiers keep their SLO.", "shed"),
)
_TIER_HISTOGRAMS = (
    (names.ROUTER_TIER_TTFT, "Arrival to first token of streams; simulated seconds.", "ttft"),
    (names.ROUTER_TIER_E2E, "Arrival to last byte; simulated seconds.", "e2e"),
    (names.ROUTER_TIER_QUEUE_TIME, "Waits for the first stage; simulated seconds.", "queue_time"),
)


def tier_families(
    control: TierControl, now_s: float, *, waiting: Mapping[Tier, int], downgraded: Mapping[Tier, int]
) -> Iterator[Metric]:
    """Yield every family with the label ``tier``; requests that wait, and that asked for more than they may, are given."""
    counts, monitor = control.counts, control.monitor
    for name, text, field in _TIER_COUNTERS:
        yield by_label("tier", name, text, {tier: getattr(each, field) for tier, each in counts.items()})
    asked = "Requests that asked for this tier without a key that allows it."
    yield by_label("tier", names.ROUTER_TIER_DOWNGRADED, asked, downgraded)
    kept = (
        "Share of the requests of the window that kept all targets of their tier, 0-1; absent if none ended."
    )
    shed = "Share of the arrivals that is shed now, 0-1."
    for name, text, values in (
        (
            names.ROUTER_TIER_WAITING,
            "Requests that wait for the first stage.",
            {tier: waiting.get(tier, 0) for tier in Tier},
        ),
        (names.ROUTER_TIER_COMPLIANCE, kept, {tier: monitor.compliance(tier, now_s) for tier in Tier}),
        (names.ROUTER_TIER_SHED_FRACTION, shed, {tier: monitor.shed_fraction(tier) for tier in Tier}),
    ):
        yield gauge(name, text, ["tier"], (([tier.value], value) for tier, value in values.items()))
    for name, text, field in _TIER_HISTOGRAMS:
        yield histogram(name, text, "tier", ((tier, getattr(each, field)) for tier, each in counts.items()))
