"""Reproduces the DualMap paper's evaluation in virtual time, and says where our figures differ and who wins.

    python bench/dualmap/run.py [--conversation FILE] [--arxiv FILE] [--toolagent-surrogate FILE] [--output-dir DIR]

The traces are not in the repository; docs of Mooncake (kvcache-ai/Mooncake, FAST25-release/traces) say where
they are. Without --conversation the packaged slice of 608 rows is run, and every title says so; what
needs a missing trace is left out. The surrogate is synthetic and is called so. About eight minutes on two cores that do
nothing else, most of it for the four whole workloads.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import digest
import page
import setups
from paper import CLAIMS

from penstock_api import QueueOrder
from penstock_simulator.output import open_directory, to_json
from penstock_simulator.scoreboard import attainment_over_time
from penstock_simulator.sweep import RunSpec, goodputs, run_all, simulate, summarise

PARTS = ("comparison", "ours", "ablation", "staleness", "elasticity", "order", "scaling")
WINDOW_S = 60.0
STALE_FLEETS = ((1, 0.0), (2, 0.0), (4, 0.0), (4, 2.0), (8, 0.0), (8, 2.0), (16, 0.0), (16, 2.0))


def attained(spec: RunSpec) -> dict[str, Any]:
    """Return a run's figures with the share in time over time."""
    recording, _, figures = simulate(spec)
    times, shares = attainment_over_time(recording, spec.scenario.slo_s, window_s=WINDOW_S)
    replicas = [(sample.at_s, sample.gpus) for sample in recording.samples[:: int(WINDOW_S)]]
    return {**figures, "attainment": {"until_s": times, "share": shares}, "instances": replicas}


class Bench:
    """Runs part after part and keeps what they give."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.seeds: int = arguments.seeds
        self.processes: int | None = arguments.processes
        traces = setups.Traces(arguments.conversation, arguments.arxiv, arguments.toolagent_surrogate)
        self.cases = setups.cases(traces)
        self.skewed = (
            next((c for c in self.cases if c.key in {"toolagent-7b", "arxiv-7b"} and c.workload.limit), None)
            or self.cases[0]
        )
        self.result: dict[str, Any] = {"parts": {}, "claims": {}}

    def run(self, name: str, title: str, specs: list[RunSpec], work: Any = None) -> dict[str, Any]:
        """Run one part and keep it."""
        began_s = time.monotonic()
        options = {} if work is None else {"work": work}
        runs = run_all(specs, processes=self.processes, **options)
        part = {"title": title, "summary": summarise(runs), "goodput": goodputs(runs), "runs": runs}
        self.result["parts"][name] = part
        print(f"{name}: {len(runs)} runs in {time.monotonic() - began_s:.0f} s", file=sys.stderr, flush=True)
        return part

    def finished(self) -> dict[str, Any]:
        """Return what was measured so far, beside the paper's claims."""
        found = self.result["claims"]
        return {
            "seeds": self.seeds,
            "parts": self.result["parts"],
            "findings": {key: text for key, text in found.items() if key.startswith("staleness")},
            "claims": [
                {"claim": claim.text, "paper": claim.paper, "here": found.get(claim.key, "not run")}
                for claim in CLAIMS
            ],
        }

    def comparison(self) -> None:
        """Every policy on every workload, queues in order of arrival."""
        for case in self.cases:
            specs = setups.comparison(case, self.seeds, order=QueueOrder.ARRIVAL)
            part = self.run(f"comparison.{case.key}", case.title, specs)
            key = {"conversation-7b": "conversation", "toolagent-7b": "toolagent"}.get(case.key)
            if key is not None:
                self.result["claims"] |= digest.comparison_claims(key, part)

    def order(self) -> None:
        """The first workload again with the artefact's queues, and with ours."""
        case = replace(self.cases[0], rates=self.cases[0].rates[2::2])
        told = {
            QueueOrder.HIT_FIRST: "longest cached prefix first",
            QueueOrder.IN_TIME_FIRST: "who can meet the SLO first",
        }
        for order, text in told.items():
            specs = setups.comparison(case, self.seeds, order=order)
            self.run(f"order.{order.value}", f"{case.title}; {text}", specs)

    def ours(self) -> None:
        """What this router does by default, on every workload."""
        for case in self.cases:
            self.run(f"ours.{case.key}", f"our defaults, {case.title}", setups.ours(case, self.seeds))

    def ablation(self) -> None:
        """Each technique off, on the paper's workload and model."""
        case = self.cases[1]
        specs = setups.ablation(case, self.seeds, case.rates[1:3])
        part = self.run("ablation", f"ablation, {case.title}", specs)
        self.result["claims"] |= digest.ablation_claims(part)

    def staleness(self) -> None:
        """Where the crossover lies between looking at all instances and at two."""
        case = self.cases[0]
        routers = setups.contestants(QueueOrder.ARRIVAL)
        chosen = {
            name: routers[name] for name in ("dualmap", "pair-cost", "min-ttft", "preble", "prefix-cost")
        }
        for rate in case.rates[:3]:
            specs = setups.staleness(case, self.seeds, rate, fleets=STALE_FLEETS, routers=chosen)
            title = f"routers side by side, {case.title}, QPS {rate:g}"
            self.result["claims"] |= digest.crossovers(self.run(f"staleness.{rate:g}", title, specs), rate)

    def elasticity(self) -> None:
        """4 to 8 to 4 instances."""
        routers = setups.contestants(QueueOrder.IN_TIME_FIRST)
        chosen = {name: routers[name] for name in ("pair-cost", "prefix-cost")}
        chosen["dualmap"] = setups.router("dualmap")
        specs = setups.elasticity(self.skewed, self.seeds, chosen)
        part = self.run("elasticity", f"elasticity, {self.skewed.title}", specs, attained)
        self.result["claims"] |= elastic_claims(part["runs"])

    def scaling(self) -> None:
        """8 to 64 instances."""
        routers = setups.contestants(QueueOrder.ARRIVAL)
        chosen = {name: routers[name] for name in ("dualmap", "pair-cost", "prefix-cost")}
        case = setups.lighter(self.cases[0])
        specs = setups.scaling(case, min(self.seeds, 2), (8, 16, 32, 64), chosen)
        part = self.run("scaling", f"8 to 64 instances, {case.title}", specs)
        ratios = digest.scaling_ratio(part, "dualmap")
        if 8 in ratios and 32 in ratios:
            self.result["claims"]["scaling.ratio"] = f"{ratios[32] / 32 / (ratios[8] / 8):.2f}"


def elastic_claims(runs: list[dict[str, Any]]) -> dict[str, str]:
    """Return DualMap's share in time after the joins and from the first leave on."""

    def after(label: str, since_s: float) -> str:
        shares = [
            share
            for run in runs
            if run["policy"] == label
            for until_s, share in zip(run["attainment"]["until_s"], run["attainment"]["share"], strict=True)
            if until_s > since_s + WINDOW_S
        ]
        return f"{sum(shares) / len(shares):.1%}" if shares else "-"

    return {
        "elasticity.up": after("dualmap, 4 to 8", 74.0 + 2 * WINDOW_S),
        "elasticity.down": after("dualmap, 8 to 4", 1809.0),
    }


def main() -> None:
    """Run the parts asked for and write what they give."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--conversation", type=Path, help="Mooncake's conversation_trace.jsonl")
    parser.add_argument("--arxiv", type=Path, help="the arXiv trace, or its first rows")
    parser.add_argument("--toolagent-surrogate", type=Path, help="a SYNTHETIC stand-in for Tool&Agent")
    parser.add_argument("--output-dir", type=Path, default=Path("bench-dualmap"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--processes", type=int, help="default: one per core")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    arguments = parser.parse_args()
    open_directory(arguments.output_dir)
    began_s = time.monotonic()
    bench = Bench(arguments)
    for part in arguments.parts:
        getattr(bench, part)()
        # After each part: an interrupted run keeps what it has measured.
        result = bench.finished()
        (arguments.output_dir / "dualmap.json").write_bytes(to_json(result))
        (arguments.output_dir / "RESULTS.md").write_text(page.markdown(result), encoding="utf-8")
    result = bench.finished()
    page.write(result, arguments.output_dir)
    page.show(result)
    print(f"{time.monotonic() - began_s:.0f} s; wrote {arguments.output_dir}")


if __name__ == "__main__":
    main()
