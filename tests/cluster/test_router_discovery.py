"""A real router against a real API server: workers come and go by EndpointSlices, requests are served."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import orjson
import pytest
from accounts import account
from apiserver import own_address

from penstock.core.http.client import ConnectionPool, Timeouts
from penstock.engine.core.requests import EngineRole
from penstock.engine.serve.server import EngineServer
from penstock.engine.serve.settings import ServeFlags, resolve
from penstock.kube.client import KubeClient
from penstock.kube.kinds import ENDPOINT_SLICE, GRAPH_DEPLOYMENT
from penstock.router.server import RouterServer
from penstock.router.settings import GraphReference, RouterSettings

pytestmark = [
    pytest.mark.cluster,
    # A connection whose TLS handshake is cancelled is left to the garbage collector, and uvloop says so.
    pytest.mark.filterwarnings("ignore:unclosed resource:ResourceWarning"),
]

ME = "penstock-test"
READY = {"ready": True, "serving": True, "terminating": False}
LEAVING = {"ready": False, "serving": True, "terminating": True}
JSON = ((b"content-type", b"application/json"),)


def slice_of(namespace, graph, worker, conditions=READY):
    """Return the EndpointSlice of one worker."""
    name, role, address, port = worker
    pod = {"kind": "Pod", "name": name, "namespace": namespace, "uid": f"uid-{name}"}
    labels = {"penstock.dev/graph": graph, "penstock.dev/role": role}
    return ENDPOINT_SLICE.of(
        {"name": name, "namespace": namespace, "labels": labels},
        addressType="IPv4",
        ports=[{"name": "http", "port": port, "protocol": "TCP"}],
        endpoints=[{"addresses": [address], "conditions": conditions, "targetRef": pod}],
    )


class Place:
    """Workers, a router and a client in one namespace."""

    def __init__(self, kube, namespace, exits, group):
        self.kube, self.namespace, self._group = kube, namespace, group
        self._exits = exits
        self.pool = ConnectionPool()
        self.address = own_address() or pytest.skip(
            "EndpointSlices may not name loopback, the only interface"
        )
        self.router = None

    async def worker(self, name, role):
        """Start a simulated worker; return what its slice says."""
        flags = ServeFlags(
            model="m",
            profile="h200-llama-3.1-8b-tp1",
            role=EngineRole(role),
            host=self.address,
            port=0,
            speed=20.0,
        )
        server = EngineServer(resolve(flags), self._group)
        await server.start()
        self._exits.push_async_callback(server.close, grace_s=0.0)
        return name, role, self.address, server.port

    async def show(self, worker, conditions=READY, graph="llama"):
        """Write a worker's slice, as Kubernetes would."""
        await self.kube.apply(slice_of(self.namespace, graph, worker, conditions), field_manager=ME)

    async def hide(self, worker):
        """Delete a worker's slice."""
        await self.kube.delete(ENDPOINT_SLICE, worker[0], namespace=self.namespace)

    async def start_router(self):
        """Start a router that looks for graph llama."""
        settings = RouterSettings(
            model="m", disaggregated=False, speed=20.0, kubernetes=GraphReference("llama", self.namespace)
        )
        self.router = RouterServer(settings)
        await self.router.start()
        self._exits.push_async_callback(self.router.close)

    async def ask(self, **body):
        """Send a completion and return the whole answer."""
        content = orjson.dumps({"model": "m", "prompt": "hello", "max_tokens": 4, **body})
        url = f"http://127.0.0.1:{self.router.port}/v1/completions"
        return await self.pool.request("POST", url, body=content, headers=JSON, timeouts=Timeouts(total_s=60))

    async def stream(self, tokens):
        """Begin a stream and return it when its head has come."""
        content = orjson.dumps(
            {"model": "m", "prompt": "hello", "max_tokens": tokens, "stream": True, "ignore_eos": True}
        )
        url = f"http://127.0.0.1:{self.router.port}/v1/completions"
        return await self.pool.stream("POST", url, body=content, headers=JSON)

    async def page(self, path):
        """Return a page of the router."""
        return await self.pool.request("GET", f"http://127.0.0.1:{self.router.port}{path}")

    async def until(self, condition, limit_s=30.0):
        """Wait for a condition of the router."""
        async with asyncio.timeout(limit_s):
            while not condition():  # noqa: ASYNC110 - the fleet sets no event
                await asyncio.sleep(0.02)

    async def until_problem(self, words):
        """Wait until the router tells a problem of its discovery with these words."""
        async with asyncio.timeout(30):
            while words not in (  # noqa: ASYNC110 - the router is asked
                orjson.loads((await self.page("/workers")).body)["discovery_problem"] or ""
            ):
                await asyncio.sleep(0)

    @property
    def names(self):
        """Workers that the router knows."""
        return sorted(each.name for each in self.router.core.pool)


@asynccontextmanager
async def place_of(plane, namespace, monkeypatch, kubeconfig=None):
    """Open a place; the router reads its credentials from KUBECONFIG."""
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig or plane.kubeconfig))
    async with asyncio.TaskGroup() as group, AsyncExitStack() as exits:
        kube = await KubeClient.connect(kubeconfig=plane.kubeconfig)
        exits.push_async_callback(kube.close)
        place = Place(kube, namespace, exits, group)
        exits.push_async_callback(place.pool.close)
        yield place


@pytest.fixture
async def place(api_server, namespace, monkeypatch):
    """A place on the session's API server."""
    async with place_of(api_server, namespace, monkeypatch) as made:
        yield made


async def test_workers_join_and_leave_without_a_restart(place):
    """A request waits for the first worker; others join, are drained and vanish while requests are served."""
    first, second = await place.worker("one", "aggregated"), await place.worker("two", "aggregated")
    await place.start_router()
    assert (await place.page("/ready")).status == 503
    waiting = asyncio.create_task(place.ask())
    await place.until(lambda: len(place.router.core.entry_queue) == 1)
    await place.show(first)
    assert (await waiting).status == 200
    await place.show(second)
    await place.until(lambda: place.names == ["one", "two"])
    await place.show(first, LEAVING)
    await place.until(lambda: place.router.core.pool.get("one").spec.draining)
    assert [(await place.ask()).status for _ in range(3)] == [200] * 3
    await place.hide(first)
    await place.until(lambda: place.names == ["two"])
    assert (await place.ask()).status == 200


async def test_a_stream_outlives_its_workers_slice(place):
    """The slice goes while its worker streams: the stream ends whole."""
    worker = await place.worker("one", "aggregated")
    await place.show(worker)
    await place.start_router()
    await place.until(lambda: not place.router.admission.problems())
    stream = await place.stream(tokens=200)
    begun = await anext(stream)
    await place.hide(worker)
    await place.until(lambda: not place.names)
    # On a busy machine all of it may have come at once.
    whole = begun + await stream.read(limit_bytes=1_000_000)
    assert whole.rstrip().endswith(b"data: [DONE]")


async def test_a_role_that_may_read_slices_and_its_graph_is_enough(crds, place, namespace, monkeypatch):
    """With EndpointSlices and the one graph, and nothing else, the router works and its page knows GPUs and planner."""
    slices = {
        "apiGroups": ["discovery.k8s.io"],
        "resources": ["endpointslices"],
        "verbs": ["get", "list", "watch"],
    }
    own = {"apiGroups": ["penstock.dev"], "resources": ["graphdeployments"], "verbs": ["get"]}
    kubeconfig = account(crds, namespace, "router", [slices, {**own, "resourceNames": ["llama"]}])
    spec = {
        "model": {"name": "m"},
        "runtime": "simulated",
        "services": {
            "frontend": {"role": "router", "replicas": 1},
            "decode": {"role": "aggregated", "gpusPerReplica": 2, "replicas": 1},
        },
        "planner": {"maxGpuBudget": 6},
    }
    graph = GRAPH_DEPLOYMENT.of({"name": "llama", "namespace": namespace}, spec=spec)
    await place.kube.apply(graph, field_manager=ME)
    async with place_of(crds, namespace, monkeypatch, kubeconfig) as restricted:
        worker = await restricted.worker("one", "aggregated")
        await restricted.show(worker)
        await restricted.start_router()
        await restricted.until(lambda: not restricted.router.admission.problems())
        assert (await restricted.ask()).status == 200
        assert orjson.loads((await restricted.page("/workers")).body)["discovery_problem"] is None
        state = orjson.loads((await restricted.page("/ui/state")).body)
        assert state["gpus"] == {"used": 2, "budget": 6}
        assert state["planner"]["message"] == "no planner has written to the graph's status"


async def test_without_the_right_the_router_says_which(api_server, namespace, monkeypatch):
    """403: the router lives, serves nobody, and /ready carries the server's words."""
    kubeconfig = api_server.service_account_kubeconfig(namespace, "default")
    async with place_of(api_server, namespace, monkeypatch, kubeconfig) as place:
        monkeypatch.setattr("penstock.router.discovery.kubernetes.FIRST_VIEW_S", 1.0)
        await place.start_router()
        await place.until_problem("403")
        reasons = orjson.loads((await place.page("/ready")).body)["reasons"]
        assert any("cannot list resource" in each for each in reasons)


async def test_requests_are_served_while_the_api_server_is_away(own_api_server, monkeypatch):
    """Killed and restarted API server: no request fails, the problem is told, and changes are seen after."""
    async with place_of(own_api_server, "default", monkeypatch) as place:
        first, second = await place.worker("one", "aggregated"), await place.worker("two", "aggregated")
        await place.show(first)
        await place.start_router()
        await place.until(lambda: not place.router.admission.problems())
        own_api_server.kill("kube-apiserver")
        await place.until_problem("does not answer")
        assert [(await place.ask()).status for _ in range(3)] == [200] * 3
        await asyncio.to_thread(own_api_server.start_api_server)
        await place.show(second)
        await place.until(lambda: place.names == ["one", "two"])
        assert orjson.loads((await place.page("/workers")).body)["discovery_problem"] is None
