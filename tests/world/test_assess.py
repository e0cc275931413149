"""`penstock assess` against Debian's Prometheus, which holds a simulated fleet under a load that the test knows."""

from __future__ import annotations

import json
import shutil
import time

import pytest
from reserved_ports import reserved_port
from simulated_history import openmetrics, prometheus_of

from penstock.api import Role, SloConfig
from penstock.api.manifests import load_graph
from penstock.assess.manifest import GraphPlan
from penstock.cli.main import main
from penstock.simulator.plan import SimulateOptions, make_plan
from penstock.simulator.scenario import Resize
from penstock.simulator.sweep import simulate
from penstock.workload.traces import load_trace
from penstock_planner.learnt import LearnedStateExport

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        shutil.which("prometheus") is None or shutil.which("promtool") is None,
        reason="needs prometheus and promtool, as Debian's package prometheus has them",
    ),
]

LOAD = "day:rate=1,peak=5,duration_s=3600,period_s=3600,step_length_s=600,share=0.5,output_tokens=128"
PROFILE = "h100-llama-3.3-70b-tp2"
HOUR_S = 3600.0
SERVICE = {"policy": "round-robin", "max_waiting": 1_000_000, "max_wait_s": 86_400.0}
SLO_S = 2.0


def truth(graph=None, **options):
    """Return the recording and the figures of a fleet on the load itself."""
    given = {"trace": LOAD, "max_gpus": 16, "cold_start_s": 60.0, "ttft_slo_s": SLO_S, "profile": PROFILE}
    recording, _, figures = simulate(make_plan(SimulateOptions(**(given | options)), graph=graph).runs[0])
    return recording, figures


def own_graph():
    """Return the graph of Penstock's fleet with aggregated workers."""
    return GraphPlan(
        "llama", SloConfig(ttft="2s"), 1, is_disaggregated=False, replicas=3, max_gpus=16
    ).graph()


@pytest.fixture(scope="module")
def history(tmp_path_factory):
    """Give the URL of a Prometheus that has scraped a fleet for the hour until now, and that fleet's figures."""
    resizes = (Resize(900.0, Role.AGGREGATED, 4), Resize(2700.0, Role.AGGREGATED, 2))
    recording, figures = truth(aggregated=2, max_gpus=None, resizes=resizes, **SERVICE)
    start_s = time.time() // 60 * 60 - HOUR_S
    text = openmetrics(recording, start_s=start_s, length_s=HOUR_S)
    with prometheus_of(text, tmp_path_factory.mktemp("prometheus"), reserved_port()) as url:
        yield url, figures


def run(*arguments):
    """Run `penstock assess` in this process; return its exit status."""
    with pytest.raises(SystemExit) as ended:
        main(["assess", *arguments])
    return ended.value.code or 0


@pytest.mark.nightly  # simulates every fleet twice: minutes
def test_the_assessment_agrees_with_the_simulator_on_the_true_load(history, tmp_path, capsys):
    """Of the metrics alone it ranks the fleets as the true load does; GPU-hours are within 10%, shares within two points."""
    url, ran = history
    flags = ["--ttft-slo", "2s", "--cold-start", "1m", "--max-gpus", "16", "--seeds", "1"]
    folder, made = tmp_path / "out", tmp_path / "load.jsonl"
    code = run(
        "--prometheus", url, "--model", "llama", "--since", "60m", *flags, "--output-dir", str(folder),
        "--trace-out", str(made), "--json",
    )  # fmt: skip
    found = json.loads(capsys.readouterr().out)
    assert code == 0
    assert found["observed"]["requests"] == pytest.approx(ran["requests"], rel=0.02)
    assert found["observed"]["queries"] < 50
    assert found["reasons"] == []
    fleets = {each["kind"]: each for each in reversed(found["fleets"])}
    replicas = int(fleets["fixed"]["name"].split()[0])
    expected = {
        "ran": ran,
        "fixed": truth(aggregated=replicas, **SERVICE)[1],
        "penstock": truth(own_graph(), planners=("adaptive",))[1],
    }
    for kind, figures in expected.items():
        assert fleets[kind]["gpu_hours"]["mean"] == pytest.approx(figures["gpu_hours"], rel=0.1), kind
        assert fleets[kind]["in_time"]["mean"] == pytest.approx(figures["in_time"]["both"], abs=0.02), kind

    def ranked(hours):
        return sorted(expected, key=hours)

    assert ranked(lambda kind: fleets[kind]["gpu_hours"]["mean"]) == ranked(
        lambda kind: expected[kind]["gpu_hours"]
    )
    assert len(load_trace(made).requests) == found["simulated"]["requests"]
    page = (folder / "assessment.html").read_text()
    assert found["result"].split(":")[0] in page
    if found["is_recommended"]:
        assert load_graph(folder / "graph.yaml").spec.planner is not None
        assert LearnedStateExport.model_validate_json((folder / "memory.json").read_bytes()).model == "llama"


def test_a_model_that_is_not_there_is_refused_with_those_that_are(history, capsys):
    """The sentence names the flag, the model and what the server has."""
    url, _ = history
    assert run("--prometheus", url, "--model", "lama", "--since", "60m") == 2
    said = capsys.readouterr().err
    assert "--model lama: Prometheus has no series of it" in said
    assert "it has llama; did you mean llama?" in said
