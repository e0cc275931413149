"""Elections against a real API server, and whose a Lease is."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from contextlib import asynccontextmanager

import pytest
from operating import until as eventually

from penstock.core.errors import NotFoundError
from penstock.kube.client import KubeClient
from penstock.kube.kinds import LEASE, POD
from penstock.kube.lease import Election, own_pod

pytestmark = [
    pytest.mark.cluster,
    # A connection whose TLS handshake is cancelled is left to the garbage collector, and uvloop says so.
    pytest.mark.filterwarnings("ignore:unclosed resource:ResourceWarning"),
]

TERM_S = 3.0
LEASE_NAME = "penstock-test"


class Candidate:
    """One candidate of this process, with the spans in which its work ran."""

    def __init__(self, client, namespace, identity, owner=None):
        self.election = Election(
            client,
            name=LEASE_NAME,
            namespace=namespace,
            identity=identity,
            duration_s=TERM_S,
            owner=owner,
        )
        self.spans = []
        self.leads = asyncio.Event()

    async def work(self):
        """Note from when to when it runs."""
        started_s = time.monotonic()
        self.leads.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.leads.clear()
            self.spans.append((started_s, time.monotonic()))

    async def run(self):
        """Stand for election until cancelled."""
        await self.election.lead(self.work)


@asynccontextmanager
async def standing(*candidates):
    """Let candidates stand; their tasks by order."""
    tasks = [asyncio.create_task(each.run()) for each in candidates]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def until(condition):
    """Wait until a condition holds, looking often; bounded by the caller."""
    while not condition():  # noqa: ASYNC110 - conditions of processes and logs set no events
        await asyncio.sleep(0.02)


def disjoint(*candidates):
    """Whether no two spans of work overlap."""
    spans = sorted(span for each in candidates for span in each.spans)
    return all(before[1] <= after[0] for before, after in itertools.pairwise(spans))


@pytest.fixture
async def clients(api_server):
    """Two clients, as two processes have."""
    made = [await KubeClient.connect(kubeconfig=api_server.kubeconfig, rng=random.Random(n)) for n in (1, 2)]
    yield made
    for each in made:
        await each.close()


async def test_blocked_renewals_end_the_work_before_another_begins(clients, namespace, monkeypatch):
    """A leader whose calls hang stops within two thirds of the term; the other starts after the whole of it."""
    first, second = (Candidate(each, namespace, f"c{n}") for n, each in enumerate(clients))
    async with standing(first), asyncio.timeout(30):
        await first.leads.wait()
        async with standing(second):

            async def hang(*_, **__):
                await asyncio.Event().wait()

            monkeypatch.setattr(clients[0].transport, "send", hang)
            blocked_s = time.monotonic()
            await second.leads.wait()
            assert not first.leads.is_set()
            assert not first.election.is_leading
            assert "no answer" in first.election.problem
            assert time.monotonic() - blocked_s >= TERM_S - TERM_S / 3 - 0.5
            monkeypatch.undo()
    assert len(first.spans) == 1
    assert disjoint(first, second)


async def test_a_deleted_lease_is_made_again_by_its_leader(clients, namespace):
    """Somebody deletes the Lease: the leader writes it again at its next renewal and keeps leading."""
    candidate = Candidate(clients[0], namespace, "c")
    async with standing(candidate), asyncio.timeout(15):
        await candidate.leads.wait()
        await clients[1].delete(LEASE, LEASE_NAME, namespace=namespace)
        while not (await clients[1].list(LEASE, namespace=namespace)).items:  # noqa: ASYNC110 - asks the server
            await asyncio.sleep(0.1)
        assert candidate.leads.is_set()
    assert len(candidate.spans) == 1


async def pod(client, namespace, name):
    """Create a pod that no node runs; return a candidate in its name."""
    spec = {"containers": [{"name": "main", "image": "none"}]}
    made = await client.create(POD.of({"name": name, "namespace": namespace}, spec=spec), field_manager="t")
    environment = {"POD_NAME": name, "POD_NAMESPACE": namespace, "POD_UID": made["metadata"]["uid"]}
    return Candidate(client, namespace, name, own_pod(environment, namespace))


async def test_the_lease_goes_with_the_last_holders_pod_and_not_before(controllers, client, namespace):
    """The pod of an earlier holder takes nothing along."""
    first, second = await pod(client, namespace, "first"), await pod(client, namespace, "second")

    async def owners():
        lease = await client.get(LEASE, LEASE_NAME, namespace=namespace)
        return [each["name"] for each in lease["metadata"].get("ownerReferences", ())]

    async def is_gone():
        try:
            await client.get(LEASE, LEASE_NAME, namespace=namespace)
        except NotFoundError:
            return True
        return False

    async with standing(first), asyncio.timeout(20):
        await first.leads.wait()
        assert await owners() == ["first"]
    async with standing(second), asyncio.timeout(30):
        await second.leads.wait()
        assert await owners() == ["second"]
        await client.delete(POD, "first", namespace=namespace, grace_s=0)
        await asyncio.sleep(3)
        assert not await is_gone()
    await client.delete(POD, "second", namespace=namespace, grace_s=0)
    await eventually(is_gone, "the Lease is gone")
