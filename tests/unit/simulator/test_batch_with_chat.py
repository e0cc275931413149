"""A batch job along with chat clients, on the sample for it: chat keeps its TTFT, and no batch request is refused."""

import random
from pathlib import Path

from penstock.api.manifests import load_graph
from penstock.cli.notebook import simulate
from penstock.workload.traces import trace_of_rows

SAMPLE = Path(__file__).parents[3] / "manifests" / "samples" / "batch-with-chat.yaml"


def chat_and_batch():
    """Return four minutes of chat at two requests a second, and 240 long documents within ten seconds of the first minute."""
    draw = random.Random(0)
    chat = [(draw.uniform(0, 240), draw.lognormvariate(7, 0.7), 150, "standard") for _ in range(480)]
    batch = [(60 + draw.uniform(0, 10), draw.lognormvariate(9, 0.3), 100, "background") for _ in range(240)]
    names = ("arrival_s", "input_tokens", "output_tokens", "tier")
    return trace_of_rows(
        dict(zip(names, (at, int(prompt) + 1, answer, tier), strict=True))
        for at, prompt, answer, tier in chat + batch
    )


def test_chat_keeps_its_ttft_next_to_a_batch_that_is_served_whole():
    """Without tiers the same fleet lets chat wait behind the batch."""
    graph = load_graph(SAMPLE)
    spec = graph.spec.to_manifest()
    spec["router"]["tiers"]["enabled"] = False
    without = graph.model_validate({**graph.to_manifest(), "spec": spec})

    tiers, none = (simulate(each, chat_and_batch()).summary[0]["tiers"] for each in (graph, without))

    assert tiers["background"]["ok"] == 240
    assert tiers["standard"]["attainment"] > 0.99
    assert none["standard"]["ttft_s"]["p99"] > 3 * tiers["standard"]["ttft_s"]["p99"]
