"""Router processes of benchmarks, and the statefile by which they find workers and each other."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import orjson
import sse_load

from penstock.api import Role
from penstock.core.local_state import EntryState
from penstock.kube.objects.names import GRAPH_SECRET_VARIABLE

_PICKED = 'penstock_router_picks_total{by="other"}'


def list_all(statefile: Path, workers: Sequence[str], routers: Sequence[str]) -> None:
    """Write a statefile that lists aggregated workers and routers by their URLs, all ready."""
    listed = dict.fromkeys(workers, Role.AGGREGATED) | dict.fromkeys(routers, Role.ROUTER)
    entries = {
        f"e{at}": {"role": role, "url": url, "state": EntryState.READY}
        for at, (url, role) in enumerate(listed.items())
    }
    statefile.write_bytes(orjson.dumps(entries))


def start(
    port: int, graph: Path, words: Sequence[str], log: Path, *, verb: str = "serve"
) -> subprocess.Popen[bytes]:
    """Start `penstock router serve`, or another verb, and return it once it is ready; ``words`` are further options."""
    argv = [
        sys.executable,
        "-m",
        "penstock.cli",
        "router",
        verb,
        "--graph",
        str(graph),
        "--port",
        str(port),
        *words,
    ]
    with log.open("wb") as output:
        environment = {**os.environ, GRAPH_SECRET_VARIABLE: "bench"}
        process = subprocess.Popen(argv, stdout=output, stderr=output, env=environment)
    try:
        sse_load.wait_until_ready(f"http://127.0.0.1:{port}/ready", within_s=60.0)
    except SystemExit:
        sse_load.stop(process)
        print(log.read_text(), file=sys.stderr)
        raise
    return process


def picked_elsewhere(url: str) -> float:
    """Return for how many of a router's requests another one has picked the worker."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(_PICKED))
