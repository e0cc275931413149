"""Stands in for a Deployment, its Service and its HPA on a laptop: simulated vLLM workers that are scaled on waiting and running requests.

python hpa_stand_in.py --port 8000 --min 1 --max 6 --speed 20

Clients use http://127.0.0.1:8000, behind which requests go to the workers in turn.
Every 15 seconds of simulated time the number of workers becomes what Kubernetes' formula gives, ceil(metric / target), with a target
of requests for each worker; it falls only after five minutes of lower results (the default behavior of an HPA). targets.json lists the
workers for Prometheus' file_sd_configs, next to this process' own page: kube-state-metrics' series of the Deployment.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import shutil
import signal
import socket
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

WINDOW_S, SYNC_S = 300.0, 15.0


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Worker:
    """One simulated vLLM; it receives connections once its start-up is over."""

    port: int
    process: asyncio.subprocess.Process
    is_ready: bool = False

    async def start(self, after_s: float) -> None:
        """Become ready after that time, once the port answers."""
        await asyncio.sleep(after_s)
        while not self.is_ready and self.process.returncode is None:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                writer.close()
                self.is_ready = True
            await asyncio.sleep(0.1)


@dataclass
class Fleet:
    """The Deployment: its workers, and what the HPA asked for."""

    arguments: argparse.Namespace
    workers: list[Worker] = field(default_factory=list)
    wanted: list[tuple[float, int]] = field(default_factory=list)
    turn: int = 0
    starts: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def ready(self) -> list[Worker]:
        """Workers whose start-up is over."""
        return [each for each in self.workers if each.is_ready]

    async def scale(self, replicas: int, *, is_first: bool = False) -> None:
        """Start or stop workers until there are that many."""
        given = self.arguments
        while len(self.workers) < replicas:
            port = free_port()
            process = await asyncio.create_subprocess_exec(
                shutil.which("penstock") or sys.exit("penstock: not on PATH"),
                *("engine", "serve", given.model, "--served-model-name", given.served_model_name),
                *("--profile", given.profile, "--port", str(port), "--speed", str(given.speed)),
                *("--stream-interval", "8"),
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
            )
            start_s = 0.0 if is_first else given.cold_start / given.speed
            self.workers.append(Worker(port, process))
            task = asyncio.create_task(self.workers[-1].start(start_s))
            self.starts.add(task)
            task.add_done_callback(self.starts.discard)
        while len(self.workers) > replicas:
            self.workers.pop().process.send_signal(signal.SIGTERM)  # it finishes its streams
        self.write_targets()

    def write_targets(self) -> None:
        """Write the file that Prometheus reads."""
        found = [{"targets": [f"127.0.0.1:{each.port}"], "labels": {"job": "vllm"}} for each in self.ready]
        found.append({"targets": [f"127.0.0.1:{self.arguments.metrics_port}"], "labels": {"job": "kube"}})
        file = Path(self.arguments.targets)
        file.with_suffix(".new").write_text(json.dumps(found))
        file.with_suffix(".new").replace(file)

    def desired(self, requests: float) -> int:
        """Return what an HPA would set now."""
        given, now_s = self.arguments, time.monotonic()
        fresh = max(given.min, min(given.max, math.ceil(requests / given.target)))
        kept_s = now_s - WINDOW_S / given.speed
        self.wanted = [*((at_s, each) for at_s, each in self.wanted if at_s > kept_s), (now_s, fresh)]
        return max(each for _, each in self.wanted)

    def page(self) -> str:
        """Return kube-state-metrics' series of the Deployment."""
        labels = '{namespace="default",deployment="vllm"}'
        return (
            f"kube_deployment_status_replicas_ready{labels} {len(self.ready)}\n"
            f"kube_deployment_status_replicas{labels} {len(self.workers)}\n"
        )


def requests_at(worker: Worker) -> float:
    """Return the running and waiting requests that a worker's metrics show; 0 while it does not answer."""
    with contextlib.suppress(OSError):
        with urllib.request.urlopen(f"http://127.0.0.1:{worker.port}/metrics", timeout=5) as page:
            lines = page.read().decode().splitlines()
        wanted = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
        return sum(float(line.split()[-1]) for line in lines if line.startswith(wanted))
    return 0.0


async def autoscale(fleet: Fleet) -> None:
    """Set the number of workers every 15 simulated seconds, as an HPA does."""
    while True:
        loads = await asyncio.gather(*(asyncio.to_thread(requests_at, each) for each in fleet.ready))
        await fleet.scale(fleet.desired(sum(loads)))
        await asyncio.sleep(SYNC_S / fleet.arguments.speed)


async def relay(fleet: Fleet, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Join one client's connection with the next worker, for one request."""

    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(65536):
                sink.write(data)
                await sink.drain()
        sink.close()

    workers = fleet.ready
    fleet.turn += 1
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        ours = await asyncio.open_connection("127.0.0.1", workers[fleet.turn % len(workers)].port)
    except (ConnectionError, asyncio.IncompleteReadError, ZeroDivisionError):
        writer.close()
        return
    ours[1].write(head[:-2] + b"Connection: close\r\n\r\n")
    await asyncio.gather(pump(reader, ours[1]), pump(ours[0], writer))


async def show(fleet: Fleet, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer a scrape."""
    await reader.readuntil(b"\r\n\r\n")
    body = fleet.page().encode()
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nConnection: close\r\n")
    writer.write(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
    await writer.drain()
    writer.close()


async def main() -> None:
    """Run until SIGTERM or Ctrl-C."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("port", 8000), ("metrics-port", 8080), ("min", 1), ("max", 6)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, value in (("target", 16.0), ("cold-start", 60.0), ("speed", 1.0)):
        parser.add_argument(f"--{name}", type=float, default=value)
    for name, text in (
        ("model", "meta-llama/Llama-3.1-8B-Instruct"),
        ("served-model-name", "llama"),
        ("profile", "h100-llama-8b-bf16-tp1"),
        ("targets", "targets.json"),
    ):
        parser.add_argument(f"--{name}", default=text)
    fleet = Fleet(parser.parse_args())
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    given = fleet.arguments
    await fleet.scale(given.min, is_first=True)
    servers = [
        await asyncio.start_server(lambda r, w: relay(fleet, r, w), "127.0.0.1", given.port),
        await asyncio.start_server(lambda r, w: show(fleet, r, w), "127.0.0.1", given.metrics_port),
    ]
    scaling = asyncio.create_task(autoscale(fleet))
    await stop.wait()
    scaling.cancel()
    for server in servers:
        server.close()
    for each in fleet.workers:
        each.process.terminate()
    await asyncio.gather(*(each.process.wait() for each in fleet.workers))


if __name__ == "__main__":
    asyncio.run(main())
