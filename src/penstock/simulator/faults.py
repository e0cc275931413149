"""What goes wrong around the planner at given times: replicas, metrics, router, budget, the planner itself.

Deaths of workers are `scenario.Failure`. All times are virtual seconds, intervals half-open [from_s, to_s).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from penstock.core.errors import ConfigError


class Fault(StrEnum):
    """What is wrong for a while.

    NEVER_READY: replicas asked for meanwhile never serve, and the backend does not say why.
    METRICS_MISSING: no source answers. METRICS_STALE: every source repeats what it last knew.
    METRICS_ZERO: every gauge reads 0, as after an exporter's restart. METRICS_NAN: every gauge reads NaN.
    ROUTER_DOWN: arrivals fail, what waits stays where it is, and only the workers' own gauges can be read.
    PLANNER_DOWN: the planner's process is away.
    """

    NEVER_READY = "never-ready"
    METRICS_MISSING = "metrics-missing"
    METRICS_STALE = "metrics-stale"
    METRICS_ZERO = "metrics-zero"
    METRICS_NAN = "metrics-nan"
    ROUTER_DOWN = "router-down"
    PLANNER_DOWN = "planner-down"


@dataclass(frozen=True, slots=True)
class FaultPeriod:
    """One fault from a time to a time.

    Attributes:
        kind: What is wrong.
        from_s, to_s: When, 0 <= from_s < to_s.
    """

    kind: Fault
    from_s: float
    to_s: float

    def __post_init__(self) -> None:
        """Check the bounds."""
        if not 0 <= self.from_s < self.to_s < math.inf:
            raise ConfigError(
                f"fault {self.kind.value}: {self.from_s:g}-{self.to_s:g} must be finite, from 0 on, and not empty"
            )


@dataclass(frozen=True, slots=True)
class BudgetChange:
    """The GPU budget from a time on; what exists already may stay, nothing more may join above it.

    Attributes:
        at_s: When, >= 0.
        gpus: The new ceiling, >= 0.
    """

    at_s: float
    gpus: int

    def __post_init__(self) -> None:
        """Check the bounds."""
        if not (0 <= self.at_s < math.inf and self.gpus >= 0):
            raise ConfigError(
                f"budget change at {self.at_s!r} s to {self.gpus!r} GPUs: both must be at least 0"
            )


@dataclass(frozen=True, slots=True)
class Faults:
    """Everything that goes wrong in one run.

    Attributes:
        periods: Faults that last.
        restarts: When the planner's process is replaced at once, seconds.
        budget: Changes of the GPU budget, in order of time.
        node_gpus: GPUs of all nodes; replicas beyond them exist and cannot be placed. None: enough.
    """

    periods: Sequence[FaultPeriod] = ()
    restarts: Sequence[float] = ()
    budget: Sequence[BudgetChange] = ()
    node_gpus: int | None = None

    def is_on(self, kind: Fault, now_s: float) -> bool:
        """Tell whether a fault is on at a time."""
        return self.since_s(kind, now_s) is not None

    def since_s(self, kind: Fault, now_s: float) -> float | None:
        """Return when the fault that is on began, or None."""
        for each in self.periods:
            if each.kind is kind and each.from_s <= now_s < each.to_s:
                return each.from_s
        return None
