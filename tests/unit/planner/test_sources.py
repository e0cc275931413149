from __future__ import annotations

import pytest
from served import HANG, QUERY, decode, prefill, served

from penstock.core.errors import ObservationError
from penstock.core.http.client import ConnectionPool
from penstock_planner.decide.demand.observation import Demand
from penstock_planner.decide.demand.reading import Quality, assess
from penstock_planner.sources import scrape
from penstock_planner.sources.base import Query, Readings, SourceChain
from penstock_planner.sources.router import RouterSource, at
from penstock_planner.sources.scrape import MetricsPages, ScrapeSource


@pytest.fixture(name="pool")
async def _pool():
    made = ConnectionPool()
    yield made
    await made.close()


@pytest.fixture(name="real_s")
def _real_s():
    """Real seconds that the pages' pauses go by."""
    return [0.0]


@pytest.fixture(name="pages")
def _pages(pool, real_s):
    return MetricsPages(pool, real_now_s=lambda: real_s[0])


ROUTER_PAGE = """\
# HELP penstock_router_prefill_queue_requests Waiting.
penstock_router_prefill_queue_requests{model_name="llama"} 7
penstock_router_worker_kv_usage_fraction{worker="llama_decode_0",role="decode"} 0.93
penstock_router_worker_kv_usage_fraction{worker="llama_decode_1",role="decode"} 0.4
penstock_router_worker_kv_usage_fraction{worker="llama_decode_2",role="decode"} NaN
penstock_router_worker_metrics_age_seconds{worker="llama_decode_0",role="decode"} 0.8
penstock_router_worker_metrics_age_seconds{worker="llama_decode_1",role="decode"} 600
penstock_router_worker_metrics_age_seconds{worker="llama_decode_2",role="decode"} 0.8
penstock_router_time_to_first_token_seconds_bucket{model_name="llama",le="0.5"} 3
penstock_router_time_to_first_token_seconds_bucket{model_name="llama",le="+Inf"} 4
"""


async def test_the_router_tells_queue_and_kv_with_their_ages(pages):
    """Fresh, ten minutes old, NaN and not reported come out as they are."""
    async with served(ROUTER_PAGE) as url:
        query = Query((*(decode(i) for i in range(4)), prefill(0)), 10.0)
        readings = await RouterSource(pages, at(url), now_s=lambda: 0.0).read(query)
    assert [(r.quality, r.value) for r in readings.kv.values()] == [
        (Quality.FRESH, 0.93),
        (Quality.STALE, 0.4),
        (Quality.MISSING, None),
        (Quality.MISSING, None),
    ]
    assert [r.why for r in readings.kv.values()] == [
        "",
        "600 s old, more than 10 s",
        "value is NaN",
        "not reported",
    ]
    assert (readings.queue.value, readings.queue.source) == (7.0, "router")
    assert readings.latency["ttft"] == ((0.5, 3.0), (float("inf"), 4.0))
    assert readings.latency["itl"] == ()


@pytest.mark.parametrize(
    ("page", "status", "message"),
    [
        ("", 503, "answered 503"),
        ("penstock_router_prefill_queue_requests{ 7", 200, "cannot read line"),
        ("penstock_router_prefill_queue_requests seven", 200, "is not a number"),
    ],
)
async def test_a_router_that_answers_nonsense_is_gone(pages, page, status, message):
    """An error status or a garbled page is one clear error."""
    async with served(page, status) as url:
        with pytest.raises(ObservationError, match=message):
            await RouterSource(pages, at(url), now_s=lambda: 0.0).read(Query((), 10.0))


async def test_a_hung_worker_does_not_hold_up_every_pull(pages, real_s, monkeypatch):
    """After one time-out it is not asked for 1, 2, 4 ... s; it is missing meanwhile, and the others are read."""
    monkeypatch.setattr(scrape, "PULL_TIMEOUT_S", 0.2)
    asked = []

    def hanging(_request):
        asked.append(real_s[0])
        return HANG

    async with served(hanging) as hung, served("vllm:kv_cache_usage_perc 0.5\n") as living:
        query = Query((decode(0, hung), decode(1, living)), 10.0)
        source = ScrapeSource(pages)
        for second in range(8):
            real_s[0] = float(second)
            readings = await source.read(query)
            assert readings.kv["llama_decode_1"].value == 0.5
            assert not readings.kv["llama_decode_0"].is_known
    assert asked == [0.0, 1.0, 3.0, 7.0]


async def test_workers_are_scraped_by_vllms_names(pages):
    """KV is a fraction despite its name, averaged over a worker's engines; capacity waiters are summed."""
    of_decode = 'vllm:kv_cache_usage_perc{engine="0"} 0.5\nvllm:kv_cache_usage_perc{engine="1"} 0.7\n'
    of_decode += 'vllm:num_requests_waiting{engine="0"} 4\nvllm:num_requests_waiting{engine="1"} 7\n'
    of_prefill = (
        'vllm:num_requests_waiting{engine="0"} 9\n'
        'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 4\n'
        'vllm:num_requests_waiting_by_reason{engine="0",reason="deferred"} 5\n'
    )
    old_prefill = "vllm:num_requests_waiting 2\n"
    async with served(of_decode) as d, served(of_prefill) as p, served(old_prefill) as q:
        query = Query((decode(0, d), prefill(0, p), prefill(1, q)), 10.0)
        readings = await ScrapeSource(pages).read(query)
    assert readings.kv["llama_decode_0"].value == pytest.approx(0.6)
    assert readings.queue.value == 6.0
    assert readings.worker_waiting["llama_decode_0"].value == 11.0
    assert readings.demand is None


async def test_workers_are_scraped_by_their_runtimes_names(pages):
    """A runtime declares what differs; one that does not says which name its page lacks."""
    page = 'acme:kv{engine="0"} 0.5\nacme:waiting 3\n'
    own = {"vllm:kv_cache_usage_perc": "acme:kv", "vllm:num_requests_waiting": "acme:waiting"}
    async with served(page) as url:
        query = Query((decode(0, url), prefill(0, url)), 10.0)
        known = await ScrapeSource(pages).of_runtime(own).read(query)
        unknown = await ScrapeSource(pages).read(query)
    assert (known.kv["llama_decode_0"].value, known.queue.value) == (0.5, 3.0)
    assert unknown.kv["llama_decode_0"].why == "its page has no vllm:kv_cache_usage_perc"


async def test_a_dead_worker_is_missing_and_a_dead_prefill_worker_hides_the_queue(pages):
    """The sum of a part would be too small, so it is unknown."""
    async with (
        served("vllm:num_requests_waiting 2\n") as p,
        served("vllm:kv_cache_usage_perc 1.7\n") as d,
    ):
        query = Query((decode(0), decode(1, d), prefill(0, p), prefill(1)), 10.0)
        readings = await ScrapeSource(pages).read(query)
    assert not readings.kv["llama_decode_0"].is_known
    assert readings.kv["llama_decode_1"].why == "value 1.7 is above 1"
    assert readings.queue.quality is Quality.MISSING
    assert readings.queue.why.startswith("llama_prefill_1: ")


# ---------------------------------------------------------------- chain


class _Scripted:
    """A source that answers from a list; an exception in it is raised."""

    def __init__(self, name, *answers, whole=True, demand=None, waiting=None):
        self.name = name
        # An empty one is not known yet.
        self.counts_demand = demand is not None
        self.demand = demand
        self.waiting = waiting
        self.whole = whole
        self.answers = list(answers)
        self.calls = 0

    async def read(self, query):
        self.calls += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        kv, queue = answer
        return Readings(
            {w.name: _reading(kv, self.name, 1.0) for w in query.kv_workers},
            _reading(queue, self.name),
            queue_is_complete=self.whole,
            demand=self.demand or None,
            worker_waiting=None
            if self.waiting is None
            else {w.name: _reading(self.waiting, self.name) for w in query.kv_workers},
        )


def _reading(value, source, upper=None):
    age_s = 0.0
    if isinstance(value, tuple):
        value, age_s = value
    return assess(value, age_s=age_s, max_age_s=10.0, source=source, upper=upper)


class _Clock:
    def __init__(self):
        self.model_s = 0.0
        self.real_s = 0.0


def _chain(*sources):
    clock = _Clock()
    made = SourceChain(sources, now_s=lambda: clock.model_s, real_now_s=lambda: clock.real_s)
    return made, clock


GONE = ObservationError("connection refused")


async def test_the_second_takes_over_when_the_first_is_gone_and_says_so():
    """The reading's source names both; the change is logged once."""
    first, second = _Scripted("router", GONE), _Scripted("scrape", (0.7, 2))
    chain, _ = _chain(first, second)
    readings = await chain.read(QUERY)
    assert readings.kv["llama_decode_0"].source == "scrape (backup of router)"
    assert readings.queue.source == "scrape (backup of router)"


async def test_backup_is_per_signal():
    """The router still knows the queue while its KV value is ten minutes old."""
    first, second = _Scripted("router", ((0.2, 600), 3)), _Scripted("scrape", (0.95, None))
    chain, _ = _chain(first, second)
    readings = await chain.read(QUERY)
    assert (readings.kv["llama_decode_0"].value, readings.kv["llama_decode_0"].source) == (
        0.95,
        "scrape (backup of router)",
    )
    assert (readings.queue.value, readings.queue.source) == (3.0, "router")


async def test_a_backup_that_cannot_see_the_routers_queue_gives_a_lower_bound():
    """Behind a silent router may be a long queue; as the chosen source the same answer stands."""
    backup, _ = _chain(_Scripted("router", GONE), _Scripted("scrape", (0.7, 0), whole=False))
    chosen, _ = _chain(_Scripted("scrape", (0.7, 0), whole=False), _Scripted("router", GONE))
    assert (await backup.read(QUERY)).queue.at_least
    assert not (await chosen.read(QUERY)).queue.at_least


async def test_the_last_value_is_kept_with_its_age_until_it_is_too_old():
    """Everything dies at 0 s: fresh at 9 s, stale at 11 s."""
    first = _Scripted("router", (0.9, 3), GONE)
    chain, clock = _chain(first)
    await chain.read(QUERY)
    clock.model_s = 9.0
    readings = await chain.read(QUERY)
    assert (readings.queue.quality, readings.queue.value, readings.queue.age_s) == (Quality.FRESH, 3.0, 9.0)
    clock.model_s = 11.0
    readings = await chain.read(QUERY)
    assert readings.kv["llama_decode_0"].quality is Quality.STALE
    assert readings.kv["llama_decode_0"].why == "11 s old, more than 10 s; connection refused"


async def test_demand_comes_from_the_first_source_that_counts_it():
    """The preferred source cannot know it: the router is asked for it, and the workers are not."""
    demand = Demand(period_s=1.0, arrivals=5)
    first = _Scripted("prometheus", (0.9, 3))
    second = _Scripted("router", (0.1, 0), demand=demand)
    third = _Scripted("scrape", (0.1, 0))
    chain, _ = _chain(first, second, third)
    readings = await chain.read(QUERY)
    assert readings.demand == demand
    assert (readings.queue.value, readings.queue.source) == (3.0, "prometheus")
    assert (second.calls, third.calls) == (1, 0)
