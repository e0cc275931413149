"""`penstock planner`: run it, decide once, explain and replay its decisions, show what it learnt."""

from __future__ import annotations

import time
from importlib import resources
from pathlib import Path
from typing import Any

import click
import orjson

from penstock.api import PlannerMode
from penstock.api.manifests import read_text
from penstock.cli import option
from penstock.cli.completion import DECISION, PROFILE
from penstock.cli.planner_folder import LOG_DIR, NAMESPACE, ledger_folder
from penstock.cli.planner_memory import memory
from penstock.cli.planner_run import run
from penstock.cli.progress import counting
from penstock.cli.say import say, say_json
from penstock.core.errors import ConfigError, LedgerFileError
from penstock.engine.profiles.performance import planning_profile
from penstock_planner import decision_input, learnt
from penstock_planner import explain as explaining
from penstock_planner import replay as replaying
from penstock_planner.core.ledger_history import LearnedStateInfo
from penstock_planner.core.records import MALFORMED
from penstock_planner.decide.codec import to_plain
from penstock_planner.decide.pipeline import decide as decide_once
from penstock_planner.ledger import read_ledger

EXAMPLES = ("load", "sla")
"""Modes that have an example, a file below ``penstock_planner/examples``."""


@click.group()
def planner() -> None:
    """Scale prefill and decode workers inside a GPU budget; explain and replay every decision."""


planner.add_command(run)
planner.add_command(memory)


@planner.command()
@click.argument("file", type=click.Path(path_type=Path, allow_dash=True), required=False)
@click.option("--example", is_flag=True, help="Print an example FILE and stop.")
@click.option("--mode", type=option.Choice(EXAMPLES), help="Planner mode of the example.  [default: load]")
@click.option(
    "--profile",
    shell_complete=PROFILE,
    help="Performance profile for mode sla, instead of the one in FILE: file or folder that `penstock "
    "profile` wrote, or the name of a latency profile.",
)
@option.as_json("Decision and next state as JSON.")
def decide(file: Path | None, example: bool, mode: str | None, profile: str | None, as_json: bool) -> None:
    """Decide once from FILE (YAML or JSON; - is stdin): observations, state and configuration.

    A decision that `penstock planner explain --json` prints can be used as FILE too.
    """
    if example:
        file_name = f"{mode or PlannerMode.LOAD.value}.yaml"
        folder = resources.files("penstock_planner").joinpath("examples")
        say(folder.joinpath(file_name).read_text("utf-8"), nl=False)
        return
    if mode is not None:
        raise ConfigError(
            "--mode: only selects which --example to print; set the key config.mode in FILE instead"
        )
    if file is None:
        raise ConfigError("FILE: missing; name one, - for stdin, or print one with --example")
    inputs = decision_input.parse(
        read_text(file), name=str(file), read=lambda named: planning_profile(None, named), profile=profile
    )
    decision, state = decide_once(*inputs)
    if as_json:
        say_json({"decision": to_plain(decision), "state": to_plain(state)})
        return
    record = {"decision": to_plain(decision), "kind": "adjustment", "at_s": decision.at_s, "origin_s": 0.0}
    say(explaining.in_words(record))


@planner.command()
@LOG_DIR
@NAMESPACE
@click.option(
    "--last",
    type=click.IntRange(min=1),
    help="How many to explain, the newest ones (default: 1; with --since or --until: all).",
)
@click.option(
    "--since",
    metavar="TIME",
    help="Explain decisions from then on, wall clock: 02:00 or 2026-01-05T02:00, in planner.timeZone.",
)
@click.option("--until", metavar="TIME", help="Explain decisions up to then.")
@click.option("--all", "with_unchanged", is_flag=True, help="Include decisions that changed nothing.")
@click.option(
    "--changes",
    "only_changes",
    is_flag=True,
    help="With --since or --until: leave out decisions that changed nothing.",
)
@click.option(
    "--id", "decision_id", shell_complete=DECISION, help="Explain only this decision, such as d000012."
)
@option.as_json("The ledger's records as a JSON array.")
def explain(
    *,
    log_dir: Path | None,
    namespace: str | None,
    last: int | None,
    since: str | None,
    until: str | None,
    with_unchanged: bool,
    only_changes: bool,
    decision_id: str | None,
    as_json: bool,
) -> None:
    """Explain why the last changes were made, rule by rule with the numbers, and why nothing has changed since."""
    folder = ledger_folder(log_dir, namespace)
    if with_unchanged and only_changes:
        raise click.UsageError("--all and --changes exclude each other; give one")
    has_span = since is not None or until is not None
    with_unchanged = with_unchanged or (has_span and not only_changes)
    last = 1 if last is None and not has_span else last
    newest = None if decision_id is not None or has_span else last
    # Changes are never only counted.
    ledger = read_ledger(folder, newest=newest if with_unchanged or decision_id is not None else 1)
    _notes(ledger.notes)
    try:
        span = explaining.span_of(ledger, since, until) if has_span else None
        records = explaining.select(
            ledger, last=last, decision_id=decision_id, with_unchanged=with_unchanged, span=span
        )
        words = [] if as_json else [explaining.in_words(record) for record in records]
        is_part = not (as_json or with_unchanged or has_span or decision_id is not None)
        held = explaining.since_last_change(ledger) if is_part else ""
        left = next((each["remembered"] for each in ledger.records[::-1] if each.get("remembered")), None)
        former = (
            "" if left is None else learnt.former_run_in_words(LearnedStateInfo(**left), folder, time.time())
        )
    except MALFORMED as exc:
        raise LedgerFileError(
            f"{folder}: a decision is incomplete ({exc!r}); use the version that wrote it"
        ) from exc
    if as_json:
        say_json(records)
    elif records:
        say("\n\n".join(words))
        if held:
            say(f"\n{held}  (--all explains them)")
        if former:
            say(former)
    else:
        say("no such decision in this span" if has_span else "no decision yet", err=True)


@planner.command()
@click.argument("ledger_path", metavar="LEDGER", type=click.Path(path_type=Path))
@click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="KEY=VALUE",
    help="Planner option to change, by name. Repeatable.",
)
@option.as_json("Result as JSON.")
@click.pass_context
def replay(ctx: click.Context, ledger_path: Path, changes: tuple[str, ...], as_json: bool) -> None:
    """Recompute every decision of a ledger; exit 1 if one differs.

    With --set nothing is verified: the command prints which decisions would differ, each computed from its recorded
    window and state.
    """
    ledger = read_ledger(ledger_path)
    _notes(ledger.notes)
    if changes:
        asked = replaying.settings(changes)
        with counting("records", len(ledger.records), is_quiet=as_json) as on_record:
            found = replaying.what_if(ledger, asked, on_record=on_record)
        _print_what_if(*found, as_json=as_json)
        return
    with counting("records", len(ledger.records), is_quiet=as_json) as on_record:
        result = replaying.replay(ledger, on_record=on_record)
    if as_json:
        say_json(to_plain(result))
    else:
        for each in result.differences:
            say(f"line {each.line}: {each.id}: {each.what} differs")
            say(f"  recorded   {orjson.dumps(each.recorded).decode()}")
            say(f"  recomputed {orjson.dumps(each.recomputed).decode()}")
        say(f"{result.decisions} decisions recomputed, {len(result.differences)} differences")
    ctx.exit(1 if result.differences else 0)


def _print_what_if(total: int, different: list[tuple[Any, Any]], *, as_json: bool) -> None:
    if as_json:
        rows = [{"recorded": record["decision"], "what_if": to_plain(made)} for record, made in different]
        say_json({"decisions": total, "different": rows})
        return
    for record, made in different:
        recorded = {role["role"]: role["sentence"] for role in record["decision"]["roles"]}
        for role in made.roles:
            if recorded.get(role.role.value) != role.sentence:
                say(f"{made.id}  was: {recorded.get(role.role.value)}\n{'':9}now: {role.sentence}")
    say(f"{len(different)} of {total} decisions would differ")


def _notes(notes: tuple[str, ...]) -> None:
    for note in notes:
        say(note, err=True)
