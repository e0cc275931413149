"""Decode queues of ten times the lease: no lease is lost, and messages grow with engines, not with requests."""

from __future__ import annotations

from dataclasses import dataclass

from cluster import OUTPUT_TOKENS, Cluster, Counts, Shape

from penstock.engine.core.lease import LeaseTerms

LEASE_S = 30.0
FACTOR = 10
PROMPT_TOKENS = 64
SERVICE_S = OUTPUT_TOKENS * 0.02
"""A seat's time for a request, by the decode step of `cluster.LATENCY`."""


@dataclass(frozen=True, slots=True)
class WaitingRun:
    """One run.

    Attributes:
        requests: Handed over within the first seconds.
        pairs: Prefill engines times decode engines.
        counts: What happened.
        expired: Leases that ran out.
        seconds: Until the last request was served, virtual.
    """

    requests: int
    pairs: int
    counts: Counts
    expired: int
    seconds: float


def run_waiting(requests: int, *, prefills: int, decodes: int) -> WaitingRun:
    """Serve a surge of requests at a rate that makes the last one wait ten leases."""
    wait_s = 1.1 * FACTOR * LEASE_S
    seats = max(1, int(requests * SERVICE_S / wait_s / decodes))
    shape = Shape(prefills, decodes, seats, PROMPT_TOKENS, LeaseTerms(LEASE_S))
    cluster = Cluster(shape, blocks=requests * (PROMPT_TOKENS // 16 + 1))
    for number in range(requests):
        cluster.submit(number * 0.001)
    while cluster.counts.served + cluster.counts.lost < requests:
        cluster.run_until(cluster.now_s + 1.0)
    expired = sum(each.engine.counters.lease_expiries.total() for each in cluster.prefills)
    return WaitingRun(requests, prefills * decodes, cluster.counts, expired, cluster.now_s)
