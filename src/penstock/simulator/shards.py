"""A sweep in shards, as the pods of an Indexed Job run it: each runs its part, and whichever ends last has the result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.simulator.cells import Cell, CellJournal
from penstock.simulator.executors import open_executor, run_all
from penstock.simulator.output import write_result
from penstock.simulator.plan import RunPlan, result_of
from penstock.simulator.sweep import figures_of


@dataclass(frozen=True, slots=True)
class Shard:
    """One of ``count`` parts of a sweep; ``index`` counts from 0."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Read ``INDEX/COUNT``.

        Raises:
            ValueError: it is something else.
        """
        index, slash, count = text.partition("/")
        shard = cls(int(index), int(count))
        if not slash or not 0 <= shard.index < shard.count:
            raise ValueError(text)
        return shard

    @property
    def journal(self) -> str:
        """Name of the file of finished runs that only this shard writes."""
        return f"cells-{self.index}.jsonl"


def run_shard(
    plan: RunPlan,
    shard: Shard,
    directory: Path,
    *,
    processes: int | None = None,
    on_done: Callable[[int], None] | None = None,
) -> tuple[dict[str, Any] | None, int]:
    """Run a shard's runs except for those that the folder holds; write the sweep's result if no run is missing any more.

    Every shard syncs its last run before it counts, so that of two that end together one sees all.

    Args:
        plan: The sweep.
        shard: Which of its runs: every ``count``-th.
        directory: Folder of all shards' finished runs.
        processes: Of this shard; None: one per core.
        on_done: Is called with the number of this shard's finished runs.

    Returns:
        The result, as of a sweep in one process; None while other shards' runs are missing; and the runs that all have finished.

    Raises:
        PenstockError: a run failed, or the folder cannot be written to.
    """
    own = plan.runs[shard.index :: shard.count]
    with open_executor(processes=processes, cells=len(own)) as executor:
        run_all(figures_of, own, executor, journal=CellJournal(directory, shard.journal), on_done=on_done)
    figures = CellJournal(directory, shard.journal).figures
    found = [figures[key] for spec in plan.runs if (key := Cell(figures_of, spec).key) in figures]
    if len(found) < len(plan.runs):
        return None, len(found)
    result = result_of(plan, found)
    write_result(result, directory)
    return result, len(found)
