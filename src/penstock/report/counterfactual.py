"""Outcomes of other fleets on the traffic of a run: cost and fraction of requests on time, and their sentences for the reader.

Pure. `penstock.simulator.counterfactual` computes them; terminal, page and chart show them.
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
    """The component that sets the number of replicas: Penstock's planner, none (a fixed fleet), an autoscaler, or an oracle."""

    PLANNER = "planner"
    FIXED = "fixed"
    AUTOSCALER = "autoscaler"
    ORACLE = "oracle"


@dataclass(frozen=True, slots=True)
class FleetOutcome:
    """Outcome of one fleet on the recorded traffic.

    Attributes:
        name: Display name such as ``3P+1D`` or ``hpa``.
        kind: Component that sets the number of replicas.
        is_measured: Whether this is the measured outcome of the actual run; otherwise the fleet was simulated.
        in_time: Fraction of all requests with a TTFT below the TTFT target, 0-1; lost requests count as late.
        lost: Number of failed and rejected requests.
        ttft_p50_s, ttft_p90_s, ttft_p99_s: Percentiles of the served requests' TTFT, simulated seconds; None if no request was served.
        gpu_hours: GPU-hours held from the first request to the last answer; None if unknown.
        remark: Reason for which the fleet is shown, for the reader; empty if the name suffices.
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
        """The word ``measured`` or ``simulated``."""
        return "measured" if self.is_measured else "simulated"


@dataclass(frozen=True, slots=True)
class Counterfactual:
    """Comparison of the actual run with other fleets.

    Attributes:
        slo_s: TTFT target, simulated seconds.
        outcomes: Outcomes to show, the measured one first.
        fixed: Outcome of every fixed fleet that was simulated, the smallest first.
        notes: Sentences about the assumptions and limits of the comparison.
        equal: Fixed fleet with the fewest GPUs that serves at least the same fraction on time as the actual run; None if no simulated fleet
            does. If lag of the load generator distorted the run, the simulated planner takes the place of the actual run.
        is_complete: Whether all fixed fleets that could be as good were simulated; False if the search reached its maximum number of
            fleets.
    """

    slo_s: float
    outcomes: tuple[FleetOutcome, ...]
    fixed: tuple[FleetOutcome, ...]
    notes: tuple[str, ...]
    equal: FleetOutcome | None = None
    is_complete: bool = True

    @property
    def served(self) -> FleetOutcome:
        """Outcome of the actual run, which is the first of ``outcomes``."""
        return self.outcomes[0]


def served_outcome(
    results: Sequence[RequestResult], use: GpuUse | None, *, name: str, slo_s: float, duration_s: float
) -> FleetOutcome:
    """Return the outcome of the actual run. Its GPU-hours are unknown if the ledger (the planner's decision log) does not cover the run.

    Args:
        results: Results of all requests that ended; at least one.
        use: GPU-hours computed from the ledger; None if unknown.
        name: Name of the planner mode that scaled the run.
        slo_s: TTFT target, seconds.
        duration_s: Duration of the run, seconds.
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
    """Return a fleet's outcome.

    Args:
        ttft_s: TTFT of each served request, seconds, shape (served,).
        name: Display name.
        kind: Component that sets the number of replicas.
        requests: Number of requests sent, >= 1; those that were not served count as lost.
        slo_s: TTFT target, seconds; a TTFT below it is on time.
        gpu_hours: GPU-hours held; None if unknown.
        is_measured: Whether this is the actual run, not a simulation.
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
    """Return one sentence per simulated fleet about its cost and fraction on time, followed by the notes about the assumptions.

    ``found`` is the comparison of the actual run with these fleets.
    """
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
            cost += f" ({each.gpu_hours / served.gpu_hours - 1:+z.0%})"
    return (
        f"{cost} and kept {each.in_time:.1%} in time ({(each.in_time - served.in_time) * 100:+z.1f} points)"
    )
