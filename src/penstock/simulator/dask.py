"""Runs a sweep's cells on a Dask cluster: an existing one, or a local one of processes. Needs the extra ``dask``."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from distributed import Client, Future, LocalCluster, wait

from penstock.core.errors import ConfigError, PenstockError
from penstock.simulator.cells import Cell, CellOutcome

CONNECT_S: Final = 30.0
"""Timeout for a connection, in wall-clock seconds. Chosen: Dask's own default."""

IDLE_S: Final = 60.0
"""Wall-clock seconds for which a cluster may have no workers, for example while a killed one restarts. Chosen."""


def run_same(cell: Cell, key: str) -> CellOutcome:
    """Run a cell (one simulation run) in a Dask worker, and return its figures (results by name), or an error.

    ``key`` is the cell's key, a digest of its inputs and of the code, on the machine that sent it. Returns an error instead of figures if
    the key that the worker computes differs: the worker's code, plugins or profiles would then give other figures than the sender's.
    """
    try:
        own = cell.key
    except PenstockError as exc:
        return exc
    if own != key:
        return PenstockError(
            "--on: a worker has another Python, numpy, Penstock, plug-in or profile than this process, and would give"
            " other figures; start the workers from the same installation"
        )
    return cell.run()


class DaskCluster:
    """Runs cells (single runs of a sweep) as tasks of a Dask cluster, on other processes or machines.

    If a worker of the cluster is lost, Dask runs its tasks again on another worker.
    """

    def __init__(self, client: Client, address: str) -> None:
        """Use a connected client.

        Args:
            client: Client of the cluster.
            address: Value of ``--on``, for error messages.

        Raises:
            PenstockError: the cluster has had no workers for 60 seconds (`IDLE_S`).
        """
        self._client, self._address = client, address
        self._threads = self._count_threads()

    def _count_threads(self) -> int:
        try:
            self._client.wait_for_workers(1, timeout=IDLE_S)
            threads: dict[str, int] = self._client.nthreads()
        except (TimeoutError, OSError) as exc:
            raise PenstockError(
                f"--on {self._address}: no workers for {IDLE_S:g} s; start some (dask worker ADDRESS); the same"
                " --output-dir continues from the runs that are done"
            ) from exc
        return sum(threads.values())

    def max_in_flight(self) -> int:
        """Return the maximum number of cells (simulation runs) to have submitted: twice the number of worker threads, at least 2."""
        return 2 * max(1, self._threads)

    def submit(self, cell: Cell) -> Any:
        """Send a cell (one simulation run) together with its trace, and return its Dask future, a hashable handle to pass to `finished`."""
        return self._client.submit(run_same, cell.portable(), cell.key, pure=False)

    def finished(self, tasks: Collection[Any]) -> Mapping[Any, CellOutcome]:
        """Wait until at least one of the tasks has ended, and return the results of the ended tasks.

        Args:
            tasks: Dask futures that `submit` returned.

        Returns:
            By task: the figures of the run, or an error that prevented it.

        Raises:
            PenstockError: the cluster is gone or has had no workers for 60 wall-clock seconds (`IDLE_S`), or the workers that ran a cell
                died repeatedly.
        """
        while True:
            try:
                done = wait(list(tasks), timeout=IDLE_S, return_when="FIRST_COMPLETED").done
            except TimeoutError:
                done = set()
            self._threads = self._count_threads()
            if done:
                return {task: self._outcome(task) for task in done}

    def _outcome(self, task: Future) -> CellOutcome:
        if task.status == "finished":
            outcome: CellOutcome = task.result(timeout=CONNECT_S)
            return outcome
        reason = task.exception(timeout=CONNECT_S) if task.status == "error" else "the scheduler is gone"
        raise PenstockError(
            f"--on {self._address}: a run was lost: {reason}; the same --output-dir continues from the runs that are done"
        )


@contextmanager
def open_dask(address: str, *, processes: int | None) -> Iterator[DaskCluster]:
    """Connect to a Dask cluster, or start a local one; disconnect, or stop it, on exit.

    Args:
        address: ``dask://HOST:PORT`` of a scheduler, or ``dask`` for a local cluster of processes that is stopped on exit.
        processes: Number of processes of a local cluster; None starts one per core.

    Raises:
        ConfigError: ``processes`` was set for an existing cluster.
        PenstockError: the scheduler does not answer, or it has no workers.
    """
    logging.getLogger("distributed").setLevel(logging.ERROR)
    if address == "dask":
        local = LocalCluster(
            n_workers=processes, threads_per_worker=1, dashboard_address="127.0.0.1:0", host="127.0.0.1"
        )
        with local, Client(local) as client:
            yield DaskCluster(client, address)
        return
    if processes is not None:
        raise ConfigError(f"--jobs {processes}: the workers of --on {address} are its own; leave --jobs out")
    try:
        client = Client(f"tcp://{address.removeprefix('dask://')}", timeout=CONNECT_S)
    except (OSError, ValueError) as exc:
        raise PenstockError(f"--on {address}: {exc}; give the address of a Dask scheduler") from exc
    with client:
        yield DaskCluster(client, address)
