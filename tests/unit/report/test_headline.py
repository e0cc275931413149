"""The first sentence of a report, the title of its load, and which pictures say that their figures are wrong."""

from dataclasses import replace

import orjson
import pytest
from click.testing import CliRunner

from penstock.cli.report import report as report_command
from penstock.report import charts
from penstock.report.analysis import GpuUse, violations
from penstock.report.counterfactual import Counterfactual, FleetKind, FleetOutcome
from penstock.report.findings import RunReport, analyse
from penstock.report.headline import headline, title
from penstock.report.page import render_page
from penstock.workload.results import LoadRun
from penstock.workload.synthetic import Process, SyntheticSpec, parse_synthetic

PLANNED = 1488
IN_TIME = "; {} in time (first token within 10 s)"
USE = GpuUse(0.0, 956.0, 2.38, 3.2, 1.0, 12, 12)


def _fleet(name, *, in_time, gpu_hours, kind=FleetKind.FIXED):
    return FleetOutcome(name, kind, kind is FleetKind.PLANNER, in_time, 0, 1.0, 2.0, 3.0, gpu_hours)


def _report(*, ok=PLANNED, is_partial=False, is_distorted=False, **fields):
    """A run of 1,488 requests over 956 s; what is not given is not known."""
    summary = {
        "is_partial": is_partial,
        "requests": {"ok": ok, "planned": PLANNED},
        "throughput": {"duration_s": 956.0},
        "lag": {"is_distorted": is_distorted},
        "settings": {"model": "llama"},
        "trace": {"name": "synthetic day rate=0.1 peak=30"},
    }
    found = violations((), ttft_target_s=None, itl_target_s=None)
    return RunReport(
        **{"planner": None, "use": None, "violations": found, **fields}, load=LoadRun(summary, ())
    )


def _compared(in_time, *, equal_hours):
    """The run alongside one fixed fleet, which serves as well where it has hours."""
    fixed = _fleet("4P+2D", in_time=1.0 if equal_hours else 0.5, gpu_hours=equal_hours or 3.0)
    served = _fleet("adaptive", in_time=in_time, gpu_hours=2.38, kind=FleetKind.PLANNER)
    return Counterfactual(10.0, (served, fixed), (fixed,), (), equal=fixed if equal_hours else None)


EQUAL = "the cheapest fixed fleet that serves as well (4P+2D)"


@pytest.mark.parametrize(
    ("given", "rest"),
    [
        ({}, ""),
        ({"counterfactual": _compared(0.9993, equal_hours=2.644)}, IN_TIME.format("99.9%")),
        (
            {"use": USE, "counterfactual": _compared(0.9993, equal_hours=2.644)},
            f"{IN_TIME.format('99.9%')}; 2.38 GPU-hours, 10% less than {EQUAL}",
        ),
        (
            {"use": USE, "counterfactual": _compared(0.99993, equal_hours=2.0)},
            f"{IN_TIME.format('99.9%')}; 2.38 GPU-hours, 19% more than {EQUAL}",
        ),
        (
            {"use": USE, "counterfactual": _compared(1.0, equal_hours=2.381)},
            f"{IN_TIME.format('100.0%')}; 2.38 GPU-hours, as many as {EQUAL}",
        ),
        (
            {"use": USE, "counterfactual": _compared(0.97, equal_hours=None)},
            f"{IN_TIME.format('97.0%')}; 2.38 GPU-hours; no fixed fleet that was tried serves as well",
        ),
        (
            {"use": USE, "counterfactual": replace(_compared(0.97, equal_hours=None), is_complete=False)},
            f"{IN_TIME.format('97.0%')}; 2.38 GPU-hours, 26% less than all 12 GPUs all the time",
        ),
        (
            {"use": USE, "counterfactual": _compared(0.5, equal_hours=2.5), "is_distorted": True},
            "; 50.0% in time (first token within 10 s, DISTORTED by lag); 2.38 GPU-hours, 26% less than all 12 GPUs all the time",
        ),
        ({"use": replace(USE, end_s=900.0)}, ""),
        ({"use": replace(USE, used_hours=0.0123, budget_gpus=None)}, "; 0.012 GPU-hours"),
    ],
)
def test_the_first_sentence_says_the_result(given, rest):
    """Served, in time and GPU-hours alongside the cheapest equal fleet; what is not known is left out, and 99.99% is not all."""
    assert headline(_report(**given)) == f"Served 1,488 of 1,488{rest}"


def test_a_run_that_was_stopped_says_so():
    """What had been served until then is not passed off as the end."""
    assert headline(_report(ok=700, is_partial=True)) == "Served 700 of 1,488 before it was stopped"


def test_the_reports_own_target_counts_without_a_comparison(result_of):
    """Of two requests one is above the target."""
    results = [result_of(ttft_s=1.0), result_of(ttft_s=9.0)]
    missed = violations(results, ttft_target_s=5.0, itl_target_s=None)

    assert "; 50.0% in time (first token within 5 s)" in headline(_report(violations=missed))


def test_the_load_is_named_in_words():
    """A run of an earlier version, which recorded no title, shows the load's name."""
    old = _report()
    assert title(old) == "synthetic day rate=0.1 peak=30: 1,488 requests to llama in 16 min"
    new = old.load.summary | {"trace": {"name": "x", "title": "Days and nights"}}
    new["throughput"] = {"duration_s": 59.6}
    named = title(replace(old, load=LoadRun(new, ())))
    assert named == "Days and nights: 1,488 requests to llama in 60 s"
    assert (
        parse_synthetic("day:period_s=2400,requests=mooncake").title
        == "Days and nights with the requests of mooncake"
    )
    assert len({SyntheticSpec(process, period_s=2400.0).title for process in Process}) == len(Process)


def test_page_text_and_json_begin_with_the_result(make_run, tmp_path):
    """One sentence, the same everywhere."""
    inputs = ["--run", str(make_run()), "--output", str(tmp_path / "out"), "--ttft-slo", "1s"]
    text = CliRunner().invoke(report_command, inputs).stdout
    found = orjson.loads(CliRunner().invoke(report_command, [*inputs, "--json"]).stdout)

    assert found["headline"].startswith("Served 396 of 400; ")
    assert " ".join(text.split()).startswith(found["headline"])
    assert next(iter(found)) == "headline"
    page = render_page(analyse(tmp_path / "run", ttft_target_s=1.0), [])
    assert page.index(f'<p class="result">{found["headline"]}</p>') < page.index("<h2>")


def _drawn(report, monkeypatch, folder):
    """Return the figures of a report's pictures by name; none is written."""
    drawn = {}

    def keep(pictures, directory):
        drawn.update({name: draw() for name, draw in pictures})
        return [directory / name for name in drawn]

    monkeypatch.setattr(charts, "save_all", keep)
    charts.draw_all(report, folder)
    return drawn


@pytest.mark.parametrize(
    ("marks", "red"),
    [
        ({}, set()),
        ({"is_distorted": True}, {"ttft.png"}),
        ({"is_itl_distorted": True}, {"itl.png"}),
    ],
)
def test_only_pictures_whose_figures_are_wrong_have_a_red_title(make_run, monkeypatch, tmp_path, marks, red):
    """Lag makes latencies wrong; what was sent and when, and what the planner did, stays true."""
    report = analyse(make_run())
    report.load.summary["lag"].update(marks)
    drawn = _drawn(report, monkeypatch, tmp_path)

    titles = {name: figure.texts[0] for name, figure in drawn.items()}
    assert {name for name, each in titles.items() if each.get_color() != "#000000"} == red
    assert {name for name, each in titles.items() if "DISTORTED" in each.get_text()} == red


def test_each_named_fleet_has_a_mark_of_its_own(make_run, monkeypatch, tmp_path):
    """Marker and colour each tell a fleet of the legend from every other, so that the two fixed ones differ, too."""
    compared = _compared(0.97, equal_hours=3.0)
    second = replace(compared.equal, name="2P+2D", gpu_hours=2.0)
    report = replace(
        analyse(make_run()), counterfactual=replace(compared, outcomes=(*compared.outcomes, second))
    )
    axes = _drawn(report, monkeypatch, tmp_path)["counterfactual.png"].axes[0]

    looks = {line.get_label(): (line.get_marker(), line.get_color()) for line in axes.get_lines()}
    named = {label: look for label, look in looks.items() if ", " in label}
    assert set(named) == {"adaptive, measured", "4P+2D, simulated", "2P+2D, simulated"}
    markers, colours = zip(*named.values(), strict=True)
    assert len(set(markers)) == len(set(colours)) == 3
