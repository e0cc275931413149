"""Mode adaptive: grows on demand at the frontend, shrinks only what is surely too much, never on what is unknown."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sla_load import decided_after, step_of

from penstock.api import Role
from penstock_planner.decide.capacity.decoding import KvView, ObservedDecoding
from penstock_planner.decide.codec import from_plain, to_plain
from penstock_planner.decide.config import DecideConfig, Mode, config_from
from penstock_planner.decide.decision import Action, Reason
from penstock_planner.decide.demand.observation import Demand, PoolCounts, Window, summarise
from penstock_planner.decide.demand.reading import assess
from penstock_planner.decide.demand.trend import Trend
from penstock_planner.decide.objective.shadow_fleets import Hindsight
from penstock_planner.decide.pipeline import decide, roll_back
from penstock_planner.decide.policies.adaptive.memory import AdaptiveMemory, RoleMemory
from penstock_planner.decide.state import PlannerState, RoleState

CONFIG = DecideConfig(mode=Mode.ADAPTIVE, adjustment_interval_s=5.0)
SPEED = 10_000
"""Tokens/s of one worker in these tests."""


def _pull(at_s, *, prefill=1, decode=1, starting=0, rate=0.0, kv=0.3, inside=0.0, known=True, **demand):
    """Return one second's pull: ``rate`` tokens/s arrive in prompts of 1,000 and are computed at once."""
    busy = min(prefill, rate / SPEED)
    seen = Demand(
        **{
            "period_s": 1.0,
            "arrivals": rate / 1000,
            "prompt_tokens": rate,
            "uncached_tokens": rate,
            "prefilled_tokens": busy * SPEED,
            "prefilling_workers": busy,
            "in_flight": {Role.PREFILL: 2 * busy, Role.DECODE: 10.0, Role.AGGREGATED: 10.0},
            **demand,
        }
    )
    usage = {f"d{i}": assess(kv, age_s=0, max_age_s=10, source="t", upper=1.0) for i in range(decode)}
    waits = {name: assess(inside, age_s=0, max_age_s=10, source="t") for name in usage}
    pools = {
        Role.PREFILL: PoolCounts(prefill, starting, gpus=1),
        Role.DECODE: PoolCounts(decode, gpus=1),
    }
    queue = assess(seen.waiting, age_s=0, max_age_s=10, source="t")
    return summarise(at_s, pools, kv=usage, queue=queue, demand=seen if known else None, worker_waiting=waits)


_after = partial(decided_after, pull=_pull, config=CONFIG)

_STARTUP_SEEN = RoleMemory(startups_s=(30.0,))
LATER = PlannerState(
    learned={
        "adaptive": AdaptiveMemory(
            roles={Role.PREFILL: _STARTUP_SEEN, Role.DECODE: _STARTUP_SEEN},
            hindsight={
                Role.PREFILL: Hindsight(floor=1, seen_s=1.0),
                Role.DECODE: Hindsight(floor=1, seen_s=1.0),
            },
        )
    }
)
"""The fleet is no longer the one that a person gave: floors are those of hindsight, and start-ups have been seen."""


def test_demand_above_what_the_workers_are_seen_to_do_grows_prefill():
    """18,000 tokens/s against one worker of 10,000: one more, with the numbers in the step."""
    found, _ = _after(30, rate=18_000.0)
    prefill = found[Role.PREFILL]
    assert (prefill.action, prefill.reason) == (Action.UP, Reason.DEMAND_ABOVE_CAPACITY)
    demand = next(step for step in prefill.steps if step.name == "demand")
    assert demand.inputs["worker_tokens_per_s"] == pytest.approx(SPEED)
    assert demand.inputs["tokens_per_s_ahead"] == pytest.approx(18_000, rel=0.01)


def test_a_jump_of_arrivals_is_known_within_ten_seconds():
    """From a quarter of one worker to four times that, after minutes of calm: the average of a minute is too slow."""
    _, calm = _after(300, rate=2500.0)
    found, _ = _after(10, calm, start_s=300, rate=15_000.0, waiting=1.0, waiting_tokens=5000.0)
    assert (found[Role.PREFILL].action, found[Role.PREFILL].reason) == (
        Action.UP,
        Reason.DEMAND_ABOVE_CAPACITY,
    )


SERIAL = {
    "prefill": 1,
    "rate": 12.0,
    "arrivals": 0.1,
    "prefilling_workers": 1.0,
    "in_flight": {Role.PREFILL: 1.0},
}
"""One client that waits for each answer, at a worker that takes ten seconds for 120 tokens."""


def test_a_client_that_waits_for_each_answer_shows_no_capacity():
    """12 tokens/s of one slow serial client buy nothing, however slow; the same asked for by two at once do."""
    slow = {**SERIAL, "prefilled_tokens": 4.0, "in_flight_tokens": 120.0}
    for at_once, action in ((1.0, Action.HOLD), (2.0, Action.UP)):
        state = PlannerState()
        for start in range(0, 300, 5):
            found, state = _after(5, state, start_s=start, **{**slow, "in_flight": {Role.PREFILL: at_once}})
            if found[Role.PREFILL].action is Action.UP:
                break
        assert found[Role.PREFILL].action is action
        assert step_of(found[Role.PREFILL], "demand").inputs["requests_met"] == (
            "no" if at_once == 1 else "yes"
        )


def test_time_in_which_a_worker_hangs_is_no_capacity():
    """8,000 tokens/s for minutes, then ten minutes in which nothing is finished: throughput stays within a fifth."""
    _, state = _after(120, rate=8000.0)
    hung = {"prefilling_workers": 1.0, "prefilled_tokens": 0.0, "in_flight": {Role.PREFILL: 2.0}}
    for start in range(120, 720, 5):
        found, state = _after(5, state, start_s=start, rate=0.0, in_flight_tokens=2000.0, **hung)
    assert step_of(found[Role.PREFILL], "demand").inputs["worker_tokens_per_s"] > 0.8 * SPEED
    assert found[Role.PREFILL].reason is not Reason.DEMAND_ABOVE_CAPACITY


def test_growing_by_demand_says_the_share_that_it_compares_with():
    """9,500 tokens/s are less than the 10,000 that one can compute, and more than the 9,000 that it is to fill."""
    found, _ = _after(60, rate=9500.0)
    assert re.search(
        r"for \d+ s ahead: 9,\d{3} tokens/s, more than 9,000 \(90% of the 10,000 that 1 worker can compute\)",
        found[Role.PREFILL].sentence,
    )


def _slow_to_start(**roles):
    """Return the state of a planner that has learnt starts of 380 s, and has seen nothing arrive for ten minutes."""
    _, state = _after(600, rate=0.0, **roles)
    memory = AdaptiveMemory.read(state.learned)
    learnt = {role: replace(each, startups_s=(380.0,)) for role, each in memory.roles.items()}
    return replace(state, learned={"adaptive": replace(memory, roles=learnt)})


def test_a_clients_first_minutes_are_no_slope_for_a_slow_start():
    """A third of a worker's throughput from the first second on, replicas that take 380 s: one worker stays enough."""
    state = _slow_to_start()
    for start in range(600, 900, 5):
        found, state = _after(5, state, start_s=start, rate=3_000.0)
        demand = step_of(found[Role.PREFILL], "demand")
        assert found[Role.PREFILL].action is Action.HOLD, start
        assert demand.inputs["tokens_per_s_ahead"] <= 2.01 * 3_000


def test_a_replica_that_was_needed_a_minute_ago_is_kept():
    """19,500 tokens/s for minutes, then 2,000: the third goes a minute after two were enough, and not before."""
    _, state = _after(120, LATER, rate=19_500.0, prefill=3)
    found = {}
    for start in range(120, 360, 5):
        found[start], state = _after(5, state, start_s=start, rate=2000.0, prefill=3)
    gone = [start for start, roles in found.items() if roles[Role.PREFILL].action is Action.DOWN]
    enough = [
        start for start, roles in found.items() if step_of(roles[Role.PREFILL], "idle").inputs["idle_s"]
    ]
    assert enough[0] < gone[0] <= 245, "two start-ups after the first pull, sixty seconds idle"


def test_an_aggregated_worker_is_kept_less_busy_than_a_prefill_worker():
    """16,000 tokens/s on two workers of 10,000: enough where they share a queue, and decode nothing between."""
    split, _ = _after(30, rate=16_000.0, prefill=2)
    pulls = tuple(_joint(_pull(float(s), rate=16_000.0, prefill=2)) for s in range(1, 31))
    joint, _ = decide(Window(0.0, 30.0, pulls), PlannerState(), CONFIG)
    assert split[Role.PREFILL].action is Action.HOLD
    assert joint.roles[0].action is Action.UP


def _joint(pull):
    return replace(pull, pools={Role.AGGREGATED: pull.pools[Role.PREFILL]}, queue=None)


def test_a_worker_that_idles_is_not_taken_for_a_slow_one():
    """2,000 tokens/s keep one worker busy a fifth of the time: its throughput is still 10,000, and one is enough."""
    found, _ = _after(60, rate=2000.0)
    demand = step_of(found[Role.PREFILL], "demand")
    assert found[Role.PREFILL].action is Action.HOLD
    assert demand.inputs["worker_tokens_per_s"] == pytest.approx(SPEED)


UP, HOLD, DOWN = Action.UP, Action.HOLD, Action.DOWN
D, P = Role.DECODE, Role.PREFILL
IDLE = {"rate": 1000.0, "prefill": 3, "decode": 3, "kv": 0.05}
BACKLOG = {"waiting": 100.0, "waiting_tokens": 500_000.0}
UNKNOWN, WAITING = (HOLD, Reason.METRIC_UNKNOWN), (HOLD, Reason.REQUESTS_WAITING)
FIRST = (HOLD, Reason.WITHIN_CAPACITY)

# Seconds of one load, and what becomes of a role.
LOADS = {
    "two of three would be 60% busy": (65, {"rate": 12_000.0, "prefill": 3}, {P: (DOWN, Reason.SPARE_CAPACITY)}),
    "two of three would be 85% busy": (65, {"rate": 17_000.0, "prefill": 3}, {P: (HOLD, Reason.WITHIN_CAPACITY)}),
    "caches are empty in the first minute": (
        55, {"rate": 1000.0, "prefill": 3, "decode": 2, "kv": 0.0}, {P: FIRST, D: FIRST}
    ),
    "one that starts is supply": (30, {"rate": 15_000.0, "starting": 1}, {P: (HOLD, Reason.WITHIN_CAPACITY)}),
    "a start blocks no further step": (
        30, {"rate": 50_000.0, "starting": 1, **BACKLOG}, {P: (UP, Reason.DEMAND_ABOVE_CAPACITY)}
    ),
    "a request waits at the frontend": (130, {**IDLE, "waiting": 1.0, "oldest_wait_s": 0.1}, {P: WAITING}),
    "a request waits inside": (65, {**IDLE, "inside": 1.0}, {D: WAITING}),
    "one starts": (65, {**IDLE, "starting": 1}, {P: (HOLD, Reason.WITHIN_CAPACITY)}),
    "the router is away": (60, {**IDLE, "kv": 0.0, "known": False}, {P: UNKNOWN, D: UNKNOWN}),
    "refused requests are demand": (10, {"rate": 1000.0, "refused": 3.0}, {P: (UP, Reason.REQUESTS_REJECTED)}),
    "KV above 0.7": (30, {"rate": 1000.0, "kv": 0.75}, {D: (UP, Reason.KV_ABOVE_CAPACITY)}),
    "KV below it": (30, {"rate": 1000.0, "kv": 0.5}, {D: (HOLD, Reason.WITHIN_CAPACITY)}),
    "one holds the KV of two": (
        65, {"rate": 1000.0, "decode": 2, "kv": 0.12}, {D: (DOWN, Reason.SPARE_CAPACITY)}
    ),
}  # fmt: skip


@pytest.mark.parametrize(("seconds", "load", "expected"), LOADS.values(), ids=LOADS)
def test_a_load_grows_holds_or_shrinks_a_role(seconds, load, expected):
    """What is surely needed is asked for; what waits, starts or is unknown keeps the size."""
    found, _ = _after(seconds, LATER, **load)
    assert {role: (found[role].action, found[role].reason) for role in expected} == expected


def test_demand_that_fell_withdraws_what_only_starts():
    """A start that hangs: a minute after demand has fallen it goes, and not only once it has hung as long as demand was high."""
    _, state = _after(200, LATER, rate=19_500.0, prefill=2, starting=1)
    shrunk = []
    for at_s in range(200, 300, 5):
        found, state = _after(5, state, start_s=at_s, rate=1000.0, prefill=2, starting=1)
        if found[Role.PREFILL].action is Action.DOWN:
            shrunk.append((at_s, found[Role.PREFILL].sentence))
    assert shrunk[0][0] == 260
    assert "a replica that is still starting is removed first" in shrunk[0][1]


def test_a_start_that_stays_after_a_smaller_one_was_asked_for_can_still_be_rolled_back():
    """Of two that hang one is withdrawn: the other is still awaited; where none starts nothing is."""
    config = replace(CONFIG, max_gpu_budget=3)
    for starting, asked in ((2, 2), (0, None)):
        before = PlannerState(0, {Role.PREFILL: RoleState(last_ready=1, pending_replicas=3)})
        prefill = 3 - starting
        window = Window(0.0, 5.0, (_pull(5.0, prefill=prefill, starting=starting),))
        decision, after = decide(window, before, config)
        assert decision.changes[0].reason is Reason.ABOVE_BUDGET
        assert after.of(Role.PREFILL).pending_replicas == asked


def test_a_lowered_budget_is_kept_by_draining_and_says_so():
    """Five replicas under a budget of four: one goes, though requests wait; then it waits for the drain."""
    config = replace(CONFIG, max_gpu_budget=4)
    found, state = _after(10, rate=9000.0, prefill=3, decode=2, waiting=5.0, config=config)
    assert [r.reason for r in found.values() if r.action is Action.DOWN] == [Reason.ABOVE_BUDGET]
    drained, _ = _after(5, state, start_s=10, rate=9000.0, prefill=2, decode=2, waiting=5.0, config=config)
    assert all(r.action is Action.HOLD for r in drained.values())


def test_below_its_floor_a_role_grows_without_metrics():
    """No ready prefill worker, and none that starts: it is asked for at once."""
    found, _ = _after(5, prefill=0, known=False)
    assert (found[Role.PREFILL].action, found[Role.PREFILL].reason) == (Action.UP, Reason.BELOW_FLOOR)


def test_it_decides_every_two_seconds_and_backs_off_as_long_as_other_modes():
    """2 s unless the adjustment interval is shorter; two intervals of 30 s are thirty decisions."""
    assert DecideConfig(mode=Mode.ADAPTIVE).interval_s == 2.0
    assert DecideConfig(mode=Mode.ADAPTIVE, adjustment_interval_s=1.0).interval_s == 1.0
    assert DecideConfig(mode=Mode.LOAD).interval_s == 30.0
    state = PlannerState(0, {Role.PREFILL: RoleState(last_ready=1, pending_replicas=2)})
    config = DecideConfig(mode=Mode.ADAPTIVE)
    _, after = roll_back(Role.PREFILL, "no GPU", pull=_pull(1.0, starting=1), state=state, config=config)
    assert after.of(Role.PREFILL).backoff == 30


FLASH = {"rate": 50_000.0, "waiting": 100.0, "waiting_tokens": 500_000.0, "oldest_wait_s": 10.0}


@pytest.mark.parametrize(
    ("load", "changes", "again_s"),
    [(FLASH, {}, 1.0), (FLASH, {"no_operation": True}, None), ({"rate": 5000.0, "prefill": 2}, {}, None)],
)
def test_growing_brings_the_next_decision_forward_and_says_so(load, changes, again_s):
    """After a second, because one step may not be enough; what grows nothing, or may change nothing, waits."""
    config = replace(DecideConfig(mode=Mode.ADAPTIVE), **changes)
    found, state = _after(30, config=config, **load)
    assert state.interval_s == again_s
    steps = [step for role in found.values() for step in role.steps if step.name == "again"]
    assert [step.inputs["in_s"] for step in steps] == ([] if again_s is None else [again_s] * len(steps))
    assert bool(steps) == (again_s is not None)


def test_an_early_decision_shortens_no_back_off():
    """Back-off counts whole intervals: the decision a second after a growing one takes nothing from it."""
    role = RoleState(last_ready=2, failed_scale_ups=1, backoff=20)
    window = Window(0.0, 1.0, (_pull(1.0),))
    for interval_s, left in ((None, 19), (1.0, 20)):
        state = PlannerState(0, {Role.DECODE: role}, interval_s=interval_s)
        assert decide(window, state, CONFIG)[1].of(Role.DECODE).backoff == left


@pytest.mark.parametrize(("most", "prefill"), [(1, 2), (3, 4), (50, 11)])
def test_max_step_lets_a_flash_crowd_have_all_it_needs_at_once(most, prefill):
    """2,000,000 tokens will wait in 30 s: what clears them in a start-up is asked for, or as many as the step allows."""
    floor = replace(CONFIG, max_step=most, min_replicas={Role.PREFILL: 5})
    assert _after(5, config=floor)[0][Role.PREFILL].desired == min(5, 1 + most)
    config = replace(CONFIG, max_step=most, max_gpu_budget=None)
    found, _ = _after(30, config=config, **FLASH)
    assert found[Role.PREFILL].desired == prefill


@pytest.mark.parametrize(
    ("light", "workers", "load"),
    [(0.1, 1, 0.1 / 0.7), (0.2, 1, 0.5), (0.2, 2, 0.2 / 0.7), (0.4, 1, 2.0), (4.0, 2, 4.0)],
)
def test_a_fuller_worker_decodes_more_slowly_and_holds_its_cache_longer(light, workers, load):
    """Usage is h / (1 - 3 h) of each worker; one that cannot keep up counts as two full ones."""
    assert ObservedDecoding(light).load_on(workers) == pytest.approx(load)


def test_decode_grows_for_the_backlog_that_prefill_will_hand_over():
    """KV is at 0.3 and would stay there; 2,000,000 tokens that wait for prefill say otherwise."""
    calm, _ = _after(60, prefill=3, rate=10_000.0, starting=3)
    found, _ = _after(60, prefill=3, rate=10_000.0, starting=3, waiting=60.0, waiting_tokens=2e6)
    assert (calm[Role.DECODE].action, found[Role.DECODE].action) == (Action.HOLD, Action.UP)


def _followed(memory, pool, at_s):
    return memory.followed(pool, float(at_s))


def _counted(*counts):
    memory = RoleMemory()
    for at_s, ready, starting in counts:
        memory = _followed(memory, PoolCounts(ready, starting), at_s)
    return memory


def test_start_up_is_learnt_from_the_counts():
    """Asked for at 10 s, ready at 50 s: 40 s; the next one takes 60 s."""
    memory = _counted((0, 1, 0), (10, 1, 1), (50, 2, 0))
    assert memory.startup_s == 40.0
    memory = _followed(_followed(memory, PoolCounts(2, 1), 60.0), PoolCounts(3, 0), 120.0)
    assert memory.startups_s == (40.0, 60.0)


@given(st.lists(st.integers(1, 900), min_size=1, max_size=12))
def test_a_start_up_is_never_expected_shorter_than_any_of_the_last_two(took):
    """Whatever they take, one after the other: the longer of the newest two, so that a long one is forgotten as well."""
    memory, at_s = _counted((0, 1, 0)), 0
    for each in took:
        memory = _followed(_followed(memory, PoolCounts(1, 1), at_s + 1), PoolCounts(2, 0), at_s + 1 + each)
        at_s += 1 + each
        memory = _followed(memory, PoolCounts(1, 0), at_s)
    assert memory.startup_s == max(took[-2:])


def test_a_start_that_takes_longer_than_ever_raises_the_expectation():
    """After 200 s of starting nobody expects 30 s any more; and it is due now."""
    memory = AdaptiveMemory(roles={Role.PREFILL: _counted((0, 1, 0), (10, 1, 1))})
    assert memory.startup_s(Role.PREFILL, 210.0) == 200.0
    assert memory.of(Role.PREFILL).arrivals_s(200.0, 210.0) == (0.0,)


def test_a_replica_taken_back_was_the_newest_start():
    """Two start, one is withdrawn: the older one continues being awaited."""
    assert _counted((0, 1, 0), (10, 1, 1), (20, 1, 2), (30, 1, 1)).start_times_s == (10.0,)


def test_a_steady_slope_is_followed_without_lag():
    """A rate that rises by 1 a second is forecast where it will be."""
    seen = Trend()
    for second in range(600):
        seen = seen.followed(float(second), 1.0, 60.0)
    found = seen.forecast(30.0, 60.0)
    assert (found.now, found.ahead) == (pytest.approx(599, abs=1.5), pytest.approx(629, abs=2))


def test_a_forecast_of_nothing_has_the_error_of_the_present():
    """Ten minutes after a client has left, a start of 755 s makes its past noise no larger than it is: that held a replica."""
    seen = Trend()
    for second in range(700):
        seen = seen.followed(0.5 if second < 100 else 0.0, 1.0, 40.0)
    found = seen.forecast(755.0, 40.0)
    assert (found.ahead, found.error) == (0.0, seen.forecast(0.0, 40.0).error)
    assert found.error < 0.02


def test_values_that_repeat_each_other_are_as_uncertain_as_their_means_are():
    """What lasts for five seconds is counted once in ten: the squared error is ten times that of values that do not."""
    once, held = Trend(), Trend()
    for second in range(3000):
        value = float(second // 10 % 2)
        once, held = once.followed(value, 1.0, 30.0), held.followed(value, 1.0, 30.0, lasts_s=5.0)
    assert held.forecast(0.0, 30.0).error == pytest.approx(10**0.5 * once.forecast(0.0, 30.0).error)


def test_a_worker_is_kept_for_the_chance_of_its_kv_usage():
    """Two at 0.1 fit one by their values; what varies by as much in as long as an answer takes does not."""

    def moved(error):
        return KvView(0.2, ObservedDecoding(0.1), error).moved(2, 1)

    assert moved(0.0) == pytest.approx(ObservedDecoding(2 * 0.1 / 1.3).load_on(1))
    assert moved(0.0) < 0.45 < moved(0.2)


# ---------------------------------------------------------------- properties

amounts = st.sampled_from([0.0, 1.0, 3.0, 500.0, 20_000.0, 1e6])
loads = st.fixed_dictionaries(
    {
        "prefill": st.integers(0, 5),
        "decode": st.integers(0, 5),
        "starting": st.integers(0, 2),
        "rate": amounts,
        "kv": st.sampled_from([None, float("nan"), 0.0, 0.4, 0.95, 1.0]),
        "inside": st.sampled_from([None, 0.0, 2.0]),
        "known": st.booleans(),
        "waiting": st.sampled_from([0.0, 1.0, 50.0]),
        "waiting_tokens": amounts,
        "in_flight_tokens": amounts,
        "refused": st.sampled_from([0.0, 2.0]),
        "oldest_wait_s": st.sampled_from([None, 0.1, 30.0]),
    }
)
configs = st.builds(
    DecideConfig,
    mode=st.just(Mode.ADAPTIVE),
    max_gpu_budget=st.one_of(st.none(), st.integers(1, 12)),
    min_gpu_budget=st.integers(0, 3),
    max_step=st.integers(1, 3),
)


def _runs(steps, config):
    """Decide on a history of loads; yield each window, the state before it, decision and state after."""
    state = PlannerState()
    for index, load in enumerate(steps):
        pulls = tuple(_pull(5.0 * index + s, **load) for s in (1.0, 3.0, 5.0))
        window = Window(5.0 * index, 5.0 * index + 5, pulls)
        decision, after = decide(window, state, config)
        yield load, window, state, decision, after
        state = after


@given(st.lists(loads, min_size=1, max_size=8), configs)
def test_whatever_is_seen_budget_step_and_vetoes_hold(steps, config):
    """Never above the budget, at most max_step a role, nothing unknown or waited for shrinks, unless the budget asks."""
    for load, _, _, decision, _ in _runs(steps, config):
        if config.max_gpu_budget is not None:
            assert decision.gpus_after <= max(config.max_gpu_budget, decision.gpus)
        for role in decision.roles:
            assert abs(role.desired - role.current) <= config.max_step
            if role.action is Action.DOWN and role.reason is not Reason.ABOVE_BUDGET:
                assert load["known"]
                assert not load["starting"] or role.role is Role.DECODE
                assert not (load["waiting"] if role.role is Role.PREFILL else load["inside"])
                assert role.role is Role.PREFILL or load["kv"] == load["kv"] is not None


@given(st.lists(loads, min_size=1, max_size=5), configs)
def test_a_recorded_history_replays_bit_for_bit(steps, config):
    """Deciding again from what the ledger keeps gives the same bits, memory included."""
    for _, window, before, decision, after in _runs(steps, config):
        kept = [orjson.loads(orjson.dumps(to_plain(part))) for part in (window, before, config)]
        again = decide(from_plain(Window, kept[0]), from_plain(PlannerState, kept[1]), config_from(kept[2]))
        assert orjson.dumps(to_plain(again)) == orjson.dumps(to_plain((decision, after)))


def test_memory_of_another_version_is_read_as_far_as_it_is_known():
    """A key that this version does not know is dropped, one that is missing is blank; the rest stays."""
    _, state = _after(30, rate=18_000.0)
    plain = orjson.loads(orjson.dumps(to_plain(state)))["learned"]
    plain["adaptive"]["kv"]["load_s"] = plain["adaptive"]["kv"].pop("light_s")
    after = AdaptiveMemory.read(plain)
    assert (after.kv.light_s, after.kv.done_tokens) == (
        0.0,
        AdaptiveMemory.read(state.learned).kv.done_tokens,
    )


def test_a_start_up_that_the_manifest_states_counts_until_one_is_seen():
    """100 s stated of prefill, 200 of decode; one of 40 s seen goes before what is stated."""
    stated = AdaptiveMemory(stated_s={Role.PREFILL: 100.0, Role.DECODE: 200.0})
    assert (stated.known_startup_s(Role.PREFILL), stated.change_startup_s(Role.DECODE)) == (100.0, 200.0)
    seen = replace(stated, roles={Role.PREFILL: RoleMemory(startups_s=(40.0,))})
    assert (seen.known_startup_s(Role.PREFILL), seen.known_startup_s(Role.DECODE)) == (40.0, 40.0)


def test_until_a_start_up_is_known_a_lost_replica_costs_half_of_the_longest_that_is_waited_for():
    """300 s of the default's 600, 900 of 1,800."""
    assert AdaptiveMemory().change_startup_s(Role.PREFILL) == 300.0
    assert AdaptiveMemory(startup_timeout_s=1800.0).change_startup_s(Role.PREFILL) == 900.0


def _starting(age_s, *, stated_s=None, seen_s=None):
    """Return the memory at second 1,000 of a graph whose one prefill replica has been starting for that long."""
    seen = () if seen_s is None else (seen_s,)
    roles = {
        Role.PREFILL: RoleMemory(1, start_times_s=(1000.0 - age_s,), grown_s=1000.0 - age_s),
        Role.DECODE: RoleMemory(1, startups_s=seen),
    }
    return AdaptiveMemory(roles=roles, stated_s={} if stated_s is None else {Role.PREFILL: stated_s})


@pytest.mark.parametrize(
    ("age_s", "known", "expected_s"),
    [
        (10.0, {}, 30.0),
        (105.0, {}, 105.0),
        (400.0, {}, 300.0),
        (105.0, {"stated_s": 200.0}, 200.0),
        (105.0, {"stated_s": 60.0}, 105.0),
        (105.0, {"seen_s": 40.0}, 40.0),
    ],
)
def test_a_start_under_way_bounds_the_start_up_until_one_is_seen(age_s, known, expected_s):
    """For both roles; up to half of the time that is waited for, since a start that hangs says nothing."""
    memory = _starting(age_s, **known)
    assert [memory.hold_startup_s(role, 1000.0) for role in (Role.PREFILL, Role.DECODE)] == [expected_s] * 2


def test_a_role_does_not_shrink_while_its_first_replica_is_still_starting():
    """Asked for 105 s ago: 30 s believed would have allowed it after 60 s; after 40 s seen elsewhere, it may after 80."""
    assert _starting(105.0).hold_down_s(Role.PREFILL, 1000.0) == 105.0
    assert _starting(105.0, seen_s=40.0).hold_down_s(Role.PREFILL, 1000.0) == 0.0


@given(
    ages_s=st.lists(st.floats(0, 2000), max_size=3),
    stated_s=st.none() | st.floats(1, 900),
    seen_s=st.none() | st.floats(1, 900),
    older_s=st.floats(0, 500),
)
def test_starts_under_way_never_shorten_the_start_up(ages_s, stated_s, seen_s, older_s):
    """Never below what is known, equal to it without a start or once one was seen, and no shorter as starts grow older."""
    stated = {} if stated_s is None else {Role.PREFILL: stated_s}
    prefill = RoleMemory(start_times_s=tuple(1000.0 - each for each in ages_s))
    decode = RoleMemory(startups_s=() if seen_s is None else (seen_s,))
    memory = AdaptiveMemory(roles={Role.PREFILL: prefill, Role.DECODE: decode}, stated_s=stated)

    found_s, later_s = (memory.hold_startup_s(Role.PREFILL, at_s) for at_s in (1000.0, 1000.0 + older_s))

    known_s = memory.known_startup_s(Role.PREFILL)
    assert known_s <= found_s <= later_s <= max(known_s, memory.half_timeout_s)
    assert found_s == known_s or (ages_s and seen_s is None)


def test_the_stated_start_up_is_the_horizon_of_the_first_decision():
    """Nothing was seen to start: demand is expected for when a replica of 100 s would be ready, a pull later."""
    config = replace(CONFIG, startups_s={Role.PREFILL: 100.0})
    found, _ = _after(30, rate=3000.0, config=config)
    assert step_of(found[Role.PREFILL], "demand").inputs["horizon_s"] == pytest.approx(101.0)
