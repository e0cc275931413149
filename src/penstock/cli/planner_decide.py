"""`penstock planner decide`: one decision from a file that people write, or from a ledger's record."""

from __future__ import annotations

import sys
from importlib import resources
from pathlib import Path

import click

from penstock.api import PlannerMode
from penstock.cli import option
from penstock.core.errors import ConfigError
from penstock.engine.profiles.performance import planning_profile
from penstock.planner import decision_input
from penstock.planner import explain as explaining
from penstock.planner.decide.codec import to_plain
from penstock.planner.decide.pipeline import decide as decide_once

EXAMPLES = ("load", "sla")
"""Modes that have an example, a file below ``penstock/planner/examples``."""


@click.command()
@click.argument("file", type=click.Path(path_type=Path, allow_dash=True), required=False)
@click.option("--example", is_flag=True, help="Print an example FILE and stop.")
@click.option(
    "--mode",
    type=click.Choice(EXAMPLES),
    help="Mode of the example.  [default: load]",
)
@click.option(
    "--profile",
    help="What mode sla plans by, in place of FILE's own: file or folder that `penstock profile` wrote, or a latency "
    "profile by name.",
)
@option.as_json("Decision and next state as JSON.")
def decide(file: Path | None, example: bool, mode: str | None, profile: str | None, as_json: bool) -> None:
    """Decide once from FILE (YAML or JSON; - is stdin): observations, state and configuration.

    A decision as `penstock planner explain --json` prints it is such a FILE too.
    """
    if example:
        file_name = f"{mode or PlannerMode.LOAD.value}.yaml"
        click.echo(
            resources.files("penstock.planner").joinpath("examples", file_name).read_text("utf-8"), nl=False
        )
        return
    if mode is not None:
        raise ConfigError("--mode: says which --example to print; FILE's own mode is its key config.mode")
    if file is None:
        raise ConfigError("FILE: missing; name one, - for stdin, or print one with --example")
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"{file}: cannot be read: {exc.strerror}; print an example with --example") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{file}: not UTF-8 at byte {exc.start}; save it as UTF-8") from exc
    inputs = decision_input.parse(
        text, name=str(file), read=lambda named: planning_profile(None, named), profile=profile
    )
    decision, state = decide_once(*inputs)
    if as_json:
        answer = {"decision": to_plain(decision), "state": to_plain(state)}
        option.echo_json(answer)
        return
    record = {"decision": to_plain(decision), "kind": "adjustment", "at_s": decision.at_s, "origin_s": 0.0}
    click.echo(explaining.in_words(record))
