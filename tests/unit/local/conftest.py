"""Fixtures of the local backend's tests: a state folder of their own, tiny workers, a running arbiter."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock_core.local_state import EntryState
from penstock_local import liveness
from penstock_local.plan import Limits
from penstock_local.statefile import ArbiterInfo, Entry, StateFile
from penstock_local.statefile_json import to_json
from penstock_local.store import StateStore

WORKER = """
import argparse, asyncio, pathlib, signal, sys

from penstock_wire.server import HttpServer


async def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--busy-while", type=pathlib.Path)
    parser.add_argument("--drains", type=pathlib.Path)
    options = parser.parse_args()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)

    def busy():
        return int(options.busy_while is not None and options.busy_while.exists())

    async def answer(request, responder):
        if request.path == "/metrics":
            responder.send(200, b"vllm:num_requests_running %d\\n" % busy(), content_type="text/plain")
        elif request.path == "/workers":
            responder.send(200, b'{"workers": []}')
        elif request.path.endswith("/drain"):
            with options.drains.open("a") as file:
                file.write(request.path + "\\n")
            responder.send(200, b'{"inflight_requests": 0}')
        else:
            responder.send(200, b"{}")

    server = HttpServer(answer)
    await server.start("127.0.0.1", options.port)
    print("listening", flush=True)
    await stop.wait()
    await server.close(grace_s=1)


asyncio.run(main())
"""

CRASHER = "import sys; print('CUDA error: no such device', file=sys.stderr); sys.exit(3)"


def make_state(namespace: str = "dynamo", *, gpus: int = 8, budget: int | None = None, **fields) -> StateFile:
    """Return a statefile without entries."""
    arbiter = ArbiterInfo(
        pid=0,
        create_time=0.0,
        endpoint="",
        pubsub_endpoint="",
        namespace=namespace,
        graph="graph.yaml",
        model="llama",
        speed=1.0,
        log_dir="",
        gpus=gpus,
        budget=gpus if budget is None else budget,
        router_url="http://127.0.0.1:9",
    )
    from dataclasses import replace

    return StateFile(replace(arbiter, **fields), {})


def make_entry(service: str = "VllmWorker", role: str = "decode", **fields) -> Entry:
    """Return an entry of a one-GPU decode worker, with changes."""
    defaults = {"cmd": ("worker", "--port", "{port}"), "gpus_per_replica": 1, "order": 1}
    return Entry(service=service, role=role, **{**defaults, **fields})


@pytest.fixture
def state_of() -> Callable[..., StateFile]:
    """Return `make_state`."""
    return make_state


@pytest.fixture
def entry_of() -> Callable[..., Entry]:
    """Return `make_entry`."""
    return make_entry


@pytest.fixture
def limits() -> Limits:
    """Return the standing limits."""
    return Limits()


@pytest.fixture(autouse=True)
def state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep every statefile of a test in the test's own folder."""
    folder = tmp_path / "state"
    folder.mkdir()
    monkeypatch.setenv("PENSTOCK_LOCAL_STATE_DIR", str(folder))
    return folder


def eventually(condition: Callable[[], object], timeout_s: float = 8.0) -> object:
    """Return the first true value of ``condition``; fail when there is none in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.03)
    raise AssertionError(f"not true within {timeout_s} s: {condition}")


@pytest.fixture(name="eventually")
def eventually_fixture() -> Callable[..., object]:
    """Return `eventually`."""
    return eventually


class Graph:
    """One running arbiter with tiny workers."""

    def __init__(self, folder: Path, log_dir: Path) -> None:
        self.store = StateStore(folder / "test.json")
        self.log_dir = log_dir
        self.worker = log_dir / "worker.py"
        self.worker.write_text(WORKER)
        self.arbiter: subprocess.Popen[bytes] | None = None

    def entry(self, service: str, role: str, *arguments: str, **fields) -> Entry:
        """Return an entry that runs the tiny worker."""
        cmd = (sys.executable, str(self.worker), "--port", "{port}", *arguments)
        defaults = {"placeholders": ("port",), "health_path": "/health", "grace_s": 5.0}
        return make_entry(service, role, **{"cmd": cmd, **defaults, **fields})

    def start(self, *entries: Entry, **arbiter_fields) -> None:
        """Start the arbiter with these entries as base entries."""
        state = make_state("test", log_dir=str(self.log_dir), **arbiter_fields)
        for entry in entries:
            state = state.with_entry(f"test_{entry.service}", entry)
        log = (self.log_dir / "arbiter.log").open("ab")
        self.arbiter = subprocess.Popen(
            [sys.executable, "-m", "penstock_local.arbiter", str(self.store.path)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env={**os.environ, "PENSTOCK_LOCAL_STATE_DIR": str(self.store.path.parent)},
        )
        log.close()
        self.arbiter.stdin.write(json.dumps(to_json(state)).encode())
        self.arbiter.stdin.close()

    def get(self, name: str) -> Entry | None:
        """Return an entry as the file has it now."""
        state = self.store.read()
        return None if state is None else state.entries.get(name)

    def wait_state(self, name: str, wanted: EntryState, timeout_s: float = 30.0) -> Entry:
        """Wait until an entry is in a state; return it."""

        def there() -> Entry | None:
            entry = self.get(name)
            return entry if entry is not None and entry.state is wanted else None

        try:
            return eventually(there, timeout_s)
        except AssertionError:
            log = (self.log_dir / "arbiter.log").read_text()
            raise AssertionError(
                f"{name} is {self.get(name)}, wanted {wanted}; arbiter log:\n{log}"
            ) from None

    def stop(self, timeout_s: float = 8.0) -> int:
        """Ask the arbiter to end and return its exit code."""
        self.arbiter.terminate()
        return self.arbiter.wait(timeout_s)

    def clean(self) -> None:
        """End whatever a test left running."""
        if self.arbiter is not None and self.arbiter.poll() is None:
            self.arbiter.kill()
            self.arbiter.wait()
        state = None
        with contextlib.suppress(Exception):
            state = self.store.read()
        liveness.end(liveness.leftovers(state, str(self.store.path)), grace_s=0.5)


@pytest.fixture
def graph(state_folder: Path, tmp_path: Path) -> Iterator[Graph]:
    """Yield a graph that is not started yet."""
    log_dir = tmp_path / "logs"
    log_dir.mkdir()
    running = Graph(state_folder, log_dir)
    yield running
    running.clean()


@pytest.fixture
def crasher() -> tuple[str, ...]:
    """Return the command of a process that dies at once, saying why."""
    return (sys.executable, "-c", CRASHER)
