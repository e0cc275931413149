"""When the router sheds, whom, and how it comes back from it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api import SheddingConfig, Tier, TiersConfig
from penstock.api.router_tiers import PremiumSlo, StandardSlo, TierSlos
from penstock.core.histogram import percentile
from penstock.router.policy.slo_monitor import EndedRequest, SlidingWindow, SloMonitor

SETTINGS = SheddingConfig()
TARGETS = TierSlos(
    premium=PremiumSlo(ttft="200ms", itl="30ms"), standard=StandardSlo(ttft="500ms", itl="80ms")
)


def monitor(**values: object) -> SloMonitor:
    """Return a monitor of the usual targets."""
    return SloMonitor(TiersConfig(slo=TARGETS, shedding=SheddingConfig(**values)))


def run(slo: SloMonitor, seconds: range, ttft_s: dict[Tier, float], *, rps: int = 10) -> list[int]:
    """Serve ``rps`` requests of each tier a second and return the step after each second."""
    steps = []
    for second in seconds:
        for tier, value in ttft_s.items():
            for _ in range(rps):
                slo.first_token(tier, value, float(second))
        slo.evaluate(float(second))
        steps.append(slo.step)
    return steps


@pytest.mark.parametrize(
    ("count", "percent", "rank"),
    [(100, 99, 99), (200, 99, 198), (99, 99, 99), (10, 50, 5), (1, 99, 1), (3, 100, 3), (0, 99, None)],
)
def test_a_percentile_is_the_nearest_rank(count: int, percent: float, rank: int | None) -> None:
    """Of 100 values p99 is the 99th, not the largest; of none there is none."""
    assert percentile(range(count, 0, -1), percent) == rank


def test_a_window_forgets_what_is_older_than_its_length() -> None:
    """Ten seconds, the older end open."""
    window = SlidingWindow(10.0)
    for second in range(20):
        window.add(second, float(second))
    assert window.values(19.0) == list(range(10, 20))
    assert window.values(19.0, since_s=15.0) == list(range(16, 20))
    assert window.values(100.0) == []


def test_shedding_goes_up_in_steps_background_first_and_comes_down_in_reverse() -> None:
    """Each step up waits 5 s, each step down 15 s of being well within the targets; premium and system are never shed."""
    slo = monitor()
    up = run(slo, range(30), {Tier.PREMIUM: 0.3})
    assert [up.index(step) for step in (1, 2, 3, 4)] == [1, 6, 11, 16]
    assert [slo.shed_fraction(tier) for tier in Tier] == [0.0, 0.0, 1.0, 1.0]
    down = run(slo, range(30, 120), {Tier.PREMIUM: 0.1})
    assert sorted(down, reverse=True) == down
    assert down[-1] == 0
    assert [down.index(step) for step in (3, 2, 1, 0)] == [14, 29, 44, 59]


CALM = {Tier.PREMIUM: 0.2, Tier.STANDARD: 0.5, Tier.BACKGROUND: 30.0}


@pytest.mark.parametrize(
    ("before", "then", "seconds", "rps", "steps"),
    [
        ({}, CALM, 60, 10, (0, 0)),
        ({Tier.PREMIUM: 0.3}, {Tier.PREMIUM: 0.18}, 98, 10, (1, 1)),
        ({}, {Tier.PREMIUM: 0.1, Tier.STANDARD: 2.0}, 60, 10, (2, 2)),
        ({}, {Tier.PREMIUM: 9.0}, 19, 1, (0, 0)),
    ],
    ids=["in time", "between recovery and target", "standard in need", "few samples"],
)
def test_how_far_shedding_goes(before, then, seconds, rps, steps):
    """A missed target adds a step, well within it one is taken back; standard is never shed to protect standard."""
    slo = monitor()
    run(slo, range(2), before)
    found = run(slo, range(2, 2 + seconds), then, rps=rps)
    assert (max(found), found[-1]) == steps
    assert slo.shed_fraction(Tier.STANDARD) == 0.0


@pytest.mark.parametrize(
    ("then", "last"),
    [({Tier.PREMIUM: 0.1, Tier.STANDARD: 2.0}, 2), ({}, 0)],
    ids=["standard suffers", "no requests"],
)
def test_what_was_shed_for_premium_alone_comes_back(then, last):
    """From step 4 to where standard's own need holds; with premium gone there is nobody to protect."""
    slo = monitor()
    run(slo, range(30), {Tier.PREMIUM: 0.3})
    steps = run(slo, range(30, 150), then)
    assert steps[-1] == min(steps) == last


def test_of_half_a_tier_every_second_arrival_is_shed() -> None:
    """Evenly spaced, without chance."""
    slo = monitor()
    run(slo, range(3), {Tier.PREMIUM: 0.3})
    assert [slo.sheds(Tier.BACKGROUND) for _ in range(6)] == [False, True] * 3


def test_time_per_token_counts_like_time_to_first_token() -> None:
    """30 ms a token are promised to premium."""
    slo = monitor()
    for second in range(4):
        for _ in range(10):
            slo.ended(Tier.PREMIUM, EndedRequest(tpot_s=0.04), float(second))
        slo.evaluate(float(second))
    assert slo.step == 1


def test_requests_that_only_wait_show_a_missed_target() -> None:
    """While nothing moves no first token tells of it."""
    slo = monitor()
    slo.evaluate(0.0, {Tier.PREMIUM: [0.5] * 30})
    assert slo.step == 1
    calm = monitor()
    calm.evaluate(0.0, {Tier.PREMIUM: [0.1] * 30})
    assert calm.step == 0


def test_switched_off_it_measures_and_sheds_nothing() -> None:
    """Compliance is wanted all the same."""
    slo = monitor(enabled=False)
    run(slo, range(30), {Tier.PREMIUM: 0.3})
    assert slo.step == 4
    assert not slo.sheds(Tier.BACKGROUND)


@pytest.mark.parametrize(
    ("tier", "ended", "is_met"),
    [
        (Tier.PREMIUM, EndedRequest(0.2, 0.03, 5.0), True),
        (Tier.PREMIUM, EndedRequest(0.21, 0.03, 5.0), False),
        (Tier.PREMIUM, EndedRequest(0.2, 0.031, 5.0), False),
        (Tier.PREMIUM, EndedRequest(0.2, 0.03, 5.1), False),
        (Tier.PREMIUM, EndedRequest(None, None, 4.0), True),
        (Tier.BACKGROUND, EndedRequest(30.0, 1.0, 60.0), True),
        (Tier.STANDARD, EndedRequest(is_failed=True), False),
    ],
)
def test_compliance_is_the_share_of_requests_that_kept_all_targets(
    tier: Tier, ended: EndedRequest, is_met: bool
) -> None:
    """Bounds included; an unmeasured figure misses none, a failure misses all."""
    slo = monitor()
    assert slo.compliance(tier, 0.0) is None
    slo.ended(tier, ended, 0.0)
    assert slo.compliance(tier, 0.0) == is_met


@given(
    st.lists(st.tuples(st.sampled_from([0.05, 0.18, 0.3]), st.sampled_from([0.1, 0.45, 2.0])), max_size=120)
)
def test_the_step_moves_by_one_and_not_too_often(values: list[tuple[float, float]]) -> None:
    """Up at most each 5 s, down at most each 15 s, whatever is measured."""
    slo = monitor()
    steps, changed_s = [0], float("-inf")
    for second, (premium_s, standard_s) in enumerate(values):
        steps += run(
            slo, range(second, second + 1), {Tier.PREMIUM: premium_s, Tier.STANDARD: standard_s}, rps=30
        )
        change = steps[-1] - steps[-2]
        assert change in {-1, 0, 1}
        if change:
            assert second - changed_s >= (SETTINGS.step_seconds if change > 0 else SETTINGS.recover_seconds)
            changed_s = second


def test_settings_that_change_keep_what_was_measured():
    """A shorter window forgets what is before it, from then on; nothing is measured again."""
    slo = monitor(window_seconds=60.0)
    for at_s, is_failed in ((0.0, True), (50.0, False)):
        slo.ended(Tier.PREMIUM, EndedRequest(e2e_s=1.0, is_failed=is_failed), at_s)
    assert slo.compliance(Tier.PREMIUM, 55.0) == 0.5
    slo.configure(TiersConfig(shedding=SheddingConfig(window_seconds=20.0)))
    assert slo.compliance(Tier.PREMIUM, 55.0) == 1.0
