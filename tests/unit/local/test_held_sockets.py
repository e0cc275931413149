"""The sockets that an arbiter holds for its routers."""

import os
import socket

import pytest

from penstock.api import Role
from penstock.local.held_sockets import HeldSockets


@pytest.fixture
def router(entry_of):
    """Return a function that makes a router's entry for a port."""

    def make(port, **fields):
        return entry_of("frontend", role=Role.ROUTER, ports={"port": port}, takes_socket=True, **fields)

    return make


@pytest.fixture
def port():
    """A port that is free."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def refused(port):
    """Return whether a connection is refused."""
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) != 0


def test_a_held_port_accepts_connections_until_it_is_released(router, port):
    """Release ends the listening in every process that has the socket, as the watchdog does."""
    held = HeldSockets()
    held.hold([router(port)])
    also = os.dup(held.descriptor_for(router(port)))
    assert not refused(port)
    held.release(router(port))
    assert refused(port)
    assert held.descriptors == ()
    os.close(also)


def test_a_successor_takes_over_what_was_held(router, port, caplog):
    """It finds the port by the socket itself; a descriptor that is gone is left out."""
    before, after = HeldSockets(), HeldSockets()
    before.hold([router(port)])
    after.take_over([os.dup(before.descriptors[0]), 9999])
    before.hold([])
    assert after.descriptor_for(router(port)) is not None
    assert "is gone" in caplog.text
    after.hold([router(port)])  # no second socket
    assert len(after.descriptors) == 1
    for each in (after, before):
        each.release(router(port))


def test_a_port_in_use_and_other_processes_are_not_held(router, entry_of, port, caplog):
    """The router says itself that its port is taken; a worker, or another runtime's frontend, listens by itself."""
    held = HeldSockets()
    worker = entry_of("decode", ports={"port": port})
    with socket.create_server(("127.0.0.1", port)):
        held.hold([router(port), worker])
    assert "not held" in caplog.text
    assert held.descriptor_for(router(port)) is held.descriptor_for(worker) is None
    held.release(router(port))
    held.release(worker)
