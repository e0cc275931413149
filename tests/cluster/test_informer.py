"""The informer against a real API server: a true copy, whatever becomes of the connection or the server."""

import asyncio
import random
from contextlib import asynccontextmanager

import pytest

from penstock.kube import informer as informer_module
from penstock.kube.client import KubeClient
from penstock.kube.informer import Informer
from penstock.kube.kinds import CONFIG_MAP

pytestmark = [
    pytest.mark.cluster,
    # A connection whose TLS handshake is cancelled is left to the garbage collector, and uvloop says so.
    pytest.mark.filterwarnings("ignore:unclosed resource:ResourceWarning"),
]

ME = "penstock-test"


def config_map(namespace, name, *, app="test", **data):
    """Return a ConfigMap."""
    metadata = {"name": name, "namespace": namespace, "labels": {"app": app}}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


class Followed:
    """A running informer, the changes it told, and a wait for a condition."""

    def __init__(self, client, namespace, **options):
        self.changes = []
        self._changed = asyncio.Event()
        self.informer = Informer(client, CONFIG_MAP, namespace=namespace, on_change=self._take, **options)

    def _take(self, what, obj):
        self.changes.append((what, obj["metadata"]["name"]))
        self._changed.set()

    @property
    def names(self):
        """Names in the copy, sorted."""
        return sorted(name for _, name in self.informer.objects)

    async def until(self, condition, limit_s=15.0):
        """Wait until the condition holds; it is looked at after each change and ten times a second."""
        async with asyncio.timeout(limit_s):
            while not condition():
                self._changed.clear()
                try:
                    async with asyncio.timeout(0.1):
                        await self._changed.wait()
                except TimeoutError:
                    continue


@asynccontextmanager
async def following(client, namespace, **options):
    """Run an informer for a while."""
    followed = Followed(client, namespace, **options)
    task = asyncio.create_task(followed.informer.run())
    try:
        yield followed
    finally:
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled(), task.exception()


def reads(api_server, mark, verb, namespace):
    """Return how often ConfigMaps of a namespace were listed or watched since the mark."""
    return sum(
        each["verb"] == verb
        and each.get("objectRef", {}).get("resource") == "configmaps"
        and each["objectRef"].get("namespace") == namespace
        for each in api_server.audit_events(after=mark)
    )


async def test_the_copy_follows_each_change_and_tells_it(client, namespace):
    """What was there comes with the list, later changes by the watch, each told once and in order."""
    await client.create(config_map(namespace, "old"), field_manager=ME)
    async with following(client, namespace) as followed:
        await followed.informer.synced.wait()
        assert followed.names == ["old"]
        await client.apply(config_map(namespace, "new", a="1"), field_manager=ME)
        await client.apply(config_map(namespace, "new", a="2"), field_manager=ME)
        await client.delete(CONFIG_MAP, "old", namespace=namespace)
        await followed.until(lambda: followed.names == ["new"])
        told = [("ADDED", "old"), ("ADDED", "new"), ("MODIFIED", "new"), ("DELETED", "old")]
        assert followed.changes == told
        copy = followed.informer.objects[namespace, "new"]
        assert copy["data"] == {"a": "2"}
        assert "managedFields" not in copy["metadata"]
        assert followed.informer.problem is None


async def test_an_object_that_loses_its_label_leaves_the_copy(client, namespace):
    """A selector holds for changes too; other objects are never seen."""
    await client.create(config_map(namespace, "mine"), field_manager=ME)
    await client.create(config_map(namespace, "other", app="other"), field_manager=ME)
    async with following(client, namespace, labels={"app": "test"}) as followed:
        await followed.informer.synced.wait()
        assert followed.names == ["mine"]
        await client.apply(config_map(namespace, "mine", app="other"), field_manager=ME)
        await followed.until(lambda: not followed.names)
        assert followed.changes[-1] == ("DELETED", "mine")


async def test_a_watch_that_ends_goes_on_without_another_list(api_server, client, namespace, monkeypatch):
    """The server ends watches after their time; the next one continues where the last one stopped."""
    monkeypatch.setattr(informer_module, "STREAM_S", (1, 1))
    mark = api_server.audit_mark()
    async with following(client, namespace) as followed:
        await followed.informer.synced.wait()
        await followed.until(lambda: reads(api_server, mark, "watch", namespace) >= 2)
        await client.create(config_map(namespace, "late"), field_manager=ME)
        await followed.until(lambda: followed.names == ["late"])
        assert reads(api_server, mark, "list", namespace) == 1
        assert followed.informer.problem is None


async def test_the_copy_survives_a_killed_server(own_api_server):
    """The copy stays while the server is away and says so; then it catches up, without telling a change twice."""
    client = await KubeClient.connect(kubeconfig=own_api_server.kubeconfig, rng=random.Random(1))
    try:
        for name in ("kept", "leaving"):
            await client.create(config_map("default", name), field_manager=ME)
        async with following(client, "default", labels={"app": "test"}) as followed:
            informer = followed.informer
            await informer.synced.wait()
            own_api_server.kill("kube-apiserver")
            await followed.until(lambda: informer.problem is not None)
            assert "does not answer" in informer.problem
            assert followed.names == ["kept", "leaving"]
            await asyncio.to_thread(own_api_server.start_api_server)
            await client.delete(CONFIG_MAP, "leaving", namespace="default")
            await client.create(config_map("default", "new"), field_manager=ME)
            await followed.until(lambda: followed.names == ["kept", "new"], limit_s=30)
            assert informer.problem is None
            first = [("ADDED", "kept"), ("ADDED", "leaving")]
            assert sorted(followed.changes) == sorted([*first, ("DELETED", "leaving"), ("ADDED", "new")])
    finally:
        await client.close()
