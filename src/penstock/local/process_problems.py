"""What is wrong with a running graph beyond its processes: full disks, a planner that cannot act, slow workers. Pure.

`penstock status` and `penstock doctor --local` show the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.core.findings import planner_faults, slow_worker
from penstock.core.kv_transfers import REMEDY
from penstock.local.status import LocalGraphStatus


@dataclass(frozen=True, slots=True)
class ProcessProblem:
    """One thing that is wrong, and what to do.

    Attributes:
        is_broken: Something does not work, and not only less well.
    """

    message: str
    remedy: str
    is_broken: bool = True


def process_problems(status: LocalGraphStatus) -> Iterator[ProcessProblem]:
    """Yield what is wrong, the worst first."""
    planner = status.planner
    silent_s = None if planner is None else planner.silent_real_s
    if status.full_disks:
        remedy = "free some room"
    elif silent_s is not None:
        remedy = f"tail {status.log_dir}/*planner*.log"
    else:
        remedy = f"check planner.metrics; penstock planner explain --log-dir {status.planner_log_dir}"
    for fault in planner_faults(status.full_disks, silent_s, () if planner is None else planner.problems):
        yield ProcessProblem(fault, remedy)
    if status.kv_transfers is not None and (doubled := status.kv_transfers.problem()):
        yield ProcessProblem(doubled, REMEDY)
    for process in status.processes:
        if process.slow is not None:
            remedy = f"tail {status.log_dir}/{process.name}.log; nvidia-smi; top"
            yield ProcessProblem(slow_worker(process.name, process.slow), remedy, is_broken=False)
