"""Busy workers are passed over when a request is placed, and for no longer."""

import pytest

from penstock.api import Role, RouterConfig
from penstock.router.core.build import TOGETHER, build_router
from penstock.router.core.worker import WorkerSpec
from penstock.router.policy.routing_policy import Arrival

CHAIN = tuple(range(1, 9))


def specs(names, draining=""):
    """Workers, of which one may leave."""
    return [
        WorkerSpec(each, Role.AGGREGATED, "http://x", supervised=True, draining=each == draining)
        for each in names
    ]


@pytest.fixture
def core():
    """``a`` holds a prompt's 4,096 tokens and computes 5,000 others, above its threshold; the prompt waits for ``b``, not ``c``."""
    section = {
        "prefillQueue": {"workerTokens": 1000},
        "admission": {"mode": "token-capacity", "activePrefillTokensThreshold": 3000},
    }
    core = build_router(RouterConfig.model_validate(section), TOGETHER)
    core.set_workers(specs("a"), 0.0)
    (first,) = core.acquire("first", Role.AGGREGATED, Arrival(CHAIN, 4096), 0.0)
    core.prefilled(first, 1.0)
    core.release(first, 1.0)
    (load,) = core.acquire("load", Role.AGGREGATED, Arrival((50,), 5000), 1.0)
    core.set_workers(specs("abc"), 1.0)
    for name, tokens, others in (("b", 2000, "ac"), ("c", 2500, "ab")):
        core.acquire(name, Role.AGGREGATED, Arrival((ord(name),), tokens, frozenset(others)), 1.0)
    core.acquire("r", Role.AGGREGATED, Arrival(CHAIN, 4096), 2.0)
    core.load = load
    assert core.entry_queue.worker_of("r") == "b"
    return core


def test_a_request_whose_worker_drains_goes_to_its_prefix_once_that_is_free(core):
    """It was passed over for being busy then, which is not a reason now."""
    core.prefilled(core.load, 3.0)
    core.release(core.load, 3.0)
    core.set_workers(specs("abc", draining="b"), 3.0)

    assert core.entry_queue.worker_of("r") == "a"


def test_a_worker_that_has_no_room_is_passed_over_again(core):
    """It has refused a request for lack of room, whatever waits for it."""
    core.prefilled(core.load, 3.0)
    core.release(core.load, 3.0)
    core.refused_at_capacity(core.pool.get("a"), 3.0)
    core.set_workers(specs("abc", draining="b"), 3.0)

    assert core.entry_queue.worker_of("r") == "c"
