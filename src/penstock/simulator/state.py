"""What one run consists of: its time, workers, routers and jobs. The planner, scrapes, heartbeats and recorder read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.api import Role
from penstock.simulator.fleet import SimulatedFleet, SimulatedWorker
from penstock.simulator.frontend import FrontendCounters
from penstock.simulator.gaps import GapHistogram
from penstock.simulator.jobs import Job
from penstock.simulator.kernel import Kernel
from penstock.simulator.routing import VirtualRouter
from penstock.simulator.scenario import Scenario


@dataclass(frozen=True, slots=True)
class SimulationState:
    """One run's state.

    Attributes:
        scenario: What is simulated.
        kernel: Its time.
        fleet: Its workers.
        routers: Those that have picked so far; the last one does now.
        jobs: In order of arrival.
        gaps: Between successive tokens, over all workers.
        frontend: What routers count of requests.
    """

    scenario: Scenario
    kernel: Kernel
    fleet: SimulatedFleet
    routers: Sequence[VirtualRouter]
    jobs: Sequence[Job]
    gaps: GapHistogram
    frontend: FrontendCounters

    def queued_tokens(self, worker: SimulatedWorker) -> int:
        """Return the prompt tokens that wait in routers for one worker."""
        return sum(router.core.entry_queue.queued_tokens(worker.name) for router in self.routers)

    @property
    def waiting(self) -> int:
        """Jobs that wait in routers."""
        return sum(router.core.entry_queue.waiting for router in self.routers)

    def turned_away(self) -> dict[Role, float]:
        """Return the jobs that each role had no worker for so far."""
        counts = [router.core.turned_away for router in self.routers]
        return {role: float(sum(each[role].total for each in counts)) for role in counts[0]}
