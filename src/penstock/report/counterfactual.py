"""What other fleets would have cost and kept in time on the traffic just served: the figures and their words.

Pure. `penstock.simulator.counterfactual` fills it; terminal, page and picture show it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from penstock.report.analysis import GpuUse
from penstock.workload.record import RequestResult, RequestStatus
from penstock.workload.statistics import describe


class FleetKind(StrEnum):
    """Who sets the number of replicas."""

    PLANNER = "planner"
    FIXED = "fixed"
    AUTOSCALER = "autoscaler"
    ORACLE = "oracle"


@dataclass(frozen=True, slots=True)
class FleetOutcome:
    """One fleet on the recorded traffic.

    Attributes:
        name: Such as ``3P+1D`` or ``hpa``.
        is_measured: What happened; else it was simulated.
        in_time: Share of all requests with TTFT below the SLO, 0-1; lost ones are late.
        lost: Failed and rejected requests.
        ttft_p50_s, ttft_p90_s, ttft_p99_s: Of the served ones; None when none was.
        gpu_hours: Held from the first request to the last answer; None when unknown.
        remark: Why it is shown; empty where the name says it.
    """

    name: str
    kind: FleetKind
    is_measured: bool
    in_time: float
    lost: int
    ttft_p50_s: float | None
    ttft_p90_s: float | None
    ttft_p99_s: float | None
    gpu_hours: float | None
    remark: str = ""

    @property
    def source(self) -> str:
        """``measured`` or ``simulated``."""
        return "measured" if self.is_measured else "simulated"


@dataclass(frozen=True, slots=True)
class Counterfactual:
    """The comparison.

    Attributes:
        slo_s: TTFT that counts as in time, simulated seconds.
        outcomes: What is shown, the measured one first.
        fixed: Every fixed fleet that was tried, the smallest first.
        notes: How it was made, and what it lacks.
        equal: The cheapest fixed fleet that serves as well; None where none that was tried does.
        is_complete: Whether every fleet that could be as good was tried; else the time was used up.
    """

    slo_s: float
    outcomes: tuple[FleetOutcome, ...]
    fixed: tuple[FleetOutcome, ...]
    notes: tuple[str, ...]
    equal: FleetOutcome | None = None
    is_complete: bool = True

    @property
    def served(self) -> FleetOutcome:
        """Return what happened."""
        return self.outcomes[0]


def served_outcome(
    results: Sequence[RequestResult], use: GpuUse | None, *, name: str, slo_s: float, duration_s: float
) -> FleetOutcome:
    """Return the run itself as an outcome of that name; a ledger that covers less than the run leaves GPU-hours unknown.

    Args:
        results: Of all requests that ended, at least one.
        use: GPU-hours by the ledger; None: unknown.
        name: Of what scaled.
        slo_s: TTFT that counts as in time, seconds.
        duration_s: Of the run.
    """
    ttft = [result.ttft_s for result in results if result.status is RequestStatus.OK]
    return outcome(
        np.array([each for each in ttft if each is not None], dtype=np.float64),
        name=name,
        kind=FleetKind.PLANNER,
        requests=len(results),
        slo_s=slo_s,
        gpu_hours=use.used_hours if use is not None and use.covers(duration_s) else None,
        is_measured=True,
    )


def outcome(
    ttft_s: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
    *,
    name: str,
    kind: FleetKind,
    requests: int,
    slo_s: float,
    gpu_hours: float | None,
    is_measured: bool = False,
) -> FleetOutcome:
    """Return a fleet's figures.

    TTFTs are of the served requests, shape (served,), in seconds; below ``slo_s`` they are in time. Of the ``requests`` that
    were sent, one at least, those not served are lost.
    """
    ranks = describe(ttft_s)
    return FleetOutcome(
        name=name,
        kind=kind,
        is_measured=is_measured,
        in_time=round(float((ttft_s < slo_s).sum()) / requests, 6),
        lost=requests - int(ttft_s.size),
        ttft_p50_s=ranks["p50"],
        ttft_p90_s=ranks["p90"],
        ttft_p99_s=ranks["p99"],
        gpu_hours=None if gpu_hours is None else round(gpu_hours, 6),
    )


def sentences(found: Counterfactual) -> list[str]:
    """Return what each other fleet would have done, as text; then how far to believe it."""
    lines = []
    for each in found.outcomes[1:]:
        did = _did(each, found.served)
        if each.kind is FleetKind.PLANNER:
            lines.append(
                f"{each.name} itself, simulated: {did}; what differs from the measured row is the simulation's error, the"
                " client's lag included"
            )
        else:
            article = "a fixed" if each.kind is FleetKind.FIXED else "the"
            remark = f" ({each.remark})" if each.remark else ""
            lines.append(f"{article} {each.name} would have {did}{remark}")
    return [*lines, *found.notes]


def _did(each: FleetOutcome, served: FleetOutcome) -> str:
    cost = "cost an unknown number of GPU-hours"
    if each.gpu_hours is not None:
        cost = f"cost {each.gpu_hours:.3f} GPU-hours"
        if served.gpu_hours:
            cost += f" ({each.gpu_hours / served.gpu_hours - 1:+.0%})"
    return f"{cost} and kept {each.in_time:.1%} in time ({(each.in_time - served.in_time) * 100:+.1f} points)"
