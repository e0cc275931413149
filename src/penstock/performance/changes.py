"""What would have to change for a load to fit its targets and its GPUs: the smallest change of each thing alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from penstock.performance.capacity import CapacityPlan, EngineFigures, Load, plan_of
from penstock.performance.recommend import Targets

_MOST = 64.0
"""Largest factor that is tried. Chosen: a change beyond it is another product."""
_STEPS = 24
"""Halvings of the factor's logarithm; the last is a thousandth of a percent."""


@dataclass(frozen=True, slots=True)
class Change:
    """One change that makes the load fit.

    Attributes:
        text: The option to give, with its value.
        factor: By which it changes, above 1; smaller is cheaper.
    """

    text: str
    factor: float
    plan: CapacityPlan


@dataclass(frozen=True, slots=True)
class CapacityQuery:
    """A load, its targets, and the GPUs there are.

    Attributes:
        max_gpus: GPUs of all replicas; None: any number.
    """

    engines: Sequence[EngineFigures]
    targets: Targets
    load: Load
    is_aggregated: bool
    max_gpus: int | None = None

    def answer(self, targets: Targets, load: Load) -> CapacityPlan | None:
        """Return the plan for other targets or another load, where it fits the GPUs."""
        plan = plan_of(self.engines, targets, load, is_aggregated=self.is_aggregated)
        fits = plan is not None and (self.max_gpus is None or plan.gpus <= self.max_gpus)
        return plan if fits else None


def changes(question: CapacityQuery) -> list[Change]:
    """Return the smallest change of TTFT, of ITL, of both, and of the rate, that makes it fit; cheapest first."""
    targets, load = question.targets, question.load

    def slower(ttft: float, itl: float) -> Callable[[float], CapacityPlan | None]:
        def at(factor: float) -> CapacityPlan | None:
            eased = replace(targets, ttft_s=targets.ttft_s * factor**ttft, itl_s=targets.itl_s * factor**itl)
            return question.answer(eased, load)

        return at

    def fewer(factor: float) -> CapacityPlan | None:
        return question.answer(targets, replace(load, rps=load.rps / factor))

    ttft_ms, itl_ms = targets.ttft_s * 1000, targets.itl_s * 1000
    tried: tuple[tuple[Callable[[float], CapacityPlan | None], Callable[[float], str]], ...] = (
        (slower(1, 0), lambda factor: f"--ttft {_up(ttft_ms * factor)}"),
        (slower(0, 1), lambda factor: f"--itl {_up(itl_ms * factor)}"),
        (slower(1, 1), lambda factor: f"--ttft {_up(ttft_ms * factor)} --itl {_up(itl_ms * factor)}"),
        (fewer, lambda factor: f"--rps {math.floor(load.rps / factor * 100) / 100:g}"),
    )
    found = []
    for plan_at, text in tried:
        factor = _smallest(plan_at)
        plan = plan_at(factor) if factor is not None else None
        if factor is not None and plan is not None:
            found.append(Change(text(factor), factor, plan))
    return sorted(found, key=lambda change: change.factor)


def _smallest(plan_at: Callable[[float], CapacityPlan | None]) -> float | None:
    """Return the smallest factor, above 1, from which on it fits; None: none up to `_MOST`."""
    if plan_at(_MOST) is None:
        return None
    low, high = 0.0, math.log(_MOST)
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if plan_at(math.exp(middle)) is None:
            low = middle
        else:
            high = middle
    return math.exp(high)


def _up(milliseconds: float) -> str:
    return f"{math.ceil(milliseconds * 10) / 10:g}"
