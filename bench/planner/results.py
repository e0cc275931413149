"""Writes RESULTS.md of a run of the scoreboard: who is better than whom, on what, at which cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from workloads import Case

ORACLE = "oracle"
FIXED = ("static, as good", "static, as dear")
TIE = 0.005
"""Chosen: half a per cent of the requests, or of the GPU-hours, is a tie; seeds differ by more."""

Row = Mapping[str, Any]


class Board:
    """A run's rows, averaged over the seeds, by case and policy.

    Attributes:
        cases: In order.
        policies: Those that decide, in order.
        default: The planner's own default, or what stands for it.
    """

    def __init__(
        self, cases: Sequence[Case], rows: Sequence[Row], policies: Sequence[str], default: str
    ) -> None:
        self.cases = list(cases)
        self.policies = list(policies)
        self.default = default
        groups: dict[tuple[str, str], list[Row]] = {}
        for row in rows:
            groups.setdefault((row["case"], row["policy"]), []).append(row)
        self._means = {key: _mean_row(members) for key, members in groups.items()}

    def of(self, case: Case, policy: str) -> Row | None:
        """Return the means of a policy on a case, or None where it was not run."""
        return self._means.get((case.name, policy))

    def regret(self, case: Case, policy: str) -> float | None:
        """Return GPU-hours as a multiple of the oracle's; None without an oracle."""
        row, oracle = self.of(case, policy), self.of(case, ORACLE)
        if row is None or oracle is None or not oracle["gpu_hours"]:
            return None
        return float(row["gpu_hours"] / oracle["gpu_hours"])


def _mean_row(rows: Sequence[Row]) -> Row:
    names = ("gpu_hours", "mean_gpus", "violation_s", "changes", "replicas_moved", "reversals", "lost")
    mean: dict[str, Any] = {name: fmean(row[name] for row in rows) for name in names}
    mean["in_time"] = {kind: fmean(row["in_time"][kind] for row in rows) for kind in ("ttft", "itl", "both")}
    mean["in_time_per_gpu_hour"] = fmean(row["in_time_per_gpu_hour"] or 0.0 for row in rows)
    served = [row["ttft_p99_s"] for row in rows if row["ttft_p99_s"] is not None]
    mean["ttft_p99_s"] = fmean(served) if served else None
    mean["seeds"] = len(rows)
    mean["fleet"] = rows[0]["fleet"]
    return mean


def verdict(own: Row, rival: Row) -> str:
    """Return how one policy compares with another on a case."""
    gain = own["in_time"]["both"] - rival["in_time"]["both"]
    cost = own["gpu_hours"] / rival["gpu_hours"] - 1
    is_good, is_cheap = gain >= -TIE, cost <= TIE
    if is_good and is_cheap:
        return "as good, no dearer"
    if is_good:
        return "as good, dearer" if gain <= TIE else "better, dearer"
    return "worse, cheaper" if cost < -TIE else "worse, no cheaper"


VERDICTS = ("as good, no dearer", "better, dearer", "as good, dearer", "worse, cheaper", "worse, no cheaper")


def document(board: Board, conformance: Sequence[str], pictures: Sequence[str], command: str) -> str:
    """Return RESULTS.md."""
    parts = [
        "# The planner's scoreboard",
        (
            f"Written by `{command}`; virtual time, same options, same figures. [How it works and what each policy is]"
            "(../../docs/scoreboard.md)."
        ),
        *_goals(board),
        *(f"![{name}]({name})" for name in pictures),
        "## In time and GPU-hours",
        (
            "Share of the requests whose TTFT and mean gap between tokens are in time (failed and rejected ones are not),"
            " and GPU-hours held. *t*: policies were tuned on it; the others are held out."
        ),
        *(_matrix(board, kind) for kind in ("load", "cold start", "fault")),
        "## Every figure",
        _details(board),
        "## Conformance",
        "Situations with a fluid load, small enough to say what is right.",
        "\n".join(conformance),
    ]
    return "\n\n".join(part.strip("\n") for part in parts if part.strip("\n")) + "\n"


def _goals(board: Board) -> list[str]:
    lines = [
        f"| against | {' | '.join(VERDICTS)} | worse, no cheaper on |",
        f"|---|{'---|' * (len(VERDICTS) + 1)}",
    ]
    for rival in [*(name for name in board.policies if name != board.default), *FIXED]:
        pairs = [
            (case, own, other)
            for case in board.cases
            if (own := board.of(case, board.default)) and (other := board.of(case, rival))
        ]
        found = {case.name: verdict(own, other) for case, own, other in pairs}
        counts = [sum(word == name for word in found.values()) for name in VERDICTS]
        bad = [name for name, word in found.items() if word == VERDICTS[-1]]
        lines.append(f"| {rival} | {' | '.join(map(str, counts))} | {', '.join(bad) or '-'} |")
    return [
        f"## `{board.default}` against each other policy",
        "\n".join(lines),
        _against_oracle(board),
        "Means over the load cases (GPU-hours: sum):",
        _totals(board),
    ]


def _against_oracle(board: Board) -> str:
    reached, missed = [], []
    for case in board.cases:
        own, oracle, regret = (
            board.of(case, board.default),
            board.of(case, ORACLE),
            board.regret(case, board.default),
        )
        if own is None or oracle is None or regret is None or oracle["in_time"]["both"] < 0.99:
            continue
        is_met = own["in_time"]["both"] >= 0.99 and regret <= 1.15
        text = f"{case.name} ({100 * own['in_time']['both']:.1f}% at {regret:.2f} x)"
        (reached if is_met else missed).append(text)
    total = len(reached) + len(missed)
    text = (
        "Goal, 99% in time within 1.15 x the oracle's GPU-hours wherever the oracle reaches 99%: met on"
        f" {len(reached)} of {total} cases"
    )
    text += f" ({', '.join(reached)})" if reached else ""
    return text + (f"; missed on {', '.join(missed)}." if missed else ".")


def _totals(board: Board) -> str:
    lines = [
        (
            "| policy | in time, tuned | in time, held out | GPU-hours | GPU-hours / oracle's | violation s | changes"
            " | reversals | lost |"
        ),
        "|---|---|---|---|---|---|---|---|---|",
    ]
    loads = [case for case in board.cases if case.kind == "load"]
    for policy in [*board.policies, *FIXED, ORACLE]:
        # A reference that was not searched everywhere has no total that could be compared.
        if not all(board.of(case, policy) for case in loads):
            continue
        rows = [row for case in loads if (row := board.of(case, policy))]
        regrets = [each for case in loads if (each := board.regret(case, policy)) is not None]
        cells = [
            _mean_percent(board, policy, [case for case in loads if case.is_tuned]),
            _mean_percent(board, policy, [case for case in loads if not case.is_tuned]),
            f"{sum(row['gpu_hours'] for row in rows):.1f}",
            f"{fmean(regrets):.2f}" if regrets else "-",
            *(
                f"{fmean(row[name] for row in rows):.1f}"
                for name in ("violation_s", "changes", "reversals", "lost")
            ),
        ]
        lines.append(f"| {policy} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _mean_percent(board: Board, policy: str, cases: Sequence[Case]) -> str:
    rows = [row for case in cases if (row := board.of(case, policy))]
    return f"{100 * fmean(row['in_time']['both'] for row in rows):.1f}%" if rows else "-"


def _matrix(board: Board, kind: str) -> str:
    cases = [case for case in board.cases if case.kind == kind]
    if not cases:
        return ""
    columns = [
        *board.policies,
        *(name for name in (*FIXED, ORACLE) if any(board.of(case, name) for case in cases)),
    ]
    lines = [f"| {kind} cases | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for case in cases:
        cells = []
        for policy in columns:
            row = board.of(case, policy)
            cells.append(
                "-" if row is None else f"{100 * row['in_time']['both']:.1f}% {row['gpu_hours']:.2f}"
            )
        lines.append(f"| {case.name}{' *t*' if case.is_tuned else ''} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _details(board: Board) -> str:
    lines = [
        (
            "| case | policy | seeds | TTFT | ITL | both | p99 TTFT | GPU-h | / oracle's | in time per GPU-h | violation s"
            " | changes | moved | reversals | lost |"
        ),
        "|---|" + "---|" * 14,
    ]
    for case in board.cases:
        for policy in [*board.policies, *FIXED, ORACLE]:
            row = board.of(case, policy)
            if row is None:
                continue
            name = policy if row["fleet"] is None else f"{policy}: {'+'.join(map(str, row['fleet']))}"
            share = " | ".join(f"{100 * row['in_time'][kind]:.1f}%" for kind in ("ttft", "itl", "both"))
            regret = board.regret(case, policy)
            p99 = "-" if row["ttft_p99_s"] is None else f"{row['ttft_p99_s']:.1f} s"
            lines.append(
                f"| {case.name} | {name} | {row['seeds']} | {share} | {p99} | {row['gpu_hours']:.2f} |"
                f" {'-' if regret is None else f'{regret:.2f}'} | {row['in_time_per_gpu_hour']:.0f} |"
                f" {row['violation_s']:.0f} | {row['changes']:.1f} | {row['replicas_moved']:.1f} |"
                f" {row['reversals']:.1f} | {row['lost']:.1f} |"
            )
    return "\n".join(lines)
