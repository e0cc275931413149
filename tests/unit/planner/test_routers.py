"""Several routers as one source: queues add up, the freshest KV counts, and no histogram ever falls."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack

import pytest
from served import HANG, served

from penstock.api import Role
from penstock.core.http.client import ConnectionPool
from penstock_planner.decide.demand.reading import Quality
from penstock_planner.sources import scrape
from penstock_planner.sources.base import DISPATCHED_TTFT, Query
from penstock_planner.sources.router import RouterSource
from penstock_planner.sources.scrape import MetricsPages
from penstock_planner.targets.base import Endpoint

QUERY = Query(
    (
        Endpoint("llama-decode-a", Role.DECODE, "http://127.0.0.1:9"),
        Endpoint("llama-prefill-a", Role.PREFILL, "http://127.0.0.1:9"),
    ),
    10.0,
)


def _page(*, queue=None, kv=None, age=0.5, ttft=()):
    lines = [] if queue is None else [f'penstock_router_prefill_queue_requests{{model_name="m"}} {queue}']
    if kv is not None:
        labels = '{worker="llama-decode-a",role="decode"}'
        lines += [
            f"penstock_router_worker_kv_usage_fraction{labels} {kv}",
            f"penstock_router_worker_metrics_age_seconds{labels} {age}",
        ]
    lines += [
        f'penstock_router_time_to_first_token_seconds_bucket{{model_name="m",le="{bound}"}} {count}'
        for bound, count in ttft
    ]
    return "\n".join(lines) + "\n"


class _Routers:
    """Router replicas by name; each serves its page."""

    def __init__(self, stack):
        self.pages = {}
        self._stack = stack
        self._urls = {}

    async def put(self, name, page):
        self.pages[name] = page
        if name not in self._urls:
            server = served(lambda _request: self.pages[name])
            self._urls[name] = await self._stack.enter_async_context(server)

    def remove(self, name):
        del self.pages[name]

    def urls(self):
        return [self._urls[name] for name in self.pages]


@pytest.fixture(name="routers")
async def _routers():
    async with AsyncExitStack() as stack:
        yield _Routers(stack)


@pytest.fixture(name="now_s")
def _now_s():
    """Simulated seconds at which routers are read."""
    return [0.0]


@pytest.fixture(name="source")
async def _source(routers, now_s):
    pool = ConnectionPool()
    pages = MetricsPages(pool, real_now_s=time.monotonic)
    yield RouterSource(pages, routers.urls, now_s=lambda: now_s[0])
    await pool.close()


@pytest.mark.parametrize("flaw", [None, "", _page(queue="NaN"), _page(queue=-1), "penstock_router_pre{"])
async def test_one_router_that_cannot_be_read_makes_the_queue_unknown(routers, source, flaw):
    """Unknown, never zero: what it holds may be long. KV comes from the other one."""
    await routers.put("a", _page(queue=3, kv=0.5))
    await routers.put("b", flaw)
    readings = await source.read(QUERY)
    assert readings.queue.quality is Quality.MISSING
    assert readings.queue.why
    assert readings.kv["llama-decode-a"].value == 0.5


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ((0.4, 3.0), (0.6, 1.0), (Quality.FRESH, 0.6)),
        ((0.4, 1.0), (0.6, 3.0), (Quality.FRESH, 0.4)),
        ((0.4, 60.0), (0.6, 30.0), (Quality.STALE, 0.6)),
        ((0.4, 60.0), ("NaN", 0.1), (Quality.STALE, 0.4)),
        (("NaN", 0.1), (None, 0.1), (Quality.MISSING, None)),
    ],
)
async def test_the_freshest_kv_reading_counts(routers, source, one, other, expected):
    """A router that has just lost a worker does not hide what another one sees."""
    await routers.put("a", _page(queue=0, kv=one[0], age=one[1]))
    await routers.put("b", _page(queue=0, kv=other[0], age=other[1]))
    reading = (await source.read(QUERY)).kv["llama-decode-a"]
    assert (reading.quality, reading.value) == expected


async def test_a_worker_is_as_old_as_the_newest_values_of_any_router(routers, source):
    """A worker that only one router has lost is not silent."""
    await routers.put("a", _page(queue=0, kv=0.4, age=9.0))
    await routers.put("b", _page(queue=0, kv=0.4, age=0.5))
    await source.read(QUERY)
    assert source.ages_s == {"llama-decode-a": 0.5}
    await routers.put("b", _page(queue=0, kv=0.4, age=8.0))
    await source.read(QUERY)
    assert source.ages_s == {"llama-decode-a": 8.0}


async def test_latencies_of_all_routers_add_up_and_survive_their_restarts(routers, source):
    """10 + 20 samples; then one restarts and counts 5, the other one 5 more: 40, never fewer."""
    await routers.put("a", _page(queue=0, ttft=[(0.1, 10), ("+Inf", 10)]))
    await routers.put("b", _page(queue=0, ttft=[(0.1, 0), ("+Inf", 20)]))
    assert (await source.read(QUERY)).latency["ttft"] == ((0.1, 10.0), (float("inf"), 30.0))
    await routers.put("a", _page(queue=0, ttft=[(0.1, 5), ("+Inf", 5)]))
    await routers.put("b", _page(queue=0, ttft=[(0.1, 0), ("+Inf", 25)]))
    assert (await source.read(QUERY)).latency["ttft"] == ((0.1, 15.0), (float("inf"), 40.0))
    routers.remove("a")
    assert (await source.read(QUERY)).latency["ttft"][-1][1] == 40.0


async def test_the_time_from_dispatch_is_known_of_routers_that_measure_it(routers, source):
    """An older router's page has none: no histogram, and none without samples either."""
    await routers.put("a", _page(queue=0, ttft=[(0.1, 10), ("+Inf", 12)]))
    assert (await source.read(QUERY)).latency[DISPATCHED_TTFT] == ()
    page = _page(queue=0, ttft=[(0.1, 4), ("+Inf", 12)]).replace("time_to_first", "dispatch_to_first")
    await routers.put("a", page)
    assert (await source.read(QUERY)).latency[DISPATCHED_TTFT] == ((0.1, 4.0), (float("inf"), 12.0))


async def test_a_router_that_hangs_costs_one_timeout_and_only_the_queue(routers, source, monkeypatch):
    """The other one is read meanwhile."""
    monkeypatch.setattr(scrape, "PULL_TIMEOUT_S", 0.1)
    await routers.put("a", _page(queue=3, kv=0.5))
    await routers.put("b", HANG)
    readings = await source.read(QUERY)
    assert readings.queue.why.startswith("1 of 2 routers cannot be read")
    assert readings.kv["llama-decode-a"].is_known


DOOR = (
    "arrivals_total",
    "arrived_prompt_tokens_total",
    "refused_requests_total",
    "queue_timeouts_total",
    "completed_requests_total",
    "completed_output_tokens_total",
    "routed_prompt_tokens_total",
    "routed_uncached_tokens_total",
    "computed_prompt_tokens_total",
    "prefill_queue_uncached_tokens",
    "prefill_queue_oldest_seconds",
    "time_to_first_token_seconds_sum",
    "time_to_first_token_seconds_count",
    "inter_token_latency_seconds_sum",
    "inter_token_latency_seconds_count",
)


async def test_routers_tell_the_demand_between_two_pulls(routers, source, now_s):
    """Arrivals of both; an answer too old to count them leaves the demand unknown and nothing else."""

    def page(count):
        return _page(queue=1, kv=0.5) + "".join(f"penstock_router_{name} {count}\n" for name in DOOR)

    await routers.put("a", page(10))
    await routers.put("b", page(10))
    assert (await source.read(QUERY)).demand is None
    now_s[0] = 2.0
    await routers.put("a", page(13))
    await routers.put("b", page(14))
    demand = (await source.read(QUERY)).demand
    assert (demand.period_s, demand.arrivals, demand.waiting) == (2.0, 7.0, 2.0)
    await routers.put("b", _page(queue=1, kv=0.5))
    readings = await source.read(QUERY)
    assert readings.demand is None
    assert readings.queue.is_known


async def test_routers_tell_what_waits_inside_the_workers(routers, source):
    """The freshest reading with its age; None if no router tells any."""
    worker = 'penstock_router_worker_waiting_requests{worker="llama-decode-a",role="decode"}'
    await routers.put("a", _page(queue=0, kv=0.5, age=8.0) + f"{worker} 9\n")
    await routers.put("b", _page(queue=0, kv=0.5, age=1.0) + f"{worker} 4\n")
    reading = (await source.read(QUERY)).worker_waiting["llama-decode-a"]
    assert (reading.value, reading.age_s) == (4.0, 1.0)
    await routers.put("a", _page(queue=0, kv=0.5))
    await routers.put("b", _page(queue=0, kv=0.5))
    assert (await source.read(QUERY)).worker_waiting is None
