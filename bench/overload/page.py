"""RESULTS.md and its picture, from measured runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from document import PREMIUM, ROWS, compliance, p99_ms, preemptions_per_minute, throughput
from fleet import TierFigures
from worker import BATCH_TOKENS, BLOCK_TOKENS, KV_BLOCKS, MAX_SEQS, MODES, PREEMPTION, PROFILE, TARGETS_S, Run
from workload import (
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    SHARES,
    SURGE_EVERY_S,
    SURGE_FACTOR,
    SURGE_S,
    TIERS,
)

from penstock.core.tiers import TierPriority
from penstock.report.drawing import DPI, GREY, LINE_COLOURS, blank_figure

Runs = Mapping[str, Run]

PREMIUM_GAIN, PREMIUM_COMPLIANCE, MOST_LOSS = 10.0, 99.5, 8.0


def verdicts(runs: Runs) -> list[tuple[str, str, bool]]:
    """Return what was asked, what was measured and whether it holds, for both columns with preemption."""
    fifo = runs[MODES[0].name]
    found = []
    for mode in MODES[2:]:
        run = runs[mode.name]
        gain = p99_ms(fifo, PREMIUM) / p99_ms(run, PREMIUM)
        share = compliance(run, PREMIUM)
        loss = 100 * (1 - throughput(run) / throughput(fifo))
        found += [
            (
                f"{mode.name}: premium p99 at least {PREMIUM_GAIN:g}x better",
                f"{gain:.1f}x",
                gain >= PREMIUM_GAIN,
            ),
            (
                f"{mode.name}: premium compliance >= {PREMIUM_COMPLIANCE}%",
                f"{share:.2f}%",
                share >= PREMIUM_COMPLIANCE,
            ),
            (f"{mode.name}: throughput loss <= {MOST_LOSS:g}%", f"{loss:.2f}%", loss <= MOST_LOSS),
        ]
    return found


def tiers_section(runs: Runs, *, rate: float, seconds: float) -> list[str]:
    """Return the lines of the document's table."""
    fifo = runs[MODES[0].name]
    names = [mode.name for mode in MODES]
    lines = [
        "## Tiers on one worker",
        "",
        *_setting(rate, seconds),
        "",
        "| | " + " | ".join(names) + " |",
        "|---|" + "---:|" * len(names),
    ]
    for row in ROWS:
        cells = [
            f"{row.ours(runs[name], fifo):.{row.digits}f} / {theirs:g}"
            for name, theirs in zip(names, row.theirs, strict=True)
        ]
        lines.append(f"| {row.name} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "**Held to:**",
        "",
        *(_verdict(*each) for each in verdicts(runs)),
        "",
        "**Why they differ:**",
        "",
    ]
    lines += [f"- *{row.name}.* {row.why}" for row in ROWS]
    shed = ", ".join(f"{tier.name.lower()} {runs[names[3]].shed[tier]}" for tier in TIERS)
    kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(runs[names[2]].preemptions.items()))
    lines += [
        "",
        f"Preemptions by kind with preemption: {kinds}. Shed by the monitor: {shed}.",
        "",
        "![](tiers.png)",
    ]
    return lines


def _setting(rate: float, seconds: float) -> tuple[str, ...]:
    return (
        (
            f"One simulated worker of profile `{PROFILE}`, {KV_BLOCKS} KV blocks of {BLOCK_TOKENS} tokens, at most {MAX_SEQS} "
            f"requests and {BATCH_TOKENS} tokens in a step. {seconds / 60:g} minutes of virtual time, seed 0. Synthetic "
            f"traffic: {rate:g} requests/s and for {SURGE_S:g} s of every {SURGE_EVERY_S:g} s {SURGE_FACTOR:g} times as "
            f"many; premium, standard and background {', '.join(f'{share:.0%}' for share in SHARES)} of the arrivals, prompts "
            f"of {', '.join(map(str, PROMPT_TOKENS))} and outputs of {', '.join(map(str, OUTPUT_TOKENS))} tokens in the mean. "
            "The document does not state its traffic: the rate was chosen so that FIFO comes near its 2.1 s; all else follows."
        ),
        "",
        (
            f"Preemption: at most {PREEMPTION.max_per_request} per request, {PREEMPTION.premium_reserved_fraction:.0%} of the blocks "
            f"reserved for premium, {PREEMPTION.swap_gigabytes:g} GB of host memory. Each cell: measured / the document's."
        ),
    )


def overload_section(by_factor: Mapping[int, Runs], *, seconds: float) -> list[str]:
    """Return the lines of the saturated runs, by multiple of the rate."""
    lines = [
        "## The same worker, saturated",
        "",
        (
            f"{seconds / 60:g} minutes of arrivals at multiples of that rate, then until all are served. Nothing is rejected but "
            "by the monitor; shares are of the requests let in. At 5x the premium requests of a surge alone ask for some 4,800 "
            "tokens/s, all that the worker has."
        ),
        "",
        (
            "| rate | | premium p99 TTFT, ms | premium in time, % | standard in time, % | tokens/s | against FIFO | "
            "preemptions/min | shed: premium, standard, background |"
        ),
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for factor, runs in by_factor.items():
        fifo = throughput(runs[MODES[0].name])
        for mode in MODES:
            run = runs[mode.name]
            shed = ", ".join(str(run.shed[tier]) for tier in TIERS)
            lines.append(
                f"| {factor}x | {mode.name} | {p99_ms(run, PREMIUM):.0f} | {compliance(run, PREMIUM):.1f} | "
                f"{compliance(run, TIERS[1]):.1f} | {throughput(run):.0f} | {100 * (throughput(run) / fifo - 1):+.1f}% | "
                f"{preemptions_per_minute(run):.1f} | {shed} |"
            )
    return lines


def fleet_section(
    by_factor: Mapping[int, Mapping[TierPriority, TierFigures]], *, seconds: float
) -> list[str]:
    """Return the lines of the runs through the router."""
    lines = [
        "## The same worker behind the router",
        "",
        (
            f"The simulator: {seconds / 60:g} minutes of the same traffic through the router's core with the product's defaults "
            "(policy prefix-cost, 8,192 prompt tokens at the worker at a time except for premium, shares 50/35/15, aging, SLO monitor, "
            "60 s in the queue) and the targets above. Cells: premium / standard / background."
        ),
        "",
        "| rate | arrived | shed or refused | p99 TTFT of the served, ms | in time, % |",
        "|---:|---:|---:|---:|---:|",
    ]
    for factor, figures in by_factor.items():
        rows = [figures[tier] for tier in TIERS]
        cells = (
            " / ".join(str(row.arrived) for row in rows),
            " / ".join(str(row.rejected) for row in rows),
            " / ".join("-" if row.p99_ms is None else f"{row.p99_ms:.0f}" for row in rows),
            " / ".join("-" if row.in_time is None else f"{100 * row.in_time:.1f}" for row in rows),
        )
        lines.append(f"| {factor}x | " + " | ".join(cells) + " |")
    return lines


def _verdict(what: str, measured: str, holds: bool) -> str:  # noqa: FBT001 - the outcome itself
    return f"- {what}: {measured}, {'holds' if holds else 'does not hold'}"


def draw_tiers(runs: Runs, path: Path) -> None:
    """Draw the distribution of TTFT by tier and mode."""
    figure = blank_figure("TTFT of three tiers under four ways of scheduling")
    figure.set_size_inches(10, 3.6)
    for axes, tier in zip(figure.subplots(1, len(TIERS), sharey=True), TIERS, strict=True):
        for mode, colour in zip(MODES, LINE_COLOURS, strict=False):
            values = sorted(runs[mode.name].ttft_s[tier])
            shares = [(place + 1) / len(values) for place in range(len(values))]
            axes.plot(values, shares, color=colour, label=mode.name)
        if tier in TARGETS_S:
            axes.axvline(TARGETS_S[tier], color=GREY, linestyle=":", label="target")
        axes.set_xscale("log")
        axes.set_ylim(0.5, 1.0)
        axes.set_xlabel(f"TTFT of {tier.name.lower()}, s")
        axes.grid(alpha=0.25)
        if tier is PREMIUM:
            axes.set_ylabel("share of requests")
            axes.legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=DPI, metadata={"Software": None})


def as_page(*sections: Sequence[str]) -> str:
    """Return the page."""
    head = [
        "# Overload",
        "",
        "Written by `make bench-overload`; all times are virtual, same options, same page.",
    ]
    return "\n".join([*head, *(line for section in sections for line in ("", *section)), ""])
