"""How DualMap chooses between candidates with equal hits."""

import pytest

from penstock_router.policy.dualmap import DualMap, DualMapSettings
from penstock_router.policy.instance import Placed
from penstock_router.policy.keys import Prefix
from penstock_router.policy.placement import Placement, PlacementSettings
from penstock_router.policy.placer import Arrival


def idle_pair(*loads, remembered):
    """Return DualMap's queues of a and b, with prompts of so many tokens running; a remembers blocks."""
    queues = Placement(
        DualMap(DualMapSettings(adaptive_prefix=False)), PlacementSettings(tokens_per_s=1000.0)
    )
    queues.set_instances(("a", "b"), 0.0)
    for name, tokens in zip("ab", loads, strict=True):
        queues._instances[name].running_tokens = tokens
    queues._instances["a"].index.use(Prefix(tuple(range(1, remembered + 1))))
    return queues


@pytest.mark.parametrize(
    ("loads", "remembered", "expected"),
    [
        pytest.param((0, 0), 1, "b", id="idle: the one that remembers less"),
        pytest.param((0, 512), 1, "b", id="half of its own 1,024 tokens apart: as good"),
        pytest.param((0, 513), 1, "a", id="further apart: the less loaded"),
        pytest.param((513, 0), 0, "b", id="further apart the other way"),
        pytest.param((100, 0), 0, "b", id="equal memories: the less loaded"),
    ],
)
def test_dualmap_fills_idle_caches_evenly(loads, remembered, expected):
    """Nothing cached on either, and nobody waits: what an instance remembers counts before a small load."""
    queues = idle_pair(*loads, remembered=remembered)
    queues.submit("x", Arrival((1001, 1002), 1024), 0.0)

    assert "x" in queues._instances[expected].queue


def test_dualmap_looks_at_load_alone_where_requests_wait():
    """A queue is a queue: memory does not count any more, however near the loads are."""
    queues = idle_pair(0, 400, remembered=3)
    queues._instances["b"].put(Placed("w", Arrival((2001,), 100), 0.0, uncached=100))
    queues.submit("x", Arrival((1001, 1002), 1024), 0.0)

    assert "x" in queues._instances["a"].queue
