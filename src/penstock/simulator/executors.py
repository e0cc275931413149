"""Where a sweep's cells run: in this process, or on this machine's cores."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import islice
from multiprocessing import get_context
from typing import Any, Protocol

from penstock.core.errors import PenstockError
from penstock.simulator.cells import Cell, CellJournal, Figures, cell_key
from penstock.simulator.sweep import RunSpec, figures_of

Outcome = Figures | PenstockError


class Executor(Protocol):
    """Runs cells side by side; a task is what it returns for each."""

    def most(self) -> int:
        """Return how many cells to send at a time."""

    def submit(self, cell: Cell) -> Any:
        """Send a cell, and return its task, which can be hashed."""

    def finished(self, tasks: Collection[Any]) -> Mapping[Any, Outcome]:
        """Wait until at least one of the tasks has ended, and return those that have."""


class InProcess:
    """Runs each cell as it is sent."""

    def most(self) -> int:
        """Return one."""
        return 1

    def submit(self, cell: Cell) -> Any:
        """Return a task that has ended."""
        done: futures.Future[Outcome] = futures.Future()
        done.set_result(cell.run())
        return done

    def finished(self, tasks: Collection[Any]) -> Mapping[Any, Outcome]:
        """Return all of them."""
        return {task: task.result() for task in tasks}


class Processes:
    """Runs cells in processes of this machine."""

    def __init__(self, pool: futures.ProcessPoolExecutor, count: int) -> None:
        """Take a pool of ``count`` processes."""
        self._pool, self._count = pool, count

    def most(self) -> int:
        """Return one for each process, and one that waits for it."""
        return 2 * self._count

    def submit(self, cell: Cell) -> Any:
        """Send a cell to the pool."""
        return self._pool.submit(cell.run)

    def finished(self, tasks: Collection[Any]) -> Mapping[Any, Outcome]:
        """Wait for one.

        Raises:
            PenstockError: a process was killed.
        """
        done, _ = futures.wait(tasks, return_when=futures.FIRST_COMPLETED)
        try:
            return {task: task.result() for task in done}
        except BrokenProcessPool as exc:
            raise PenstockError(
                "--jobs: a process was killed, maybe for its memory; the same --output-dir goes on from the runs that"
                " are done; give fewer --jobs"
            ) from exc


def run_all(
    specs: Sequence[RunSpec],
    executor: Executor,
    *,
    journal: CellJournal | None = None,
    on_done: Callable[[int], None] | None = None,
) -> list[Figures]:
    """Return the figures of every run in their order; those in the journal are not run again, others are kept in it.

    Raises:
        PenstockError: a run failed, or where it ran is gone.
    """
    keys = ["" if journal is None else cell_key(spec) for spec in specs]
    found = (
        {place: journal.figures[key] for place, key in enumerate(keys) if key in journal.figures}
        if journal
        else {}
    )
    left = iter([place for place in range(len(specs)) if place not in found])
    running = dict[Any, int]()
    while True:
        for place in islice(left, max(0, executor.most() - len(running))):
            running[executor.submit(Cell(figures_of, specs[place]))] = place
        if on_done is not None:
            on_done(len(found))
        if not running:
            return [found[place] for place in range(len(specs))]
        for task, outcome in executor.finished(running).items():
            place = running.pop(task)
            if isinstance(outcome, PenstockError):
                raise outcome
            found[place] = outcome if journal is None else journal.keep(keys[place], outcome)


@contextmanager
def open_executor(*, processes: int | None, cells: int) -> Iterator[Executor]:
    """Open where cells run, and close it.

    Args:
        processes: Of this machine; None: one per core.
        cells: How many there are; more processes than that are not started.
    """
    count = min(processes or os.cpu_count() or 1, max(1, cells))
    if count == 1:
        yield InProcess()
        return
    with futures.ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool:
        yield Processes(pool, count)
