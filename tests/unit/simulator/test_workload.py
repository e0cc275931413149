"""The requests of a run: what is kept between the runs of one process, and what is read again."""

import os
from pathlib import Path

import pytest

from penstock.simulator.cells import with_trace
from penstock.simulator.workload import WorkloadSpec, prepare

ROW = '{"timestamp": %d, "input_length": 900, "output_length": 20, "hash_ids": [1, 2]}\n'


@pytest.fixture(name="write")
def written_to_a_file(tmp_path, monkeypatch):
    """Return what writes a trace of this many requests under one name."""
    monkeypatch.chdir(tmp_path)

    def write(count):
        Path("trace.jsonl").write_text("".join(ROW % (300 * number) for number in range(count)))
        os.utime("trace.jsonl", ns=(count, count))

    return write


@pytest.mark.parametrize("source", ["trace.jsonl", "poisson:rate=2,count=5,requests=trace.jsonl"])
def test_a_file_that_has_changed_is_read_again(write, source):
    """As in a notebook, whose process lives on while its traces are written again."""
    spec = WorkloadSpec(source)
    write(5)
    first, named = prepare(spec, seed=0), with_trace(WorkloadSpec("trace.jsonl")).source
    assert prepare(spec, seed=0) is first
    write(7)
    assert prepare(spec, seed=0) is not first
    assert len(with_trace(WorkloadSpec("trace.jsonl")).source.requests) == len(named.requests) + 2


def test_a_load_of_no_file_is_kept_whatever_happens_in_its_folder(write):
    """As when a sweep writes its results there."""
    spec = WorkloadSpec("poisson:rate=2,count=5")
    first = prepare(spec, seed=0)
    write(5)
    assert prepare(spec, seed=0) is first


def test_the_folder_that_a_name_is_relative_to_counts(write, tmp_path, monkeypatch):
    """Two folders with a file of one name."""
    write(5)
    (tmp_path / "other").mkdir()
    assert len(prepare(WorkloadSpec("trace.jsonl"), seed=0).requests) == 5
    monkeypatch.chdir(tmp_path / "other")
    write(6)
    assert len(prepare(WorkloadSpec("trace.jsonl"), seed=0).requests) == 6
