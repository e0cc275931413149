"""When pools are shared out: as soon as one of their graphs has changed, and not before."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from graph_harness import KEY, edit, operator, pod, serving, to_rest, told

from penstock.kube.kinds import GPU_POOL


async def shared_out(api, made, match):
    """Make a pool of four GPUs, and share it out until its graphs are as they are to be; then nothing shares out any more."""
    spec = {"gpus": 4, "holdSeconds": 0, "graphs": [{"match": match, "guaranteedGpus": 2}]}
    metadata = {"name": "shared", "namespace": "ns", "creationTimestamp": "2026-01-01T00:00:00Z"}
    await api.create(GPU_POOL.of(metadata, spec=spec), field_manager="user")
    api.served[f"/apis/{GPU_POOL.api_version}"] = [GPU_POOL.plural]
    ready, written = asyncio.Event(), asyncio.Event()
    api.fault = lambda _number, write: written.set() if write[:2] == ("status", "GpuPool") else None
    sharing = asyncio.create_task(made.pools.run(ready))
    await ready.wait()
    await to_rest(api, made)
    await written.wait()
    sharing.cancel()
    with suppress(asyncio.CancelledError):
        await sharing
    api.fault = None
    await to_rest(api, made)


async def test_reconciling_a_graph_in_no_pool_wakes_no_allocator(api):
    """Whatever happens to it: its children, its pods, an edit, its bid."""
    async with operator(api) as made:
        await shared_out(api, made, {"name": "other"})
        made.pools.changed.clear()
        await serving(api, "d-1", "decode")
        await to_rest(api, made)
        edit(api, "GraphDeployment", "g", planner={"maxGpuBudget": 3})
        await to_rest(api, made)
        assert made.pools.grant(api.at("GraphDeployment", "g")) is None
        assert not made.pools.changed.is_set()


async def test_reconciling_a_graph_of_a_pool_wakes_the_allocator_if_the_graph_has_changed(api):
    """Asking for its grant does not, nor a reconcile of a graph that is as it was."""
    async with operator(api) as made:
        await shared_out(api, made, {"name": "g"})
        grant = made.pools.grant(api.at("GraphDeployment", "g"))
        assert (grant.pool, grant.guaranteed) == ("shared", 2)
        for is_new in (False, True, False):
            made.pools.changed.clear()
            if is_new:
                await api.create(pod("d-1", "decode", gated=False), field_manager="kubelet")
                await told(api)
            made.pools.grant(api.at("GraphDeployment", "g"))
            assert not made.pools.changed.is_set()
            await made.reconciler.reconcile(KEY)
            assert made.pools.changed.is_set() == is_new
            await to_rest(api, made)


async def test_a_new_bid_wakes_the_allocator(api):
    """Of a graph of a pool."""
    async with operator(api) as made:
        await shared_out(api, made, {"name": "g"})
        made.pools.changed.clear()
        edit(api, "ScalingAdapter", "g-decode", replicas=2)
        await to_rest(api, made)
        assert made.pools.changed.is_set()


@pytest.mark.parametrize("is_member", [True, False])
async def test_a_graph_that_goes_wakes_the_allocator_if_it_is_in_a_pool(api, is_member):
    """What it held is free once its workers have ended."""
    async with operator(api) as made:
        await shared_out(api, made, {"name": "g" if is_member else "other"})
        made.pools.changed.clear()
        made.reconciler.forget(KEY)
        assert made.pools.changed.is_set() == is_member
