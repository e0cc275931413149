"""RESULTS.md of the planner's scoreboard: comparisons and what is left out."""

import importlib
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "bench" / "planner"


@pytest.fixture(scope="module")
def bench():
    """The bench's modules; it is a folder of scripts."""
    sys.path.insert(0, str(FOLDER))
    try:
        names = ("workloads", "cells", "board", "results", "reference", "choice", "conformance")
        return {name: importlib.import_module(name) for name in names}
    finally:
        sys.path.remove(str(FOLDER))


def row(case, policy, both, gpu_hours, *, seed=0, fleet=None):
    """One run's figures."""
    zeros = dict.fromkeys(("violation_s", "changes", "replicas_moved", "reversals", "lost"), 0)
    return {
        "case": case,
        "policy": policy,
        "seed": seed,
        "fleet": fleet,
        "in_time": {"ttft": both, "itl": 1.0, "both": both},
        "gpu_hours": gpu_hours,
        "mean_gpus": gpu_hours,
        "in_time_per_gpu_hour": 100.0,
        "ttft_p99_s": 1.0,
        **zeros,
    }


@pytest.fixture
def board(bench):
    """Two cases: one tuned, with a seed that is held out; one that is held out."""
    cases = [case for case in bench["workloads"].cases(None) if case.name in {"sine", "stairs"}]
    rows = [
        row("sine", "adaptive", 0.80, 1.0),
        row("sine", "adaptive", 0.90, 3.0, seed=2),
        row("sine", "hpa", 0.90, 1.0),
        row("sine", "oracle", 1.0, 1.6),
        row("sine", "oracle-one-step", 1.0, 2.0),
        row("sine", "static, as good", 0.9, 2.5, fleet=(3, 1)),
        row("stairs", "adaptive", 0.995, 1.0),
        row("stairs", "keda", 0.995, 0.5),
        row("stairs", "oracle", 1.0, 1.0),
        row("stairs", "oracle-one-step", 1.0, 1.0),
    ]
    return bench["board"].Board(cases, rows, ["adaptive", "hpa", "keda"], "adaptive")


@pytest.mark.parametrize(
    ("shares", "told"),
    [
        # In the mean no worse, one case 9 points worse: allowed.
        (((0.90, 0.99), (0.99, 0.80)), []),
        (
            ((0.80, 0.91), (0.99, 0.80)),
            ["sine: adaptive serves 11.0 points less in time than hpa, 10 are allowed"],
        ),
        (
            ((0.90, 0.92), (0.90, 0.91)),
            ["mean over 2 cases: adaptive serves 1.5 points less in time than hpa, 1 are"],
        ),
    ],
)
def test_the_quick_run_fails_where_the_default_serves_too_little(bench, board, shares, told):
    """By ten points on one case, or by one in the mean."""
    rows = [
        row(case.name, policy, share, 1.0)
        for case, of_case in zip(board.cases, shares, strict=True)
        for policy, share in zip(("adaptive", "hpa"), of_case, strict=True)
    ]
    found = bench["board"].shortfalls(
        bench["board"].Board(board.cases, rows, ["adaptive", "hpa"], "adaptive"), "hpa"
    )

    assert [sentence[: len(start)] for sentence, start in zip(found, told, strict=True)] == told


def test_every_quick_case_has_its_references(bench):
    """So that the quick run never searches; both oracles and fixed fleets."""
    found = bench["reference"].load()
    for case in bench["workloads"].cases(None):
        if case.is_quick:
            assert bench["reference"].is_complete(found.get(case.name)), case.name
            cells = bench["reference"].oracle_cells(case, 0, found[case.name])
            assert [cell.policy for cell in cells] == ["oracle", "oracle-one-step"]


def test_cases_have_a_budget_for_their_fleet_and_a_workload_that_exists(bench):
    """Every synthetic case can be prepared and built; names are unique."""
    cases = bench["workloads"].cases(None)
    assert len({case.name for case in cases}) == len(cases)
    assert any(case.is_tuned for case in cases)
    assert sum(case.is_quick for case in cases) >= 6
    for case in cases:
        scenario = bench["cells"].scenario_of(bench["cells"].Cell(case, "load", 0))
        assert scenario.planner.max_gpu_budget == case.budget
