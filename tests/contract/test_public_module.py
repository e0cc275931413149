"""The public module `penstock`: its names, and the example of docs/simulate.md."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import penstock
from penstock.core.errors import ConfigError

ROOT = Path(__file__).parents[2]
POISSON = "poisson:rate=4,count=40"


def test_the_names_are_those_that_are_promised() -> None:
    """Each of them is there and explained; no other is."""
    assert penstock.__all__ == ["Comparison", "compare", "load_graph", "load_trace", "simulate"]
    assert all(getattr(penstock, name).__doc__ for name in penstock.__all__)
    assert set(penstock.__all__) <= set(dir(penstock))
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        penstock.simulat  # noqa: B018


def test_importing_the_package_imports_nothing_else() -> None:
    """Workers and routers start without the simulator."""
    code = "import penstock, sys; sys.exit(any(name.startswith(('penstock.', 'penstock_')) for name in sys.modules))"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_example_of_the_docs_runs_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row per policy, with columns to sort by."""
    found = re.search(
        r"```python\n(import penstock.*?)```", (ROOT / "docs/simulate.md").read_text(), re.DOTALL
    )
    assert found is not None
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {}
    exec(found.group(1), names)
    assert set(names["table"]["policy"]) == {"prefix-cost", "round-robin"}


def test_runs_and_summary_become_frames() -> None:
    """Nested figures are columns with dots; a run has its seed."""
    result = penstock.simulate(trace=POISSON, seeds=2)
    assert list(result.frame()["policy"]) == ["least-loaded"]
    assert list(result.frame(runs=True)["seed"]) == [0, 1]
    assert result.frame()["ttft_s.p50"].iloc[0] == result.summary[0]["ttft_s"]["p50"]


def test_planners_are_compared_under_one_router() -> None:
    """The same names as `penstock simulate --planner`."""
    result = penstock.compare(trace=POISSON, planners=("load", "adaptive"))
    assert {row["policy"] for row in result.summary} == {"load", "adaptive"}


def test_without_pandas_the_rows_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal names them."""
    result = penstock.simulate(trace=POISSON)
    assert isinstance(result.frame(), pd.DataFrame)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match=r"read \.summary and \.runs"):
        result.frame()


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"seeds": 0}, ConfigError, "--seeds: 0 must be at least 1"),
        ({"seed": 1}, TypeError, "seed"),
        ({"policy": "best"}, ConfigError, "--policy best: choose from"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], error: type[Exception], said: str) -> None:
    """As on the command line."""
    with pytest.raises(error, match=said):
        penstock.simulate(trace=POISSON, **options)
