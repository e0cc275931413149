"""Every runtime through the same sentences: start, health, metrics, transfer, cancel, drain, kill, stall and scale.

Runtimes are those of this distribution and the one of docs/runtimes.md. Their workers' pages are as the engines write them.
"""

import asyncio
import dataclasses
import re
import sys
import time
import urllib.request
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import orjson
import pytest

from penstock.api import Environment, GraphDeployment, Role
from penstock.api.runtimes import SHIPPED, RuntimeTraits, traits_of
from penstock.core.errors import InvalidSpecError
from penstock.core.http.client import ConnectionPool
from penstock.core.http.server import HttpServer
from penstock.core.plugins import registered
from penstock.core.worker_metrics import NO_PROGRESS_KNOWN, running
from penstock.kube.objects.names import HTTP_PORT
from penstock.local.probes import Probes
from penstock.router.discovery.watch import parse_page
from penstock.runtimes import RuntimeContext, filled_argv, filled_env, process_specs, runtime_of
from penstock_operator.loads import load_of
from penstock_operator.resources import BuildContext, children
from penstock_operator.resources.children import adapter
from penstock_planner.decide.reading import Quality
from penstock_planner.sources.base import Query
from penstock_planner.sources.scrape import MetricsPages, ScrapeSource
from penstock_planner.targets.base import Endpoint

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "unit" / "router"))

from fake_workers import Answers, FakeWorker  # noqa: E402 - the router's tests bring them
from router_harness import Harness  # noqa: E402 - likewise

ROLES = ("prefill", "decode", "aggregated")
VLLM_PAGE = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="llama"}} {running}
vllm:num_requests_waiting{{engine="0",model_name="llama"}} {waiting}
vllm:kv_cache_usage_perc{{engine="0",model_name="llama"}} {kv}
vllm:prompt_tokens_total{{engine="0",model_name="llama"}} 100
vllm:generation_tokens_total{{engine="0",model_name="llama"}} {tokens}
"""
SGLANG_PAGE = """\
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{{engine_type="unified",model_name="llama",pp_rank="0",tp_rank="0"}} {running}
sglang:num_queue_reqs{{engine_type="unified",model_name="llama",pp_rank="0",tp_rank="0"}} {waiting}
sglang:num_prefill_bootstrap_queue_reqs{{engine_type="unified",model_name="llama"}} 0
sglang:num_prefill_inflight_queue_reqs{{engine_type="unified",model_name="llama"}} 0
sglang:num_decode_prealloc_queue_reqs{{engine_type="unified",model_name="llama"}} 0
sglang:num_decode_transfer_queue_reqs{{engine_type="unified",model_name="llama"}} 0
sglang:token_usage{{engine_type="unified",model_name="llama",pp_rank="0",tp_rank="0"}} {kv}
sglang:prompt_tokens_total{{engine_type="unified",model_name="llama"}} 100
sglang:generation_tokens_total{{engine_type="unified",model_name="llama"}} {tokens}
"""
TRTLLM_PAGE = """\
# TYPE trtllm_num_requests_running gauge
trtllm_num_requests_running{{engine_type="trtllm",model_name="llama"}} {running}
trtllm_num_requests_waiting{{engine_type="trtllm",model_name="llama"}} {waiting}
trtllm_kv_cache_utilization{{engine_type="trtllm",model_name="llama"}} {kv}
trtllm_prompt_tokens_total{{engine_type="trtllm",model_name="llama"}} 100
trtllm_generation_tokens_total{{engine_type="trtllm",model_name="llama"}} {tokens}
"""
COUNTED = 'dynamo_component_inflight_requests{{dynamo_component="backend"}} {running}\n'
PAGES = {
    "vllm": VLLM_PAGE,
    "simulated": VLLM_PAGE,
    "acme": VLLM_PAGE,
    "dynamo": VLLM_PAGE + COUNTED,
    "sglang": SGLANG_PAGE,
    "trtllm": TRTLLM_PAGE,
}
"""What a worker of each runtime writes; all of them are here, or the first test fails."""
JOINS = {
    "vllm": ("kv_transfer_params",),
    "simulated": ("kv_transfer_params",),
    "acme": ("kv_transfer_params",),
    "sglang": ("bootstrap_host", "bootstrap_port", "bootstrap_room"),
    "trtllm": ("disaggregated_params",),
}
"""Keys by which the requests of one prompt are joined, of the runtimes behind Penstock's router."""


def page(runtime, *, requests=0, waiting=0, kv=0, tokens=50):
    """A worker's page."""
    return PAGES[runtime].format(running=requests, waiting=waiting, kv=kv, tokens=tokens)


@pytest.fixture(autouse=True)
def acme(tmp_path, monkeypatch):
    """The runtime of the guide is installed, as its blocks stand there."""
    text = (ROOT / "docs" / "runtimes.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    (point,) = re.findall(r'^acme = "(.*)"$', text, re.MULTILINE)
    (tmp_path / "acme_runtime.py").write_text(code, encoding="utf-8")
    info = tmp_path / "acme_runtime-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-runtime\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[penstock.runtimes]\nacme = {point}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    registered.cache_clear()
    runtime_of.cache_clear()
    yield
    registered.cache_clear()
    runtime_of.cache_clear()
    sys.modules.pop("acme_runtime", None)


@pytest.fixture(params=sorted(PAGES))
def runtime(request):
    """The name of each runtime."""
    return request.param


@pytest.fixture(params=sorted(JOINS))
def routed(request):
    """The name of each runtime behind Penstock's router."""
    return request.param


def graph_of(runtime, *roles):
    """A graph with a service of each role."""
    workers = {
        role: {"role": role, "gpusPerReplica": 2, "scaling": {"minReplicas": 1, "maxReplicas": 4}}
        for role in roles or ("prefill", "decode")
    }
    spec = {
        "model": {"name": "llama"},
        "runtime": runtime,
        "services": {"router": {"role": "router"}, **workers},
        "planner": {"enabled": False},
    }
    return GraphDeployment.model_validate(
        {
            "apiVersion": "penstock.dev/v1alpha1",
            "kind": "GraphDeployment",
            "metadata": {"name": "g"},
            "spec": spec,
        }
    )


LOCAL = RuntimeContext(python="/py", graph_file="/g.yaml", discovery="/state/g.json", namespace="g")
CLUSTER = dataclasses.replace(
    LOCAL,
    discovery="kubernetes",
    environment=Environment.KUBERNETES,
    host="0.0.0.0",
    peer_host="$(POD_IP)",
)


def workers_of(runtime, context=LOCAL):
    """The process of each role."""
    graphs = (graph_of(runtime), graph_of(runtime, "aggregated"))
    return {
        spec.role: spec for graph in graphs for spec in process_specs(graph, context) if spec.role in ROLES
    }


def pod_of(runtime, role):
    """The container of a role's Deployment."""
    graph = graph_of(runtime) if role != "aggregated" else graph_of(runtime, role)
    objects = children(graph, BuildContext(owner_uid="u", namespace="n"), replicas={}, unavailable={})
    (found,) = (
        each for each in objects if each["kind"] == "Deployment" and each["metadata"]["name"] == f"g-{role}"
    )
    return found["spec"]["template"]["spec"]["containers"][0]


@pytest.fixture
async def worker(runtime):
    """A worker's server, whose page a test sets, and those that read it: this machine's probes and the planner."""
    said = {"page": page(runtime), "health": 200}

    async def handle(request, responder):
        if request.path == traits_of(runtime).health_path:
            responder.send(said["health"], b"")
        elif request.path == traits_of(runtime).metrics_path:
            responder.send(200, said["page"].encode(), content_type="text/plain")
        else:
            responder.send(404, b"")

    server, pool, probes = HttpServer(handle), ConnectionPool(), Probes()
    await server.start("127.0.0.1", 0)
    source = ScrapeSource(MetricsPages(pool, real_now_s=lambda: 0.0))
    yield SimpleNamespace(
        said=said,
        url=f"http://127.0.0.1:{server.port}",
        probes=probes,
        source=source.of_runtime(traits_of(runtime).metric_names, traits_of(runtime).metrics_path),
        page_url=f"http://127.0.0.1:{server.port}{traits_of(runtime).metrics_path}",
    )
    await probes.close()
    await pool.close()
    await server.close(grace_s=0)


# ------------------------------------------------------------------ start


def test_all_runtimes_are_here():
    """Those of this distribution and the guide's; all but those with a frontend of their own hand KV over."""
    assert set(PAGES) == {*SHIPPED, "acme"}
    assert set(JOINS) == {name for name in PAGES if traits_of(name).frontend is None}


def test_a_worker_gets_every_port_that_it_asks_for(runtime):
    """No placeholder is left in command and variables, and each port asked for is used; the first is for requests."""
    for spec in workers_of(runtime).values():
        ports = {name: 9000 + number for number, name in enumerate(spec.ports)}
        values = {**ports, "cache_folder": "/cache"}
        words = [*filled_argv(spec, values), *filled_env(spec, values).values()]

        assert spec.ports[0] == "port"
        assert not [each for each in words if re.search(r"\{[a-z_]+\}", each)]
        assert all(any(str(port) in word for word in words) for port in ports.values())


def test_each_role_has_a_command_of_its_own(runtime):
    """Else a prefill worker would serve as another; the guide's and the simulated runtime say the role as it is."""
    commands = {(spec.argv, tuple(sorted(spec.env.items()))) for spec in workers_of(runtime).values()}

    assert len(commands) == 3


def test_a_pod_binds_every_address_and_names_its_own(runtime):
    """A worker on the loopback of its pod is reached by none, one that names it to others misleads them."""
    for role in ROLES:
        container = pod_of(runtime, role)
        words = [*container["args"], *(each.get("value", "") for each in container["env"])]

        assert not [each for each in words if "127.0.0.1" in each or "/state/" in each]
        assert traits_of(runtime).image == container["image"]


def test_a_replica_counts_its_gpus(runtime):
    """In the process for this machine, and in the pod's limits where GPUs are real."""
    assert {spec.gpus for spec in workers_of(runtime).values()} == {2}
    limits = pod_of(runtime, "decode")["resources"].get("limits", {})
    assert limits.get("nvidia.com/gpu") == (None if traits_of(runtime).is_simulated else "2")


def test_a_machine_without_the_programs_is_told_so(runtime, monkeypatch):
    """Before anything starts, in words; Penstock's own programs are there."""
    monkeypatch.setenv("PATH", "/nowhere")
    graph, found = graph_of(runtime).spec, runtime_of(runtime)
    if runtime in {"simulated", "acme"}:
        found.check_installed(graph, LOCAL)
        return
    with pytest.raises(InvalidSpecError, match=r"spec\.engine\.pythonEnvironment"):
        found.check_installed(graph, LOCAL)


# ------------------------------------------------------------------ health


def test_probes_ask_where_the_runtime_says(runtime):
    """Start, readiness and liveness; and so does what starts the process on this machine."""
    path = traits_of(runtime).health_path
    for role, spec in workers_of(runtime).items():
        container = pod_of(runtime, role)
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[kind]["httpGet"] == {"path": path, "port": HTTP_PORT}
        assert spec.health_path == path


async def test_a_worker_that_answers_is_well_and_one_that_refuses_is_not(runtime, worker):
    """A worker that listens with another answer than 200 does not serve."""
    url = worker.url + traits_of(runtime).health_path

    assert await worker.probes.health(url) is None
    worker.said["health"] = 503
    assert await worker.probes.health(url) is not None


# ------------------------------------------------------------------ metrics


def test_the_router_reads_load_and_kv(runtime):
    """By the runtime's own names."""
    read = parse_page(page(runtime, requests=3, waiting=2, kv=0.5), traits_of(runtime).metric_names)

    assert (running(read.engine), read.waiting_requests, read.kv_usage_fraction) == (3, 2, 0.5)


async def test_the_planner_reads_kv_and_what_waits(runtime, worker):
    """From the worker's own page, where the router does not say."""
    worker.said["page"] = page(runtime, requests=3, waiting=2, kv=0.5)

    read = await worker.source.read(Query((Endpoint("d", Role.DECODE, worker.url),), max_age_s=5.0))

    assert (read.kv["d"].quality, read.kv["d"].value) == (Quality.FRESH, 0.5)
    assert (read.worker_waiting["d"].quality, read.worker_waiting["d"].value) == (Quality.FRESH, 2)


async def test_a_page_without_the_names_is_unknown_to_all(runtime, worker):
    """To router, planner and both backends: neither idle nor empty."""
    text = worker.said["page"] = "process_cpu_seconds_total 5\n"

    read = parse_page(text, traits_of(runtime).metric_names)
    planned = await worker.source.read(Query((Endpoint("d", Role.DECODE, worker.url),), max_age_s=5.0))

    assert (read.waiting_requests, read.kv_usage_fraction, dict(read.engine)) == (None, None, {})
    assert planned.kv["d"].quality is Quality.MISSING
    assert await worker.probes.is_busy(worker.page_url, keeps_leases=False) is None
    assert load_of(text) is None


# ------------------------------------------------------------------ drain


@pytest.mark.parametrize(
    ("state", "busy"),
    [({}, False), ({"requests": 1}, True), ({"waiting": 1}, True), ({"requests": 2, "kv": 0.3}, True)],
)
async def test_a_worker_with_requests_is_not_stopped(runtime, worker, state, busy):
    """Neither on this machine nor in a cluster; an idle one is."""
    text = worker.said["page"] = page(runtime, **state)

    assert await worker.probes.is_busy(worker.page_url, keeps_leases=False) is busy
    load = load_of(text)
    assert load is not None
    assert (load.requests > 0) is busy


def test_a_deleted_pod_waits_until_it_is_idle(runtime, monkeypatch):
    """The hook in its container reads the same names: it ends after two pages without requests in a row."""
    hook = pod_of(runtime, "decode")["lifecycle"]["preStop"]
    if "exec" not in hook:
        assert "sleep" in hook  # it finishes its requests itself
        return
    given = [page(runtime, requests=1), page(runtime, waiting=1), page(runtime), page(runtime, requests=2)]
    pages = iter([*given, page(runtime), page(runtime)])
    asked = []

    def answer(url, timeout):
        asked.append(url)
        return BytesIO(next(pages).encode())

    monkeypatch.setattr(time, "sleep", lambda _: None)
    monkeypatch.setattr(urllib.request, "urlopen", answer)
    exec(hook["exec"]["command"][-1], {})

    assert len(asked) == 6
    assert {urlsplit(each).path for each in asked} == {traits_of(runtime).metrics_path}


# ------------------------------------------------------------------ stall


def test_an_engine_that_makes_no_token_hangs_and_one_that_does_not(runtime):
    """After the runtime's own limit, while it has requests."""
    traits = traits_of(runtime)
    limit_s = traits.stall_real_s

    def after(seconds, tokens, requests=1):
        progress = NO_PROGRESS_KNOWN
        for now_s, made in ((0.0, 50), (seconds, tokens)):
            reading = parse_page(page(runtime, requests=requests, tokens=made), traits.metric_names).engine
            progress = progress.after(reading, now_s, inflight_requests=requests, limit_s=limit_s)
        return progress.is_stalled

    assert after(limit_s + 1, 50) is (runtime != "trtllm")  # its counters rise as requests end
    assert not after(limit_s - 1, 50)
    assert not after(limit_s + 1, 51)
    assert not after(limit_s + 1, 50, requests=0)
    assert {spec.stall_s for spec in workers_of(runtime).values()} == {limit_s}


# ------------------------------------------------------------------ transfer, cancel, kill


class OwnPages(FakeWorker):
    """A worker with the page of its runtime."""

    runtime = "vllm"

    async def complete(self, request, responder):
        """Answer, as a context server of TensorRT-LLM where it is one."""
        params = orjson.loads(request.body).get("disaggregated_params") or {}
        if params.get("request_type") != "context_only":
            await super().complete(request, responder)
            return
        said = {**params, "ctx_request_id": 7, "first_gen_tokens": [5], "encoded_opaque_state": "b3BhcXVl"}
        choice = {"index": 0, "text": "x", "finish_reason": "not_finished", "disaggregated_params": said}
        responder.send(200, orjson.dumps({"choices": [choice], "usage": self.usage(1)}))

    async def _handle(self, request, responder):
        if request.path == traits_of(self.runtime).metrics_path:
            responder.send(200, page(self.runtime).encode(), content_type="text/plain")
        else:
            await super()._handle(request, responder)


class RuntimeHarness(Harness):
    """Workers of one runtime."""

    def __init__(self, statefile, runtime):
        super().__init__(statefile)
        self.runtime = runtime

    async def worker(self, role):
        """Start a worker."""
        worker = OwnPages(role, next(self._numbers[role]))
        worker.runtime = self.runtime
        await worker.server.start("127.0.0.1", 0)
        self._closers.append(lambda: worker.server.close(grace_s=0))
        return worker

    async def serving(self, *roles, **settings):
        """Start workers and a router of this runtime's graph."""
        return await self.served(*roles, graph=graph_of(self.runtime).spec, **settings)


@pytest.fixture
async def harness(routed, tmp_path):
    """Of one runtime."""
    harness = RuntimeHarness(tmp_path / "state.json", routed)
    yield harness
    await harness.close()


async def test_both_workers_of_a_prompt_get_what_joins_them(harness, routed):
    """Prefill one token and no stream, decode the client's own; usage has the prefill worker's cached tokens."""
    prefill, decode, router = await harness.serving("prefill", "decode")

    answer = await router.post(max_tokens=3)

    assert answer.status == 200
    (first,), (second,) = prefill.seen, decode.seen
    assert set(JOINS[routed]) <= first.body.keys() & second.body.keys()
    asked = 3 if routed == "trtllm" else 1  # a context-only request makes one token by itself
    assert (first.body["max_tokens"], first.body["stream"], second.body["max_tokens"]) == (asked, False, 3)
    details = orjson.loads(answer.body)["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] == prefill.cached_tokens
    assert await router.metric("penstock_router_kv_transfers_total", result="done") == 1


async def test_a_client_cannot_choose_where_the_kv_comes_from(harness, routed):
    """It would choose which hosts a worker connects to; whatever runtime the key is of."""
    prefill, decode, router = await harness.serving("prefill", "decode")

    for key in JOINS[routed]:
        answer = await router.post(**{key: "evil"})

        assert answer.status == 400
        assert f"{key}: set by the router alone" in orjson.loads(answer.body)["error"]["message"]
    assert not prefill.seen + decode.seen


async def test_a_client_that_leaves_ends_its_request_everywhere(harness):
    """At each worker that has it, and the router holds nothing more."""
    _, decode, router = await harness.serving("prefill", "decode")
    decode.script = [Answers.hang()]

    request = asyncio.create_task(router.post(max_tokens=2))
    await router.until(lambda: decode.seen)
    request.cancel()

    await router.until(lambda: decode.disconnects == 1)
    await router.assert_idle()


@pytest.mark.parametrize("killed", ["prefill", "decode"])
async def test_a_worker_that_dies_before_a_token_costs_no_request(harness, killed):
    """Another one serves it."""
    *workers, router = await harness.serving("prefill", "prefill", "decode", "decode")
    for each in workers:
        if each.role == killed:
            each.script = [Answers.drop()]

    answers = [await router.post(max_tokens=2) for _ in range(4)]

    assert [each.status for each in answers] == [200] * 4


async def test_a_stream_that_breaks_does_not_look_complete(harness):
    """Where it may not go on elsewhere, the client sees the break."""
    _, decode, router = await harness.serving(
        "prefill", "decode", config={"retries": {"maxContinuations": 0}}
    )
    decode.script = [Answers.stream(harness.token_event(0), broken=True)]

    stream = await router.begun_stream(max_tokens=4)

    assert b"[DONE]" not in await router.broken(stream)


# ------------------------------------------------------------------ scale


def test_what_can_scale_says_its_bounds(runtime):
    """On this machine and in a cluster, where prefill, decode and aggregated workers have a ScalingAdapter each."""
    assert {spec.bounds for spec in workers_of(runtime).values()} == {(1, 4)}
    for graph, roles in (
        (graph_of(runtime), {"prefill", "decode"}),
        (graph_of(runtime, "aggregated"), {"aggregated"}),
    ):
        context = BuildContext(owner_uid="u", namespace="n")
        for role in roles:
            made = adapter(graph, role, context, replicas=3)
            assert (made["metadata"]["name"], made["spec"]["replicas"]) == (f"g-{role}", 3)


def test_a_runtime_says_who_answers_clients(runtime):
    """Penstock's router by its own command, or the runtime's frontend, with a metric source for the planner."""
    traits: RuntimeTraits = traits_of(runtime)
    (router,) = (spec for spec in process_specs(graph_of(runtime), LOCAL) if spec.role == "router")

    assert ("penstock.cli" in router.argv) is (traits.frontend is None)
    assert (traits.metric_source == "router") is (traits.frontend is None)
