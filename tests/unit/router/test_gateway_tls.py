"""Envoy reaches the endpoint picker by TLS, with the picker's own certificate or a given one."""

import asyncio
import socket
import ssl

import orjson
import pytest
from cryptography import x509
from gateway_harness import OWN, needs_envoy

from penstock.core.errors import ConfigError

pytest.importorskip("grpc")

from penstock.router.gateway.certificate import own_key_pair, read_key_pair


def write(folder, pair):
    """Put a certificate and its key into a folder, as a mounted Secret has them."""
    folder.mkdir(exist_ok=True)
    (folder / "tls.crt").write_bytes(pair.certificate)
    (folder / "tls.key").write_bytes(pair.key)
    return folder


def serial_of(certificate):
    """Return the serial number of a PEM certificate."""
    return x509.load_pem_x509_certificate(certificate).serial_number


async def served_serial(port):
    """Return the serial number of the certificate that a port answers with."""

    def read():
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        with (
            socket.create_connection(("127.0.0.1", port)) as plain,
            context.wrap_socket(plain) as wrapped,
        ):
            return x509.load_der_x509_certificate(wrapped.getpeercert(binary_form=True)).serial_number

    return await asyncio.to_thread(read)


@needs_envoy
@pytest.mark.parametrize("kind", ["own", "given", "plain"])
async def test_envoy_asks_the_picker_however_their_connection_is_encrypted(harness, gateway, tmp_path, kind):
    """The answer is the worker's, by TLS with either certificate and in plain text."""
    worker = await harness.worker("aggregated")
    tls = {"own": OWN, "given": write(tmp_path / "tls", own_key_pair()), "plain": None}[kind]
    found = await gateway(worker, tls=tls)

    answer = await found.post(max_tokens=2)

    assert (answer.status, orjson.loads(answer.body)["choices"][0]["text"]) == (200, "xx")


@needs_envoy
async def test_a_given_certificate_is_exchanged_without_a_restart(harness, gateway, tmp_path):
    """New connections get the new one; a pair that does not belong together leaves the one before in force."""
    worker = await harness.worker("aggregated")
    first, second = own_key_pair(), own_key_pair()
    folder = write(tmp_path / "tls", first)
    found = await gateway(worker, tls=folder)
    port = found.server.ext_proc_port
    assert await served_serial(port) == serial_of(first.certificate)

    write(folder, second)
    assert await served_serial(port) == serial_of(second.certificate)
    write(folder, first._replace(key=second.key))
    assert await served_serial(port) == serial_of(second.certificate)

    assert (await found.post(max_tokens=2)).status == 200


def test_a_certificate_that_cannot_be_used_is_refused_with_its_file(tmp_path):
    """Before the picker listens."""
    with pytest.raises(
        ConfigError, match=r"tls\.crt: No such file or directory; give a folder with tls\.crt and tls\.key"
    ):
        read_key_pair(tmp_path)
    pair = own_key_pair()
    folder = write(tmp_path / "tls", pair._replace(key=own_key_pair().key))
    with pytest.raises(ConfigError, match="give a pair that belongs together"):
        read_key_pair(folder)
    (folder / "tls.crt").write_text("no certificate")
    with pytest.raises(ConfigError, match="not a certificate and its key in PEM"):
        read_key_pair(folder)
