"""Workers from EndpointSlices: what is read of them, what survives a cluster that is away, and what requests see."""

import asyncio

import orjson
import pytest

from penstock.api import Role
from penstock.core.errors import ConfigError
from penstock.router import server as server_module
from penstock.router.discovery import kubernetes as kubernetes_module
from penstock.router.discovery.kubernetes import KubernetesDiscovery, parse_slices, router_urls
from penstock.router.settings import GraphReference, RouterSettings

READY = {"ready": True, "serving": True, "terminating": False}
STARTING = {"ready": False, "serving": False, "terminating": False}
LEAVING = {"ready": False, "serving": True, "terminating": True}
GONE = {"ready": False, "serving": False, "terminating": True}


def endpoint(name="decode-1", address="10.1.0.1", conditions=READY, uid="u1"):
    """Return an endpoint of a pod."""
    pod = {"kind": "Pod", "name": name, "uid": uid}
    return {"addresses": [address], "conditions": conditions, "targetRef": pod}


def slice_of(*endpoints, role="decode", family="IPv4", ports=None, name="llama-decode-x"):
    """Return an EndpointSlice as Kubernetes writes it."""
    return {
        "metadata": {"name": name, "namespace": "serving", "labels": {"penstock.dev/role": role}},
        "addressType": family,
        "ports": [{"name": "http", "port": 8000, "protocol": "TCP"}] if ports is None else ports,
        "endpoints": list(endpoints),
    }


@pytest.mark.parametrize(
    ("conditions", "ready", "draining"),
    [
        (READY, True, False),
        (STARTING, False, False),
        (LEAVING, False, True),
        (GONE, False, True),
        ({"ready": True, "serving": True, "terminating": True}, False, True),
        ({"ready": None}, True, False),
        ({}, True, False),
        (None, True, False),
    ],
)
def test_conditions(conditions, ready, draining):
    """Unknown is ready, as the API says; a terminating pod takes nothing new, whatever its readiness."""
    (spec,) = parse_slices([slice_of(endpoint(conditions=conditions))])

    assert (spec.ready, spec.draining, spec.supervised) == (ready, draining, True)
    assert bool(spec.reason) is (not ready and not draining)


@pytest.mark.parametrize(
    ("address", "family", "url"),
    [("10.1.0.1", "IPv4", "http://10.1.0.1:8000"), ("fd00::1", "IPv6", "http://[fd00::1]:8000")],
)
def test_a_worker_is_its_pod(address, family, url):
    """Name, address, uid."""
    (spec,) = parse_slices([slice_of(endpoint(address=address), role="prefill", family=family)])
    assert (spec.name, spec.url, spec.role, spec.incarnation) == ("decode-1", url, Role.PREFILL, "u1")


def test_workers_of_a_graph_may_speak_https_but_not_its_routers():
    """The graph says so of all."""
    (spec,) = parse_slices([slice_of(endpoint())], "https")
    assert spec.url == "https://10.1.0.1:8000"
    assert router_urls([slice_of(endpoint(), role="router")]) == ("http://10.1.0.1:8000",)


SIX = slice_of(endpoint(address="fd00::1"), family="IPv6")
OLD, NEW = (endpoint(conditions=each, uid=uid) for each, uid in ((LEAVING, "old"), (READY, "new")))


@pytest.mark.parametrize(
    ("slices", "expected"),
    [
        ([SIX, slice_of(endpoint())], ("http://10.1.0.1:8000", "u1", True, False)),
        *(
            ([slice_of(endpoint(conditions=each)) for each in pair], ("http://10.1.0.1:8000", "u1", *state))
            for pair, state in (
                ((READY, STARTING), (True, False)),
                ((STARTING, STARTING), (False, False)),
                ((READY, LEAVING), (False, True)),
            )
        ),
        ([slice_of(OLD), slice_of(NEW)], ("http://10.1.0.1:8000", "new", True, False)),
    ],
    ids=[
        "of both families: IPv4",
        "ready in one",
        "ready in none",
        "leaving in one",
        "a new pod of this name",
    ],
)
def test_a_pod_in_two_slices_is_one_worker(slices, expected):
    """In either order, while it is moved between slices too, or an old pod leaves under the same name."""
    (spec,) = parse_slices(slices)
    assert (spec.url, spec.incarnation, spec.ready, spec.draining) == expected
    assert parse_slices(slices[::-1]) == (spec,)


@pytest.mark.parametrize(
    "other",
    [
        slice_of(endpoint("r"), role="router"),
        slice_of(endpoint("r"), role="unheard-of"),
        slice_of(endpoint("r"), family="FQDN"),
        slice_of(endpoint("r"), ports=[]),
        slice_of(endpoint("r"), ports=[{"name": "http", "port": None}]),
        slice_of(endpoint("r"), ports=[{"name": "kv", "port": 5600}, {"name": "metrics", "port": 1}]),
        slice_of({"addresses": [], "targetRef": {"name": "r"}}),
        {"metadata": {"name": "bare"}, "addressType": "IPv4", "endpoints": None, "ports": None},
    ],
)
def test_what_is_no_worker_is_left_out(other):
    """Other slices, and endpoints without an address or a port, hide none of the workers."""
    assert [spec.name for spec in parse_slices([other, slice_of(endpoint())])] == ["decode-1"]


def test_the_http_port_is_found_among_others_and_a_single_one_is_taken():
    """The port is chosen by name; one without a name is the only one there is."""
    several = [{"name": "kv", "port": 5600}, {"name": "http", "port": 8100}]
    (spec,) = parse_slices([slice_of(endpoint(), ports=several)])
    assert spec.url == "http://10.1.0.1:8100"
    (spec,) = parse_slices([slice_of(endpoint(), ports=[{"name": None, "port": 9000}])])
    assert spec.url == "http://10.1.0.1:9000"


def test_an_endpoint_without_a_pod_is_named_by_its_address():
    """Slices written by hand name no pod."""
    (spec,) = parse_slices([slice_of({"addresses": ["10.1.0.9"]})])

    assert (spec.name, spec.incarnation, spec.ready) == ("10.1.0.9:8000", "", True)


class FakeInformer:
    """Stands for the watch: a test sets its objects and problem."""

    made = None

    def __init__(self, client, kind, *, namespace, labels, on_change):
        self.objects, self.problem, self.synced = {}, None, asyncio.Event()
        self.asked = (kind.plural, namespace, labels)
        self._on_change = on_change
        self.ended = False
        FakeInformer.made = self

    async def run(self):
        """Do as the real one does: end only when cancelled."""
        self.synced.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.ended = True

    def show(self, *slices):
        """Replace what is known."""
        self.objects = {("serving", str(number)): each for number, each in enumerate(slices)}
        self._on_change("MODIFIED", {})


class FakeClient:
    """A client that reaches nothing."""

    namespace, server = "serving", "https://10.0.0.1"

    @classmethod
    async def connect(cls):
        """Pretend."""
        return cls()

    async def close(self):
        """Nothing is open."""


@pytest.fixture
def cluster(monkeypatch):
    """Replace client and informer."""
    monkeypatch.setattr(kubernetes_module, "KubeClient", FakeClient)
    monkeypatch.setattr(kubernetes_module, "Informer", FakeInformer)


@pytest.fixture
async def discovery(cluster):
    """A started discovery of graph llama."""
    made = KubernetesDiscovery(graph="llama", namespace=None)
    await made.start()
    yield made
    await made.close()


async def test_an_unreadable_slice_keeps_the_last_good_view(discovery, caplog):
    """What nobody expects is logged, and the workers stay."""
    FakeInformer.made.show(slice_of(endpoint()))
    discovery.poll()
    FakeInformer.made.show(slice_of("not an endpoint"))
    assert discovery.poll() is None
    assert "last good view is kept" in caplog.text
    FakeInformer.made.show(slice_of(endpoint(), endpoint("decode-2", "10.1.0.2")))
    assert [spec.name for spec in discovery.poll()] == ["decode-1", "decode-2"]


async def test_an_absent_server_is_a_problem_and_the_view_stays(discovery):
    """The problem names the cluster; the view changes by no poll."""
    FakeInformer.made.show(slice_of(endpoint()))
    assert discovery.poll()
    assert discovery.problem is None
    FakeInformer.made.problem = "the API server does not answer"
    assert discovery.problem == "Kubernetes: the API server does not answer"
    assert discovery.poll() is None


async def test_a_router_starts_without_an_answer_from_the_cluster(cluster, monkeypatch):
    """The wait for the first view is bounded; until it is there, the problem says so."""
    monkeypatch.setattr(kubernetes_module, "FIRST_VIEW_S", 0.01)
    monkeypatch.setattr(FakeInformer, "run", lambda self: asyncio.Event().wait())
    discovery = KubernetesDiscovery(graph="llama", namespace="other")
    assert discovery.problem == "not started"
    await discovery.start()
    assert "first list" in discovery.problem
    assert FakeInformer.made.asked == ("endpointslices", "other", {"penstock.dev/graph": "llama"})
    await discovery.close()


def slices_for(*workers, **conditions):
    """Return slices whose endpoints are fake workers on loopback."""
    return [
        slice_of(
            endpoint(
                each.name, "127.0.0.1", conditions.get(each.name.replace("-", "_"), READY), uid=each.name
            ),
            role=each.role,
            ports=[{"name": "http", "port": each.server.port}],
        )
        for each in workers
    ]


async def kubernetes_router(harness, *slices, **settings):
    """Start a router on Kubernetes whose cluster shows some slices."""
    router = await harness.router(
        statefile=None, kubernetes=GraphReference("llama"), disaggregated=True, ready=False, **settings
    )
    FakeInformer.made.show(*slices)
    return router


async def test_a_cluster_that_is_away_stops_no_request_and_is_reported(harness, cluster):
    """With the API server gone requests are served from the last view; /workers and /metrics say so."""
    prefill, decode = await harness.pair()
    router = await kubernetes_router(harness, *slices_for(prefill, decode))
    await router.until(lambda: not router.server.admission.problems())
    assert await router.metric("penstock_router_discovery_current") == 1
    FakeInformer.made.problem = "the API server does not answer"
    assert (await router.post(max_tokens=1)).status == 200
    assert "does not answer" in orjson.loads((await router.get("/workers")).body)["discovery_problem"]
    assert await router.metric("penstock_router_discovery_current") == 0
    assert (await router.get("/ready")).status == 200


def test_without_the_extra_the_error_names_it(monkeypatch):
    """A router installed without the Kubernetes packages says what to install."""
    monkeypatch.setitem(__import__("sys").modules, "penstock.router.discovery.kubernetes", None)
    settings = RouterSettings(model="llama", disaggregated=True, kubernetes=GraphReference("llama"))
    with pytest.raises(ConfigError, match=r"penstock\[kubernetes\]"):
        server_module.RouterServer(settings)
