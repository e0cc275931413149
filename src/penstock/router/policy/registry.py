"""Routing policies by the names under which Python packages register them in the entry-point group `penstock.routing_policies`. Pure.

An entry point names a class that can be created without arguments, or a class whose ``from_config`` creates it from the
graph's router section and its ``spec.slo``; `penstock.router.policy.parameters` reads ``policyParameters`` into the policy's
own model.
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
"""Targets of a router that has no graph."""


def policy_names() -> tuple[str, ...]:
    """Return the names of all installed policies, sorted."""
    return tuple(registered(ROUTING_POLICIES))


def make_policy(config: RouterConfig, slo: SloConfig = DEFAULT_SLO) -> RoutingPolicy:
    """Return a new policy as configured by a graph's router section (``config``) and SLO targets (``slo``).

    Raises:
        ConfigError: the policy that ``config`` names is not installed, or does not accept the parameters in ``config``.
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
    """Return a new policy for the workers of the first stage (prefill or aggregated workers).

    It is wrapped in `StickySessions` if a session header is configured and the policy assigns requests on arrival.
    """
    policy = make_policy(config, slo)
    if config.session_header is None or policy.assigns is AssignTime.WHEN_FREE:
        return policy
    return StickySessions(policy)


def decode_policy(config: RouterConfig, slo: SloConfig = DEFAULT_SLO) -> RoutingPolicy:
    """Return a new policy for decode workers: the configured policy if it assigns when a worker is free, else least-loaded.

    Policies that assign on arrival choose by prefixes; for decode, free KV blocks and load are decisive.
    """
    policy = make_policy(config, slo)
    return policy if policy.assigns is AssignTime.WHEN_FREE else LeastLoaded()


SESSIONS = 65_536
"""Maximum number of remembered sessions; above it, the least recently used are deleted. Chosen: about 10 MiB."""


class StickySessions:
    """Routes all requests of a session to the same worker, while that worker is eligible and has not failed the request.

    It is a `RoutingPolicy` that wraps another one; ``inner`` is the wrapped policy, and ``most`` the maximum number of
    remembered sessions. The attributes ``assigns``, ``bottleneck_s`` and ``reads_usage`` have the values of the wrapped
    policy.
    """

    def __init__(self, inner: RoutingPolicy, *, most: int = SESSIONS) -> None:
        """Wrap ``inner``, which routes the requests without a session and the first request of each session.

        ``most`` is the maximum number of remembered sessions.
        """
        self._most = most
        self._inner = inner
        self.assigns = inner.assigns
        self.bottleneck_s = bottleneck_s(inner)
        self.reads_usage = reads_usage(inner)
        self._workers: dict[str, str] = {}

    def worker_joined(self, name: str) -> None:
        """Tell the wrapped policy that the new worker ``name`` can be chosen from now on."""
        self._inner.worker_joined(name)

    def worker_left(self, name: str) -> None:
        """Tell the wrapped policy that the worker ``name`` can no longer be chosen.

        The next request of each session whose requests went to that worker is routed by the wrapped policy.
        """
        self._inner.worker_left(name)

    def route(self, arrival: Arrival, workers: WorkerQueues, estimates: Estimates) -> RoutingDecision:
        """Return the worker to which the previous request of the same session was sent, or the choice of the wrapped policy.

        The wrapped policy chooses if the request has no session, or if the session's worker cannot be sent requests now
        or has failed the request. The session is then remembered with the worker that was chosen.

        Args:
            arrival: The request.
            workers: Workers to choose from, by name; not empty.
            estimates: Estimated durations at the time of the decision.
        """
        session = arrival.session
        if not session:
            return self._inner.route(arrival, workers, estimates)
        known = self._workers.pop(session, None)
        if known is not None and known in workers and known not in arrival.avoid:
            self._workers[session] = known
            return RoutingDecision(known, "its session's worker")
        decision = self._inner.route(arrival, workers, estimates)
        self._remember(session, decision.worker)
        # No second candidate: a request that moves would leave the worker that has its session's prefix.
        return RoutingDecision(decision.worker, decision.reason, "", False, decision.uncached)

    def prompt_queued(self, arrival: Arrival, worker: str, workers: WorkerQueues) -> None:
        """Remember the worker to which another router has sent a request, so that the next request of its session goes there too.

        Also passes this on to the wrapped policy.

        Args:
            arrival: The request; nothing is remembered if it has no session.
            worker: Name of the worker.
            workers: All workers, by name.
        """
        if arrival.session:
            self._workers.pop(arrival.session, None)
            self._remember(arrival.session, worker)
        if isinstance(self._inner, LearnsPrompts):
            self._inner.prompt_queued(arrival, worker, workers)

    def _remember(self, session: str, worker: str) -> None:
        self._workers[session] = worker
        if len(self._workers) > self._most:
            # Several are deleted at once, because finding the oldest item of a dict scans all items that were deleted before
            # it.
            for quiet in list(islice(self._workers, 1 + self._most // 32)):
                del self._workers[quiet]
