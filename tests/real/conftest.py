"""Real vLLM workers and the router before them; skipped unless the environment names a vLLM and a model."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import openai
import orjson
import pytest

from penstock_api.enums import Environment
from penstock_manifests import load_graph
from penstock_runtimes import RuntimeContext, filled_env, process_specs
from penstock_runtimes.process import SIDE_CHANNEL_PORT

STARTUP_S = 900
"""A loaded machine of two cores needs minutes to import and start a vLLM."""
LEASE_S = 30
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    # Left alone, every vLLM binds itself to the same first core, and two that wait for each other starve there.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "UCX_TLS": "tcp,self,sm",
    "UCX_NET_DEVICES": "lo",
    # For /reset_prefix_cache.
    "VLLM_SERVER_DEV_MODE": "1",
}
ENGINE_ARGS = ["--enforce-eager", "--dtype", "bfloat16"]


def _free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Process:
    """A child with a session of its own, so that all its children can be stopped with it."""

    def __init__(self, name, argv, folder, **environment):
        self.log = folder / f"{name}.log"
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        argv = [each.replace("{port}", str(self.port)) for each in argv]
        environment = {**os.environ, **ENVIRONMENT, **environment}
        with self.log.open("wb") as out:
            self._child = subprocess.Popen(
                argv, stdout=out, stderr=out, env=environment, start_new_session=True
            )

    def signal_all(self, number):
        """Signal the child and all that it has started."""
        os.killpg(self._child.pid, number)

    def stop(self):
        """End it."""
        self.signal_all(signal.SIGCONT)
        self._child.terminate()
        try:
            self._child.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.signal_all(signal.SIGKILL)
            self._child.wait(timeout=10)

    def wait_for(self, path):
        """Wait until a path answers 200."""
        deadline_s = time.monotonic() + STARTUP_S
        while time.monotonic() < deadline_s:
            assert self._child.poll() is None, self.log.read_text()[-4000:]
            try:
                with urllib.request.urlopen(self.url + path, timeout=5):
                    return
            except OSError:
                time.sleep(0.5)
        raise AssertionError(f"{path} did not answer 200:\n{self.log.read_text()[-4000:]}")

    def wait_for_vllm(self):
        """Wait until it would serve, then have it compute a prompt of some length.

        On a CPU with AMX vLLM 0.32 dies of an illegal instruction if its first prompt has a few tokens only: its
        attention uses tiles without asking the kernel for them, which oneDNN does at the first large product.
        """
        self.wait_for("/health")
        self.post(model="tiny", prompt=[5] * 600, max_tokens=1)

    def post(self, path="/v1/completions", **body):
        """Return the JSON answer of a request sent here, without the router."""
        request = urllib.request.Request(
            self.url + path, orjson.dumps(body), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return orjson.loads(answer.read())

    def get(self, path):
        """Return a page."""
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return answer.read().decode()

    def metric(self, name, **labels):
        """Return the sum of a metric's samples that carry the labels."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        lines = [line for line in self.get("/metrics").splitlines() if re.split("[{ ]", line)[0] == name]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if all(each in line for each in wanted))

    def until(self, condition, within_s=60):
        """Wait for a condition."""
        deadline_s = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline_s, "condition not met in time"
            time.sleep(0.1)

    def client(self):
        """Return the official client; no retries, so that errors show."""
        return openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, timeout=300)


class Deployment:
    """Workers and routers of one session."""

    def __init__(self, folder, stack):
        self.folder = folder
        self._stack = stack

    def start(self, name, argv, **environment):
        """Start a process that is stopped with the session."""
        process = Process(name, argv, self.folder, **environment)
        self._stack.callback(process.stop)
        return process

    def manifest(self, name, router, *roles):
        """Write a graph with a worker of each role; return its path."""
        model = os.environ["PENSTOCK_VLLM_MODEL"]
        workers = {role: {"role": role, "gpusPerReplica": 1, "args": ENGINE_ARGS} for role in roles}
        spec = {
            "model": {"name": model, "servedName": "tiny", "contextTokens": 2048},
            "runtime": "vllm",
            "services": {"frontend": {"role": "router"}, **workers},
            # On a CPU vLLM takes blocks of 128 tokens by itself, too.
            "engine": {"blockTokens": 128, "kvBlocks": 33, "kvBufferDevice": "cpu"},
            "router": router,
            "lease": {"durationSeconds": LEASE_S},
            "planner": {"enabled": False},
        }
        kind = {"apiVersion": "penstock.dev/v1alpha1", "kind": "GraphDeployment", "metadata": {"name": name}}
        path = self.folder / f"{name}.yaml"
        path.write_bytes(orjson.dumps({**kind, "spec": spec}))
        return path

    def workers(self, manifest):
        """Start a graph's vLLMs by the commands that their pods would run, but on ports of this machine."""
        context = RuntimeContext(
            python=sys.executable,
            graph_file=str(manifest),
            discovery="kubernetes",
            namespace="tiny",
            environment=Environment.KUBERNETES,
        )
        started = {}
        for spec in process_specs(load_graph(manifest), context):
            if spec.role == "router":
                continue
            vllm, *flags = spec.argv
            assert vllm == "vllm"
            environment = filled_env(spec, {SIDE_CHANNEL_PORT: _free_port()})
            argv = [os.environ["PENSTOCK_VLLM"], *flags]
            started[spec.role] = self.start(spec.role, argv, **environment)
        for worker in started.values():
            worker.wait_for_vllm()
        return started

    def router(self, name, *more, **workers):
        """Start a router before the workers, each named by its role, and wait until it would serve."""
        flags = [word for role, each in workers.items() for word in ("--worker", f"{role}={each.url}")]
        serve = [sys.executable, "-m", "penstock_cli", "router", "serve", "--port", "{port}"]
        router = self.start(name, [*serve, "--model", "tiny", "--kv-lease", str(LEASE_S), *more, *flags])
        router.wait_for("/ready")
        return router


@pytest.fixture(scope="session")
def deployment(tmp_path_factory):
    """Start and stop processes."""
    for name in ("PENSTOCK_VLLM", "PENSTOCK_VLLM_MODEL"):
        if not Path(os.environ.get(name, "")).exists() or name not in os.environ:
            pytest.skip(f"{name} names no vLLM executable or model folder; see docs/vllm.md")
    with ExitStack() as stack:
        yield Deployment(tmp_path_factory.mktemp("vllm"), stack)


@pytest.fixture(scope="session")
def publishing(deployment):
    """The manifest of an aggregated worker that publishes its KV events, and the worker."""
    tokenizer = f"{os.environ['PENSTOCK_VLLM_MODEL']}/tokenizer.json"
    manifest = deployment.manifest(
        "one", {"kvEventsPort": _free_port(), "tokenizer": tokenizer}, "aggregated"
    )
    return manifest, deployment.workers(manifest)["aggregated"]


@pytest.fixture(scope="session")
def followed(deployment, publishing):
    """That worker, and the graph's router, which follows its KV events."""
    manifest, worker = publishing
    return worker, deployment.router("router-one", "--graph", str(manifest), aggregated=worker)


@pytest.fixture(scope="session")
def workers(deployment, publishing):
    """An aggregated worker, and a prefill and a decode worker joined by NIXL."""
    pair = deployment.workers(deployment.manifest("pair", {}, "prefill", "decode"))
    return {"aggregated": publishing[1], **pair}


@pytest.fixture(scope="session")
def aggregated(deployment, workers):
    """A router before the aggregated worker."""
    return deployment.router("router-aggregated", aggregated=workers["aggregated"])


@pytest.fixture(scope="session")
def disaggregated(deployment, workers):
    """A router before the pair; it has handed one prompt over, so the workers know each other."""
    router = deployment.router("router-pair", prefill=workers["prefill"], decode=workers["decode"])
    router.post(model="tiny", prompt="Hello", max_tokens=2)
    return router
