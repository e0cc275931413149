"""The tiers' part of the router's metrics page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import Metric

from penstock.api import Tier
from penstock.core import metric_names as names
from penstock.router.core.tiers import TierControl
from penstock.router.families import by_label, gauge, histogram


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
    counts, monitor, now_s = control.counts, control.monitor, gauges.now_s
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
        yield by_label("tier", name, text, values)
    for name, text, read in (
        (
            names.ROUTER_TIER_WAITING,
            "Requests that wait for the first stage.",
            lambda tier: gauges.waiting.get(tier, 0),
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
