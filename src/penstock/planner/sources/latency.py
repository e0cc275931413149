"""Latency histograms that frontends export, for the dashboard: read from samples and added up. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final

from penstock.core.exposition import Sample
from penstock.planner.sources.base import Buckets

TTFT: Final = "ttft"
ITL: Final = "itl"


class LatencyTotals:
    """Histograms of several frontends as one that never falls, though frontends restart and leave."""

    def __init__(self) -> None:
        self._before: dict[str, Mapping[str, Buckets]] = {}
        self._total: dict[str, dict[float, float]] = {key: {} for key in (TTFT, ITL)}

    def add(self, pages: Mapping[str, Mapping[str, Buckets]], urls: Sequence[str]) -> Mapping[str, Buckets]:
        """Return the sums after what each router counted since the last read."""
        for url, latency in pages.items():
            before = self._before.get(url, {})
            for key, buckets in latency.items():
                if buckets == before.get(key):
                    continue
                total = self._total[key]
                for bound, count in gained(before.get(key, ()), buckets):
                    total[bound] = total.get(bound, 0.0) + count
        self._before = {url: pages.get(url) or self._before.get(url, {}) for url in urls}
        return {key: tuple(sorted(total.items())) for key, total in self._total.items()}


def buckets_of(samples: Sequence[Sample]) -> Buckets:
    """Return the sum of a histogram's series; samples without a bound are skipped."""
    totals: dict[float, float] = {}
    for sample in samples:
        try:
            bound = _bound(sample.labels.get("le", ""))
        except ValueError:
            continue
        totals[bound] = totals.get(bound, 0.0) + sample.value
    return tuple(sorted(totals.items()))


_bound = lru_cache(1024)(float)
"""The same few bounds come with every page."""


def gained(before: Buckets, after: Buckets) -> Buckets:
    """Return the cumulative counts gained since ``before``.

    A counter that fell (its process restarted) counts from 0, as in Prometheus.
    """
    earlier = dict(before)
    if any(count < earlier.get(bound, 0.0) for bound, count in after):
        return after
    return tuple((bound, count - earlier.get(bound, 0.0)) for bound, count in after)
