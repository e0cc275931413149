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
        names = ("workloads", "cells", "results", "reference")
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


@pytest.mark.parametrize(
    ("own", "rival", "expected"),
    [
        ((0.99, 1.0), (0.95, 2.0), "as good, no dearer"),
        ((0.99, 1.0), (0.993, 1.0), "as good, no dearer"),
        ((0.99, 2.0), (0.95, 1.0), "better, dearer"),
        ((0.99, 2.0), (0.99, 1.0), "as good, dearer"),
        ((0.90, 1.0), (0.99, 2.0), "worse, cheaper"),
        ((0.90, 2.0), (0.99, 1.0), "worse, no cheaper"),
    ],
)
def test_a_verdict_weighs_attainment_and_cost(bench, own, rival, expected):
    """Half a per cent of either is a tie."""
    own, rival = (row("c", "p", *each) for each in (own, rival))

    assert bench["results"].verdict(own, rival) == expected


def test_the_document_says_where_the_default_loses(bench):
    """Means over the seeds, the goal against the oracle, every row; a policy without a run has a dash."""
    cases = [case for case in bench["workloads"].cases(None) if case.name in {"sine", "stairs"}]
    rows = [
        row("sine", "load", 0.80, 1.0),
        row("sine", "load", 0.90, 3.0, seed=1),
        row("sine", "hpa", 0.90, 1.0),
        row("sine", "oracle", 1.0, 1.9),
        row("sine", "static, as good", 0.9, 2.5, fleet=(3, 1)),
        row("stairs", "load", 0.995, 1.0),
        row("stairs", "oracle", 1.0, 1.0),
    ]
    board = bench["results"].Board(cases, rows, ["load", "hpa"], "load")

    found = bench["results"].document(board, ["| x |", "|---|"], ["cost.png"], "run")

    assert "| hpa | 0 | 0 | 0 | 0 | 1 | sine |" in found
    assert "met on 1 of 2 cases (stairs (99.5% at 1.00 x)); missed on sine (85.0% at 1.05 x)." in found
    assert "| sine *t* | 85.0% 2.00 | 90.0% 1.00 |" in found
    assert "| stairs | 99.5% 1.00 | - |" in found
    assert "| sine | static, as good: 3+1 | 1 | 90.0% |" in found
    assert "| load | 85.0% | 99.5% | 3.0 | 1.03 |" in found


def test_cases_have_a_budget_for_their_fleet_and_a_workload_that_exists(bench):
    """Every synthetic case can be prepared and built; names are unique."""
    cases = bench["workloads"].cases(None)
    assert len({case.name for case in cases}) == len(cases)
    assert any(case.is_tuned for case in cases)
    assert sum(case.is_quick for case in cases) >= 6
    for case in cases:
        scenario = bench["cells"].scenario_of(bench["cells"].Cell(case, "load", 0))
        assert scenario.planner.max_gpu_budget == case.budget


def test_fixed_fleets_to_compare_with_are_chosen_by_attainment_and_by_cost(bench):
    """The cheapest that is as good; the best that is no dearer; none where none is."""
    case = next(case for case in bench["workloads"].cases(None) if case.name == "sine")
    tried = [
        {"fleet": [2, 1], "in_time": 0.5, "mean_gpus": 3.0},
        {"fleet": [3, 2], "in_time": 0.95, "mean_gpus": 5.0},
        {"fleet": [4, 2], "in_time": 1.0, "mean_gpus": 6.0},
    ]

    def chosen(in_time, mean_gpus):
        rival = {"in_time": in_time, "mean_gpus": mean_gpus}
        cells = bench["reference"].static_cells(case, 0, {"static": tried}, rival)
        return {cell.policy: cell.fleet for cell in cells}

    assert chosen(0.94, 4.0) == {"static, as good": (3, 2), "static, as dear": (2, 1)}
    assert chosen(1.1, 2.0) == {}
