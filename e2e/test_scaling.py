"""Load grows the workers inside the budget; its end shrinks them, and no request is lost on the way."""

from __future__ import annotations

from kube import Graph, wait_for
from traffic import Load

SMALL_AND_QUICK = {
    "model": {"contextTokens": 4096},
    "engine": {"kvBlocks": 512, "streamIntervalTokens": 8},
    "planner": {
        "mode": "load",
        "adjustmentIntervalSeconds": 5,
        "maxGpuBudget": 4,
        "newDecodeWorkerGraceIntervals": 1,
    },
}
"""8,192 tokens of KV per worker: a dozen streams fill it. Decisions every 5 s."""


def target(graph: Graph, service: str) -> int:
    """Replicas that a service's ScalingAdapter asks for."""
    adapter = graph.kube.get("gsa", f"{graph.name}-{service}", *graph.scope)
    return int(adapter["spec"]["replicas"])


def test_load_scales_up_and_its_end_scales_down_without_a_lost_request(kube, deploy):
    """Decode grows on KV usage within the budget; it shrinks under running streams, which all complete."""
    graph = deploy(**SMALL_AND_QUICK)
    heavy = Load(graph, "heavy", concurrency=24, max_tokens=500)
    highest = 0

    def grown() -> bool:
        nonlocal highest
        highest = max(highest, graph.gpus())
        return graph.ready("decode") >= 2

    wait_for("a second decode worker is ready", grown, 180)
    light = Load(graph, "light", concurrency=2, max_tokens=800)
    outcome = heavy.stop()
    assert outcome.lost == []
    assert outcome.answered > 24

    def shrunk() -> bool:
        nonlocal highest
        highest = max(highest, graph.gpus())
        return target(graph, "decode") == 1 and len(graph.pods("decode")) == 1

    wait_for("decode is back at one worker", shrunk, 240)
    outcome = light.stop()
    assert outcome.lost == []
    assert outcome.answered > 0
    assert highest <= 4
    told = kube.kubectl("describe", "gd", graph.name, *graph.scope)
    assert "decode 1 -> 2" in told
