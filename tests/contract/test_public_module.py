"""The public module `penstock`: its names, and the example of docs/simulate.md."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import penstock
from penstock.cli.notebook import SimulateKeywords
from penstock.core.errors import ConfigError
from penstock.simulator.plan import SimulateOptions

ROOT = Path(__file__).parents[2]
POISSON = "poisson:rate=4,count=40"


def test_the_names_are_those_that_are_promised() -> None:
    """Each of them is there and explained; no other is."""
    assert penstock.__all__ == ["Comparison", "compare", "load_graph", "load_trace", "simulate"]
    assert all(getattr(penstock, name).__doc__ for name in penstock.__all__)
    assert dir(penstock) == penstock.__all__
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
    assert names["table"]["ttft_s.p50"].nunique() == 2, "the example shows a difference"


def test_runs_and_summary_become_frames() -> None:
    """Nested figures are columns with dots; a run has its seed."""
    result = penstock.simulate(trace=POISSON, seeds=2)
    assert list(result.frame()["policy"]) == ["prefix-cost"], "the router's default"
    assert list(result.frame(runs=True)["seed"]) == [0, 1]
    assert result.frame()["ttft_s.p50"].iloc[0] == result.summary[0]["ttft_s"]["p50"]


def test_planners_are_compared_under_one_router() -> None:
    """The same names as `penstock simulate --planner`."""
    result = penstock.compare(trace=POISSON, planners=("load", "adaptive"))
    assert {(row["planner"], row["policy"]) for row in result.summary} == {
        ("load", "prefix-cost"),
        ("adaptive", "prefix-cost"),
    }
    alone = penstock.compare(trace=POISSON, planners=["load"]).summary
    assert [(row["label"], row["planner"]) for row in alone] == [("prefix-cost", "load")]


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
        ({"seeds": 0}, ConfigError, "^seeds: 0 must be at least 1"),
        ({"block_size": 100}, ConfigError, "^block_size"),
        ({"seed": 1}, TypeError, "seed"),
        ({"policy": "best"}, ConfigError, "^policy best: choose from"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], error: type[Exception], said: str) -> None:
    """As on the command line, by the names that they have in Python."""
    with pytest.raises(error, match=said):
        penstock.simulate(trace=POISSON, **options)


def test_the_keywords_are_the_options_of_the_command() -> None:
    """Each field of `SimulateOptions` is an argument or a keyword, and no other is."""
    named = {"trace", "policy", "rate_rps", "planners", "manifest"}
    assert set(SimulateKeywords.__annotations__) == {each.name for each in fields(SimulateOptions)} - named


def test_one_and_several_are_both_taken() -> None:
    """A number or a list, a name or a list."""
    one = penstock.compare(trace=POISSON, policies="round-robin", rate_rps=2, routers=1)
    several = penstock.compare(trace=POISSON, policies=["round-robin"], rate_rps=[2.0], routers=(1,))
    assert one == several
    assert [row["policy"] for row in one.summary] == ["round-robin"]
    both = penstock.compare(trace=POISSON, planners="load,adaptive", policies="prefix-cost")
    assert len(both.summary) == 2


ROWS = [
    {"arrival_s": 0.5, "input_tokens": 2000, "output_tokens": 20, "block_ids": [1, 2, 3, 4]},
    {"arrival_s": 0.0, "input_tokens": 700, "output_tokens": 30, "block_ids": [1, 9]},
]


def test_a_trace_may_be_a_table() -> None:
    """A DataFrame, rows, or what `load_trace` returned; in order of arrival, with or without ids."""
    found = penstock.simulate(trace=pd.DataFrame(ROWS))
    assert found == penstock.simulate(trace=ROWS)
    assert found.result["workload"]["requests"] == 2
    assert found.result["workload"]["name"].startswith("table (sha256 ")
    bare = pd.DataFrame(ROWS).drop(columns="block_ids")
    assert penstock.simulate(trace=bare).summary[0]["policy"] == "prefix-cost"
    mixed = pd.DataFrame(
        [{**ROWS[0], "block_ids": np.array([1, 2, 3, 4])}, {**ROWS[1], "block_ids": float("nan")}]
    )
    assert penstock.simulate(trace=mixed).result["workload"]["requests"] == 2
    trace = penstock.load_trace("mooncake")
    assert penstock.simulate(trace=trace, limit=20) == penstock.simulate(trace="mooncake", limit=20)


def test_a_trace_keeps_what_its_ids_stand_for(tmp_path: Path) -> None:
    """Read with 64 tokens an id it is simulated so, without saying it again; another number contradicts."""
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 100, "output_length": 5, "hash_ids": [1, 2]}\n')
    trace = penstock.load_trace(path, block_tokens=64)
    assert penstock.simulate(trace=trace).result["workload"]["requests"] == 1
    with pytest.raises(ConfigError, match=r"^block_tokens: 16, but the trace was read with 64"):
        penstock.simulate(trace=trace, block_tokens=16)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "^trace: the table has no row"),
        ([{"arrival_s": 0, "input_tokens": 5}], "^trace: row 0: output_tokens: Field required"),
        ([{**ROWS[0], "arrival_s": -1}], "^trace: row 0: arrival_s: -1: "),
        (
            [ROWS[1], {**ROWS[0], "block_ids": [1]}],
            "^trace: row 1: block_ids: 1 ids for 2000 tokens, must be 4",
        ),
        ("no-such-file", "^trace no-such-file: no such file"),
    ],
)
def test_a_table_that_is_no_trace_is_refused(rows: Any, said: str) -> None:
    """With the row, from 0, and the column."""
    with pytest.raises(ConfigError, match=said):
        penstock.simulate(trace=rows)
