"""KV leases between real vLLM workers: renewed by heartbeats, ended without them, as the simulated engine has them."""

import re
import signal
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise

import pytest
from endpoint import GREEDY, LEASE_S, SENTENCE
from lease_sequence import simulated_lease

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

INTERVAL_S = LEASE_S // 6
PROMPT = SENTENCE * 12
EXPIRED = "vllm:nixl_num_kv_expired_reqs_total"
BLOCKERS = 12
"""Streams of 1,900 tokens that decode makes one after the other, on a fast machine in two minutes."""


@contextmanager
def busy(decode):
    """Keep a worker busy with long streams, so that whoever comes now waits; the streams are left afterwards."""
    with ExitStack() as stack:
        for first in range(BLOCKERS):
            stream = decode.client().completions.create(
                model="tiny",
                prompt=[20 + first, 5],
                max_tokens=1900,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            stack.callback(stream.close)
        decode.until(lambda: decode.metric("vllm:num_requests_running") == 1)
        yield


def handed_over(prefill, prompt):
    """Have a prompt prefilled; return its KV transfer and about when the lease began."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1}
    answer = prefill.post(**body, kv_transfer_params={"do_remote_decode": True, "do_remote_prefill": False})
    return answer["kv_transfer_params"], time.perf_counter()


def renewals(prefill, request_id):
    """Return (lease's end before, new end by the heartbeat, end after) for each heartbeat, as the worker wrote them."""
    found = re.findall(
        rf"lease for request {re.escape(request_id)} by (\d+)s \(old_expiry=([\d.]+), new_expiry=([\d.]+)\)",
        prefill.log.read_text(),
    )
    assert all(int(each[0]) == LEASE_S * 2 // 3 for each in found)
    return [(float(old), float(new), max(float(old), float(new))) for _, old, new in found]


@pytest.fixture
def quiet(disaggregated, workers):
    """A prefill worker that holds nothing, and a decode worker; they know each other."""
    prefill, decode = workers["prefill"], workers["decode"]
    prefill.until(lambda: prefill.metric("vllm:kv_cache_usage_perc") == 0)
    decode.until(lambda: decode.metric("vllm:num_requests_running") == 0)
    # An idle engine counts an expired lease only with its next steps.
    prefill.post(model="tiny", prompt=PROMPT, max_tokens=4)
    return prefill, decode


def test_heartbeats_renew_a_lease_and_it_ends_without_them(quiet):
    """A request waits in decode's queue for longer than its lease; then decode stops.

    Leases of the same terms in the simulated engine end within one heartbeat of it, at each heartbeat and at last.
    """
    prefill, decode = quiet
    prompt = f"Read too late, if at all. {PROMPT}"
    expired = prefill.metric(EXPIRED)
    with busy(decode):
        params, granted_s = handed_over(prefill, prompt)
        request_id = params["remote_request_id"]

        def ask():
            with suppress(OSError):
                decode.post(prompt=prompt, **GREEDY, kv_transfer_params=params, timeout_s=900)

        threading.Thread(target=ask, daemon=True).start()
        tracked_s = time.perf_counter() - granted_s
        prefill.until(lambda: time.perf_counter() > granted_s + LEASE_S + 2 * INTERVAL_S)
        assert prefill.metric(EXPIRED) == expired
        assert prefill.metric("vllm:kv_cache_usage_perc") > 0
        decode.signal_all(signal.SIGSTOP)
        silent_s = time.perf_counter() - granted_s
        try:
            prefill.until(lambda: prefill.metric(EXPIRED) == expired + 1)
            reclaimed_s = time.perf_counter() - granted_s
        finally:
            decode.signal_all(signal.SIGCONT)

    seen = renewals(prefill, request_id)
    began_s = seen[0][0] - LEASE_S
    real = [(new - LEASE_S * 2 // 3 - began_s, end - began_s) for _, new, end in seen]
    simulated = simulated_lease(LEASE_S, tracked_s=tracked_s, silent_from_s=silent_s)
    assert real[-1][1] > LEASE_S + INTERVAL_S
    # Heartbeats go out between engine steps, which a busy machine makes long.
    beat_s = max([INTERVAL_S, *(later - earlier for (earlier, _), (later, _) in pairwise(real))])
    assert beat_s < LEASE_S * 2 // 3
    for at_s, end_s in real:
        ends = [end for heartbeat_s, end in simulated.expiries if heartbeat_s <= at_s + beat_s]
        assert end_s == pytest.approx(ends[-1], abs=beat_s)
    assert len(simulated.expiries) * INTERVAL_S / beat_s - 1 <= len(real) <= len(simulated.expiries) + 1
    assert reclaimed_s == pytest.approx(simulated.reclaimed_s, abs=beat_s)


def test_a_queue_longer_than_the_lease_loses_nothing(quiet, disaggregated, workers):
    """Through the router: the text is right, nothing was prefilled again and no lease expired."""
    prefill, decode = quiet
    expected = workers["aggregated"].post(prompt=PROMPT, **GREEDY)["choices"][0]["text"]
    before = prefill.metric(EXPIRED), disaggregated.metric("penstock_router_retries_total")
    texts = []

    def ask():
        texts.append(disaggregated.post(prompt=PROMPT, **GREEDY)["choices"][0]["text"])

    client = threading.Thread(target=ask)
    with busy(decode):
        client.start()
        prefill.until(lambda: prefill.metric("vllm:kv_cache_usage_perc") > 0)
        time.sleep(LEASE_S * 1.5)
        assert prefill.metric("vllm:kv_cache_usage_perc") > 0
    client.join(timeout=120)

    assert texts == [expected]
    assert (prefill.metric(EXPIRED), disaggregated.metric("penstock_router_retries_total")) == before


def test_a_refused_request_frees_the_blocks_at_once(quiet):
    """Decode that refuses a KV transfer, here for a model that nobody serves, tells prefill; nothing expires."""
    prefill, decode = quiet
    before = prefill.metric(EXPIRED)
    params, _ = handed_over(prefill, PROMPT)
    assert prefill.metric("vllm:kv_cache_usage_perc") > 0

    with pytest.raises(OSError, match="404"):
        decode.post(model="penstock-kv-release", prompt="x", max_tokens=1, kv_transfer_params=params)

    prefill.until(lambda: prefill.metric("vllm:kv_cache_usage_perc") == 0, within_s=LEASE_S / 2)
    assert prefill.metric(EXPIRED) == before
