"""`penstock load` from arguments to output, against a fake server in the background."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time

import orjson
import pytest
from click.testing import CliRunner

from penstock.cli.load import load
from penstock.core.errors import ConfigError
from penstock.core.http.server import HttpServer


@pytest.fixture
def served(fake_server_class):
    """The fake server in a thread of its own, because the command runs its own event loop."""
    fake = fake_server_class()
    loop = asyncio.new_event_loop()
    server = HttpServer(fake.handle)
    loop.run_until_complete(server.start("127.0.0.1", 0))
    fake.url = f"http://127.0.0.1:{server.port}"
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield fake
    asyncio.run_coroutine_threadsafe(server.close(grace_s=0), loop).result(5)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(5)
    loop.close()


@pytest.mark.parametrize(
    ("router_speed", "time_scales", "named"),
    [
        (20.0, {}, "the graph"),
        (1.0, {"prefill-0": 1.0, "decode-0": 20.0}, "decode-0"),
        (None, {"": 20.0}, "the server"),
    ],
    ids=["graph", "worker_behind_a_router", "worker_without_a_router"],
)
def test_what_runs_at_another_speed_is_not_measured(served, mooncake_file, router_speed, time_scales, named):
    """A forgotten --speed would make every figure wrong; nothing is sent, and the message has the right one."""
    served.speed, served.time_scales = router_speed, time_scales
    answer = CliRunner().invoke(load, ["--trace", str(mooncake_file), "--url", served.url])
    assert isinstance(answer.exception, ConfigError)
    assert f"--speed: 1, but {named} at {served.url}" in str(answer.exception)
    assert "runs at 20" in str(answer.exception)
    assert "give --speed 20" in str(answer.exception) or named != "the graph"
    assert served.bodies == []


def test_a_dry_run_sends_nothing(mooncake_file):
    """It needs no server and says what would be sent."""
    arguments = [
        "--trace",
        str(mooncake_file),
        "--dry-run",
        "--max-input-tokens",
        "600",
        "--on-long",
        "truncate",
    ]
    result = CliRunner().invoke(load, [*arguments, "--spread", "poisson", "--rate", "2"])

    shown = orjson.loads(result.stdout)
    assert shown["dry_run"] is True
    assert shown["trace"]["truncated_prompts"] == 2
    assert shown["trace"]["input_tokens"] == 600 + 512 + 600 + 10 + 600
    assert shown["trace"]["mean_rate_rps"] == pytest.approx(2.0)
    assert shown["settings"]["spread"] == "poisson"


def test_a_run_without_a_good_answer_exits_1(served, azure_file):
    """Scripts can tell that nothing worked."""

    async def refuse(body, responder):
        responder.send(429, b'{"error":{"message":"busy"}}')

    served.script = refuse

    result = CliRunner().invoke(load, ["--trace", str(azure_file), "--url", served.url, "--speed", "500"])

    assert result.exit_code == 1
    assert "3 rejected" in result.output
    assert "errors: http_429 3" in result.output


def test_ctrl_c_prints_what_was_measured(served, mooncake_file):
    """SIGINT ends the replay with a summary marked partial and status 1."""
    arguments = ["--trace", str(mooncake_file), "--url", served.url, "--rate", "0.02"]
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock.cli", "load", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    while not served.bodies:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate()

    assert process.returncode == 1, err
    assert b"PARTIAL" in out
    assert b"4 requests not sent" in out
    assert b"Traceback" not in err
