"""What a run cost and whether it held its targets: GPU-hours against two baselines, and violations.

Pure. All times are simulated seconds from the load run's zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.api import Role
from penstock.report.ledger_view import PlannerRun
from penstock.workload.record import RequestResult, RequestStatus
from penstock.workload.statistics import pooled_gaps

_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class GpuUse:
    """GPU-hours over a span; a draining replica still holds its GPUs.

    Attributes:
        end_s: End of the span; what the ledger does not reach is not counted.
        used_hours: Held by existing replicas.
        static_max_hours: The budget, held all the time: what provisioning for the peak costs. With no
            ceiling configured it is the largest number held.
        static_min_hours: The floor of each role, held all the time: the least that serves at all.
        budget_gpus: The ceiling; None when there is none.
    """

    start_s: float
    end_s: float
    used_hours: float
    static_max_hours: float
    static_min_hours: float
    peak_gpus: int
    budget_gpus: int | None

    @property
    def saved_fraction(self) -> float | None:
        """Share of the static maximum that was not used; None over an empty span."""
        return 1 - self.used_hours / self.static_max_hours if self.static_max_hours > 0 else None


@dataclass(frozen=True, slots=True)
class Violations:
    """How many requests and gaps missed a target.

    Attributes:
        late_first_tokens: Requests without a first token within the target, failed and rejected included.
        gaps: Inter-token gaps of ok requests.
        long_gaps: Gaps above the target.
    """

    ttft_target_s: float | None
    itl_target_s: float | None
    requests: int
    late_first_tokens: int | None
    gaps: int
    long_gaps: int | None


def gpu_steps(run: PlannerRun) -> list[tuple[float, int]]:
    """Return (time, GPUs held from then on), in order of time.

    While an adjustment is under way nothing is pulled: from a decision that was carried out to the next
    pull the replicas it adds hold their GPUs, and those it removes still hold theirs.
    """
    steps = [(sample.at_s, sample.gpus) for sample in run.samples]
    steps.extend(
        (mark.at_s, mark.gpus_after)
        for mark in run.decisions
        if any(role.outcome == "applied" for role in mark.roles)
    )
    # a pull and its decision share their time: the decision comes after it
    return sorted(steps, key=lambda step: step[0])


def gpu_use(run: PlannerRun, *, start_s: float, end_s: float) -> GpuUse | None:
    """Return the GPU-hours between two times, or None where the ledger saw nothing.

    Args:
        run: From the ledger.
        start_s: Begin; moved to the first pull if that is later.
        end_s: End; moved to the newest record if that is earlier.
    """
    steps = gpu_steps(run)
    if not steps:
        return None
    start_s, end_s = max(start_s, steps[0][0]), min(end_s, run.end_s)
    if end_s <= start_s:
        return None
    gpu_s = 0.0
    peak = 0
    for index, (at_s, gpus) in enumerate(steps):
        until_s = steps[index + 1][0] if index + 1 < len(steps) else end_s
        held_s = min(until_s, end_s) - max(at_s, start_s)
        if held_s > 0:
            gpu_s += held_s * gpus
            peak = max(peak, gpus)
    hours = (end_s - start_s) / _HOUR_S
    budget = run.config.max_gpu_budget
    return GpuUse(
        start_s=start_s,
        end_s=end_s,
        used_hours=gpu_s / _HOUR_S,
        static_max_hours=(peak if budget is None else budget) * hours,
        static_min_hours=floor_gpus(run) * hours,
        peak_gpus=peak,
        budget_gpus=budget,
    )


def floor_gpus(run: PlannerRun) -> int:
    """Return the GPUs of the fewest replicas that the planner may leave, over all roles seen."""
    engines: dict[Role, int] = {}
    for sample in run.samples:
        for role, pool in sample.pools.items():
            engines[role] = max(engines.get(role, 0), run.config.engine_gpus(role, pool.gpus))
    return sum(run.config.floor(role, gpus) * gpus for role, gpus in engines.items())


def violations(
    results: Sequence[RequestResult], *, ttft_target_s: float | None, itl_target_s: float | None
) -> Violations:
    """Count what missed the targets; a request without a first token missed its target."""
    late = None
    if ttft_target_s is not None:
        late = sum(
            result.status is not RequestStatus.OK or result.ttft_s is None or result.ttft_s > ttft_target_s
            for result in results
        )
    gaps = pooled_gaps(results)
    return Violations(
        ttft_target_s=ttft_target_s,
        itl_target_s=itl_target_s,
        requests=len(results),
        late_first_tokens=late,
        gaps=int(gaps.size),
        long_gaps=None if itl_target_s is None else int((gaps > itl_target_s).sum()),
    )
