"""The tiers' part of the router's metrics page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from penstock.api import Tier
from penstock.core import metric_names as names
from penstock.router.core.tier_control import TierControl, TierCounts


@dataclass(frozen=True, slots=True)
class TierGauges:
    """What a scrape is told beside the counters.

    Attributes:
        waiting: Requests that wait for the first stage, by tier.
        downgraded: Requests that asked for a higher tier than they may, by that tier.
        now_s: Simulated seconds.
    """

    waiting: Mapping[Tier, int]
    downgraded: Mapping[Tier, int]
    now_s: float


def tier_families(control: TierControl, gauges: TierGauges) -> Iterator[Metric]:
    """Yield every family with the label ``tier``."""
    counts = control.counts
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
            gauges.downgraded,
        ),
    ):
        counter = CounterMetricFamily(name, text, labels=["tier"])
        for tier, value in values.items():
            counter.add_metric([tier.value], value)
        yield counter
    waiting = GaugeMetricFamily(
        names.ROUTER_TIER_WAITING, "Requests that wait for the first stage.", labels=["tier"]
    )
    for tier in Tier:
        waiting.add_metric([tier.value], gauges.waiting.get(tier, 0))
    yield waiting
    yield from _slo_families(control, gauges.now_s)
    yield from _histograms(counts)


def _slo_families(control: TierControl, now_s: float) -> Iterator[Metric]:
    compliance = GaugeMetricFamily(
        names.ROUTER_TIER_COMPLIANCE,
        "Share of the requests of the window that kept all targets of their tier, 0-1; absent if none ended.",
        labels=["tier"],
    )
    fraction = GaugeMetricFamily(
        names.ROUTER_TIER_SHED_FRACTION, "Share of the arrivals that is shed now, 0-1.", labels=["tier"]
    )
    for tier in Tier:
        value = control.monitor.compliance(tier, now_s)
        if value is not None:
            compliance.add_metric([tier.value], value)
        fraction.add_metric([tier.value], control.monitor.shed_fraction(tier))
    yield from (compliance, fraction)


def _histograms(counts: Mapping[Tier, TierCounts]) -> Iterator[Metric]:
    for name, text, histograms in (
        (
            names.ROUTER_TIER_TTFT,
            "Arrival to first token of streams; simulated seconds.",
            {tier: each.ttft for tier, each in counts.items()},
        ),
        (
            names.ROUTER_TIER_E2E,
            "Arrival to last byte; simulated seconds.",
            {tier: each.e2e for tier, each in counts.items()},
        ),
        (
            names.ROUTER_TIER_QUEUE_TIME,
            "Waits for the first stage; simulated seconds.",
            {tier: each.queue_time for tier, each in counts.items()},
        ),
    ):
        family = HistogramMetricFamily(name, text, labels=["tier"])
        for tier, histogram in histograms.items():
            family.add_metric([tier.value], histogram.labelled(), histogram.total)
        yield family
