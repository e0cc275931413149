"""Dynamo's frontend of a local graph: who is registered, and how a worker leaves its discovery."""

import sys
from contextlib import asynccontextmanager

import orjson
import pytest
from states import serving

from penstock.api import GraphSpec
from penstock.core.errors import InvalidSpecError
from penstock.core.local_state import EntryState
from penstock.local.probes import NoAnswer, Probes
from penstock.local.store import StateStore
from penstock.runtimes import RuntimeContext, runtime_of
from penstock_dynamo.frontend import DynamoFrontend

WORKER, OTHER = 0x7AF62B357CF8BFFF, 0xBEC3E3A012ED7E68
PAGE = """\
# TYPE dynamo_component_inflight_requests gauge
dynamo_component_inflight_requests{dynamo_component="backend",dynamo_endpoint="worker_kv_query",worker_id="1"} 9
dynamo_component_inflight_requests{dynamo_component="backend",dynamo_endpoint="generate",worker_id="7af62b357cf8bfff"} 3
vllm:kv_cache_usage_perc{engine="0",model_name="llama"} 0.25
"""


class Frontend:
    """Answers as Dynamo 1.6's frontend does, out of the folder that its workers register in."""

    def __init__(self, folder):
        self.folder = folder
        self.models = ["llama"]

    def register(self, component, number):
        """Do what a worker does."""
        for bucket in ("instances", "mdc"):
            path = self.folder / "v1" / bucket / f"g%2F{component}%2Fgenerate%2F{number:x}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("{}")

    def answer(self, request, responder):
        """Serve the two pages that are asked for."""
        if request.path == "/v1/models":
            body = {"object": "list", "data": [{"id": each} for each in self.models]}
        else:
            names = [path.name.split("%2F") for path in (self.folder / "v1" / "instances").glob("*")]
            instances = [
                {"component": component, "endpoint": endpoint, "instance_id": int(number, 16)}
                for _, component, endpoint, number in names
            ]
            body = {"status": "healthy", "instances": instances}
        responder.send(200, orjson.dumps(body))


@pytest.fixture(name="frontend")
def _frontend(tmp_path):
    return Frontend(tmp_path / "g.dynamo")


@pytest.fixture
def dynamo_at(tmp_path, state_of):
    """Return a function that serves answers as Dynamo's frontend and yields the adapter of it."""

    @asynccontextmanager
    async def serve(answer):
        probes = Probes()
        async with serving(answer) as port:
            folder, url = str(tmp_path / "g.dynamo"), f"http://127.0.0.1:{port}"
            yield DynamoFrontend(probes, state_of(router_url=url, discovery_folder=folder).arbiter)
        await probes.close()

    return serve


@pytest.fixture
async def adapter(frontend, dynamo_at):
    """Yield the adapter of the fake frontend."""
    async with dynamo_at(frontend.answer) as made:
        yield made


def answers(body):
    """Return a server's function that answers everything alike."""
    return lambda _request, responder: responder.send(200, body)


@pytest.fixture(name="worker")
async def _worker(entry_of):
    async with serving(answers(PAGE.encode())) as port:
        yield entry_of(url=f"http://127.0.0.1:{port}", state=EntryState.READY, pid=7)


async def test_a_graph_serves_once_every_role_has_registered(adapter, frontend, entry_of):
    """A decode worker alone would serve, but not as the graph says."""
    entries = {
        role: entry_of(role=role, state=EntryState.READY)
        for role in ("decode", "prefill", "router", "planner")
    }
    assert await adapter.readiness(entries) == (
        False,
        "no decode and no prefill worker has registered with Dynamo's frontend",
    )
    frontend.register("backend", WORKER)
    assert await adapter.readiness(entries) == (
        False,
        "no prefill worker has registered with Dynamo's frontend",
    )
    frontend.register("prefill", OTHER)
    assert await adapter.readiness(entries) == (True, "")


async def test_a_graph_does_not_serve_before_the_model_is_listed(adapter, frontend, entry_of):
    """Workers register before their model's card is read."""
    frontend.register("backend", WORKER)
    frontend.models = []
    ready, why = await adapter.readiness({"decode": entry_of(state=EntryState.READY)})
    assert (ready, why) == (False, "Dynamo's frontend does not list model llama yet")


async def test_a_drained_worker_leaves_the_discovery_and_no_other_does(adapter, frontend, worker):
    """Its own two entries go; the frontend then lists the other alone."""
    frontend.register("backend", WORKER)
    frontend.register("backend", OTHER)
    assert await adapter.drain("g_decode", worker) is True
    left = sorted(path.name for path in frontend.folder.rglob("*") if path.is_file())
    assert left == [f"g%2Fbackend%2Fgenerate%2F{OTHER:x}"] * 2
    assert await adapter.drain("g_decode", worker) is True


async def test_a_drain_is_not_confirmed_while_the_frontend_lists_the_worker(dynamo_at, worker):
    """It may assign a request still."""
    listed = {"instances": [{"component": "backend", "endpoint": "generate", "instance_id": WORKER}]}
    async with dynamo_at(answers(orjson.dumps(listed))) as adapter:
        assert await adapter.drain("g_decode", worker) is False
    assert await adapter.drain("g_decode", worker) is NoAnswer.NOT_LISTENING


async def test_workers_are_shown_as_they_count_themselves(adapter, frontend, worker):
    """Requests and KV usage are theirs; one that the frontend does not list is said to be unregistered."""
    view = await adapter.view({"g_decode": worker})
    assert (view.workers["g_decode"].state, view.queue) == ("unregistered", None)
    frontend.register("backend", WORKER)
    (decode,) = (await adapter.view({"g_decode": worker})).workers.values()
    assert (decode.state, decode.inflight_requests, decode.kv_usage_fraction) == ("ready", 3, 0.25)
    assert decode.inflight_tokens is None


@pytest.mark.parametrize(
    "page",
    ["", "up 1\n", 'dynamo_component_inflight_requests{dynamo_endpoint="generate",worker_id="../x"} 0\n'],
)
async def test_a_page_that_names_no_worker_deregisters_nothing(adapter, frontend, entry_of, page):
    """What a worker says becomes part of a file's name, so it has to be a number."""
    frontend.register("backend", WORKER)
    async with serving(answers(page.encode())) as port:
        assert await adapter.drain("g_decode", entry_of(url=f"http://127.0.0.1:{port}")) is NoAnswer.SILENT
    assert len(list((frontend.folder / "v1" / "instances").iterdir())) == 1


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'{"instances": 3}', b'{"instances": [{"endpoint": "generate"}]}']
)
async def test_an_answer_that_is_no_frontends_is_none(body, dynamo_at):
    """Something else listens there."""
    async with dynamo_at(answers(body)) as adapter:
        assert await adapter.view({}) is NoAnswer.SILENT
        assert (await adapter.readiness({}))[0] is False


def test_discovery_goes_with_the_statefile(state_of):
    """Neither what a killed run left, nor what a stopped one did, is found by the next."""
    store = StateStore.of("g")
    stale = store.discovery_folder / "v1" / "instances"
    stale.mkdir(parents=True)
    store.claim(state_of("g"))
    assert not stale.exists()
    stale.mkdir(parents=True)
    store.remove()
    assert list(store.path.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("python", "why"), [("/no/such/bin/python", "cannot be run"), (sys.executable, "has no package")]
)
def test_a_python_without_dynamo_is_refused_before_anything_starts(python, why):
    """With how to install it."""
    spec = GraphSpec(model={"name": "m"}, runtime="dynamo", services={"worker": {"role": "aggregated"}})
    context = RuntimeContext(python=python, graph_file="", discovery="", namespace="g")
    with pytest.raises(InvalidSpecError, match=why) as refused:
        runtime_of("dynamo").check_installed(spec, context)
    assert "spec.engine.pythonEnvironment" in str(refused.value)
    assert "make dynamo" in str(refused.value)
