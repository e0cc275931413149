"""Fixtures of several files: the runtime of the guide as an installed distribution, and a graph of simulated workers."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from penstock.core.plugins import registered
from penstock.runtimes import runtime_of

ROOT = Path(__file__).parents[2]


@pytest.fixture
def acme(tmp_path, monkeypatch):
    """The runtime of the guide is installed, as its blocks are written."""
    text = (ROOT / "docs" / "runtimes.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    (point,) = re.findall(r'^acme = "(.*)"$', text, re.MULTILINE)
    (tmp_path / "acme_runtime.py").write_text(code, encoding="utf-8")
    info = tmp_path / "acme_runtime-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-runtime\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[penstock.runtimes]\nacme = {point}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    registered.cache_clear()
    runtime_of.cache_clear()
    yield
    registered.cache_clear()
    runtime_of.cache_clear()
    sys.modules.pop("acme_runtime", None)


@pytest.fixture(params=["aggregated", "disaggregated"])
async def url(request):
    """The URL of a router in front of simulated workers."""
    from simulated_graph import simulated_graph

    roles = ["aggregated"] if request.param == "aggregated" else ["prefill", "decode"]
    async with simulated_graph(*roles) as router:
        yield f"http://127.0.0.1:{router.port}"
