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


@pytest.mark.parametrize(
    ("own", "baseline", "expected"),
    [
        ((0.99, 1.0), (0.95, 2.0), "as good, no dearer"),
        ((0.99, 1.0), (0.993, 1.0), "as good, no dearer"),
        ((0.99, 2.0), (0.95, 1.0), "better, dearer"),
        ((0.99, 2.0), (0.99, 1.0), "as good, dearer"),
        ((0.90, 1.0), (0.99, 2.0), "worse, cheaper"),
        ((0.90, 2.0), (0.99, 1.0), "worse, no cheaper"),
    ],
)
def test_a_verdict_weighs_attainment_and_cost(bench, own, baseline, expected):
    """Half a per cent of either is a tie."""
    own, baseline = (row("c", "p", *each) for each in (own, baseline))

    assert bench["board"].verdict(own, baseline) == expected


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


def test_the_document_says_where_the_default_loses(bench, board):
    """Who is in time more often and who is as good for less, by name; the goal against the oracle; every row."""
    found = bench["results"].document(board, ["| x |", "|---|"], ["cost.png"], "run")

    assert (
        "- **sine** (85.0% for 2.00): in time more often: hpa (90.0% for 1.00), static, as good (90.0% for"
        in found
    )
    assert "- **stairs** (99.5% for 1.00): as often for less: keda (99.5% for 0.50)." in found
    assert "| hpa | 0 | 0 | 0 | 0 | 1 | sine |" in found
    assert "met on 1 of 2 cases (stairs (99.5% at 1.00 x)); missed on sine (85.0% at 1.25 x)." in found
    assert "| sine | 85.0% 2.00 | 90.0% 1.00 | - |" in found
    assert "| sine | static, as good: 3+1 | 1 | 90.0% |" in found


def test_what_a_profile_changes_is_told_by_case(bench, board):
    """Mode sla beside the default, where both were run; nothing where it was not."""
    rows = [
        row("sine", "adaptive", 0.95, 2.0),
        row("sine", "sla", 0.95, 1.8),
        row("stairs", "adaptive", 0.99, 1.0),
        row("stairs", "sla", 0.97, 0.9),
    ]
    both = bench["board"].Board(board.cases, rows, ["adaptive", "sla"], "adaptive")
    found = bench["results"].document(both, [], [], "run")

    assert "## `sla`, with a true profile, beside `adaptive`" in found
    assert "- *as good, no dearer* on 1: sine (95.0% for 1.80 beside 95.0% for 2.00)." in found
    assert "- *worse, cheaper* on 1: stairs (97.0% for 0.90 beside 99.0% for 1.00)." in found
    assert "beside" not in bench["results"].document(board, [], [], "run")


def test_tuned_and_held_out_are_counted_apart(bench, board):
    """Seeds 0 and 1 of tuned cases; their other seeds; other cases. Regrets are against both oracles."""
    found = bench["results"].document(board, [], [], "run")

    assert "in time, tuned | in time, held-out seeds | in time, held-out cases" in found
    assert "| adaptive | 80.0% | 90.0% | 99.5% | 3.0 | 1.12 | 1.00 |" in found
    tuned, others = found.index("| tuned load cases |"), found.index("| held-out load cases |")
    assert tuned < found.index("| sine | 85.0% 2.00") < others < found.index("| stairs | 99.5% 1.00")


def test_a_document_without_losses_says_so(bench, board):
    """Rather than nothing."""
    only = bench["board"].Board(board.cases, [row("sine", "adaptive", 0.9, 1.0)], ["adaptive"], "adaptive")

    assert "Nowhere: on no case" in bench["results"].document(only, [], [], "run")


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


def test_options_choose_workloads_policies_and_seeds(bench):
    """By name; one that is unknown ends with what there is, and so does a seed count of nothing."""
    choice = bench["choice"]
    options = choice.options_of(["--workloads", "sine,stairs", "--policies", "hpa", "--seeds", "2"])

    assert [case.name for case in choice.chosen_cases(options)] == ["sine", "stairs"]
    assert choice.chosen_policies(options.policies) == ["hpa"]
    assert [choice.seeds_of(case, options) for case in choice.chosen_cases(options)] == [2, 2]
    assert options.is_part
    assert options.words == ["--workloads sine,stairs", "--policies hpa", "--seeds 2"]
    with pytest.raises(SystemExit, match="--policies nobody: choose from adaptive, load, sla, dynamo-load"):
        choice.chosen_policies("nobody")
    with pytest.raises(SystemExit):
        choice.options_of(["--seeds", "0"])


def test_conformance_of_several_policies_is_one_table(bench):
    """Each policy's outcomes, found apart, in its own column."""
    conformance = bench["conformance"]
    parts = [
        {"idle": {"hpa": True}, "sine": {"hpa": False}},
        {"idle": {"kpa": False}, "sine": {"kpa": False}},
    ]

    assert conformance.merged(parts) == {
        "idle": {"hpa": True, "kpa": False},
        "sine": {"hpa": False, "kpa": False},
    }


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


def test_fixed_fleets_to_compare_with_are_chosen_by_attainment_and_by_cost(bench):
    """The cheapest that is as good; the best that is no dearer; none where none is."""
    case = next(case for case in bench["workloads"].cases(None) if case.name == "sine")
    tried = [
        {"fleet": [2, 1], "in_time": 0.5, "mean_gpus": 3.0},
        {"fleet": [3, 2], "in_time": 0.95, "mean_gpus": 5.0},
        {"fleet": [4, 2], "in_time": 1.0, "mean_gpus": 6.0},
    ]

    def chosen(in_time, mean_gpus):
        baseline = {"in_time": in_time, "mean_gpus": mean_gpus}
        cells = bench["reference"].static_cells(case, 0, {"static": tried}, baseline)
        return {cell.policy: cell.fleet for cell in cells}

    assert chosen(0.94, 4.0) == {"static, as good": (3, 2), "static, as dear": (2, 1)}
    assert chosen(1.1, 2.0) == {}
