"""Requests that ask for tiers, and a load that is a multiple of what the server can serve."""

import asyncio
import io
import json
from collections import Counter

import pytest
from rich.console import Console

from penstock.api import Tier
from penstock.cli.trace import mooncake_lines
from penstock.core.clock import SimulatedClock
from penstock.core.errors import ConfigError, PenstockError
from penstock.core.http.client import ConnectionPool
from penstock.report.text import load_summary
from penstock.workload.arrivals import parse_mix, with_tiers
from penstock.workload.exchange import Destination
from penstock.workload.record import RequestStatus
from penstock.workload.results import read_run
from penstock.workload.session import LoadConfig, measure_capacity, parse_overload
from penstock.workload.trace_info import describe_trace
from penstock.workload.traces import TraceRequest, load_trace

MIX = {Tier.PREMIUM: 20.0, Tier.STANDARD: 50.0, Tier.BACKGROUND: 30.0}


def printed(renderable, width=100):
    """Return what a terminal shows."""
    page = io.StringIO()
    Console(width=width, file=page).print(renderable)
    return page.getvalue()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gold=1", "tiers are system, premium"),
        ("premium", "must be TIER=WEIGHT"),
        ("premium=x", "must be TIER=WEIGHT"),
        ("premium=0", "finite number above 0"),
        ("premium=inf", "finite number above 0"),
        ("premium=1,premium=2", "given twice"),
        ("", "must be TIER=WEIGHT"),
    ],
)
def test_a_wrong_mix_is_one_clear_error(text, message):
    """The message names the part and the tiers."""
    with pytest.raises(ConfigError, match=message):
        parse_mix(text)


def test_tiers_are_drawn_in_proportion_and_by_the_seed():
    """The same seed gives the same tiers; without a mix requests ask for none."""
    requests = [TraceRequest(float(at), 10, 1, None, at) for at in range(5000)]
    first, again = with_tiers(requests, MIX, seed=3), with_tiers(requests, MIX, seed=3)
    assert first == again != with_tiers(requests, MIX, seed=4)
    counts = Counter(request.tier for request in first)
    assert counts[Tier.PREMIUM] / 5000 == pytest.approx(0.2, abs=0.02)
    assert counts[Tier.BACKGROUND] / 5000 == pytest.approx(0.3, abs=0.02)
    assert with_tiers(requests, None, seed=3) == requests


@pytest.mark.parametrize("text", ["x", "0x", "-1", "inf", "nan", "2000x", "3y"])
def test_an_overload_is_a_factor(text):
    """With or without its x; the message shows the form."""
    assert [parse_overload(right) for right in ("3x", "2.5", " 0.5x ")] == [3.0, 2.5, 0.5]
    with pytest.raises(ConfigError, match="must be a factor above 0 and at most 1000, as 3x"):
        parse_overload(text)


@pytest.mark.parametrize("other", [{"rate_rps": 1.0}, {"rate_scale": 2.0}, {"concurrency": 4}])
def test_the_load_is_said_once(other):
    """A second option that sets it is refused."""
    with pytest.raises(ConfigError, match="--overload: sets the load, as --"):
        LoadConfig(trace="mooncake", overload=3.0, **other)


async def test_requests_ask_for_their_tiers_and_the_summary_tells_them_apart(
    mooncake_file, fake_server, tmp_path, run_to_end
):
    """By the router's header, in results.jsonl, in the live table and in the summary."""
    watched = []
    changes = {"tiers": {Tier.BACKGROUND: 1.0}, "tier_header": "X-Tier", "output_dir": tmp_path / "out"}
    summary = await run_to_end(mooncake_file, on_start=watched.append, **changes)
    assert [headers[b"x-tier"] for headers in fake_server.headers] == [b"background"] * 5
    assert summary["tiers"]["background"]["requests"] == {"ok": 5, "failed": 0, "rejected": 0}
    assert summary["tiers"]["background"]["ttft_s"]["count"] == 5
    assert summary["settings"]["tiers"] == {"background": 1.0}
    assert {each.tier for each in read_run(tmp_path / "out").results} == {Tier.BACKGROUND}
    assert "background" in printed(load_summary(summary))
    progress = watched[0].snapshot().tiers[Tier.BACKGROUND]
    assert (progress.sent, progress.ends[RequestStatus.OK], len(progress.ttfts_s)) == (5, 5, 5)


async def test_an_overload_replays_at_the_factor_times_the_measured_capacity(
    mooncake_file, fake_server, run_to_end
):
    """A closed loop of other texts comes first, without tiers."""
    changes = {"overload": 3.0, "capacity_concurrency": 8, "tiers": {Tier.PREMIUM: 1.0}}
    summary = await run_to_end(mooncake_file, **changes)
    probes = [each for each in fake_server.headers if each[b"x-request-id"].startswith(b"capacity")]
    assert len(probes) == 32
    assert all(b"x-penstock-tier" not in headers for headers in probes)
    replayed = {body["prompt"] for body in fake_server.bodies[32:]}
    assert len(replayed) == 5
    assert replayed.isdisjoint(body["prompt"] for body in fake_server.bodies[:32])
    capacity = summary["overload"]["capacity"]
    assert (capacity["concurrency"], capacity["requests"]) == (8, 32)
    assert summary["trace"]["mean_rate_rps"] == pytest.approx(3 * capacity["rps"], rel=0.01)
    assert "OVERLOAD: 3 times a capacity of" in printed(load_summary(summary))


BUSY = b'{"message":"All workers are busy, please retry later","type":"service_unavailable","code":503}'


async def measured(fake, script, *, concurrency=8):
    """Measure a server that answers by a script."""
    fake.script = script
    pool = ConnectionPool()
    try:
        return await measure_capacity(
            pool,
            SimulatedClock(200.0),
            Destination(fake.url, "llama", timeout_s=100.0),
            [TraceRequest(0.0, 8, 2, (1,), 1)],
            seed=1,
            concurrency=concurrency,
            stop=asyncio.Event(),
        )
    finally:
        await pool.close()


async def test_a_server_that_rejects_is_measured_by_what_it_takes(fake_server):
    """Three of eight fit at a time; the others are rejected and sent again, until all 32 are answered."""
    answer = fake_server.script
    under_way = rejected = served = 0
    is_full = asyncio.Event()

    async def script(body, responder):
        nonlocal under_way, rejected, served
        if under_way == 3:
            rejected += 1
            is_full.set()
            responder.send(503, BUSY)
            return
        under_way += 1
        await is_full.wait()
        await answer(body, responder)
        under_way -= 1
        served += 1

    capacity = await measured(fake_server, script)
    assert (served, capacity.requests) == (32, 32)
    assert capacity.rps > 0
    assert rejected > 0


async def test_a_server_that_fails_has_no_capacity(fake_server):
    """A failure is not sent again."""

    async def script(body, responder):
        responder.send(400, b"{}")

    with pytest.raises(PenstockError, match="0 of 32 requests were answered"):
        await measured(fake_server, script)
    assert len(fake_server.bodies) == 32


def test_a_trace_names_the_tier_of_each_request(tmp_path):
    """Conversion and the description of a trace keep it; a row without a tier asks for none."""
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 600, "output_length": 40, "tier": "background"}\n'
        '{"timestamp": 10, "input_length": 600, "output_length": 40, "tier": "standard"}\n'
        '{"timestamp": 20, "input_length": 600, "output_length": 40}\n'
    )

    trace = load_trace(str(path))

    assert [each.tier for each in trace.requests] == [Tier.BACKGROUND, Tier.STANDARD, None]
    assert [json.loads(line).get("tier") for line in mooncake_lines(trace.requests)] == [
        "background",
        "standard",
        None,
    ]
    assert describe_trace(trace).tiers == {"standard": 1, "background": 1}
    with pytest.raises(
        ConfigError, match="2 of 3 requests of the trace name their tier themselves; leave the option out"
    ):
        with_tiers(trace.requests, MIX, seed=0)


def test_a_tier_that_does_not_exist_is_refused_with_its_line(tmp_path):
    """The message names the tiers."""
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 600, "output_length": 40, "tier": "batch"}\n')

    with pytest.raises(
        ConfigError, match=r"trace.jsonl:1: tier: 'batch': .*'premium', 'standard' or 'background'"
    ):
        load_trace(str(path))
