"""A quiet graph holds no worker, says so, and comes back for requests that its router holds meanwhile."""

from __future__ import annotations

from kube import Graph, wait_for
from traffic import Load

ZERO = {
    "model": {"contextTokens": 4096},
    "engine": {"kvBlocks": 512, "streamIntervalTokens": 8},
    "services": {"prefill": {"scaling": {"minReplicas": 0}}, "decode": {"scaling": {"minReplicas": 0}}},
    "router": {"prefillQueue": {"maxWakeSeconds": 300}},
    "planner": {
        "mode": "adaptive",
        "adjustmentIntervalSeconds": 5,
        "maxGpuBudget": 4,
        "minGpuBudget": 0,
        "scaleToZeroAfterSeconds": 20,
    },
}
COLUMNS = ("PHASE", "PREFILL", "DECODE", "GPUS", "REASON")


def shown(graph: Graph) -> dict[str, str]:
    """What `kubectl get gd` prints of the graph, by column; no printed value holds a double space."""
    head, line = graph.kube.kubectl("get", "gd", graph.name, *graph.scope, "--output=wide").splitlines()
    starts = [head.index(name) for name in head.split()]
    ends = [*starts[1:], None]
    row = {head[a:b].strip(): line[a:b].strip() for a, b in zip(starts, ends, strict=True)}
    return {name: row[name] for name in COLUMNS}


def test_a_quiet_graph_goes_to_zero_and_the_next_requests_are_all_answered(deploy):
    """No pod of either role after the quiet time; three streams wait for one of each, and none is lost."""
    graph = deploy(**ZERO)
    assert shown(graph) == {
        "PHASE": "Ready", "PREFILL": "1/1", "DECODE": "1/1", "GPUS": "2/4", "REASON": "Serving",
    }  # fmt: skip
    wait_for("no worker is left", lambda: not graph.pods(), 180)
    wait_for("Ready says so", lambda: graph.condition("Ready").get("reason") == "ScaledToZero", 30)
    assert shown(graph) == {
        "PHASE": "Ready", "PREFILL": "0/0", "DECODE": "0/0", "GPUS": "0/4", "REASON": "ScaledToZero",
    }  # fmt: skip
    assert graph.condition("Ready")["status"] == "True"
    assert graph.condition("PlannerActive")["status"] == "True"

    load = Load(graph, "first", concurrency=3, max_tokens=50)
    outcome = load.stop()
    assert outcome.lost == []
    assert outcome.answered >= 3
    assert (graph.ready("prefill"), graph.ready("decode")) == (1, 1)
    wait_for("Ready serves again", lambda: graph.condition("Ready").get("reason") == "Serving", 30)
    told = graph.kube.kubectl("describe", "gd", graph.name, *graph.scope)
    assert "prefill 1 -> 0" in told
    assert "decode 0 -> 1" in told
