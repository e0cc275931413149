"""How many replicas carry a load: values by hand, what must hold of any answer."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import ConfigError
from penstock.performance.capacity import Load, UnreachableError, plan_capacity
from penstock.performance.recommend import Targets
from penstock.performance.sweep import Sweep

TARGETS = Targets(isl=2000, osl=2000, ttft_s=0.5, itl_s=0.02)


def test_replicas_by_hand(engine):
    """10 requests/s of 210 ms keep 2.1 prefill workers busy: 3 at least, at whose 70% the 99% of TTFT needs a fourth.

    At ITL 20 ms one engine runs 16 of 3,000 tokens; 0.2 requests/s · 2,000 tokens · ITL(5.6) 12.8 ms are 5.1 in flight.
    """
    found = plan_capacity(Sweep((engine(),)), TARGETS, Load(10.0))

    assert (found.prefill.gpus, found.prefill.replicas) == (1, 4)
    assert found.prefill.binds == "waiting, at the 99% of TTFT"
    assert found.prefill.latency_s <= 0.5
    mean = 16 * found.decode.utilisation
    assert mean == pytest.approx(10 / found.decode.replicas * 2000 * (0.01 + 0.0005 * mean), rel=0.02)
    assert found.decode.binds == "ITL"
    assert found.gpus == found.prefill.replicas + found.decode.replicas


def test_the_kv_cache_binds_where_no_itl_does(engine):
    """Any ITL will do: the last batch that was measured ends it."""
    found = plan_capacity(Sweep((engine(),)), replace(TARGETS, itl_s=5.0), Load(10.0))

    assert found.decode.binds == "the KV cache, or the largest batch"


def test_the_size_of_fewer_gpus_wins(two_sizes):
    """TP1 answers more per GPU; a TTFT that it cannot hold takes TP2."""
    slow = plan_capacity(two_sizes, TARGETS, Load(5.0))
    fast = plan_capacity(two_sizes, replace(TARGETS, ttft_s=0.19), Load(5.0))

    assert (slow.prefill.gpus, fast.prefill.gpus) == (1, 2)


def test_an_aggregated_pool_does_both(engine):
    """It takes no fewer replicas than either phase alone, and its prompts slow its tokens."""
    sweep = Sweep((engine(),))
    apart = plan_capacity(sweep, TARGETS, Load(2.0))
    together = plan_capacity(replace(sweep, is_aggregated=True), TARGETS, Load(2.0))

    assert together.gpus == together.prefill.replicas
    assert together.prefill.replicas >= max(apart.prefill.replicas, apart.decode.replicas)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"itl_s": 0.005}, r"ITL 5 ms: one request alone takes 10.5 ms on TP1"),
        ({"ttft_s": 0.2}, r"TTFT 200 ms: without any wait it is 231.0 ms on TP1"),
    ],
)
@pytest.mark.parametrize("is_aggregated", [False, True])
def test_what_no_number_of_replicas_holds(engine, changed, said, is_aggregated):
    """Names the target, the nearest and the size."""
    sweep = Sweep((engine(),), is_aggregated=is_aggregated)

    with pytest.raises(UnreachableError, match=said):
        plan_capacity(sweep, replace(TARGETS, **changed), Load(1.0))


def test_a_rate_beyond_reason_is_refused(engine):
    """Before it counts to infinity."""
    with pytest.raises(ConfigError, match="--rps"):
        plan_capacity(Sweep((engine(),)), TARGETS, Load(1e9))


@given(rps=st.floats(0.01, 50), ttft_s=st.floats(0.3, 3), itl_s=st.floats(0.014, 0.05))
def test_more_load_or_tighter_targets_never_take_fewer_gpus(engine, rps, ttft_s, itl_s):
    """Monotone in all three."""
    sweep, targets = Sweep((engine(),)), replace(TARGETS, ttft_s=ttft_s, itl_s=itl_s)
    gpus = plan_capacity(sweep, targets, Load(rps)).gpus

    assert plan_capacity(sweep, targets, Load(rps * 1.5)).gpus >= gpus
    assert plan_capacity(sweep, replace(targets, ttft_s=ttft_s * 2), Load(rps)).gpus <= gpus
    assert plan_capacity(sweep, replace(targets, itl_s=itl_s * 2), Load(rps)).gpus <= gpus
