"""Loads of workers from their own pages: sums over engines, idleness over time, and what is unknown."""

from __future__ import annotations

from dataclasses import replace

import pytest
from graph_harness import Clock

from penstock.core.errors import UpstreamConnectError
from penstock.core.http.client import Response
from penstock_operator.loads import MetricsReader
from penstock_operator.plan.drain import PodLoad
from penstock_operator.plan.pods import PodView

BUSY = (
    b'vllm:num_requests_running{e="0"} 2\nvllm:num_requests_running{e="1"} 1\nvllm:num_requests_waiting 4\n'
)
KV = b"vllm:kv_cache_usage_perc %s\n"
IDLE = b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n" + KV % b"0.0"
POD = PodView(name="d-1", uid="u-1")


class Pool:
    """Answers every request with one page, or fails."""

    def __init__(self, page=IDLE, status=200):
        self.page, self.status, self.urls = page, status, []

    async def request(self, method, url, *, timeouts):
        """Answer."""
        self.urls.append(url)
        if self.page is None:
            raise UpstreamConnectError("refused")
        return Response(self.status, {}, self.page)


async def _read(pool, address="10.0.0.7", clock=None):
    return (await MetricsReader(pool, now_s=clock or Clock()).read([replace(POD, ip=address)]))["d-1"]


@pytest.mark.parametrize(
    ("page", "load"),
    [
        (
            b'penstock_router_prefill_queue_requests 2\npenstock_router_worker_inflight_requests{worker="d"} 3\n',
            (3, 2),
        ),
        (b"penstock_router_prefill_queue_requests 0\npenstock_router_decode_queue_requests 1\n", (0, 1)),
        (b"dynamo_frontend_inflight_requests 0\n", None),
    ],
)
async def test_a_router_does_what_waits_in_it_and_what_it_has_sent(page, load):
    """Another runtime's own frontend is unknown."""
    router = PodView(name="r-1", uid="u-2", role="router")
    found = (await MetricsReader(Pool(page), now_s=Clock()).read([replace(router, ip="10.0.0.7")]))["r-1"]
    assert found == (None if load is None else PodLoad(*load, None))


@pytest.mark.parametrize(
    ("address", "url"),
    [("10.0.0.7", "http://10.0.0.7:8000/metrics"), ("fd00::7", "http://[fd00::7]:8000/metrics")],
)
async def test_the_pod_is_asked_at_its_own_address(address, url):
    """IPv6 in brackets."""
    pool = Pool()
    await _read(pool, address)
    assert pool.urls == [url]


async def test_a_pod_that_speaks_https_is_asked_so():
    """At its own port and path."""
    pool = Pool()
    await MetricsReader(pool, now_s=Clock()).read([replace(POD, ip="10.0.0.7", scheme="https")])
    assert pool.urls == ["https://10.0.0.7:8000/metrics"]


@pytest.mark.parametrize(
    "pool",
    [
        Pool(None),
        Pool(IDLE, status=503),
        Pool(BUSY),
        Pool(b""),
        Pool(BUSY + KV % b"NaN"),
        Pool(BUSY + KV % b"-1"),
        Pool(BUSY + KV % b"many"),
        Pool(b"dynamo_component_inflight_requests NaN\n"),
    ],
)
async def test_what_cannot_be_trusted_is_unknown(pool):
    """No answer, an error, a missing series, no number."""
    assert await _read(pool) is None


DYNAMO = b'dynamo_component_inflight_requests{dynamo_endpoint="generate"} %d\n'


@pytest.mark.parametrize(
    ("page", "load"),
    [
        (DYNAMO % 3, PodLoad(running=3, waiting=0, kv_usage_fraction=None)),
        (DYNAMO % 0, PodLoad(running=0, waiting=0, kv_usage_fraction=None)),
        (BUSY + KV % b"0.2" + DYNAMO % 9, PodLoad(running=5, waiting=4, kv_usage_fraction=0.2)),
        (BUSY + KV % b"0.2" + DYNAMO % 0, PodLoad(running=3, waiting=4, kv_usage_fraction=0.2)),
    ],
    ids=["mocker's prefill, busy", "and idle", "more than its engine has seen", "less than its engine has"],
)
async def test_dynamos_own_count_stands_in_for_what_an_engine_does_not_tell(page, load):
    """Of a mocker's prefill worker it is all there is; elsewhere the larger count of the two holds."""
    assert await _read(Pool(page)) == load


async def test_idleness_lasts_from_the_first_of_consecutive_idle_looks():
    """A busy or unknown look starts it again."""
    pool, clock = Pool(), Clock()
    reader = MetricsReader(pool, now_s=clock)

    async def idle_s():
        load = (await reader.read([replace(POD, ip="a")]))["d-1"]
        return None if load is None else load.idle_s

    found = []
    for page in (IDLE, IDLE, BUSY + KV % b"0.1", IDLE, None, IDLE, IDLE):
        pool.page = page
        found.append(await idle_s())
        clock.s += 1
    assert found == [0.0, 1.0, 0.0, 0.0, None, 0.0, 1.0]


async def test_a_worker_not_looked_at_for_a_minute_starts_anew():
    """Its idleness says nothing any more."""
    pool, clock = Pool(), Clock()
    reader = MetricsReader(pool, now_s=clock)
    await reader.read([replace(POD, ip="a")])
    clock.s += 61
    await reader.read([])
    assert (await reader.read([replace(POD, ip="a")]))["d-1"].idle_s == 0.0


@pytest.mark.parametrize(("role", "is_idle"), [("prefill", False), ("", False), ("decode", True)])
async def test_only_prefill_keeps_blocks_that_others_must_read(role, is_idle):
    """Leased blocks hold a prefill worker; a decode worker's are a cache for the next turn."""
    page = b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n" + KV % b"0.3"
    pod = PodView(name="d-1", uid="u-1", role=role)
    load = (await MetricsReader(Pool(page), now_s=Clock()).read([replace(pod, ip="10.0.0.7")]))["d-1"]
    assert (load.is_idle, load.kv_usage_fraction) == (is_idle, 0.3)
