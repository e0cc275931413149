from __future__ import annotations

import re

import orjson
import pytest
from served import HANG, served

from penstock.api import Role
from penstock.core.clock import SimulatedClock
from penstock.core.errors import ObservationError
from penstock.core.http.client import ConnectionPool
from penstock.planner.decide.observation import Demand
from penstock.planner.decide.reading import Quality, assess
from penstock.planner.sources import scrape
from penstock.planner.sources.base import Query, Readings
from penstock.planner.sources.chain import SourceChain
from penstock.planner.sources.prometheus import GraphLabels, PrometheusSource, connect
from penstock.planner.sources.router import RouterSource, at
from penstock.planner.sources.scrape import MetricsPages, ScrapeSource
from penstock.planner.targets.base import Endpoint


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


def _decode(index, url="http://127.0.0.1:9"):
    return Endpoint(f"llama_decode_{index}", Role.DECODE, url)


def _prefill(index, url="http://127.0.0.1:9"):
    return Endpoint(f"llama_prefill_{index}", Role.PREFILL, url)


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
        query = Query((*(_decode(i) for i in range(4)), _prefill(0)), 10.0)
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
        query = Query((_decode(0, hung), _decode(1, living)), 10.0)
        source = ScrapeSource(pages)
        for second in range(8):
            real_s[0] = float(second)
            readings = await source.read(query)
            assert readings.kv["llama_decode_1"].value == 0.5
            assert not readings.kv["llama_decode_0"].is_known
    assert asked == [0.0, 1.0, 3.0, 7.0]


async def test_workers_are_scraped_by_vllms_names(pages):
    """KV is a fraction despite its name, averaged over a worker's engines; capacity waiters are summed."""
    decode = 'vllm:kv_cache_usage_perc{engine="0"} 0.5\nvllm:kv_cache_usage_perc{engine="1"} 0.7\n'
    decode += 'vllm:num_requests_waiting{engine="0"} 4\nvllm:num_requests_waiting{engine="1"} 7\n'
    prefill = (
        'vllm:num_requests_waiting{engine="0"} 9\n'
        'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 4\n'
        'vllm:num_requests_waiting_by_reason{engine="0",reason="deferred"} 5\n'
    )
    old_prefill = "vllm:num_requests_waiting 2\n"
    async with served(decode) as d, served(prefill) as p, served(old_prefill) as q:
        query = Query((_decode(0, d), _prefill(0, p), _prefill(1, q)), 10.0)
        readings = await ScrapeSource(pages).read(query)
    assert readings.kv["llama_decode_0"].value == pytest.approx(0.6)
    assert readings.queue.value == 6.0
    assert readings.worker_waiting["llama_decode_0"].value == 11.0
    assert readings.demand is None


async def test_a_dead_worker_is_missing_and_a_dead_prefill_worker_hides_the_queue(pages):
    """The sum of a part would be too small, so it is unknown."""
    async with (
        served("vllm:num_requests_waiting 2\n") as p,
        served("vllm:kv_cache_usage_perc 1.7\n") as d,
    ):
        query = Query((_decode(0), _decode(1, d), _prefill(0, p), _prefill(1)), 10.0)
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


QUERY = Query((_decode(0), _prefill(0)), 10.0)
GONE = ObservationError("connection refused")


async def test_the_second_takes_over_when_the_first_is_gone_and_says_so():
    """The reading's source names both; the change is logged once."""
    first, second = _Scripted("router", GONE), _Scripted("scrape", (0.7, 2))
    chain, _ = _chain(first, second)
    readings = await chain.read(QUERY)
    assert readings.kv["llama_decode_0"].source == "scrape (backup of router)"
    assert readings.queue.source == "scrape (backup of router)"
    assert chain.serving == "scrape"


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


async def test_a_source_that_failed_rests_for_a_doubling_while():
    """1, 2, 4 ... 30 s without asking; one success forgets it."""
    first = _Scripted("router", *[GONE] * 8, (0.9, 3))
    chain, clock = _chain(first, _Scripted("scrape", (0.7, 2)))
    asked = []
    for second in range(200):
        clock.real_s = float(second)
        before = first.calls
        await chain.read(QUERY)
        if first.calls > before:
            asked.append(second)
    assert asked[:10] == [0, 1, 3, 7, 15, 31, 61, 91, 121, 122]
    assert chain.serving == "router"


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


# ---------------------------------------------------------------- Prometheus


MATCHER = re.compile(r'(\w+)(=~|=)"((?:[^"\\]|\\.)*)"')


def _matches(labels, selector):
    """Evaluate a selector as Prometheus does: a label that is not there is empty."""
    for label, operator, quoted in MATCHER.findall(selector):
        value = quoted.replace('\\"', '"').replace("\\\\", "\\")
        found = labels.get(label, "")
        if not (re.fullmatch(value, found) if operator == "=~" else found == value):
            return False
    return True


def _prometheus(series, now_s=1e9):
    """Answer instant queries: {metric name: [(labels, value, age)]}, timestamp() included."""

    def page(request):
        asked = request.query["query"]
        is_stamp = asked.startswith("timestamp(")
        metric, selector = asked.removeprefix("timestamp(").removesuffix(")").split("{", 1)
        result = []
        for own, value, age_s in series.get(metric, []):
            labels = {"model_name": MODEL, **own}
            if not _matches(labels, selector):
                continue
            shown = {**labels} if is_stamp else {"__name__": metric, **labels}
            number = now_s - age_s if is_stamp else value
            result.append({"metric": shown, "value": [now_s, str(number)]})
        return orjson.dumps(
            {"status": "success", "data": {"resultType": "vector", "result": result}}
        ).decode()

    return page


MODEL = 'lla"ma'
QUEUE = "penstock_router_prefill_queue_requests"


@pytest.fixture(name="prometheus")
async def _prometheus_source():
    made = []

    def build(url, *, graph="chat", namespace=None, routers=None):
        source = PrometheusSource(
            connect(url),
            GraphLabels(MODEL, graph, namespace),
            clock=SimulatedClock(1.0),
            routers=None if routers is None else lambda: [f"http://{each}" for each in routers],
        )
        made.append(source)
        return source

    yield build
    for source in made:
        source.close()


async def test_prometheus_gives_values_with_the_age_of_their_samples(prometheus):
    """Instance is host:port; a sample's age comes from timestamp(), not from the query's time."""
    series = {
        "vllm:kv_cache_usage_perc": [
            ({"instance": "10.0.0.1:8000"}, 0.93, 5.0),
            ({"instance": "10.0.0.2:8000"}, 0.5, 290.0),
            ({"pod": "llama_decode_2", "instance": "10.0.0.3:8000"}, "NaN", 5.0),
        ],
        QUEUE: [({"instance": "10.0.1.1:8000"}, 3, 4.0), ({"instance": "10.0.1.2:8000"}, 2, 4.0)],
    }
    async with served(_prometheus(series)) as url:
        workers = [_decode(i, f"http://10.0.0.{i + 1}:8000") for i in range(4)]
        source = prometheus(url, routers=["10.0.1.1:8000", "10.0.1.2:8000"])
        readings = await source.read(Query((*workers, _prefill(0)), 10.0))
    assert [r.quality for r in readings.kv.values()] == [
        Quality.FRESH,
        Quality.STALE,
        Quality.MISSING,
        Quality.MISSING,
    ]
    assert readings.kv["llama_decode_0"].value == 0.93
    assert readings.kv["llama_decode_0"].age_s == 5.0
    assert readings.kv["llama_decode_3"].why == "no such series"
    assert (readings.queue.value, readings.queue.age_s) == (5.0, 4.0)


ROUTER_A = {"instance": "10.0.1.1:8000", "pod": "chat-router-a"}
ROUTER_B = {"instance": "10.0.1.2:8000", "pod": "chat-router-b"}


@pytest.mark.parametrize(
    ("series", "expected"),
    [
        ([({**ROUTER_A, "graph": "chat"}, 3, 1.0), ({**ROUTER_B, "graph": "chat"}, 4, 1.0)], 7.0),
        (
            [({**ROUTER_A, "job": "pods"}, 3, 9.0), ({**ROUTER_A, "job": "own"}, 5, 1.0), (ROUTER_B, 0, 1.0)],
            5.0,
        ),
        (
            [
                ({**ROUTER_A, "graph": "chat"}, 3, 1.0),
                ({**ROUTER_B, "graph": "chat"}, 4, 1.0),
                ({"instance": "10.0.9.9:8000", "graph": "chat-2"}, 100, 1.0),
            ],
            7.0,
        ),
        ([(ROUTER_A, 3, 1.0), (ROUTER_B, 4, 1.0), ({"instance": "10.0.9.9:8000"}, 100, 1.0)], 7.0),
        (
            [
                (ROUTER_A, 3, 1.0),
                (ROUTER_B, 4, 1.0),
                ({**ROUTER_A, "namespace": "other", "instance": "10.0.1.3:8000", "graph": "chat"}, 100, 1.0),
            ],
            7.0,
        ),
    ],
    ids=[
        "pod and instance are one",
        "two jobs are one",
        "another graph",
        "no graph label",
        "another namespace",
    ],
)
async def test_the_queue_in_prometheus_is_the_own_graphs_and_counts_once(prometheus, series, expected):
    """One series per router of this graph, whatever else serves the model on the same server."""
    series = {QUEUE: [({"namespace": "prod", **labels}, value, age_s) for labels, value, age_s in series]}
    async with served(_prometheus(series)) as url:
        source = prometheus(url, namespace="prod", routers=["10.0.1.1:8000", "10.0.1.2:8000"])
        readings = await source.read(Query((_prefill(0),), 10.0))
    assert (readings.queue.value, readings.queue.why) == (expected, "")


GONE_ROUTER = {"instance": "10.0.1.9:8000", "pod": "chat-router-gone", "graph": "chat"}


@pytest.mark.parametrize(
    ("ready", "value", "why"),
    [
        (
            ["10.0.1.1:8000", "10.0.1.2:8000"],
            None,
            "1 of 2 routers have a series; none with instance=10.0.1.2:8000",
        ),
        (["10.0.1.1:8000"], 3.0, ""),
        ([], 2.0, ""),
    ],
    ids=["one is not scraped", "all are scraped", "none is ready"],
)
async def test_a_gone_routers_series_stands_for_no_router(prometheus, ready, value, why):
    """A router that has just left still has a fresh series: neither its 0 nor its count fills another's place."""
    series = {
        QUEUE: [({**ROUTER_A, "graph": "chat"}, 3, 1.0), (GONE_ROUTER, 0, 1.0)],
        "vllm:num_requests_waiting": [({"instance": "10.0.0.1:8000"}, 2, 1.0)],
    }
    async with served(_prometheus(series)) as url:
        readings = await prometheus(url, routers=ready).read(
            Query((_prefill(0, "http://10.0.0.1:8000"),), 10.0)
        )
    assert (readings.queue.value, readings.queue.why.removeprefix(f"{QUEUE}: ")) == (value, why)
    assert readings.queue.at_least is (ready == [])


async def test_a_data_parallel_workers_engines_are_averaged_in_prometheus(prometheus):
    """KV is the mean over the engines, the queue their sum; an engine without a number hides its worker."""
    worker = {"instance": "10.0.0.1:8000", "pod": "llama_decode_0"}
    other = {"instance": "10.0.0.2:8000", "pod": "llama_decode_1"}
    series = {
        "vllm:kv_cache_usage_perc": [
            ({**worker, "engine": "0"}, 1.0, 1.0),
            ({**worker, "engine": "1"}, 0.5, 3.0),
            ({**other, "engine": "0"}, 0.5, 1.0),
            ({**other, "engine": "1"}, "NaN", 1.0),
        ],
        "vllm:num_requests_waiting": [
            ({"instance": "10.0.0.3:8000", "engine": "0"}, 2, 1.0),
            ({"instance": "10.0.0.3:8000", "engine": "1"}, 3, 1.0),
        ],
    }
    async with served(_prometheus(series)) as url:
        workers = (_decode(0), _decode(1), _prefill(0, "http://10.0.0.3:8000"))
        readings = await prometheus(url).read(Query(workers, 10.0))
    assert (readings.kv["llama_decode_0"].value, readings.kv["llama_decode_0"].age_s) == (0.75, 3.0)
    assert readings.kv["llama_decode_1"].why == "value is NaN"
    assert readings.queue.value == 5.0


@pytest.mark.parametrize(
    ("series", "value", "why"),
    [
        (
            {
                "vllm:num_requests_waiting_by_reason": [
                    ({"instance": "10.0.0.1:8000", "reason": "capacity"}, 4, 1.0),
                    ({"instance": "10.0.0.1:8000", "reason": "deferred"}, 40, 1.0),
                ]
            },
            4.0,
            "",
        ),
        ({"vllm:num_requests_waiting": [({"instance": "10.0.0.1:8000"}, 6, 1.0)]}, 6.0, ""),
        ({}, None, "llama_prefill_0: no such series"),
    ],
)
async def test_without_a_router_prometheus_asks_for_the_workers_queues(prometheus, series, value, why):
    """By reason first, then in all, else unknown."""
    async with served(_prometheus(series)) as url:
        readings = await prometheus(url).read(Query((_prefill(0, "http://10.0.0.1:8000"),), 10.0))
    assert (readings.queue.value, readings.queue.why) == (value, why)


@pytest.mark.parametrize(
    ("page", "status"), [("{}", 200), ("<html>", 200), ('{"status":"error"}', 400), ("", 500), ("", None)]
)
async def test_a_prometheus_that_answers_nonsense_or_nothing_is_gone(prometheus, page, status):
    """Whatever the library raises becomes one kind of error, without its own retries."""
    async with served(page, status) as url:
        with pytest.raises(ObservationError, match="prometheus: "):
            await prometheus(url if status else "http://127.0.0.1:9").read(QUERY)
