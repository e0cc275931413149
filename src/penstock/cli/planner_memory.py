"""`penstock planner memory`: show, export or reset what a planner has learnt."""

from __future__ import annotations

from pathlib import Path

import click

from penstock.cli import option
from penstock.cli.ledger_folder import LOG_DIR, NAMESPACE, ledger_folder
from penstock.core.errors import ConfigError, unwritable
from penstock.planner import learnt

_FOLDER: option.Option = click.option(
    "--log-dir", type=click.Path(path_type=Path), required=True, help="The planner's folder, or a ledger."
)


@click.group()
def memory() -> None:
    """What a planner has learnt: start-ups, throughput, floors. `planner run --memory FILE` starts from an export."""


@memory.command()
@LOG_DIR
@NAMESPACE
@option.as_json("What `export` writes.")
def show(log_dir: Path | None, namespace: str | None, *, as_json: bool) -> None:
    """Say what was learnt, by role."""
    known = learnt.learnt(ledger_folder(log_dir, namespace))
    click.echo(learnt.as_json(known) if as_json else learnt.in_words(known), nl=not as_json)


@memory.command()
@LOG_DIR
@NAMESPACE
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
def export(log_dir: Path | None, namespace: str | None, file: Path) -> None:
    """Write what was learnt to FILE, for the planner of another graph of the same model."""
    text = learnt.as_json(learnt.learnt(ledger_folder(log_dir, namespace)))
    try:
        file.write_bytes(text)
    except OSError as exc:
        raise ConfigError(unwritable(f"FILE {file}", exc)) from exc


@memory.command()
@_FOLDER
def reset(log_dir: Path) -> None:
    """Let the planner's next start begin with nothing learnt; its ledger keeps its history. Stop the planner first."""
    learnt.reset(log_dir)
    click.echo("forgotten; the next start learns anew")
