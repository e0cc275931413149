"""A whole load run against a fake server: what is sent, measured, counted and written."""

import asyncio

import orjson
import pytest

from penstock.core.errors import (
    ConfigError,
    NoEndpointsError,
    PenstockError,
    StreamBroken,
    UpstreamConnectError,
)
from penstock.report.text import notes
from penstock.simulator.workload import WorkloadSpec, prepare
from penstock.workload import results as results_module
from penstock.workload.arrivals import Selection, Spread
from penstock.workload.exchange import MAX_EVENT_BYTES, ClientStreamMeter, StreamError
from penstock.workload.prompts import PromptMaker
from penstock.workload.record import RequestStatus
from penstock.workload.results import read_run
from penstock.workload.session import LoadConfig, plan_load
from penstock.workload.traces import TraceFormat


def test_a_synthetic_process_is_sent_as_it_is_simulated():
    """The same requests for the same seed, and a name that no reader takes for a trace's."""
    plan = plan_load(LoadConfig(trace="sine:rate=2,count=30,input_tokens=100", seed=4))

    assert plan.requests == prepare(WorkloadSpec("sine:rate=2,count=30,input_tokens=100"), seed=4).requests
    assert plan.trace.name.startswith("synthetic sine")
    assert plan.trace.format is TraceFormat.SYNTHETIC


async def test_a_replay_sends_each_row_with_its_lengths(mooncake_file, fake_server, config_of, run_to_end):
    """Prompts come from the ids, lengths from the row, and the answer is streamed with usage."""
    summary = await run_to_end(mooncake_file, seed=4)
    rows = plan_load(config_of(mooncake_file)).trace.requests
    maker = PromptMaker(4)
    wanted = {(maker.make(row).decode(), row.output_tokens) for row in rows}

    assert {(body["prompt"], body["max_tokens"]) for body in fake_server.bodies} == wanted
    for body in fake_server.bodies:
        assert body["ignore_eos"] is True
        assert body["stream"] is True
        assert body["stream_options"] == {"include_usage": True}
        assert body["model"] == "llama"
    assert {headers[b"x-request-id"][-2:] for headers in fake_server.headers} == {
        b"-%d" % n for n in range(1, 6)
    }
    assert summary["requests"] == {
        "planned": 5,
        "sent": 5,
        "ok": 5,
        "failed": 0,
        "rejected": 0,
        "unfinished": 0,
        "not_sent": 0,
    }
    assert summary["tokens"]["prompt"] == 600 + 512 + 1500 + 10 + 1024
    assert summary["tokens"]["output"] == 5 + 6 + 7 + 8 + 9
    assert summary["usage_mismatches"]["prompt_tokens"] == 0
    assert summary["usage_mismatches"]["checked_prompt"] == 5
    assert summary["latency"]["ttft_s"]["count"] == 5
    assert summary["latency"]["itl_s"]["count"] == 4 + 5 + 6 + 7 + 8
    assert summary["is_partial"] is False


async def test_the_files_hold_what_was_measured(mooncake_file, fake_server, tmp_path, config_of, run_to_end):
    """results.jsonl has a line per request, summary.json every setting that shaped the run."""
    out = tmp_path / "run"

    summary = await run_to_end(mooncake_file, output_dir=out, rate_rps=2.0, api_key="secret")
    run = read_run(out)

    assert run.summary == orjson.loads(orjson.dumps(summary))
    assert [result.line for result in run.results] == [1, 2, 3, 4, 5]
    assert {result.status for result in run.results} == {RequestStatus.OK}
    assert [len(result.itl_s) for result in run.results] == [4, 5, 6, 7, 8]
    for result in run.results:
        assert result.e2e_s == pytest.approx(result.ttft_s + sum(result.itl_s), abs=1e-3)
        assert result.tpot_s == pytest.approx(
            (result.e2e_s - result.ttft_s) / (result.output_tokens - 1), abs=1e-5
        )
    settings = run.summary["settings"]
    assert settings["spread"] == "even"
    assert settings["loop"] == "open"
    assert settings["rate_factor"] == pytest.approx(2.0 / (4 / 4.5))
    assert run.summary["trace"]["sha256"] == plan_load(config_of(mooncake_file)).trace.sha256
    assert fake_server.headers[0][b"authorization"] == b"Bearer secret"
    assert "secret" not in (out / "summary.json").read_text()


async def _refuse(body, responder):
    responder.send(503, b'{"error":{"message":"prefill queue is full","type":"overloaded","code":503}}')


async def _fail(body, responder):
    responder.send(400, b"prompt too long")


async def _break_off(body, responder):
    responder.start(200)
    responder.write(b'data: {"choices":[{"index":0,"text":"abcd"}]}\n\n')
    await asyncio.sleep(0)
    responder.end()


async def _stay_silent(body, responder):
    responder.start(200)
    responder.write(b"data: [DONE]\n\n")
    responder.end()


async def _report_an_error(body, responder):
    responder.start(200)
    responder.write(b'data: {"error":{"message":"KV transfer failed"}}\n\n')
    responder.end()


async def _hang(body, responder):
    responder.start(200)
    await asyncio.sleep(60)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (_refuse, (RequestStatus.REJECTED, "http_503", "prefill queue is full")),
        (_fail, (RequestStatus.FAILED, "http_400", "prompt too long")),
        (_break_off, (RequestStatus.FAILED, "truncated", "without [DONE]")),
        (_stay_silent, (RequestStatus.FAILED, "no_tokens", "no token")),
        (_report_an_error, (RequestStatus.FAILED, "stream_error", "KV transfer failed")),
    ],
)
async def test_each_way_of_failing_is_told_apart(azure_file, fake_server, run_to_end, script, expected):
    """A busy server rejects; everything else failed, and why is counted."""
    fake_server.script = script
    status, error_class, message = expected
    folder = azure_file.with_name("run")

    summary = await run_to_end(azure_file, output_dir=folder)
    results = read_run(folder).results

    assert {result.status for result in results} == {status}
    assert all(message in result.error for result in results)
    assert summary["errors"] == {error_class: 3}
    assert summary["requests"][status.value] == 3
    assert summary["latency"]["ttft_s"]["p50"] is None


async def test_a_request_that_takes_too_long_is_ended(azure_file, fake_server, run_to_end):
    """The limit is in simulated seconds."""
    fake_server.script = _hang

    summary = await run_to_end(azure_file, timeout_s=20.0)

    assert summary["errors"] == {"timeout_total": 3}


async def test_usage_that_differs_from_the_trace_is_counted(mooncake_file, fake_server, run_to_end):
    """A server with another tokenizer, or a cut answer, does not pass unseen."""

    async def short(body, responder):
        responder.start(200)
        responder.write(b'data: {"choices":[{"index":0,"text":"abcd"}]}\n\n')
        responder.write(
            b'data: {"choices":[],"usage":{"prompt_tokens":600,"completion_tokens":1}}\n\ndata: [DONE]\n\n'
        )
        responder.end()

    fake_server.script = short

    mismatches = (await run_to_end(mooncake_file))["usage_mismatches"]

    assert (mismatches["prompt_tokens"], mismatches["output_tokens"]) == (4, 5)
    assert len(mismatches["examples"]) == 5


async def test_a_concurrency_cap_holds_and_is_recorded(mooncake_file, fake_server, run_to_end):
    """Never more than the cap are in flight; the summary says that the loop was closed."""
    in_flight = most = 0
    stream = fake_server.script

    async def count(body, responder):
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)
        await asyncio.sleep(0.01)
        await stream(body, responder)
        in_flight -= 1

    fake_server.script = count

    summary = await run_to_end(mooncake_file, concurrency=2, spread=Spread.NONE)

    assert most == 2
    assert summary["settings"]["loop"] == "closed"
    assert summary["settings"]["concurrency"] == 2
    assert summary["requests"]["ok"] == 5


async def test_stopping_gives_a_partial_summary(mooncake_file, fake_server, tmp_path, run_to_end):
    """Ctrl-C cuts off what is in flight, sends nothing more and still writes the summary."""
    stop = asyncio.Event()
    started = asyncio.Event()
    stream = fake_server.script

    async def first_then_hang(body, responder):
        if body["max_tokens"] == 5:
            await stream(body, responder)
            return
        started.set()
        await asyncio.sleep(60)

    fake_server.script = first_then_hang
    changes = {"output_dir": tmp_path, "selection": Selection(limit=4), "rate_rps": 0.5}
    run = asyncio.create_task(run_to_end(mooncake_file, stop=stop, **changes))
    await started.wait()
    stop.set()
    summary = await run

    requests = summary["requests"]
    assert summary["is_partial"] is True
    assert (requests["ok"], requests["unfinished"]) == (1, requests["sent"] - 1)
    assert requests["not_sent"] == 4 - requests["sent"]
    assert read_run(tmp_path).summary["is_partial"] is True


async def test_nothing_is_sent_to_an_address_that_does_not_answer(
    azure_file, unused_tcp_port, fake_server, run_to_end
):
    """The error names the URL and the remedy before the first request."""
    fake_server.url = f"http://127.0.0.1:{unused_tcp_port}"

    with pytest.raises(UpstreamConnectError, match=r"--url http://127.* no answer .*penstock up"):
        await run_to_end(azure_file)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"models": []}, (NoEndpointsError, "lists no model")),
        ({"ready": 503}, (NoEndpointsError, "no worker of role decode is ready")),
        ({"url": "ftp://x"}, (ConfigError, "only http and https are spoken")),
        ({"models": ["gpt"]}, (ConfigError, "'llama': .* serves gpt")),
        ({"models": None}, (UpstreamConnectError, "answers 404, not a list of models")),
    ],
)
async def test_a_server_that_cannot_serve_is_said_so(azure_file, fake_server, run_to_end, changes, expected):
    """Each way is found out before sending."""
    vars(fake_server).update(changes)
    error, message = expected

    with pytest.raises(error, match=message):
        await run_to_end(azure_file, model="llama")
    assert fake_server.bodies == []


async def test_the_servers_say_how_late_they_ran(azure_file, fake_server, run_to_end):
    """The router's own lag and that of each worker it lists are in the summary; nonsense is left out."""
    fake_server.lags = {"": "0.25", "w1": "0.5", "w2": "NaN", "w3": "nonsense"}

    lag = (await run_to_end(azure_file))["lag"]

    assert lag["servers"] == [
        {"name": "router", "role": "router", "p99_s": 0.25},
        {"name": "w1", "role": "decode", "p99_s": 0.5},
    ]
    assert {"router", "w1"} <= set(lag["late"])


async def test_streams_that_broke_off_meanwhile_are_counted_by_the_router(
    azure_file, fake_server, run_to_end
):
    """Three requests of which each broke twice, against 40 and 7 from before; a client sees none of that, so notes say it."""
    fake_server.lags = {"": "0"}
    fake_server.broken = 40

    summary = await run_to_end(azure_file)

    assert summary["broken_streams"] == {"continued": 6, "lost": 0}
    assert [
        note for note in notes(summary) if "BROKEN STREAMS: 6 continued on another worker, 0 ended" in note
    ]


async def test_a_server_that_is_no_router_counts_no_broken_streams(azure_file, run_to_end):
    """Unknown is not zero."""
    summary = await run_to_end(azure_file)

    assert summary["broken_streams"] is None
    assert not [note for note in notes(summary) if "BROKEN" in note]


@pytest.mark.parametrize(("key", "names"), [("root", ["router", "w1"]), (None, ["router"])])
async def test_the_admin_key_tells_where_the_workers_are(azure_file, fake_server, key, names, run_to_end):
    """Without it the router's own lag is all that can be said; nobody else is sent the key."""
    fake_server.lags = {"": "0.25", "w1": "0.5"}
    fake_server.admin = b"Bearer root"

    lag = (await run_to_end(azure_file, admin_key=key))["lag"]

    assert [each["name"] for each in lag["servers"]] == names


async def test_a_full_disk_is_one_clear_error(azure_file, tmp_path, monkeypatch, run_to_end):
    """The replay ends with the directory's name and a remedy, not with a group of exceptions."""

    def full(result, *, with_gaps):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(results_module, "to_line", full)

    with pytest.raises(PenstockError, match="No space left on device; free some space"):
        await run_to_end(azure_file, output_dir=tmp_path)


def test_an_event_without_end_is_cut_off():
    """A server that streams no events cannot fill the client's memory."""
    measured = ClientStreamMeter()

    with pytest.raises(StreamBroken, match=f"exceeds {MAX_EVENT_BYTES} bytes"):
        measured.feed(0.0, b"data: " + b"0" * MAX_EVENT_BYTES)


def _event(body):
    return b"data: " + body + b"\n\n"


def test_token_events_are_timed_and_others_are_not():
    """A role chunk, an empty text and the usage chunk are not tokens."""
    meter = ClientStreamMeter()
    chat = [
        b'{"choices":[{"delta":{"role":"assistant","content":""}}]}',
        b'{"choices":[{"delta":{"content":"a"}}]}',
    ]

    counts = [
        meter.feed(1.0, _event(chat[0])),
        meter.feed(2.0, _event(chat[1])),
        meter.feed(2.5, _event(chat[1]) + _event(chat[1])),
        meter.feed(3.0, _event(b'{"choices":[{"text":"","finish_reason":"length"}]}')),
        meter.feed(
            4.0,
            _event(
                b'{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3,'
                b'"prompt_tokens_details":{"cached_tokens":2}}}'
            )
            + _event(b"[DONE]"),
        ),
    ]

    assert counts == [0, 1, 2, 0, 0]
    assert (meter.first_s, meter.last_s, list(meter.gaps_s)) == (2.0, 2.5, [0.5, 0.0])
    assert (meter.prompt_tokens, meter.output_tokens, meter.cached_tokens) == (7, 3, 2)
    assert meter.is_done


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        (b'{"error":{"message":"KV lost","code":500}}', StreamError, "KV lost"),
        (b'{"error":"KV lost"}', StreamError, "KV lost"),
        (b"{oops", StreamBroken, "not JSON"),
        (b"[1]", StreamBroken, "not a JSON object"),
        (b'{"choices":[],"usage":3}', StreamBroken, "usage: 3"),
        (b'{"choices":3}', StreamBroken, "choices"),
    ],
)
def test_a_stream_that_goes_wrong_says_how(body, kind, message):
    """Errors inside a stream are told apart from garbage."""
    with pytest.raises(kind, match=message):
        ClientStreamMeter().feed(0.0, _event(body))
