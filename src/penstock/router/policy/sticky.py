"""Session stickiness around any placing policy: requests of one session stay where its first was queued. Pure."""

from __future__ import annotations

from itertools import islice

from penstock.router.policy.routing_policy import (
    Arrival,
    Estimates,
    LearnsPrompts,
    RoutingDecision,
    RoutingPolicy,
    WorkerQueues,
    bottleneck_s,
    reads_usage,
)

SESSIONS = 65_536
"""Sessions remembered. Chosen: about 10 MiB; beyond it, the least recently used are dropped."""


class StickySessions:
    """Sends a session's requests to one worker while it exists and has not failed them."""

    def __init__(self, inner: RoutingPolicy, *, limit: int = SESSIONS) -> None:
        """Wrap a policy.

        Args:
            inner: Places requests without a session, and the first of each.
            limit: Sessions remembered, >= 1.
        """
        self._inner = inner
        self.assigns = inner.assigns
        self.bottleneck_s = bottleneck_s(inner)
        self.reads_usage = reads_usage(inner)
        self._limit = limit
        self._workers: dict[str, str] = {}

    def worker_joined(self, name: str) -> None:
        """Pass it on."""
        self._inner.worker_joined(name)

    def worker_left(self, name: str) -> None:
        """Pass it on; sessions there are queued again when they next ask."""
        self._inner.worker_left(name)

    def route(self, arrival: Arrival, workers: WorkerQueues, estimates: Estimates) -> RoutingDecision:
        """Return the session's worker, or the policy's choice."""
        session = arrival.session
        if not session:
            return self._inner.route(arrival, workers, estimates)
        known = self._workers.pop(session, None)
        if known is not None and known in workers and known not in arrival.avoid:
            self._workers[session] = known
            return RoutingDecision(known, "its session's worker")
        decision = self._inner.route(arrival, workers, estimates)
        self._remember(session, decision.worker)
        # Moving one request of a session would take it from its known.
        return RoutingDecision(decision.worker, decision.reason, "", False, decision.uncached)

    def prompt_queued(self, arrival: Arrival, worker: str, workers: WorkerQueues) -> None:
        """Remember where another router keeps a session."""
        if arrival.session:
            self._workers.pop(arrival.session, None)
            self._remember(arrival.session, worker)
        if isinstance(self._inner, LearnsPrompts):
            self._inner.prompt_queued(arrival, worker, workers)

    def _remember(self, session: str, worker: str) -> None:
        self._workers[session] = worker
        if len(self._workers) > self._limit:
            # Several at once: taking the oldest out of a dict walks over all that went before it.
            for quiet in list(islice(self._workers, 1 + self._limit // 32)):
                del self._workers[quiet]
