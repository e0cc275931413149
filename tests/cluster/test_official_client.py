"""The product driven as its users drive it: through the official Kubernetes client."""

from __future__ import annotations

import asyncio
from http import HTTPStatus

import pytest
from kubernetes import aio
from kubernetes.aio.config import load_kube_config
from operating import all_children, graph, running, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

GROUP, VERSION = "penstock.dev", "v1alpha1"
GRAPHS, ADAPTERS = "graphdeployments", "scalingadapters"
WAIT_S = 90.0


class User:
    """The custom resources and Deployments of one namespace."""

    def __init__(self, api, namespace):
        self.custom = aio.client.CustomObjectsApi(api)
        self.apps = aio.client.AppsV1Api(api)
        self.core = aio.client.CoreV1Api(api)
        self.namespace = namespace
        self.place = (GROUP, VERSION, namespace)

    async def graph(self):
        """Return the graph."""
        return await self.custom.get_namespaced_custom_object(*self.place, GRAPHS, "g")

    async def replicas(self, name):
        """Return what a Deployment asks for."""
        return (await self.apps.read_namespaced_deployment(name, self.namespace)).spec.replicas


@pytest.fixture
async def user(crds, namespace):
    """The official client of the administrator."""
    configuration = aio.client.Configuration()
    await load_kube_config(str(crds.kubeconfig), client_configuration=configuration)
    async with aio.client.ApiClient(configuration) as api:
        yield User(api, namespace)


async def test_a_graph_from_creation_to_deletion(user, client, namespace):
    """Created, watched until its status is current, scaled through /scale, edited, deleted with all children."""
    watched = asyncio.create_task(first_status(user))
    await user.custom.create_namespaced_custom_object(*user.place, GRAPHS, graph(namespace))
    async with running(client, namespace):
        assert (await asyncio.wait_for(watched, WAIT_S))["observedGeneration"] == 1
        await until(lambda: all_children(client, namespace), "all children", timeout_s=WAIT_S)
        scale = await user.custom.get_namespaced_custom_object_scale(*user.place, ADAPTERS, "g-decode")
        assert scale["spec"]["replicas"] == 1
        await user.custom.patch_namespaced_custom_object_scale(
            *user.place,
            ADAPTERS,
            "g-decode",
            {"spec": {"replicas": 3}},
            _content_type="application/merge-patch+json",
        )
        await until(is_scaled(user, 3), "three decode workers", timeout_s=WAIT_S)
        await user.custom.patch_namespaced_custom_object(
            *user.place,
            GRAPHS,
            "g",
            {"spec": {"services": {"frontend": {"replicas": 2}}}},
            _content_type="application/merge-patch+json",
        )
        await until(is_current(user, 2), "the second generation", timeout_s=WAIT_S)
        assert await user.replicas("g-frontend") == 2
        await user.custom.delete_namespaced_custom_object(*user.place, GRAPHS, "g")
        await until(is_gone(user), "the graph to go", timeout_s=WAIT_S)


async def first_status(user):
    """Return the first status that a watch of the graphs shows."""
    listing = user.custom.list_namespaced_custom_object
    while True:
        watch = aio.watch.Watch()
        try:
            async for event in watch.stream(listing, *user.place, GRAPHS):
                if event["object"].get("status", {}).get("observedGeneration"):
                    watch.stop()
                    return event["object"]["status"]
        except aio.client.ApiException as exc:
            # A definition that was applied a moment ago has its storage set up once more; any watch is told to try again.
            if exc.status != HTTPStatus.TOO_MANY_REQUESTS:
                raise
            await asyncio.sleep(1)
        else:
            raise AssertionError("the watch ended without a status")


def is_scaled(user, replicas):
    """Return a check of the decode workers' number."""

    async def check():
        return await user.replicas("g-decode") == replicas

    return check


def is_current(user, generation):
    """Return a check of the generation that the status speaks of."""

    async def check():
        return (await user.graph())["status"]["observedGeneration"] == generation

    return check


def is_gone(user):
    """Return a check that no graph is left."""

    async def check():
        return not (await user.custom.list_namespaced_custom_object(*user.place, GRAPHS))["items"]

    return check
