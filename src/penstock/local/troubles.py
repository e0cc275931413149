"""What is wrong with a running graph beyond its processes: full disks, a planner that cannot act, slow workers. Pure.

`penstock status` and `penstock doctor --local` show the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.core.kv_transfers import REMEDY
from penstock.local.status import LocalGraphStatus


@dataclass(frozen=True, slots=True)
class Trouble:
    """One thing that is wrong, and what to do.

    Attributes:
        is_broken: Something does not work, and not only less well.
    """

    message: str
    remedy: str
    is_broken: bool = True


def troubles(status: LocalGraphStatus) -> Iterator[Trouble]:
    """Yield what is wrong, the worst first."""
    for disk in status.full_disks:
        yield Trouble(disk, "free some room; until then nothing new is decided, recorded or logged")
    planner = status.planner
    explain = (
        f"check planner.metrics and the disk; penstock planner explain --log-dir {status.planner_log_dir}"
    )
    if planner is not None and planner.silent_real_s is not None:
        message = (
            f"its planner last wrote {planner.silent_real_s:,.0f} s ago (real): it hangs or cannot write"
        )
        yield Trouble(message, f"tail {status.log_dir}/*planner*.log")
    elif planner is not None:
        yield from (Trouble(f"its planner: {each}", explain) for each in planner.problems)
    if status.kv_transfers is not None and (doubled := status.kv_transfers.problem()):
        yield Trouble(doubled, REMEDY)
    for process in status.processes:
        if process.slow is not None:
            message = f"{process.name} is slow: {process.slow}"
            yield Trouble(
                message, f"tail {status.log_dir}/{process.name}.log; nvidia-smi; top", is_broken=False
            )
