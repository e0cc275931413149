"""Operation: discovery by file, drains, health, scrapes, shutdown."""

import asyncio
import os
import stat
from importlib.metadata import version

import orjson
import pytest

from penstock.api import Role
from penstock.core.errors import ConfigError, PortInUseError, UpstreamError
from penstock.router.access_log import AccessLog
from penstock.router.core.worker import WorkerSpec
from penstock.router.discovery.statefile import Discovery
from penstock.router.proxy.auth import API_KEYS, read_keys
from penstock.router.proxy.kv_transfer import REFUSED_MODEL
from penstock.router.server import RouterServer
from penstock.router.settings import RouterSettings


async def _starting(harness, role):
    """A router by whose statefile the only worker of ``role`` is being started.

    Returns:
        The router, and both its workers, prefill first.
    """
    pair = await harness.pair()
    harness.write_state(pair, **{each.name: "starting" for each in pair if each.role == role})
    return await harness.router(statefile=harness.statefile, disaggregated=True, ready=False), pair


async def test_workers_come_and_go_with_the_statefile(harness):
    """A worker added to the file is routed to within a poll, and one taken out is not."""
    first, second = await harness.worker("aggregated"), await harness.worker("aggregated")
    harness.write_state([first])
    router = await harness.router(statefile=harness.statefile, disaggregated=False)
    assert (await router.post()).status == 200

    harness.write_state([first, second], **{first.name: "draining"})
    await router.until(lambda: router.server.core.pool.get(second.name) is not None)
    assert (await router.post()).status == 200
    shown = await router.workers()

    assert (len(first.seen), len(second.seen)) == (1, 1)
    assert (shown[first.name]["state"], shown[second.name]["state"]) == ("draining", "ready")
    harness.statefile.write_text("{ half a fi")
    await asyncio.sleep(0.15)
    assert (await router.post()).status == 200
    harness.write_state([second])
    await router.until(lambda: router.server.core.pool.get(first.name) is None)


@pytest.mark.parametrize(
    ("role", "prompt", "queue"),
    [
        ("prefill", "a", Role.PREFILL),
        # Blocks are not pinned for nobody.
        ("decode", "a", Role.PREFILL),
        # Several prompts skip the prefill.
        ("decode", ["a", "b"], Role.DECODE),
    ],
)
async def test_requests_wait_for_a_worker_that_is_being_restarted(harness, role, prompt, queue):
    """The statefile says that somebody starts it: the request is held before any worker, then served."""
    router, pair = await _starting(harness, role)
    request = asyncio.create_task(router.post(prompt=prompt))
    await router.until(lambda: len(router.server.core.queues[queue]) == 1)
    assert (await router.get("/ready")).status == 503
    assert [each.seen for each in pair] == [[], []]

    harness.write_state(pair)

    assert (await request).status == 200
    assert (await router.get("/ready")).status == 200


async def test_a_drain_lets_streams_finish_and_takes_nothing_new(harness):
    """The answer tells what is still under way; undrain takes it back."""
    round_robin = {"policy": "round-robin"}
    first, second, router = await harness.served("aggregated", "aggregated", config=round_robin)
    end = first.hold_stream()
    stream = await router.begun_stream()

    answer = await harness.client.request("POST", f"{router.url}/workers/{first.name}/drain")

    assert (answer.status, orjson.loads(answer.body)) == (200, {"name": first.name, "inflight_requests": 1})
    assert [(await router.post()).status for _ in range(3)] == [200] * 3
    assert (len(first.seen), len(second.seen)) == (1, 3)
    end.set()
    assert await stream.read(limit_bytes=1000) == harness.done
    assert (await router.workers())[first.name]["inflight_requests"] == 0
    await harness.client.request("POST", f"{router.url}/workers/{first.name}/undrain")
    for _ in range(2):
        await router.post()
    assert len(first.seen) == 2


async def test_an_unhealthy_worker_is_left_alone_until_it_is_well(harness):
    """After as many failed checks as configured; one good check brings it back."""
    worker, router = await harness.served(
        "aggregated", config={"health": {"intervalSeconds": 0.01, "unhealthyAfter": 2}}
    )
    worker.health_status = 503
    await router.until(lambda: bool(router.server.admission.problems()))

    shown = (await router.workers())[worker.name]
    assert (shown["state"], shown["reason"]) == ("unhealthy", "health check answered 503")
    assert (await router.post()).status == 503
    assert await router.metric("penstock_router_worker_ready", worker=worker.name, role="aggregated") == 0
    worker.health_status = 200
    await router.until(lambda: not router.server.admission.problems())
    assert (await router.post()).status == 200


async def test_a_worker_whose_engine_hangs_loses_its_requests_and_gets_no_new_one(harness):
    """Its health check succeeds and no token is counted: what had no byte yet is tried elsewhere, a stream continues there."""
    hung, well = await harness.worker("aggregated"), await harness.worker("aggregated")
    never = hung.hold_stream()
    hung.script.append(harness.answers.hang())
    health = {"intervalSeconds": 0.01, "stallRealSeconds": 1}
    router = await harness.router(hung, well, config={"policy": "round-robin", "health": health})
    stream = await router.begun_stream()
    await router.post()
    answer = await router.post()

    assert (await stream.read(limit_bytes=100_000)).endswith(harness.done)
    assert (answer.status, len(hung.seen), len(well.seen)) == (200, 2, 3)
    shown = (await router.workers())[hung.name]
    reason = "its engine hangs: requests, but no token for 1 s (real)"
    assert (shown["state"], shown["reason"], shown["inflight_requests"]) == ("unhealthy", reason, 0)
    hung.generated = 1
    await router.until(lambda: router.server.core.pool.get(hung.name).health_problem is None)
    never.set()


UNREACHABLE = {
    "intervalSeconds": 0.1,
    "timeoutRealSeconds": 0.1,
    "unhealthyAfter": 2,
    "unreachableRealSeconds": 1,
}


@pytest.mark.parametrize("has_left", [True, False])
async def test_requests_at_a_worker_that_answers_nothing_end(harness, has_left):
    """What had no byte yet is tried elsewhere whatever the budget, a stream continues there; so too once its pod is gone."""
    lost, well = await harness.worker("aggregated"), await harness.worker("aggregated")
    lost.hold_stream()
    lost.otherwise = harness.answers.hang()
    harness.write_state([lost])
    config = {"health": UNREACHABLE, "retries": {"budgetFraction": 0, "minPerSecond": 0}}
    router = await harness.router(statefile=harness.statefile, disaggregated=False, config=config)
    stream = await router.begun_stream()
    requests = [asyncio.create_task(router.post()) for _ in range(3)]
    await router.until(lambda: len(lost.seen) == 4)

    lost.health_status = None
    harness.write_state([well] if has_left else [lost, well])

    assert [(await each).status for each in requests] == [200] * 3
    assert (await stream.read(limit_bytes=100_000)).endswith(harness.done)
    assert (len(lost.seen), len(well.seen)) == (4, 4)
    await router.until(lambda: not router.server.core.pool.leaving)


@pytest.mark.parametrize("is_mute", [True, False])
async def test_a_slow_stream_of_a_living_worker_is_not_cut(harness, is_mute):
    """It answers health checks while it computes a long prompt; or is too busy for them and another stream continues."""
    worker = await harness.worker("aggregated")
    over = asyncio.Event()

    async def tokens(_request, responder):
        responder.start(200)
        while not over.is_set():
            responder.write(harness.token_event(0))
            await asyncio.sleep(0.1)
        responder.write(harness.done)
        responder.end()

    end = worker.hold_stream()
    worker.script += [tokens] if is_mute else []
    router = await harness.router(worker, config={"health": UNREACHABLE})
    slow = await router.begun_stream()
    other = await router.stream() if is_mute else None
    worker.health_status = None if is_mute else 200
    await asyncio.sleep(1.5)
    end.set()
    over.set()
    assert await slow.read(limit_bytes=1000) == harness.done
    if other is not None:
        assert (await other.read(limit_bytes=10_000)).endswith(harness.done)


async def test_a_role_without_any_worker_has_a_zero(harness):
    """Its alert reads a series; one that vanishes with the last worker alarms no one."""
    *_, router = await harness.served("prefill", "decode")
    router.server.admission.set_workers(
        [each.spec for each in router.server.core.pool if each.spec.role is Role.PREFILL]
    )
    assert await router.metric("penstock_router_ready_workers", role="prefill") == 1
    assert await router.metric("penstock_router_ready_workers", role="decode") == 0


@pytest.mark.parametrize(
    ("page_value", "shown"), [("0.25", 0.25), ("NaN", None), ("+Inf", None), ("-0.5", None), ("junk", 0.25)]
)
async def test_worker_metrics_are_scraped_and_exported(harness, page_value, shown):
    """A fraction is shown; what is none is unknown; an unreadable page keeps the last reading."""
    worker, router = await harness.served("aggregated", config={"health": {"intervalSeconds": 0.01}})
    scraped = router.server.core.pool.get(worker.name)
    await router.until(lambda: scraped.kv_usage_fraction == 0.25)
    worker.kv_usage = page_value
    before_s = scraped.metrics_at_s
    if page_value == "junk":
        await asyncio.sleep(0.25)
    else:
        await router.until(lambda: scraped.metrics_at_s > before_s + 0.15)

    assert (await router.workers())[worker.name]["kv_usage_fraction"] == shown
    labels = {"worker": worker.name, "role": "aggregated"}
    page = (await router.get("/metrics")).body
    assert (b"penstock_router_worker_kv_usage_fraction{" in page) is (shown is not None)
    assert await router.metric("penstock_router_worker_metrics_age_seconds", **labels) < 2


async def test_shutdown_lets_streams_finish(harness):
    """Nothing new is accepted, what runs is completed, then the port is free."""
    worker, router = await harness.served("aggregated")
    end = worker.hold_stream()
    stream = await router.begun_stream()

    closing = asyncio.create_task(router.server.close())
    await asyncio.sleep(0.05)
    with pytest.raises(UpstreamError):
        await router.post()
    assert not closing.done()
    end.set()

    assert await stream.read(limit_bytes=100) == harness.done
    router.client.close_idle(router.url)
    await closing


async def test_an_idle_client_keeps_its_connection_for_as_long_as_the_manifest_says(harness):
    """One second here; by default a load balancer's connection outlives the test."""
    worker = await harness.worker("aggregated")
    short = await harness.router(worker, config={"limits": {"clientIdleTimeoutRealSeconds": 1}})
    usual = await harness.router(worker)
    for router in (short, usual):
        assert (await router.get("/health")).status == 200
    await short.until(lambda: not short.server._http.connections)
    assert usual.server._http.connections == 1


async def test_probes_that_were_written_for_vllm_are_answered(harness):
    """By either method where vLLM takes both; the load counts streams under way, and no probe."""
    worker, router = await harness.served("aggregated")
    for method in ("GET", "POST"):
        assert (await harness.client.request(method, router.url + "/ping")).status == 200
    assert (await harness.client.request("POST", router.url + "/version")).status == 405
    assert orjson.loads((await router.get("/version")).body) == {"version": version("penstock")}
    assert orjson.loads((await router.get("/load")).body) == {"server_load": 0}
    end = worker.hold_stream()
    stream = await router.begun_stream()
    assert orjson.loads((await router.get("/load")).body) == {"server_load": 1}
    end.set()
    await stream.read(limit_bytes=100)
    await router.until(lambda: router.server.app.load == 0)


async def test_shutdown_is_bounded(harness):
    """A stream that does not end within the grace is cut off, and its worker told."""
    worker, router = await harness.served("aggregated", shutdown_grace_s=0.05)
    worker.hold_stream()
    stream = await router.begun_stream()

    await router.end()

    with pytest.raises(UpstreamError):
        await stream.read(limit_bytes=100)
    await router.until(lambda: worker.disconnects == 1)


class _StuckDiscovery(Discovery):
    """Finds no worker, and never ends."""

    async def close(self):
        """Wait for ever."""
        await asyncio.Event().wait()


async def test_a_failed_start_is_told_though_background_work_does_not_end(harness, monkeypatch):
    """A router that cannot bind ends within bounds, as one does that is stopped."""
    monkeypatch.setattr("penstock.router.server.STOP_REAL_S", 0.05)
    worker = await harness.worker("aggregated")
    workers = (WorkerSpec("a", Role.AGGREGATED, "http://127.0.0.1:9"),)
    settings = RouterSettings("m", disaggregated=False, workers=workers, port=worker.server.port)
    server = RouterServer(settings)
    server._discovery = _StuckDiscovery()
    with pytest.raises(PortInUseError, match=str(worker.server.port)):
        await server.start()


@pytest.mark.parametrize(
    ("files", "variable", "expected"),
    [
        ({"keys": "# ours\nalpha\n\n  beta \n"}, "gamma, delta,", {b"alpha", b"beta", b"gamma", b"delta"}),
        ({}, None, set()),
        # As a kubelet mounts a Secret: what it keeps alongside the keys is none.
        (
            {"..data/team-a": "alpha", "team-a": "..data/team-a", "team-b": "beta\n# old\ngamma\n"},
            None,
            {b"alpha", b"beta", b"gamma"},
        ),
    ],
)
def test_keys_come_from_files_and_environment(tmp_path, files, variable, expected):
    """One a line or comma-separated; comments and blanks are skipped, and of a folder every file is read."""
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        if content.startswith(".."):
            (tmp_path / name).symlink_to(content)
        else:
            (tmp_path / name).write_text(content)

    source = tmp_path / "keys" if "keys" in files else tmp_path if files else None
    assert read_keys(API_KEYS, source, variable) == expected


@pytest.mark.parametrize("content", [None, "", "# nothing\n", "\n \n", "folder"])
def test_a_keys_file_without_keys_is_refused(tmp_path, content):
    """It was given to keep people out; it must not let everybody in. An empty Secret is refused likewise."""
    path = tmp_path / "keys"
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_text(content)

    with pytest.raises(ConfigError, match="--api-keys-file"):
        read_keys(API_KEYS, path, "alpha")


def test_a_full_disk_loses_lines_and_nothing_else():
    """It is reported once, and writing continues when there is room again."""

    class Disk:
        full = True
        written = b""

        def write(self, data):
            if self.full:
                raise OSError(28, "No space left on device")
            self.written += data

        def flush(self):
            pass

    disk = Disk()
    log = AccessLog(disk)
    for full in (True, True, False):
        disk.full = full
        log.write({"status": 200})
        log.flush()

    assert disk.written.count(b"\n") == 1


def test_only_the_owner_reads_an_access_log(tmp_path):
    """It names who asked for what, and when."""
    AccessLog.open(str(tmp_path / "access.log")).close()
    assert stat.S_IMODE((tmp_path / "access.log").stat().st_mode) == 0o600


def test_a_pipe_without_a_reader_is_no_access_log(tmp_path):
    """It is refused at once; opening it would wait for ever."""
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ConfigError, match="--access-log"):
        AccessLog.open(str(tmp_path / "fifo"))


def test_an_access_log_that_cannot_be_opened_is_refused(tmp_path):
    """At start, with the path."""
    with pytest.raises(ConfigError, match="--access-log"):
        AccessLog.open(str(tmp_path / "none" / "access.log"))


async def test_a_decode_pool_that_leaves_during_the_prefill_is_waited_for(harness):
    """The request waits with its prefill done, which is not computed twice if its lease still holds."""
    router, pair, request = await harness.prefilled_without_decode()
    await router.until(lambda: len(router.server.core.queues[Role.DECODE]) == 1)

    harness.write_state(pair)

    assert (await request).status == 200
    assert [len(each.seen) for each in pair] == [1, 1]


async def test_a_decode_pool_that_stays_away_beyond_the_lease_is_waited_for_without_one(harness):
    """Nobody renews the lease here, so the request goes back to the first queue, and is prefilled again in the end."""
    router, pair, request = await harness.prefilled_without_decode(lease_s=0.5)
    await router.until(lambda: len(router.server.core.entry_queue) == 1)
    assert len(router.server.core.queues[Role.DECODE]) == 0
    # Its blocks were given back: the decode worker is asked to tell so, which it still can.
    await router.until(lambda: [each.body["model"] for each in pair[1].seen] == [REFUSED_MODEL])

    harness.write_state(pair)

    assert (await request).status == 200
    assert [each.body.get("max_tokens") for each in pair[0].seen] == [1, 1]
    assert await router.metric("penstock_router_retries_total", reason="queue_timeout") == 1
    assert await router.metric("penstock_router_queue_timeouts_total", model_name="llama") == 0


async def test_a_request_that_may_not_be_tried_again_gets_503_when_its_lease_is_over(harness):
    """With the time to come back, and counted as a queue time-out."""
    config = {"retries": {"maxPerRequest": 0}}
    router, _, request = await harness.prefilled_without_decode(lease_s=0.5, config=config)
    refused = await request
    assert (refused.status, orjson.loads(refused.body)["error"]["code"]) == (503, "queue_timeout")
    assert b"retry-after" in refused.headers
    assert await router.metric("penstock_router_queue_timeouts_total", model_name="llama") == 1
