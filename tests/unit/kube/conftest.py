"""An API server of a few lines: answers by a script, over real loopback HTTP, and remembers what it was asked."""

import asyncio
import random
from urllib.parse import parse_qs, urlsplit

import orjson
import pytest
import uvloop
import yaml

from penstock.core.http.server import HttpServer
from penstock.kube.client import KubeClient


def pytest_asyncio_loop_factories(config, item):
    """Run these tests on the loop that the processes run on."""
    return {"uvloop": uvloop.new_event_loop}


class Asked:
    """One request as the server saw it."""

    def __init__(self, request):
        parts = urlsplit(request.target.decode())
        self.method = request.method
        self.path = parts.path
        self.query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        self.headers = {key.decode().lower(): value.decode() for key, value in request.headers.items()}
        self.body = request.body


class FakeApi:
    """Answers each request by the next entry of ``script``: ``(status, object)``, with headers as a third."""

    def __init__(self):
        self.script = []
        self.asked = []
        self.status = status_of
        self.stream = stream_of
        self.server = HttpServer(self._handle)

    async def _handle(self, request, responder):
        self.asked.append(Asked(request))
        answer = self.script.pop(0)
        if callable(answer):
            await answer(responder)
            return
        status, obj, *more = answer
        body = obj if isinstance(obj, bytes) else orjson.dumps(obj)
        responder.send(status, body, headers=tuple(more[0]) if more else ())


def status_of(code, message="no", reason="Failed"):
    """Return a Status object as the API server sends it."""
    return {"kind": "Status", "status": "Failure", "code": code, "message": message, "reason": reason}


def stream_of(*lines, then=None):
    """Return an answer that streams lines and ends, or stays open until an event is set."""

    async def answer(responder):
        responder.start(200)
        for line in lines:
            responder.write(line if isinstance(line, bytes) else orjson.dumps(line) + b"\n")
        if then is not None:
            gone = asyncio.Event()
            responder.on_disconnect(gone.set)
            waits = [asyncio.create_task(each.wait()) for each in (then, gone)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for each in waits:
                each.cancel()
            if gone.is_set():
                return
        responder.end()

    return answer


@pytest.fixture
def write_kubeconfig(tmp_path):
    """Return a function that writes a kubeconfig and returns its path."""

    def write(server="http://127.0.0.1:1", user=None, **changes):
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "one",
            "clusters": [{"name": "c", "cluster": {"server": server}}],
            "contexts": [
                {"name": "one", "context": {"cluster": "c", "user": "u", "namespace": "first"}},
                {"name": "two", "context": {"cluster": "c", "user": "u", "namespace": "second"}},
                {"name": "bare", "context": {"cluster": "c", "user": "u"}},
            ],
            "users": [{"name": "u", "user": user or {"token": "t"}}],
            **changes,
        }
        path = tmp_path / "kubeconfig"
        path.write_text(yaml.safe_dump(config))
        return path

    return write


@pytest.fixture
async def api():
    """A running fake API server."""
    made = FakeApi()
    await made.server.start("127.0.0.1", 0)
    yield made
    await made.server.close(grace_s=0)


@pytest.fixture
async def client(api, write_kubeconfig):
    """A client of the fake API server."""
    path = write_kubeconfig(f"http://127.0.0.1:{api.server.port}")
    made = await KubeClient.connect(kubeconfig=path, rng=random.Random(1))
    yield made
    await made.close()


@pytest.fixture
def no_pause(monkeypatch):
    """Backoff pauses take no time; what was asked for is kept."""
    pauses = []
    real = asyncio.sleep

    async def sleep(seconds):
        pauses.append(seconds)
        await real(0)

    monkeypatch.setattr("penstock.kube.transport.asyncio.sleep", sleep)
    return pauses
