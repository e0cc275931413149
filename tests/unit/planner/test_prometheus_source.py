"""Readings from a Prometheus."""

from __future__ import annotations

import re

import orjson
import pytest
from served import QUERY, decode, prefill, served

from penstock.core.clock import SimulatedClock
from penstock.core.errors import ObservationError
from penstock_planner.decide.demand.reading import Quality
from penstock_planner.sources.base import Query
from penstock_planner.sources.prometheus import GraphLabels, PrometheusSource, connect

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

    def build(url, *, graph="chat", namespace=None, routers=None, own_names=None):
        source = PrometheusSource(
            connect(url),
            GraphLabels(MODEL, graph, namespace),
            clock=SimulatedClock(1.0),
            routers=None if routers is None else lambda: [f"http://{each}" for each in routers],
            own_names=own_names,
        )
        made.append(source)
        return source

    yield build
    for source in made:
        source.close()


async def test_a_runtimes_own_names_are_asked_for(prometheus):
    """Its KV usage has another name there, too."""
    series = {"acme:kv": [({"instance": "10.0.0.1:8000"}, 0.4, 5.0)]}
    async with served(_prometheus(series)) as url:
        source = prometheus(url, own_names={"vllm:kv_cache_usage_perc": "acme:kv"})
        readings = await source.read(Query((decode(0, "http://10.0.0.1:8000"),), 10.0))
    assert readings.kv["llama_decode_0"].value == 0.4


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
        workers = [decode(i, f"http://10.0.0.{i + 1}:8000") for i in range(4)]
        source = prometheus(url, routers=["10.0.1.1:8000", "10.0.1.2:8000"])
        readings = await source.read(Query((*workers, prefill(0)), 10.0))
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
        readings = await source.read(Query((prefill(0),), 10.0))
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
            Query((prefill(0, "http://10.0.0.1:8000"),), 10.0)
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
        workers = (decode(0), decode(1), prefill(0, "http://10.0.0.3:8000"))
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
        readings = await prometheus(url).read(Query((prefill(0, "http://10.0.0.1:8000"),), 10.0))
    assert (readings.queue.value, readings.queue.why) == (value, why)


async def test_a_prometheus_that_is_away_is_named_with_the_setting(prometheus):
    """Its place and the key stand for the library's chain of exceptions."""
    with pytest.raises(
        ObservationError, match=r"nothing answers at 127\.0\.0\.1:9; .*planner\.metrics\.prometheusUrl"
    ):
        await prometheus("http://127.0.0.1:9").read(QUERY)


@pytest.mark.parametrize(
    ("page", "status"), [("{}", 200), ("<html>", 200), ('{"status":"error"}', 400), ("", 500), ("", None)]
)
async def test_a_prometheus_that_answers_nonsense_or_nothing_is_gone(prometheus, page, status):
    """Whatever the library raises becomes one kind of error, without its own retries."""
    async with served(page, status) as url:
        with pytest.raises(ObservationError, match="prometheus: "):
            await prometheus(url if status else "http://127.0.0.1:9").read(QUERY)
