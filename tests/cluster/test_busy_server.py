"""An API server that answers most calls with 429: leadership is kept, and a scale-up is carried out in a stated time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

import pytest
from faulty import Fault
from operating import graph, is_ready, pods_of, scale, until

from penstock.kube.kinds import LEASE
from penstock_operator.service import OperatorService
from penstock_operator.settings import OperatorSettings

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

log = logging.getLogger(__name__)

BUSY_FRACTION = 0.7
"""Part of all calls that get 429 with Retry-After: 1."""

SCALED_S = 60.0
"""Limit for a scale-up under this; how long it took is logged."""


@contextlib.asynccontextmanager
async def leader(kubeconfig, namespace):
    """Run an operator that stands for election, in this process."""
    settings = OperatorSettings(namespace=namespace, kubeconfig=str(kubeconfig), metrics_port=0)
    stop = asyncio.Event()
    task = asyncio.create_task(OperatorService(settings).run(stop))
    try:
        yield task
    finally:
        stop.set()
        await asyncio.wait([task], timeout=30)


async def test_leadership_is_kept_and_a_scale_up_is_carried_out(  # noqa: PLR0917 - fixtures
    kwok, make_node, client, proxy, namespace, tmp_path, caplog
):
    """No other term begins, nothing is listed anew, and the third worker exists within `SCALED_S`."""
    make_node(gpus=8)
    await client.create(graph(namespace), field_manager="test")

    async def terms():
        [lease] = [
            each
            for each in (await client.list(LEASE, namespace=namespace)).items
            if "operator" in each["metadata"]["name"]
        ]
        return lease["spec"]["holderIdentity"], lease["spec"].get("leaseTransitions", 0)

    async def workers():
        return len(await pods_of(client, namespace, "decode")) == 3

    async with leader(proxy.kubeconfig(tmp_path / "busy"), namespace) as task:
        await until(is_ready(client, namespace), "readiness")
        before = await terms()
        proxy.play(Fault.BUSY, rate=BUSY_FRACTION)
        began_s = time.monotonic()
        await scale(client, namespace, "decode", 3)
        await until(workers, "three decode workers", timeout_s=SCALED_S)
        log.warning(
            "scaled up after %.1f s; %d calls refused", time.monotonic() - began_s, proxy.done[Fault.BUSY]
        )
        await asyncio.sleep(max(0.0, 30.0 - (time.monotonic() - began_s)))
        assert not task.done()
        assert "leadership lost" not in caplog.messages
        assert await terms() == before
        assert proxy.done[Fault.BUSY] > 20
        proxy.heal()
