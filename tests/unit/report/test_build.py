"""A whole report from a synthetic run and ledger: every file, nothing external, every mark."""

import importlib
import importlib.util
import re
from dataclasses import replace
from importlib import resources
from io import StringIO
from pathlib import Path

import orjson
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from penstock.cli.report import report as report_command
from penstock.core.errors import ConfigError, LedgerError
from penstock.report.findings import analyse
from penstock.report.page import render_page, write_report
from penstock.report.text import latencies, report_text


def _printed(report):
    console = Console(width=400, file=StringIO())
    console.print(report_text(report))
    return console.file.getvalue()


@pytest.fixture(scope="module")
def written(write_run, write_ledger, tmp_path_factory):
    """What the command prints as JSON of a run with everything, and the folder that it was given."""
    folder = tmp_path_factory.mktemp("written")
    run, ledger = write_run(folder / "run", lag_s=0.4), write_ledger(folder / "ledger.jsonl")
    inputs = ["--run", str(run), "--ledger", str(ledger), "--output", str(folder / "out")]
    targets = ["--ttft-slo", "1s", "--itl-slo", "50ms"]
    ended = CliRunner().invoke(report_command, [*inputs, *targets, "--json"])
    assert ended.exit_code == 0, ended.output
    return orjson.loads(ended.stdout), folder


def test_every_file_is_written_and_the_page_stands_alone(written):
    """Six pictures and a page that holds them and refers to nothing outside itself."""
    files = [Path(each) for each in written[0]["files"]]
    page = files[-1].read_text()

    names = [
        "replicas.png",
        "signals.png",
        "demand.png",
        "ttft.png",
        "itl.png",
        "requests.png",
        "report.html",
    ]
    assert [path.name for path in files] == names
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in files[:-1])
    assert page.count("data:image/png;base64,") == 6
    assert re.findall(r"https?://|<script|<link|url\(|@import", page) == []
    assert all(source.startswith("data:") for source in re.findall(r'(?:src|href)="([^"]*)"', page))


def test_text_of_a_foreign_run_stays_text(make_run):
    """Markup and terminal sequences are shown as they are written, wherever the summary has text or a key."""
    sent = "<script>\x1b]0;title\x07\x9b2J\u202e"
    folder = make_run()
    summary = orjson.loads((folder / "summary.json").read_bytes())
    foreign = _with_texts(summary, sent) | {"errors": {sent: 1}, "schema": summary["schema"]}
    (folder / "summary.json").write_bytes(orjson.dumps(foreign))

    report = analyse(folder)

    assert "<script" not in render_page(report, [])
    assert [each for each in "\x1b\x07\x9b\u202e" if each in _printed(report)] == []
    assert r"\x1b]0;title\x07\x9b2J\u202e" in _printed(report)


@settings(deadline=None)
@given(data=st.data())
def test_a_summary_of_other_types_is_refused_by_key(data, foreign_run):
    """Whatever stands where `penstock load` writes something else: a page and a text, or a refusal, no traceback."""
    summary = orjson.loads(foreign_run[1])
    place = data.draw(st.sampled_from(sorted(_places(summary), key=str)))
    holder = summary
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = data.draw(
        st.sampled_from([None, [], {}, True, "x", -1, 1e308, [None], {"count": "<b>"}])
    )
    (foreign_run[0] / "summary.json").write_bytes(orjson.dumps(summary))
    try:
        report = analyse(foreign_run[0])
    except ConfigError as exc:
        assert "summary.json: " in str(exc)  # noqa: PT017 - a refusal is one of two right answers
    else:
        assert "<b>" not in render_page(report, [])
        assert _printed(report)


@pytest.fixture(scope="module")
def foreign_run(write_run, tmp_path_factory):
    """A run's folder, and its summary as written."""
    folder = write_run(tmp_path_factory.mktemp("foreign"))
    return folder, (folder / "summary.json").read_bytes()


def _with_texts(value, sent):
    """Return plain data with every string replaced, and one more key in each mapping that has some."""
    if value and isinstance(value, dict):
        return {key: _with_texts(each, sent) for key, each in value.items()} | {sent: sent}
    if isinstance(value, list):
        return [_with_texts(each, sent) for each in value]
    return sent if isinstance(value, str) else value


def _places(value, path=()):
    """Yield the path of every value below."""
    for key, each in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*path, key)
        if isinstance(each, dict | list):
            yield from _places(each, (*path, key))


def test_the_page_shows_decisions_marks_and_settings(written):
    """Each change with its reason, the lag mark, skipped rows, targets; names are escaped."""
    found, folder = written
    report = analyse(folder / "run", ledger=folder / "ledger.jsonl")
    page = Path(found["files"][-1]).read_text()

    for mark in report.planner.decisions:
        for role in mark.roles:
            assert role.sentence.replace(">", "&gt;").replace("<", "&lt;") in page
    assert found["violations"]["late_first_tokens"] > 4
    assert {part["action"] for mark in found["decisions"] for part in mark["roles"]} == {"up", "hold", "down"}
    assert 'class="mark bad">DISTORTED' in page
    assert "client sending 400.0 ms" in page
    assert "1 trace rows skipped, first: line 7: not JSON" in page
    assert "TTFT target 1 s: missed by" in page
    assert "&lt;synthetic&gt;" in page
    assert "<synthetic>" not in page
    assert "kv_up" in page


def test_a_run_without_a_planner_has_three_pictures(make_run, tmp_path):
    """A report of any OpenAI server's load run needs no ledger, nor the gaps between tokens."""
    run = make_run(with_gaps=False)
    printed = CliRunner().invoke(report_command, ["--run", str(run), "--output", str(tmp_path / "out")])

    assert printed.exit_code == 0, printed.output
    assert "report.html" in printed.output
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"ttft.png", "itl.png", "requests.png", "report.html"}
    assert "DISTORTED" not in (tmp_path / "out" / "report.html").read_text()


def test_missing_matplotlib_names_the_extra(make_run, tmp_path, monkeypatch):
    """The remedy is one command."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    report = analyse(make_run())
    with pytest.raises(ConfigError, match=r"pip install 'penstock\[plots\]'"):
        write_report(report, tmp_path / "out")
    # A demo's page does without.
    assert [path.name for path in write_report(report, tmp_path / "out", with_pictures=False)] == [
        "report.html"
    ]


def test_a_ledger_that_cannot_be_read_is_refused(make_run, tmp_path):
    """Missing, empty and damaged ledgers each say what is wrong."""
    run = make_run()
    empty, damaged = tmp_path / "empty.jsonl", tmp_path / "damaged.jsonl"
    empty.write_text("")
    damaged.write_text('{"type":"header","schema":1,"timeline":"x"}\n')

    with pytest.raises(LedgerError, match="cannot be read"):
        analyse(run, ledger=tmp_path / "none.jsonl")
    with pytest.raises(LedgerError, match="holds no planner run"):
        analyse(run, ledger=empty)
    with pytest.raises(LedgerError, match="lacks what its type promises"):
        analyse(run, ledger=damaged)


def _reported(run, ledger, out, *more):
    arguments = ["--run", str(run), "--ledger", str(ledger), "--output", str(out), "--json", *more]
    ended = CliRunner().invoke(report_command, arguments)
    assert ended.exit_code == 0, ended.output
    return orjson.loads(ended.stdout)


def _naming(ledger, graph_file):
    """Let a ledger's header name a graph, as a local planner's does."""
    first, *others = ledger.read_bytes().splitlines()
    header = {**orjson.loads(first), "graph_file": str(graph_file)}
    ledger.write_bytes(b"\n".join([orjson.dumps(header), *others]) + b"\n")
    return ledger


@pytest.mark.slow
def test_the_graph_that_the_ledger_names_is_simulated_on_other_fleets(make_run, ledger_file, tmp_path):
    """Nothing else has to be given; the effort can be bounded."""
    path = tmp_path / "graph.yaml"
    path.write_bytes(resources.files("penstock.cli").joinpath("data", "demo.yaml").read_bytes())

    found = _reported(
        make_run(), _naming(ledger_file, path), tmp_path / "out", "--counterfactual-fleets", "1"
    )

    assert [each["name"] for each in found["counterfactual"]["outcomes"]][:2] == ["load", "load"]
    assert found["violations"]["ttft_target_s"] == 10.0


@pytest.mark.parametrize("is_named", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_a_graph_that_is_not_known_or_gone_is_asked_for(make_run, ledger_file, tmp_path, is_named):
    """The report is made all the same, and names the option."""
    ledger = _naming(ledger_file, tmp_path / "gone.yaml") if is_named else ledger_file

    found = _reported(make_run(), ledger, tmp_path / "out")

    assert found["counterfactual"] is None
    said = "gone.yaml" if is_named else "does not name the graph"
    assert any(said in note and "--manifest" in note for note in found["notes"])


def test_gaps_that_timers_cannot_tell_apart_are_no_distortion(written):
    """A run in which every process kept up has no red mark, and no percentile of 0 ms; the mean is true."""
    found = analyse(written[1] / "run")
    summary = orjson.loads(orjson.dumps(found.load.summary))
    summary["lag"] |= {"is_distorted": False, "is_itl_distorted": False}
    summary["lag"] |= {"is_itl_unresolved": True, "resolution_s": 0.007}
    summary["latency"]["itl_s"] |= {"p50": 0.0, "p90": 0.009, "p99": None, "mean": 0.005, "max": 0.2}
    page = render_page(replace(found, load=replace(found.load, summary=summary)), [])
    assert latencies(summary).rows[1][1:6] == ("< 7.0 ms", "9.0 ms", "-", "5.0 ms", "200.0 ms")
    assert 'class="mark">ITL UNRESOLVED' in page
    assert "mark bad" not in page
