"""A worker goes from one role to the other: when, how many, and that both sides are one request."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api import Role
from penstock_planner.decide.bounds.switch import switch
from penstock_planner.decide.config import DecideConfig
from penstock_planner.decide.decision import Action, Reason, RoleProposal
from penstock_planner.decide.demand.observation import PoolCounts, Window
from penstock_planner.decide.pipeline import decide
from penstock_planner.decide.rule import Facts, Proposals
from penstock_planner.decide.state import PlannerState, RoleState
from penstock_planner.ledger import read_ledger
from penstock_planner.replay import replay

D, P = Role.DECODE, Role.PREFILL
SWITCHES = DecideConfig(max_gpu_budget=4, switches_roles=True)
BUSY, IDLE = 0.95, 0.0


def _pool(ready, **other):
    return PoolCounts(ready, gpus=1, **other)


def _window(make, prefill, decode, *, kv=BUSY, queue=IDLE):
    return make.steady(kv=[kv] * decode.ready, queue=queue, prefill=prefill, decode=decode)


def _changes(decision):
    return {each.role: each.desired - each.current for each in decision.roles}


def test_an_idle_role_gives_a_worker_to_a_pressed_one_in_the_same_decision(make):
    """At 4 of 4 GPUs no one waits for a drain: both change at once, and no GPU is added."""
    decision, state = decide(_window(make, _pool(2), _pool(2)), PlannerState(), SWITCHES)
    assert (_changes(decision), decision.switched) == ({D: 1, P: -1}, 1)
    assert (decision.gpus, decision.gpus_after) == (4, 4)
    assert [each.sentence for each in decision.roles] == [
        "decode 2 -> 3: KV 0.95 > 0.90; 1 of prefill switches",
        "prefill 2 -> 1: 1 to decode, which lacks workers: queue 0.00 < 0.20",
    ]
    assert decision.roles[1].reason is Reason.ROLE_SWITCH
    assert (state.of(D).pending_replicas, state.of(D).reserved) == (3, False)


def test_it_works_the_other_way_too(make):
    """Prefill takes from decode."""
    state = PlannerState(4, {D: RoleState(last_ready=2), P: RoleState(last_ready=2)})
    decision, _ = decide(_window(make, _pool(2), _pool(2), kv=0.1, queue=9.0), state, SWITCHES)
    assert (_changes(decision), decision.switched) == ({D: -1, P: 1}, 1)


@pytest.mark.parametrize(
    ("prefill", "config", "why"),
    [
        (_pool(2), replace(SWITCHES, switches_roles=False), "workers cannot switch"),
        (_pool(1), SWITCHES, "it is the last of its role"),
        (_pool(1, starting=1), SWITCHES, "the other one does not serve yet"),
        (_pool(2), replace(SWITCHES, min_replicas={P: 2}), "its floor is two"),
        (_pool(2), replace(SWITCHES, external=(P,)), "another writer has prefill"),
        (_pool(2), replace(SWITCHES, max_replicas={D: 2}), "decode has its most replicas"),
    ],
)
def test_none_switches_where(make, prefill, config, why):
    """Each reason alone is enough."""
    decision, _ = decide(_window(make, prefill, _pool(2)), PlannerState(), config)
    assert decision.switched == 0, why


def _proposal(role, action, reason=Reason.WITHIN_CAPACITY, *, ready=3, amount=1, spare_reason=""):
    return RoleProposal(role, _pool(ready), 1, action, reason, "because", (), amount, spare_reason)


@pytest.mark.parametrize(
    ("giver", "count"),
    [
        (_proposal(P, Action.HOLD, spare_reason="2 would be enough"), 1),
        (_proposal(P, Action.HOLD), 0),
        (_proposal(P, Action.UP, spare_reason="2 would be enough"), 0),
        (_proposal(P, Action.DOWN, Reason.SPARE_CAPACITY), 1),
        (_proposal(P, Action.DOWN, Reason.SPARE_CAPACITY, amount=5), 2),
        (_proposal(P, Action.DOWN, Reason.ABOVE_BUDGET), 0),
        (_proposal(P, Action.DOWN, Reason.ABOVE_SCHEDULE), 0),
        (_proposal(P, Action.DOWN, Reason.IDLE), 0),
    ],
)
def test_a_role_gives_what_it_can_spare_and_nothing_that_the_graph_is_to_lose(giver, count):
    """Of three workers two at most; fewer GPUs for all, or none at all, is not a reason to keep them in the other role."""
    taker = _proposal(D, Action.UP, Reason.KV_ABOVE_CAPACITY, ready=1, amount=4)
    seen = {D: RoleState(), P: RoleState()}
    for proposals in ([taker, giver], [giver, taker]):
        pools = {each.role: each.pool for each in proposals}
        before = Proposals(tuple(proposals))
        moved = switch(before, Facts(Window(0.0, 2.0, ()), pools, 4, seen, SWITCHES))
        if not count:
            assert moved == before
            continue
        grown, shrunk = moved.roles
        assert (grown.role, grown.change, grown.reason) == (D, count, Reason.KV_ABOVE_CAPACITY)
        assert (shrunk.role, shrunk.change, shrunk.reason) == (P, -count, Reason.ROLE_SWITCH)
        assert [step.name for step in (*grown.steps, *shrunk.steps)] == ["switch", "switch"]
        assert shrunk.detail.endswith(giver.spare_reason or giver.detail)


def test_aggregated_workers_have_no_role_to_switch_to(make):
    """The option is without meaning where one pool does both phases."""
    window = make.steady(kv=[BUSY, BUSY], aggregated=_pool(2))
    decision, _ = decide(window, PlannerState(), SWITCHES)
    assert (decision.switched, _changes(decision)) == (0, {Role.AGGREGATED: 1})


COUNTS = st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 2), st.integers(0, 2))


@given(
    counts=COUNTS,
    kv=st.sampled_from([0.1, 0.7, 0.95, None]),
    queue=st.sampled_from([0.0, 0.3, 9.0, None]),
    most=st.sampled_from([1, 3, None]),
)
def test_a_switch_empties_no_role_and_changes_no_sum(make, counts, kv, queue, most):
    """Whatever is observed: the giving role keeps a ready worker, both change by as many, and at most by the step."""
    ready = counts[:2]
    pools = [_pool(count, starting=coming) for count, coming in zip(ready, counts[2:], strict=True)]
    window = make.steady(kv=[kv] * pools[1].ready, queue=queue, prefill=pools[0], decode=pools[1])
    config = replace(SWITCHES, max_gpu_budget=20, max_step=most)
    state = PlannerState(
        4, {D: RoleState(last_ready=pools[1].ready), P: RoleState(last_ready=pools[0].ready)}
    )
    decision, _ = decide(window, state, config)
    if decision.switched:
        moved = _changes(decision)
        (giver,) = [each for each in decision.roles if each.action is Action.DOWN]
        assert sum(moved.values()) == 0
        assert moved[giver.role] == -decision.switched
        assert dict(zip((P, D), ready, strict=True))[giver.role] - decision.switched >= 1
        assert decision.gpus_after == decision.gpus
        assert most is None or decision.switched <= most


def test_without_the_option_every_decision_is_as_before(make):
    """Switched off, the same windows give the same decisions, whatever could be given."""
    for prefill, decode in ((_pool(2), _pool(2)), (_pool(3), _pool(1)), (_pool(1), _pool(3))):
        window = _window(make, prefill, decode)
        plain = decide(window, PlannerState(), DecideConfig(max_gpu_budget=4))
        assert plain == decide(window, PlannerState(), replace(SWITCHES, switches_roles=False))
        assert all(each.reason is not Reason.ROLE_SWITCH for each in plain[0].roles)


async def test_both_sides_are_one_request_and_the_ledger_replays(world):
    """The backend hears of the switch once; nothing was started, so no start-up is learnt of it."""
    world.config = replace(SWITCHES, metric_pulling_interval_s=5.0)
    world.backend.replicas = {P: 2, D: 1}
    world.load.kv = lambda now, _workers: BUSY if now < 1035 else 0.7
    world.load.queue = lambda now, _workers: IDLE if now < 1035 else 0.3
    await world.run_until(100)
    assert world.backend.calls == [(D, 2, "d000001")]
    assert (world.backend.replicas, world.backend.draining) == ({P: 1, D: 2}, {P: [], D: []})
    assert [(r["role"], r["outcome"]) for r in world.records("actuation")] == [
        ("prefill", "applied"),
        ("decode", "applied"),
    ]
    assert world.records("started") == []
    assert replay(read_ledger(world.folder)).differences == ()


async def test_a_refused_switch_changes_neither_role(world):
    """It is decided again in the next interval."""
    world.config = replace(SWITCHES, metric_pulling_interval_s=5.0)
    world.backend.replicas = {P: 2, D: 1}
    world.load.kv, world.load.queue = lambda *_: BUSY, lambda *_: IDLE
    world.backend.refuses = True
    await world.run_until(40)
    assert world.backend.replicas == {P: 2, D: 1}
    world.backend.refuses = False
    await world.run_until(70)
    assert world.backend.replicas == {P: 1, D: 2}
