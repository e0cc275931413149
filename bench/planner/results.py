"""Writes RESULTS.md of a run of the scoreboard: who is better than whom, on what, at which cost."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import gate
from board import FIXED, ONE_STEP, ORACLE, REFERENCES, TIE, VERDICTS, Board, Row, verdict
from reference import HINDSIGHT
from workloads import Case

from penstock_planner.decide.config import Mode

PROFILED = Mode.SLA.value
"""The default with a profile and targets."""

POINT, COST = 0.01, 0.03
REPEAT_COST = 1.3
AGREED = 0.9
"""The goals' bounds."""
REPEATING = frozenset(("sine", "aggregated-sine", "recurring", "cycles"))

_SHOWN_RIVALS = 3
"""How many of those that are better on a case are named."""


def document(
    board: Board,
    conformance: Sequence[str],
    pictures: Sequence[str],
    command: str,
    *,
    before: Board | None = None,
    left_out: Sequence[str] = (),
) -> str:
    """Return RESULTS.md.

    Args:
        board: The run.
        conformance: Its table.
        pictures: Files to show.
        command: What wrote it.
        before: An earlier run to show the default alongside.
        left_out: Cases that were not run.
    """
    default = board.default
    parts = [
        "# The planner's scoreboard",
        (
            f"Written by `{command}`; virtual time, same options, same figures. [How it works and what each policy is]"
            "(../../docs/scoreboard.md)."
        ),
        f"**A part of the suite.** Not run: {', '.join(left_out)}." if left_out else "",
        f"## Where `{default}` loses",
        _losses(board),
        f"## `{default}` against each other policy",
        _comparison(board),
        "## Alongside a fixed fleet of the same cost",
        "\n".join(gate.table(board, before)),
        "## The goals",
        _hindsight_goal(board),
        _one_step_goal(board),
        *_prediction_goal(board),
        *_later(board),
        *_profiled(board),
        "## Tuned and held out",
        (
            "Means over the load cases. *Tuned*: cases and seeds that may be looked at while policies are made. *Held-out"
            " seeds*: the same cases, other arrivals. *Held-out cases*: loads that are not looked at. GPU-hours are the"
            " sum, regrets means of the GPU-hours as a multiple of each oracle's."
        ),
        _totals(board),
        *(f"![{name}]({name})" for name in pictures),
        "## In time and GPU-hours",
        (
            "Share of the requests whose TTFT and mean gap between tokens are in time (failed and rejected ones are not),"
            " and GPU-hours held."
        ),
        *_matrices(board),
        "## Every figure",
        _details(board),
        "## Conformance",
        "Situations with a fluid load, small enough to say what is right.",
        "\n".join(conformance),
    ]
    return "\n\n".join(part.strip("\n") for part in parts if part.strip("\n")) + "\n"


def _losses(board: Board) -> str:
    lines = []
    for case in board.cases:
        own = board.of(case, board.default)
        baselines = [
            (name, row)
            for name in (*board.policies, *FIXED)
            if name != board.default and (row := board.of(case, name))
        ]
        if own is None:
            continue
        better = [each for each in baselines if each[1]["in_time"]["both"] > own["in_time"]["both"] + TIE]
        better.sort(key=lambda each: -each[1]["in_time"]["both"])
        cheaper = [each for each in baselines if verdict(own, each[1]) == VERDICTS[2]]
        cheaper.sort(key=lambda each: each[1]["gpu_hours"])
        words = _named("in time more often", better) + _named("as often for less", cheaper)
        if words:
            lines.append(f"- **{case.name}** ({_figures(own)}): {'; '.join(words)}.")
    if not lines:
        return f"Nowhere: on no case is another policy in time more often, or as often for fewer GPU-hours, than `{board.default}`."
    return "\n".join(lines)


def _named(words: str, rows: Sequence[tuple[str, Row]]) -> list[str]:
    if not rows:
        return []
    shown = ", ".join(f"{name} ({_figures(row)})" for name, row in rows[:_SHOWN_RIVALS])
    more = f" and {len(rows) - _SHOWN_RIVALS} more" if len(rows) > _SHOWN_RIVALS else ""
    return [f"{words}: {shown}{more}"]


def _figures(row: Row) -> str:
    return f"{100 * row['in_time']['both']:.1f}% for {row['gpu_hours']:.2f}"


def _comparison(board: Board) -> str:
    lines = [
        f"| against | {' | '.join(VERDICTS)} | worse, no cheaper on |",
        f"|---|{'---|' * (len(VERDICTS) + 1)}",
    ]
    for baseline in [*(name for name in board.policies if name != board.default), *FIXED]:
        found = {
            case.name: verdict(own, other)
            for case in board.cases
            if (own := board.of(case, board.default)) and (other := board.of(case, baseline))
        }
        counts = [sum(word == name for word in found.values()) for name in VERDICTS]
        bad = [name for name, word in found.items() if word == VERDICTS[-1]]
        lines.append(f"| {baseline} | {' | '.join(map(str, counts))} | {', '.join(bad) or '-'} |")
    return "\n".join(lines)


def _profiled(board: Board) -> list[str]:
    """Return what a profile and targets change: `PROFILED` alongside the default, by case; nothing where either is missing."""
    found: dict[str, list[str]] = {}
    for case in board.cases:
        own, other = board.of(case, PROFILED), board.of(case, board.default)
        if own is not None and other is not None and board.default != PROFILED:
            words = f"{case.name} ({_figures(own)} against {_figures(other)})"
            found.setdefault(verdict(own, other), []).append(words)
    if not found:
        return []
    lines = [
        f"- *{name}* on {len(found[name])}: {', '.join(found[name])}." for name in VERDICTS if name in found
    ]
    return [f"## `{PROFILED}`, with a true profile, alongside `{board.default}`", "\n".join(lines)]


def _hindsight_goal(board: Board) -> str:
    """Return where the default serves as well as the best fixed fleet in hindsight and costs no more."""

    def is_met(own: Row, best: Row) -> bool:
        is_good = own["in_time"]["both"] >= best["in_time"]["both"] - POINT
        return bool(is_good and own["gpu_hours"] <= best["gpu_hours"] * (1 + COST))

    pairs = [
        (case, own["later"] or own, best["later"] or best)
        for case in board.cases
        if case.kind in {"load", "start-up"}
        and (own := board.of(case, board.default))
        and (best := board.of(case, HINDSIGHT))
    ]
    met = [case.name for case, own, best in pairs if is_met(own, best)]
    missed = [
        f"{case.name} ({_figures(own)} against {_figures(best)})"
        for case, own, best in pairs
        if not is_met(own, best)
    ]
    return (
        "As good as the best fixed fleet in hindsight (the cheapest that serves 99% in time, else the one that serves"
        f" most), within {100 * POINT:g} point, for no more GPU-hours, within {100 * COST:g}%, after the first two"
        f" hours: {_of(met, missed)}"
    )


def _one_step_goal(board: Board) -> str:
    """Return where the default comes near an oracle that moves no faster than it does, on loads that come again."""
    met, missed = [], []
    for case in board.cases:
        own, oracle = board.of(case, board.default), board.of(case, ONE_STEP)
        if case.name not in REPEATING or own is None or oracle is None:
            continue
        own, oracle = own["later"] or own, oracle["later"] or oracle
        times = own["gpu_hours"] / oracle["gpu_hours"]
        is_met = own["in_time"]["both"] >= 0.99 and times <= REPEAT_COST
        (met if is_met else missed).append(f"{case.name} ({_figures(own)}, {times:.2f} x)")
    return f"99% in time within {REPEAT_COST:g} x the one-step oracle's GPU-hours on loads that come again: {_of(met, missed)}"


def _prediction_goal(board: Board) -> list[str]:
    """Return where the default's model predicts what it serves; nothing where no run has compared them."""
    met, missed = [], []
    for case in board.cases:
        own = board.of(case, board.default)
        if own is not None and own["windows"]:
            words = f"{case.name} ({own['windows_agreed']:.0%} of {own['windows']})"
            (met if own["windows_agreed"] >= AGREED else missed).append(words)
    if not met and not missed:
        return []
    return [
        (
            f"Predicted and served share of requests with their first token in time within one point of each other in {AGREED:.0%} of the"
            f" windows of ten minutes that have a hundred requests at least: {_of(met, missed)}"
        )
    ]


def _of(met: Sequence[str], missed: Sequence[str]) -> str:
    text = f"met on {len(met)} of {len(met) + len(missed)} cases" + (f" ({', '.join(met)})" if met else "")
    return text + (f"; missed on {', '.join(missed)}." if missed else ".")


def _later(board: Board) -> list[str]:
    """Return the cases of hours after their first two, in which a planner can use what it has seen."""
    cases = [case for case in board.cases if (row := board.of(case, board.default)) and row["later"]]
    return [_matrix(board, "after the first two hours", cases, is_later=True)] if cases else []


def _totals(board: Board) -> str:
    groups = board.groups()
    names = ("violation_s", "changes", "reversals", "lost")
    lines = [
        (
            f"| policy | {' | '.join(f'in time, {name}' for name in groups)} | GPU-hours | / oracle's | / one-step oracle's |"
            " violation s | changes | reversals | lost |"
        ),
        "|---|" + "---|" * (len(groups) + 3 + len(names)),
    ]
    loads = [case for case in board.cases if case.kind == "load"]
    for policy in [*board.policies, *REFERENCES]:
        rows = [row for case in loads if (row := board.of(case, policy))]
        # A reference that was not searched everywhere has no total that could be compared.
        if not rows or len(rows) < len(loads):
            continue
        cells = [
            *(_percent(board.mean(policy, group)) for group in groups.values()),
            f"{sum(row['gpu_hours'] for row in rows):.1f}",
            *(_mean_regret(board, policy, loads, oracle) for oracle in (ORACLE, ONE_STEP)),
            *(f"{fmean(row[name] for row in rows):.1f}" for name in names),
        ]
        lines.append(f"| {policy} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _mean_regret(board: Board, policy: str, cases: Sequence[Case], oracle: str) -> str:
    regrets = [each for case in cases if (each := board.regret(case, policy, oracle)) is not None]
    return f"{fmean(regrets):.2f}" if regrets else "-"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"


def _matrices(board: Board) -> list[str]:
    loads = [case for case in board.cases if case.kind == "load"]
    tables = {
        "tuned load cases": [case for case in loads if case.is_tuned],
        "held-out load cases": [case for case in loads if not case.is_tuned],
    }
    for kind in ("short", "start-up", "fault"):
        tables[f"{kind} cases"] = [case for case in board.cases if case.kind == kind]
    return [_matrix(board, title, cases) for title, cases in tables.items() if cases]


def _matrix(board: Board, title: str, cases: Sequence[Case], *, is_later: bool = False) -> str:
    columns = [
        *board.policies,
        *(name for name in REFERENCES if any(board.of(case, name) for case in cases)),
    ]
    lines = [f"| {title} | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for case in cases:
        rows = [board.of(case, policy) for policy in columns]
        shown = [row["later"] if row is not None and is_later else row for row in rows]
        cells = [
            "-" if row is None else f"{100 * row['in_time']['both']:.1f}% {row['gpu_hours']:.2f}"
            for row in shown
        ]
        lines.append(f"| {case.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _details(board: Board) -> str:
    lines = [
        (
            "| case | policy | seeds | TTFT | ITL | both | p99 TTFT | GPU-h | / oracle's | / one-step oracle's | in time per"
            " GPU-h | violation s | changes | moved | reversals | lost |"
        ),
        "|---|" + "---|" * 15,
    ]
    for case in board.cases:
        for policy in [*board.policies, *REFERENCES]:
            row = board.of(case, policy)
            if row is None:
                continue
            name = policy if row["fleet"] is None else f"{policy}: {'+'.join(map(str, row['fleet']))}"
            share = " | ".join(f"{100 * row['in_time'][kind]:.1f}%" for kind in ("ttft", "itl", "both"))
            regrets = [board.regret(case, policy, oracle) for oracle in (ORACLE, ONE_STEP)]
            p99 = "-" if row["ttft_p99_s"] is None else f"{row['ttft_p99_s']:.1f} s"
            lines.append(
                f"| {case.name} | {name} | {row['seeds']} | {share} | {p99} | {row['gpu_hours']:.2f} |"
                f" {' | '.join('-' if each is None else f'{each:.2f}' for each in regrets)} |"
                f" {row['in_time_per_gpu_hour']:.0f} | {row['violation_s']:.0f} | {row['changes']:.1f} |"
                f" {row['replicas_moved']:.1f} | {row['reversals']:.1f} | {row['lost']:.1f} |"
            )
    return "\n".join(lines)
