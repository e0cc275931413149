"""The planner behind an API server that fails, and without Prometheus."""

from __future__ import annotations

import asyncio

import pytest
from faulty import EVERY_FAULT, Fault
from operating import page, says, until
from planning import is_now
from reserved_ports import reserved_port

from penstock.kube.kinds import SCALING_ADAPTER
from penstock_planner.replay import replay

pytestmark = [
    pytest.mark.cluster,
]

BUDGET = 5


async def _eventually(world, check, what):
    """Wait for as long as a few pauses of a client that failed may take."""
    for _ in range(2):
        try:
            async with asyncio.timeout(30):
                while not await check():  # noqa: ASYNC110 - it asks the API server
                    await asyncio.sleep(0.1)
                return
        except TimeoutError:
            continue
    pytest.fail(f"not within 90 s: {what}: {await world.status()}")


async def test_random_faults_delay_decisions_and_double_none(world, proxy, shaky):
    """Two fifths of all calls: decode grows to what the budget allows, one at a time, and never beyond."""
    world.kv = 0.95
    await world.make_graph(maxGpuBudget=BUDGET)
    proxy.play(*EVERY_FAULT, rate=0.4, seconds=2.0)
    most = 0
    direct, world.client = world.client, shaky
    planning = world.planning()
    task = await planning.__aenter__()
    world.client = direct
    try:

        async def grown():
            nonlocal most
            assert not task.done()
            wishes = [await world.desired("prefill"), await world.desired("decode")]
            most = max(most, sum(wishes))
            return wishes[1] == 4

        await _eventually(world, grown, "decode is 4")
        proxy.heal()
        world.kv = 0.7

        async def told():
            status = await world.status()
            return status.get("planner", {}).get("gpus") == BUDGET and await world.reason() == "Observing"

        await _eventually(world, told, "the status is up to date")
    finally:
        world.client = shaky
        await planning.__aexit__(None, None, None)
        world.client = direct
    assert most <= BUDGET
    assert sum(proxy.done.values()) >= 5, proxy.done
    records = world.ledger().records
    ids = [r["decision"]["id"] for r in records if r["type"] == "decision"]
    assert ids == sorted(set(ids))
    assert replay(world.ledger()).differences == ()
    scales = [each for each in proxy.carried if each[1].endswith("/scale") and each[3] == 200]
    assert len(scales) == 3


async def test_a_lost_answer_to_a_change_is_not_repeated(world, proxy, shaky):
    """The number was written: seen as such, neither an edit by somebody else nor written twice."""
    world.kv = 0.95
    await world.make_graph(maxGpuBudget=3)
    direct, world.client = world.client, shaky
    proxy.play(Fault.DROP, path="/scale$", times=1)
    async with world.planning():
        world.client = direct
        await until(lambda: is_now(world.desired("decode"), 2), "decode is 2")
        world.kv = 0.7
        await until(lambda: is_now(world.reason(), "Observing"), "it observes")
        await until(world.events, "an Event")
        world.client = shaky
    world.client = direct
    assert proxy.done[Fault.DROP] == 1
    assert [each[3] for each in proxy.carried if each[1].endswith("/scale")].count(200) == 1
    reasons = {reason for reason, *_ in (await world.events()).values()}
    assert reasons == {"ScaledUp"}


async def test_a_storm_of_writes_to_an_adapter_does_not_stop_scaling(world):
    """Fifty times a second somebody labels it: the number is written all the same."""
    world.kv = 0.95
    await world.make_graph(maxGpuBudget=BUDGET)
    stop = asyncio.Event()

    async def storm(number=0):
        while not stop.is_set():
            number += 1
            label = {"metadata": {"labels": {"storm": str(number)}}}
            await world.client.patch(
                SCALING_ADAPTER, "llama-decode", label, namespace=world.namespace, field_manager="storm"
            )
            await asyncio.sleep(0.02)

    task = asyncio.create_task(storm())
    async with world.planning():
        try:
            await _eventually(world, lambda: is_now(world.desired("decode"), 4), "decode is 4")
        finally:
            stop.set()
            await task


async def test_without_prometheus_nothing_is_scaled_and_the_status_says_so(world):
    """Nor is it while its backups know nothing; they, or it, being back is enough."""
    world.kv = None
    metrics = {"source": "prometheus", "prometheusUrl": f"http://127.0.0.1:{reserved_port()}"}
    await world.make_graph(metrics=metrics)
    await world.edit("decode", 2)
    async with world.planning():
        await _eventually(world, lambda: is_now(world.reason(), "MetricsMissing"), "metrics are missing")
        conditions = (await world.status())["conditions"]
        [said] = [each for each in conditions if each["type"] == "PlannerActive"]
        assert said["status"] == "False"
        assert said["message"].startswith("cannot be scaled because KV usage is unknown to ")
        assert "prometheus" in said["message"].split(":")[0]
        assert [await world.desired("prefill"), await world.desired("decode")] == [1, 2]
        world.kv = 0.95
        await until(lambda: is_now(world.desired("decode"), 3), "the router's word is enough to grow")
        world.kv = 0.7
        await until(lambda: is_now(world.reason(), "Observing"), "it observes")
    assert "ScaledDown" not in {reason for reason, *_ in (await world.events()).values()}


async def test_it_is_ready_without_metrics_and_not_without_the_api_server(world, proxy, shaky):
    """As is one on standby. Ready again by itself."""
    world.kv = None
    await world.make_graph()
    ports = [reserved_port(), reserved_port()]
    direct, world.client = world.client, shaky
    async with world.planning(metrics_port=ports[0]):
        world.client = direct
        await _eventually(world, lambda: is_now(world.reason(), "MetricsMissing"), "metrics are missing")
        async with world.planning(metrics_port=ports[1]):
            for port in ports:
                await until(says(port, "/readyz", "ok"), "both are ready")
            proxy.play(Fault.RESET, rate=1.0)

            async def is_unready():
                status, body = await asyncio.to_thread(page, ports[0], "/readyz")
                return status == 503 and "not_ready" in body

            await until(is_unready, "not ready without the API server")
            assert await says(ports[1], "/readyz")(), "the other one continues"
            proxy.heal()
            await until(says(ports[0], "/readyz", "ok"), "ready again")
