"""Kopf on this loop against an API server of a few lines: it drives, ends in time, and is started again."""

import asyncio
import random
import signal

import orjson
import pytest
import uvloop
import yaml

from penstock.core.http import loop as loop_module
from penstock.core.http.server import HttpServer
from penstock.kube.client import KubeClient
from penstock.kube.kinds import GRAPH_DEPLOYMENT, SCALING_ADAPTER
from penstock.operator import handlers as handlers_module
from penstock.operator.handler_store import HandlerStore
from penstock.operator.handlers import KopfOperator
from penstock.operator.trim import trim_child

GROUP = "/apis/penstock.dev/v1alpha1"
KINDS = {"graphdeployments": "GraphDeployment", "scalingadapters": "ScalingAdapter"}


def pytest_asyncio_loop_factories(config, item):
    """Run these tests on the loop that the processes run on."""
    return {"uvloop": uvloop.new_event_loop}


class Server:
    """Discovery, lists and watches of the two kinds; a test changes objects and breaks watches."""

    def __init__(self):
        self.version = 10
        self.objects = {plural: {} for plural in KINDS}
        self.watches = {plural: [] for plural in KINDS}
        self.since = []
        self.lists = 0
        self.refuse_watches = False
        self.authorizations = set()
        self.http = HttpServer(self._handle)

    async def _handle(self, request, responder):
        self.authorizations.add(request.headers.get(b"authorization"))
        path, _, query = request.target.decode().partition("?")
        plural = path.rpartition("/")[2]
        if plural not in KINDS:
            responder.send(200, orjson.dumps(self._discovery(path)))
        elif "watch=true" not in query:
            self.lists += 1
            items = list(self.objects[plural].values())
            metadata = {"resourceVersion": str(self.version)}
            body = {
                "kind": f"{KINDS[plural]}List",
                "apiVersion": "penstock.dev/v1alpha1",
                "metadata": metadata,
            }
            responder.send(200, orjson.dumps({**body, "items": items}))
        elif self.refuse_watches:
            responder.send(500, b'{"kind":"Status","code":500,"message":"etcd is away"}')
        else:
            await self._watch(plural, responder)

    def _discovery(self, path):
        if path == "/api":
            return {"versions": ["v1"]}
        if path == "/apis":
            version = {"groupVersion": "penstock.dev/v1alpha1", "version": "v1alpha1"}
            return {"groups": [{"name": "penstock.dev", "versions": [version], "preferredVersion": version}]}
        kinds = KINDS if path == GROUP else {"namespaces": "Namespace"}
        return {
            "resources": [
                {
                    "name": plural,
                    "singularName": kind.lower(),
                    "kind": kind,
                    "namespaced": path == GROUP,
                    "verbs": ["list", "watch", "patch"],
                }
                for plural, kind in kinds.items()
            ]
        }

    async def _watch(self, plural, responder):
        queue = asyncio.Queue()
        self.watches[plural].append(queue)
        gone = asyncio.Event()
        responder.on_disconnect(gone.set)
        responder.on_disconnect(lambda: queue.put_nowait(None))
        responder.start(200)
        while (event := await queue.get()) is not None:
            responder.write(orjson.dumps(event) + b"\n")
        self.watches[plural].remove(queue)
        if not gone.is_set():
            responder.end()

    def put(self, plural, name, *, is_told=True):
        """Make or change an object."""
        self.version += 1
        known = name in self.objects[plural]
        metadata = {
            "name": name,
            "namespace": "ns",
            "uid": f"uid-{name}",
            "resourceVersion": str(self.version),
        }
        obj = {"apiVersion": "penstock.dev/v1alpha1", "kind": KINDS[plural], "metadata": metadata, "spec": {}}
        self.objects[plural][name] = obj
        if is_told:
            self.tell(plural, "MODIFIED" if known else "ADDED", obj)

    def delete(self, plural, name, *, is_told=True):
        """Delete an object."""
        self.version += 1
        obj = self.objects[plural].pop(name)
        obj["metadata"]["resourceVersion"] = str(self.version)
        if is_told:
            self.tell(plural, "DELETED", obj)

    def tell(self, plural, kind, obj):
        """Send an event to the watches of a kind."""
        for queue in self.watches[plural]:
            queue.put_nowait({"type": kind, "object": obj})


class Harness:
    """A server, a client, the stores and kopf."""

    def __init__(self, server, client):
        self.server = server
        self.client = client
        self.changes = asyncio.Queue()
        self.graphs, self.adapters = (
            HandlerStore(
                kind,
                trim=trim_child,
                on_change=lambda change, obj: self.changes.put_nowait((change, obj["metadata"]["name"])),
            )
            for kind in (GRAPH_DEPLOYMENT, SCALING_ADAPTER)
        )
        self.kopfs = [KopfOperator(client, each, namespace="ns") for each in (self.graphs, self.adapters)]

    async def run(self):
        """Run kopf for both kinds."""
        async with asyncio.TaskGroup() as group:
            for each in self.kopfs:
                group.create_task(each.run())

    async def change(self):
        """Return the next change that a handler brought."""
        async with asyncio.timeout(20):
            return await self.changes.get()

    async def until(self, check):
        """Wait until ``check()`` holds."""
        async with asyncio.timeout(20):
            while not check():  # noqa: ASYNC110 - a test's own polling
                await asyncio.sleep(0.005)

    async def watching(self):
        """Wait until kopf watches both kinds."""
        await self.until(lambda: all(self.server.watches.values()))


@pytest.fixture
async def harness(tmp_path, monkeypatch):
    """Everything, not started; nothing waits long."""
    monkeypatch.setattr(handlers_module, "FIRST_CHECK_S", 0.05)
    monkeypatch.setattr(handlers_module, "CHECK_S", 0.2)
    monkeypatch.setattr(handlers_module, "RETRIES_S", (0.01,))
    server = Server()
    await server.http.start("127.0.0.1", 0)
    config = {
        "current-context": "one",
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.http.port}"}}],
        "contexts": [{"name": "one", "context": {"cluster": "c", "user": "u"}}],
        "users": [{"name": "u", "user": {"token": "secret"}}],
    }
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
    client = await KubeClient.connect(kubeconfig=tmp_path / "kubeconfig", rng=random.Random(1))
    yield Harness(server, client)
    await client.close()
    await server.http.close(grace_s=0)


@pytest.fixture
async def running(harness):
    """Everything, with kopf under way and one graph known."""
    harness.server.put("graphdeployments", "first")
    task = asyncio.create_task(harness.run())
    assert await harness.change() == ("ADDED", "first")
    await harness.watching()
    yield harness
    task.cancel()
    await asyncio.wait({task})


async def test_handlers_bring_everything_that_is_known(running):
    """What is there at the start, what comes, changes and goes: without the handlers nothing would be known."""
    server = running.server
    server.put("scalingadapters", "a")
    server.put("graphdeployments", "first")
    server.delete("scalingadapters", "a")
    found = [await running.change() for _ in range(3)]
    assert sorted(found) == [("ADDED", "a"), ("DELETED", "a"), ("MODIFIED", "first")]
    assert found.index(("ADDED", "a")) < found.index(("DELETED", "a"))
    async with asyncio.timeout(10):
        await running.graphs.synced.wait()
        await running.adapters.synced.wait()
    assert server.authorizations == {b"Bearer secret"}


async def test_each_kind_is_watched_once(running):
    """One stream each, and no list beside kopf's own and the comparisons'."""
    assert [len(each) for each in running.server.watches.values()] == [1, 1]


async def test_what_vanished_while_the_watch_was_broken_is_removed(running):
    """410: kopf lists again and says nothing of the object that is gone; the comparison does."""
    server = running.server
    server.put("graphdeployments", "second")
    assert await running.change() == ("ADDED", "second")
    async with asyncio.timeout(10):
        await running.graphs.synced.wait()
    server.delete("graphdeployments", "first", is_told=False)
    server.put("graphdeployments", "third", is_told=False)
    server.tell("graphdeployments", "ERROR", {"kind": "Status", "code": 410, "message": "too old"})
    found = {await running.change(), await running.change()}
    assert found == {("ADDED", "third"), ("DELETED", "first")}


async def test_kopf_that_ends_is_started_again(running):
    """A watch that fails for good ends kopf; readiness says so, and the next run brings what was missed."""
    server = running.server
    server.refuse_watches = True
    for queues in server.watches.values():
        for queue in queues:
            queue.put_nowait(None)
    await running.until(lambda: running.graphs.problem is not None)
    assert "etcd is away" in running.graphs.problem
    server.put("graphdeployments", "second")
    server.refuse_watches = False
    assert await running.change() == ("ADDED", "second")
    await running.until(lambda: running.graphs.problem is None)


async def test_handlers_that_miss_an_object_are_started_again(running, monkeypatch):
    """An object that the list shows and no handler reported: the next run lists it."""
    monkeypatch.setattr("penstock.operator.handler_store.STALLED_S", 0.0)
    running.server.put("graphdeployments", "missed", is_told=False)
    assert await running.change() == ("ADDED", "missed")


async def test_the_end_leaves_no_task_of_kopf_and_none_of_others_ended(harness):
    """Leadership is lost: kopf stops within its bound, and the process's other tasks go on."""
    before = asyncio.all_tasks()
    harness.server.put("graphdeployments", "first")
    task = asyncio.create_task(harness.run())
    await harness.change()
    await harness.watching()
    other = asyncio.create_task(asyncio.Event().wait())
    async with asyncio.timeout(handlers_module.STOP_S):
        task.cancel()
        await asyncio.wait({task})
    left = {each for each in asyncio.all_tasks() - before if "HttpServer" not in repr(each.get_coro())}
    assert not other.done()
    other.cancel()
    await asyncio.wait({other})
    assert {each for each in left if "kopf" in repr(each)} == set()


async def test_a_kind_that_fails_leaves_the_other_ones_watch_alone(running):
    """And no second one of its own behind."""
    server = running.server
    [adapters] = server.watches["scalingadapters"]
    server.tell("graphdeployments", "ERROR", {"kind": "Status", "code": 500, "message": "etcd is away"})
    await running.until(lambda: running.graphs.problem is not None)
    await running.until(lambda: running.graphs.problem is None)
    await running.watching()
    assert server.watches["scalingadapters"] == [adapters]
    assert len(server.watches["graphdeployments"]) == 1


async def test_signals_stay_the_processes_own(harness):
    """Kopf claims SIGTERM when it starts; the process takes it back."""
    got = asyncio.Event()
    loop_module._on_signal.set(lambda number: got.set())
    harness.server.put("graphdeployments", "first")
    task = asyncio.create_task(harness.run())
    await harness.change()
    signal.raise_signal(signal.SIGTERM)
    async with asyncio.timeout(10):
        await got.wait()
    assert not task.done()
    task.cancel()
    await asyncio.wait({task})
    loop_module._on_signal.set(None)
    loop_module.reclaim_signals()
