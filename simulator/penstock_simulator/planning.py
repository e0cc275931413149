"""The planner in virtual time: the live loop's rhythm around the same `decide`.

Pulls, intervals and the block while a change is under way are as in the live loop; ledger, restarts and
withdrawals are not modelled: here every replica that is asked for becomes ready.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock_graph.models import Role
from penstock_planner.decide.config import DecideConfig
from penstock_planner.decide.decision import Decision
from penstock_planner.decide.observation import Observation, PoolCounts, Pull, Window, summarise
from penstock_planner.decide.pipeline import decide
from penstock_planner.decide.reading import judge
from penstock_planner.decide.state import PlannerState
from penstock_planner.timing import Grid

_SOURCE = "simulator"


@dataclass(frozen=True, slots=True)
class Sight:
    """What one pull sees.

    Attributes:
        pools: Counts by role.
        is_adjusting: A replica asked for is not ready yet, or one is draining; a dead one that comes back is
            no adjustment.
        kv: KV usage fraction by ready decode (or aggregated) worker; None when not scraped yet.
        waiting: Requests that wait for prefill; None in aggregated worlds.
        age_s: Age of the readings.
    """

    pools: Mapping[Role, PoolCounts]
    is_adjusting: bool
    kv: Mapping[str, float | None]
    waiting: int | None
    age_s: float


class VirtualPlanner:
    """One planner.

    Attributes:
        decisions: Every decision, holds included.
        next_s: When `tick` is due.
    """

    __slots__ = (
        "_blocked_s",
        "_config",
        "_grid",
        "_max_age_s",
        "_pulls",
        "_slot",
        "_state",
        "decisions",
        "next_s",
    )

    def __init__(self, config: DecideConfig, *, max_age_s: float = 10.0) -> None:
        """Begin at time 0.

        Args:
            config: The rules' settings.
            max_age_s: Oldest fresh reading, as the live planner's ``metrics-max-age``.
        """
        self._config = config
        self._max_age_s = max_age_s
        self._state = PlannerState()
        self._blocked_s: float | None = None
        self.decisions: list[Decision] = []
        self._begin(0.0)
        self.next_s = self._grid.at_s(1)

    def tick(self, now_s: float, sight: Sight) -> Decision | None:
        """Do what is due; return a decision whose changes are to be carried out, or None."""
        decision = None
        if sight.is_adjusting:
            self._blocked_s = now_s if self._blocked_s is None else self._blocked_s
        elif self._blocked_s is not None:
            self._blocked_s = None
            self._begin(now_s)
        else:
            self._pulls.append(self._pull(now_s, sight))
            if self._grid.is_over(now_s):
                decision = self._decide(now_s)
        self._plan_next(now_s)
        return decision

    def _begin(self, start_s: float) -> None:
        self._grid = Grid(start_s, self._config.metric_pulling_interval_s, self._config.adjustment_interval_s)
        self._slot = 0
        self._pulls: list[Pull] = []

    def _pull(self, now_s: float, sight: Sight) -> Pull:
        kv = {
            name: judge(value, age_s=sight.age_s, max_age_s=self._max_age_s, source=_SOURCE, upper=1.0)
            for name, value in sight.kv.items()
        }
        queue = None
        if sight.waiting is not None:
            queue = judge(float(sight.waiting), age_s=sight.age_s, max_age_s=self._max_age_s, source=_SOURCE)
        return summarise(Observation(now_s, sight.pools, kv, queue))

    def _decide(self, now_s: float) -> Decision:
        window = Window(self._grid.start_s, now_s, tuple(self._pulls))
        decision, self._state = decide(window, self._state, self._config)
        self.decisions.append(decision)
        next_start_s = self._grid.next_start_s(now_s)
        if decision.changes:
            self._blocked_s = now_s
        self._begin(next_start_s)
        return decision

    def _plan_next(self, now_s: float) -> None:
        if self._blocked_s is not None:
            self.next_s = now_s + self._grid.pull_s
            return
        self._slot = self._grid.slot_after(self._slot, now_s)
        self.next_s = self._grid.at_s(self._slot)
        if self.next_s <= now_s:
            self._slot += 1
            self.next_s = self._grid.at_s(self._slot)
