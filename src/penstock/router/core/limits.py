"""Every limit of the router, and whether it applies to new requests, to interrupted streams, or to both. Pure.

An interrupted stream is one whose client has received the first part of the response and whose worker
has died or is draining: the router has admitted it and delivered part of it, and resumes it on another worker. Limits that
protect the router from new work do not apply to it. All code that enforces a limit asks the `Limit` object here, so that it
is enforced in the same way everywhere; docs/router.md shows the table.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from penstock.api.router_workers import RetriesConfig


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit of the router.

    Attributes:
        name: Unique identifier in metrics and logs.
        key: Configuration key, below ``spec`` of a graph; a sentence if the limit is not configurable.
        effect: What happens to a request that reaches the limit.
        for_new: Whether the limit applies to requests whose client has not received anything yet.
        for_interrupted: Whether the limit applies to interrupted streams, which are to be resumed on another worker.
    """

    name: str
    key: str
    effect: str
    for_new: bool
    for_interrupted: bool

    def applies(self, *, is_interrupted: bool) -> bool:
        """Return whether the limit applies to an interrupted stream (``is_interrupted=True``) or to a new request (``is_interrupted=False``)."""
        return self.for_interrupted if is_interrupted else self.for_new


SHEDDING: Final = Limit("shedding", "router.tiers.shedding", "refused", for_new=True, for_interrupted=False)
NO_WORKER: Final = Limit(
    "no_worker", "no worker serves and none is expected", "refused", for_new=True, for_interrupted=False
)
THRESHOLDS: Final = Limit(
    "thresholds",
    "router.admission thresholds at every worker",
    "refused, or waits its tier's turn",
    for_new=True,
    for_interrupted=False,
)
CAPACITY: Final = Limit(
    "capacity", "every worker answers `worker at capacity`", "refused", for_new=True, for_interrupted=False
)
QUEUE_LENGTH: Final = Limit(
    "queue_length", "router.prefillQueue.maxRequests", "refused", for_new=True, for_interrupted=False
)
TENANT_SHARE: Final = Limit(
    "tenant_share",
    "router.tiers.shares, router.tiers.maxTenantShare",
    "refused",
    for_new=True,
    for_interrupted=False,
)
QUEUE_WAIT: Final = Limit(
    "queue_wait",
    "router.prefillQueue.maxWaitSeconds, router.prefillQueue.maxWakeSeconds",
    "refused",
    for_new=True,
    for_interrupted=False,
)
TIER_TARGET: Final = Limit(
    "tier_target",
    "router.tiers.slo end-to-end targets",
    "waits no longer",
    for_new=True,
    for_interrupted=False,
)
RETRIES: Final = Limit(
    "retries", "router.retries.maxPerRequest", "fails", for_new=True, for_interrupted=False
)
RETRY_BUDGET: Final = Limit(
    "retry_budget",
    "router.retries.budgetFraction, router.retries.minPerSecond",
    "fails",
    for_new=True,
    for_interrupted=False,
)
CONNECTIONS: Final = Limit(
    "connections",
    "the router has no connection left for a worker",
    "refused",
    for_new=True,
    for_interrupted=False,
)
CONTINUATIONS: Final = Limit(
    "continuations", "router.retries.maxContinuations", "ends", for_new=False, for_interrupted=True
)
WORKER_WAIT: Final = Limit(
    "worker_wait", "router.retries.continuationWaitSeconds", "ends", for_new=False, for_interrupted=True
)
REQUEST_TIME: Final = Limit(
    "request_time", "router.limits.requestTimeoutSeconds", "ends", for_new=True, for_interrupted=True
)
LEASE_WAIT: Final = Limit(
    "lease_wait",
    "router.decodeQueue.maxWaitSeconds, or 0.8 of the prompt's lease",
    "the prompt is computed again",
    for_new=True,
    for_interrupted=True,
)
QUERY_OF_DEATH_LIMIT: Final = Limit(
    "query_of_death",
    "it ran alone on a worker that died, after it was on two others that died",
    "refused for ten minutes",
    for_new=True,
    for_interrupted=True,
)
WORKER_ROOM: Final = Limit(
    "worker_room",
    "router.prefillQueue.workerTokens, a worker's requests",
    "waits in the queue",
    for_new=True,
    for_interrupted=True,
)

LIMITS: Final = (
    SHEDDING,
    NO_WORKER,
    THRESHOLDS,
    CAPACITY,
    QUEUE_LENGTH,
    TENANT_SHARE,
    QUEUE_WAIT,
    TIER_TARGET,
    RETRIES,
    RETRY_BUDGET,
    CONNECTIONS,
    CONTINUATIONS,
    WORKER_WAIT,
    REQUEST_TIME,
    QUERY_OF_DEATH_LIMIT,
    LEASE_WAIT,
    WORKER_ROOM,
)
"""All limits, in the order of the table in docs/router.md."""

MAX_WORKER_WAIT_S: Final = 600.0
"""Maximum wait of an interrupted stream for a worker that resumes it, in simulated seconds. Chosen: longer than a worker's restart,
whose own limit is 600 s by default, and as long as clients wait for a byte."""


def worker_wait_s(config: RetriesConfig, startup_s: Iterable[float] = ()) -> float:
    """Return how long an interrupted stream waits for a worker that resumes it, in simulated seconds.

    Args:
        config: Retry settings; ``continuationWaitSeconds`` is returned if it is set.
        startup_s: ``startupTimeoutSeconds`` of the graph's workers. If ``continuationWaitSeconds`` is not set, the longest
            of these startup timeouts is returned, at most 600 s (`MAX_WORKER_WAIT_S`); 600 s if there are none.
    """
    if config.continuation_wait_seconds is not None:
        return config.continuation_wait_seconds
    return min(MAX_WORKER_WAIT_S, max(startup_s, default=MAX_WORKER_WAIT_S))
