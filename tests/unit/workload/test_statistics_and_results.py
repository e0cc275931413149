"""Percentiles, rates, hit rate, lag marks, and files that are not results."""

import json
from array import array

import pytest

from penstock.core.errors import ConfigError
from penstock.workload.probe import ServerLag
from penstock.workload.record import RequestResult, RequestStatus
from penstock.workload.results import from_line, read_run, to_line
from penstock.workload.statistics import ScheduleLag, assess_lag, describe, summarise

WELL = ScheduleLag(0.001, 0.001, 0.1)


def _result(line=1, **changes):
    fields = {
        "id": f"r-{line}",
        "line": line,
        "arrival_s": float(line),
        "sent_s": float(line),
        "ended_s": float(line) + 2,
        "status": RequestStatus.OK,
        "http_status": 200,
        "error": None,
        "error_class": None,
        "trace_input_tokens": 100,
        "trace_output_tokens": 3,
        "prompt_tokens": 100,
        "output_tokens": 3,
        "cached_tokens": 50,
        "ttft_s": 1.0,
        "e2e_s": 2.0,
        "tpot_s": 0.5,
        "itl_s": array("f", [0.25, 0.75]),
    }
    return RequestResult(**{**fields, **changes})


def test_percentiles_are_nearest_rank():
    """Every percentile is a value that was measured."""
    figures = describe([float(n) for n in range(1, 101)])

    assert figures == {"count": 100, "mean": 50.5, "p50": 50.0, "p90": 90.0, "p99": 99.0, "max": 100.0}
    assert describe([7.0])["p99"] == 7.0
    assert describe([])["p50"] is None


def test_the_summary_counts_ok_requests_only():
    """A failed request's times and tokens are in no percentile and no rate."""
    bad = _result(
        2, status=RequestStatus.FAILED, error_class="broken", error="x", ttft_s=99.0, prompt_tokens=900
    )

    summary = summarise([_result(1), bad], duration_s=10.0, speed=1.0, schedule_lag=WELL)

    assert summary["requests"] == {"ok": 1, "failed": 1, "rejected": 0}
    assert summary["errors"] == {"broken": 1}
    assert summary["latency"]["ttft_s"]["max"] == 1.0
    assert summary["latency"]["itl_s"] == {
        "count": 2,
        "mean": 0.5,
        "p50": 0.25,
        "p90": 0.75,
        "p99": 0.75,
        "max": 0.75,
    }
    assert summary["tokens"] == {"prompt": 100, "output": 3, "cached": 50, "prefix_cache_hit_rate": 0.5}
    assert summary["throughput"] == {
        "duration_s": 10.0,
        "requests_per_s": 0.1,
        "prompt_tokens_per_s": 10.0,
        "output_tokens_per_s": 0.3,
    }


@pytest.mark.parametrize(
    ("send_s", "loop_s", "ttft_p50_s", "bound_s", "is_distorted"),
    [
        (0.01, 0.01, 0.2, 0.05, False),
        (0.051, 0.01, 0.2, 0.05, True),
        (0.01, 0.051, 0.2, 0.05, True),
        (0.3, 0.01, 10.0, 0.5, False),
        (0.6, 0.01, 10.0, 0.5, True),
        (None, None, None, 0.05, False),
    ],
)
def test_lateness_past_the_bound_is_marked(send_s, loop_s, ttft_p50_s, bound_s, is_distorted):
    """The bound is 50 ms or 5% of the median TTFT, whichever is larger."""
    lag = assess_lag(ScheduleLag(send_s, loop_s, None), ttft_p50_s=ttft_p50_s, itl_p99_s=None)

    assert lag["bound_s"] == bound_s
    assert lag["is_distorted"] is is_distorted


@pytest.mark.parametrize(
    ("loop_s", "itl_p99_s", "is_distorted"),
    [
        (0.03, 0.1, True),
        (0.02, 0.1, False),
        (0.0021, 0.001, True),
        (0.002, 0.001, False),
        (0.04, None, False),
    ],
)
def test_single_gaps_are_marked_at_a_lag_that_leaves_ttft_alone(loop_s, itl_p99_s, is_distorted):
    """The bound of gaps is 2 ms or a fifth of the p99 gap; late sending moves no gap."""
    lag = assess_lag(ScheduleLag(9.0, loop_s, None), ttft_p50_s=1000.0, itl_p99_s=itl_p99_s)

    assert lag["is_itl_distorted"] is is_distorted
    assert "client sending" not in lag["late_for_itl"]
    assert lag["is_distorted"] is False


@pytest.mark.parametrize("role", ["prefill", "decode", "aggregated", "router"])
def test_only_servers_that_a_token_passes_after_the_first_are_late_for_single_gaps(role):
    """A late prefill server distorts the run and no gap between tokens; any other server distorts both."""
    schedule_lag = ScheduleLag(0.0, 0.0, None, (ServerLag("a", role, 0.2), ServerLag("b", "decode", 0.001)))

    lag = assess_lag(schedule_lag, ttft_p50_s=1.0, itl_p99_s=0.1)

    assert lag["late"] == ["a"]
    assert lag["late_for_itl"] == ([] if role == "prefill" else ["a"])
    assert lag["is_itl_distorted"] is (role != "prefill")


@pytest.mark.parametrize(("speed", "is_unresolved"), [(1.0, False), (250.0, False), (251.0, True)])
def test_gaps_near_a_timer_tick_are_marked(speed, is_unresolved):
    """TPOT of 0.5 s is two ticks at speed 250; beyond it single gaps say little."""
    lag = summarise([_result()], duration_s=1.0, speed=speed, schedule_lag=WELL)["lag"]

    assert lag["is_itl_unresolved"] is is_unresolved
    assert lag["resolution_s"] == speed / 1000


def test_a_result_survives_its_line():
    """What is read back is what was written, to the microsecond."""
    result = _result(3, error="x", error_class="broken", status=RequestStatus.FAILED)

    assert from_line(to_line(result, with_gaps=True)) == result


def _whole():
    """Return a summary as `penstock load` writes it."""
    measured = summarise([_result()], duration_s=1.0, speed=1.0, schedule_lag=WELL)
    measured["requests"] |= {"planned": 1, "unfinished": 0, "not_sent": 0}
    settings = {"model": "m", "speed": 1.0, "concurrency": None, "max_input_tokens": None}
    trace = {"name": "t", "skipped_rows": [], "truncated_prompts": 0, "dropped_prompts": 0}
    started = {"unix_s": 1.0, "model_s": 1.0}
    own = {"schema": "penstock-load/1", "is_partial": False, "started": started}
    return json.dumps({**own, **measured, "settings": settings, "trace": trace})


@pytest.mark.parametrize(
    ("summary", "lines", "message"),
    [
        (None, None, r"summary\.json: cannot be read .*finished `penstock load`"),
        ("{", "", r"summary\.json: not JSON"),
        ('{"schema":"other"}', "", "schema 'other' is not 'penstock-load/1'"),
        ("[]", "", "schema None"),
        ('{"schema":"penstock-load/1"}', "", r"summary\.json: is_partial: Field required"),
        (_whole(), None, r"results\.jsonl: cannot be read"),
        (_whole(), '{"id":1}\n', r"results\.jsonl:1: not a result"),
        (
            _whole(),
            json.dumps(to_line(_result(), with_gaps=True) | {"ttft_s": "x"}),
            r"results\.jsonl:1: .*ttft_s",
        ),
        (_whole(), "nonsense\n", r"results\.jsonl:1: not a result"),
    ],
)
def test_files_that_are_no_run_are_refused(tmp_path, summary, lines, message):
    """The message names the file and, where there is one, the line."""
    if summary is not None:
        (tmp_path / "summary.json").write_text(summary)
    if lines is not None:
        (tmp_path / "results.jsonl").write_text(lines)

    with pytest.raises(ConfigError, match=message):
        read_run(tmp_path)
