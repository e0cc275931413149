"""Real vLLM workers of one graph change roles: a switch takes no start, costs no stream, and KV moves as before."""

import asyncio

import pytest
from endpoint import Endpoint
from up_graph import UpGraph

from penstock.api import Role
from penstock.local.store import StateStore
from penstock.local.target import LocalTarget

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

PROMPT = "Water that waits above the dam is work that has not been done yet. "
TOKENS = 64
TRANSFERS = "penstock_router_kv_transfers_total"


def _switchable(spec):
    """Give a spec one prefill and two decode workers that can take each other's role."""
    spec["engine"]["switchable"] = True
    spec["services"]["decode"] |= {"replicas": 2, "scaling": {"minReplicas": 1, "maxReplicas": 2}}


@pytest.fixture
def graph(vllm, tmp_path):
    """The graph without a planner, stopped in the end."""
    graph = UpGraph(tmp_path)
    try:
        graph.up("--no-planner", change=_switchable)
        yield graph
    finally:
        graph.down()


async def _say(client, number):
    """Stream one completion to its end; return its text."""
    stream = await client.completions.create(
        model="tiny",
        prompt=f"{number}: {PROMPT * 4}",
        max_tokens=TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    events = [event async for event in stream]
    assert events[-1].usage.completion_tokens == TOKENS
    return "".join(each.choices[0].text for each in events if each.choices)


async def _switch(graph, target, giver, taker):
    """Let one of two workers change roles, and wait until it serves in the other."""
    await target.switch(giver, taker, replicas={giver: 1, taker: 2}, decision_id="d000001")
    await graph.until(lambda: (graph.ready(taker.value), graph.ready(giver.value)) == ((2, 2), (1, 1)))


def _pids(graph):
    """Return the workers' process ids."""
    return {each["pid"] for role in ("prefill", "decode") for each in graph.processes(role)}


async def test_a_decode_worker_becomes_a_prefill_worker_and_back(graph):
    """Under streams, without a start: the same processes serve, answers stay what they were, and KV is transferred."""
    target = LocalTarget(StateStore(graph.statefile))
    before = _pids(graph)
    async with graph.client() as client:
        said = [await _say(client, number) for number in range(4)]
        for giver, taker in ((Role.DECODE, Role.PREFILL), (Role.PREFILL, Role.DECODE)):
            asked = [asyncio.create_task(_say(client, number)) for number in range(4, 10)]
            await _switch(graph, target, giver, taker)
            await asyncio.gather(*asked)
            assert [await _say(client, number) for number in range(4)] == said
    await target.close()
    assert _pids(graph) == before
    assert Endpoint(graph.url).metric(TRANSFERS, result="done") >= 24
