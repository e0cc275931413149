"""Where a sweep's cells run: in this process, on this machine's cores, or on a Dask cluster."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from multiprocessing import get_context
from typing import Any, Final, Protocol, TypeVar

from penstock.core.errors import ConfigError, PenstockError
from penstock.simulator.cells import Cell, CellJournal, CellLost, CellOutcome, Figures

SpecT = TypeVar("SpecT")
MOST_BREAKS: Final = 3
"""Chosen: processes killed this often with no run finished in between are killed again."""


class Executor(Protocol):
    """Runs cells side by side; a task is what it returns for each."""

    def most(self) -> int:
        """Return how many cells to send at a time."""

    def submit(self, cell: Cell) -> Any:
        """Send a cell, and return its task, which can be hashed."""

    def finished(self, tasks: Collection[Any]) -> Mapping[Any, CellOutcome]:
        """Wait until at least one of the tasks has ended, and return those that have."""


class InProcess:
    """Runs each cell as it is sent."""

    def most(self) -> int:
        """Return one."""
        return 1

    def submit(self, cell: Cell) -> Any:
        """Return a task that has ended."""
        done: futures.Future[CellOutcome] = futures.Future()
        done.set_result(cell.run())
        return done

    def finished(self, tasks: Collection[Any]) -> Mapping[Any, CellOutcome]:
        """Return all of them."""
        return {task: task.result() for task in tasks}


class Processes:
    """Runs cells in processes of this machine, and starts them again where one is killed."""

    def __init__(self, count: int) -> None:
        """Start a pool of ``count`` processes."""
        self._count = count
        self._pool = self._start()
        self._breaks = 0

    def _start(self) -> futures.ProcessPoolExecutor:
        return futures.ProcessPoolExecutor(self._count, mp_context=get_context("spawn"))

    def close(self) -> None:
        """Wait for what runs, and end the processes; cells that wait are not run."""
        self._pool.shutdown(cancel_futures=True)

    def most(self) -> int:
        """Return one for each process, and one that waits for it."""
        return 2 * self._count

    def submit(self, cell: Cell) -> Any:
        """Send a cell to the pool, or to a new one where a process of it was killed.

        Raises:
            PenstockError: processes are killed repeatedly.
        """
        try:
            return self._pool.submit(cell.run)
        except BrokenProcessPool as exc:
            self._breaks += 1
            if self._breaks >= MOST_BREAKS:
                raise PenstockError(
                    f"--jobs {self._count}: a process was killed {self._breaks} times with no run finished in between,"
                    " maybe for its memory; the same --output-dir continues from the runs that are done; give fewer --jobs"
                ) from exc
        self.close()
        self._pool = self._start()
        return self._pool.submit(cell.run)

    def finished(self, tasks: Collection[Any]) -> Mapping[Any, CellOutcome]:
        """Wait for one; a killed process loses all that were in the pool."""
        done, _ = futures.wait(tasks, return_when=futures.FIRST_COMPLETED)
        return {task: self._outcome(task) for task in done}

    def _outcome(self, task: futures.Future[CellOutcome]) -> CellOutcome:
        try:
            outcome = task.result()
        except BrokenProcessPool:
            return CellLost.LOST
        self._breaks = 0
        return outcome


def run_all(
    work: Callable[[SpecT], Figures],
    specs: Sequence[SpecT],
    executor: Executor,
    *,
    journal: CellJournal | None = None,
    on_done: Callable[[int], None] | None = None,
) -> list[Figures]:
    """Return ``work`` of every spec in their order; what is in the journal is not run again, other figures are kept in it.

    A cell that was lost with where it ran is sent again.

    Args:
        work: A module's function, such as `sweep.figures_of`.
        specs: Each a dataclass that says all of a run.
        executor: Where they run.
        journal: None: a killed sweep begins again.
        on_done: Is called with the number of finished runs.

    Raises:
        PenstockError: a run failed, or where it ran is gone.
    """
    cells = [Cell(work, spec) for spec in specs]
    keys = ["" if journal is None else cell.key for cell in cells]
    found = (
        {place: journal.figures[key] for place, key in enumerate(keys) if key in journal.figures}
        if journal
        else {}
    )
    left = deque(place for place in range(len(specs)) if place not in found)
    running = dict[Any, int]()
    while True:
        while left and len(running) < executor.most():
            place = left.popleft()
            running[executor.submit(cells[place])] = place
        if on_done is not None:
            on_done(len(found))
        if not running:
            return [found[place] for place in range(len(specs))]
        for task, outcome in executor.finished(running).items():
            place = running.pop(task)
            if isinstance(outcome, PenstockError):
                raise outcome
            if isinstance(outcome, CellLost):
                left.append(place)
                continue
            found[place] = outcome if journal is None else journal.keep(keys[place], outcome)


def _open_cluster(on: str, *, processes: int | None) -> AbstractContextManager[Executor]:
    if on != "dask" and not on.startswith("dask://"):
        raise ConfigError(f"--on {on}: give dask, or dask://HOST:PORT of a Dask scheduler")
    if find_spec("distributed") is None:
        raise ConfigError(f"--on {on}: Dask is not installed: pip install 'penstock[dask]'")
    from penstock.simulator.dask import open_dask  # noqa: PLC0415 - an extra

    return open_dask(on, processes=processes)


@contextmanager
def open_executor(*, processes: int | None, cells: int, on: str | None = None) -> Iterator[Executor]:
    """Open where cells run, and close it.

    Args:
        processes: Of this machine; None: one per core.
        cells: How many there are; more processes than that are not started.
        on: ``dask`` or ``dask://HOST:PORT``; None: processes of this machine.

    Raises:
        ConfigError: ``on`` is something else, or its extra is not installed.
        PenstockError: nothing answers there.
    """
    if on is not None:
        with _open_cluster(on, processes=processes) as cluster:
            yield cluster
        return
    count = min(processes or os.cpu_count() or 1, max(1, cells))
    if count == 1:
        yield InProcess()
        return
    pool = Processes(count)
    try:
        yield pool
    finally:
        pool.close()
