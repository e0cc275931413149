"""How mode sla kept its targets, and what demand came: prediction against truth, attainment, factors; values by hand."""

from io import StringIO
from pathlib import Path

import orjson
import pytest
from click.testing import CliRunner
from rich.console import Console

from penstock.api import Role
from penstock.cli.report import report as report_command
from penstock.performance.profile import DecodeTable, PerformanceProfile, PrefillTable
from penstock.report.analysis import demand_summary, prediction_summary, targets_summary
from penstock.report.findings import analyse
from penstock.report.ledger_view import DecisionMark, PlannerRun, RoleChange
from penstock.report.planner_charts import planner_pictures
from penstock.report.series import demand_bins, within_targets
from penstock.report.text import report_text
from penstock.workload.record import RequestStatus
from penstock_planner.decide.config import DecideConfig, Mode
from penstock_planner.decide.demand.observation import NO_WORKERS, Demand, Pull
from penstock_planner.decision_steps import DemandForecast, ProfileReading
from penstock_planner.served_shares import ServedShares

CONFIG = DecideConfig(mode=Mode.SLA, ttft_slo_s=2.0, itl_slo_s=0.05, attainment=0.9)
ENGINE = PerformanceProfile(
    PrefillTable((100.0, 10_000.0), (0.1, 10.0)),
    DecodeTable((100.0, 9000.0), (0.1, 1.0), ((0.02, 0.02),) * 2, ((500.0, 5000.0),) * 2, 100_000.0),
    model="synthetic-engine",
)


def _pull(at_s, demand):
    return Pull(float(at_s), {}, NO_WORKERS, None, demand)


def _steady(**changes):
    return Demand(**{"period_s": 1.0, "arrivals": 2.0, "uncached_tokens": 1000.0, **changes})


def _decision(at_s, tokens_per_s, needed=1, had=1, *, factor=1.0, is_outside=False):
    profile = ProfileReading({"prefill": factor, "ttft": 1.0, "itl": 1.0}, is_outside, needed, had, None)
    forecast = DemandForecast(10.0, tokens_per_s, had, 2000.0)
    part = RoleChange(Role.PREFILL, had, had, "hold", "r", "s", None, "not asked", forecast, profile)
    return DecisionMark("d", float(at_s), (part,), gpus_after=had)


def _run_of(pulls, decisions=(), config=CONFIG):
    return PlannerRun(config, tuple(pulls), tuple(decisions), end_s=100.0)


STEADY = [_pull(second, _steady()) for second in range(101)]


def test_replicas_and_factors_are_summed_up():
    """One decision of three had too few; one lay outside the profile."""
    decisions = (
        _decision(30, 1100.0, 2, 1),
        _decision(50, 600.0, 2, 2, factor=2.0),
        _decision(95, 9000.0, 1, 2, factor=1.5, is_outside=True),
    )

    same = "1.00 (1.00 to 1.00, at the end 1.00)"
    assert targets_summary(_run_of(STEADY, decisions), start_s=0, end_s=100).lines() == [
        "the targets are to hold for 90.0% of the requests",
        f"observed over profile, median: prefill 1.50 (1.00 to 2.00, at the end 1.50); TTFT {same}; ITL {same}",
        "prefill needed 1.7 replicas by the profile and had 1.7, fewer than needed at 33.3% of 3 decisions",
        "outside the profile at 33.3% of the decisions: its edge held",
    ]


def _compared(at_s, late, predicted_late):
    shares = ServedShares(1.0 - late / 100, 1.0 - predicted_late / 100, 100.0, late, 100.0, predicted_late)
    part = RoleChange(Role.PREFILL, 1, 1, "hold", "r", "s", None, "not asked", shares=shares)
    return DecisionMark("d", float(at_s), (part,), gpus_after=1)


def test_the_share_served_is_shown_beside_the_one_predicted():
    """Of three windows of ten minutes two agree within a point; the newest shares are named; a picture draws them."""
    decisions = (_compared(30, 4.0, 4.0), _compared(700, 2.0, 3.0), _compared(1300, 9.0, 1.0))
    run = _run_of(STEADY, decisions, DecideConfig())
    summary = prediction_summary(run, start_s=0, end_s=2000)
    assert summary.lines() == [
        (
            "requests on time over the last half hour (rejected count as late): observed 91.0%, the planner's model 99.0%;"
            " within 1 point of each other in 2 of 3 ten-minute windows"
        )
    ]
    assert prediction_summary(run, start_s=1900, end_s=2000) is None
    assert "in_time" in [each.name for each in planner_pictures(run)]
    assert "in_time" not in [each.name for each in planner_pictures(_run_of(STEADY))]


def test_a_request_keeps_its_targets_one_by_one(result_of):
    """A lost one keeps neither; an answer of one token has no gap to miss; on the bound is within."""
    results = [
        result_of(arrival_s=1.0, tpot_s=0.04),
        result_of(arrival_s=2.0, ttft_s=2.0),
        result_of(arrival_s=3.0, ttft_s=2.1),
        result_of(arrival_s=4.0, tpot_s=0.06),
        result_of(arrival_s=5.0, status=RequestStatus.REJECTED, ttft_s=None),
    ]
    in_time, is_fast = within_targets(results, ttft_s=2.0, itl_s=0.05)
    assert (in_time.tolist(), is_fast.tolist()) == ([1, 1, 0, 1, 0], [1, 1, 1, 0, 0])


@pytest.fixture(name="written", scope="module")
def _written(write_run, write_ledger, tmp_path_factory):
    folder = tmp_path_factory.mktemp("targets")
    config = DecideConfig(mode=Mode.SLA, max_gpu_budget=4, ttft_slo_s=2.0, itl_slo_s=0.05, performance=ENGINE)
    run, ledger = write_run(folder / "run"), write_ledger(folder / "ledger.jsonl", config)
    arguments = ["--run", str(run), "--ledger", str(ledger), "--output", str(folder / "out"), "--json"]
    ended = CliRunner().invoke(report_command, arguments)
    assert ended.exit_code == 0, ended.output
    return orjson.loads(ended.stdout), folder


@pytest.mark.slow
def test_a_report_of_mode_sla_shows_them_in_page_text_and_json(written):
    """The targets are the ledger's where none are given; the page names the profile and does not print its tables."""
    found, folder = written
    page = Path(found["files"][-1]).read_text()
    console = Console(width=400, file=StringIO())
    console.print(report_text(analyse(folder / "run", ledger=folder / "ledger.jsonl")))

    assert "targets.png" in [Path(each).name for each in found["files"]]
    assert (found["violations"]["ttft_target_s"], found["violations"]["itl_target_s"]) == (2.0, 0.05)
    assert 0 < found["violations"]["late_first_tokens"] < found["violations"]["requests"]
    assert found["targets"]["replicas"]["prefill"]["decisions"] > 10
    for line in (
        "prediction of tokens/s: off by",
        "observed over profile, median: prefill",
        "TTFT target 2 s: missed by",
    ):
        assert line in page
        assert line in console.file.getvalue()
    assert "<td>of synthetic-engine</td>" in page
    assert "prompt_tokens&#x27;: (" not in page


def test_a_run_sums_what_came_and_what_was_turned_away():
    """Over the span only; the longest wait that any pull saw; a pull without demand is not one without requests."""
    pulls = [_pull(-5, _steady()), _pull(1, _steady(refused=1.0)), _pull(2, None)]
    pulls += [_pull(3, _steady(timed_out=2.0, oldest_wait_s=7.5)), _pull(4, _steady(oldest_wait_s=1.0))]

    assert demand_summary(_run_of(pulls), start_s=0, end_s=10).lines() == [
        "demand: 6 requests came, 3 were rejected, the oldest wait was 7.5 s; 1 pulls knew nothing of it"
    ]


def test_the_picture_shows_means_of_bins_and_the_longest_wait():
    """Single prompts of each second hide what matters; where no pull knew anything there is a gap."""
    pulls = [_pull(second, _steady(refused=1.0, prefilled_tokens=500.0)) for second in (1, 2, 3, 4)]
    pulls += [_pull(5, None), _pull(9, _steady(arrivals=0.0, oldest_wait_s=7.5))]

    edges, found = demand_bins(pulls, 2.0)

    assert edges.tolist() == [0, 2, 4, 6, 8, 10]
    gap = pytest.approx(float("nan"), nan_ok=True)
    assert found["arrivals"].tolist() == [2, 2, gap, gap, 0]
    assert found["rejected"].tolist() == [1, 1, gap, gap, 0]
    assert found["computed"].tolist() == [500, 500, gap, gap, 0]
    assert found["oldest_wait_s"].tolist() == [0, 0, gap, gap, 7.5]


@pytest.mark.parametrize(
    ("forecasts", "error"),
    [
        ({30: 1000.0}, "0% (median of 1,"),
        ({30: 1100.0, 50: 600.0, 95: 9000.0}, "25% (median of 2,"),
    ],
)
def test_forecasts_are_held_against_what_came_at_their_time(forecasts, error):
    """1,000 tokens/s all the time: off by 10% and 40%; the last forecast is for after the end."""
    decisions = [_decision(at_s, tokens) for at_s, tokens in forecasts.items()]

    found = demand_summary(_run_of(STEADY, decisions), start_s=0, end_s=100)

    assert found.lines()[1] == f"prediction of tokens/s: off by {error} against 30 s means)"
