"""A Lease goes with the pod of its holder, so that `helm uninstall` leaves none that names a holder who is gone."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
from operating import until

from penstock.core.errors import NotFoundError
from penstock.kube.kinds import LEASE, POD
from penstock.kube.lease import Election, own_pod

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]


async def pod(client, namespace, name):
    """Create a pod that no node runs; return what its process would see of it."""
    made = await client.create(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {"containers": [{"name": "main", "image": "none"}]},
        },
        field_manager="test",
    )
    return {"POD_NAME": name, "POD_NAMESPACE": namespace, "POD_UID": made["metadata"]["uid"]}


@asynccontextmanager
async def leading(client, namespace, environment):
    """Hold the Lease in the name of a pod; at the end it is given back, as at SIGTERM."""
    election = Election(
        client,
        name="penstock-test",
        namespace=namespace,
        identity=environment["POD_NAME"],
        duration_s=3.0,
        owner=own_pod(environment, namespace),
    )
    leads = asyncio.Event()

    async def work():
        leads.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(election.lead(work))
    try:
        async with asyncio.timeout(20):
            await leads.wait()
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def test_the_lease_goes_with_the_last_holders_pod_and_not_before(controllers, client, namespace):
    """The pod of an earlier holder takes nothing along."""
    first, second = await pod(client, namespace, "first"), await pod(client, namespace, "second")

    async def owners():
        lease = await client.get(LEASE, "penstock-test", namespace=namespace)
        return [each["name"] for each in lease["metadata"].get("ownerReferences", ())]

    async def is_gone():
        try:
            await client.get(LEASE, "penstock-test", namespace=namespace)
        except NotFoundError:
            return True
        return False

    async with leading(client, namespace, first):
        assert await owners() == ["first"]
    async with leading(client, namespace, second):
        assert await owners() == ["second"]
        await client.delete(POD, "first", namespace=namespace, grace_s=0)
        await asyncio.sleep(3)
        assert not await is_gone()
    await client.delete(POD, "second", namespace=namespace, grace_s=0)
    await until(is_gone, "the Lease is gone", timeout_s=30)
