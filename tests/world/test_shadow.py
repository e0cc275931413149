"""A shadow planner next to a stand-in for an HPA, through Debian's Prometheus: real processes, at speed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from patience import LIMIT_S, eventually
from reserved_ports import reserved_port

from penstock.assess.shadow.comparison import load_history
from penstock.core.errors import ConfigError, LedgerError

ROOT = Path(__file__).parents[2]
PENSTOCK = (sys.executable, "-m", "penstock.cli")
SPEED = "20"
PROFILE = "h100-llama-3.3-70b-tp2"
LOAD = "day:rate=1,peak=3,duration_s=400,period_s=400,step_length_s=100,share=0.5,output_tokens=64"
CONFIG = """
global: {scrape_interval: 500ms}
scrape_configs:
  - job_name: laptop
    file_sd_configs: [{files: [targets.json], refresh_interval: 500ms}]
"""
pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="needs prometheus, as Debian's package has it"
)


@contextmanager
def running(folder, name, *argv):
    """Run a program until the end of the block; give its process."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "HOME": str(folder), "PATH": path}
    with (
        (folder / f"{name}.log").open("wb") as log,
        subprocess.Popen(argv, cwd=folder, env=env, stdout=log, stderr=log) as process,
    ):
        try:
            yield process
        finally:
            process.terminate()
            process.wait(LIMIT_S)


def asked(url, promql):
    """Return the values of an instant query; none while the server does not answer."""
    try:
        with urllib.request.urlopen(f"{url}/api/v1/query?query={promql}", timeout=5) as answer:
            return [float(each["value"][1]) for each in json.load(answer)["data"]["result"]]
    except OSError:
        return []


def readings(folder):
    """Return how many readings the ledger has so far; 0 before there are two."""
    try:
        return len(load_history(folder).run.pulls)
    except (ConfigError, LedgerError, OSError):
        return 0


def test_the_planner_watches_decides_and_is_compared(tmp_path):
    """It sees the load and the replicas that were there, changes nothing, and the report has both fleets."""
    fleet, page, server = reserved_port(), reserved_port(), reserved_port()
    url = f"http://127.0.0.1:{server}"
    (tmp_path / "prometheus.yml").write_text(CONFIG)
    with ExitStack() as stack:
        start = lambda *argv: stack.enter_context(running(tmp_path, *argv))  # noqa: E731
        start(
            "hpa", sys.executable, str(ROOT / "docs/examples/hpa_stand_in.py"), "--speed", SPEED, "--profile", PROFILE,
            "--port", str(fleet), "--metrics-port", str(page), "--cold-start", "20", "--target", "2", "--max", "3",
        )  # fmt: skip
        eventually((tmp_path / "targets.json").exists)
        start(
            "prometheus", "prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data",
            f"--web.listen-address=127.0.0.1:{server}", "--log.level=warn",
        )  # fmt: skip
        eventually(
            lambda: asked(url, "vllm:num_requests_running") and asked(url, "kube_deployment_status_replicas")
        )
        planner = start(
            "planner", *PENSTOCK, "planner", "run", "--no-operation", "--shadow", "default/vllm", "--prometheus-url", url,
            "--served-model-name", "llama", "--speed", SPEED, "--cold-start", "20s", "--ttft-slo", "2s",
            "--max-gpu-budget", "4", "--log-dir", "shadow",
        )  # fmt: skip
        eventually(lambda: readings(tmp_path / "shadow") > 1)
        load = subprocess.run(
            [*PENSTOCK, "load", "--trace", LOAD, "--url", f"http://127.0.0.1:{fleet}", "--model", "llama", "--speed", SPEED],
            cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
        sent = int(load.stdout.split(" requests in")[0].split()[-1].replace(",", ""))

        def counted():
            pulls = load_history(tmp_path / "shadow").run.pulls
            return sum(each.demand.arrivals for each in pulls if each.demand is not None)

        eventually(lambda: counted() > 0.8 * sent)
        planner.send_signal(signal.SIGTERM)
        assert planner.wait(LIMIT_S) == 0
        peak = asked(url, "max_over_time(kube_deployment_status_replicas[1h])")[0]
        report = subprocess.run(
            [*PENSTOCK, "report", "--ledger", "shadow", "--output", "report", "--profile", PROFILE, "--json"],
            cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
    assert report.returncode == 0, report.stderr
    found = json.loads(report.stdout)
    history = load_history(tmp_path / "shadow")
    assert counted() == pytest.approx(sent, rel=0.2)
    assert peak > 1
    assert found["watched"]["roles"]["aggregated"]["peak_replicas"] == peak
    assert found["watched"]["in_time"] is not None
    assert found["shadow"]["predicted_in_time"] is not None
    assert found["shadow"]["gpu_hours"] > 0
    records = [json.loads(line) for line in (tmp_path / "shadow/ledger.jsonl").read_text().splitlines()]
    assert {each["decision"]["no_operation"] for each in records if each["type"] == "decision"} == {True}
    assert not [each for each in records if each["type"] == "actuation"]
    # What was decided is what the shadow fleet then is.
    changes = [mark.roles[0].desired for mark in history.run.decisions if mark.is_change]
    assert set(changes[:-1]) <= set(found["shadow"]["roles"]["aggregated"]["replicas"])
    assert found["result"].split(";")[0] in (tmp_path / "report/report.html").read_text()
