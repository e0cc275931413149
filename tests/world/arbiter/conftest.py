"""One running arbiter with tiny workers, for the tests of the processes of the local backend."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.core.local_state import EntryState
from penstock.local import liveness
from penstock.local.statefile import ProcessEntry, to_json
from penstock.local.store import StateStore

sys.path.insert(0, str(Path(__file__).parents[2] / "unit" / "local"))

from states import make_entry, make_state

WORKER = """
import argparse, asyncio, pathlib, signal, subprocess, sys

from penstock.core.http.server import HttpServer


async def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--busy-while", type=pathlib.Path)
    parser.add_argument("--drains", type=pathlib.Path)
    parser.add_argument("--child", type=pathlib.Path)
    options = parser.parse_args()
    if options.child is not None:  # as vLLM's engine core: its environment is blank
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], env={})
        options.child.write_text(str(child.pid))
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


class Graph:
    """One running arbiter with tiny workers."""

    def __init__(self, folder: Path, log_dir: Path, eventually: Callable[..., object]) -> None:
        self.store = StateStore(folder / "test.json")
        self.log_dir = log_dir
        self._eventually = eventually
        self.worker = log_dir / "worker.py"
        self.worker.write_text(WORKER)
        self.arbiter: subprocess.Popen[bytes] | None = None

    def entry(self, service: str, role: str, *arguments: str, **fields) -> ProcessEntry:
        """Return an entry that runs the tiny worker."""
        cmd = (sys.executable, str(self.worker), "--port", "{port}", *arguments)
        defaults = {"placeholders": ("port",), "health_path": "/health", "grace_s": 5.0}
        return make_entry(service, role, **{"cmd": cmd, **defaults, **fields})

    def start(self, *entries: ProcessEntry, **arbiter_fields) -> None:
        """Start the arbiter with these entries as base entries."""
        state = make_state("test", log_dir=str(self.log_dir), **arbiter_fields)
        for entry in entries:
            state = state.with_entry(f"test_{entry.service}", entry)
        log = (self.log_dir / "arbiter.log").open("ab")
        self.arbiter = subprocess.Popen(
            [sys.executable, "-m", "penstock.local.arbiter", str(self.store.path)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env={**os.environ, "PENSTOCK_LOCAL_STATE_DIR": str(self.store.path.parent)},
        )
        log.close()
        self.arbiter.stdin.write(json.dumps(to_json(state)).encode())
        self.arbiter.stdin.close()

    def get(self, name: str) -> ProcessEntry | None:
        """Return an entry as the file has it now."""
        state = self.store.read()
        return None if state is None else state.entries.get(name)

    def wait_state(self, name: str, wanted: EntryState) -> ProcessEntry:
        """Wait until an entry is in a state; return it."""

        def there() -> ProcessEntry | None:
            entry = self.get(name)
            return entry if entry is not None and entry.state is wanted else None

        try:
            return self._eventually(there)
        except AssertionError:
            log = (self.log_dir / "arbiter.log").read_text()
            raise AssertionError(
                f"{name} is {self.get(name)}, wanted {wanted}; arbiter log:\n{log}"
            ) from None

    def stop(self) -> int:
        """Ask the arbiter to end and return its exit code."""
        self.arbiter.terminate()
        return self.arbiter.wait()

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
def graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., object]
) -> Iterator[Graph]:
    """Yield a graph that is not started yet."""
    folder, log_dir = tmp_path / "state", tmp_path / "logs"
    folder.mkdir()
    log_dir.mkdir()
    monkeypatch.setenv("PENSTOCK_LOCAL_STATE_DIR", str(folder))
    running = Graph(folder, log_dir, eventually)
    yield running
    running.clean()
