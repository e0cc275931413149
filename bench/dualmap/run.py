"""Reproduces the DualMap paper's evaluation in virtual time, and says where our figures differ and who wins.

    python bench/dualmap/run.py [--conversation FILE] [--arxiv FILE] [--toolagent-surrogate FILE] [--output-dir DIR]

The traces are not in the repository; docs of Mooncake (kvcache-ai/Mooncake, FAST25-release/traces) say where
they are. Without --conversation the packaged slice of 608 rows is run, and every title says so; what
needs a missing trace is left out. The surrogate is synthetic and is called so. Each part is kept in the output directory
as it ends; RESULTS.md shows all that are there, so that --parts may be run one after the other.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import depths
import digest
import fleets
import page
import setups
from paper import CLAIMS

from penstock.api import QueueOrder
from penstock.simulator.executors import open_executor, run_all
from penstock.simulator.output import open_directory, to_json
from penstock.simulator.scoreboard import attainment_over_time
from penstock.simulator.sweep import RunSpec, figures_of, goodputs, simulate, summarise

PARTS = ("comparison", "engines", "ours", "ablation", "depths", "routers", "elasticity", "order", "scaling")
WINDOW_S = 60.0
ROUTERS = (1, 2, 4, 8, 16)


def attained(spec: RunSpec) -> dict[str, Any]:
    """Return a run's figures with the share in time over time."""
    recording, _, figures = simulate(spec)
    times, shares = attainment_over_time(recording, spec.scenario.slo.ttft_seconds, window_s=WINDOW_S)
    replicas = [(sample.at_s, sample.gpus) for sample in recording.samples[:: int(WINDOW_S)]]
    return {**figures, "attainment": {"until_s": times, "share": shares}, "instances": replicas}


class Bench:
    """Runs part after part and keeps what they give."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.seeds: int = arguments.seeds
        self.processes: int | None = arguments.processes
        self.directory: Path = arguments.output_dir
        self.traces = setups.Traces(arguments.conversation, arguments.arxiv, arguments.toolagent_surrogate)
        self.cases = setups.cases(self.traces)
        self.skewed = (
            next((c for c in self.cases if c.key in {"toolagent-7b", "arxiv-7b"} and c.workload.limit), None)
            or self.cases[0]
        )

    def run(self, name: str, title: str, specs: list[RunSpec], work: Any = figures_of) -> None:
        """Run one part and keep it."""
        began_s = time.monotonic()
        with open_executor(processes=self.processes, cells=len(specs)) as executor:
            runs = run_all(work, specs, executor)
        found = {"summary": summarise(runs), "goodput": goodputs(runs), "runs": runs, "window_s": WINDOW_S}
        self.keep(name, {"title": title, "seeds": len({run["seed"] for run in runs}), **found})
        print(f"{name}: {len(runs)} runs in {time.monotonic() - began_s:.0f} s", file=sys.stderr, flush=True)

    def keep(self, name: str, part: dict[str, Any]) -> None:
        """Write a part; an interrupted run keeps what it has measured."""
        (self.directory / f"part.{name}.json").write_bytes(to_json(part))

    def comparison(self) -> None:
        """Every policy on every workload, prefill-only servers, queues in order of arrival."""
        for case in self.cases:
            specs = setups.comparison(case, self.seeds, order=QueueOrder.ARRIVAL)
            self.run(f"comparison.{case.key}", case.title, specs)

    def engines(self) -> None:
        """The same on engines that batch and decode, and the first workload by our default order too."""
        cases = setups.engine_cases(self.traces)
        runs = [(case, QueueOrder.ARRIVAL) for case in cases] + [(cases[0], setups.DEFAULT_ORDER)]
        for case, order in runs:
            specs = setups.comparison(case, self.seeds, order=order)
            self.run(f"engines.{case.key}.{order.value}", f"{case.title}; order {order.value}", specs)

    def order(self) -> None:
        """The first workload again with the artefact's queues, and with ours."""
        case = replace(self.cases[0], rates=self.cases[0].rates[2::2])
        for order in (QueueOrder.HIT_FIRST, QueueOrder.IN_TIME_FIRST):
            specs = setups.comparison(case, self.seeds, order=order)
            self.run(f"order.{order.value}", f"{case.title}; order {order.value}", specs)

    def ours(self) -> None:
        """What this router does by default, on every workload."""
        for case in self.cases:
            self.run(f"ours.{case.key}", f"our default order, {case.title}", setups.ours(case, self.seeds))

    def ablation(self) -> None:
        """Each technique off, on the paper's workload and model, below the knee, there, and beyond it."""
        case = self.cases[1]
        specs = setups.ablation(case, self.seeds, setups.ABLATION_RATES)
        self.run("ablation", f"ablation, {case.title}", specs)

    def depths(self) -> None:
        """How long hash keys become."""
        cases = [case for case in self.cases if case.key != "conversation-14b"]
        self.keep("depths", {"title": "hash keys by their length in blocks", "rows": depths.measured(cases)})

    def routers(self) -> None:
        """Several routers, alone and together, by our default order."""
        case = self.cases[0]
        chosen = setups.contestants(setups.DEFAULT_ORDER)
        chosen = {label: spec for label, spec in chosen.items() if label not in setups.OUTCLASSED}
        rate = case.rates[2]
        specs = fleets.routers(case, self.seeds, rate, counts=ROUTERS, chosen=chosen)
        self.run(f"routers.{rate:g}", f"routers side by side, {case.title}, QPS {rate:g}", specs)

    def elasticity(self) -> None:
        """4 to 8 to 4 instances."""
        routers = setups.contestants(QueueOrder.IN_TIME_FIRST)
        chosen = {name: routers[name] for name in ("pair-cost", "prefix-cost")}
        chosen["dualmap"] = setups.router("dualmap")
        specs = fleets.elasticity(self.skewed, self.seeds, chosen)
        self.run("elasticity", f"elasticity, {self.skewed.title}", specs, attained)

    def scaling(self) -> None:
        """8 to 64 instances."""
        routers = setups.contestants(QueueOrder.ARRIVAL)
        chosen = {name: routers[name] for name in ("dualmap", "pair-cost", "prefix-cost")}
        case = fleets.lighter(self.cases[0])
        specs = fleets.scaling(case, min(self.seeds, 2), (8, 16, 32, 64), chosen)
        self.run("scaling", f"8 to 64 instances, {case.title}", specs)


def kept(directory: Path) -> dict[str, Any]:
    """Return every part that the directory holds, in the order of `PARTS`, alongside the paper's claims."""
    names = sorted(
        (path.name.removeprefix("part.").removesuffix(".json") for path in directory.glob("part.*.json")),
        key=lambda name: (PARTS.index(name.split(".", 1)[0]), name),
    )
    parts = {name: json.loads((directory / f"part.{name}.json").read_bytes()) for name in names}
    found = digest.claims(parts)
    return {
        "parts": parts,
        "claims": [
            {
                "claim": claim.text,
                "paper": claim.paper,
                "server": found.get(f"server.{claim.key}", ""),
                "engines": found.get(f"engines.{claim.key}", ""),
            }
            for claim in CLAIMS
        ],
    }


def main() -> None:
    """Run the parts asked for and write what they give."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--conversation", type=Path, help="Mooncake's conversation_trace.jsonl")
    parser.add_argument("--arxiv", type=Path, help="the arXiv trace, or its first rows")
    parser.add_argument("--toolagent-surrogate", type=Path, help="a SYNTHETIC stand-in for Tool&Agent")
    parser.add_argument("--output-dir", type=Path, default=Path("bench-dualmap"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, help="default: one per core")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    arguments = parser.parse_args()
    open_directory(arguments.output_dir)
    began_s = time.monotonic()
    bench = Bench(arguments)
    for part in arguments.parts:
        getattr(bench, part)()
    result = kept(arguments.output_dir)
    (arguments.output_dir / "RESULTS.md").write_text(page.markdown(result), encoding="utf-8")
    page.show(result)
    print(f"{time.monotonic() - began_s:.0f} s; wrote {arguments.output_dir}")


if __name__ == "__main__":
    main()
