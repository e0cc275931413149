"""Real vLLM workers and the router before them; skipped unless the environment names a vLLM and a model."""

import os
import sys
from contextlib import ExitStack
from pathlib import Path

import orjson
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from endpoint import LEASE_S, Process
from reserved_ports import reserved_port

from penstock.api.enums import Environment
from penstock.api.manifests import load_graph
from penstock.runtimes import RuntimeContext, filled_env, process_specs
from penstock.runtimes.protocol import SIDE_CHANNEL_PORT

ENGINE_ARGS = ["--enforce-eager", "--dtype", "bfloat16"]


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

    def manifest(self, name, router, *roles, args=ENGINE_ARGS):
        """Write a graph with a worker of each role; return its path."""
        model = os.environ["PENSTOCK_VLLM_MODEL"]
        workers = {role: {"role": role, "gpusPerReplica": 1, "args": list(args)} for role in roles}
        spec = {
            "model": {"name": model, "servedName": "tiny", "contextTokens": 2048},
            "runtime": "vllm",
            "services": {"frontend": {"role": "router"}, **workers},
            # On a CPU vLLM takes blocks of 128 tokens by itself, too. One request at a time, so that others wait.
            "engine": {"blockTokens": 128, "kvBlocks": 33, "maxRunningRequests": 1, "kvBufferDevice": "cpu"},
            "router": router,
            "lease": {"durationSeconds": LEASE_S},
            "planner": {"enabled": False},
        }
        kind = {"apiVersion": "penstock.dev/v1alpha1", "kind": "GraphDeployment", "metadata": {"name": name}}
        path = self.folder / f"{name}.yaml"
        path.write_bytes(orjson.dumps({**kind, "spec": spec}))
        return path

    def workers(self, *manifests, **connector):
        """Start graphs' vLLMs by the commands that their pods would run, but on ports of this machine.

        Further keywords are added to the NIXL connector's configuration.
        """
        started = {}
        for manifest in manifests:
            context = RuntimeContext(
                python=sys.executable,
                graph_file=str(manifest),
                discovery="kubernetes",
                namespace="tiny",
                environment=Environment.KUBERNETES,
            )
            for spec in process_specs(load_graph(manifest), context):
                if spec.role == "router":
                    continue
                vllm, *flags = spec.argv
                assert vllm == "vllm"
                environment = filled_env(spec, {SIDE_CHANNEL_PORT: reserved_port()})
                argv = [os.environ["PENSTOCK_VLLM"], *_joined(flags, connector)]
                started[spec.role] = self.start(f"{manifest.stem}-{spec.role}", argv, **environment)
        for worker in started.values():
            worker.wait_for("/health")
        return started

    def router(self, name, *more, **workers):
        """Start a router before the workers, each named by its role, and wait until it would serve."""
        flags = [word for role, each in workers.items() for word in ("--worker", f"{role}={each.url}")]
        serve = [sys.executable, "-m", "penstock.cli", "router", "serve", "--port", "{port}"]
        router = self.start(name, [*serve, "--model", "tiny", "--kv-lease", str(LEASE_S), *more, *flags])
        router.wait_for("/ready")
        return router


def _joined(flags, connector):
    """Return a worker's flags with more of the connector's own configuration."""
    if not connector:
        return flags
    place = flags.index("--kv-transfer-config") + 1
    config = orjson.loads(flags[place])
    config["kv_connector_extra_config"] |= connector
    return [*flags[:place], orjson.dumps(config).decode(), *flags[place + 1 :]]


@pytest.fixture(scope="session")
def vllm():
    """Skip where there is none."""
    for name in ("PENSTOCK_VLLM", "PENSTOCK_VLLM_MODEL"):
        if not Path(os.environ.get(name, "")).exists() or name not in os.environ:
            pytest.skip(f"{name} names no vLLM executable or model folder; run make test-vllm (docs/vllm.md)")


@pytest.fixture(scope="session")
def deployment(vllm, tmp_path_factory):
    """Start and stop processes."""
    with ExitStack() as stack:
        yield Deployment(tmp_path_factory.mktemp("vllm"), stack)


def _events():
    return {
        "kvEventsPort": reserved_port(),
        "tokenizer": f"{os.environ['PENSTOCK_VLLM_MODEL']}/tokenizer.json",
    }


@pytest.fixture(scope="session")
def publishing(deployment):
    """The manifests of an aggregated worker and of a pair joined by NIXL, which publish KV events; and the workers."""
    one = deployment.manifest("one", _events(), "aggregated")
    pair = deployment.manifest("pair", _events(), "prefill", "decode")
    return one, pair, deployment.workers(one, pair)


@pytest.fixture(scope="session", params=["aggregated", "prefill"])
def followed(request, deployment, publishing):
    """A worker that computes prompts, and its graph's router, which follows its KV events."""
    one, pair, workers = publishing
    manifest, roles = (
        (one, ["aggregated"]) if request.param == "aggregated" else (pair, ["prefill", "decode"])
    )
    router = deployment.router(
        f"router-{request.param}", "--graph", str(manifest), **{role: workers[role] for role in roles}
    )
    return workers[request.param], router


@pytest.fixture(scope="session")
def workers(publishing):
    """The workers by role."""
    return publishing[2]


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
