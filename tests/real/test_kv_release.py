"""A client that leaves between prefill and decode: vLLM's prefill worker frees its blocks then, not at the lease's end."""

import signal
from contextlib import closing
from http.client import HTTPConnection
from urllib.parse import urlsplit

import orjson
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PROMPT = "Water that was let go does not come back over the weir. " * 20
EXPIRED = "vllm:nixl_num_kv_expired_reqs_total"
AFTER_EXPIRY = "vllm:nixl_num_notifications_after_expiry_total"
RELEASES = "penstock_router_kv_releases_total"
USED = "vllm:kv_cache_usage_perc"


def _sent(router, body):
    """Send a request without waiting for its answer; the client leaves by closing the connection."""
    connection = HTTPConnection(urlsplit(router.url).netloc, timeout=60)
    connection.request("POST", "/v1/completions", orjson.dumps(body), {"content-type": "application/json"})
    return connection


def _name_of(router, role):
    (name,) = (
        each["name"] for each in orjson.loads(router.get("/workers"))["workers"] if each["role"] == role
    )
    return name


def _prefilled(router, prefill, body):
    """Return a client whose prompt is prefilled and waits in the router: decode was drained during the prefill."""
    decode = _name_of(router, "decode")
    prefill.signal_all(signal.SIGSTOP)
    try:
        client = _sent(router, body)
        inflight = "penstock_router_worker_inflight_requests"
        router.until(lambda: router.metric(inflight, role="prefill") == 1)
        router.post(f"/workers/{decode}/drain")
    finally:
        prefill.signal_all(signal.SIGCONT)
    router.until(lambda: router.metric("penstock_router_decode_queue_requests") == 1)
    return client


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_between_prefill_and_decode_frees_the_blocks(disaggregated, workers, stream):
    """No lease expires: the blocks are free because decode refused the router's message and told prefill."""
    router, prefill = disaggregated, workers["prefill"]
    prefill.until(lambda: prefill.metric(USED) == 0)
    body = {"model": "tiny", "prompt": f"{stream}: {PROMPT}", "max_tokens": 24, "stream": stream}
    before = (
        prefill.metric(EXPIRED),
        prefill.metric(AFTER_EXPIRY),
        router.metric(RELEASES, outcome="released"),
    )
    try:
        with closing(_prefilled(router, prefill, body)):
            prefill.until(lambda: prefill.metric(USED) > 0)
            assert router.metric(RELEASES) == before[2]

        router.until(lambda: router.metric(RELEASES, outcome="released") == before[2] + 1)
        prefill.until(lambda: prefill.metric(USED) == 0)
    finally:
        router.post(f"/workers/{_name_of(router, 'decode')}/undrain")
    assert (prefill.metric(EXPIRED), prefill.metric(AFTER_EXPIRY)) == before[:2]
    expected = workers["aggregated"].post(**{**body, "stream": False, "temperature": 0})
    answer = router.post(**{**body, "stream": False, "temperature": 0})
    assert answer["choices"][0]["text"] == expected["choices"][0]["text"]
