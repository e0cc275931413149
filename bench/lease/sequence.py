"""The sequence of messages around one lease, as a picture for the documentation: `python bench/lease/sequence.py`."""

from __future__ import annotations

from pathlib import Path

from penstock.report.drawing import DPI, GREY, LINE_COLOURS, blank_figure

LANES = {"router": 0.0, "prefill worker": 1.0, "decode worker": 2.0}
HAPPY = (
    ("router", "prefill worker", "prompt, do_remote_decode"),
    ("prefill worker", "prefill worker", "prefill; lease until 30 s"),
    ("prefill worker", "router", "kv_transfer_params"),
    ("router", "decode worker", "prompt, do_remote_prefill"),
    ("decode worker", "decode worker", "queued; tracked from here on"),
    ("decode worker", "prefill worker", "heartbeat at 15 s: until 35 s"),
    ("decode worker", "prefill worker", "heartbeat at 20 s: until 40 s"),
    ("prefill worker", "decode worker", "KV transfer"),
    ("decode worker", "prefill worker", "read, from each rank"),
    ("prefill worker", "prefill worker", "blocks free at once"),
)
CRASH = (
    *HAPPY[:5],
    ("decode worker", "prefill worker", "heartbeat at 15 s: until 35 s"),
    ("decode worker", "prefill worker", "heartbeat at 20 s: until 40 s"),
    ("decode worker", "decode worker", "crashes"),
    ("prefill worker", "prefill worker", "40 s: lease over, blocks free"),
    ("router", "prefill worker", "prompt again"),
)
TARGET = Path(__file__).parents[2] / "docs" / "images" / "lease-sequence.png"


def main() -> None:
    """Draw both sequences side by side."""
    figure = blank_figure("A lease of 30 s: decode reads in time, and decode crashes")
    figure.set_size_inches(12, 5.2)
    for axes, steps in zip(figure.subplots(1, 2), (HAPPY, CRASH), strict=True):
        bottom = len(steps) + 0.5
        for name, at in LANES.items():
            axes.plot([at, at], [0, bottom], color=GREY, linewidth=1)
            axes.text(at, -0.4, name, ha="center", fontsize=9, weight="bold")
        for row, (source, target, text) in enumerate(steps, 1):
            begin, end = LANES[source], LANES[target]
            own = begin == end
            colour = LINE_COLOURS[1] if "heartbeat" in text else LINE_COLOURS[0]
            if not own:
                axes.annotate(
                    "", (end, row), (begin, row), arrowprops={"arrowstyle": "->", "color": colour, "lw": 1.4}
                )
            at = begin if own else (begin + end) / 2
            axes.text(
                at, row - (0 if own else 0.12), text, ha="center", va="center" if own else "bottom", fontsize=8,
                bbox={"facecolor": "white", "edgecolor": GREY, "pad": 2} if own else None,
            )  # fmt: skip
        axes.set_xlim(-0.55, 2.55)
        axes.set_ylim(bottom, -0.9)
        axes.axis("off")
    figure.savefig(TARGET, dpi=DPI, metadata={"Software": None})


if __name__ == "__main__":
    main()
