"""Draw what bench/capacity/RESULTS.md shows: the TTFT percentile by the formulas alongside what the simulator does.

    python bench/capacity.py docs/images/capacity.png

Prompts of 3,000 tokens and answers of 150, Poisson arrivals for 300 s, three prefill and two decode workers of an A100 with
Llama 8B. The formulas are told the time of the KV link.
"""

import argparse
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from penstock.api import Role
from penstock.performance.capacity import OfferedLoad, figures
from penstock.performance.recommend import Targets
from penstock.profiler.files import engine_sweep
from penstock.report.drawing import BLUE, DPI, VERMILION, blank_figure, legend_above
from penstock.simulator.scenario import PoolSpec, ProfiledModel, Scenario, unbounded_router
from penstock.simulator.simulation import Simulation
from penstock.workload.traces import TraceRequest

PROFILE = "a100-llama-8b-bf16-tp1"
TARGETS = Targets(isl=3000, osl=150, ttft_s=0.5, itl_s=0.03)
PREFILL, DECODE = 3, 2
TRANSFER_S = 0.005 + TARGETS.isl * 131_072 / 25e9
SIMULATED_RPS = (2, 5, 8, 10, 12, 13, 14)


def predicted_s(rps: float, quantile: float) -> float:
    """The percentile of TTFT by docs/capacity.md."""
    load = OfferedLoad(rps, quantile=quantile, transfer_s=TRANSFER_S)
    (engine,) = figures(engine_sweep(PROFILE), TARGETS, load)
    return engine.wait_s(PREFILL) + engine.ttft_s + engine.first_token_s(DECODE)


def simulated_s(rps: float) -> np.ndarray:
    """TTFT of every request of a simulated graph."""
    times = np.cumsum(np.random.default_rng(1).exponential(1 / rps, size=int(rps * 300)))
    requests = [
        TraceRequest(float(at), TARGETS.isl, TARGETS.osl, tuple(range(line * 10, line * 10 + 6)), line)
        for line, at in enumerate(times, start=1)
    ]
    model = ProfiledModel(PROFILE)
    pools = (PoolSpec(Role.PREFILL, PREFILL, model), PoolSpec(Role.DECODE, DECODE, model))
    return (
        Simulation(Scenario(pools=pools, router=unbounded_router("least-loaded")), requests)
        .run()
        .requests.ttft_s
    )


def draw() -> Figure:
    """Lines by the formulas, dots by the simulator."""
    figure = blank_figure("TTFT of three prefill workers: formulas and simulator")
    axes = figure.subplots()
    rates = np.linspace(0.5, 15, 100)
    found = {rps: simulated_s(rps) for rps in SIMULATED_RPS}
    for quantile, colour in ((0.9, BLUE), (0.99, VERMILION)):
        axes.plot(
            rates,
            [predicted_s(rps, quantile) * 1000 for rps in rates],
            color=colour,
            label=f"p{quantile * 100:.0f}, formulas",
        )
        dots = [float(np.quantile(ttfts_s, quantile)) * 1000 for ttfts_s in found.values()]
        axes.plot(list(found), dots, "o", color=colour, label=f"p{quantile * 100:.0f}, simulated")
        for rps, dot in zip(found, dots, strict=True):
            print(
                f"p{quantile * 100:.0f} at {rps} rps: formulas {predicted_s(rps, quantile) * 1000:.0f} ms, simulated {dot:.0f} ms"
            )
    axes.set_xlabel("requests / s")
    axes.set_ylabel("TTFT (ms)")
    axes.set_ylim(0, 1500)
    axes.grid(alpha=0.25)
    legend_above(axes)
    return figure


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("picture", type=Path, help="where the picture goes")
    picture = parser.parse_args().picture
    draw().savefig(picture, dpi=DPI)
