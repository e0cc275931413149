"""What a cumulative histogram gained between two observations."""

from __future__ import annotations

from penstock.planner.sources.base import Buckets


def gained(before: Buckets, after: Buckets) -> Buckets:
    """Return the cumulative counts gained since ``before``.

    A counter that fell (its process restarted) counts from 0, as in Prometheus.
    """
    earlier = dict(before)
    if any(count < earlier.get(bound, 0.0) for bound, count in after):
        return after
    return tuple((bound, count - earlier.get(bound, 0.0)) for bound, count in after)
