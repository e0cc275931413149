"""The capacity that a replay's overload is a multiple of, before servers that reject what they cannot take."""

import asyncio

import pytest

from penstock.core.clock import SimulatedClock
from penstock.core.errors import PenstockError
from penstock.core.http.client import ConnectionPool
from penstock.workload.exchange import SendSettings
from penstock.workload.overload import measure_capacity
from penstock.workload.traces import TraceRequest

BUSY = b'{"message":"All workers are busy, please retry later","type":"service_unavailable","code":503}'


async def measured(fake, script, *, concurrency=8):
    """Measure a server that answers by a script."""
    fake.script = script
    pool = ConnectionPool()
    try:
        return await measure_capacity(
            pool,
            SimulatedClock(200.0),
            SendSettings(fake.url, "llama", timeout_s=100.0),
            [TraceRequest(0.0, 8, 2, (1,), 1)],
            seed=1,
            concurrency=concurrency,
            stop=asyncio.Event(),
        )
    finally:
        await pool.close()


async def test_a_server_that_rejects_is_measured_by_what_it_takes(fake_server):
    """Three of eight fit at a time; the others are rejected and sent again, until all 32 are answered."""
    answer = fake_server.script
    under_way = rejected = served = 0
    is_full = asyncio.Event()

    async def script(body, responder):
        nonlocal under_way, rejected, served
        if under_way == 3:
            rejected += 1
            is_full.set()
            responder.send(503, BUSY)
            return
        under_way += 1
        await is_full.wait()
        await answer(body, responder)
        under_way -= 1
        served += 1

    capacity = await measured(fake_server, script)
    assert (served, capacity.requests) == (32, 32)
    assert capacity.rps > 0
    assert rejected > 0


async def test_a_server_that_fails_has_no_capacity(fake_server):
    """A failure is not sent again."""

    async def script(body, responder):
        responder.send(400, b"{}")

    with pytest.raises(PenstockError, match="0 of 32 requests were answered"):
        await measured(fake_server, script)
    assert len(fake_server.bodies) == 32
