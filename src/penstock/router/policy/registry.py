"""Policies by the names under which distributions register them in the group `penstock.routing_policies`. Pure.

An entry names a class that is made without arguments, or one whose ``from_config`` makes it from the graph's router
section and its ``spec.slo``; `penstock.router.policy.parameters` reads ``policyParameters`` into the policy's own model.
"""

from __future__ import annotations

from itertools import islice
from typing import Final

from penstock.api import RouterConfig, SloConfig
from penstock.api.router import ROUTING_POLICIES
from penstock.core.errors import ConfigError
from penstock.core.plugins import load, registered
from penstock.router.policy.policies import LeastLoaded
from penstock.router.policy.routing_policy import (
    Arrival,
    AssignTime,
    Estimates,
    LearnsPrompts,
    RoutingDecision,
    RoutingPolicy,
    WorkerQueues,
    bottleneck_s,
    reads_usage,
)

DEFAULT_SLO: Final = SloConfig()
"""Targets of a router without a graph."""


def policy_names() -> tuple[str, ...]:
    """Return the names of all installed policies, sorted."""
    return tuple(registered(ROUTING_POLICIES))


def make_policy(config: RouterConfig, slo: SloConfig = DEFAULT_SLO) -> RoutingPolicy:
    """Return a new policy as a graph's router section and its targets ask for it.

    Raises:
        ConfigError: no such policy is installed, or it does not take its parameters.
    """
    kind = load(ROUTING_POLICIES, config.policy, kind="policy")
    policy: RoutingPolicy
    if hasattr(kind, "from_config"):
        policy = kind.from_config(config, slo)
    elif config.policy_parameters:
        raise ConfigError(
            f"router.policyParameters: {', '.join(config.policy_parameters)}: policy {config.policy} has none; remove them"
        )
    else:
        policy = kind()
    return policy


def entry_policy(config: RouterConfig, slo: SloConfig = DEFAULT_SLO) -> RoutingPolicy:
    """Return the policy of the first stage, sticky where sessions have a header and requests are assigned on arrival."""
    policy = make_policy(config, slo)
    if config.session_header is None or policy.assigns is AssignTime.WHEN_FREE:
        return policy
    return StickySessions(policy)


def decode_policy(config: RouterConfig, slo: SloConfig = DEFAULT_SLO) -> RoutingPolicy:
    """Return the policy for decode workers: the named one if it compares loads, else least-loaded.

    A policy that reads prompts knows prefixes; what matters for decode is free KV and load.
    """
    policy = make_policy(config, slo)
    return policy if policy.assigns is AssignTime.WHEN_FREE else LeastLoaded()


SESSIONS = 65_536
"""Sessions remembered. Chosen: about 10 MiB; beyond it, the least recently used are dropped."""


class StickySessions:
    """Sends a session's requests to one worker while it exists and has not failed them."""

    def __init__(self, inner: RoutingPolicy, *, most: int = SESSIONS) -> None:
        """Wrap the policy of requests without a session, and of each session's first; ``most`` sessions are remembered."""
        self._most = most
        self._inner = inner
        self.assigns = inner.assigns
        self.bottleneck_s = bottleneck_s(inner)
        self.reads_usage = reads_usage(inner)
        self._workers: dict[str, str] = {}

    def worker_joined(self, name: str) -> None:
        """Record a new worker."""
        self._inner.worker_joined(name)

    def worker_left(self, name: str) -> None:
        """Record that a worker is gone; sessions there are queued again when they next ask."""
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
        if len(self._workers) > self._most:
            # Several at once: taking the oldest out of a dict walks over all that went before it.
            for quiet in list(islice(self._workers, 1 + self._most // 32)):
                del self._workers[quiet]
