"""A shell completes names that exist, and decisions of a ledger."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from penstock.cli.main import cli
from penstock_planner.ledger import FILE_NAME


def completed(arguments: list[str], incomplete: str) -> list[tuple[str, str]]:
    """Return what bash would be offered, with the type of each item."""
    shell = ShellComplete(cli, {}, "penstock", "_PENSTOCK_COMPLETE")
    return [(each.value, each.type) for each in shell.get_completions(arguments, incomplete)]


@pytest.mark.parametrize(
    ("arguments", "incomplete", "expected"),
    [
        (["samples"], "disaggr", "disaggregated"),
        (["load", "--trace"], "moon", "mooncake"),
        (["simulate", "--policy"], "pref", "prefix-cost"),
        (["simulate", "--policy"], "dualmap,pref", "dualmap,prefix-cost"),
        (["simulate", "--planner"], "ada", "adaptive"),
        (["simulate", "--profile"], "a100-llama-8", "a100-llama-8b-bf16-tp1"),
        (["capacity", "--profile"], "a100-llama-8", "a100-llama-8b-bf16-tp1"),
        (["planner", "decide", "--profile"], "a100-llama-8", "a100-llama-8b-bf16-tp1"),
    ],
)
def test_names_are_completed(arguments: list[str], incomplete: str, expected: str) -> None:
    """Those that begin alike, and after a comma the last."""
    found = completed(arguments, incomplete)

    assert (expected, "plain") in found
    assert all(value.startswith(incomplete) for value, _ in found)


def test_a_trace_may_also_be_a_file() -> None:
    """So that the shell lists files as well."""
    assert ("./my", "file") in completed(["load", "--trace"], "./my")


def test_decisions_of_a_ledger_are_completed(tmp_path: Path) -> None:
    """The newest first; without a ledger there are none, and no error."""
    lines = [
        {"type": "decision", "at_s": 1.0, "decision": {"id": f"d00000{number}", "at_s": 1.0, "roles": []}}
        for number in (1, 2)
    ]
    (tmp_path / FILE_NAME).write_text("".join(f"{json.dumps(each)}\n" for each in lines), encoding="utf-8")

    given = ["planner", "explain", "--log-dir", str(tmp_path), "--id"]
    assert [value for value, _ in completed(given, "d")] == ["d000002", "d000001"]
    assert completed(["planner", "explain", "--log-dir", str(tmp_path / "none"), "--id"], "d") == []
