"""Demand and readings of a graph under NVIDIA's Dynamo, from pages recorded of its own frontend and mockers.

The pages are of Dynamo 1.6.0: a prefill and a decode mocker of 1,500 blocks under 12 requests/s of 6,000 tokens, the
frontend's twice, a second apart. Histograms that nobody reads were taken out.
"""

from __future__ import annotations

import dataclasses
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from served import served

from penstock.api import Role
from penstock.core.clock import SimulatedClock
from penstock.core.errors import ObservationError
from penstock.core.exposition import parse_samples
from penstock.core.http.client import ConnectionPool
from penstock_dynamo.metric_source import FRONTEND_NAMES, DynamoSource, FrontendMeter, read_frontend
from penstock_planner.decide.demand.reading import Quality
from penstock_planner.sources.base import Query
from penstock_planner.sources.frontend import FrontendMetrics, frontend_source
from penstock_planner.sources.router import RouterSource, at
from penstock_planner.sources.scrape import MetricsPages, ScrapeSource
from penstock_planner.targets.base import Endpoint

PAGES = Path(__file__).parent / "dynamo"


def recorded(name):
    """Return a recorded page."""
    return (PAGES / f"{name}.txt").read_text()


def frontend_of(text):
    """Return what a frontend's page says."""
    return read_frontend(parse_samples(text, FRONTEND_NAMES))


def metered(*pages, speed=1.0, first=Role.PREFILL):
    """Return the demand of the last of several pages of one frontend, a second apart."""
    meter = FrontendMeter(speed)
    return [meter.add({"a": page}, ["a"], 100.0 + index, first=first) for index, page in enumerate(pages)][-1]


def counted(**changes):
    """Return a frontend that has answered ten requests of 100 tokens, with changes."""
    page = frontend_of(recorded("frontend-1"))
    blank = dict.fromkeys(page.counters, 0.0)
    known = {"started": 10.0, "finished": 10.0, "input_sum": 1000.0, "input_count": 10.0}
    counters = {key: changes.pop(key) for key in blank if key in changes}
    gauges = dict.fromkeys(page.gauges, 0.0) | {
        key: changes.pop(key) for key in page.gauges if key in changes
    }
    return dataclasses.replace(
        page,
        counters={**blank, **known, **counters},
        gauges=gauges,
        **{"prefilling": 0.0, "pending": {}, **changes},
    )


def test_demand_is_the_difference_of_two_recorded_pages():
    """16 requests came within the second; none left, so their size is that of those answered before."""
    demand = metered(frontend_of(recorded("frontend-1")), frontend_of(recorded("frontend-2")))
    assert demand.arrivals == 16
    assert demand.prompt_tokens == demand.uncached_tokens == 96_000
    assert (demand.completed, demand.refused, demand.ttft_count) == (0, 0, 0)
    assert (demand.itl_count, round(demand.itl_sum_s, 1)) == (512, 17.7)


def test_what_is_in_flight_is_told_apart_by_role():
    """32 of 62 wait for prefill; the rest has been handed to decode, where half waits for KV blocks."""
    demand = metered(frontend_of(recorded("frontend-1")), frontend_of(recorded("frontend-2")))
    assert demand.in_flight == {Role.PREFILL: 32, Role.DECODE: 30}
    assert (demand.in_flight_tokens, demand.prefilling_workers) == (192_000, 1)
    assert (demand.waiting, demand.waiting_tokens, demand.oldest_wait_s) == (0, 0, None)


def test_the_queue_is_what_workers_hold_beyond_one_step():
    """A mocker's prefill worker reports no queue: of 16 requests with 96,000 tokens 8,192 are being computed."""
    assert frontend_of(recorded("frontend-1")).waiting == pytest.approx(16 * (96_000 - 8192) / 96_000)


def test_latencies_are_simulated_time():
    """A mocker at five times the speed answers in a fifth of the time that it models."""
    pages = counted(), counted(ttft_sum=2.0, ttft_count=4.0, itl_sum=1.0, itl_count=100.0)
    demand = metered(*pages, speed=5.0)
    assert (demand.ttft_sum_s, demand.ttft_count, demand.itl_sum_s, demand.itl_count) == (10.0, 4, 5.0, 100)


def test_prompts_are_as_long_as_the_newest_answered_ones():
    """Of five that came two were answered, with 300 tokens each, a third of them cached."""
    after = counted(started=15.0, input_sum=1600.0, input_count=12.0, cached_sum=200.0, cached_count=2.0)
    demand = metered(counted(), after)
    assert demand.prompt_tokens == 5 * 300
    assert demand.uncached_tokens == pytest.approx(5 * 300 * 2 / 3)
    assert demand.prefilled_tokens == pytest.approx(600 * 2 / 3)


def test_the_size_of_unanswered_prompts_is_that_of_those_in_prefill():
    """Before any is answered, the tokens assigned to workers tell; without them nothing does."""
    blank = counted(started=0.0, finished=0.0, input_sum=0.0, input_count=0.0)
    begun = {"started": 4.0, "finished": 0.0, "input_sum": 0.0, "input_count": 0.0, "inflight": 4.0}
    assert metered(blank, counted(**begun, prefilling=4.0, pending={"1": 800.0})).prompt_tokens == 800
    assert metered(blank, counted(**begun, prefilling=None, pending=None)) is None


def test_without_kv_routing_prefill_is_known_by_requests_alone():
    """Round-robin counts no tokens per worker: what is in prefill has the mean size, on one worker at least."""
    demand = metered(counted(), counted(prefilling=3.0, pending=None, inflight=5.0))
    assert (demand.in_flight_tokens, demand.prefilling_workers) == (300, 1)
    assert demand.in_flight == {Role.PREFILL: 3, Role.DECODE: 2}


@pytest.mark.parametrize("text", ["", "up 1\n", "dynamo_frontend_inflight_requests NaN\n"])
def test_a_page_that_is_no_frontends_tells_nothing(text):
    """Another process' page, and one that holds no number."""
    assert frontend_of(text) is None


@given(
    gained=st.fixed_dictionaries(
        dict.fromkeys(
            ("started", "finished", "rejected", "input_count", "input_sum", "cached_sum"), st.floats(0, 1e6)
        )
    ),
    gauges=st.fixed_dictionaries(dict.fromkeys(("inflight", "unanswered", "queued"), st.floats(0, 1e6))),
    prefilling=st.none() | st.floats(0, 1e6),
    pending=st.none() | st.dictionaries(st.text(max_size=2), st.floats(0, 1e9), max_size=3),
)
def test_demand_is_never_negative(gained, gauges, prefilling, pending):
    """Whatever the gauges say of each other: they are read one after the other while requests continue."""
    before = counted()
    after = counted(
        **{key: before.counters[key] + value for key, value in gained.items()},
        **gauges,
        prefilling=prefilling,
        pending=pending,
    )
    demand = metered(before, after)
    values = [value for value in dataclasses.asdict(demand).values() if isinstance(value, float | int)]
    assert all(value >= 0 for value in (*values, *demand.in_flight.values(), after.waiting))


@asynccontextmanager
async def serving(**pages):
    """Serve each page at a URL of its own; yield the URLs by name."""
    async with AsyncExitStack() as stack:
        yield {name: await stack.enter_async_context(served(page)) for name, page in pages.items()}


async def readings_of(urls, *, frontends):
    """Read one graph."""
    pool = ConnectionPool()
    pages = MetricsPages(pool, real_now_s=lambda: 0.0)
    source = DynamoSource(pages, lambda: frontends, workers=ScrapeSource(pages), now_s=lambda: 1.0)
    workers = (
        Endpoint("g_decode", Role.DECODE, urls["decode"]),
        Endpoint("g_prefill", Role.PREFILL, urls["prefill"]),
    )
    try:
        return await source.read(Query(workers, max_age_s=10.0))
    finally:
        await pool.close()


async def test_workers_and_frontends_are_read_together():
    """KV usage and waiting are the decode worker's own; the queue and the latencies are the frontend's."""
    pages = {name: recorded(name) for name in ("prefill", "decode")}
    async with serving(frontend=recorded("frontend-1"), **pages) as urls:
        readings = await readings_of(urls, frontends=[urls["frontend"]])
    assert readings.kv["g_decode"].value == pytest.approx(0.9567, abs=1e-4)
    assert readings.worker_waiting["g_decode"].value == 15
    assert readings.queue.value == pytest.approx(14.6, abs=0.1)
    assert readings.latency["ttft"][-1] == (float("inf"), 15)


async def test_one_frontend_of_two_that_cannot_be_read_leaves_the_queue_unknown():
    """The sum of a part would be too small."""
    pages = {name: recorded(name) for name in ("prefill", "decode")}
    async with serving(frontend=recorded("frontend-1"), **pages) as urls:
        readings = await readings_of(urls, frontends=[urls["frontend"], urls["decode"]])
    assert readings.queue.quality is Quality.MISSING
    assert "1 of 2 frontends cannot be read" in readings.queue.why
    assert readings.demand is None


@pytest.mark.parametrize("frontends", [(), ("decode",)])
async def test_without_a_frontend_the_source_says_so(frontends):
    """Another source of the chain is asked then."""
    async with serving(prefill=recorded("prefill"), decode=recorded("decode")) as urls:
        with pytest.raises(ObservationError):
            await readings_of(urls, frontends=[urls[each] for each in frontends])


@pytest.mark.parametrize(("runtime", "expected"), [("dynamo", DynamoSource), ("simulated", RouterSource)])
def test_the_runtime_decides_what_stands_at_the_frontend(build, runtime, expected):
    """Under dynamo its own frontend does."""
    graph = build(runtime=runtime, router={"policy": "kv-cost"})
    pages = MetricsPages(None, real_now_s=lambda: 0.0)
    frontend = FrontendMetrics(pages, at("http://h:1"), ScrapeSource(pages), SimulatedClock(1.0))
    source = frontend_source(graph, frontend)
    assert isinstance(source, expected)
