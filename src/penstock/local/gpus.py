"""Exclusive GPU ids for replicas: pure arithmetic on the ids in use.

`replicas` calls it under the statefile's lock, so that two askers never get the same id.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Grant:
    """Ids that now belong to one replica, ascending; empty for a replica that needs none."""

    gpus: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GpuRefusal:
    """No ids could be given; ``reason`` says how many are in use, the bound and the remedy."""

    reason: str


def allocate(needed: int, in_use: Collection[int], *, gpus: int, budget: int) -> Grant | GpuRefusal:
    """Choose ``needed`` free ids, neighbours if there are such, else the lowest.

    Neighbours come first because GPUs with adjacent ids usually share the fastest link.
    Among runs of neighbours the shortest that fits is cut, so that long runs stay whole.

    Args:
        needed: GPUs of one replica, >= 0.
        in_use: Ids held by any process that still exists, draining ones included.
        gpus: GPUs of the host; ids are 0 to gpus - 1.
        budget: Most ids in use at once, >= 0.

    Returns:
        A grant of exactly ``needed`` ids, or the refusal with its reason.
    """
    if needed <= 0:
        return Grant(())
    ceiling = min(budget, gpus)
    used = len(set(in_use))
    if used + needed > ceiling:
        bound = f"maxGpuBudget {budget}" if budget <= gpus else f"the host's {gpus} GPUs (--gpus)"
        return GpuRefusal(
            f"needs {needed} GPU{'s' if needed > 1 else ''}, but {used} of {bound} are held by existing workers, "
            "draining ones included; wait for a drain to end, or raise the bound"
        )
    free = sorted(set(range(gpus)) - set(in_use))
    if len(free) < needed:
        return GpuRefusal(f"needs {needed} GPUs, but only {len(free)} of the host's {gpus} are free (--gpus)")
    fitting = [run for run in _runs(free) if len(run) >= needed]
    chosen = min(fitting, key=lambda run: (len(run), run[0])) if fitting else free
    return Grant(tuple(chosen[:needed]))


def _runs(ids: list[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for gpu in ids:
        if runs and runs[-1][-1] == gpu - 1:
            runs[-1].append(gpu)
        else:
            runs.append([gpu])
    return runs
