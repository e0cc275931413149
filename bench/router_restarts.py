"""Counts what clients notice while a local graph's router is killed or restarted.

    python bench/router_restarts.py [--how kill] [--count 20] [--clients 8] [--json]

Starts a graph of one router and two simulated workers by `penstock up`. Clients stream short completions without a pause,
every second one over a kept connection; one that fails tries again after 50 ms. The router is sent SIGKILL (``--how kill``)
or SIGTERM (``--how term``), and again 10 s after its successor is ready. Reported: requests by what came of them, the
longest one, and the machine's load average at the beginning and the end.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests/support"))

from options import read_options
from reserved_ports import reserved_port

GRAPH = """
apiVersion: penstock.dev/v1alpha1
kind: GraphDeployment
metadata: {name: restarts}
spec:
  model: {name: m, servedName: m, contextTokens: 8192}
  runtime: simulated
  services:
    frontend: {role: router}
    worker: {role: aggregated, replicas: 2}
  engine: {profile: h200-llama-3.1-8b-tp1}
  planner: {enabled: false}
"""
BODY = json.dumps(
    {"model": "m", "prompt": "a " * 50, "max_tokens": 20, "ignore_eos": True, "stream": True}
).encode()
STABLE_S = 10.5
"""Real seconds: longer than a process has to run for its end not to count as one of several failures in a row."""


class Clients:
    """Threads that ask until it is over, and what came of their requests."""

    def __init__(self, port: int, count: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self.longest_s = 0.0
        self._port = port
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, kwargs={"keeps": number % 2 == 0}) for number in range(count)
        ]
        for each in self._threads:
            each.start()

    def end(self) -> None:
        """Let the requests under way be the last ones."""
        self._over.set()
        for each in self._threads:
            each.join()

    def _run(self, *, keeps: bool) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
        while not self._over.is_set():
            began_s = time.monotonic()
            outcome = self._ask(connection)
            with self._lock:
                self.outcomes[outcome] += 1
                self.longest_s = max(self.longest_s, time.monotonic() - began_s)
            if outcome != "ok" or not keeps:
                connection.close()
            if outcome != "ok":
                time.sleep(0.05)
        connection.close()

    def _ask(self, connection: http.client.HTTPConnection) -> str:
        try:
            connection.request("POST", "/v1/completions", BODY, {"content-type": "application/json"})
            response = connection.getresponse()
            text = response.read()
        except (OSError, http.client.HTTPException) as exc:
            return type(exc).__name__
        is_whole = response.status == 200 and text.rstrip().endswith(b"[DONE]")
        return "ok" if is_whole else f"status {response.status}"


def measure(folder: Path, *, how: str, count: int, clients: int) -> dict[str, Any]:
    """Return what clients noticed of this many ends of the router."""
    state, port, manifest = folder / "state", reserved_port(), folder / "graph.yaml"
    manifest.write_text(GRAPH)
    environment = {**os.environ, "HOME": str(folder), "PENSTOCK_LOCAL_STATE_DIR": str(state)}

    def penstock(*arguments: str) -> None:
        command = [sys.executable, "-m", "penstock.cli", *arguments]
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)

    def router() -> dict[str, Any]:
        found: dict[str, Any] = json.loads((state / "restarts.json").read_text())["restarts_frontend"]
        return found

    penstock("up", str(manifest), "--speed", "10", "--port", str(port))
    try:
        asking, load = Clients(port, clients), [os.getloadavg()[0]]
        try:
            for _ in range(count):
                before = router()["pid"]
                os.kill(before, signal.SIGKILL if how == "kill" else signal.SIGTERM)
                while (now := router())["pid"] in {None, before} or now["state"] != "ready":
                    if now["state"] == "failed":
                        raise SystemExit(f"the router was given up: {now['reason']}")
                    time.sleep(0.1)
                time.sleep(STABLE_S)
        finally:
            asking.end()
    finally:
        penstock("down", "--namespace", "restarts")
    load.append(os.getloadavg()[0])
    return {
        "how": how,
        "count": count,
        "outcomes": asking.outcomes,
        "longest_s": asking.longest_s,
        "load": load,
    }


def main() -> None:
    """Measure and print."""
    choices = {"how": ("kill", "term")}
    options = read_options(__doc__, choices=choices, how="kill", count=20, clients=8)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), how=options.how, count=options.count, clients=options.clients)
    if options.json:
        print(json.dumps(found))
        return
    print(f"{found['count']} times {found['how']}, load {found['load'][0]:.0f} to {found['load'][1]:.0f}")
    for outcome, requests in found["outcomes"].most_common():
        print(f"  {outcome:24} {requests:8,}")
    print(f"  longest request {found['longest_s']:.1f} s")


if __name__ == "__main__":
    main()
