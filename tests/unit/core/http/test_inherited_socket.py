"""Sockets that a process is given in systemd's way."""

import os
import socket
import subprocess
import sys

import pytest

from penstock.core.http.inherited_socket import socket_from_environment
from penstock.local import exec_child

TAKE = """
import os, sys
from penstock.core.errors import ConfigError
from penstock.core.http.inherited_socket import socket_from_environment
try:
    given = socket_from_environment(os.environ, int(sys.argv[1]))
except ConfigError as exc:
    sys.exit(str(exc))
if given is None:
    sys.exit("none")
open_files = {each for each in os.listdir("/proc/self/fd") if each != "3" and os.path.exists(f"/proc/self/fd/{each}")}
print(given.getsockname()[1], len(open_files) <= 4)
connection, _ = given.accept()
connection.sendall(b"served")
"""


@pytest.fixture
def listening():
    """A socket that listens."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        yield found


def start(tmp_path, held, port):
    """Start the program as the local backend does, with the socket ``held``."""
    command = [sys.executable, "-I", "-S", exec_child.__file__, str(tmp_path / "log"), held]
    descriptors = () if held == "-" else (int(held),)
    return subprocess.Popen([*command, sys.executable, "-c", TAKE, str(port)], pass_fds=descriptors)


def test_connections_wait_at_a_given_socket_until_the_process_accepts(tmp_path, listening):
    """The client is there before the process; the process inherits the one socket and nothing else."""
    port = listening.getsockname()[1]
    with socket.create_connection(("127.0.0.1", port)) as client:
        process = start(tmp_path, str(listening.fileno()), port)
        assert client.recv(6) == b"served"
        assert process.wait() == 0
    assert (tmp_path / "log").read_text() == f"{port} True\n"


@pytest.mark.parametrize("case", ["none", "other port", "not listening"])
def test_what_cannot_be_used_is_refused_with_the_remedy(tmp_path, listening, case):
    """A socket of another port, or one that does not listen, is a mistake of the starter; no socket is none."""
    port = listening.getsockname()[1]
    with socket.socket() as idle:
        held = {"none": "-", "other port": str(listening.fileno()), "not listening": str(idle.fileno())}[case]
        assert start(tmp_path, held, port + 1 if case == "other port" else 0).wait() == 1
    said = (tmp_path / "log").read_text()
    assert (said == "none\n") if case == "none" else ("LISTEN_FDS" in said and "--port" in said)


def test_a_socket_for_another_process_is_left_alone(listening):
    """The variables are inherited by the children of the process that they were meant for."""
    assert socket_from_environment({"LISTEN_FDS": "1", "LISTEN_PID": str(os.getppid())}, 80) is None
    assert socket_from_environment({}, 80) is None
