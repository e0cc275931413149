"""The measured points as tables for a terminal: what the two plots draw."""

from __future__ import annotations

from rich.table import Table

from penstock.performance.recommend import Targets, decode_choices, prefill_choice
from penstock.performance.sweep import Sweep


def prefill_table(sweep: Sweep, targets: Targets) -> Table:
    """Return TTFT and throughput per GPU at the target's prompt length, by engine size."""
    table = Table(title=f"Prefill, {targets.isl:,} prompt tokens", title_justify="left", box=None)
    for heading in ("TP", "TTFT ms", "tokens/s/GPU", "in target"):
        table.add_column(heading, justify="right")
    for engine in sweep.engines:
        if engine.prefill:
            choice = prefill_choice(engine, targets)
            table.add_row(
                str(choice.gpus),
                f"{choice.ttft_s * 1000:.1f}",
                f"{choice.tokens_per_s_per_gpu:,.0f}",
                "yes" if choice.meets else "no",
            )
    return table


def decode_table(sweep: Sweep, targets: Targets) -> Table:
    """Return ITL and throughput per GPU at the target's context, by engine size and requests in flight."""
    table = Table(title=f"Decode, {targets.context:,.0f} tokens of context", title_justify="left", box=None)
    for heading in ("TP", "in flight", "KV", "ITL ms", "tokens/s/GPU", "in target"):
        table.add_column(heading, justify="right")
    for engine in sweep.engines:
        for choice in decode_choices(engine, targets) if engine.decode else ():
            table.add_row(
                str(choice.gpus),
                f"{choice.concurrency:,.0f}",
                f"{choice.kv_usage:.0%}",
                f"{choice.itl_s * 1000:.1f}",
                f"{choice.tokens_per_s_per_gpu:,.0f}",
                "yes" if choice.meets else "no",
            )
    return table
