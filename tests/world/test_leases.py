"""Leases between real processes: a decode worker is killed with prompts in its queue, and nobody else notices for long."""

import json
import signal
import socket
import subprocess
import sys
import urllib.request
from contextlib import ExitStack, contextmanager

SPEED = 20
LEASE_S = 120
CONNECTOR = {"kv_connector_extra_config": {"kv_lease_duration": LEASE_S}}


@contextmanager
def worker(role, *flags):
    """Run one simulated worker; yield its process and URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    argv = [sys.executable, "-m", "penstock.cli", "engine", "serve", "m", "--role", role, "--port", str(port)]
    argv += ["--speed", str(SPEED), "--kv-transfer-config", json.dumps(CONNECTOR), *flags]
    process = subprocess.Popen(argv, stderr=subprocess.DEVNULL)
    try:
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def post(url, **fields):
    """Send a completion; return its body."""
    body = json.dumps({"prompt": "p" * 400, "ignore_eos": True, **fields}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def metric(url, name):
    """Return the sum of a series, or None while the worker does not answer."""
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=5) as page:
            lines = page.read().decode().splitlines()
    except OSError:
        return None
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name + "{"))


def send_and_leave(url, **fields):
    """Send a completion and return the connection, unanswered."""
    body = json.dumps({"prompt": "p" * 400, "ignore_eos": True, **fields}).encode()
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def test_a_killed_decode_workers_prompts_are_reclaimed_and_served_elsewhere(eventually):
    """Renewed while it lives, beyond their first lease; free within a lease of its death; the other worker's text is right."""
    asks = {"do_remote_decode": True, "do_remote_prefill": False}
    with ExitStack() as stack:
        _, prefill = stack.enter_context(worker("prefill"))
        first, doomed = stack.enter_context(worker("decode", "--max-num-seqs", "1"))
        _, other = stack.enter_context(worker("decode"))
        for url in (prefill, doomed, other):
            eventually(lambda url=url: metric(url, "vllm:num_requests_running") is not None, 30, "the worker")
        stack.callback(send_and_leave(doomed, max_tokens=100_000).close)
        eventually(lambda: metric(doomed, "vllm:num_requests_running") == 1, 30, "a busy decode worker")
        for _ in range(3):
            params = post(prefill, max_tokens=1, kv_transfer_params=asks)["kv_transfer_params"]
            stack.callback(send_and_leave(doomed, max_tokens=4, kv_transfer_params=params).close)
        renewals = "penstock_engine_lease_renewals_total"
        eventually(lambda: metric(prefill, renewals) >= 9, 60, "three renewals of each lease")
        assert metric(prefill, "penstock_engine_leases") == 3
        first.send_signal(signal.SIGKILL)
        eventually(lambda: metric(prefill, "penstock_engine_leases") == 0, 60, "the end of the leases")
        assert metric(prefill, "vllm:nixl_num_kv_expired_reqs_total") == 3
        assert metric(prefill, "vllm:kv_cache_usage_perc") == 0
        params = post(prefill, max_tokens=1, kv_transfer_params=asks)["kv_transfer_params"]
        served = post(other, max_tokens=4, kv_transfer_params=params)
        assert served["choices"][0]["text"] == post(prefill, max_tokens=4)["choices"][0]["text"]
