"""The objects that the parts of one router share."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.core.clock import SimulatedClock
from penstock.core.http.client import ConnectionPool
from penstock.router.admission import Admission
from penstock.router.discovery.statefile import Discovery
from penstock.router.metrics import RouterMetrics
from penstock.router.proxy.prompt_cost import PromptCosts
from penstock.router.settings import RouterSettings


@dataclass(slots=True)
class RouterContext:
    """Objects that are created before all parts of a router and passed to them.

    Attributes:
        settings: Settings of the router.
        clock: Converts between real and simulated time.
        admission: Acquires workers for requests, through the router core or another router.
        discovery: Lists the workers and the routers of the graph.
        metrics: Counters of the requests.
        prompt_costs: Estimates the number of tokens of prompts; learned from the counts that workers return.
        pool: Connections to workers for requests.
        probes: Connections to workers for health checks and metrics.
    """

    settings: RouterSettings
    clock: SimulatedClock
    admission: Admission
    discovery: Discovery
    metrics: RouterMetrics = field(default_factory=RouterMetrics)
    prompt_costs: PromptCosts = field(default_factory=PromptCosts)
    pool: ConnectionPool = field(init=False)
    probes: ConnectionPool = field(init=False)

    def __post_init__(self) -> None:
        """Create both connection pools with the credentials for workers."""
        self.pool, self.probes = (ConnectionPool(tls=self.settings.worker_tls) for _ in range(2))
