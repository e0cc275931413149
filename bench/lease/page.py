"""The page and the picture of the lease measurements."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from crash import BLOCKS, CRASH_S, END_S, FIXED_S, CrashRun
from table import BATCH, ENGINES, TableCost
from waiting import FACTOR, LEASE_S, WaitingRun

from penstock.report.drawing import DPI, GREY, LINE_COLOURS, blank_figure

Verdict = tuple[str, str, bool]
AFTER_S = (0, 10, 20, 30, 60, 240, 479, 481)


def crash_section(lease: CrashRun, fixed: CrashRun) -> list[str]:
    """Return what both kinds of hold keep after a crash."""
    rows = [f"| {after} s | {lease.blocks_at(after)} | {fixed.blocks_at(after)} |" for after in AFTER_S]
    return [
        "## Crash of a decode worker",
        "",
        (
            "One prefill engine, two decode engines, prompts of 2,000 tokens; after 120 s one decode engine is gone without a word, "
            f"with {lease.orphans} prompts that it had not read. Arrivals continue at what the other one serves."
        ),
        "",
        f"KV blocks of those prompts that the prefill engine still keeps, of its {BLOCKS:,}:",
        "",
        f"| after the crash | lease of 30 s | fixed {FIXED_S:.0f} s |",
        "|---|---:|---:|",
        *rows,
        "",
        (
            f"The last block is free after {lease.freed_s[-1]:.0f} s with leases and after {fixed.freed_s[-1]:.0f} s with the fixed "
            f"time-out: {fixed.freed_s[-1] / lease.freed_s[-1]:.0f} times as long. "
            f"The first ones are free after {lease.freed_s[0]:.0f} s: their leases had been renewed last shortly before."
        ),
        "",
        "![KV blocks kept after a crash](crash.png)",
    ]


def waiting_section(runs: Sequence[WaitingRun]) -> list[str]:
    """Return what waiting ten leases long costs and loses."""
    rows = [
        f"| {run.requests:,} | {run.pairs} | {run.counts.longest_wait_s:.0f} s | {run.counts.lost} | {run.expired} | "
        f"{run.counts.messages:,} | {run.counts.renewed / run.counts.messages:,.0f} |"
        for run in runs
    ]
    return [
        f"## Decode queues of {FACTOR} leases",
        "",
        (
            f"All requests arrive within seconds; decode is so slow that the last one waits {FACTOR} leases of {LEASE_S:.0f} s "
            "before its KV is read. Heartbeats go out once an interval of 5 s, one message for each pair of engines."
        ),
        "",
        "| requests | pairs of engines | longest wait | KV lost | leases expired | heartbeat messages | requests per message |",
        "|---:|---:|---:|---:|---:|---:|---:|",
        *rows,
    ]


def table_section(costs: Sequence[TableCost]) -> list[str]:
    """Return what many leases cost."""
    rows = [
        f"| {cost.leases:,} | {_pair(cost.renewal_ms)} | {_pair(cost.scattered_ms)} | {cost.look_us:.1f} us | {cost.scan_us:,.0f} us | "
        f"{cost.reap_us:.2f} us | {cost.bytes_per_lease:.0f} |"
        for cost in costs
    ]
    return [
        "## Cost of many leases",
        "",
        (
            f"Processor time on the machine of this run, and its ratios. A renewal names {BATCH:,} requests: those of one of {ENGINES} decode "
            "engines, or scattered over all leases. A look finds that none has expired; a scan does the same by looking at every lease, "
            "as vLLM 0.32 does in each step. Reaping is per lease, renewed ones filed again among them. Bytes are the table's "
            "own, by tracemalloc; ids belong to the requests."
        ),
        "",
        "| leases | renewal, median / p99 | scattered, median / p99 | look | scan | reaping | bytes a lease |",
        "|---:|---:|---:|---:|---:|---:|---:|",
        *rows,
    ]


def verdicts(
    lease: CrashRun, fixed: CrashRun, waiting: Sequence[WaitingRun], costs: Sequence[TableCost]
) -> list[Verdict]:
    """Return what the page is held to: what, measured, whether it holds."""
    few, many = waiting[0], waiting[1]
    large, medium = costs[-1], costs[-2]
    growth = large.reap_us / medium.reap_us
    return [
        (
            "reclaimed within 20-30 s of the crash",
            f"{lease.freed_s[-1]:.0f} s",
            20 <= lease.freed_s[-1] <= 30,
        ),
        (
            "all orphans reclaimed",
            f"{len(lease.freed_s)} of {lease.orphans}",
            len(lease.freed_s) == lease.orphans,
        ),
        ("fixed time-out keeps them 480 s", f"{fixed.freed_s[-1]:.0f} s", fixed.freed_s[-1] == FIXED_S),
        (
            f"{FACTOR} leases waited, none lost over 10,000 requests",
            f"{many.counts.longest_wait_s:.0f} s, {many.counts.lost + many.expired} lost",
            many.requests == 10_000
            and many.counts.longest_wait_s >= FACTOR * LEASE_S
            and not any(run.counts.lost + run.expired for run in waiting),
        ),
        (
            f"messages grow with engines: {many.requests // few.requests} times the requests, as many messages",
            f"{few.counts.messages} and {many.counts.messages}",
            many.counts.messages <= 1.2 * few.counts.messages,
        ),
        (
            f"renewal of {BATCH:,} of 1,000,000 leases <= 1 ms",
            f"{large.renewal_ms[0]:.2f} ms",
            large.renewal_ms[0] <= 1,
        ),
        (
            "at most 200 bytes a lease",
            f"{max(each.bytes_per_lease for each in costs):.0f}",
            max(each.bytes_per_lease for each in costs) <= 200,
        ),
        (
            "reaping a lease of ten times as many costs less than 3 times as much",
            f"{growth:.1f} times",
            growth < 3,
        ),
    ]


def verdict_section(found: Sequence[Verdict]) -> list[str]:
    """Return what the page is held to, as lines."""
    lines = [f"- {what}: {measured}, {'holds' if holds else 'missed'}" for what, measured, holds in found]
    return ["## Held to", "", *lines]


def as_page(*sections: Sequence[str]) -> str:
    """Return the page."""
    head = [
        "# KV leases",
        "",
        "Written by `make bench-lease`. Crash and queues run the engine core in virtual time.",
    ]
    return "\n".join([*head, *(line for section in sections for line in ("", *section)), ""])


def draw_crash(lease: CrashRun, fixed: CrashRun, path: Path) -> None:
    """Draw what is kept for the crashed engine, and how full the prefill engine's cache is, over time."""
    figure = blank_figure("A decode worker crashes: KV blocks that prefill keeps for it")
    figure.set_size_inches(10, 3.8)
    kept, usage = figure.subplots(1, 2)
    seconds = [second - CRASH_S for second in range(int(END_S))]
    for run, label, colour in (
        (lease, "lease, 30 s", LINE_COLOURS[0]),
        (fixed, f"fixed, {FIXED_S:.0f} s", LINE_COLOURS[1]),
    ):
        kept.plot(seconds, run.pinned, color=colour, label=label)
        usage.plot(seconds, [100 * share for share in run.kv_usage], color=colour, label=label)
    for axes in (kept, usage):
        axes.axvline(0, color=GREY, linestyle=":", label="crash")
        axes.set_xlabel("seconds after the crash")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
    kept.set_ylabel("blocks kept for the crashed engine")
    usage.set_ylabel("prefill's KV blocks in use, %")
    kept.legend(loc="center", fontsize=8)
    figure.savefig(path, dpi=DPI, metadata={"Software": None})


def _pair(values: tuple[float, float]) -> str:
    return f"{values[0]:.2f} / {values[1]:.2f} ms"
