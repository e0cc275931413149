"""The floor of GPUs over all roles: what shrinks stops there, what is below grows, and the budget goes before it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api import Role
from penstock_planner.decide.config import DecideConfig, Mode
from penstock_planner.decide.decision import Action, Reason
from penstock_planner.decide.demand.observation import PoolCounts
from penstock_planner.decide.pipeline import decide
from penstock_planner.decide.state import PlannerState, RoleState

D, P = Role.DECODE, Role.PREFILL
CALM = DecideConfig(min_total_gpus=4)


def _pool(ready, gpus=1, **other):
    return PoolCounts(ready, gpus=gpus, **other)


def _role(decision, role):
    return next(r for r in decision.roles if r.role is role)


def _idle(make, prefill=2, decode=2, sizes=(1, 1), **other):
    """An interval without any load, which every mode shrinks on if it may."""
    return make.steady(
        kv=[0.1] * decode,
        queue=0.0,
        prefill=_pool(prefill, sizes[0]),
        decode=_pool(decode, sizes[1], **other),
    )


def test_nothing_shrinks_below_the_total_floor(make):
    """Four GPUs are the floor: both roles are idle, and both stay."""
    decision, _ = decide(_idle(make), PlannerState(), CALM)
    assert {role.reason for role in decision.roles} == {Reason.AT_TOTAL_FLOOR, Reason.DECODE_GRACE_PERIOD}
    assert _role(decision, P).sentence == (
        "prefill 2: queue 0.00 < 0.20, but 4 - 1 GPUs in all are below the total floor of 4"
    )


@pytest.mark.parametrize("mode", [Mode.LOAD, Mode.ADAPTIVE, Mode.HPA, "kpa", "static"])
def test_below_the_total_floor_a_role_grows_in_every_mode(make, mode):
    """Two GPUs of four: decode on equal terms, whatever the mode's own rules say."""
    decision, _ = decide(_idle(make, 1, 1), PlannerState(), replace(CALM, mode=mode))
    decode = _role(decision, D)
    assert (decode.desired, decode.reason) == (2, Reason.BELOW_TOTAL_FLOOR)
    assert decode.sentence == "decode 1 -> 2: 2 GPUs in all are below the total floor of 4"
    assert _role(decision, P).action is Action.HOLD


@pytest.mark.parametrize(
    ("config", "state", "grown"),
    [
        (replace(CALM, max_replicas={D: 1}), PlannerState(), P),
        (CALM, PlannerState(4, {D: RoleState(last_ready=1, backoff=3)}), P),
        (replace(CALM, max_replicas={D: 1, P: 1}), PlannerState(), None),
    ],
)
def test_the_role_that_has_room_grows(make, config, state, grown):
    """A role at its maxReplicas, or whose last replica never came up, leaves it to the other."""
    decision, _ = decide(_idle(make, 1, 1), state, config)
    assert [role.role for role in decision.roles if role.action is Action.UP] == ([grown] if grown else [])
    if grown is None:
        outcomes = {step.outcome for role in decision.roles for step in role.steps}
        assert "no role has room to grow" in outcomes


def test_gpus_on_their_way_to_another_role_count_as_staying(make):
    """Floor and budget are both four: decode still gets the worker that prefill gives up."""
    config, state = replace(CALM, max_gpu_budget=4), PlannerState()
    window = make.steady(kv=[0.95, 0.95], queue=0.0, prefill=_pool(2))
    decision, state = decide(window, state, config)
    assert (_role(decision, P).desired, _role(decision, D).desired, state.of(D).reserved) == (1, 2, True)
    draining = make.steady(kv=[0.95, 0.95], queue=0.0, prefill=_pool(1, draining=1))
    decision, state = decide(draining, state, config)
    assert (_role(decision, P).desired, _role(decision, D).desired, state.of(D).reserved) == (1, 2, True)
    decision, _ = decide(make.steady(kv=[0.95, 0.95], queue=0.0, prefill=_pool(1)), state, config)
    assert (_role(decision, D).desired, decision.gpus_after) == (3, 4)


def test_a_lowered_budget_goes_before_the_floor(make):
    """The budget fell to 3 below a floor of 4: one worker goes all the same."""
    config = replace(CALM, mode=Mode.ADAPTIVE, max_gpu_budget=3)
    decision, _ = decide(_idle(make), PlannerState(), config)
    assert {Reason.ABOVE_BUDGET} == {role.reason for role in decision.roles if role.action is Action.DOWN}


def test_the_floor_is_not_left_for_a_replica_that_can_never_fit(make):
    """A decode worker's one GPU does not make room for a prefill engine of two."""
    sizes = {"prefill_gpus": 2, "decode_gpus": 1}
    config = DecideConfig(min_total_gpus=4, max_gpu_budget=4, decode_grace_intervals=0, **sizes)
    window = make.steady(kv=[0.1, 0.1], queue=9.0, prefill=_pool(1, 2), decode=_pool(2, 1))
    decision, _ = decide(window, PlannerState(), config)
    assert _role(decision, D).reason is Reason.AT_TOTAL_FLOOR
    assert decision.gpus_after == 4


@given(
    counts=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    most=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    budget=st.one_of(st.none(), st.integers(2, 24)),
    floor=st.integers(0, 24),
    loads=st.lists(st.tuples(st.sampled_from([0.1, 0.95]), st.sampled_from([0.0, 9.0])), max_size=12),
)
def test_all_gpus_stay_between_floor_and_budget_whenever_that_can_be(
    make, *, counts, sizes, most, budget, floor, loads
):
    """Whatever the load does: never above the budget, never below the floor again, and there wherever a role has room."""
    config = DecideConfig(
        min_total_gpus=floor,
        max_gpu_budget=budget,
        decode_grace_intervals=0,
        prefill_gpus=sizes[0],
        decode_gpus=sizes[1],
        max_replicas={P: max(most[0], counts[0]), D: max(most[1], counts[1])},
    )
    state, held = PlannerState(), list(counts)
    for kv, queue in [*loads, *[(0.7, 0.3)] * 24]:
        before = _total(held, sizes)
        window = make.steady(
            kv=[kv] * held[1], queue=queue, prefill=_pool(held[0], sizes[0]), decode=_pool(held[1], sizes[1])
        )
        decision, state = decide(window, state, config)
        held = [_role(decision, role).desired for role in (P, D)]
        promised = sum(size for role, size in zip((P, D), sizes, strict=True) if state.of(role).reserved)
        assert _total(held, sizes) + promised >= min(before, config.total_floor)
        assert budget is None or _total(held, sizes) <= max(before, budget)
    total = _total(held, sizes)
    for role, count, size in zip((P, D), held, sizes, strict=True):
        has_room = count < config.max_replicas[role] and (budget is None or total + size <= budget)
        assert total >= config.total_floor or not has_room


def _total(counts, sizes):
    return sum(count * size for count, size in zip(counts, sizes, strict=True))
