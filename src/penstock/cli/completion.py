"""Values that a shell completes: names of traces, profiles, policies, planners and samples, and decisions of a ledger.

Each is read when the shell asks, which is not while a command runs. What cannot be read completes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

import click
from click.shell_completion import CompletionItem

from penstock.core.errors import PenstockError

Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]
Names = Callable[[click.Context], Iterable[str]]

_SHOWN_DECISIONS: Final = 30
"""Chosen: what a terminal has room for; the newest come first."""


def _traces(_context: click.Context) -> Iterable[str]:
    from penstock.workload.traces import BUILT_IN  # noqa: PLC0415 - slow to import, and only a shell asks

    return sorted(BUILT_IN)


def _profiles(_context: click.Context) -> Iterable[str]:
    from penstock.engine.profiles import names  # noqa: PLC0415

    return names()


def _policies(_context: click.Context) -> Iterable[str]:
    from penstock.router.policy.registry import policy_names  # noqa: PLC0415

    return ("all", *policy_names())


def _planners(_context: click.Context) -> Iterable[str]:
    from penstock_planner.decide.policy import policy_names  # noqa: PLC0415

    return ("all", *policy_names())


def _decisions(context: click.Context) -> Iterable[str]:
    from penstock.cli.planner_folder import ledger_folder  # noqa: PLC0415
    from penstock_planner.ledger import read_ledger  # noqa: PLC0415

    log_dir = context.params.get("log_dir")
    folder = ledger_folder(None if log_dir is None else Path(log_dir), context.params.get("namespace"))
    records = read_ledger(folder, newest=_SHOWN_DECISIONS).records
    found = [str(each["decision"]["id"]) for each in records if each.get("type") == "decision"]
    return reversed(found[-_SHOWN_DECISIONS:])


def one_of(names: Names, *, or_file: bool = False, is_list: bool = False) -> Completer:
    """Return what completes one of some names, or the last of several with commas between."""

    def complete(
        context: click.Context, _parameter: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        before, comma, begun = incomplete.rpartition(",") if is_list else ("", "", incomplete)
        try:
            found = [name for name in names(context) if name.startswith(begun)]
        except (PenstockError, OSError, ValueError, KeyError, TypeError):
            found = []
        items = [CompletionItem(f"{before}{comma}{name}") for name in found]
        return [*items, CompletionItem(incomplete, type="file")] if or_file else items

    return complete


OF_FLAG: Final[Mapping[str, Completer]] = {
    "--trace": one_of(_traces, or_file=True),
    "--profile": one_of(_profiles, or_file=True),
    "--policy": one_of(_policies, is_list=True),
    "--planner": one_of(_planners, is_list=True),
}
"""The completer of each option that several commands build from dataclasses."""

DECISION: Final = one_of(_decisions)
PROFILE: Final = OF_FLAG["--profile"]
