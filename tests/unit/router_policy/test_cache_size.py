"""What is remembered of a worker is as much as its KV cache holds."""

import pytest

from penstock.router.core.dispatch_queue import DispatchQueue
from penstock.router.core.waiting import CACHE_BLOCKS, QueueSettings
from penstock.router.policy.arrival import KeyDensity
from penstock.router.policy.policies import PrefixCost
from penstock.router.policy.prefixes import Prefix, PrefixIndex
from penstock.router.policy.routing_policy import Arrival, WorkerLoad


def queue_of(capacity_tokens):
    """One worker of a known or unknown size."""
    load = WorkerLoad("a")
    load.kv_capacity_tokens = capacity_tokens
    queue = DispatchQueue(PrefixCost(), QueueSettings())
    queue.set_workers([load], 0.0)
    return queue


def test_a_small_cache_is_not_taken_for_a_large_one():
    """20,480 tokens are 40 blocks: of five prompts of ten blocks the first is forgotten, as the worker has."""
    queue = queue_of(20_480)
    queue.workers.fit_cache("a")
    for item in range(5):
        queue.submit(item, Arrival(tuple(range(100 * item, 100 * item + 10)), 5120), float(item))
    queue.workers.fit_cache("a")
    index = queue.workers.index_of("a")
    assert index.capacity == 40
    assert index.held(Prefix(tuple(range(10)))) < 10
    assert index.held(Prefix(tuple(range(400, 410)))) == 10


def test_an_unknown_size_is_assumed():
    """And a worker that is not there is no error."""
    queue = queue_of(None)
    queue.workers.fit_cache("a")
    queue.workers.fit_cache("b")
    assert queue.workers.index_of("a").capacity == CACHE_BLOCKS


def test_short_chats_have_more_keys_to_a_token():
    """Eight keys for 500 tokens each: a cache of 100,000 tokens holds 1,600 keys, and a few less at first."""
    density = KeyDensity()
    assert density.keys(100_000) == pytest.approx(195, abs=1)
    for _ in range(3000):
        density.learn(8, 500)
    density.learn(0, 500)
    density.learn(8, 0)
    assert density.keys(100_000) == pytest.approx(1600, rel=0.01)
    assert density.keys(1) == 2


def test_what_is_too_much_is_forgotten_at_once():
    """The least recently used first."""
    index = PrefixIndex(100)
    for prompt in range(5):
        index.use(Prefix(tuple(range(100 * prompt, 100 * prompt + 20))))
    index.resize(40)
    assert index.count == 40
    assert index.held(Prefix(tuple(range(400, 420)))) == 20
    assert index.held(Prefix(tuple(range(20)))) == 0
