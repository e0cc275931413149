"""Real SGLang under `penstock up`: texts through prefill and decode are a single server's own, and no failure is hidden."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import openai
import orjson
import pytest
from endpoint import GREEDY, SENTENCE, text_of
from reserved_ports import reserved_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

PROMPT = SENTENCE * 4
START_S = 1500


@pytest.fixture(scope="module")
def sglang():
    """The environment that has SGLang; skipped where there is none."""
    folder = os.environ.get("PENSTOCK_SGLANG", "")
    if not folder or not (Path(folder) / "bin" / "sglang").exists():
        pytest.skip("PENSTOCK_SGLANG names no environment with SGLang; run make test-sglang (docs/sglang.md)")
    return folder


class Graph:
    """One graph under `penstock up`."""

    def __init__(self, folder, sglang, name, router=None, **roles):
        workers = {
            role: {
                "role": role,
                "replicas": replicas,
                "gpusPerReplica": 1,
                "startupTimeoutSeconds": START_S,
                "scaling": {"minReplicas": 0, "maxReplicas": 2},
            }
            for role, replicas in roles.items()
        }
        spec = {
            "model": {"name": os.environ["PENSTOCK_VLLM_MODEL"], "servedName": "tiny", "contextTokens": 2048},
            "runtime": "sglang",
            "services": {"frontend": {"role": "router"}, **workers},
            "env": [{"name": "OMP_NUM_THREADS", "value": "1"}, {"name": "HF_HUB_OFFLINE", "value": "1"}],
            "engine": {
                "pythonEnvironment": sglang,
                "kvBufferDevice": "cpu",
                "blockTokens": 16,
                "kvBlocks": 512,
                "maxRunningRequests": 8,
            },
            "planner": {"enabled": False},
            "router": router or {},
        }
        kind = {"apiVersion": "penstock.dev/v1alpha1", "kind": "GraphDeployment", "metadata": {"name": name}}
        self.folder, self.name = folder, name
        self._clients = []
        (folder / "graph.json").write_bytes(orjson.dumps({**kind, "spec": spec}))
        self.run("up", "graph.json", "--port", str(reserved_port()))
        self.url = next(each["url"] for each in self.state().values() if each.get("role") == "router")

    def run(self, *words):
        """Run a command of Penstock with this graph's own state."""
        return subprocess.run(
            [sys.executable, "-m", "penstock.cli", *words],
            cwd=self.folder,
            env={**os.environ, "HOME": str(self.folder)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout

    def state(self):
        """The entries of its statefile."""
        (path,) = self.folder.rglob(f"state/{self.name}.json")
        return {name: each for name, each in json.loads(path.read_text()).items() if "role" in each}

    def metric(self, name):
        """The sum of a metric of the router's."""
        page = httpx.get(f"{self.url}/metrics").text
        return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(name))

    def client(self):
        """The official client before the router; `close_clients` closes it."""
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=600)
        self._clients.append(client)
        return client

    def close_clients(self):
        """Close the connections of all clients."""
        for client in self._clients:
            client.close()

    def down(self):
        """End the graph once its clients' connections are closed."""
        self.close_clients()
        self.run("down", "--namespace", self.name)

    def texts(self, **body):
        """The text of a whole and a streamed answer."""
        client, body = self.client(), {"prompt": PROMPT, **GREEDY, **body}
        whole = client.completions.create(**body)
        events = client.completions.create(**body, stream=True)
        return whole, text_of(events)


@pytest.fixture(scope="module")
def aggregated(sglang, tmp_path_factory):
    """One server for both stages."""
    router = {"kvEventsPort": reserved_port()}
    graph = Graph(tmp_path_factory.mktemp("one"), sglang, "one", router, aggregated=1)
    yield graph
    graph.down()


@pytest.fixture(scope="module")
def pair(sglang, tmp_path_factory):
    """A prefill server and two decode servers."""
    graph = Graph(tmp_path_factory.mktemp("pair"), sglang, "pair", prefill=1, decode=2)
    yield graph
    graph.down()


def test_prefill_and_decode_say_what_one_server_says(aggregated, pair):
    """Whole and streamed, byte for byte, with the prompt counted; the second time prefill finds it in its cache."""
    alone, alone_streamed = aggregated.texts()
    whole, streamed = pair.texts()

    assert whole.choices[0].text == streamed == alone.choices[0].text == alone_streamed
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (alone.usage.prompt_tokens, 24)
    again, _ = pair.texts()
    assert again.usage.prompt_tokens_details.cached_tokens >= 0.8 * whole.usage.prompt_tokens


def test_the_router_follows_what_the_cache_holds(aggregated):
    """By SGLang's KV events: a prompt's complete blocks of 512 tokens, named by their token ids; none is misread or lost."""
    before = aggregated.metric("penstock_router_worker_prefix_blocks")
    prompt = [7] + [5 + n % 400 for n in range(1100)]
    aggregated.client().completions.create(model="tiny", prompt=prompt, max_tokens=2)
    deadline_s = time.monotonic() + 60
    while aggregated.metric("penstock_router_worker_prefix_blocks") < before + 2:
        assert time.monotonic() < deadline_s, aggregated.metric("penstock_router_kv_event_batches_total")
        time.sleep(0.5)
    for name in ("kv_events_malformed", "kv_event_gaps"):
        assert aggregated.metric(f"penstock_router_{name}_total") == 0


def test_what_decode_cannot_compute_is_refused(pair):
    """Rather than wait for a prefill that never comes."""
    with pytest.raises(openai.BadRequestError, match="one prompt for one answer"):
        pair.client().completions.create(prompt=["a", "b"], **GREEDY)


def test_a_killed_decode_server_costs_no_stream(pair):
    """Each continues on the other one, after a prefill of its own, to the length asked for.

    With random weights what was said is tokenised again, so the rest is another text.
    """
    expected, _ = pair.texts(max_tokens=600, extra_body={"ignore_eos": True})
    ends, begun = [], threading.Barrier(5)

    def ask():
        events = pair.client().completions.create(
            prompt=PROMPT,
            **{**GREEDY, "max_tokens": 600},
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        said = []
        for event in events:
            said.append(event)
            if len(said) == 5:
                begun.wait(300)
        ends.append(
            (said[0].choices[0].text, said[-2].choices[0].finish_reason, said[-1].usage.completion_tokens)
        )

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    begun.wait(300)
    victim = next(each for name, each in pair.state().items() if each["role"] == "decode")
    os.killpg(victim["pid"], signal.SIGKILL)
    for thread in threads:
        thread.join(600)

    assert len(ends) == 4
    for first, reason, tokens in ends:
        assert expected.choices[0].text.startswith(first)
        assert (reason, tokens) == ("length", 600)
    assert pair.metric("penstock_router_stream_continuations_total") > 0


def test_down_waits_for_streams(sglang, tmp_path):
    """A graph that is taken down answers what it has begun."""
    graph = Graph(tmp_path, sglang, "leaving", prefill=1, decode=1)
    events = graph.client().completions.create(
        prompt=PROMPT, **{**GREEDY, "max_tokens": 300}, stream=True, extra_body={"ignore_eos": True}
    )
    next(events)
    down = threading.Thread(target=graph.run, args=("down", "--namespace", "leaving"))
    down.start()
    said = [event for event in events if event.choices]
    down.join(300)
    graph.close_clients()

    assert said[-1].choices[0].finish_reason == "length"
