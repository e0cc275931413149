"""A sweep that was killed continues from its finished runs, and ends with the same result byte for byte."""

import importlib
import os
import re
import signal
import sys
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from multiprocessing import active_children
from pathlib import Path

import pytest

from penstock.core.errors import ConfigError, PenstockError
from penstock.engine import profiles
from penstock.simulator import cells
from penstock.simulator.cells import Cell, CellJournal, CellLost
from penstock.simulator.executors import MAX_POOL_BREAKS, InProcess, Processes, run_all
from penstock.simulator.output import to_json
from penstock.simulator.plan import SimulateOptions, make_plan, run_plan
from penstock.simulator.sweep import figures_of
from penstock.simulator.workload import WorkloadSpec


def plan(**options):
    """Return six short runs."""
    given = {"policy": "least-loaded", "rate_rps": (2.0, 4.0), "seeds": 3, "limit": 60, **options}
    return make_plan(SimulateOptions(**given))


def test_a_killed_sweep_goes_on_from_its_finished_runs(tmp_path):
    """Killed after two runs and within the third's line, it runs the other four, to the same bytes."""
    expected = to_json(run_plan(plan(), processes=1))

    def die(done):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_plan(plan(), processes=1, journal=CellJournal(tmp_path), on_done=die)
    with (tmp_path / "cells.jsonl").open("ab") as stream:
        stream.write(b'{"cell": "torn')
    seen = []
    result = run_plan(plan(), processes=1, journal=CellJournal(tmp_path), on_done=seen.append)

    assert to_json(result) == expected
    assert seen == [2, 3, 4, 5, 6]
    assert (tmp_path / "cells.jsonl").read_bytes().count(b"\n") == 6


def test_other_runs_are_not_taken_from_a_journal(tmp_path):
    """A folder serves several sweeps: other limits are other runs, more seeds only add to them."""
    run_plan(plan(seeds=1), processes=1, journal=CellJournal(tmp_path))
    seen = []
    more = run_plan(plan(seeds=2), processes=1, journal=CellJournal(tmp_path), on_done=seen.append)
    other = run_plan(plan(seeds=1, limit=50), processes=1, journal=CellJournal(tmp_path), on_done=seen.append)

    assert seen == [2, 3, 4, 0, 1, 2]
    assert to_json(more) == to_json(run_plan(plan(seeds=2), processes=1))
    assert to_json(other) == to_json(run_plan(plan(seeds=1, limit=50), processes=1))


def test_a_broken_journal_is_named(tmp_path):
    """Nothing is guessed from a line that is not a run."""
    (tmp_path / "cells.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match=r"cells\.jsonl:1: not a run"):
        CellJournal(tmp_path)


def test_a_changed_profile_takes_nothing_from_a_journal(tmp_path):
    """A file keeps its name while its figures change."""
    (profile,) = (file for file in Path(profiles.__path__[0]).glob("h200-llama-3.1-8b-tp1.yaml"))
    own = tmp_path / "own.yaml"
    own.write_text(profile.read_text())
    keys = [Cell(figures_of, spec).key for spec in plan(profile=str(own)).runs]
    assert keys == [Cell(figures_of, spec).key for spec in plan(profile=str(own)).runs]
    own.write_text(re.sub(r"bytes_per_token: \d+", "bytes_per_token: 1024", profile.read_text()))
    assert set(keys).isdisjoint(Cell(figures_of, spec).key for spec in plan(profile=str(own)).runs)


@pytest.mark.slow
def test_a_killed_process_is_survived(tmp_path):
    """Processes are started again, and what they ran is run again: the same bytes, and each run once in the journal."""
    expected = to_json(run_plan(plan(), processes=1))
    killed = []

    def kill(done):
        if done and not killed:
            killed.append(active_children()[0].pid)
            os.kill(killed[0], signal.SIGKILL)

    result = run_plan(plan(), processes=2, journal=CellJournal(tmp_path), on_done=kill)

    assert killed
    assert to_json(result) == expected
    assert (tmp_path / "cells.jsonl").read_bytes().count(b"\n") == 6


def die(_spec):
    """Be killed."""
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_cell_that_always_kills_its_process_ends_the_sweep():
    """It is not sent for ever, and the error says what to do."""
    pool = Processes(1)
    try:
        for _ in range(MAX_POOL_BREAKS):
            task = pool.submit(Cell(die, None))
            assert pool.finished([task]) == {task: CellLost.LOST}
        with pytest.raises(PenstockError, match=r"killed 3 times with no run finished.*fewer --jobs"):
            pool.submit(Cell(die, None))
    finally:
        pool.close()


@dataclass(frozen=True)
class Chosen:
    """What a bench makes a run of: workloads within its own dataclasses."""

    loads: tuple[WorkloadSpec, ...]
    weight: float = 1.0


def weigh(chosen):
    """Return figures of a bench's own."""
    return {"total": sum(load.limit for load in chosen.loads) * chosen.weight}


def other(chosen):
    """Return other figures of the same."""
    return {"total": 0.0, "of": len(chosen.loads)}


def test_work_of_any_kind_is_kept_in_one_journal(tmp_path):
    """By what it is, what it is asked for and what its traces hold, not by where these lie."""
    trace = tmp_path / "a.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 9, "output_length": 2}\n')
    specs = [Chosen((WorkloadSpec(str(trace), limit=number),)) for number in (1, 2)]
    seen = []

    def run(work):
        journal = CellJournal(tmp_path / "journal")
        return run_all(work, specs, InProcess(), journal=journal, on_done=seen.append)

    assert run(weigh) == run(weigh) == [{"total": 1.0}, {"total": 2.0}]
    assert seen == [0, 1, 2, 2]
    assert run(other)[0] == {"total": 0.0, "of": 1}
    cell = Cell(weigh, specs[0])
    (load,) = cell.portable().spec.loads
    assert (load.source.requests[0].input_tokens, cell.portable().key) == (9, cell.key)
    trace.write_text(trace.read_text() * 2)
    assert Cell(weigh, specs[0]).key not in CellJournal(tmp_path / "journal").figures


def test_a_folder_that_is_twice_on_the_path_changes_no_key(tmp_path, monkeypatch):
    """A plug-in without `__init__.py` is found once for each time; a spawned worker has its parent's path and its own."""
    (tmp_path / "spread_plugin").mkdir()
    (tmp_path / "spread_plugin" / "policy.py").write_text("")
    point = EntryPoint("spread", "spread_plugin.policy:Policy", "penstock.routing_policies")
    monkeypatch.setattr(cells, "registered", lambda _group: {"spread": point})
    digests = []
    for times in (1, 2):
        monkeypatch.setattr(sys, "path", [*[str(tmp_path)] * times, *sys.path])
        importlib.invalidate_caches()
        digests.append(cells.code_digest.__wrapped__())
    assert digests[0] == digests[1]
