"""Counts the product's files that run for one chat, one planner decision and one reconciled graph.

Each is a real run of the commands with the probe of ``probe/sitecustomize.py``. Repeated, a file counts that ran every
time, which leaves out what runs in the background now and then.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from source import PRODUCT

ROUNDS = 5
"""Chosen: a scrape once a second falls into one window of some 0.1 s, hardly into five."""

DECISION_S = 4.5
"""Two adjustment intervals of the graph and some: a decision falls into each such window."""

GRAPH = {
    "apiVersion": "penstock.dev/v1alpha1",
    "kind": "GraphDeployment",
    "metadata": {"name": "house", "namespace": "default"},
    "spec": {
        "model": {"name": "m", "servedName": "m"},
        "runtime": "simulated",
        "services": {
            "frontend": {"role": "router"},
            "prefill": {"role": "prefill", "scaling": {"minReplicas": 1, "maxReplicas": 2}},
            "decode": {"role": "decode", "scaling": {"minReplicas": 1, "maxReplicas": 2}},
        },
        "planner": {"adjustmentIntervalSeconds": 2, "metricPullingIntervalSeconds": 1, "maxGpuBudget": 4},
    },
}


class Windows:
    """The probes' windows: which processes run what between two calls."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = 0
        (folder / "0").mkdir()

    def turn(self) -> dict[str, list[str]]:
        """End the window; return the files of each process by its command line."""
        ended, self._number = self._folder / str(self._number), self._number + 1
        (self._folder / str(self._number)).mkdir()
        part = self._folder / "window.part"
        part.write_text(str(self._number))
        part.rename(self._folder / "window")
        time.sleep(0.2)  # every probe looks each 10 ms
        records = [json.loads(path.read_text()) for path in ended.glob("*.json")]
        return {" ".join(each["command"]): each["files"] for each in records}

    def common(self, what: Callable[[], None], process: str) -> int:
        """Return how many files the process whose command holds ``process`` runs each time that ``what`` is done."""
        rounds = []
        for _ in range(ROUNDS):
            self.turn()
            what()
            found = self.turn()
            rounds.append(set().union(*(files for command, files in found.items() if process in command)))
        return len(set.intersection(*rounds))


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def chat(port: int) -> None:
    """Have one streamed chat answered."""
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "one two three four " * 20}],
        "max_tokens": 8,
        "stream": True,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.read().rstrip().endswith(b"[DONE]")


@contextmanager
def environment(root: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """Give a folder, and the environment in which the commands of ``root`` run with the probe."""
    with tempfile.TemporaryDirectory(prefix="penstock-house-") as name:
        folder = Path(name)
        (folder / "probe").mkdir()
        search = [str(Path(__file__).parent / "probe"), *(str(root / each) for each in PRODUCT)]
        yield (
            folder,
            {
                **os.environ,
                "HOME": name,
                "PENSTOCK_LOCAL_STATE_DIR": f"{name}/state",
                "PENSTOCK_HOUSE_PROBE": f"{name}/probe",
                "PYTHONPATH": os.pathsep.join(search),
            },
        )


def count_local(root: Path) -> dict[str, int]:
    """Return the files of one chat through the router and of one decision, in a graph of real processes."""
    with environment(root) as (folder, env):
        manifest, port = folder / "graph.yaml", free_port()
        manifest.write_text(json.dumps(GRAPH))
        penstock = [sys.executable, "-m", "penstock.cli"]
        up = [*penstock, "up", str(manifest), "--port", str(port), "--log-dir", f"{folder}/log"]
        subprocess.run(up, env=env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            windows = Windows(folder / "probe")
            chat(port)
            return {
                "chat": windows.common(lambda: chat(port), " router "),
                "decision": windows.common(lambda: time.sleep(DECISION_S), " planner "),
            }
        finally:
            subprocess.run(
                [*penstock, "down", "--namespace", "house"], env=env, check=True, stdout=subprocess.DEVNULL
            )


def count_reconcile(root: Path) -> int | None:
    """Return the operator's files of one changed graph; None without the programs of a real API server."""
    sys.path.insert(0, str(root / "tests/cluster"))
    from apiserver import ControlPlane, missing_assets  # noqa: PLC0415

    if missing_assets() is not None:
        return None
    with ControlPlane() as plane, environment(root) as (folder, env):
        plane.install_crds()
        operator = [sys.executable, "-m", "penstock.cli", "operator", "run", "--namespace", "default"]
        options = ["--kubeconfig", str(plane.kubeconfig), "--host", "127.0.0.1", "--metrics-port", "0"]
        running = subprocess.Popen([*operator, *options], env=env, stderr=subprocess.DEVNULL)
        try:
            plane.apply(GRAPH)
            _wait(lambda: _is_current(plane), "the graph's first status")
            return Windows(folder / "probe").common(lambda: _change(plane), " operator ")
        finally:
            running.kill()
            running.wait()


def _is_current(plane: object) -> bool:
    shown = plane.kubectl("get", "gd", "house", "-o", "json")
    graph = json.loads(shown)
    return graph.get("status", {}).get("observedGeneration") == graph["metadata"]["generation"]


def _change(plane: object) -> None:
    budget = json.loads(plane.kubectl("get", "gd", "house", "-o", "json"))["spec"]["planner"]["maxGpuBudget"]
    patch = json.dumps({"spec": {"planner": {"maxGpuBudget": budget + 1}}})
    plane.kubectl("patch", "gd", "house", "--type=merge", "-p", patch)
    _wait(lambda: _is_current(plane), "the graph's new status")


def _wait(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    until_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > until_s:
            raise TimeoutError(f"no {what} within {timeout_s:g} s")
        time.sleep(0.05)
