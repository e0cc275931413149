"""NVIDIA's own Dynamo frontend and mocker workers under `penstock up`: served, scaled by the planner, drained, gone.

Skipped unless PENSTOCK_DYNAMO names an environment with Dynamo, or `make dynamo` has made `.venv-dynamo`.
"""

import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import openai
import psutil
import pytest
import yaml

from penstock.local.ports import choose_port
from penstock.local.random_model import RandomModel, write_model
from penstock_planner.ledger import read_ledger

ROOT = Path(__file__).parents[2]
SPEED = 4
DEADLINE_S = 240
"""Real seconds for the planner to come to a number of replicas; a loaded machine of two cores takes half."""
PROMPT_TOKENS = 6000
LOAD_PER_S = 30
"""Prompts a real second; one mocker's prefill alone on a machine of two cores keeps up with 16 of them at SPEED."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Graph:
    """A graph started by the command line, in a state folder of its own."""

    def __init__(self, folder, manifest):
        self.folder = folder
        self.manifest = manifest
        self.state = folder / "state"
        self.port = choose_port(set())
        self.url = f"http://127.0.0.1:{self.port}"

    def penstock(self, *words):
        """Run a command; return what it prints."""
        environment = {**os.environ, "PENSTOCK_LOCAL_STATE_DIR": str(self.state)}
        done = subprocess.run(
            [sys.executable, "-m", "penstock.cli", *words],
            env=environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def up(self):
        """Start it."""
        self.penstock("up", str(self.manifest), "--port", str(self.port), "--speed", str(SPEED))

    def status(self):
        """Return what `penstock status` says."""
        return json.loads(self.penstock("status", "--json"))

    def pools(self):
        """Return (ready, draining) by role."""
        return {pool["role"]: (pool["ready"], pool["draining"]) for pool in self.status()["pools"]}

    def until(self, **ready):
        """Wait until the roles have as many ready replicas and none drains."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not all(self.pools()[role] == (number, 0) for role, number in ready.items()):
            assert time.monotonic() < deadline_s, (self.pools(), self.status()["decisions"][-4:])
            time.sleep(0.5)

    def drained(self):
        """Return the names of the replicas that have left."""
        log = (self.state / "log" / "dynamo-test" / "arbiter.log").read_text()
        return re.findall(r"replica removed name='?([\w-]+)", log)

    def pulls(self):
        """Return what the planner has read, by decision."""
        records = read_ledger(self.state / "log" / "dynamo-test" / "planner").records
        return [pull for each in records if each["type"] == "decision" for pull in each["window"]["pulls"]]

    def client(self):
        """Return the official client; no retries, so that errors show."""
        return openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, timeout=300)


class Traffic:
    """Streams that begin at a rate, until it is stopped; whoever is not answered in full is lost."""

    def __init__(self, graph, *, per_s, prompt_tokens, output_tokens):
        self.answered = 0
        self.lost = []
        self._graph = graph
        self._body = {
            "model": "llama",
            "prompt": [11 + index % 400 for index in range(prompt_tokens)],
            "max_tokens": output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        self._pause_s = 1 / per_s
        self._stop = threading.Event()
        self._streams = []
        self._sender = threading.Thread(target=self._send)

    def __enter__(self):
        self._sender.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._sender.join()
        for stream in self._streams:
            stream.join(timeout=DEADLINE_S)

    def _send(self):
        number = 0
        while not self._stop.wait(self._pause_s):
            number += 1
            stream = threading.Thread(target=self._one, args=(number,))
            stream.start()
            self._streams.append(stream)

    def _one(self, number):
        # Another first block each time, so that no prefix cache makes the work light.
        prompt = [1 + (number * 7 + index) % 400 for index in range(128)] + self._body["prompt"][128:]
        content = json.dumps({**self._body, "prompt": prompt}).encode()
        request = urllib.request.Request(
            self._graph.url + "/v1/completions", content, {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
                lines = [line for line in answer.read().decode().splitlines() if line]
        except OSError as exc:
            self.lost.append(repr(exc))
            return
        is_complete = lines[-1] == "data: [DONE]"
        usage = json.loads(lines[-2][6:]).get("usage") if is_complete else None
        if usage is None or usage["completion_tokens"] != self._body["max_tokens"]:
            self.lost.append(lines[-3:])
        else:
            self.answered += 1


@pytest.fixture(scope="module")
def environment():
    """Return the environment that has Dynamo."""
    named = os.environ.get("PENSTOCK_DYNAMO")
    folder = Path(named) if named else ROOT / ".venv-dynamo"
    if not (folder / "bin" / "python").exists():
        pytest.skip(f"{folder} is not an environment with NVIDIA's Dynamo; make dynamo, see docs/dynamo.md")
    return folder.absolute()


@pytest.fixture(scope="module")
def started(environment, tmp_path_factory):
    """Return a function that starts the sample in a planner's mode; everything is stopped afterwards."""
    graphs = []

    def start(mode):
        folder = tmp_path_factory.mktemp(mode)
        write_model(folder / "tiny-dynamo", RandomModel(vocabulary=2048))
        graph = yaml.safe_load((ROOT / "manifests" / "samples" / "dynamo.yaml").read_text())
        graph["metadata"]["name"] = "dynamo-test"
        spec = graph["spec"]
        spec["engine"] |= {"pythonEnvironment": str(environment), "kvBlocks": 1500, "blockTokens": 64}
        spec["slo"] = {"ttft": "1s"}
        spec["planner"] |= {"mode": mode, "adjustmentIntervalSeconds": 10}
        for role in ("prefill", "decode"):
            spec["services"][role]["scaling"]["maxReplicas"] = 2
        manifest = folder / "dynamo.yaml"
        manifest.write_text(yaml.safe_dump(graph))
        made = Graph(folder, manifest)
        graphs.append(made)
        made.up()
        return made

    yield start
    for graph in graphs:
        if (graph.state / "dynamo-test.json").exists():
            graph.penstock("down", "--now")


@pytest.fixture(scope="module")
def graph(started):
    """The graph in mode load, whose thresholds ask for replicas within intervals."""
    return started("load")


def test_both_roles_have_registered(graph):
    """Dynamo's frontend lists the model, and each worker is shown with its own count of requests."""
    models = [each.id for each in graph.client().models.list()]
    processes = {each["role"]: each for each in graph.status()["processes"]}
    assert models == ["llama"]
    assert [processes[role]["state"] for role in ("router", "prefill", "decode")] == ["ready"] * 3
    assert [processes[role]["inflight_requests"] for role in ("prefill", "decode")] == [0, 0]


def test_a_chat_is_streamed(graph):
    """Through the official client: text, its end, and the usage."""
    chunks = list(
        graph.client().chat.completions.create(
            model="llama",
            messages=[{"role": "user", "content": "Where does the water go?"}],
            max_tokens=8,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)
    assert text.count(".") == 8  # the mocker's tokens are words of the vocabulary's filled part
    assert chunks[-1].usage.completion_tokens == 8


def test_processes_listen_on_loopback_alone(graph):
    """Dynamo's requests carry no credentials; its events and the mocker's KV transfers know no other address."""
    open_ports = {}
    for each in graph.status()["processes"]:
        if each["role"] == "planner":
            continue
        for connection in psutil.Process(each["pid"]).net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.ip not in {"127.0.0.1", "::1"}:
                open_ports.setdefault(each["role"], []).append(connection.laddr.port)
    assert "router" not in open_ports
    for role, ports in open_ports.items():
        assert len(ports) <= 4, (role, ports)


def test_the_planner_scales_both_roles_up_and_down_and_loses_no_stream(graph):
    """By load 1 -> 2, then 2 -> 1 under a trickle of long streams, each answered with every token.

    What the planner read has Dynamo's names: demand from the frontend, KV usage and waiting requests from the workers.
    """
    with Traffic(graph, per_s=5, prompt_tokens=200, output_tokens=1200) as trickle:
        with Traffic(graph, per_s=LOAD_PER_S, prompt_tokens=PROMPT_TOKENS, output_tokens=60) as load:
            graph.until(prefill=2, decode=2)
        graph.until(prefill=1, decode=1)
    assert (load.lost, trickle.lost) == ([], [])
    drained = " ".join(graph.drained())
    assert "prefill" in drained
    assert "decode" in drained
    assert load.answered > 50
    assert trickle.answered > 50

    pulls = graph.pulls()
    assert max(pull["kv"]["total"] for pull in pulls) > 0.5
    assert max(pull["queue"]["value"] or 0 for pull in pulls) > 1
    queues = [pull["queue"] for pull in pulls if pull["queue"]["value"] is not None]
    assert {queue["source"].split()[0] for queue in queues} == {"dynamo"}
    arrivals = sum(pull["demand"]["arrivals"] for pull in pulls if pull["demand"])
    prompts = sum(pull["demand"]["prompt_tokens"] for pull in pulls if pull["demand"])
    assert arrivals > 50
    assert prompts / arrivals > 200


def test_down_leaves_nothing(started):
    """No process, no statefile and no discovery."""
    graph = started("load")
    pids = [each["pid"] for each in graph.status()["processes"] if each["pid"]]
    graph.penstock("down")
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert [path.name for path in graph.state.iterdir()] == ["log"]


def test_mode_adaptive_follows_the_frontends_demand(started):
    """Without thresholds of its own it gives prefill a second worker for the load, and takes it back afterwards."""
    graph = started("adaptive")
    with Traffic(graph, per_s=4, prompt_tokens=200, output_tokens=800) as trickle:
        with Traffic(graph, per_s=LOAD_PER_S, prompt_tokens=PROMPT_TOKENS, output_tokens=60) as load:
            graph.until(prefill=2)
        graph.until(prefill=1)
    assert graph.drained()
    assert (load.lost, trickle.lost) == ([], [])
    graph.penstock("down")
