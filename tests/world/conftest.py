"""A graph of real processes for a test: started by the command line, watched from outside, ended whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest

sys.path.append(str(Path(__file__).parents[1] / "support"))  # for soak.py, which pytest does not run

from patience import LIMIT_S, eventually, within
from reserved_ports import reserved_port

from penstock_planner.ledger import read_ledger

MANIFEST = """
apiVersion: penstock.dev/v1alpha1
kind: GraphDeployment
metadata: {{name: {name}}}
spec:
  model: {{name: m, servedName: m, contextTokens: 131072}}
  runtime: simulated
  services:
    frontend: {{role: router}}
    prefill: {{role: prefill, replicas: {prefill}, scaling: {{minReplicas: {floor}, maxReplicas: 6}}}}
    decode: {{role: decode, replicas: {decode}, scaling: {{minReplicas: {floor}, maxReplicas: 6}}}}
  engine: {{profile: {profile}, streamIntervalTokens: {stream_interval}, switchable: {switchable}}}
  router: {router}
  planner: {{mode: load, adjustmentIntervalSeconds: {interval}, maxGpuBudget: {budget}}}
"""
DEFAULTS = {
    "name": "world",
    "prefill": 1,
    "decode": 1,
    "floor": 1,
    "profile": "h200-llama-3.1-8b-tp1",
    "stream_interval": 4,
    "switchable": "false",
    "router": "{}",
    "interval": 30,
    "budget": 8,
}
PENSTOCK = (sys.executable, "-m", "penstock.cli")
GONE = (FileNotFoundError, ProcessLookupError, PermissionError)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder slow: its processes and its time are real."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.slow)


class World:
    """Everything that one test starts, in the test's own folders."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.statefile = folder / "state" / "world.json"
        self.log_dir = folder / "log"
        self.ledger_dir = self.log_dir / "planner"
        self.port = reserved_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.env = {**os.environ, "PENSTOCK_LOCAL_STATE_DIR": str(folder / "state"), "HOME": str(folder)}
        self._started: list[subprocess.Popen[bytes]] = []

    def manifest(self, **changes: Any) -> Path:
        """Write the graph with ``changes`` of `DEFAULTS`; return its path."""
        path = self.folder / "graph.yaml"
        path.write_text(MANIFEST.format(**{**DEFAULTS, **changes}))
        return path

    def run(self, *arguments: object, timeout_s: float = LIMIT_S) -> subprocess.CompletedProcess[str]:
        """Run a `penstock` command to its end."""
        command = [*PENSTOCK, *map(str, arguments)]
        return subprocess.run(
            command, env=self.env, capture_output=True, text=True, timeout=timeout_s, check=False
        )

    def start(self, *arguments: object, name: str = "command", **options: Any) -> subprocess.Popen[bytes]:
        """Start a `penstock` command; its output goes to ``<name>.out``."""
        with (self.folder / f"{name}.out").open("wb") as output:
            process = subprocess.Popen(
                [*PENSTOCK, *map(str, arguments)], env=self.env, stdout=output, stderr=output, **options
            )
        self._started.append(process)
        return process

    def up(self, manifest: Path, *, speed: float, flags: tuple[str, ...] = ()) -> None:
        """Start a graph and return when it serves."""
        flags = ("--speed", str(speed), "--port", str(self.port), "--log-dir", str(self.log_dir), *flags)
        done = self.run("up", manifest, *flags)
        assert done.returncode == 0, done.stderr + self.logs()

    def load(self, *, speed: float, limit: int, rate: float) -> Replay:
        """Start to replay the packaged trace with prompts of at most 4,000 tokens."""
        flags = ("--speed", speed, "--url", self.url, "--limit", limit, "--rate", rate, "--json")
        cut = ("--max-input-tokens", 4000, "--on-long", "truncate", "--output-dir", self.folder / "run")
        return Replay(
            self.start("load", "--trace", "mooncake", *flags, *cut, name="load"), self.folder / "run"
        )

    def state(self) -> dict[str, Any]:
        """Return the statefile's content; empty when there is none."""
        try:
            return json.loads(self.statefile.read_text())
        except FileNotFoundError:
            return {}

    def entries(self, role: str, *states: str) -> dict[str, dict[str, Any]]:
        """Return the entries of a role, by name; of ``states`` only, if given."""
        return {
            name: entry
            for name, entry in self.state().items()
            if entry.get("role") == role and (not states or entry["state"] in states)
        }

    def wait_ready(self, **counts: int) -> None:
        """Wait until each role has exactly this many ready entries and the router says it serves."""

        def there() -> bool:
            return self.is_serving() and all(
                len(self.entries(role, "ready")) == count for role, count in counts.items()
            )

        eventually(there, f"{counts} ready in {json.dumps(self.state(), indent=1)}")

    def is_serving(self) -> bool:
        """Return whether the router would serve a request now."""
        try:
            with urllib.request.urlopen(f"{self.url}/ready", timeout=within(5)):
                return True
        except OSError:
            return False

    def workers(self) -> dict[str, dict[str, Any]]:
        """Return the router's view of the workers, by name."""
        with urllib.request.urlopen(f"{self.url}/workers", timeout=LIMIT_S) as answer:
            return {worker["name"]: worker for worker in json.load(answer)["workers"]}

    def samples(self, name: str, url: str | None = None) -> dict[str, float]:
        """Return a metric's samples by their labels, of the router or of the process at ``url``."""
        with urllib.request.urlopen(f"{url or self.url}/metrics", timeout=LIMIT_S) as answer:
            lines = answer.read().decode().splitlines()
        found = (line.rpartition(" ") for line in lines if line.startswith((f"{name}{{", f"{name} ")))
        return {key.partition('"')[2].rstrip('"}'): float(value) for key, _, value in found}

    def complete(self, url: str | None = None, *, max_tokens: int = 4, **fields: Any) -> dict[str, Any]:
        """Return the answer to a completion, of the router or of the worker at ``url``."""
        return self.post(
            f"{url or self.url}/v1/completions",
            {"model": "m", "prompt": "hello", "max_tokens": max_tokens, **fields},
        )

    def post(self, url: str, body: dict[str, Any] | None = None) -> Any:
        """POST JSON; return the decoded answer, None where it is empty."""
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(url, json.dumps(body or {}).encode(), headers)
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            content = answer.read()
        return json.loads(content) if content else None

    def kill(self, name: str) -> None:
        """Kill -9 the process of an entry, or the arbiter."""
        os.kill(self.state()[name]["pid"], signal.SIGKILL)

    def down(self) -> subprocess.CompletedProcess[str]:
        """Stop the graph and check from outside that nothing is left."""
        ports = [port for entry in self.state().values() for port in (entry.get("ports") or {}).values()]
        done = self.run("down", "--namespace", self.statefile.stem)
        assert done.returncode == 0, done.stdout + done.stderr
        assert self.marked() == {}
        assert list(self.statefile.parent.glob("*.json*")) == []
        for port in ports:
            with socket.socket() as probe:
                assert probe.connect_ex(("127.0.0.1", port)) != 0, f"port {port} is still listened on"
        return done

    def replay_ledger(self) -> str:
        """Make every decision of the ledger again; return what the command prints."""
        done = self.run("planner", "replay", self.ledger_dir)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def decisions(self) -> list[dict[str, Any]]:
        """Return the ledger's decisions so far."""
        if not (self.ledger_dir / "ledger.jsonl").exists():
            return []
        return [record for record in read_ledger(self.ledger_dir).records if record["type"] == "decision"]

    def marked(self, statefile: Path | None = None) -> dict[int, tuple[int, ...]]:
        """Return the running processes of this world's graph with the GPU ids in their environment."""
        found = {}
        mark = f"PENSTOCK_STATEFILE={statefile or self.statefile}".encode()
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                try:
                    environ = (folder / "environ").read_bytes().split(b"\0")
                except GONE:
                    continue
                if mark in environ:
                    found[int(folder.name)] = _gpus(environ)
        return found

    def logs(self) -> str:
        """Return the ends of all logs, for a failing assertion."""
        return "\n".join(
            f"--- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-12:])
            for path in sorted(self.log_dir.glob("*.log"))
        )

    def clean(self) -> None:
        """Kill everything, arbiters first so that they start nothing again; a watchdog keeps its pid as an arbiter."""
        pids = [process.pid for process in self._started if process.poll() is None]
        for statefile in self.statefile.parent.glob("*.json"):
            arbiter = None
            with contextlib.suppress(ValueError):  # a test may have broken the file
                arbiter = json.loads(statefile.read_text()).get("arbiter", {}).get("pid")
            pids = [*([arbiter] if arbiter else []), *pids, *self.marked(statefile)]
        for pid in [*pids, *self.marked()]:
            with contextlib.suppress(ProcessLookupError):
                if pid != os.getpid():  # a test may be in for the arbiter
                    os.kill(pid, signal.SIGKILL)
        for process in self._started:
            process.wait(LIMIT_S)


def _gpus(environ: list[bytes]) -> tuple[int, ...]:
    for variable in environ:
        name, _, value = variable.partition(b"=")
        if name == b"CUDA_VISIBLE_DEVICES":
            return tuple(int(each) for each in value.split(b",") if each.strip().isdigit())
    return ()


class Replay:
    """A `penstock load` under way, and its results afterwards."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self.process = process
        self._folder = folder

    def results(self) -> list[dict[str, Any]]:
        """Return the finished requests so far."""
        path = self._folder / "results.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def finish(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Wait for the end; return all requests and the summary."""
        assert self.process.wait(LIMIT_S) == 0, (self._folder.parent / "load.out").read_text()
        return self.results(), json.loads((self._folder / "summary.json").read_text())


class Watch(threading.Thread):
    """Looks at the statefile and at the live processes every 50 ms, and notes every broken promise."""

    def __init__(self, world: World, budget: int, every_s: float = 0.05) -> None:
        super().__init__(daemon=True)
        self.looks = 0
        self.most_gpus = 0
        self.problems: list[str] = []
        self._world, self._budget, self._every_s = world, budget, every_s
        self._over = threading.Event()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._over.set()
        self.join(5)

    def run(self) -> None:
        """Look until stopped."""
        while not self._over.wait(self._every_s):
            entries = [entry for name, entry in self._world.state().items() if name != "arbiter"]
            self._judge("statefile", [tuple(entry.get("resources", {}).get("gpus", ())) for entry in entries])
            self._judge("processes", list(self._world.marked().values()))
            self.looks += 1

    def _judge(self, where: str, held: list[tuple[int, ...]]) -> None:
        ids = [gpu for gpus in held for gpu in gpus]
        self.most_gpus = max(self.most_gpus, len(ids))
        if len(ids) > self._budget or len(ids) != len(set(ids)):
            self.problems.append(f"{where}: GPUs {sorted(ids)} with a budget of {self._budget}")


class Kept:
    """A connection that one client keeps from request to request, for as long as the server lets it."""

    def __init__(self) -> None:
        self._open: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def open(self, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return the connection, opened again where there is none."""
        if self._open is None:
            self._open = await asyncio.open_connection("127.0.0.1", port)
        return self._open

    def close(self) -> None:
        """Close it; the next request opens another."""
        if self._open is not None:
            self._open[1].close()
            self._open = None


class Stream:
    """One streamed completion, over a connection of its own unless the client keeps one, read without any of the product's code."""

    def __init__(self, port: int, prompt: str, tokens: int, *, model: str = "m", tier: str = "") -> None:
        self.tokens = tokens
        self.text = ""
        self.usage: dict[str, Any] = {}
        self.problem: str | None = "not sent"
        self.longest_gap_s = 0.0
        self._port = port
        self._tier = f"x-penstock-tier: {tier}\r\n" if tier else ""
        self._body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    @property
    def is_complete(self) -> bool:
        """Whether every token came, in the text and by the server's count, and the stream was ended."""
        return (
            self.problem is None
            and len(self.text) == 4 * self.tokens
            and self.usage.get("completion_tokens") == self.tokens
        )

    async def read(self, kept: Kept | None = None) -> None:
        """Send the request, on the kept connection if there is one, and read to the end."""
        body = json.dumps(self._body).encode()
        end = "connection: close\r\n" if kept is None else ""
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n{self._tier}{end}\r\n"
        connection = Kept() if kept is None else kept
        try:
            async with asyncio.timeout(LIMIT_S):
                reader, writer = await connection.open(self._port)
                sent_s = time.monotonic()
                writer.write(head.encode() + body)
                status = (await reader.readline()).decode().strip()
                self.problem = f"no end after {status!r}"
                is_last, at_s = kept is None or " 200 " not in status, sent_s
                while line := await reader.readline():
                    self.longest_gap_s = max(self.longest_gap_s, time.monotonic() - at_s)
                    at_s = time.monotonic()
                    self._take(line.strip())
                    is_last = is_last or line.lower() == b"connection: close\r\n"
                    if line == b"0\r\n" and not is_last:  # the last chunk
                        await reader.readline()
                        return
            connection.close()
        except (OSError, TimeoutError) as exc:
            self.problem = repr(exc)
            connection.close()

    def _take(self, line: bytes) -> None:
        if line == b"data: [DONE]":
            self.problem = None
        elif line.startswith(b"data: "):
            event = json.loads(line[6:])
            if "error" in event:
                self.problem = str(event["error"])
                return
            self.text += "".join(choice["text"] for choice in event["choices"])
            self.usage = event.get("usage") or self.usage
        elif line.startswith(b"{"):
            self.problem = line.decode()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """Yield an empty world; kill whatever it holds in the end."""
    made = World(tmp_path)
    try:
        yield made
    finally:
        made.clean()
        eventually(lambda: not made.marked(), "every process is gone")


@pytest.fixture
def watch(world: World) -> Callable[..., Watch]:
    """Return the maker of a `Watch` over this test's world."""
    return lambda budget: Watch(world, budget)


@pytest.fixture(name="eventually")
def eventually_fixture() -> Callable[..., Any]:
    """Return `eventually`."""
    return eventually


@pytest.fixture(name="free_port")
def free_port_fixture() -> Callable[[], int]:
    """Return what chooses a port that nobody else gets."""
    return reserved_port


@pytest.fixture
def kept_connection() -> type[Kept]:
    """Return the maker of a connection that a client keeps."""
    return Kept


@pytest.fixture
def stream(world: World) -> Callable[..., Stream]:
    """Return the maker of a `Stream` to this test's router."""
    return lambda prompt, tokens, **fields: Stream(world.port, prompt, tokens, **fields)
