"""The guides of docs/ do what they say: their blocks are taken as written."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from penstock.core.clock import SimulatedClock
from penstock.core.plugins import registered
from penstock_planner.decide.demand.reading import Quality, assess
from penstock_planner.sources.base import Query, Readings
from penstock_planner.sources.frontend import FrontendMetrics, frontend_source

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "manifests" / "samples" / "disaggregated.yaml"


def blocks(page: str, language: str) -> list[str]:
    """Return a guide's code blocks of one language."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@pytest.mark.slow
def test_a_new_field_reaches_the_crd_and_validate(tmp_path: Path) -> None:
    """With its description and bounds; no other file is touched."""
    model = tmp_path / "penstock" / "api" / "router_workers.py"
    shutil.copytree(
        ROOT / "src" / "penstock", tmp_path / "penstock", ignore=shutil.ignore_patterns("__pycache__")
    )
    before, added = blocks("add-a-crd-field.md", "python")
    source = model.read_text(encoding="utf-8")
    assert source.count(before) == 1
    model.write_text(source.replace(before, before + added), encoding="utf-8")
    graph = yaml.safe_load(SAMPLE.read_text(encoding="utf-8"))
    graph["spec"].setdefault("router", {})["retries"] = {"pauseSeconds": 61}
    manifest = tmp_path / "graph.yaml"
    manifest.write_text(yaml.safe_dump(graph), encoding="utf-8")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", *arguments],
            check=False,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
        )

    (tmp_path / "docs").mkdir()
    assert "`make crds`" in (ROOT / "docs/add-a-crd-field.md").read_text("utf-8")
    dry = subprocess.run(["make", "-n", "crds"], cwd=ROOT, capture_output=True, text=True, check=True)
    for command in re.findall(r"python -m (penstock.+)", dry.stdout):
        module, _, output = command.partition(" > ")
        done = run(module)
        assert done.returncode == 0, done.stderr
        if output:
            (tmp_path / output).write_text(done.stdout, encoding="utf-8")
    assert "| `spec.router.retries.pauseSeconds` |" in (tmp_path / "docs/manifest.md").read_text("utf-8")
    crd = yaml.safe_load((tmp_path / "crds" / "penstock.dev_graphdeployments.yaml").read_text("utf-8"))
    spec = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    field = spec["properties"]["router"]["properties"]["retries"]["properties"]["pauseSeconds"]
    assert (field["minimum"], field["maximum"]) == (0, 60)
    assert field["description"] == "Pause before a retry, seconds."
    refused = run("penstock.cli", "validate", str(manifest))
    assert refused.returncode == 2
    assert re.search(r"spec\.router\.retries\.pauseSeconds.*61.*60", refused.stdout + refused.stderr)


@pytest.mark.parametrize(
    ("page", "quality", "value"),
    [("gateway_waiting 3\n", Quality.FRESH, 6.0), ("other 3\n", Quality.MISSING, None)],
)
async def test_a_metric_source_of_another_package_reads_its_frontends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: str, quality: Quality, value: float | None
) -> None:
    """The queue of both frontends; a page without it makes the queue missing, not zero."""
    (code,) = blocks("add-a-metric-source.md", "python")
    (project,) = blocks("add-a-metric-source.md", "toml")
    (tmp_path / "gateway_source.py").write_text(code, encoding="utf-8")
    info = tmp_path / "gateway_source-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gateway-source\nVersion: 1.0\n")
    (point,) = re.findall(r'^gateway = "(.*)"$', project, re.MULTILINE)
    (info / "entry_points.txt").write_text(f"[penstock.metric_sources]\ngateway = {point}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    registered.cache_clear()

    class Pages:
        async def fetch(self, url: str) -> str:
            return page

    class Workers:
        async def read(self, query: Query) -> Readings:
            return Readings({}, assess(1.0, age_s=0.0, max_age_s=query.max_age_s, source="scrape"))

    try:
        source = frontend_source(
            SimpleNamespace(spec=SimpleNamespace(traits=SimpleNamespace(metric_source="gateway"))),
            FrontendMetrics(Pages(), lambda: ("http://a", "http://b"), Workers(), SimulatedClock(1.0)),
        )
    finally:
        registered.cache_clear()
        sys.modules.pop("gateway_source", None)
    queue = (await source.read(Query((), max_age_s=5.0))).queue
    assert (queue.quality, queue.value) == (quality, value)
    assert queue.source == "gateway"
