"""Serve a graph of real processes for an hour of mixed load and faults, and hold every promise throughout.

    make soak [ARGS="--minutes 60 --seed 1 --calm --output soak-output"]

Load: streams and whole answers, 5% left early, 2% malformed, 2% read slowly, 5% over a slow network, at a rate that rises
and falls. Faults, one at a time: kill -9 of workers, planner, arbiter and router, workers and planner stopped for 15 s, a
full disk (root only), all processes' wall clock stepped by up to a day.
Held: Σ GPUs ≤ budget, looked at four times a second; a request fails only in the shadow of a fault that can reach it; a
refusal says when to come back; malformed input never makes a 5xx; memory, descriptors and threads of processes that live
through half of the run stay flat; nothing is in flight, every decision replays and nothing is left in the end. Exits 1 if one did not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from conftest import GONE, Watch, World

MANIFEST = """
apiVersion: penstock.dev/v1alpha1
kind: GraphDeployment
metadata: {name: world}
spec:
  model: {name: m, servedName: m, contextTokens: 131072}
  runtime: simulated
  services:
    frontend: {role: router}
    prefill: {role: prefill, replicas: 1, scaling: {minReplicas: 1, maxReplicas: 4}}
    decode: {role: decode, replicas: 1, scaling: {minReplicas: 1, maxReplicas: 4}}
  engine: {profile: h200-llama-3.1-8b-tp1, streamIntervalTokens: 4}
  planner: {maxGpuBudget: 6}
"""
BUDGET = 6
SPEED = 2.0
FAULT_EVERY_S = 60.0
STOPPED_S = 15.0
SHADOW_S = 45.0
"""A fault's longest effect on requests, real seconds: detection, a restart, and what waited meanwhile."""
REACHES_NO_REQUEST = frozenset({"kill planner", "stop planner", "kill arbiter", "full disk", "step clock"})
LINK_BYTES, LINK_S = 4096, (0.05, 0.25)
"""The slow network passes on this many bytes after each pause, in each direction: 100 ms to 500 ms there and back."""
CLOCK = """
import os, time
real, file, read = time.time, os.environ["SOAK_CLOCK"], [0.0, 0.0]
def stepped():
    now = real()
    if not 0 <= now - read[0] < 1:
        with open(file) as offset:
            read[:] = now, float(offset.read())
    return now + read[1]
time.time = stepped
"""
"""Python runs it first as `sitecustomize`, so that a file's number of seconds steps the wall clock of all processes."""
GROWTH, GROWTH_BYTES, GROWTH_COUNT = 1.15, 12 << 20, 24
"""What a process may have more in its last quarter than in its second: share and bytes of memory; descriptors, threads."""


@dataclass
class Findings:
    """What was seen; ``problems`` fail the run."""

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[tuple[float, str]] = field(default_factory=list)
    suspects: list[tuple[float, float, str]] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    in_flight: int = 0

    def shadowed(self, began_s: float, ended_s: float) -> bool:
        """Return whether a fault that can reach requests was at work during the request."""
        return any(
            name not in REACHES_NO_REQUEST and at_s < ended_s and at_s + SHADOW_S > began_s
            for at_s, name in self.faults
        )


REST_S = 30.0
"""A kept connection is not used again after this long without a request; the router closes it after 75 s."""


@dataclass
class Connection:
    """One connection to the router, read without any of the product's code."""

    port: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    rested_since_s: float = 0.0

    async def head(self) -> tuple[str, bytes]:
        """Return the status and the header lines, in lower case, of the next response."""
        status = (await self.reader.readline()).split(b" ")
        lines = b""
        while (line := await self.reader.readline()) not in {b"\r\n", b""}:
            lines += line.lower()
        return status[1].decode() if len(status) > 1 else "none", lines

    async def body(self, head: bytes, most: int) -> AsyncIterator[bytes]:
        """Yield the body of that response in pieces of at most ``most`` bytes, up to its end."""
        if b"transfer-encoding: chunked" not in head:
            (length,) = (line[15:] for line in head.splitlines() if line.startswith(b"content-length:"))
            async for piece in self._exactly(int(length), most):
                yield piece
            return
        while size := int((await self.reader.readuntil(b"\r\n")), 16):
            async for piece in self._exactly(size, most):
                yield piece
            await self.reader.readexactly(2)
        await self.reader.readexactly(2)

    async def _exactly(self, size: int, most: int) -> AsyncIterator[bytes]:
        while size:
            if not (piece := await self.reader.read(min(size, most))):
                raise asyncio.IncompleteReadError(b"", size)
            size -= len(piece)
            yield piece


class Connections:
    """Connections that rest between two requests: half of the clients keep theirs, as proxies and SDKs do."""

    def __init__(self) -> None:
        self._resting: list[Connection] = []

    async def take(self, port: int) -> Connection:
        """Return the connection that rests for the shortest time, or a new one."""
        while found := [each for each in self._resting if each.port == port]:
            self._resting.remove(found[-1])
            is_fresh = time.monotonic() - found[-1].rested_since_s < REST_S
            if is_fresh and not found[-1].reader.at_eof():
                return found[-1]
            found[-1].writer.close()
        return Connection(port, *await asyncio.open_connection("127.0.0.1", port))

    def give_back(self, connection: Connection) -> None:
        """Let a connection rest."""
        connection.rested_since_s = time.monotonic()
        self._resting.append(connection)

    def close(self) -> None:
        """Close those that rest."""
        for connection in self._resting:
            connection.writer.close()


class Client:
    """One request, half of them over a kept connection."""

    def __init__(
        self, port: int, slow_port: int, rng: random.Random, findings: Findings, connections: Connections
    ) -> None:
        self._port, self._slow_port, self._rng, self._findings = port, slow_port, rng, findings
        self._connections = connections

    async def send(self) -> None:
        """Send a request of a kind drawn by its share, and count how it ended."""
        draw = self._rng.random()
        shares = (("malformed", 0.02), ("left", 0.07), ("slow", 0.09), ("far", 0.14), ("whole", 1.0))
        kind = next(name for name, upto in shares if draw < upto)
        began_s = time.monotonic()
        self._findings.in_flight += 1
        try:
            async with asyncio.timeout(120):
                outcome = await (self._malformed() if kind == "malformed" else self._request(kind))
        except (OSError, TimeoutError, asyncio.IncompleteReadError, ValueError) as exc:
            outcome = f"failed: {exc!r}"
        finally:
            self._findings.in_flight -= 1
        if outcome.startswith("failed"):
            self._findings.suspects.append((began_s, time.monotonic(), f"{kind} {outcome}"))
        self._findings.outcomes[f"{kind}: {outcome.split(':')[0]}"] += 1

    async def _malformed(self) -> str:
        body = self._rng.choice(
            (
                b"{",
                b'{"model": 3}',
                b'{"model":"m","prompt":"x","max_tokens":-1}',
                b'{"model":"m","messages":"no"}',
                b"\xff\xfe",
                self._rng.randbytes(200),
            )
        )
        head = self._rng.choice(
            (
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body),
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
                b"BREW /pot HTCPCP/1.0\r\n\r\n",
                self._rng.randbytes(64) + b"\r\n\r\n",
            )
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(head + body)
        writer.write_eof()
        status = (await reader.readline()).split(b" ")[1:2]
        writer.close()
        return "failed: answered with 5xx" if status and status[0].startswith(b"5") else "refused"

    async def _request(self, kind: str) -> str:
        rng = self._rng
        tokens = rng.choice((8, 40, 160))
        stream = kind != "whole" or rng.random() < 0.8
        text = f"{rng.randrange(40)} " * 8 + "word " * int(rng.lognormvariate(8.3, 0.7))
        asked: dict[str, Any] = {"model": "m", "max_tokens": tokens, "ignore_eos": True, "stream": stream}
        chat = rng.random() < 0.5
        asked |= {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
        if stream:
            asked["stream_options"] = {"include_usage": True}
        body = json.dumps(asked).encode()
        path = "chat/completions" if chat else "completions"
        port = self._slow_port if kind == "far" else self._port
        keeps = rng.random() < 0.5
        connection = await self._connections.take(port)
        ends = True
        try:
            sent_s = time.monotonic()
            head = f"POST /v1/{path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            head += "" if keeps else "connection: close\r\n"
            connection.writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            if kind == "left":
                await asyncio.sleep(rng.expovariate(5))
                connection.writer.transport.abort()
                return "left"
            code, received = await connection.head()
            outcome = await self._read(connection, (code, received), kind, tokens, sent_s)
            ends = not keeps or b"connection: close" in received
            return outcome
        finally:
            if ends:
                connection.writer.close()
            else:
                self._connections.give_back(connection)

    async def _read(
        self, connection: Connection, answer: tuple[str, bytes], kind: str, tokens: int, sent_s: float
    ) -> str:
        code, head = answer
        text = b""
        async for piece in connection.body(head, 512 if kind == "slow" else 65536):
            if not text and kind == "whole" and b"event-stream" in head:
                self._findings.ttft_s.append(time.monotonic() - sent_s)
            text += piece
            if kind == "slow":
                await asyncio.sleep(0.02)
        if code in {"429", "503"}:
            return "refused" if b"retry-after" in head else f"failed: {code} without retry-after"
        if code != "200":
            return f"failed: status {code}"
        if b'"error"' in text:
            error = text[text.index(b'"error"') :][:120]
            return f"failed: {error!r}"
        usage = f'"completion_tokens":{tokens}'.encode()
        return (
            "served" if usage in text.replace(b": ", b":") else f"failed: {len(text)} bytes without {usage!r}"
        )


class SlowNetwork:
    """Connects clients with the router over a link of little room and long, uneven delays."""

    def __init__(self, port: int, rng: random.Random) -> None:
        self._port, self._rng = port, rng

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on what a client and the router send, until the router has ended or either side is gone."""
        with contextlib.suppress(OSError):
            from_router, to_router = await asyncio.open_connection("127.0.0.1", self._port)
            request = asyncio.create_task(self._pass_on(reader, to_router))
            try:
                await self._pass_on(from_router, writer)
            finally:
                request.cancel()
                to_router.close()
        writer.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(LINK_BYTES):
                await asyncio.sleep(self._rng.uniform(*LINK_S))
                writer.write(piece)
                await writer.drain()


async def load(port: int, rng: random.Random, findings: Findings, until_s: float, peak_rps: float) -> None:
    """Send requests at a rate that rises and falls over ten minutes, with a burst now and then."""
    began_s = time.monotonic()
    link = await asyncio.start_server(SlowNetwork(port, random.Random(rng.random())).connect, "127.0.0.1", 0)
    slow_port, connections = link.sockets[0].getsockname()[1], Connections()
    async with link, asyncio.TaskGroup() as group:
        while (now_s := time.monotonic()) < until_s:
            phase = (now_s - began_s) % 600 / 600
            rate = peak_rps * (0.15 + 0.85 * math.sin(math.pi * phase) ** 2)
            if (now_s - began_s) % 240 > 225:
                rate = 1.5 * peak_rps
            await asyncio.sleep(rng.expovariate(rate))
            if findings.in_flight < 600:  # a stopped router must not make the client the sick one
                group.create_task(Client(port, slow_port, rng, findings, connections).send())
            else:
                findings.outcomes["not sent"] += 1
    connections.close()


class Faults:
    """One fault a minute, in an order that the seed draws, each kind as often as the others."""

    KINDS = ("kill prefill", "kill decode", "stop decode", "kill planner", "stop planner", "kill arbiter")
    KINDS += ("stop prefill", "kill router", "step clock")

    def __init__(
        self, world: World, rng: random.Random, findings: Findings, options: argparse.Namespace
    ) -> None:
        self._world, self._rng, self._findings, self._disk = world, rng, findings, options.disk
        self._clock = world.folder / "clock"
        self._left: list[str] = []

    async def run(self, until_s: float) -> None:
        """Make faults until a quiet minute before the end."""
        while time.monotonic() + 2 * FAULT_EVERY_S < until_s:
            await asyncio.sleep(FAULT_EVERY_S)
            if not self._left:
                self._left = [*self.KINDS, *(["full disk"] if self._disk else [])]
                self._rng.shuffle(self._left)
            await self._one(self._left.pop())

    async def _one(self, name: str) -> None:
        verb, role = name.split()
        if role in {"disk", "clock"}:
            self._findings.faults.append((time.monotonic(), name))
            if role == "clock":
                new = self._clock.with_suffix(".new")
                new.write_text(f"{self._rng.choice((-86400, -90, 90, 86400))}")
                new.replace(self._clock)
            else:
                await self._fill()
            return
        state = self._world.state()
        pids = [
            entry["pid"]
            for key, entry in state.items()
            if role in {key, entry.get("role")} and entry.get("pid")
        ]
        if not pids:
            self._findings.problems.append(f"no {role} in the statefile to {verb}")
            return
        pid = self._rng.choice(pids)
        self._findings.faults.append((time.monotonic(), name))
        with contextlib.suppress(*GONE):
            os.kill(pid, signal.SIGKILL if verb == "kill" else signal.SIGSTOP)
            if verb == "stop":
                await asyncio.sleep(STOPPED_S)
                os.kill(pid, signal.SIGCONT)

    async def _fill(self) -> None:
        assert self._disk
        fill = self._disk / "fill"
        with contextlib.suppress(OSError), fill.open("wb", buffering=0) as file:
            while file.write(bytes(1 << 20)):
                pass
        await asyncio.sleep(STOPPED_S)
        fill.unlink()


class Samples:
    """Memory, descriptors and threads of every process of the graph, each ten seconds."""

    def __init__(self, world: World, findings: Findings, output: Path) -> None:
        self._world, self._findings = world, findings
        self._file = (output / "soak.jsonl").open("w")
        self._of: dict[tuple[str, int], list[tuple[int, int, int]]] = {}

    async def run(self, until_s: float) -> None:
        """Sample until the end, with a line a minute for who looks on."""
        began_s, looks = time.monotonic(), 0
        while time.monotonic() < until_s:
            await asyncio.sleep(10)
            now = {
                name: self._look(name, entry["pid"])
                for name, entry in self._world.state().items()
                if entry.get("pid")
            }
            recent, self._findings.ttft_s = self._findings.ttft_s, []
            p99_s = statistics.quantiles(recent, n=100)[98] if len(recent) > 1 else None
            at_s = round(time.monotonic() - began_s)
            record = {
                "at_s": at_s,
                "ttft_p99_s": p99_s,
                "processes": now,
                "outcomes": dict(self._findings.outcomes),
            }
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
            if (looks := looks + 1) % 6 == 0:
                last = self._findings.faults[-1][1] if self._findings.faults else "none yet"
                print(
                    f"{at_s:5d} s  {self._findings.outcomes.total()} requests, {len(self._findings.suspects)} failed, "
                    f"TTFT p99 {p99_s or math.nan:.2f} s, last fault: {last}",
                    flush=True,
                )

    def _look(self, name: str, pid: int) -> tuple[int, int, int] | None:
        try:
            process = psutil.Process(pid)
            look = (process.memory_info().rss, process.num_fds(), process.num_threads())
        except psutil.Error:
            return None
        self._of.setdefault((name, pid), []).append(look)
        return look

    def problems(self, looks: int) -> list[str]:
        """Return what grew, of processes that were there for at least half of the run."""
        found = []
        for (name, pid), seen in self._of.items():
            if len(seen) < looks / 2 or not psutil.pid_exists(pid):  # a fault at its end proves nothing
                continue
            quarter = len(seen) // 4
            early = [statistics.median(column) for column in zip(*seen[quarter : 2 * quarter], strict=True)]
            late = [statistics.median(column) for column in zip(*seen[-quarter:], strict=True)]
            print(
                f"{name} ({pid}): {early[0] / 2**20:.0f} -> {late[0] / 2**20:.0f} MiB, descriptors {early[1]:.0f} -> {late[1]:.0f}"
            )
            if late[0] > early[0] * GROWTH + GROWTH_BYTES:
                found.append(f"{name}: memory {early[0] / 2**20:.0f} -> {late[0] / 2**20:.0f} MiB")
            found += [
                f"{name}: {what} {early[column]:.0f} -> {late[column]:.0f}"
                for column, what in ((1, "descriptors"), (2, "threads"))
                if late[column] > early[column] + GROWTH_COUNT
            ]
        return found


def idle_problems(world: World, timeout_s: float = 60.0) -> list[str]:
    """Return what the router still counts in flight although no client is there."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            busy = {name: worker["inflight_requests"] for name, worker in world.workers().items()}
        except OSError as exc:
            busy = {f"router: {exc}": 1}
        if not any(busy.values()):
            return []
        if time.monotonic() > deadline_s:
            return [f"in flight without a client: {busy}"]
        time.sleep(1)


async def soak(world: World, findings: Findings, options: argparse.Namespace) -> Samples:
    """Run load, faults and samples side by side for the time asked for."""
    rng = random.Random(options.seed)
    until_s = time.monotonic() + options.minutes * 60
    samples = Samples(world, findings, options.output)
    parts = [load(world.port, rng, findings, until_s, options.peak_rps), samples.run(until_s)]
    if not options.calm:
        parts.append(Faults(world, random.Random(options.seed + 1), findings, options).run(until_s))
    await asyncio.gather(*parts)
    return samples


def judge(world: World, findings: Findings, samples: Samples, minutes: float) -> None:
    """Print the outcomes and add what did not hold to the problems."""
    findings.problems += idle_problems(world)
    findings.problems += samples.problems(int(minutes * 6))
    unexplained = [
        text for began_s, ended_s, text in findings.suspects if not findings.shadowed(began_s, ended_s)
    ]
    findings.problems += [f"without a fault: {text}" for text in unexplained[:20]]
    print("outcomes:", dict(sorted(findings.outcomes.items())))
    print("faults:", dict(Counter(name for _, name in findings.faults)))
    for end in (lambda: print(world.replay_ledger().strip().splitlines()[-1]), world.down):
        try:
            end()
        except (AssertionError, OSError, subprocess.SubprocessError) as exc:
            findings.problems.append(f"at the end: {exc!r}")


def main() -> int:
    """Run the soak; return 1 if a promise did not hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="real minutes under load [60]")
    parser.add_argument("--seed", type=int, default=1, help="of load and faults [1]")
    parser.add_argument(
        "--calm", action="store_true", help="no faults, so that every process lives on and is judged"
    )
    parser.add_argument("--peak-rps", type=float, default=10.0, help="requests per second at the peak [10]")
    parser.add_argument(
        "--output", type=Path, default=Path("soak-output"), help="folder for soak.jsonl and the logs"
    )
    parser.add_argument("--disk", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.disk is None and os.geteuid() == 0:  # a disk of its own, seen by this run alone
        inner = 'mount -t tmpfs -o size=512m tmpfs "$1" && exec "${@:2}"'
        with tempfile.TemporaryDirectory() as disk:
            again = [sys.executable, *sys.argv, "--disk", disk]
            return os.spawnvp(
                os.P_WAIT, "unshare", ["unshare", "--mount", "bash", "-c", inner, "-", disk, *again]
            )
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as other:
        folder = options.disk or Path(other)
        world, findings = World(folder), Findings()
        clock, site = folder / "clock", folder / "site"
        clock.write_text("0")
        site.mkdir()
        (site / "sitecustomize.py").write_text(CLOCK)
        world.env |= {"SOAK_CLOCK": str(clock), "PYTHONPATH": str(site)}
        manifest = folder / "graph.yaml"
        manifest.write_text(MANIFEST)
        try:
            world.up(manifest, speed=SPEED)
            with Watch(world, BUDGET, every_s=0.25) as watch:
                samples = asyncio.run(soak(world, findings, options))
                findings.problems += watch.problems[:20]
            print(f"budget: {watch.looks} looks, at most {watch.most_gpus} of {BUDGET} GPUs")
            judge(world, findings, samples, options.minutes)
        finally:
            world.clean()
    for problem in findings.problems:
        print("PROBLEM", problem)
    print("every promise held" if not findings.problems else f"{len(findings.problems)} problems")
    return bool(findings.problems)


if __name__ == "__main__":
    sys.exit(main())
