"""Leases between real processes: a decode worker is killed with prompts in its queue, and no client ends for long."""

import json
import signal
import socket
from contextlib import ExitStack

import pytest

SPEED = 20
LEASE_S = 120
CONNECTOR = {"kv_connector_extra_config": {"kv_lease_duration": LEASE_S}}
ASKED = {"prompt": "p" * 400, "ignore_eos": True}


class Worker:
    """One simulated worker."""

    def __init__(self, world, port, role, *flags):
        own = (
            "--role",
            role,
            "--port",
            port,
            "--speed",
            SPEED,
            "--kv-transfer-config",
            json.dumps(CONNECTOR),
        )
        self.process = world.start("engine", "serve", "m", *own, *flags, name=f"{role}-{port}")
        self._world, self._port, self._url = world, port, f"http://127.0.0.1:{port}"

    def metric(self, name):
        """Return the sum of a series, or None while the worker does not answer."""
        try:
            return sum(self._world.samples(name, self._url).values())
        except OSError:
            return None

    def complete(self, **fields):
        """Send a completion; return its body."""
        return self._world.complete(self._url, **ASKED, **fields)

    def send_and_leave(self, **fields):
        """Send a completion and return the connection, unanswered."""
        body = json.dumps({**ASKED, **fields}).encode()
        connection = socket.create_connection(("127.0.0.1", self._port))
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        return connection


@pytest.fixture
def worker(world, free_port):
    """Return a function that starts a worker."""
    return lambda role, *flags: Worker(world, free_port(), role, *flags)


def test_a_killed_decode_workers_prompts_are_reclaimed_and_served_elsewhere(worker, eventually):
    """Renewed while it lives, beyond their first lease; free within a lease of its death; the other worker's text is right."""
    remote = {"do_remote_decode": True, "do_remote_prefill": False}
    running, leases = "vllm:num_requests_running", "penstock_engine_leases"
    prefill, doomed, other = worker("prefill"), worker("decode", "--max-num-seqs", "1"), worker("decode")
    for each in (prefill, doomed, other):
        eventually(lambda each=each: each.metric(running) is not None, "the worker")
    with ExitStack() as stack:
        stack.callback(doomed.send_and_leave(max_tokens=100_000).close)
        eventually(lambda: doomed.metric(running) == 1, "a busy decode worker")
        for _ in range(3):
            params = prefill.complete(max_tokens=1, kv_transfer_params=remote)["kv_transfer_params"]
            stack.callback(doomed.send_and_leave(max_tokens=4, kv_transfer_params=params).close)
        renewals = "penstock_engine_lease_renewals_total"
        eventually(lambda: prefill.metric(renewals) >= 9, "three renewals of each lease")
        assert prefill.metric(leases) == 3
        doomed.process.send_signal(signal.SIGKILL)
        eventually(lambda: prefill.metric(leases) == 0, "the end of the leases")
        assert prefill.metric("vllm:nixl_num_kv_expired_reqs_total") == 3
        assert prefill.metric("vllm:kv_cache_usage_perc") == 0
        params = prefill.complete(max_tokens=1, kv_transfer_params=remote)["kv_transfer_params"]
        served = other.complete(max_tokens=4, kv_transfer_params=params)
        assert served["choices"][0]["text"] == prefill.complete(max_tokens=4)["choices"][0]["text"]
