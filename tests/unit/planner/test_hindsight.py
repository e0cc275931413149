"""Which floor would have been best, on any arrivals: what was kept to is never far from the best in hindsight."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_planner.decide.demand.load import MEMORY_S
from penstock_planner.decide.objective import cost, shadow_fleets
from penstock_planner.decide.objective.cost import Objective
from penstock_planner.decide.objective.shadow_fleets import Growth, Hindsight, PulledLoad

STARTUP_S = 120.0
OBJECTIVE = Objective(in_time=0.99, price_gpu_s=20.0, gpus=1.0, unused_s=2 * STARTUP_S)


def _load(rate, *, work_s=0.5, dt_s=2.0, sizes=8):
    """Return one pull of ``rate`` requests/s, each half a second of one worker."""
    needs = rate * work_s / 0.9
    return PulledLoad(
        dt_s,
        rate * dt_s,
        work_gpu_s=rate * dt_s * work_s,
        work_s=rate * dt_s * work_s,
        may_wait_s=5.0,
        kv_busy_workers=0.0,
        workers_needed=needs,
        workers_to_keep=1.2 * needs,
        startup_s=STARTUP_S,
        hold_s=STARTUP_S,
        sizes=sizes,
    )


PULL_S = 10.0
"""Longer than a live one's, so that hours are short."""


def _served(rates, known=None, objective=OBJECTIVE):
    known = known or Hindsight()
    for rate in rates:
        known = cost.chosen(shadow_fleets.followed(known, _load(rate, dt_s=PULL_S)), objective)
    return known


def _bursts(hours):
    """Return 90 s of 6 requests/s every quarter of an hour, 0.3 between."""
    return ([0.3] * 30 + [6.0] * 9 + [0.3] * 51) * (4 * hours)


def test_bursts_shorter_than_a_start_up_are_met_by_a_floor():
    """Three workers nearly carry 6 requests/s of half a second; nothing that starts in a burst is ready before its end."""
    known = _served(_bursts(2))
    assert known.floor == 3
    assert "floor 3 would have had 100.0% on time" in cost.in_words(known, 1)


def test_a_tide_slower_than_a_start_up_is_followed_from_a_low_floor():
    """0.3 requests/s rise to 6 within an hour, twice: a floor that carries both would idle half of the time."""
    rates = [0.3 + 5.7 * min(1.0, max(0.0, (step % 720 - 120) / 240)) for step in range(2 * 720)]
    assert _served(rates).floor <= 2


def test_a_floor_that_is_no_longer_needed_is_left():
    """Bursts for two hours, then none: after eight one worker is enough."""
    known = _served([0.3] * 360 * 8, _served(_bursts(2)))
    assert known.floor_now == 1


def test_how_long_a_floor_is_held_at_most_is_said_and_true():
    """Two hours of bursts, then almost nothing: it goes by the time that was named when the last burst had ended."""
    known = _served(_bursts(2))
    left_s = known.given_up_in_s
    assert f"released in {left_s / 60:.0f} min" in cost.in_words(known, 1)

    silent_s = 0.0
    while known.floor == 3 and silent_s <= left_s + PULL_S:
        known, silent_s = _served([0.3], known), silent_s + PULL_S
    assert known.floor < 3
    assert "given up" not in cost.in_words(replace(known, floor=1), 1)


def test_patience_starts_nothing_for_a_burst_and_follows_what_lasts():
    """A patient fleet counts a replica as lasting after a start-up's time of demand, and lets it go as slowly."""
    known = shadow_fleets.followed(Hindsight(growth=Growth.DELAYED), _load(3.0))
    for _ in range(44):
        known = shadow_fleets.followed(known, _load(3.0))
    assert known.lasting(STARTUP_S) == 0
    for _ in range(20):
        known = shadow_fleets.followed(known, _load(3.0))
    assert known.lasting(STARTUP_S) == 2
    assert not known.is_idle(2, hold_s=10.0)
    for _ in range(60):
        known = shadow_fleets.followed(known, _load(0.0))
    assert known.is_idle(2, hold_s=10.0)


def test_load_that_a_fleet_carries_on_average_is_left_to_a_fixed_one():
    """Ten minutes of almost what two do, ten of a little less: each crest would have started a third that no request needed."""
    known = _served(([3.8] * 60 + [2.2] * 60) * 18)
    assert (known.floor, known.growth) == (2, Growth.SCHEDULED)
    assert "none above it" in cost.in_words(known, 1)


def test_nothing_is_chosen_from_a_handful_of_requests():
    """Ninety requests in five minutes, most of them late with one worker: the floor stays as it was."""
    assert _served([0.0] * 30 + [4.5] * 2).floor == 1


@pytest.mark.parametrize(("arrivals", "seen_s", "usual"), [(0, 0, 100), (2, 600, 100), (7200, 3600, 3600)])
def test_what_is_usual_in_half_an_hour_is_known_from_the_rate_so_far(arrivals, seen_s, usual):
    """Two a second for an hour are 3,600; a hundred at least, of which a share means something."""
    assert Hindsight(arrivals=float(arrivals), seen_s=float(seen_s)).usual_requests == usual


def test_a_floor_keeps_within_what_may_be_had():
    """Sizes end where bounds or budget do."""
    known = Hindsight()
    for rate in _bursts(1):
        known = cost.chosen(shadow_fleets.followed(known, _load(rate, sizes=2, dt_s=PULL_S)), OBJECTIVE)
    assert (known.floor, known.sizes) == (2, 2)


def test_a_burst_that_comes_again_is_met_in_time_and_not_between():
    """Every quarter of an hour: two workers more are held from a start-up before until it is over, not in between."""
    known, held_s, ready = Hindsight(), 0, []
    for step, rate in enumerate(_bursts(4)):
        known = cost.chosen(shadow_fleets.followed(known, _load(rate, dt_s=PULL_S)), OBJECTIVE)
        if step >= 3 * 360:
            held_s += PULL_S * (known.floor_now > 1)
            if rate > 1 and step % 90 == 30:
                ready.append(known.floor_now > 1 and known.recurrence.due_s >= STARTUP_S)
    assert known.growth is Growth.SCHEDULED
    assert ready == [True] * 4
    assert held_s < 0.4 * 3600
    assert "held while demand recurs" in cost.in_words(known, 1)


def test_what_does_not_come_again_any_more_is_not_waited_for():
    """The bursts stop: a day later nothing is held for them, and nothing that demand asks for is held back."""
    known = _served([0.3] * 360 * 12, _served(_bursts(4)))
    assert known.floor_now == 1
    assert not known.recurrence.period


PHASES = st.lists(
    st.tuples(st.sampled_from([0.0, 0.3, 2.0, 6.0, 14.0]), st.integers(1, 40)), min_size=1, max_size=6
)


@settings(max_examples=25)
@given(PHASES, st.sampled_from([1.0, 20.0, 1e9]), st.sampled_from(Growth))
def test_without_arrivals_the_floor_goes_to_the_least_after_as_long_as_was_seen(phases, price, growth):
    """Whatever came, and however dear a late request: silence as long as all that was seen, half an hour at least, ends every floor."""
    objective = replace(OBJECTIVE, price_gpu_s=price)
    rates = [rate for rate, pulls in phases for _ in range(pulls)]
    known = replace(_served(rates, objective=objective), growth=growth)
    quiet = _served([0.0] * (max(len(rates), int(shadow_fleets.WAIT_S / PULL_S)) + 1), known, objective)
    assert quiet.floor == 1


@pytest.mark.parametrize("trickle", [0.0, 0.01])
def test_a_burst_that_came_once_is_let_go_within_an_hour(trickle):
    """A quarter of an hour that needs four workers, then next to nothing: half an hour later the least floor holds."""
    burst = _served([6.0] * 90)
    assert burst.floor > 1
    assert _served([trickle] * 185, burst).floor_now == 1


def test_a_burst_that_came_again_is_waited_for_longer_than_it_lasted():
    """Two quarters of an hour, three hours apart: what was needed so far apart is not over after half an hour."""
    again = _served([6.0] * 90 + [0.0] * 1080 + [6.0] * 90)
    assert again.largest_useful_floor > 1
    assert _served([0.0] * 300, again).largest_useful_floor > 1
    assert _served([0.0] * 1400, again).largest_useful_floor == 1


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.3, 2.0, 6.0, 14.0]), st.integers(1, 120)), min_size=1, max_size=25
    ),
    st.sampled_from([0.9, 0.99, 0.999]),
    st.sampled_from([1.0, 20.0, 300.0]),
)
def test_no_arrivals_make_it_cost_more_than_the_best_fleet_and_the_stated_bound(phases, in_time, price):
    """The fleet that was kept to costs at most the best fixed one, the changes, and the late requests that are allowed."""
    objective = Objective(in_time, price, 1.0, 2 * STARTUP_S)
    rates = [rate for rate, pulls in phases for _ in range(pulls)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shadow_fleets, "MEMORY_S", 1e12)
        _hold_bound(rates, objective)


def _hold_bound(rates, objective):
    known, paid, changes, dearest_pull, arrived = Hindsight(), 0.0, 0, 0.0, 0.0
    # All sizes from the first pull on, and long enough to be judged, so that every fleet has seen everything.
    known = shadow_fleets.followed(known, _load(16.0, dt_s=objective.unused_s))
    begin = {growth: _costs(known, growth, objective) for growth in Growth}
    for rate in rates:
        before = known
        known = shadow_fleets.followed(known, _load(rate))
        if before.floor:
            growth, place = before.growth, before.floor - 1
            paid += _costs(known, growth, objective)[place] - _costs(before, growth, objective)[place]
        steps = [
            now - then
            for growth in Growth
            for now, then in zip(
                _costs(known, growth, objective), _costs(before, growth, objective), strict=True
            )
        ]
        dearest_pull = max(dearest_pull, *steps)
        arrived += 2.0 * rate
        known = cost.chosen(known, objective)
        changes += (known.floor, known.growth) != (before.floor, before.growth)
    best = min(
        now - then
        for growth in Growth
        for now, then in zip(_costs(known, growth, objective), begin[growth], strict=True)
    )
    dearest_change = cost.change_gpu_s(known.sizes, objective)
    allowed = objective.price_gpu_s * (1.0 - objective.in_time) * (arrived + 16.0 * objective.unused_s)
    first = max(cost for costs in begin.values() for cost in costs)
    assert paid <= best + (1 + changes) * (dearest_change + dearest_pull + allowed) + first + 1e-6


def _costs(known, growth, objective):
    fleets = known.fleets[growth]
    return [cost.cost_of(fleets, place, objective) for place in range(known.sizes)]


@pytest.mark.parametrize(("in_time_first", "late"), [(True, 0.35), (False, 0.9)])
def test_late_requests_are_the_excess_or_all_behind_it(in_time_first, late):
    """Twice what one worker does for a minute, and half for another: in time first, what is above its capacity alone is late."""
    known = Hindsight()
    for rate in [4.0] * 30 + [1.0] * 30:
        known = shadow_fleets.followed(known, replace(_load(rate, sizes=1), is_in_time_first=in_time_first))
    assert known.fleets[Growth.IMMEDIATE].late[0] / known.arrivals == pytest.approx(late, abs=0.1)


def test_counts_have_few_digits_and_fade():
    """Uneven pulls for a day: whatever the ledger holds is in sixteenths."""
    known = Hindsight()
    for step in range(3600):
        known = shadow_fleets.followed(known, _load(1.0 + step % 7 / 4, dt_s=24 + step % 5 / 16))
    assert known.seen_s < MEMORY_S + 30
    for fleets in known.fleets.values():
        for values in (fleets.started_s, fleets.late, fleets.replica_s):
            assert values == tuple(shadow_fleets.counted(each) for each in values)


def _given(rates, *, unused_s, given=4):
    known = Hindsight()
    objective = replace(OBJECTIVE, unused_s=unused_s)
    for rate in rates:
        known = cost.chosen(
            shadow_fleets.followed(known, replace(_load(rate, dt_s=PULL_S), existing=given)), objective
        )
    return known


def test_the_fleet_that_was_given_is_the_first_floor_until_a_change_has_paid():
    """Four workers for one's load: kept for as long as a start-up that may take five minutes costs, and let go then."""
    assert _given([1.0] * 30, unused_s=420.0).floor == 4
    assert _given([1.0] * 60, unused_s=420.0).floor < 4
    assert _given([0.01] * 190, unused_s=420.0).floor == 1, "without enough requests, half an hour"
    known = Hindsight(floor=2, seen_s=1.0)
    later = shadow_fleets.followed(known, replace(_load(1.0), existing=4))
    assert later.floor == 2, "what is there later is what the planner asked for"
