"""Kopf's handlers on this loop against an API server of a few lines: what they report, hold and write."""

import asyncio
import random

import orjson
import pytest
import uvloop
import yaml

from penstock.core.http.server import HttpServer
from penstock.kube.client import KubeClient
from penstock_operator import handlers as handlers_module
from penstock_operator.handlers import KopfOperator

GROUP = "/apis/penstock.dev/v1alpha1"
KINDS = {"graphdeployments": "GraphDeployment", "profilerequests": "ProfileRequest"}
DRAIN = "penstock.dev/drain"


def pytest_asyncio_loop_factories(config, item):
    """Run these tests on the loop that the processes run on."""
    return {"uvloop": uvloop.new_event_loop}


class Server:
    """Discovery, lists and watches of the two kinds; a test changes objects and breaks watches."""

    def __init__(self):
        self.version = 10
        self.objects = {plural: {} for plural in KINDS}
        self.watches = {plural: [] for plural in KINDS}
        self.patches = []
        self.authorizations = set()
        self.refused, self.refusals = None, 0
        self.http = HttpServer(self._handle)

    async def _handle(self, request, responder):
        authorization = request.headers.get(b"authorization")
        self.authorizations.add(authorization)
        path, _, query = request.target.decode().partition("?")
        plural = path.rpartition("/")[2]
        if authorization == self.refused:
            self.refusals += 1
            responder.send(401, b'{"kind":"Status","code":401}')
        elif request.method == "PATCH":
            self._patch(path, orjson.loads(request.body), responder)
        elif plural not in KINDS:
            responder.send(200, orjson.dumps(self._discovery(path)))
        elif "watch=true" not in query:
            items = list(self.objects[plural].values())
            metadata = {"resourceVersion": str(self.version)}
            body = {
                "kind": f"{KINDS[plural]}List",
                "apiVersion": "penstock.dev/v1alpha1",
                "metadata": metadata,
            }
            responder.send(200, orjson.dumps({**body, "items": items}))
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

    def _patch(self, path, patch, responder):
        """Carry out what kopf writes: finalizers as JSON patch, its touch as merge patch."""
        plural, name = path.split("/")[-2:]
        obj = self.objects[plural].get(name)
        if obj is None:
            responder.send(404, b'{"kind":"Status","code":404}')
            return
        metadata = obj["metadata"]
        self.patches.append(patch)
        if isinstance(patch, dict):
            metadata.setdefault("annotations", {}).update(patch["metadata"]["annotations"])
        else:
            test, *operations = patch
            if test["value"] != metadata["resourceVersion"]:
                responder.send(422, b'{"kind":"Status","code":422}')
                return
            is_added = any(each["op"] == "add" for each in operations)
            metadata["finalizers"] = [DRAIN] if is_added else []
        self.tell(plural, "MODIFIED", obj)
        if metadata.get("deletionTimestamp") and not metadata["finalizers"]:
            self.tell(plural, "DELETED", self.objects[plural].pop(name))
        responder.send(200, orjson.dumps(obj))

    def put(self, plural, name, *, operator_class="penstock", **metadata):
        """Make or change an object."""
        known = self.objects[plural].get(name)
        metadata = {"name": name, "namespace": "ns", "uid": f"uid-{name}", **metadata}
        if known is not None:
            metadata = {**known["metadata"], **metadata}
        obj = {"apiVersion": "penstock.dev/v1alpha1", "kind": KINDS[plural], "metadata": metadata}
        obj["spec"] = {"operatorClass": operator_class}
        self.objects[plural][name] = obj
        self.tell(plural, "MODIFIED" if known else "ADDED", obj)

    def tell(self, plural, kind, obj):
        """Send an event with a new version to the watches of a kind."""
        self.version += 1
        obj.setdefault("metadata", {})["resourceVersion"] = str(self.version)
        event = orjson.loads(orjson.dumps({"type": kind, "object": obj}))
        for queue in self.watches[plural]:
            queue.put_nowait(event)


class View:
    """Notes what the handlers report of one kind."""

    def __init__(self, changes):
        self._changes = changes

    def report(self, obj):
        """Note an object that is there."""
        finalizers = obj["metadata"].get("finalizers", [])
        self._changes.put_nowait(("there", obj["metadata"]["name"], finalizers))

    def remove(self, obj):
        """Note an object that is gone."""
        self._changes.put_nowait(("gone", obj["metadata"]["name"], []))


class Harness:
    """A server, a client, what the handlers report, and kopf."""

    def __init__(self, server, client, *, resync_s=60.0):
        self.server = server
        self.client = client
        self.changes = asyncio.Queue()
        self.due = asyncio.Queue()
        self.finished = asyncio.Event()
        view = View(self.changes)
        self.kopf = KopfOperator(
            client,
            graphs=view,
            requests=view,
            enqueue=self.due.put_nowait,
            wait_deleted=self._deleted,
            report_refusal=self._refused,
            namespace="ns",
            operator_class="penstock",
            resync_s=resync_s,
        )

    async def _deleted(self, _uid):
        await self.finished.wait()

    async def _refused(self, _graph, refusals):
        pass

    async def change(self):
        """Return the next change that a handler brought."""
        return await self.changes.get()

    async def until(self, check):
        """Wait until ``check()`` holds."""
        while not check():  # noqa: ASYNC110 - a test's own polling
            await asyncio.sleep(0.005)

    async def watching(self):
        """Wait until kopf watches both kinds."""
        await self.until(lambda: all(self.server.watches.values()))


@pytest.fixture
async def harness(tmp_path):
    """Everything, not started."""
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
    task = asyncio.create_task(harness.kopf.run())
    assert await harness.change() == ("there", "first", [DRAIN])
    await harness.watching()
    yield harness
    task.cancel()
    await asyncio.wait({task})


async def test_a_graph_is_reported_once_it_carries_the_finalizer(running):
    """Not before; a request is reported as it is. Kopf writes nothing else."""
    server = running.server
    server.put("profilerequests", "r")
    assert await running.change() == ("there", "r", [])
    server.put("graphdeployments", "first", labels={"a": "b"})
    assert await running.change() == ("there", "first", [DRAIN])
    assert len(server.patches) == 1
    assert server.authorizations == {b"Bearer secret"}


async def test_refused_credentials_are_waited_for(running, monkeypatch, tmp_path):
    """Read repeatedly until the API server takes them, or the client has read them; kopf then continues."""
    for pause in ("LOGIN_GAP_S", "RECALL_S"):
        monkeypatch.setattr(handlers_module, pause, 0.01)
    server, kubeconfig = running.server, tmp_path / "kubeconfig"
    good, seen = kubeconfig.read_text(), len(server.patches)
    kubeconfig.write_text("no kubeconfig")
    server.refused = b"Bearer secret"
    server.put("graphdeployments", "second")
    await running.until(lambda: server.refusals)
    kubeconfig.write_text(good)
    await running.until(lambda: server.refusals > 2)
    kubeconfig.write_text(good.replace("secret", "next"))
    await running.until(lambda: len(server.patches) > seen)
    while await running.change() != ("there", "second", [DRAIN]):
        pass
    assert b"Bearer next" in server.authorizations


async def test_the_finalizer_goes_when_the_reconciler_is_done(running):
    """Through calls of the handler that wait in vain; then the graph is gone."""
    server = running.server
    server.put("graphdeployments", "first", deletionTimestamp="2026-01-01T00:00:00Z")
    assert await running.change() == ("there", "first", [DRAIN])
    await asyncio.sleep(0)
    assert "first" in server.objects["graphdeployments"]
    running.finished.set()
    changes = [await running.change()]
    while changes[-1][0] != "gone":
        changes.append(await running.change())
    assert server.objects["graphdeployments"] == {}


async def test_a_long_deletion_is_waited_for_again(running, monkeypatch):
    """The handler's bound passes; kopf comes back by a touch of the graph."""
    monkeypatch.setattr(handlers_module, "DELETION_S", 0.01)
    server = running.server
    server.put("graphdeployments", "first", deletionTimestamp="2026-01-01T00:00:00Z")
    await running.until(lambda: any(isinstance(each, dict) for each in server.patches))
    running.finished.set()
    await running.until(lambda: not server.objects["graphdeployments"])


async def test_a_watch_that_breaks_brings_what_was_missed(running):
    """410: kopf lists again."""
    server = running.server
    server.put("graphdeployments", "first", labels={"a": "b"})
    await running.change()
    server.objects["graphdeployments"]["first"]["metadata"] |= {"resourceVersion": "1000", "labels": {}}
    for queue in server.watches["graphdeployments"]:
        error = {"kind": "Status", "code": 410, "message": "too old"}
        queue.put_nowait({"type": "ERROR", "object": error})
    assert await running.change() == ("there", "first", [DRAIN])


async def test_the_end_leaves_no_task_of_kopf_and_none_of_others_ended(harness):
    """Leadership is lost: kopf stops within its bound, and the process's other tasks continue."""
    before = asyncio.all_tasks()
    harness.server.put("graphdeployments", "first")
    task = asyncio.create_task(harness.kopf.run())
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


async def test_a_status_that_the_planner_writes_is_reported(running):
    """Its wants of a GPU pool come that way; kopf by itself takes a change of a status for none."""
    written = dict(running.server.objects["graphdeployments"]["first"])
    written["status"] = {"planner": {"wants": {"decode": 3}}}
    running.server.tell("graphdeployments", "MODIFIED", written)
    assert await running.change() == ("there", "first", [DRAIN])
