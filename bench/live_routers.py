"""Holds the simulator's word on several routers against real ones: 1, 2 and 4 processes before 8 simulated workers.

    python bench/live_routers.py [--routers 1,2,4] [--trace FILE] [--rows 400] [--rate 28] [--speed 0.5] [--json]

Each policy with each number of routers, of which one picks, runs as processes and in virtual time, with the same arrivals,
lengths and texts. What is compared is the order in which these ways come, by median TTFT and by hits, of those that the simulator tells apart
however arrivals are moved by a machine's lateness. Answers are cut to a few tokens, so that sending them does not
load the machine that is to be on time. A way of which a process was later than the load client's rule allows is left out.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import live_page
import live_proof
import servers
from options import read_options
from rich.console import Console
from rich.table import Table

from penstock.api.manifests import load_graph
from penstock.workload.traces import TraceRequest

WORKERS = 8
PROFILE = "a100-qwen2.5-7b-bf16-tp1"
TTFT, HITS = "TTFT p50", "hits"
_APART = 0.05
"""Chosen: by how much two ranges must lie apart to be told apart."""


@dataclass(frozen=True, slots=True)
class Way:
    """How routers work together.

    Attributes:
        policy: Of each.
        routers: >= 1.
    """

    policy: str
    routers: int

    @property
    def title(self) -> str:
        """Return what the tables call it."""
        return f"{self.policy}, {self.routers}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One way on both sides.

    Attributes:
        way: Which.
        live: Figures of the processes.
        simulated: Figures in virtual time.
        variants: Those with arrivals moved.
        late: Processes that were later than the load client's rule allows.
        lag_s: Worst lateness of any process, simulated seconds.
    """

    way: Way
    live: dict[str, float]
    simulated: dict[str, float]
    variants: list[dict[str, float]]
    late: list[str]
    lag_s: float

    def bounds(self, name: str) -> tuple[float, float]:
        """Return the range of a simulated figure over all arrivals tried."""
        values = [each[name] for each in (self.simulated, *self.variants)]
        return min(values), max(values)


def ways(policies: Sequence[str], counts: Sequence[int]) -> list[Way]:
    """Return every policy with each number of routers."""
    return [Way(policy, count) for policy in policies for count in counts]


def outcome(arguments: argparse.Namespace, way: Way, requests: Sequence[TraceRequest]) -> Outcome:
    """Run one way on both sides."""
    text = servers.manifest(
        "live",
        live_proof.MODEL,
        {"aggregated": WORKERS},
        policy=way.policy,
        profile=PROFILE,
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph.yaml"
        path.write_text(text)
        graph = load_graph(path)
        side = live_proof.live(
            graph, path, requests, seed=arguments.seed, speed=arguments.speed, routers=way.routers
        )
    seed, most_s = arguments.seed, arguments.jitter_ms / 1000
    moved = [live_proof.moved(requests, most_s, number) for number in range(arguments.variants)]
    figures, *variants = [
        live_proof.simulate(graph, each, seed, routers=way.routers).figures() for each in (requests, *moved)
    ]
    live = side.figures()
    bound_s = live_page.lag_bound_s(live[TTFT])
    late = [name for name, lag_s in side.lag.items() if lag_s > bound_s]
    return Outcome(way, live, figures, variants, late, max(side.lag.values()))


@dataclass(frozen=True, slots=True)
class Pair:
    """Two ways that the simulator tells apart by one figure.

    Attributes:
        figure: Which.
        smaller, larger: Titles, by the simulator.
        simulated, live: The larger one's figure over the smaller one's.
    """

    figure: str
    smaller: str
    larger: str
    simulated: float
    live: float

    @property
    def agrees(self) -> bool:
        """Whether the processes come in the same order."""
        return self.live > 1


def pairs(found: Sequence[Outcome], figure: str) -> list[Pair]:
    """Return the pairs of ways on time whose ranges lie apart in the simulator."""
    told = []
    for one, other in combinations([each for each in found if not each.late], 2):
        low, high = sorted((one, other), key=lambda each: each.simulated[figure])
        if low.bounds(figure)[1] * (1 + _APART) < high.bounds(figure)[0]:
            ratios = (high.simulated[figure] / low.simulated[figure], high.live[figure] / low.live[figure])
            told.append(Pair(figure, low.way.title, high.way.title, *ratios))
    return told


def conclusion(found: Sequence[Outcome], told: Sequence[Pair]) -> str:
    """Return what the run shows, or why it shows nothing."""
    late = [f"{each.way.title} ({', '.join(each.late)})" for each in found if each.late]
    left_out = f"; left out, since this machine was too late: {'; '.join(late)}" if late else ""
    if not told:
        return f"no conclusion: no two ways on time are told apart by the simulator{left_out}"
    wrong = [pair for pair in told if not pair.agrees]
    if not wrong:
        return f"the same order: all {len(told)} pairs that the simulator tells apart{left_out}"
    named = "; ".join(f"{pair.figure} of {pair.smaller} and {pair.larger}" for pair in wrong)
    return f"{len(wrong)} of {len(told)} pairs come in the other order: {named}{left_out}"


def show(found: Sequence[Outcome], told: Sequence[Pair]) -> None:
    """Print both sides and the ratios."""
    console = Console(width=140)
    table = Table(title="live / simulated (range with moved arrivals)", box=None, padding=(0, 2, 0, 0))
    for head in ("routers", TTFT, "TTFT p90", HITS, "latest process"):
        table.add_column(head, no_wrap=True)
    for each in found:
        times = [
            f"{1000 * each.live[name]:,.0f} / {1000 * each.simulated[name]:,.0f} ms"
            f" ({1000 * each.bounds(name)[0]:,.0f} to {1000 * each.bounds(name)[1]:,.0f})"
            for name in (TTFT, "TTFT p90")
        ]
        hits = f"{each.live[HITS]:.1%} / {each.simulated[HITS]:.1%}"
        table.add_row(each.way.title, *times, hits, f"{1000 * each.lag_s:,.0f} ms")
    console.print(table)
    ratios = Table(title="ratios", box=None, padding=(0, 2, 0, 0))
    for head in ("figure", "larger", "smaller", "simulated", "live", ""):
        ratios.add_column(head, no_wrap=True)
    for pair in told:
        ratios.add_row(
            pair.figure,
            pair.larger,
            pair.smaller,
            f"{pair.simulated:.2f}",
            f"{pair.live:.2f}",
            "" if pair.agrees else "other order",
        )
    console.print(ratios)
    console.print(conclusion(found, told))


def main() -> None:
    """Run every way and say whether both sides agree."""
    arguments = read_options(
        __doc__,
        trace="mooncake",
        rows=400,
        rate=28.0,
        spread="poisson",
        max_input_tokens=8192,
        max_output_tokens=16,
        policy="prefix-cost,dualmap",
        routers="1,2,4",
        speed=0.5,
        seed=0,
        jitter_ms=20.0,
        variants=8,
    )
    most = arguments.max_output_tokens
    requests = [
        replace(each, output_tokens=min(most, each.output_tokens))
        for each in live_proof.read_requests(arguments)
    ]
    counts = [int(count) for count in arguments.routers.split(",")]
    found = [outcome(arguments, way, requests) for way in ways(arguments.policy.split(","), counts)]
    told = [*pairs(found, TTFT), *pairs(found, HITS)]
    if arguments.json:
        plain = {"outcomes": [asdict(each) for each in found], "pairs": [asdict(pair) for pair in told]}
        print(json.dumps(plain | {"conclusion": conclusion(found, told)}))
    else:
        show(found, told)
    if not all(pair.agrees for pair in told):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
