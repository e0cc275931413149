"""The two plots of a profile, latency against throughput per GPU by engine size; needs the extra ``plots``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path

from matplotlib.figure import Figure

from penstock.performance.recommend import (
    DecodeChoice,
    PrefillChoice,
    Recommendation,
    decode_choices,
    prefill_choice,
)
from penstock.performance.sweep import Sweep
from penstock.report.drawing import BLACK, LINE_COLOURS, blank_figure, legend_above, save_all

PREFILL_PICTURE = "prefill_performance.png"
DECODE_PICTURE = "decode_performance.png"


def draw_all(sweep: Sweep, recommendation: Recommendation, directory: Path) -> list[Path]:
    """Write both plots, and return their paths."""
    targets = recommendation.targets
    prefill = partial(
        _figure,
        f"Prefill: TTFT and throughput of {targets.isl:,} prompt tokens",
        ("TTFT (ms)", "prompt tokens / s / GPU"),
        {
            engine.gpus: [prefill_choice(engine, targets, after_s=recommendation.prefill.after_s)]
            for engine in sweep.engines
        },
        recommendation.prefill,
        targets.ttft_s * 1000,
    )
    decode = partial(
        _figure,
        f"Decode: ITL and throughput at {targets.context:,.0f} tokens of context",
        ("ITL (ms)", "output tokens / s / GPU"),
        {engine.gpus: decode_choices(engine, targets) for engine in sweep.engines},
        recommendation.decode,
        targets.itl_s * 1000,
    )
    return save_all([(PREFILL_PICTURE, prefill), (DECODE_PICTURE, decode)], directory)


def _figure(
    title: str,
    names: tuple[str, str],
    choices: Mapping[int, Sequence[PrefillChoice | DecodeChoice]],
    chosen: PrefillChoice | DecodeChoice,
    target_ms: float,
) -> Figure:
    """Draw a line per engine size over its batches; a line of one point is a dot."""
    figure = blank_figure(title)
    axes = figure.subplots()
    for (gpus, points), colour in zip(choices.items(), cycle(LINE_COLOURS), strict=False):
        rates = [each.tokens_per_s_per_gpu for each in points]
        axes.plot(list(map(_latency_ms, points)), rates, "o-", color=colour, label=f"TP{gpus}")
    axes.axvline(target_ms, color=BLACK, linestyle="--", label=f"target {target_ms:g} ms")
    place = _latency_ms(chosen), chosen.tokens_per_s_per_gpu
    axes.plot(*place, "o", markersize=15, fillstyle="none", color=BLACK, label="suggested")
    axes.set(xlabel=names[0], ylabel=names[1])
    axes.margins(0.12)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    legend_above(axes)
    return figure


def _latency_ms(choice: PrefillChoice | DecodeChoice) -> float:
    return 1000 * (choice.ttft_s if isinstance(choice, PrefillChoice) else choice.itl_s)
