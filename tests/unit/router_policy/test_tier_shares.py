"""What a tier is ahead of its share, what waits for its first token, and which new request may wait for a full stage."""

import pytest

from penstock.api import Role, Tier, TiersConfig
from penstock.router.core.tiers import AwaitingFirstToken, FirstStage, ShareExcess, TierControl
from penstock.router.policy.arrival import Arrival
from penstock.router.policy.tiers import share_of

TIERS = TiersConfig(enabled=True)
SHARE = share_of(TIERS, Tier.STANDARD)


def test_a_tier_is_ahead_by_what_it_asks_and_by_twice_its_burst_at_most():
    """Exactly the burst is within it."""
    ahead = ShareExcess()
    ahead.add(Tier.STANDARD, 100, 100)
    assert ahead.is_within(Tier.STANDARD, 100)
    ahead.add(Tier.STANDARD, 1, 100)
    assert not ahead.is_within(Tier.STANDARD, 100)
    ahead.add(Tier.STANDARD, 1000, 100)
    assert (ahead.is_within(Tier.STANDARD, 199), ahead.is_within(Tier.STANDARD, 200)) == (False, True)


def test_time_takes_a_tier_s_share_of_what_workers_compute_off():
    """Each second counts once; time that goes back counts nothing."""
    ahead = ShareExcess()
    ahead.drain(TIERS, 1000.0, 50.0)
    ahead.add(Tier.STANDARD, 3000, 10_000)
    for now_s in (52.0, 52.0, 51.0):
        ahead.drain(TIERS, 1000.0, now_s)
        left = 3000 - 2000 * SHARE
        assert ahead.is_within(Tier.STANDARD, left)
        assert not ahead.is_within(Tier.STANDARD, left - 1)


@pytest.mark.parametrize(("begun", "most"), [(0, 4), (3, 4), (4, 4), (6, 6)])
def test_as_many_wait_for_a_first_token_as_have_begun_of_late(begun, most):
    """Four at least; the next one makes the tier wait, and those below it."""
    awaiting = AwaitingFirstToken()
    for number in range(begun):
        awaiting.enter(number, ("w", 2))
        awaiting.got_first_token(number, 10.0)
    for number in range(100, 100 + most - 1):
        awaiting.enter(number, ("w", 2))
    assert awaiting.held(["w"], 10.0) == frozenset()
    awaiting.enter("last", ("w", 2))
    assert awaiting.held(["w"], 10.0) == frozenset(list(Tier)[2:])
    assert awaiting.held(["w", "other"], 10.0) == frozenset()


def control(standard, background=1):
    """Return the tiers of one stage in which some prompt tokens are to be computed."""
    made = TierControl(TIERS, [Role.AGGREGATED])
    for tier, tokens in ((Tier.STANDARD, standard), (Tier.BACKGROUND, background)):
        if tokens:
            made.entered(tier, Role.AGGREGATED, Arrival((), tokens, tier=tier), uncomputed_tokens=tokens)
    return made


def waits(made, stage, tokens=1.0):
    """Return whether a standard request may wait."""
    return made.waits_its_turn(Tier.STANDARD, tokens, Role.AGGREGATED, stage, has_blocks=True)


def test_without_a_threshold_a_tier_s_burst_alone_waits():
    """However much it asks for."""
    stage = FirstStage(2, None)
    burst = int(control(0)._burst_tokens(Tier.STANDARD, stage))
    for standard, expected in ((burst - 1, True), (burst + 1, False)):
        made = control(standard)
        made.count_requested(Tier.STANDARD, 10 * burst, stage, 0.0)
        assert waits(made, stage) is expected
    assert not waits(control(1, background=0), stage)


def test_a_tier_that_asks_for_more_than_its_share_waits_below_its_part_of_the_threshold():
    """Of all workers together, or as long as it was admitted no more than that of late."""
    stage = FirstStage(2, 1_000_000.0, 1000.0)
    part = int(1_000_000 * SHARE * 2)
    burst = control(0)._burst_tokens(Tier.STANDARD, stage)
    for standard, expected in ((part - 1, True), (part + 1, False)):
        made = control(standard)
        made.count_requested(Tier.STANDARD, 3 * burst, stage, 0.0)
        assert waits(made, stage) is expected
    # What was admitted and is computed is not a reason to reject.
    made = control(0)
    made.count_requested(Tier.STANDARD, 0, stage, 0.0)
    made.entered("there", Role.AGGREGATED, Arrival((), part - 1), uncomputed_tokens=part - 1)
    made.entered("gone", Role.AGGREGATED, Arrival((), part), uncomputed_tokens=part)
    made.computed("gone", 0.0)
    made.count_requested(Tier.STANDARD, 3 * burst, stage, 0.0)
    assert waits(made, stage)


def test_what_all_workers_compute_is_taken_off_what_a_tier_asked_for():
    """By tokens/s of one worker, times their number."""
    stage = FirstStage(4, 100.0, 10_000.0)
    made = control(0, background=1)
    burst = made._burst_tokens(Tier.STANDARD, stage)
    made.count_requested(Tier.STANDARD, 0, stage, 0.0)
    made.count_requested(Tier.STANDARD, 2 * burst, stage, 0.0)
    assert not made._requested.is_within(Tier.STANDARD, burst)
    made.count_requested(Tier.STANDARD, 0, stage, burst / (10_000.0 * 4 * SHARE) + 0.01)
    assert made._requested.is_within(Tier.STANDARD, burst)
