"""Counts what a reader walks through who follows one chat, one planner decision and one reconciled graph.

Each is a real run of the commands with the probe of ``probe/sitecustomize.py``. Repeated, a function counts that ran
every time, which leaves out what runs in the background now and then. A walk enters each function where it is first
called and goes back to its caller afterwards.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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


Call = tuple[str, str, int, int | None]
"""A function: its file, its name, its first line, and the number of the call that it was first called by."""


@dataclass(frozen=True, slots=True)
class Walk:
    """A way through the files.

    Attributes:
        files: Different files on the way.
        stays: How often the way enters a file that it was not in just before.
        returns: Of the stays, those in a file that the way was in before.
        outline: The functions in the order of their first calls, each indented below its caller.
    """

    files: int
    stays: int
    outline: str

    @property
    def returns(self) -> int:  # noqa: D102 - among the attributes
        return self.stays - self.files


def walk(calls: Sequence[Call]) -> Walk:
    """Return the walk through functions in the order of their first calls, from the event that most of them follow from."""
    below: dict[int | None, list[int]] = {}
    for number, (*_, caller) in enumerate(calls):
        below.setdefault(caller, []).append(number)
    way: list[str] = []
    outline: list[str] = []

    def enter(file: str) -> None:
        if not way or way[-1] != file:
            way.append(file)

    def follow(number: int, depth: int) -> None:
        file, function, *_ = calls[number]
        outline.append(f"{'  ' * depth}{file} {function}")
        enter(file)
        for each in below.get(number, ()):
            follow(each, depth + 1)
            enter(file)

    def size(number: int) -> int:
        return 1 + sum(map(size, below.get(number, ())))

    follow(max(below[None], key=size), 0)
    return Walk(len(set(way)), len(way), "\n".join(outline))


def common(rounds: Sequence[Sequence[Call]]) -> list[Call]:
    """Return the last round's calls of the functions that every round has, each below the nearest caller of those."""
    shared = set.intersection(*({each[:3] for each in calls} for calls in rounds))
    last, kept, numbers = rounds[-1], [], {}
    for number, (*function, nearest) in enumerate(last):
        caller = nearest
        while caller is not None and last[caller][:3] not in shared:
            caller = last[caller][3]
        if tuple(function) in shared:
            numbers[number] = len(kept)
            kept.append((*function, numbers.get(caller)))
    return kept


class Windows:
    """The probes' windows: which processes run what between two calls."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = 0
        (folder / "0").mkdir()

    def turn(self) -> dict[str, list[Call]]:
        """End the window; return the calls of each process by its command line."""
        ended, self._number = self._folder / str(self._number), self._number + 1
        (self._folder / str(self._number)).mkdir()
        part = self._folder / "window.part"
        part.write_text(str(self._number))
        part.rename(self._folder / "window")
        time.sleep(0.2)  # every probe looks each 10 ms
        records = [json.loads(path.read_text()) for path in ended.glob("*.json")]
        return {" ".join(each["command"]): [tuple(call) for call in each["calls"]] for each in records}

    def walk(self, what: Callable[[], None], process: str) -> Walk:
        """Return the walk of the one process whose command holds ``process``, each time that ``what`` is done."""
        rounds = []
        for _ in range(ROUNDS):
            self.turn()
            what()
            [calls] = [calls for command, calls in self.turn().items() if process in command]
            rounds.append(calls)
        return walk(common(rounds))


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


def count_local(root: Path) -> dict[str, Walk]:
    """Return the walks of one chat through the router and of one decision, in a graph of real processes."""
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
                "chat": windows.walk(lambda: chat(port), " router "),
                "decision": windows.walk(lambda: time.sleep(DECISION_S), " planner "),
            }
        finally:
            subprocess.run(
                [*penstock, "down", "--namespace", "house"], env=env, check=True, stdout=subprocess.DEVNULL
            )


def count_reconcile(root: Path) -> Walk | str:
    """Return the operator's walk of one changed graph; without the programs of a real API server, a text that says what is missing."""
    sys.path[:0] = [str(root / "tests" / each) for each in ("cluster", "support")]
    from apiserver import ControlPlane, missing_assets  # noqa: PLC0415

    missing = missing_assets()
    if missing is not None:
        return missing
    with ControlPlane() as plane, environment(root) as (folder, env):
        plane.install_crds()
        operator = [sys.executable, "-m", "penstock.cli", "operator", "run", "--namespace", "default"]
        options = ["--kubeconfig", str(plane.kubeconfig), "--host", "127.0.0.1", "--metrics-port", "0"]
        running = subprocess.Popen([*operator, *options], env=env, stderr=subprocess.DEVNULL)
        try:
            plane.apply(GRAPH)
            _wait(lambda: _is_current(plane), "the graph's first status")
            return Windows(folder / "probe").walk(lambda: _change(plane), " operator ")
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
