"""The state of one run, for the planner, the metrics scrapes and the recorder; and the workers' metrics as routers scrape them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from penstock.api import Role
from penstock.router.core.retries import Effects
from penstock.router.core.worker import Worker
from penstock.router.policy.busy import busy_thresholds
from penstock.simulator.fleet import SimulatedFleet, SimulatedWorker, State
from penstock.simulator.frontend import FrontendCounters, GapHistogram
from penstock.simulator.jobs import Job
from penstock.simulator.kernel import Kernel, Order
from penstock.simulator.routing import VirtualRouter
from penstock.simulator.scenario import Scenario
from penstock.simulator.servers import SimulatedEngine


@dataclass(frozen=True, slots=True)
class SimulationState:
    """The state of one simulation run. Times are simulated seconds.

    Attributes:
        scenario: The scenario.
        kernel: Events and virtual time.
        fleet: All existing workers.
        routers: All routers that have been the picker (the router that chooses workers) so far; the last one is the picker now.
        jobs: All requests of the run in order of arrival.
        gaps: Histogram of the gaps between output tokens.
        frontend: Request counters for the planner.
    """

    scenario: Scenario
    kernel: Kernel
    fleet: SimulatedFleet
    routers: Sequence[VirtualRouter]
    jobs: Sequence[Job]
    gaps: GapHistogram
    frontend: FrontendCounters

    def queued_tokens(self, worker: SimulatedWorker) -> int:
        """Return the number of prompt tokens of the requests that wait in routers for ``worker``."""
        return sum(router.core.entry_queue.workers.queued_tokens(worker.name) for router in self.routers)

    @property
    def waiting(self) -> int:
        """Number of requests that are queued in routers for a prefill (or aggregated) worker."""
        return sum(router.core.entry_queue.waiting for router in self.routers)

    def turned_away(self) -> dict[Role, float]:
        """Return the number of requests since the start of the run that routers refused for lack of a worker, by role of the worker."""
        counts = [router.core.rejections for router in self.routers]
        return {role: float(sum(each[role].total for each in counts)) for role in counts[0]}


SCRAPE_S = 1.0
"""Seconds between two scrapes of the workers' metrics; the live router's default."""


class Scrapes:
    """Scrapes the workers' metrics once per simulated second, and passes them to the picker, the router that chooses workers.

    Between two scrapes the picker knows only the KV cache usage of the last scrape, as a router on a cluster does.
    """

    def __init__(self, state: SimulationState, apply: Callable[[Effects[Job]], None]) -> None:
        """Prepare the scrapes.

        Args:
            state: State of the run.
            apply: Callback that receives the dispatches which new metrics allow.
        """
        self._state = state
        self._apply = apply

    def start(self) -> None:
        """Start the scrapes of the workers' metrics, once per simulated second; the first one is now."""
        self._state.kernel.at(self._state.kernel.now_s, Order.MESSAGE, self._scrape)

    def count_decode(self, router: VirtualRouter) -> list[Worker]:
        """Update a router's view of each ready decode worker's requests and tokens to the current values, and return those workers.

        Requests and tokens change with every decode step, so they are read when a worker is chosen. The KV cache usage remains that of the
        last scrape of the workers' metrics.
        """
        found = []
        for each in self._state.fleet.of(Role.DECODE, State.READY):
            worker = router.core.pool.get(each.name)
            if worker is not None:
                worker.set_inflight(len(each.jobs), self._tokens_on(each))
                worker.record_scrape(
                    each.kv_usage_fraction,
                    tokens=each.scraped_tokens,
                    uncomputed_tokens=each.scraped_uncomputed_tokens,
                    now_s=self._state.kernel.now_s,
                )
                server = each.server
                if isinstance(server, SimulatedEngine):
                    worker.speed.set_decode(server.gap_tokens, server.gap_s)
                found.append(worker)
        return found

    def _tokens_on(self, worker: SimulatedWorker) -> int:
        server = worker.server
        assert isinstance(server, SimulatedEngine)  # noqa: S101 - decode pools are never simple, the scenario says
        server.kv_usage_fraction(self._state.kernel.now_s)
        return worker.prompt_tokens + max(
            0, server.engine.counters.generation_tokens - worker.ended_output_tokens
        )

    def _scrape(self) -> None:
        """Read the workers' gauges; the router that picks workers receives them ``propagation_delay_s`` later."""
        now_s, delay_s = self._state.kernel.now_s, self._state.scenario.routers.propagation_delay_s
        router = self._state.routers[-1]
        uncomputed = {each.name: router.core.uncomputed_tokens(each, now_s) for each in router.core.pool}
        usage = {}
        for worker in self._state.fleet.of(Role.DECODE, State.READY, State.DRAINING, State.SWITCHING):
            usage[worker.name] = (
                worker.incarnation,
                worker.server.kv_usage_fraction(now_s),
                self._tokens_on(worker),
                uncomputed.get(worker.name, 0),
            )
        self._state.kernel.at(now_s + delay_s, Order.MESSAGE, self._propagate, usage)
        if router.reads_usage:
            entry = self._state.fleet.of(self._state.scenario.entry_role, State.READY)
            gauges = {worker.name: worker.server.kv_usage_fraction(now_s) for worker in entry}
            tokens = {
                each.name: (router.core.inflight_tokens(each), uncomputed[each.name])
                for each in router.core.pool
            }
            self._state.kernel.at(now_s + delay_s, Order.MESSAGE, self._report_usage, router, gauges, tokens)
        self._apply(router.tick(now_s))
        self._state.kernel.at(now_s + SCRAPE_S, Order.MESSAGE, self._scrape)

    def _report_usage(
        self, router: VirtualRouter, usage: Mapping[str, float], tokens: Mapping[str, tuple[int, int]]
    ) -> None:
        self._apply(router.set_usage(usage, tokens, self._state.kernel.now_s))

    def _propagate(self, usage: Mapping[str, tuple[int, float, int, int]]) -> None:
        for name, (incarnation, fraction, tokens, uncomputed) in usage.items():
            worker = self._state.fleet.get(name)
            if worker is not None and worker.incarnation == incarnation:
                worker.kv_usage_fraction, worker.scraped_tokens = fraction, tokens
                worker.scraped_uncomputed_tokens = uncomputed
        thresholds = busy_thresholds(self._state.scenario.router.admission)
        if self._state.scenario.is_disaggregated and thresholds.is_set:
            router = self._state.routers[-1]
            self._apply(router.loads_read(self.count_decode(router), self._state.kernel.now_s))
