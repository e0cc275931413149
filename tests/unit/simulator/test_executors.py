"""A sweep that was killed goes on from its finished runs, and ends with the same result byte for byte."""

import re
from pathlib import Path

import pytest

from penstock.core.errors import ConfigError
from penstock.engine import profiles
from penstock.simulator.cells import CellJournal, cell_key
from penstock.simulator.output import to_json
from penstock.simulator.plan import SimulateOptions, make_plan, run_plan


def plan(**options):
    """Return six short runs."""
    given = {"policy": "least-loaded", "qps": (2.0, 4.0), "seeds": 3, "limit": 60, **options}
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
    """Nothing is guessed from a line that is no run."""
    (tmp_path / "cells.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match=r"cells\.jsonl:1: not a run"):
        CellJournal(tmp_path)


def test_a_changed_profile_takes_nothing_from_a_journal(tmp_path):
    """A file keeps its name while its figures change."""
    (profile,) = (file for file in Path(profiles.__path__[0]).glob("h200-llama-3.1-8b-tp1.yaml"))
    own = tmp_path / "own.yaml"
    own.write_text(profile.read_text())
    keys = [cell_key(spec) for spec in plan(profile=str(own)).runs]
    assert keys == [cell_key(spec) for spec in plan(profile=str(own)).runs]
    own.write_text(re.sub(r"bytes_per_token: \d+", "bytes_per_token: 1024", profile.read_text()))
    assert set(keys).isdisjoint(cell_key(spec) for spec in plan(profile=str(own)).runs)
