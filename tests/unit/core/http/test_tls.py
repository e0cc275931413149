"""Servers behind TLS: who is believed, who is asked for a certificate, and which token goes out."""

import asyncio
import contextlib
import ssl
from pathlib import Path
from types import SimpleNamespace

import pytest
from certificates import write_certificates

from penstock.core.errors import ConfigError, UpstreamConnectError
from penstock.core.http.client import ConnectionPool
from penstock.core.http.server import HttpServer
from penstock.core.http.tls import NO_FILES, UNVERIFIED, Tls, TlsFiles, server_context
from penstock.core.http.tls import files_of as files_of_workers


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Certificates of an own authority."""
    made = tmp_path_factory.mktemp("tls")
    write_certificates(made)
    return made


@pytest.fixture
async def served(folder):
    """A server that wants a client's certificate, and the heads that it got."""
    heads = []

    async def answer(reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                heads.append(await reader.readuntil(b"\r\n\r\n"))
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        writer.close()

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.crt", folder / "server.key")
    context.load_verify_locations(folder / "ca.crt")
    context.verify_mode = ssl.CERT_REQUIRED
    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    yield f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/x", heads
    server.close()


@pytest.fixture
async def pool_of():
    """Pools by their files; closed at the end."""
    pools = []

    def make(files):
        pools.append(ConnectionPool(tls=files))
        return pools[-1]

    yield make
    for each in pools:
        await each.close()


def files_of(folder, **more):
    """The client's files."""
    return TlsFiles(folder / "ca.crt", folder / "client.crt", folder / "client.key", **more)


async def test_a_server_of_the_given_authority_is_asked_on_one_connection(served, folder, tmp_path, pool_of):
    """With the pool's token in place of a client's."""
    url, heads = served
    (tmp_path / "token").write_text("secret\n")
    pool = pool_of(files_of(folder, token=tmp_path / "token"))

    for _ in range(2):
        answer = await pool.request("GET", url, headers=[(b"Authorization", b"Bearer of-a-client")])
        assert (answer.status, answer.body) == (200, b"ok")

    assert pool.connections == 1
    assert all(head.lower().count(b"authorization:") == 1 and b"Bearer secret\r\n" in head for head in heads)


async def test_a_clients_own_token_goes_on_where_the_pool_has_none(served, folder, pool_of):
    """As to any worker."""
    url, heads = served
    await pool_of(files_of(folder)).request("GET", url, headers=[(b"authorization", b"Bearer own")])
    assert b"Bearer own" in heads[0]


async def test_a_server_of_another_authority_gets_nothing(served, pool_of):
    """It is a failed connection, as one that is refused; no request was sent."""
    url, heads = served
    with pytest.raises(UpstreamConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        await pool_of(TlsFiles()).request("GET", url)
    assert heads == []


@pytest.fixture
async def own_server(folder):
    """Penstock's own HTTP server, with a certificate; its base URL."""

    async def answer(_request, responder):
        await responder.send(200, b"ok")

    server = HttpServer(answer)
    await server.start("127.0.0.1", 0, server_context(folder / "server.crt", folder / "server.key"))
    yield f"https://127.0.0.1:{server.port}/x"
    await server.close(grace_s=1.0)


async def test_workers_are_known_by_the_name_in_their_certificate(own_server, folder, pool_of):
    """Whatever address they have; a manifest holds the authorities as text."""
    said = SimpleNamespace(
        ca_bundle=(folder / "ca.crt").read_text(), server_name="penstock-worker", token_key="token"
    )
    assert files_of_workers(said).token is None
    assert files_of_workers(said, "/secret").token == Path("/secret/token")
    answer = await pool_of(files_of_workers(said)).request("GET", own_server)
    assert (answer.status, answer.body) == (200, b"ok")

    said.server_name = "another"
    with pytest.raises(UpstreamConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        await pool_of(files_of_workers(said)).request("GET", own_server)


async def test_one_that_only_asks_how_a_process_is_may_leave_it_unproved(own_server, pool_of):
    """As the kubelet does."""
    answer = await pool_of(UNVERIFIED).request("GET", own_server)
    assert answer.status == 200


def test_without_tls_nothing_is_needed():
    """A graph's workers speak http by default."""
    assert files_of_workers(None, "/secret") == NO_FILES


def test_a_servers_files_that_cannot_be_used_are_named(folder, tmp_path):
    """Both of them."""
    with pytest.raises(ConfigError, match=r"none\.key: .*give readable files in PEM"):
        server_context(folder / "server.crt", tmp_path / "none.key")


async def test_a_plain_server_is_not_spoken_to_in_tls(served, folder, pool_of):
    """Nor the other way round: a connection is of one kind."""
    url, _ = served
    pool = pool_of(files_of(folder))
    await pool.request("GET", url)
    with pytest.raises(Exception, match=r"127\.0\.0\.1"):
        await pool.request("GET", url.replace("https", "http"))


def test_a_token_is_read_again(tmp_path):
    """Within seconds of its rotation; one that went away names its file."""
    file = tmp_path / "token"
    file.write_text("first")
    tls = Tls(TlsFiles(token=file))
    assert tls.authorization(0.0) == b"Bearer first"
    file.write_text("second")
    assert (tls.authorization(9.9), tls.authorization(10.0)) == (b"Bearer first", b"Bearer second")
    file.unlink()
    with pytest.raises(UpstreamConnectError, match="token"):
        tls.authorization(30.0)
    assert Tls(TlsFiles()).authorization(0.0) is None


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({"certificate": "client.crt"}, "belong together"),
        ({"key": "client.key"}, "belong together"),
        ({"ca": "none.crt"}, "none.crt.*No such file"),
        ({"ca": "client.key"}, "client.key: .*PEM"),
        ({"token": "none"}, "none: .*No such file"),
    ],
)
def test_files_that_cannot_be_used_are_named(folder, names, words):
    """At the start, not at the first request."""
    files = TlsFiles(**{key: folder / name for key, name in names.items()})
    with pytest.raises(ConfigError, match=words):
        files.check()


def test_files_that_can_be_used_pass(folder, tmp_path):
    """Token too."""
    (tmp_path / "token").write_text("x")
    files_of(folder, token=tmp_path / "token").check()
