"""A graph is deleted under load: what its routers have accepted, queued requests too, is answered."""

from __future__ import annotations

import asyncio

import pytest
from operating import no_graph, until
from serving import NAMESPACE, ROLLED_S, served

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

QUEUED = {"clients": 12, "tokens": 400}
"""With four requests in a worker's batch, two thirds of the streams wait for about as long as kubectl takes."""


async def test_queued_requests_are_answered_though_the_graph_is_deleted(own, tmp_path):
    """`kubectl delete` as it is by default, in the background: routers end first, workers once they have nothing to do."""
    plane, client = own
    delete = ("delete", "gd", "g", "--namespace", NAMESPACE, "--wait=false")
    async with served(plane, client, tmp_path, load=QUEUED, engine={"maxRunningRequests": 4}) as serving:

        async def loaded():
            return serving.load.answered >= QUEUED["clients"]

        await until(loaded, "every client is answered", timeout_s=ROLLED_S)
        await asyncio.gather(serving.load.end(), asyncio.to_thread(plane.kubectl, *delete))
        await until(no_graph(client, NAMESPACE), "the graph to go", timeout_s=ROLLED_S)
    assert serving.load.lost == []
