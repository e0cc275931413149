"""A client that leaves between prefill and decode: vLLM's prefill worker frees its blocks then, not at the lease's end."""

import signal
import sys
from contextlib import closing
from http.client import HTTPConnection
from urllib.parse import urlsplit

import orjson
import pytest
from endpoint import LEASE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

PROMPT = "Water that was let go does not come back over the weir. " * 20
EXPIRED = "vllm:nixl_num_kv_expired_reqs_total"
AFTER_EXPIRY = "vllm:nixl_num_notifications_after_expiry_total"
RELEASES = "penstock_router_kv_releases_total"
USED = "vllm:kv_cache_usage_perc"


class ListedPair:
    """The pair behind a router that reads their states from a statefile, where decode can be away for a while."""

    def __init__(self, deployment, workers):
        self._path = deployment.folder / "pair.json"
        self._workers = {role: workers[role].url for role in ("prefill", "decode")}
        self.list_decode("ready")
        serve = [
            sys.executable,
            "-m",
            "penstock.cli",
            "router",
            "serve",
            "--port",
            "{port}",
            "--model",
            "tiny",
        ]
        flags = ["--kv-lease", str(LEASE_S), "--discovery", str(self._path)]
        self.router = deployment.start("router-listed", [*serve, *flags])
        self.router.wait_for("/ready")

    def list_decode(self, state):
        """Say whether decode takes requests."""
        entries = {
            role: {"role": role, "url": url, "state": state if role == "decode" else "ready"}
            for role, url in self._workers.items()
        }
        new = self._path.with_suffix(".new")
        new.write_bytes(orjson.dumps({"arbiter": {"pid": 1}, **entries}))
        new.replace(self._path)

    def decode_takes_requests(self):
        """Return whether the router knows it so."""
        workers = orjson.loads(self.router.get("/workers"))["workers"]
        return any((each["role"], each["state"]) == ("decode", "ready") for each in workers)


@pytest.fixture(scope="module")
def listed(deployment, disaggregated, workers):
    """The pair, which has exchanged a prompt before."""
    return ListedPair(deployment, workers)


def _sent(router, body):
    """Send a request without waiting for its answer; the client leaves by closing the connection."""
    connection = HTTPConnection(urlsplit(router.url).netloc, timeout=60)
    connection.request("POST", "/v1/completions", orjson.dumps(body), {"content-type": "application/json"})
    return connection


def _prefilled(listed, prefill, body):
    """Return a client whose prompt is prefilled and waits in the router, because decode is away since then."""
    router = listed.router
    prefill.signal_all(signal.SIGSTOP)
    try:
        client = _sent(router, body)
        router.until(lambda: router.metric("penstock_router_worker_inflight_requests", role="prefill") == 1)
        listed.list_decode("starting")
        router.until(lambda: not listed.decode_takes_requests())
    finally:
        prefill.signal_all(signal.SIGCONT)
    router.until(lambda: router.metric("penstock_router_decode_queue_requests") == 1)
    return client


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_between_prefill_and_decode_frees_the_blocks(listed, workers, stream):
    """No lease expires: the blocks are free because decode refused the router's message and told prefill."""
    router, prefill = listed.router, workers["prefill"]
    prefill.until(lambda: prefill.metric(USED) == 0)
    body = {"model": "tiny", "prompt": f"{stream}: {PROMPT}", "max_tokens": 24, "stream": stream}
    expired, late = prefill.metric(EXPIRED), prefill.metric(AFTER_EXPIRY)
    released = router.metric(RELEASES, outcome="released")
    try:
        with closing(_prefilled(listed, prefill, body)):
            prefill.until(lambda: prefill.metric(USED) > 0)
            assert router.metric(RELEASES) == released

        router.until(lambda: router.metric(RELEASES, outcome="released") == released + 1)
        prefill.until(lambda: prefill.metric(USED) == 0)
    finally:
        listed.list_decode("ready")
    assert (prefill.metric(EXPIRED), prefill.metric(AFTER_EXPIRY)) == (expired, late)


def test_what_was_released_can_be_asked_for_again(listed, workers):
    """The next client of the same prompt gets the text of one worker alone."""
    body = {"model": "tiny", "prompt": f"False: {PROMPT}", "max_tokens": 24, "temperature": 0}
    listed.router.until(listed.decode_takes_requests)

    answer = listed.router.post(**body)

    assert answer["choices"][0]["text"] == workers["aggregated"].post(**body)["choices"][0]["text"]
