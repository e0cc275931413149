"""Workers behind TLS: health, metrics and requests, with the router's own token."""

import asyncio
import contextlib
import json
import ssl
from types import SimpleNamespace

import pytest
from certificates import write_certificates
from click.testing import CliRunner

from penstock.cli.router import router as command
from penstock.core.errors import ConfigError
from penstock.core.http.tls import TlsFiles
from penstock.router.discovery.statefile import parse_static_workers


@pytest.fixture
async def behind_tls(tmp_path):
    """A TLS proxy before each worker, as a service mesh or an ingress is."""
    write_certificates(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")
    servers = []

    async def pipe(reader, writer):
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
        writer.close()

    async def before(worker):
        async def relay(reader, writer):
            inner = await asyncio.open_connection("127.0.0.1", worker.server.port)
            await asyncio.gather(pipe(reader, inner[1]), pipe(inner[0], writer))

        servers.append(await asyncio.start_server(relay, "127.0.0.1", 0, ssl=context))
        port = servers[-1].sockets[0].getsockname()[1]
        return SimpleNamespace(name=worker.name, role=worker.role, url=f"https://127.0.0.1:{port}")

    yield before
    for each in servers:
        each.close()


async def test_prefill_and_decode_are_served_behind_tls(harness, behind_tls, tmp_path):
    """Found well, and asked with the router's token, whatever a client sends; streams too."""
    (tmp_path / "token").write_text("for-workers")
    prefill, decode = await harness.pair()
    files = TlsFiles(ca=tmp_path / "ca.crt", token=tmp_path / "token")
    fronts = [await behind_tls(each) for each in (prefill, decode)]
    router = await harness.router(*fronts, worker_tls=files)

    answer = await router.post(
        max_tokens=3, headers=((b"content-type", b"application/json"), (b"authorization", b"Bearer client"))
    )
    stream = await router.stream(max_tokens=3)

    assert answer.status == 200
    assert b"[DONE]" in await stream.read(limit_bytes=10_000)
    assert {each.headers[b"authorization"] for each in prefill.seen + decode.seen} == {b"Bearer for-workers"}


async def test_a_worker_of_another_authority_is_not_well(harness, behind_tls):
    """It gets no request, and its problem says no connection."""
    worker = await harness.worker("aggregated")
    router = await harness.router(await behind_tls(worker), ready=False)

    await router.until(lambda: any(each.health_problem for each in router.server.core.pool))
    assert (await router.post(max_tokens=3)).status == 503
    assert worker.seen == []


def test_a_fixed_fleet_may_be_https():
    """But nothing else."""
    (spec,) = parse_static_workers(["aggregated=https://llm.example/"])
    assert spec.url == "https://llm.example"
    for url in ("ftp://x", "https://", "https:///x"):
        with pytest.raises(ConfigError, match="or https, with a role"):
            parse_static_workers([f"aggregated={url}"])


@pytest.mark.parametrize(
    ("worker", "flag", "words"),
    [
        ("http://127.0.0.1:1", "--worker-ca-file", "no --worker has an https URL"),
        ("https://127.0.0.1:1", "--worker-token-file", "No such file"),
    ],
)
def test_files_without_effect_are_refused(worker, flag, words, tmp_path):
    """And those that are not there."""
    given = ["serve", "--model", "m", "--worker", f"aggregated={worker}", flag, str(tmp_path / "none")]
    answer = CliRunner().invoke(command, given)
    assert answer.exit_code != 0
    assert words in answer.output + str(answer.exception)


@pytest.mark.parametrize(
    ("discovery", "folder"), [("kubernetes", "/etc/penstock-worker-auth"), ("state.json", "{tmp}")]
)
def test_the_router_of_a_graph_knows_its_workers(tmp_path, monkeypatch, discovery, folder):
    """By the manifest; the token is in the mounted Secret, or in the workers' folder."""
    write_certificates(tmp_path)
    (tmp_path / "token").write_text("for-workers")
    tls = {"caBundle": (tmp_path / "ca.crt").read_text(), "folder": str(tmp_path), "tokenKey": "token"}
    graph = {
        "apiVersion": "penstock.dev/v1alpha1",
        "kind": "GraphDeployment",
        "metadata": {"name": "llama"},
        "spec": {
            "runtime": "simulated",
            "model": {"name": "m"},
            "engine": {"tls": tls},
            "services": {"router": {"role": "router"}, "worker": {"role": "aggregated"}},
        },
    }
    (tmp_path / "graph.yaml").write_text(json.dumps(graph))
    seen = []

    def made(settings, _tracing, *, inherited_socket):
        seen.append(settings)
        return SimpleNamespace(serve=None)

    monkeypatch.setattr("penstock.cli.router.RouterServer", made)
    monkeypatch.setattr("penstock.cli.router.loop.run", lambda _serve: None)
    monkeypatch.setattr(TlsFiles, "check", lambda _self: None)
    given = ["serve", "--graph", str(tmp_path / "graph.yaml"), "--discovery", discovery]
    CliRunner().invoke(command, given, catch_exceptions=False)
    (files,) = [each.worker_tls for each in seen]
    assert (files.authorities, files.server_name) == (tls["caBundle"], "penstock-worker")
    assert str(files.token) == folder.format(tmp=tmp_path) + "/token"
