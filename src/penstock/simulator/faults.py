"""What goes wrong around the planner at given times: replicas, metrics, router, budget, the planner itself.

Deaths of workers are `scenario.Failure`. All times are virtual seconds, intervals half-open [from_s, to_s).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from penstock.core.errors import ConfigError
from penstock.core.flags import flag


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
    """One fault from a time to a time."""

    kind: Fault
    from_s: float
    to_s: float

    def __post_init__(self) -> None:
        if not 0 <= self.from_s < self.to_s < math.inf:
            raise ConfigError(
                f"fault {self.kind.value}: {self.from_s:g}-{self.to_s:g} must be finite, from 0 on, and not empty"
            )


@dataclass(frozen=True, slots=True)
class BudgetChange:
    """The GPU budget from a time on; what exists already may stay, nothing more may join above it."""

    at_s: float
    gpus: int

    def __post_init__(self) -> None:
        if not (0 <= self.at_s < math.inf and self.gpus >= 0):
            raise ConfigError(
                f"budget change at {self.at_s!r} s to {self.gpus!r} GPUs: both must be at least 0"
            )


def _period(text: str) -> FaultPeriod:
    kind, _, times = text.partition(":")
    from_s, _, to_s = times.partition("-")
    return FaultPeriod(Fault(kind), float(from_s), float(to_s))


def _budget(text: str) -> BudgetChange:
    at_s, _, gpus = text.partition("=")
    return BudgetChange(float(at_s), int(gpus))


_KINDS = ", ".join(kind.value for kind in Fault)


@dataclass(frozen=True, slots=True)
class Faults:
    """Everything that goes wrong in one run; the help of its fields is the command line's."""

    periods: Sequence[FaultPeriod] = flag(
        f"Let something go wrong for a while: {_KINDS}; repeatable.",
        name="--fault",
        default=(),
        metavar="KIND:FROM-TO",
        convert=_period,
        form=f"KIND:FROM-TO, as metrics-missing:150-450; kinds are {_KINDS}",
    )
    restarts: Sequence[float] = flag(
        "Replace the planner's process at this time, seconds; repeatable.",
        name="--restart",
        default=(),
        metavar="S",
        unset="never",
    )
    budget: Sequence[BudgetChange] = flag(
        "Change the GPU budget at a time; repeatable.",
        name="--budget-change",
        default=(),
        metavar="S=N",
        convert=_budget,
        form="SECONDS=GPUS, as 200=4",
    )
    node_gpus: int | None = flag(
        "GPUs of all nodes; replicas beyond them cannot be placed.", ge=1, unset="enough"
    )

    def is_on(self, kind: Fault, now_s: float) -> bool:
        """Tell whether a fault is on at a time."""
        return self.since_s(kind, now_s) is not None

    def since_s(self, kind: Fault, now_s: float) -> float | None:
        """Return when the fault that is on began, or None."""
        for each in self.periods:
            if each.kind is kind and each.from_s <= now_s < each.to_s:
                return each.from_s
        return None
