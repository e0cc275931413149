"""The two plots of a profile, latency against throughput per GPU by engine size; needs the extra ``plots``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path

from matplotlib.figure import Figure

from penstock.performance.recommend import Recommendation, decode_choices, prefill_choice
from penstock.performance.sweep import Sweep
from penstock.report.drawing import BLACK, GREY, LINE_COLOURS, blank_figure, legend_above, save_all

PREFILL_PICTURE = "prefill_performance.png"
DECODE_PICTURE = "decode_performance.png"

_Point = tuple[float, float, str]
"""Latency in seconds, tokens/s per GPU, and what is written beside it."""


def draw_all(sweep: Sweep, recommendation: Recommendation, directory: Path) -> list[Path]:
    """Write both plots, and return their paths."""
    targets, prefill, decode = recommendation.targets, recommendation.prefill, recommendation.decode
    ttfts: dict[int, list[_Point]] = {}
    itls: dict[int, list[_Point]] = {}
    for engine in sweep.engines:
        choice = prefill_choice(engine, targets)
        ttfts[engine.gpus] = [(choice.ttft_s, choice.tokens_per_s_per_gpu, "")]
        batches = decode_choices(engine, targets)
        ends = (batches[0], batches[-1])
        itls[engine.gpus] = [
            (
                each.itl_s,
                each.tokens_per_s_per_gpu,
                f"{each.concurrency:,.0f} in flight" if each in ends else "",
            )
            for each in batches
        ]
    return save_all(
        [
            (
                PREFILL_PICTURE,
                lambda: _figure(
                    f"Prefill: TTFT and throughput of {targets.isl:,} prompt tokens",
                    ttfts,
                    (prefill.ttft_s, prefill.tokens_per_s_per_gpu),
                    targets.ttft_s,
                    ("TTFT (ms)", "prompt tokens / s / GPU"),
                ),
            ),
            (
                DECODE_PICTURE,
                lambda: _figure(
                    f"Decode: ITL and throughput at {targets.context:,.0f} tokens of context",
                    itls,
                    (decode.itl_s, decode.tokens_per_s_per_gpu),
                    targets.itl_s,
                    ("ITL (ms)", "output tokens / s / GPU"),
                ),
            ),
        ],
        directory,
    )


def _figure(
    title: str,
    lines: Mapping[int, Sequence[_Point]],
    chosen: tuple[float, float],
    target_s: float,
    names: tuple[str, str],
) -> Figure:
    """Draw a line per engine size; a line of one point is a dot."""
    figure = blank_figure(title)
    axes = figure.subplots()
    for (gpus, points), colour in zip(lines.items(), cycle(LINE_COLOURS), strict=False):
        latencies_ms = [latency_s * 1000 for latency_s, _, _ in points]
        axes.plot(
            latencies_ms,
            [rate for _, rate, _ in points],
            "o-",
            color=colour,
            linewidth=1.2,
            label=f"TP{gpus}",
        )
        for latency_s, rate, text in points:
            axes.annotate(
                text,
                (latency_s * 1000, rate),
                textcoords="offset points",
                xytext=(0, 9),
                ha="center",
                fontsize=8,
                color=GREY,
            )
    axes.axvline(target_s * 1000, color=BLACK, linestyle="--", label=f"target {target_s * 1000:g} ms")
    axes.plot(
        chosen[0] * 1000, chosen[1], "o", markersize=15, fillstyle="none", color=BLACK, label="suggested"
    )
    axes.set(xlabel=names[0], ylabel=names[1])
    axes.margins(0.12)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    legend_above(axes)
    return figure
