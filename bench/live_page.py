"""Shows what `live_proof.py` found: figures side by side, how late the machine was, and a picture."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from penstock.report.drawing import DPI, LINE_COLOURS, blank_figure, legend_above
from penstock.workload.statistics import LAG_FLOOR_S, LAG_SHARE_OF_TTFT

NEAR = 0.10
GOALS = ("TTFT p50", "TTFT p90", "TTFT p99")


@dataclass(frozen=True, slots=True)
class Request:
    """What became of one request on one side.

    Attributes:
        ttft_s, e2e_s: Simulated seconds from its arrival; None where it has failed.
        queued_s: Simulated seconds that it waited in the router.
        cached_tokens: Prompt tokens found in a cache.
        prompt_tokens, output_tokens: Lengths.
        worker: That computed the prompt.
        decoder: That decoded; empty where it was the same.
    """

    ttft_s: float | None
    e2e_s: float | None
    queued_s: float
    cached_tokens: int
    prompt_tokens: int
    output_tokens: int
    worker: str
    decoder: str


@dataclass(slots=True)
class Side:
    """One run.

    Attributes:
        requests: In order of arrival.
        itl_p50_s: Of all gaps between tokens, simulated seconds.
        lag: p99 of each process's own lateness, simulated seconds; live only.
        cpu: Cores that each process kept busy; live only.
    """

    requests: list[Request]
    itl_p50_s: float
    lag: dict[str, float] = field(default_factory=dict)
    cpu: dict[str, float] = field(default_factory=dict)

    def figures(self) -> dict[str, float]:
        """Return what is compared: seconds, and the share of prompt tokens found in a cache."""
        ttft = [each.ttft_s for each in self.requests if each.ttft_s is not None]
        e2e = [each.e2e_s for each in self.requests if each.e2e_s is not None]
        ranks = np.percentile(ttft, (50, 90, 99), method="inverted_cdf")
        tpot = [
            (each.e2e_s - each.ttft_s) / (each.output_tokens - 1)
            for each in self.requests
            if each.ttft_s is not None and each.e2e_s is not None and each.output_tokens > 1
        ]
        prompt = sum(each.prompt_tokens for each in self.requests)
        return {
            **dict(zip(GOALS, map(float, ranks), strict=True)),
            "TTFT mean": statistics.fmean(ttft),
            "ITL p50": self.itl_p50_s,
            "TPOT p50": statistics.median(tpot),
            "E2E p50": statistics.median(e2e),
            "hits": sum(each.cached_tokens for each in self.requests) / prompt,
        }


def lag_bound_s(ttft_p50_s: float) -> float:
    """Return the lateness above which a process distorts such a TTFT, simulated seconds: the load client's rule."""
    return max(LAG_FLOOR_S, LAG_SHARE_OF_TTFT * ttft_p50_s)


def compare(
    policy: str, simulated: Side, variants: Sequence[dict[str, float]], sides: Sequence[Side]
) -> dict[str, Any]:
    """Return medians of both sides' runs, the range of the simulated ones, and every request."""
    models = [simulated.figures(), *variants]
    runs = [side.figures() for side in sides]
    figures: dict[str, dict[str, Any]] = {}
    for name in models[0]:
        expected = statistics.median(each[name] for each in models)
        measured = [each[name] for each in runs]
        middle = statistics.median(measured)
        # shares are compared in points, times as ratios
        off = middle - expected if name == "hits" else middle / expected - 1
        figures[name] = {
            "simulated": expected,
            "range": [bound(each[name] for each in models) for bound in (min, max)],
            "live": middle,
            "live_runs": measured,
            "difference": off,
            "is_near": abs(off) <= NEAR,
        }
    lags = _medians([side.lag for side in sides])
    bound_s = lag_bound_s(figures["TTFT p50"]["live"])
    return {
        "policy": policy,
        "figures": figures,
        "is_near": all(figures[name]["is_near"] for name in GOALS),
        "lag_p99_s": lags,
        "late": [name for name, lag_s in lags.items() if lag_s > bound_s],
        "cpu": _medians([side.cpu for side in sides]),
        "simulated": [asdict(each) for each in simulated.requests],
        "live": [[asdict(each) for each in side.requests] for side in sides],
        "same_worker": _share(simulated, sides, "worker"),
        "same_cached_tokens": _share(simulated, sides, "cached_tokens"),
    }


def _medians(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(each[name] for each in runs if name in each) for name in runs[0]}


def _share(simulated: Side, sides: Sequence[Side], name: str) -> float:
    """Return how many requests are alike, over all live runs."""
    ours = _named([getattr(each, name) for each in simulated.requests])
    alike = [
        mine == theirs
        for side in sides
        for mine, theirs in zip(ours, _named([getattr(each, name) for each in side.requests]), strict=True)
    ]
    return sum(alike) / len(alike)


def _named(values: Sequence[str | int]) -> list[int]:
    """Return numbers as they are, and names by the order in which they appear: equal workers may be swapped."""
    places: dict[str, int] = {}
    return [each if isinstance(each, int) else places.setdefault(each, len(places)) for each in values]


def show(found: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Print one policy's table."""
    rate = f"{arguments.rate:g}/s" if arguments.rate else "the trace's rate"
    print(
        f"\n{found['policy']}: {len(found['simulated'])} rows of {arguments.trace} at {rate} on {arguments.instances},"
        f" speed {arguments.speed:g}, {arguments.runs} live run(s)"
    )
    print(f"{'':<10}{'live':>9}{'simulated':>11}{'difference':>12}   {'its range':<15}live runs")
    for name, each in found["figures"].items():
        unit, style = (
            (1, ".3f") if name == "hits" else (1000, ".1f" if name in {"ITL p50", "TPOT p50"} else ".0f")
        )
        off = f"{each['difference']:+.3f}" if name == "hits" else f"{each['difference']:+.1%}"
        runs, ends = (
            " ".join(f"{unit * one:{style}}" for one in each[key]) for key in ("live_runs", "range")
        )
        here, there = (f"{unit * each[side]:{style}}" for side in ("live", "simulated"))
        print(f"{name:<10}{here:>9}{there:>11}{off:>12}{' ' if each['is_near'] else '*':<3}{ends:<15}{runs}")
    print("milliseconds, modelled; hits: share of prompt tokens found in a cache; *: more than 10% off;")
    print("simulated: median and range of the runs whose arrivals are moved by milliseconds")
    print(
        f"same worker {found['same_worker']:.0%}, same cached tokens {found['same_cached_tokens']:.0%} of the requests"
    )
    lags = ", ".join(f"{name} {1000 * lag:.1f}" for name, lag in found["lag_p99_s"].items())
    print(f"lateness p99, ms: {lags}")
    late = ", ".join(found["late"])
    print(f"TTFT p50, p90, p99 within 10%: {'yes' if found['is_near'] else 'no'}; ", end="")
    print(
        f"by the load client's own rule this machine was too busy to tell: {late}"
        if late
        else "all were on time"
    )
    print("cores in use: " + ", ".join(f"{name} {share:.2f}" for name, share in found["cpu"].items()))


def draw(found: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw both sides' TTFT distributions, a panel per policy."""
    figure = blank_figure("Time to first token: the same requests in real and in virtual time")
    figure.set_size_inches(10.0, 4.2)
    for place, each in enumerate(found):
        axes = figure.add_subplot(1, len(found), place + 1)
        _distribution(axes, each["simulated"], LINE_COLOURS[1], "simulated", width=3.0)
        runs = len(each["live"])
        for number, rows in enumerate(each["live"]):
            label = f"live, {runs} run(s)" if number == 0 else None
            _distribution(axes, rows, LINE_COLOURS[0], label, width=1.0)
        axes.set_title(each["policy"], fontsize=10, loc="right")
        axes.set_xlabel("TTFT, simulated seconds")
        axes.set_ylabel("share of requests" if place == 0 else "")
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_ylim(0, 1)
        axes.grid(visible=True, alpha=0.3)
        legend_above(axes)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)


def _distribution(
    axes: Axes, rows: Sequence[dict[str, Any]], colour: str, label: str | None, *, width: float
) -> None:
    ttft = np.sort([each["ttft_s"] for each in rows if each["ttft_s"] is not None])
    shares = np.arange(1, len(ttft) + 1) / len(ttft)
    axes.step(ttft, shares, color=colour, label=label, linewidth=width, where="post")
