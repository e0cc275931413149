"""Spans of requests, received by a collector of the test's own over OTLP."""

import asyncio
import logging
from types import SimpleNamespace

import orjson
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from penstock.core.errors import StreamBroken
from penstock.core.http.server import HttpServer
from penstock.core.metric_names import ROUTER_E2E, ROUTER_TTFT
from penstock.core.tracing import open_tracing
from penstock.engine.core.requests import EngineRole
from penstock.engine.serve.server import EngineServer
from penstock.engine.serve.settings import ServeFlags, resolve

PARENT = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACE = "0af7651916cd43dd8448eb211c80319c"
JSON = (b"content-type", b"application/json")


class Collector:
    """Takes what exporters send: pairs of a service's name and a span as OTLP's JSON has it."""

    def __init__(self):
        self.spans = []
        self.server = HttpServer(self._take)

    async def _take(self, request, responder):
        assert (request.path, request.headers[b"content-type"]) == ("/v1/traces", b"application/json")
        for resource in orjson.loads(request.body)["resourceSpans"]:
            name = attributes(resource["resource"])["service.name"]
            self.spans += [(name, span) for scope in resource["scopeSpans"] for span in scope["spans"]]
        responder.send(200, b"{}")

    def one(self, name):
        """Return the one span of a name."""
        (span,) = [span for _, span in self.spans if span["name"] == name]
        return span

    def named(self):
        """Return the spans' names by when they began."""
        return [span["name"] for _, span in sorted(self.spans, key=lambda each: began_ns(each[1]))]


def attributes(span):
    """Return a span's attributes; of numbers, whole ones are text in JSON."""
    found = {}
    for each in span["attributes"]:
        ((kind, value),) = each["value"].items()
        found[each["key"]] = int(value) if kind == "intValue" else value
    return found


def began_ns(span):
    """Return when a span began."""
    return int(span["startTimeUnixNano"])


def ended_ns(span):
    """Return when a span ended."""
    return int(span["endTimeUnixNano"])


@pytest.fixture
async def collector(monkeypatch):
    """Start a collector, and name it as the environment does."""
    collector = Collector()
    await collector.server.start("127.0.0.1", 0)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server.port}")
    yield collector
    await collector.server.close(grace_s=0)


def opened():
    """Return what makes a router's spans."""
    return open_tracing("penstock-router")


async def test_a_request_is_one_trace_through_prefill_and_decode(harness, collector):
    """The client's trace continues: queue, pick and call of each stage, each worker a child of its own call."""
    prefill, decode, router = await harness.served("prefill", "decode", tracing=opened())
    stream = await router.client.request(
        "POST",
        router.url + "/v1/completions",
        body=b'{"model": "llama", "prompt": "secret", "stream": true, "max_tokens": 2}',
        headers=(JSON, (b"traceparent", PARENT), (b"x-request-id", b"mine-1")),
    )
    assert stream.status == 200
    await router.end()
    stages = ["queue", "pick", "prefill", "queue", "pick", "decode"]
    assert collector.named() == ["POST /v1/completions", *stages]
    assert {service for service, _ in collector.spans} == {"penstock-router"}
    assert {span["traceId"] for _, span in collector.spans} == {TRACE}
    root = collector.one("POST /v1/completions")
    assert root["parentSpanId"] == "b7ad6b7169203331"
    others = [span for _, span in collector.spans if span is not root]
    assert {span["parentSpanId"] for span in others} == {root["spanId"]}
    assert all(began_ns(span) <= ended_ns(span) for span in others)
    for worker, name in ((prefill, "prefill"), (decode, "decode")):
        sent = f"00-{TRACE}-{collector.one(name)['spanId']}-01".encode()
        assert worker.seen[0].headers[b"traceparent"] == sent
    found = attributes(root)
    assert (found["penstock.request_id"], found["http.response.status_code"]) == ("mine-1", 200)
    assert (found["gen_ai.usage.output_tokens"], found["gen_ai.usage.input_tokens"]) == (2, 40)
    assert [event["name"] for event in collector.one("decode")["events"]] == ["first token"]
    assert b"secret" not in orjson.dumps(collector.spans)


async def test_latencies_name_the_trace_of_a_request_to_whom_asks(harness, collector):
    """OpenMetrics has an exemplar in the bucket of each latency; Prometheus' own text is as ever, and so is an untraced router."""
    worker = await harness.worker("aggregated")
    accept = (b"accept", b"application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5")
    traced = await harness.router(worker, tracing=opened())
    for router in (traced, await harness.router(worker)):
        await router.post(stream=True, max_tokens=2, headers=(JSON, (b"traceparent", PARENT)))
    page = await traced.get("/metrics", headers=(accept,))
    families = {each.name: each for each in text_string_to_metric_families(page.body.decode())}
    for name in (ROUTER_TTFT, ROUTER_E2E):
        (found,) = [each.exemplar for each in families[name].samples if each.exemplar]
        assert (found.labels, found.value > 0) == ({"trace_id": TRACE}, True)
    for plain in (await traced.get("/metrics"), await router.get("/metrics", headers=(accept,))):
        assert plain.headers[b"content-type"].startswith(b"text/plain")
        assert TRACE.encode() not in plain.body


async def test_failures_are_recorded_where_they_happen(harness, collector):
    """A call that broke and the request that failed by it are errors; the retry has spans of its own."""
    worker = await harness.worker("aggregated")
    retries = {"retries": {"maxPerRequest": 1}}
    router = await harness.router(worker, config=retries, tracing=opened())
    worker.script = [harness.answers.drop(), harness.answers.drop()]
    assert (await router.post()).status == 502
    await router.end()
    calls = [span for _, span in collector.spans if span["name"] == "aggregated"]
    assert [span["status"]["code"] for span in calls] == [2, 2]
    assert [event["name"] for event in calls[0]["events"]] == ["exception"]
    assert [attributes(span).get("penstock.retries") for span in calls] == [None, 1]
    root = collector.one("POST /v1/completions")
    assert (root["status"]["code"], attributes(root)["error.type"]) == (2, "upstream_broken")


async def test_the_call_that_goes_on_with_a_stream_points_to_the_one_that_broke(harness, collector):
    """A reader of the trace sees which worker took a stream over, and from which; here both break off at it."""
    event = b'data: {"id":"a","created":1,"model":"llama","object":"text_completion","choices":[{"index":0,"text":"one"}]}\n\n'

    async def breaks(_request, responder):
        responder.start(200)
        responder.write(event)
        await asyncio.sleep(0)
        responder.break_off()

    first, second = await harness.worker("aggregated"), await harness.worker("aggregated")
    config = {"policy": "round-robin", "retries": {"maxContinuations": 1}}
    router = await harness.router(first, second, config=config, tracing=opened())
    first.script = [breaks]
    second.script = [breaks]
    with pytest.raises(StreamBroken):
        await router.post(stream=True)
    await router.end()
    broken, rest = sorted((span for _, span in collector.spans if span["name"] == "aggregated"), key=began_ns)
    assert "links" not in broken
    (link,) = rest["links"]
    assert (link["spanId"], attributes(link)) == (broken["spanId"], {"penstock.link": "continues"})
    assert attributes(rest)["penstock.continuations"] == 1


async def test_a_request_that_gets_no_worker_ends_in_its_queue(harness, collector):
    """The wait is shown as what failed."""
    harness.write_state([])
    config = {"prefillQueue": {"maxWaitSeconds": 0.2}}
    options = {"disaggregated": False, "ready": False, "config": config, "tracing": opened()}
    router = await harness.router(statefile=harness.statefile, **options)
    assert (await router.post()).status == 503
    await router.end()
    assert collector.named() == ["POST /v1/completions", "queue"]
    assert collector.one("queue")["status"]["code"] == 2


async def test_what_is_not_sampled_leaves_no_span_but_keeps_its_trace(harness, collector, monkeypatch):
    """The client's decision holds, and workers are told of it."""
    worker, router = await harness.served("aggregated", tracing=opened())
    await router.post(headers=(JSON, (b"traceparent", PARENT[:-2] + b"00")))
    sent = worker.seen[0].headers[b"traceparent"].decode()
    assert (sent[3:35], sent[-2:]) == (TRACE, "00")
    await router.end()
    assert collector.spans == []


async def test_a_collector_that_is_away_neither_delays_nor_fails_requests(harness, monkeypatch):
    """Requests are served as ever, and the router's end waits for it within a bound."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    _, router = await harness.served("aggregated", tracing=opened())
    assert (await router.post()).status == 200
    await router.end()


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_SDK_DISABLED": "true"}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_TRACES_EXPORTER": "none"}, None),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "only HTTP",
        ),
    ],
)
def test_traces_are_off_unless_asked_for(monkeypatch, caplog, variables, words):
    """Without an endpoint nothing is made; what cannot be spoken is said."""
    caplog.set_level(logging.WARNING)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert opened() is None
    assert (words or "") in caplog.text


async def test_simulated_workers_continue_the_trace(harness, collector):
    """Each worker's span is a child of the router's call of it; decode's has the KV transfer within."""
    async with asyncio.TaskGroup() as group:
        engines = []
        for role in ("prefill", "decode"):
            flags = ServeFlags(
                model="llama", profile="h200-llama-3.1-8b-tp1", role=EngineRole(role), port=0, speed=20.0
            )
            engine = EngineServer(resolve(flags), group, open_tracing("penstock-engine"))
            await engine.start()
            engines.append(engine)
        workers = [
            SimpleNamespace(name=role, role=role, url=engine.url)
            for role, engine in zip(("prefill", "decode"), engines, strict=True)
        ]
        router = await harness.router(*workers, tracing=opened(), speed=20.0)
        assert (await router.post(prompt="a " * 400, max_tokens=3)).status == 200
        await router.end()
        for engine in engines:
            await engine.close(grace_s=0)
            await engine._trace._tracing.close()
    by_id = {span["spanId"]: span for _, span in collector.spans}
    served = [span for _, span in collector.spans if span["name"] == "llm_request"]
    assert sorted(by_id[span["parentSpanId"]]["name"] for span in served) == ["decode", "prefill"]
    transfer = collector.one("kv transfer")
    parent = by_id[transfer["parentSpanId"]]
    assert attributes(parent)["penstock.role"] == "decode"
    assert began_ns(parent) <= began_ns(transfer) <= ended_ns(transfer)
    assert attributes(parent)["gen_ai.usage.completion_tokens"] == 3
    assert len({span["traceId"] for span in by_id.values()}) == 1
