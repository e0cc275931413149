"""GPUs move from an idle role to a pressed one: shrink, drain, grow, or say why not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.api import Role
from penstock_planner.decide.bounds.trial_yield import reclaim_trial_replica
from penstock_planner.decide.config import DecideConfig
from penstock_planner.decide.decision import Action, Reason, RoleProposal
from penstock_planner.decide.demand.observation import PoolCounts, Window
from penstock_planner.decide.pipeline import decide
from penstock_planner.decide.rule import Facts, Proposals
from penstock_planner.decide.state import PlannerState, RoleState
from penstock_planner.ledger import read_ledger
from penstock_planner.replay import replay

D, P = Role.DECODE, Role.PREFILL
FULL = DecideConfig(max_gpu_budget=4)
OWED = PlannerState(4, {D: RoleState(last_ready=2, reserved=True)})
CLAIM = PlannerState(4, {P: RoleState(last_ready=2, reserved=True)})


def _pool(ready, **other):
    return PoolCounts(ready, gpus=1, **other)


def _yielded(proposals, config):
    pools = {each.role: each.pool for each in proposals}
    facts = Facts(Window(0.0, 2.0, ()), pools, 4, dict.fromkeys((P, D), RoleState()), config)
    return reclaim_trial_replica(Proposals(tuple(proposals)), facts).roles


def _role(decision, role):
    return next(r for r in decision.roles if r.role is role)


def _steps(decision, role):
    return [(s.name, s.outcome) for s in _role(decision, role).steps if s.name == "rebalance"]


def test_the_idle_role_gives_up_a_worker_and_the_pressed_one_is_remembered(make):
    """At 4 of 4 GPUs decode waits, prefill shrinks, and the state says for whom."""
    window = make.steady(kv=[0.95, 0.95], queue=0.0, prefill=_pool(2))
    decision, state = decide(window, PlannerState(), FULL)
    assert _role(decision, P).desired == 1
    assert (_role(decision, D).action, _role(decision, D).reason) == (Action.HOLD, Reason.GPU_BUDGET)
    assert _role(decision, D).sentence == (
        "decode 2: KV 0.95 > 0.90, but 4 + 1 GPUs exceed the budget of 4; prefill releases one replica for it"
    )
    assert (state.of(D).reserved, state.of(P).reserved) == (True, False)


def test_the_claim_waits_until_the_worker_has_drained(make):
    """Draining workers hold their GPUs: 3 + 1 of 4 are not free yet."""
    window = make.steady(kv=[0.95, 0.95], queue=0.3, prefill=_pool(1, draining=1))
    decision, state = decide(window, OWED, FULL)
    assert _role(decision, D).action is Action.HOLD
    assert _steps(decision, D) == [("rebalance", "waits: the replica released for it is still draining")]
    assert state.of(D).reserved


def test_the_pressed_role_grows_once_the_gpus_are_free(make):
    """And is owed nothing after."""
    window = make.steady(kv=[0.95, 0.95], queue=0.3, prefill=_pool(1))
    decision, state = decide(window, OWED, FULL)
    assert _role(decision, D).action is Action.UP
    assert decision.gpus_after == 4
    assert _steps(decision, D) == [("rebalance", "freed: it grows")]
    assert not state.of(D).reserved


def test_gpus_given_up_for_prefill_go_to_prefill_though_decode_asks_too(make):
    """Decode usually goes first; here it would take back what it gave."""
    window = make.steady(kv=[0.95], queue=9.0, prefill=_pool(2))
    decision, _ = decide(window, CLAIM, FULL)
    assert decision.gpus_after == 4
    assert [_role(decision, r).action for r in (P, D)] == [Action.UP, Action.HOLD]
    assert "are given to prefill first" in _role(decision, D).sentence


def test_a_claim_whose_pressure_is_gone_is_abandoned_with_a_reason(make):
    """KV within its thresholds again: it says so and forgets it."""
    decision, state = decide(make.steady(kv=[0.7, 0.7], prefill=_pool(1)), OWED, FULL)
    assert _role(decision, D).reason is Reason.WITHIN_THRESHOLDS
    assert _role(decision, D).sentence.endswith("; rebalance abandoned: it no longer asks for more")
    assert not state.of(D).reserved


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (FULL, Reason.GPU_BUDGET),
        (replace(FULL, max_gpu_budget=9, max_replicas={D: 2}), Reason.AT_MAX_REPLICAS),
    ],
)
def test_a_claim_that_nothing_can_fulfil_any_more_is_abandoned(make, config, reason):
    """Somebody else took the GPUs, or the role may not grow at all."""
    window = make.steady(kv=[0.95, 0.95], queue=0.6, prefill=_pool(2))
    decision, state = decide(window, OWED, config)
    assert _role(decision, D).reason is reason
    assert _steps(decision, D) == [("rebalance", "abandoned: no GPUs were freed for it")]
    assert not state.of(D).reserved


def test_an_engine_of_several_gpus_is_paid_for_by_several_workers(make):
    """Decode needs 2 GPUs: prefill gives one now, one an interval later, and only then decode grows."""
    config = replace(FULL, max_gpu_budget=6, decode_gpus=2)
    decode = PoolCounts(1, gpus=2)
    state = PlannerState()
    seen = []
    for ready in (4, 3, 2):
        window = make.steady(kv=[0.95], queue=0.0, prefill=_pool(ready), decode=decode)
        decision, state = decide(window, state, config)
        seen.append((_role(decision, D).action, state.of(D).reserved))
        assert decision.gpus_after <= 6
    assert seen == [(Action.HOLD, True), (Action.HOLD, True), (Action.UP, False)]


def test_a_move_that_the_giver_can_never_pay_for_is_not_begun(make):
    """Decode needs 4 GPUs and prefill can give one before its floor: it shrinks because it is idle, for nobody."""
    config = replace(FULL, max_gpu_budget=6, decode_gpus=4)
    window = make.steady(kv=[0.95], queue=0.0, prefill=_pool(2), decode=PoolCounts(1, gpus=4))
    decision, state = decide(window, PlannerState(), config)
    assert _role(decision, P).action is Action.DOWN
    assert _steps(decision, D) == [
        ("rebalance", "not begun: only 1 of the 4 GPUs that it needs can be freed")
    ]
    assert not state.of(D).reserved


async def test_rebalancing_never_exceeds_the_budget_and_survives_a_kill_at_every_step(new_world, kill_type):
    """Shrink, drain, grow: the same calls whenever the planner is killed on the way."""

    def build():
        world = new_world()
        world.config = replace(world.config, max_gpu_budget=4, metric_pulling_interval_s=5.0)
        world.backend.replicas = {P: 2, D: 2}
        world.load.kv = lambda _now, _workers: 0.95
        world.load.queue = lambda _now, workers: 0.0 if workers == 2 else 0.3
        return world

    calm = build()
    await calm.run_until(120)
    assert [(role, n) for role, n, _ in calm.backend.calls] == [(P, 1), (D, 3)]
    assert max(calm.backend.seen_gpus) == 4
    for at in range(1, calm.killer.steps, 2):
        world = build()
        world.killer.at = at
        with pytest.raises(kill_type):
            await world.run_until(120)
        world.killer.at = None
        await world.run_until(160)
        assert [(role, n) for role, n, _ in world.backend.calls] == [(P, 1), (D, 3)]
        assert max(world.backend.seen_gpus) == 4
        assert replay(read_ledger(world.folder)).differences == ()


_PRESSED = RoleProposal(D, _pool(1), 1, Action.UP, Reason.KV_ABOVE_CAPACITY, "full", ())
_TRIED = RoleProposal(
    P,
    _pool(3),
    1,
    Action.HOLD,
    Reason.WITHIN_CAPACITY,
    "fits",
    (),
    trial_only_reason="2 prefill workers would have been enough",
)


@pytest.mark.parametrize(
    ("pressed", "tried", "other", "gives"),
    [
        ({}, {}, {}, True),
        ({}, {"trial_only_reason": ""}, {}, False),
        ({"action": Action.HOLD}, {}, {}, False),
        ({"reason": Reason.SERVED_LATE}, {}, {}, False),
        ({"pool": _pool(1, draining=1)}, {}, {}, False),
        ({"engine_gpus": 2}, {}, {}, False),
        ({}, {}, {"max_gpu_budget": 5}, False),
        ({}, {}, {"max_gpu_budget": None}, False),
        ({}, {}, {"max_replicas": {D: 1}}, False),
    ],
    ids=["yields", "kept", "content", "only-tried", "draining", "too-few", "room", "no-budget", "ceiling"],
)
def test_what_is_only_on_trial_is_given_to_what_the_budget_alone_holds_back(pressed, tried, other, gives):
    """A replica that more keeps stays; so does one where the other role cannot, or need not, grow by its GPUs."""
    proposals = [replace(_TRIED, **tried), replace(_PRESSED, **pressed)]
    found = _yielded(proposals, replace(FULL, **other))
    assert [each.action is Action.DOWN for each in found] == [gives, False]


def test_a_role_that_another_client_scales_yields_nothing():
    """Its writer decides."""
    left = replace(FULL, external=frozenset({P}))
    assert _yielded([_TRIED, _PRESSED], left) == (_TRIED, _PRESSED)
