"""The example of a client that backs off, before a saturated router."""

import asyncio
import importlib.util
import random
import sys
import time
from pathlib import Path

import pytest

FILE = Path(__file__).parents[3] / "docs" / "examples" / "backoff_client.py"


@pytest.fixture
def client():
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("backoff_client", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


async def test_it_waits_as_asked_and_is_served_once_there_is_room(harness, client):
    """Three rejections, each pause at least Retry-After; then the worker drains, and the fourth try is served."""
    worker = await harness.worker("aggregated")
    worker.kv_usage = "0.95"
    config = {"admission": {"mode": "token-capacity", "retryAfterSeconds": 4}}
    router = await harness.router(worker, config=config)
    busy = router.server.core.busy[router.server.core.entry]
    await router.until(lambda: busy.is_any)
    pauses = []

    def sleep(seconds):
        pauses.append(seconds)
        if len(pauses) == 3:
            worker.kv_usage = "0.1"
            while busy.is_any:
                time.sleep(0.01)

    body = {"model": "llama", "prompt": "x", "max_tokens": 1}
    answer = await asyncio.to_thread(
        client.send_with_retry,
        lambda: client.post(f"{router.url}/v1/completions", body),
        sleep=sleep,
        rng=random.Random(1),
    )
    assert answer.status == 200
    assert len(pauses) == 3
    assert all(4 <= each <= 6 for each in pauses)
    assert len(set(pauses)) == 3
    assert len(worker.seen) == 1


def test_without_a_header_the_pause_doubles(client):
    """1, 2, 4 … 60 seconds, and a random part."""
    rng = random.Random(2)
    for tries, least_s in ((1, 1), (2, 2), (3, 4), (7, 60), (20, 60)):
        assert least_s <= client.pause_s(tries, None, rng) <= least_s + max(1, least_s / 2)
