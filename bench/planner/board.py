"""A run's figures by case and policy: means and comparisons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from cells import later
from reference import EQUAL, HINDSIGHT
from split import is_tuned_seed
from workloads import Case

ORACLE, ONE_STEP = "oracle", "oracle-one-step"
FIXED = (EQUAL, HINDSIGHT)
REFERENCES = (*FIXED, ONE_STEP, ORACLE)

TIE = 0.005
"""Chosen: half a per cent of the requests, or of the GPU-hours, is a tie; seeds differ by more."""

VERDICTS = ("as good, no dearer", "better, dearer", "as good, dearer", "worse, cheaper", "worse, no cheaper")

Row = Mapping[str, Any]
Group = Sequence[tuple[Case, Sequence[int]]]
"""Cases, and the seeds of each that count."""


class Board:
    """A run's rows.

    Attributes:
        cases: In order.
        policies: Those that decide, in order.
        default: The planner's own default.
    """

    def __init__(
        self, cases: Sequence[Case], rows: Sequence[Row], policies: Sequence[str], default: str
    ) -> None:
        self.cases = list(cases)
        self.policies = list(policies)
        self.default = default
        self._rows: dict[tuple[str, str], dict[int, Row]] = {}
        for row in rows:
            self._rows.setdefault((row["case"], row["policy"]), {})[row["seed"]] = row

    def of(self, case: Case, policy: str, seeds: Sequence[int] | None = None) -> Row | None:
        """Return a policy's means over the seeds of a case (None: all), or None where it was not run."""
        rows = self._rows.get((case.name, policy), {})
        chosen = [row for seed, row in rows.items() if seeds is None or seed in seeds]
        return _mean_row(chosen) if chosen else None

    def regret(self, case: Case, policy: str, oracle: str = ORACLE) -> float | None:
        """Return GPU-hours as a multiple of an oracle's; None without one."""
        row, best = self.of(case, policy), self.of(case, oracle)
        if row is None or best is None or not best["gpu_hours"]:
            return None
        return float(row["gpu_hours"] / best["gpu_hours"])

    def groups(self) -> dict[str, Group]:
        """Return the load cases by what policies may have been tuned on: a case and a seed, a case, neither."""
        loads = [case for case in self.cases if case.kind == "load"]
        seeds = {case.name: sorted(self._rows.get((case.name, self.default), {})) for case in loads}
        tuned = [case for case in loads if case.is_tuned]
        return {
            "tuned": [
                (case, [seed for seed in seeds[case.name] if is_tuned_seed(case.name, seed)])
                for case in tuned
            ],
            "held-out seeds": [
                (case, [seed for seed in seeds[case.name] if not is_tuned_seed(case.name, seed)])
                for case in tuned
            ],
            "held-out cases": [(case, seeds[case.name]) for case in loads if not case.is_tuned],
        }

    def mean(self, policy: str, group: Group, *, figure: str = "both") -> float | None:
        """Return a policy's mean share in time over a group; None where the group is empty."""
        rows = [row for case, seeds in group if (row := self.of(case, policy, seeds))]
        return fmean(row["in_time"][figure] for row in rows) if rows else None


def verdict(own: Row, baseline: Row) -> str:
    """Return how one policy compares with another on a case."""
    gain = own["in_time"]["both"] - baseline["in_time"]["both"]
    cost = own["gpu_hours"] / baseline["gpu_hours"] - 1
    is_good, is_cheap = gain >= -TIE, cost <= TIE
    if is_good and is_cheap:
        return VERDICTS[0]
    if is_good:
        return VERDICTS[2] if gain <= TIE else VERDICTS[1]
    return VERDICTS[3] if cost < -TIE else VERDICTS[4]


def _mean_row(rows: Sequence[Row]) -> Row:
    names = ("gpu_hours", "mean_gpus", "violation_s", "changes", "replicas_moved", "reversals", "lost")
    mean: dict[str, Any] = {name: fmean(row[name] for row in rows) for name in names}
    mean["in_time"] = {kind: fmean(row["in_time"][kind] for row in rows) for kind in ("ttft", "itl", "both")}
    mean["in_time_per_gpu_hour"] = fmean(row["in_time_per_gpu_hour"] or 0.0 for row in rows)
    served = [row["ttft_p99_s"] for row in rows if row["ttft_p99_s"] is not None]
    mean["ttft_p99_s"] = fmean(served) if served else None
    mean["windows"] = sum(row.get("windows", 0) for row in rows)
    agreed = sum(row["windows"] * row["windows_agreed"] for row in rows if row.get("windows"))
    mean["windows_agreed"] = agreed / mean["windows"] if mean["windows"] else None
    mean["seeds"] = len(rows)
    mean["fleet"] = rows[0]["fleet"]
    mean["bins"] = rows[0]["bins"]
    mean["later"] = later([row["bins"] for row in rows])
    return mean
