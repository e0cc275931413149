"""A sweep on a Dask cluster of two processes."""

import os
import signal
from dataclasses import replace

import pytest

from penstock.core.errors import ConfigError, PenstockError
from penstock.simulator.cells import Cell, CellJournal
from penstock.simulator.dask import run_same
from penstock.simulator.executors import open_executor
from penstock.simulator.output import to_json
from penstock.simulator.plan import SimulateOptions, make_plan, run_plan
from penstock.simulator.sweep import figures_of

distributed = pytest.importorskip("distributed")

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def plan():
    """Return six short runs of a trace."""
    return make_plan(SimulateOptions(policy="least-loaded", rate_rps=(2.0, 4.0), seeds=3, limit=60))


def test_a_killed_worker_costs_no_run(tmp_path):
    """One of two workers is killed half way: the same bytes as in this process, and six runs in the journal."""
    expected = to_json(run_plan(plan(), processes=1))
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0", host="127.0.0.1"
    ) as cluster:
        address = cluster.scheduler_address.replace("tcp://", "dask://")
        seen = []

        def kill(done):
            if done >= 3 and max(seen, default=0) < 3:
                os.kill(next(iter(cluster.workers.values())).pid, signal.SIGKILL)
            seen.append(done)

        result = run_plan(plan(), on=address, journal=CellJournal(tmp_path), on_done=kill)

    assert to_json(result) == expected
    assert seen[0] == 0
    assert seen[-1] == 6
    assert (tmp_path / "cells.jsonl").read_bytes().count(b"\n") == 6


def test_a_cluster_of_this_machine_ends_with_the_sweep():
    """`--on dask` needs no cluster, and leaves none."""
    expected = to_json(run_plan(plan(), processes=1))
    assert to_json(run_plan(plan(), on="dask", processes=2)) == expected


def test_a_worker_of_another_installation_is_refused():
    """Its figures could differ, and a journal would keep them."""
    spec = plan().runs[0]
    assert run_same(Cell(figures_of, spec), Cell(figures_of, spec).key) == figures_of(spec)
    other = run_same(Cell(figures_of, spec), Cell(figures_of, replace(spec, seed=7)).key)
    assert isinstance(other, PenstockError)
    assert "same installation" in str(other)


@pytest.mark.parametrize(
    ("on", "processes", "message"),
    [
        ("ray://h:1", None, "--on ray://h:1: give dask"),
        ("dask://127.0.0.1:1", 2, "--jobs 2: the workers of --on"),
    ],
)
def test_a_wrong_place_is_named(on, processes, message):
    """What cannot be is said before anything is sent."""
    with pytest.raises(ConfigError, match=message), open_executor(processes=processes, cells=1, on=on):
        pass
