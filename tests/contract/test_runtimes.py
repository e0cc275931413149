"""Every runtime through the same sentences: start, health, metrics, drain, stall and scale.

Runtimes are those of this distribution and the one of docs/runtimes.md. Their workers' pages are as the engines write them.
"""

import dataclasses
import re
import time
import urllib.request
from io import BytesIO
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
from runtime_pages import JOINS, PAGES, graph_of, page

from penstock.api import Environment, Role
from penstock.api.runtimes import SHIPPED, RuntimeTraits, traits_of
from penstock.core.errors import InvalidSpecError
from penstock.core.http.client import ConnectionPool
from penstock.core.http.server import HttpServer
from penstock.core.worker_metrics import NO_PROGRESS_KNOWN, running
from penstock.kube.objects.names import HTTP_PORT
from penstock.local.probes import Probes
from penstock.router.discovery.watch import parse_page
from penstock.runtimes import RuntimeContext, filled_argv, filled_env, process_specs, runtime_of
from penstock_operator.loads import load_of
from penstock_operator.resources import BuildContext, children
from penstock_operator.resources.children import adapter
from penstock_planner.decide.demand.reading import Quality
from penstock_planner.sources.base import Query
from penstock_planner.sources.scrape import MetricsPages, ScrapeSource
from penstock_planner.targets.base import Endpoint

pytestmark = pytest.mark.usefixtures("acme")

ROLES = ("prefill", "decode", "aggregated")


@pytest.fixture(params=sorted(PAGES))
def runtime(request):
    """The name of each runtime."""
    return request.param


LOCAL = RuntimeContext(python="/py", graph_file="/g.yaml", discovery="/state/g.json", namespace="g")
CLUSTER = dataclasses.replace(
    LOCAL,
    discovery="kubernetes",
    environment=Environment.KUBERNETES,
    host="0.0.0.0",
    own_host="::",
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
