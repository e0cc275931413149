"""SIGTERM ends every process of a graph, and `penstock load`, while its peers misbehave."""

import contextlib
import os
import random
import signal
import socket
import struct
import threading

import psutil
import pytest
from patience import within

SPEED = 20
END_S = within(20)
"""Each ends within a few seconds; a client that is waited for costs 30 s and more."""
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
BODY = b'{"model": "m", "prompt": "a", "max_tokens": 8}'
HELD = {
    "silent": b"",
    "half a head": b"GET /metrics HTTP/1.1\r\nHost",
    "half a body": HEAD % 999 + b"{",
    "unread answers": b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 2000,
}


class Misbehaviour:
    """Clients of one port that hold their connections open, and one that resets its own all the time."""

    def __init__(self, port):
        self._port = port
        self._over = threading.Event()
        self._held = []
        self._resets = threading.Thread(target=self._reset, daemon=True)

    def __enter__(self):
        for sent in HELD.values():
            for _ in range(4):
                sock = self._connect()
                sock.settimeout(2)
                with contextlib.suppress(TimeoutError):  # a server stops reading when its client does
                    sock.sendall(sent)
                self._held.append(sock)
        self._resets.start()
        return self

    def __exit__(self, *_exc):
        self._over.set()
        self._resets.join(10)
        for sock in self._held:
            sock.close()

    def _connect(self):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        try:
            sock.connect(("127.0.0.1", self._port))
        except OSError:
            sock.close()
            raise
        return sock

    def _reset(self):
        rng = random.Random(1)
        while not self._over.wait(rng.uniform(0, 0.003)):
            try:
                with self._connect() as sock:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    sock.sendall(HEAD % len(BODY) + BODY)
            except OSError:
                continue  # between two processes nobody listens


@contextlib.contextmanager
def stopped(world, name):
    """Stop a process of the graph for a while: it accepts connections and answers none."""
    pid = world.state()[name]["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_sigterm_ends_router_and_worker_while_clients_misbehave(world):
    """Neither clients that hold connections nor those that reset them keep a process; its successor serves."""
    world.up(world.manifest(), speed=SPEED, flags=("--no-planner",))
    for name in ("world_frontend", "world_decode"):
        entry = world.state()[name]
        process = psutil.Process(entry["pid"])
        with Misbehaviour(entry["ports"]["port"]):
            process.send_signal(signal.SIGTERM)
            process.wait(END_S)
        world.wait_ready(prefill=1, decode=1, router=1)
    world.down()


def test_what_a_graph_writes_is_its_users_alone(world, eventually):
    """Logs, ledger, state and event files have mode 0600 whatever the umask; the statefile may hold secrets."""
    world.up(world.manifest(), speed=SPEED)

    def written():
        return [path for folder in (world.log_dir, world.statefile.parent) for path in folder.rglob("*")]

    names = {"arbiter.log", "ledger.jsonl", "state.json", "world.json"}
    assert eventually(lambda: names <= {path.name for path in written()})
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in written() if path.is_file()}
    assert set(modes.values()) == {"0o600"}, modes
    assert world.run("down").returncode == 0


@pytest.mark.nightly
def test_sigterm_ends_planner_and_load_while_the_router_hangs(world, eventually):
    """A planner and a replay that get no answers end all the same."""
    world.up(world.manifest(), speed=SPEED)
    replay = world.load(speed=SPEED, limit=400, rate=2)
    eventually(lambda: len(replay.results()) > 5, "the replay is under way")
    planner = psutil.Process(world.state()["world_planner"]["pid"])
    with stopped(world, "world_frontend"):
        replay.process.send_signal(signal.SIGTERM)
        planner.send_signal(signal.SIGTERM)
        assert replay.process.wait(END_S) != 0
        planner.wait(END_S)
    world.down()
