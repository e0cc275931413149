"""Hold the simulator against life: one trace slice through the real router and real-time engines, and in virtual time.

    python bench/live_proof.py [--speed 1] [--rate 0.8] [--limit 150] [--policy NAME ...] [--json]

Live: `penstock up` with two prefill and two decode workers, then `penstock load`, then `penstock down`, all processes
of this machine. Simulated: the same manifest, requests and arrival times. Both are TTFTs in modelled seconds. The goal
is that P50, P90 and P99 agree within 10%. The load's own lag says whether this machine was too busy to tell.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from penstock_graph.loading import load_graph
from penstock_graph.models import GraphDeployment
from penstock_local.ports import ephemeral_port
from penstock_simulator.scenario import PoolSpec, ProfiledModel, RouterSpec, Scenario
from penstock_simulator.workload import WorkloadSpec, prepare
from penstock_simulator.world import World
from penstock_workload.arrivals import Spread

GOAL = 0.10
RANKS = (50, 90, 99)
_GRAPH = """
apiVersion: penstock.dev/v1alpha1
kind: GraphDeployment
metadata: {{name: proof}}
spec:
  model: {{name: meta-llama/Llama-3.1-8B-Instruct, servedName: llama, contextTokens: 131072}}
  runtime: simulated
  services:
    frontend: {{role: router}}
    prefill: {{role: prefill, replicas: 2}}
    decode: {{role: decode, replicas: 2}}
  router: {{policy: {policy}}}
  engine: {{profile: a100-llama-8b-bf16-tp1}}
  planner: {{maxGpuBudget: 4}}
"""


def penstock(*words: str) -> None:
    """Run a command of the product.

    Raises:
        CalledProcessError: it failed; its output was printed.
    """
    done = subprocess.run(
        [sys.executable, "-m", "penstock_cli", *words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        print(done.stdout, done.stderr, file=sys.stderr)
        done.check_returncode()


def live(manifest: Path, folder: Path, arguments: argparse.Namespace) -> tuple[list[float], dict[str, Any]]:
    """Return the TTFTs of a replay through real processes, and the load's summary."""
    port = str(ephemeral_port())
    speed = str(arguments.speed)
    out = folder / "run"
    penstock(
        *("up", str(manifest), "--no-planner", "--speed", speed, "--port", port),
        *("--log-dir", str(folder / "log")),
    )
    try:
        penstock(
            *("load", "--trace", arguments.trace, "--url", f"http://127.0.0.1:{port}", "--speed", speed),
            *("--limit", str(arguments.limit), "--rate", str(arguments.rate), "--spread", "even"),
            *("--output-dir", str(out), "--no-itl", "--json"),
        )
    finally:
        penstock("down", "--namespace", "proof", "--now")
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    ttft = [row["ttft_s"] for row in rows if row.get("ttft_s") is not None]
    return ttft, json.loads((out / "summary.json").read_text())


def simulated(graph: GraphDeployment, arguments: argparse.Namespace) -> list[float]:
    """Return the TTFTs of the same requests in virtual time."""
    spec = graph.spec
    model = ProfiledModel(str(spec.engine.profile), block_size=16)
    router = RouterSpec(
        spec.router.policy.value,
        queue_order=spec.router.prefill_queue.order,
        slot_tokens=spec.router.prefill_queue.worker_tokens,
    )
    pools = tuple(
        PoolSpec(service.role, service.replicas, model, service.gpus) for service in spec.workers.values()
    )
    slo_s = spec.router.ttft_slo_seconds
    requests = prepare(
        WorkloadSpec(arguments.trace, spread=Spread.EVEN, limit=arguments.limit), seed=0, qps=arguments.rate
    ).requests
    recording = World(Scenario(pools=pools, router=router, slo_s=slo_s), requests).run()
    return [float(each) for each in recording.requests.ttft_s if not np.isnan(each)]


def compare(policy: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return both sides' percentiles and their relative differences."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        manifest = folder / "graph.yaml"
        manifest.write_text(_GRAPH.format(policy=policy))
        graph = load_graph(manifest)
        measured, summary = live(manifest, folder, arguments)
        model = simulated(graph, arguments)
    figures: dict[str, Any] = {
        "policy": policy,
        "live": len(measured),
        "simulated": len(model),
        "lag": summary.get("lag"),
    }
    for rank in RANKS:
        here, there = float(np.percentile(measured, rank)), float(np.percentile(model, rank))
        figures[f"p{rank}"] = {"live_s": here, "simulated_s": there, "difference": here / there - 1}
    figures["is_met"] = all(abs(figures[f"p{rank}"]["difference"]) <= GOAL for rank in RANKS)
    return figures


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", default="mooncake", help="a trace file, or the packaged slice")
    parser.add_argument("--limit", type=int, default=150, help="requests")
    parser.add_argument("--rate", type=float, default=0.8, help="mean arrivals per modelled second")
    parser.add_argument("--speed", type=float, default=1.0, help="modelled seconds per real one")
    parser.add_argument("--policy", nargs="*", default=["prefix-cost"])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    found = [compare(policy, arguments) for policy in arguments.policy]
    if arguments.json:
        print(json.dumps(found, indent=2))
        return
    print(f"{'policy':<16}{'':<6}{'live s':>10}{'simulated':>11}{'difference':>12}")
    for figures in found:
        for rank in RANKS:
            row = figures[f"p{rank}"]
            print(
                f"{figures['policy']:<16}{f'p{rank}':<6}{row['live_s']:>10.3f}{row['simulated_s']:>11.3f}"
                f"{row['difference']:>12.1%}"
            )
        print(f"  {figures['live']} requests; within {GOAL:.0%}: {figures['is_met']}; lag: {figures['lag']}")


if __name__ == "__main__":
    main()
