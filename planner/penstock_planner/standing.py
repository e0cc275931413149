"""Where one planner stands: its state, the interval under way and what is outstanding.

The parts of the loop (resume, actuation, adjustment) share one `Standing`; nobody else holds it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock_graph.models import Role
from penstock_planner.decide.config import DecideConfig
from penstock_planner.decide.observation import PoolCounts, Pull
from penstock_planner.decide.state import PlannerState
from penstock_planner.history import Change
from penstock_planner.records import Place
from penstock_planner.targets.base import TargetState
from penstock_planner.timing import Grid


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """What one planner is set to.

    Attributes:
        config: Of the decision.
        max_age_s: Oldest fresh metric.
        adjustment_deadline_s: Longest wait for an adjustment before it is withdrawn or ignored.
        timeline: Names the clock: times of another timeline cannot be compared.
        about: For the ledger's header: namespace, environment, speed.
        first_sequence: Decisions known to have been made, even if the ledger is lost; ids go on behind them.
    """

    config: DecideConfig
    max_age_s: float
    adjustment_deadline_s: float
    timeline: str
    about: dict[str, str | float]
    first_sequence: int = 0


@dataclass
class Standing:
    """One planner's memory; times in modelled seconds.

    Attributes:
        settings: Fixed.
        origin_s: When the planner first started on this timeline.
        grid: Pull times of the interval under way.
        state: What the last decision left.
        slot: Newest pull's slot, 0 before the first.
        pulls: Of the interval under way.
        pending: Changes recorded by a killed planner and not known to be carried out.
        blocked_s: Since when an adjustment has been under way; None when none is.
        overdue: An adjustment that never ended is being ignored.
        desired: Replicas wanted by the last decision, by role.
    """

    settings: LoopSettings
    origin_s: float
    grid: Grid
    state: PlannerState = field(default_factory=PlannerState)
    slot: int = 0
    pulls: list[Pull] = field(default_factory=list)
    pending: tuple[Change, ...] = ()
    blocked_s: float | None = None
    overdue: bool = False
    desired: dict[Role, int] = field(default_factory=dict)

    @classmethod
    def blank(cls, settings: LoopSettings, now_s: float) -> Standing:
        """Return the standing of a planner that starts now and knows nothing."""
        return cls(settings, now_s, grid_of(settings.config, now_s))

    def begin(self, start_s: float) -> None:
        """Start an interval."""
        self.grid = self.grid_from(start_s)
        self.slot = 0
        self.pulls = []

    def grid_from(self, start_s: float) -> Grid:
        """Return an interval's grid."""
        return grid_of(self.settings.config, start_s)

    def is_decidable(self) -> bool:
        """Tell whether the interval is over and has something to decide on."""
        return bool(self.pulls) and self.grid.is_over(self.pulls[-1].at_s)

    def place(self, start_s: float) -> Place:
        """Return where a record of an anchor stands."""
        return Place(self.settings.timeline, self.origin_s, start_s)


def grid_of(config: DecideConfig, start_s: float) -> Grid:
    """Return the grid of an interval that starts at ``start_s``."""
    return Grid(start_s, config.metric_pulling_interval_s, config.adjustment_interval_s)


def counts(observed: TargetState) -> dict[Role, PoolCounts]:
    """Return the pools as decisions see them."""
    return {
        role: PoolCounts(pool.ready, pool.starting, pool.draining, pool.gpus_per_replica)
        for role, pool in observed.pools.items()
    }
