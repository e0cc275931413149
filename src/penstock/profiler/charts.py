"""The two plots of a profile, latency against throughput per GPU by engine size; needs the extra ``plots``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import cycle
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from penstock.performance.recommend import DecodeChoice, Recommendation, decode_choices, prefill_choice
from penstock.performance.sweep import Sweep
from penstock.report.drawing import BLACK, GREY, LINE_COLOURS, blank_figure, legend_above, save_all

PREFILL_PICTURE = "prefill_performance.png"
DECODE_PICTURE = "decode_performance.png"


def draw_all(sweep: Sweep, recommendation: Recommendation, directory: Path) -> list[Path]:
    """Write both plots, and return their paths."""
    drawn = {PREFILL_PICTURE: prefill_figure, DECODE_PICTURE: decode_figure}
    return save_all(((name, partial(draw, sweep, recommendation)) for name, draw in drawn.items()), directory)


def prefill_figure(sweep: Sweep, recommendation: Recommendation) -> Figure:
    """TTFT against prompt tokens per second and GPU, a point per engine size."""
    targets = recommendation.targets
    figure = blank_figure(f"Prefill: TTFT and throughput of {targets.isl:,} prompt tokens")
    axes = figure.subplots()
    for engine, colour in zip(sweep.engines, cycle(LINE_COLOURS), strict=False):
        if engine.prefill:
            choice = prefill_choice(engine, targets)
            place, label = (choice.ttft_s * 1000, choice.tokens_per_s_per_gpu), f"TP{engine.gpus}"
            axes.plot(*place, "o", markersize=8, color=colour, label=label)
    chosen = recommendation.prefill
    _finish(
        axes,
        (chosen.ttft_s * 1000, chosen.tokens_per_s_per_gpu),
        ("TTFT", targets.ttft_s * 1000, "prompt tokens / s / GPU"),
    )
    return figure


def decode_figure(sweep: Sweep, recommendation: Recommendation) -> Figure:
    """ITL against output tokens per second and GPU, a line per engine size over requests in flight."""
    targets = recommendation.targets
    figure = blank_figure(f"Decode: ITL and throughput at {targets.context:,.0f} tokens of context")
    axes = figure.subplots()
    for engine, colour in zip(sweep.engines, cycle(LINE_COLOURS), strict=False):
        if engine.decode:
            choices = decode_choices(engine, targets)
            itls_ms = [choice.itl_s * 1000 for choice in choices]
            rates = [choice.tokens_per_s_per_gpu for choice in choices]
            axes.plot(itls_ms, rates, "o-", color=colour, linewidth=1.2, label=f"TP{engine.gpus}")
            _label_ends(axes, choices, itls_ms, rates)
    chosen = recommendation.decode
    _finish(
        axes,
        (chosen.itl_s * 1000, chosen.tokens_per_s_per_gpu),
        ("ITL", targets.itl_s * 1000, "output tokens / s / GPU"),
    )
    return figure


def _label_ends(
    axes: Axes, choices: Sequence[DecodeChoice], itls_ms: list[float], rates: list[float]
) -> None:
    for place in {0, len(choices) - 1}:
        axes.annotate(
            f"{choices[place].concurrency:,.0f} in flight",
            (itls_ms[place], rates[place]),
            textcoords="offset points",
            xytext=(0, 9),
            ha="center",
            fontsize=8,
            color=GREY,
        )


def _finish(axes: Axes, chosen: tuple[float, float], names: tuple[str, float, str]) -> None:
    latency, target_ms, throughput = names
    axes.axvline(target_ms, color=BLACK, linestyle="--", linewidth=1, label=f"target {target_ms:g} ms")
    axes.plot(*chosen, "o", markersize=15, fillstyle="none", color=BLACK, label="suggested")
    axes.set_xlabel(f"{latency} (ms)")
    axes.set_ylabel(throughput)
    axes.margins(0.12)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    legend_above(axes)
