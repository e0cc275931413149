"""How many replicas carry a load, and how long requests wait: values by hand, and what must hold of any answer."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import ConfigError
from penstock.performance.capacity import (
    OfferedLoad,
    UnreachableError,
    most_in_flight,
    plan_capacity,
    wait_probability,
    wait_quantile_s,
)
from penstock.performance.recommend import Targets
from penstock.performance.sweep import Sweep

TARGETS = Targets(isl=2000, osl=2000, ttft_s=0.5, itl_s=0.02)


def test_replicas_by_hand(engine):
    """10 requests/s of 210 ms keep 2.1 prefill workers busy: 3 at least, at whose 70% the 99% of TTFT needs a fourth.

    At ITL 20 ms one engine runs 16 of 3,000 tokens; 0.2 requests/s · 2,000 tokens · ITL(5.6) 12.8 ms are 5.1 in flight.
    """
    found = plan_capacity(Sweep((engine(),)), TARGETS, OfferedLoad(10.0))

    assert (found.prefill.gpus, found.prefill.replicas) == (1, 4)
    assert found.prefill.binds == "waiting, at the 99% of TTFT"
    assert found.prefill.latency_s <= 0.5
    mean = 16 * found.decode.utilisation
    assert mean == pytest.approx(10 / found.decode.replicas * 2000 * (0.01 + 0.0005 * mean), rel=0.02)
    assert found.decode.binds == "ITL"
    assert found.gpus == found.prefill.replicas + found.decode.replicas


def test_what_binds_and_which_size_follows_from_the_targets(engine, two_sizes):
    """Where any ITL will do, the last batch measured ends it. TP1 answers more per GPU; a tight TTFT takes TP2."""
    any_itl = plan_capacity(Sweep((engine(),)), replace(TARGETS, itl_s=5.0), OfferedLoad(10.0))
    slow = plan_capacity(two_sizes, TARGETS, OfferedLoad(5.0))
    fast = plan_capacity(two_sizes, replace(TARGETS, ttft_s=0.19), OfferedLoad(5.0))

    assert any_itl.decode.binds == "the KV cache, or the largest batch"
    assert (slow.prefill.gpus, fast.prefill.gpus) == (1, 2)


def test_an_aggregated_pool_does_both(engine):
    """It takes no fewer replicas than either phase alone, and its prompts slow its tokens."""
    sweep = Sweep((engine(),))
    apart = plan_capacity(sweep, TARGETS, OfferedLoad(2.0))
    together = plan_capacity(replace(sweep, is_aggregated=True), TARGETS, OfferedLoad(2.0))

    assert together.gpus == together.prefill.replicas
    assert together.prefill.replicas >= max(apart.prefill.replicas, apart.decode.replicas)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"itl_s": 0.005}, r"ITL 5 ms: one request alone takes 10.5 ms on TP1"),
        ({"ttft_s": 0.2}, r"TTFT 200 ms: without any wait it is (210.0|220.5) ms on TP1"),
    ],
)
@pytest.mark.parametrize("is_aggregated", [False, True])
def test_what_no_number_of_replicas_holds(engine, changed, said, is_aggregated):
    """Names the target, the nearest and the size; apart, a first token takes a step of decode more."""
    sweep = Sweep((engine(),), is_aggregated=is_aggregated)

    with pytest.raises(UnreachableError, match=said):
        plan_capacity(sweep, replace(TARGETS, **changed), OfferedLoad(1.0))


@given(rps=st.floats(0.01, 50), ttft_s=st.floats(0.3, 3), itl_s=st.floats(0.014, 0.05))
def test_more_load_or_tighter_targets_never_take_fewer_gpus(engine, rps, ttft_s, itl_s):
    """Monotone in all three."""
    sweep, targets = Sweep((engine(),)), replace(TARGETS, ttft_s=ttft_s, itl_s=itl_s)
    gpus = plan_capacity(sweep, targets, OfferedLoad(rps)).gpus

    assert plan_capacity(sweep, targets, OfferedLoad(rps * 1.5)).gpus >= gpus
    assert plan_capacity(sweep, replace(targets, ttft_s=ttft_s * 2), OfferedLoad(rps)).gpus <= gpus
    assert plan_capacity(sweep, replace(targets, itl_s=itl_s * 2), OfferedLoad(rps)).gpus <= gpus
    with pytest.raises(ConfigError, match="--rps"):
        plan_capacity(sweep, targets, OfferedLoad(1e9))


@pytest.mark.parametrize(
    ("servers", "load", "expected"),
    [
        (1, 0.5, 0.5),
        (2, 1.0, 1 / 3),
        (3, 2.0, 4 / 9),
        (2, 1.6, 0.7111),
        (10, 8.0, 0.4092),
        (1, 0.0, 0.0),
        (2, 2.0, 1.0),
        (2, 5.0, 1.0),
    ],
)
def test_erlangs_c(servers, load, expected):
    """Textbook values: M/M/1 waits with its utilisation, M/M/2 at load 1 with a third, M/M/3 at load 2 with 4/9."""
    assert wait_probability(servers, load) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("rps", "variability", "wait_s"),
    [(5.0, 1.0, 0.2 * math.log(5)), (5.0, 0.5, 0.1 * math.log(5)), (20.0, 1.0, math.inf)],
)
def test_the_wait_of_one_server(rps, variability, wait_s):
    """Service 0.1 s. M/M/1 at half load: a tenth waits longer than 0.2 s · ln 5; fixed service times halve that."""
    assert wait_quantile_s(1, rps, 0.1, variability=variability, quantile=0.9) == pytest.approx(wait_s)


@given(st.integers(1, 200), st.floats(0, 300), st.floats(0.01, 3), st.floats(0.5, 0.999))
def test_another_server_never_lengthens_the_wait(servers, load, variability, quantile):
    """Monotone in replicas, whatever the load."""
    waits = [
        wait_quantile_s(count, load, 1.0, variability=variability, quantile=quantile)
        for count in (servers, servers + 1)
    ]

    assert waits[1] <= waits[0]
    assert 0 <= wait_probability(servers, load) <= 1


@given(st.floats(0.01, 1000), st.floats(0.5, 0.999))
def test_in_flight_exceeds_its_mean(mean, quantile):
    """The percentile of a Poisson number is no less than its mean."""
    assert most_in_flight(mean, quantile) >= mean
