"""Scale to zero: every role goes once nothing has come for long enough, and one of each comes back with a request."""

from __future__ import annotations

from dataclasses import replace

import orjson
import pytest

from penstock.api import Role
from penstock_planner.decide.codec import from_plain, to_plain
from penstock_planner.decide.config import DecideConfig, Mode
from penstock_planner.decide.decision import Action, Reason
from penstock_planner.decide.demand.observation import Demand, PoolCounts, Window, summarise
from penstock_planner.decide.demand.reading import assess, missing
from penstock_planner.decide.pipeline import decide
from penstock_planner.decide.state import PlannerState

P, D, A = Role.PREFILL, Role.DECODE, Role.AGGREGATED
AFTER_S = 120.0
STEP_S = 5
CONFIG = DecideConfig(
    mode=Mode.ADAPTIVE, adjustment_interval_s=5.0, min_gpu_budget=0, scale_to_zero_after_s=AFTER_S
)
QUIET = Demand(period_s=1.0)
ARRIVAL = Demand(
    period_s=1.0, arrivals=1, prompt_tokens=900, uncached_tokens=900, waiting=1, waiting_tokens=900,
    oldest_wait_s=0.5,
)  # fmt: skip


def pull(at_s, pools, demand=QUIET, *, kv=0.0, inside=0.0):
    """Return one pull of pools by role: ready, or counts."""
    counts = {
        role: replace(each if isinstance(each, PoolCounts) else PoolCounts(each), gpus=1)
        for role, each in pools.items()
    }
    holder = counts[D if D in counts else A].ready
    reading = missing("away", source="t") if kv is None else assess(kv, age_s=0, max_age_s=10, source="t")
    usage = dict.fromkeys([f"d{i}" for i in range(holder)], reading)
    waits = {name: assess(inside, age_s=0, max_age_s=10, source="t") for name in usage}
    queue = assess(demand.waiting, age_s=0, max_age_s=10, source="t") if demand and P in pools else None
    return summarise(at_s, counts, kv=usage, queue=queue, demand=demand, worker_waiting=waits)


class Planner:
    """A planner whose decisions are carried out at once."""

    def __init__(self, pools, config=CONFIG):
        self.pools, self.config, self.state, self.now_s = dict(pools), config, PlannerState(), 0.0

    def decide(self, seconds=STEP_S, demand=QUIET, **seen):
        """Decide every few seconds under one load; return the last decision by role."""
        for _ in range(int(seconds / STEP_S)):
            start_s, self.now_s = self.now_s, self.now_s + STEP_S
            pulls = [pull(start_s + s, self.pools, demand, **seen) for s in range(1, STEP_S + 1)]
            found, self.state = decide(Window(start_s, self.now_s, tuple(pulls)), self.state, self.config)
            self.state = from_plain(PlannerState, orjson.loads(orjson.dumps(to_plain(self.state))))
            self.pools = {each.role: each.desired for each in found.roles}
        return {each.role: each for each in found.roles}


@pytest.mark.parametrize("pools", [{P: 1, D: 1}, {A: 1}], ids=["apart", "aggregated"])
def test_a_quiet_graph_goes_to_zero_as_a_whole_and_comes_back_as_a_whole(pools):
    """Not before the time is over; then all roles in one decision. The first request brings one of each, at once."""
    planner = Planner(pools)
    planner.decide(AFTER_S - STEP_S)
    assert planner.pools == pools
    found = planner.decide(2 * STEP_S)
    assert set(planner.pools.values()) == {0}
    assert {each.reason for each in found.values()} == {Reason.IDLE}
    planner.decide(600)
    assert set(planner.pools.values()) == {0}
    found = planner.decide(demand=ARRIVAL)
    assert {(each.action, each.reason, each.desired) for each in found.values()} == {
        (Action.UP, Reason.WAKE, 1)
    }


def test_a_large_graph_shrinks_one_at_a_time_first():
    """Both pools come down to one by the usual rules, and only then go together."""
    planner = Planner({P: 2, D: 3})
    seen = []
    for _ in range(120):
        before = dict(planner.pools)
        planner.decide()
        if planner.pools != before:
            seen.append((before, dict(planner.pools)))
    assert seen[-1] == ({P: 1, D: 1}, {P: 0, D: 0})
    assert all(sum(before.values()) - sum(after.values()) <= 2 for before, after in seen)


@pytest.mark.parametrize(
    "seen",
    [
        {"demand": None},
        {"demand": replace(QUIET, in_flight={D: 1.0})},
        {"demand": replace(QUIET, arrivals=1.0)},
        {"demand": ARRIVAL},
        {"kv": None},
        {"inside": 1.0},
    ],
    ids=["routers away", "in flight", "arrivals", "waiting", "KV unknown", "waiting inside"],
)
def test_what_is_busy_or_unknown_never_goes_to_zero(seen):
    """However long, and one such pull within the quiet time begins it again."""
    planner = Planner({P: 1, D: 1})
    planner.decide(10 * AFTER_S, **seen)
    assert min(planner.pools.values()) >= 1
    planner = Planner({P: 1, D: 1})
    planner.decide(AFTER_S - STEP_S)
    planner.decide(**seen)
    planner.decide(AFTER_S - STEP_S)
    assert min(planner.pools.values()) >= 1


def test_at_zero_without_a_router_nothing_changes():
    """Nobody counts: neither up nor anything else; known again and quiet, it stays; then a request wakes it."""
    planner = Planner({P: 0, D: 0})
    found = planner.decide(600, demand=None)
    assert {each.reason for each in found.values()} == {Reason.METRIC_UNKNOWN}
    found = planner.decide(60)
    assert ({each.reason for each in found.values()}, planner.pools) == ({Reason.IDLE}, {P: 0, D: 0})
    planner.decide(demand=ARRIVAL)
    assert planner.pools == {P: 1, D: 1}


def test_a_graph_that_woke_stays_for_a_minute_whatever_the_quiet_time():
    """With a quiet time of 10 s a request every 30 s keeps it: the hold-down of a minute covers the gap."""
    config = replace(CONFIG, scale_to_zero_after_s=10.0)
    planner = Planner({P: 0, D: 0}, config)
    planner.decide(demand=ARRIVAL)
    planner.decide(50)
    assert planner.pools == {P: 1, D: 1}
    planner.decide(60)
    assert planner.pools == {P: 0, D: 0}


def test_one_role_alone_at_zero_follows_or_comes_back():
    """The backend took half of a change: while quiet the other role goes too, with a request the missing one comes."""
    planner = Planner({P: 1, D: 1})
    planner.decide(AFTER_S)
    planner.pools = {P: 1, D: 0}
    planner.decide()
    assert planner.pools == {P: 0, D: 0}
    planner.pools = {P: 1, D: 0}
    planner.decide(demand=ARRIVAL)
    assert planner.pools[D] == 1


def test_waking_waits_for_the_budget_and_no_longer():
    """Two GPUs, both held by replicas that drain: nothing starts; once they are free both do."""
    planner = Planner({P: 0, D: 0}, replace(CONFIG, max_gpu_budget=2))
    draining = PoolCounts(0, 0, 1)
    planner.pools = {P: draining, D: draining}
    found = planner.decide(demand=ARRIVAL)
    assert {each.reason for each in found.values()} == {Reason.GPU_BUDGET}
    planner.decide(demand=replace(ARRIVAL, arrivals=0.0))
    assert planner.pools == {P: 1, D: 1}


def test_without_the_option_the_last_replica_stays_and_zero_comes_back_by_itself():
    """As ever: one of each is the floor."""
    planner = Planner({P: 1, D: 1}, replace(CONFIG, scale_to_zero_after_s=None))
    planner.decide(20 * AFTER_S)
    assert planner.pools == {P: 1, D: 1}
    planner.pools = {P: 0, D: 0}
    planner.decide()
    assert planner.pools == {P: 1, D: 1}


@pytest.mark.parametrize("pools", [{P: 2, D: 1}, {A: 3}], ids=["apart", "aggregated"])
def test_a_pool_whose_workers_were_never_measured_shrinks_and_goes_too(pools):
    """One small request says nothing of what a worker can do; a quiet graph needs no such knowledge."""
    planner = Planner(pools)
    planner.decide(demand=replace(ARRIVAL, oldest_wait_s=0.0, waiting=0.0))
    planner.decide(10 * AFTER_S)
    assert set(planner.pools.values()) == {0}


@pytest.mark.parametrize("late", [P, D])
def test_the_request_that_wakes_a_graph_asks_for_one_replica_of_each_however_long_they_take(late):
    """It has waited for two minutes when the second role is ready: for the start, which no further replica shortens."""
    planner = Planner({P: 0, D: 0})
    planner.decide(60)
    waits = replace(ARRIVAL, arrivals=0.0, oldest_wait_s=120.0)
    planner.decide(demand=ARRIVAL)
    both = {P: PoolCounts(1, 0), D: PoolCounts(1, 0)}
    for pools in (dict.fromkeys(both, PoolCounts(0, 1)), {**both, late: PoolCounts(0, 1)}):
        planner.pools = pools
        planner.decide(demand=waits)
        assert planner.pools == {P: 1, D: 1}
    window = Window(planner.now_s, planner.now_s + 1, (pull(planner.now_s + 1, both, waits),))
    found, _ = decide(window, planner.state, CONFIG)
    assert {each.desired for each in found.roles} == {1}
