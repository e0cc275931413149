"""Executors that run a sweep's cells: in this process, in processes of this machine, or on a Dask cluster."""

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
MAX_POOL_BREAKS: Final = 3
"""Number of times that a process is killed, without a finished run in between, at which the sweep fails. Chosen."""


class Executor(Protocol):
    """Runs a sweep's cells (single runs) concurrently.

    `submit` returns a task (a handle) for each cell; `finished` waits for tasks and returns their results: the figures, an error, or
    `CellLost` if the cell's process or machine died.
    """

    def max_in_flight(self) -> int:
        """Return the maximum number of cells (simulation runs) to have submitted at a time, running and queued together."""

    def submit(self, cell: Cell) -> Any:
        """Send a cell (one simulation run of a sweep) to be run, and return its task, a hashable handle to pass to `finished`."""

    def finished(self, tasks: Collection[Any]) -> Mapping[Any, CellOutcome]:
        """Wait until at least one of the tasks has ended, and return the results of the ended tasks.

        Args:
            tasks: Handles that `submit` returned.

        Returns:
            By task: the figures of the run, or an error, or ``CellLost`` if its process or machine died.
        """


class InProcess:
    """Runs each cell (single run of a sweep) in the calling process, during `submit`, so that one cell runs at a time."""

    def max_in_flight(self) -> int:
        """Return 1, the maximum number of cells (simulation runs) to have submitted at a time."""
        return 1

    def submit(self, cell: Cell) -> Any:
        """Run a cell (one simulation run of a sweep) to its end, and return its task, a hashable handle to pass to `finished`."""
        done: futures.Future[CellOutcome] = futures.Future()
        done.set_result(cell.run())
        return done

    def finished(self, tasks: Collection[Any]) -> Mapping[Any, CellOutcome]:
        """Return the results of all tasks at once, since a task has ended when `submit` returns it.

        Args:
            tasks: Handles that `submit` returned.

        Returns:
            By task: the figures of the run, or an error.
        """
        return {task: task.result() for task in tasks}


class Processes:
    """Runs cells (single runs of a sweep) in worker processes of this machine.

    If one of the processes is killed, all are started again; their cells count as lost, so that the caller repeats them.
    """

    def __init__(self, count: int) -> None:
        """Start a pool of ``count`` processes."""
        self._count = count
        self._pool = self._start()
        self._breaks = 0

    def _start(self) -> futures.ProcessPoolExecutor:
        return futures.ProcessPoolExecutor(self._count, mp_context=get_context("spawn"))

    def close(self) -> None:
        """Wait for the running cells (simulation runs), drop the queued ones, and stop the worker processes."""
        self._pool.shutdown(cancel_futures=True)

    def max_in_flight(self) -> int:
        """Return the maximum number of cells (simulation runs) to have submitted: twice the number of processes."""
        return 2 * self._count

    def submit(self, cell: Cell) -> Any:
        """Send a cell (one simulation run) to the worker processes, and return its future, a hashable handle to pass to `finished`.

        If one of the processes was killed before, new processes are started first.

        Raises:
            PenstockError: processes were killed three times (`MAX_POOL_BREAKS`) without a finished run in between.
        """
        try:
            return self._pool.submit(cell.run)
        except BrokenProcessPool as exc:
            self._breaks += 1
            if self._breaks >= MAX_POOL_BREAKS:
                raise PenstockError(
                    f"--jobs {self._count}: a process was killed {self._breaks} times with no run finished in between,"
                    " maybe for its memory; the same --output-dir continues from the runs that are done; give fewer --jobs"
                ) from exc
        self.close()
        self._pool = self._start()
        return self._pool.submit(cell.run)

    def finished(self, tasks: Collection[Any]) -> Mapping[Any, CellOutcome]:
        """Wait until at least one of the tasks has ended, and return the results of the ended tasks.

        If a process is killed, every cell (simulation run) that is running or queued ends with ``CellLost``.

        Args:
            tasks: Futures that `submit` returned.

        Returns:
            By task: the figures of the run, or an error, or ``CellLost``.
        """
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
    """Run every spec (all inputs of one simulation run), and return the figures (results by name), in the order of the specs.

    Specs whose figures are in the journal are not run again. New figures are added to the journal. A run whose process or machine died is
    repeated.

    Args:
        work: Function that computes the figures of a spec; it must be defined at the top level of a module, such as `sweep.figures_of`.
        specs: Dataclasses that each hold all inputs of a run.
        executor: Executor that runs them.
        journal: Journal of finished runs; with None, a killed sweep starts from the beginning.
        on_done: Callback that receives the number of finished runs.

    Raises:
        PenstockError: a run failed, or the executor's processes or cluster are gone.
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
        while left and len(running) < executor.max_in_flight():
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
    """Open an executor, which runs cells (the single runs of a sweep) concurrently, and close it on exit.

    Args:
        processes: Number of processes on this machine; None starts one per core.
        cells: Number of cells to run; no more processes than that are started.
        on: ``dask`` for a local Dask cluster or ``dask://HOST:PORT`` for an existing one; None uses processes of this machine.

    Raises:
        ConfigError: ``on`` has another value, or the extra ``dask`` is not installed.
        PenstockError: the Dask scheduler does not answer.
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
