"""The part of RESULTS.md about rejection, and its picture."""

from __future__ import annotations

from pathlib import Path

from rejection import (
    LOOSE_S,
    MOST_TTFT,
    OUTPUT_TOKENS,
    PRODUCT,
    PROFILE,
    PROMPT_TOKENS,
    RATE,
    TARGET_S,
    THRESHOLDS,
    WORKERS,
    Sweep,
)

from penstock.report.drawing import DPI, GREY, LINE_COLOURS, blank_figure


def rejection_verdicts(found: Sweep) -> list[tuple[str, str, bool]]:
    """Return what was asked, what was measured and whether it holds."""
    worst = max(point.p99 for point in found.rejecting)
    pairs = list(zip(found.without, found.rejecting, strict=True))
    least = min(on.goodput_rps - off.goodput_rps for off, on in pairs)
    return [
        (
            f"accepted p99 TTFT within {MOST_TTFT:g}x of the unloaded",
            f"{worst:.2f}x at most",
            worst <= MOST_TTFT,
        ),
        (
            "goodput with rejection at least that without, at every load",
            f"{least:+.2f}/s at least",
            least >= 0,
        ),
    ]


def rejection_section(found: Sweep, *, seconds: float) -> list[str]:
    """Return the lines of the sweep over loads."""
    lines = [
        "## Rejection",
        "",
        (
            f"{WORKERS} aggregated workers of profile `{PROFILE}` behind the router's core (policy least-loaded), "
            f"{seconds / 60:g} minutes of synthetic Poisson arrivals, seed 0: prompts of {PROMPT_TOKENS}, outputs of "
            f"{OUTPUT_TOKENS} tokens in the mean; 1x is {RATE:g} requests/s. With rejection a worker is busy above "
            f"{THRESHOLDS.active_decode_blocks_threshold:.0%} of its KV blocks or while it has any prompt to compute "
            f"(activePrefillTokensThreshold {THRESHOLDS.active_prefill_tokens_threshold}), and a request is rejected while all are. "
            f"TTFT without load has a p99 of {1000 * found.unloaded_s:.0f} ms. Goodput counts requests with a TTFT of at most "
            f"{MOST_TTFT:g} times that."
        ),
        "",
        f"| load | p99 TTFT / unloaded: off | on | goodput, requests/s: off | on | with TTFT of {LOOSE_S:g} s: off | on | rejected |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for off, on in zip(found.without, found.rejecting, strict=True):
        lines.append(
            f"| {off.factor:g}x | {off.p99:.2f} | {on.p99:.2f} | {off.goodput_rps:.2f} | {on.goodput_rps:.2f} | "
            f"{off.loose_rps:.2f} | {on.loose_rps:.2f} | {on.rejected:.1%} |"
        )
    lines += ["", "**Held to:**", ""]
    lines += [
        f"- {what}: {measured}, {'holds' if holds else 'does not hold'}"
        for what, measured, holds in rejection_verdicts(found)
    ]
    worse = [
        f"{off.factor:g}x"
        for off, on in zip(found.without, found.rejecting, strict=True)
        if off.loose_rps > on.loose_rps
    ]
    if worse:
        lines += [
            "",
            (
                f"The threshold is the price of that TTFT: who would wait {LOOSE_S:g} s is served less with it at "
                f"{', '.join(worse)}, and should set it higher."
            ),
        ]
    return [*lines, *_product_section(found), "", "![](rejection.png)"]


def _product_section(found: Sweep) -> list[str]:
    queue, admission = PRODUCT.prefill_queue, PRODUCT.admission
    lines = [
        "",
        (
            f"With the product's own queue (policy {PRODUCT.policy}, {queue.worker_tokens} prompt tokens given to a worker at a "
            f"time, at most {queue.max_wait_seconds:g} s) and default thresholds ({admission.active_decode_blocks_threshold:.0%} "
            f"of the KV blocks, {admission.active_prefill_tokens_threshold:,} prompt tokens a worker). The default order "
            f"`{queue.order}` serves first who can still have a first token within `slo.ttft` ({TARGET_S:g} s), so that under "
            "overload most are within it and the late ones, which make the p99, wait on until the queue's bound; by arrival "
            "all wait for the thresholds' prompts, and hardly any is in time."
        ),
        "",
        (
            f"| load | p99 TTFT, s | with TTFT of {TARGET_S:g} s, requests/s | rejected | by arrival: p99 TTFT, s | "
            f"with TTFT of {TARGET_S:g} s, requests/s | rejected |"
        ),
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for own, other in zip(found.product, found.by_arrival, strict=True):
        cells = " | ".join(
            f"{each.p99 * found.unloaded_s:.2f} | {each.target_rps:.2f} | {each.rejected:.1%}"
            for each in (own, other)
        )
        lines.append(f"| {own.factor:g}x | {cells} |")
    return lines


def draw_rejection(found: Sweep, path: Path) -> None:
    """Draw accepted TTFT and goodput over the load."""
    figure = blank_figure("Rejection off and on")
    figure.set_size_inches(9, 3.4)
    ttft, goodput = figure.subplots(1, 2)
    for points, colour, label in zip(
        (found.without, found.rejecting), LINE_COLOURS, ("off", "on"), strict=False
    ):
        loads = [point.factor for point in points]
        ttft.plot(loads, [point.p99 for point in points], "o-", color=colour, label=label)
        goodput.plot(loads, [point.goodput_rps for point in points], "o-", color=colour, label=label)
    ttft.axhline(MOST_TTFT, color=GREY, linestyle=":")
    ttft.set_yscale("log")
    ttft.set_ylabel("accepted p99 TTFT / unloaded p99")
    goodput.set_ylabel("goodput, requests/s")
    goodput.set_ylim(bottom=0)
    for axes in (ttft, goodput):
        axes.set_xlabel("load, times what the workers serve")
        axes.grid(alpha=0.25)
        axes.legend()
    figure.savefig(path, dpi=DPI, metadata={"Software": None})
