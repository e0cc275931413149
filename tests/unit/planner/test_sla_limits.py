"""Mode sla beyond its budget: the roles' ratio, moves that happen whole or not at all, and what to expect."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sla_load import CONFIG, decided_after, step_of

from penstock.api import Role
from penstock_planner.decide.decision import Action, Reason
from penstock_planner.decide.policies.sla.limits import RoleNeed, coverage, divide_budget, gpus_of
from penstock_planner.decide.state import PlannerState

D, P = Role.DECODE, Role.PREFILL
OVERLOAD = {"rate": 60.0, "running": 150.0, "kv": 0.05}
"""60,000 prompt tokens/s need seven prefill engines of 10,000; 60 answers/s of 100 tokens need seven decode engines too."""


def _need(role, needed, floor=1, most=None, gpus=1):
    return RoleNeed(role, needed, floor, most, gpus)


@pytest.mark.parametrize(
    ("needs", "budget", "expected"),
    [
        ((_need(P, 4), _need(D, 8)), 6, {P: 2, D: 4}),
        ((_need(P, 4), _need(D, 8)), None, {P: 4, D: 8}),
        ((_need(P, 4), _need(D, 8)), 12, {P: 4, D: 8}),
        ((_need(P, 4), _need(D, 4)), 5, {P: 2, D: 3}),
        ((_need(P, 9), _need(D, 3, floor=2)), 4, {P: 2, D: 2}),
        ((_need(P, 9, most=2), _need(D, 9)), 8, {P: 2, D: 6}),
        ((_need(P, 4), _need(D, 4, gpus=4)), 12, {P: 4, D: 2}),
        ((_need(P, 4, floor=3), _need(D, 4, floor=3)), 4, {P: 3, D: 3}),
    ],
)
def test_a_short_budget_is_split_by_what_each_role_needs(needs, budget, expected):
    """The example of the docstring, no ceiling, enough, a tie, a floor, a maxReplicas, large engines, floors above it."""
    assert divide_budget(needs, budget) == expected


_needs = st.builds(
    RoleNeed,
    role=st.just(P),
    needed=st.integers(1, 9),
    floor=st.integers(1, 3),
    most=st.one_of(st.none(), st.integers(1, 9)),
    gpus=st.integers(1, 4),
)


@given(prefill=_needs, decode=_needs, budget=st.integers(1, 40))
def test_no_other_split_covers_more_and_none_leaves_out_what_fits(prefill, decode, budget):
    """Compared with every split within bounds and budget; what is left fits nobody who wants more."""
    needs = (prefill, replace(decode, role=D))
    found = divide_budget(needs, budget)
    used = gpus_of(needs, found)
    floors = gpus_of(needs, {each.role: each.floor for each in needs})
    assert all(each.floor <= found[each.role] <= each.wanted for each in needs)
    assert used <= max(budget, floors)
    every = product(*(range(each.floor, each.wanted + 1) for each in needs))
    splits = [dict(zip((P, D), counts, strict=True)) for counts in every]
    fitting = [split for split in splits if gpus_of(needs, split) <= budget]
    assert coverage(needs, found) == max(
        [coverage(needs, split) for split in fitting] or [coverage(needs, found)]
    )
    for each in needs:
        assert found[each.role] == each.wanted or used + each.gpus > budget


def test_the_last_gpus_go_where_the_ratio_is_short():
    """Six GPUs, two prefill and three decode engines, both needing seven: the sixth goes to prefill, though decode is first."""
    config = replace(CONFIG, max_gpu_budget=6)
    found, _ = decided_after(30, prefill=2, decode=3, config=config, **OVERLOAD)
    assert (found[P].desired, found[D].desired) == (3, 3)
    assert found[D].reason is Reason.GPU_BUDGET_YIELDED
    assert "its share of the budget of 6 is 3" in found[D].sentence


def test_a_full_budget_that_is_split_badly_moves_a_replica_and_keeps_its_promise():
    """One prefill and five decode engines: decode gives one up though it wants more itself, and prefill is owed it."""
    config = replace(CONFIG, max_gpu_budget=6)
    found, state = decided_after(120, prefill=1, decode=5, config=config, **OVERLOAD)
    assert (found[D].desired, found[D].reason) == (4, Reason.BUDGET_SHARE)
    assert found[P].action is Action.HOLD
    assert found[P].sentence.endswith("decode releases one replica for it")
    assert state.of(P).reserved
    found, state = decided_after(5, state, start_s=120, prefill=1, decode=4, config=config, **OVERLOAD)
    assert (found[P].desired, found[D].desired, state.of(P).reserved) == (2, 4, False)


@pytest.mark.parametrize(
    ("changes", "fleet"),
    [
        ({"max_replicas": {P: 1}}, {}),
        ({"min_replicas": {D: 5}}, {}),
        ({"prefill_gpus": 5, "max_gpu_budget": 10}, {}),
        ({}, {"prefill": 3, "decode": 3}),
    ],
)
def test_a_move_that_cannot_succeed_or_is_not_worth_it_is_not_begun(changes, fleet):
    """The taker is at its maxReplicas, the giver at its floor, what it can give is too little, or the split is right."""
    config = replace(CONFIG, **{"max_gpu_budget": 6, **changes})
    for seconds in (120, 240):
        found, state = decided_after(
            seconds, config=config, **{"prefill": 1, "decode": 5, **fleet, **OVERLOAD}
        )
        assert {role.action for role in found.values()} == {Action.HOLD}
        assert not state.of(P).reserved
        assert not state.of(D).reserved


@pytest.mark.parametrize("fleet", [(1, 5), (5, 1), (2, 4), (3, 3), (2, 3), (1, 1)])
def test_under_a_lasting_overload_every_fleet_comes_to_the_same_split_and_stays(fleet):
    """Fifteen minutes of the same demand: three and three of six, with a move there and back at most while factors settle."""
    config, state, changes = replace(CONFIG, max_gpu_budget=6), PlannerState(), 0
    held = {P: fleet[0], D: fleet[1]}
    for start in range(0, 900, 5):
        load = {"prefill": held[P], "decode": held[D], **OVERLOAD}
        found, state = decided_after(5, state, start_s=start, config=config, **load)
        changes += sum(abs(role.desired - role.current) for role in found.values())
        held = {role: found[role].desired for role in held}
        assert sum(held.values()) <= 6
    assert held == {P: 3, D: 3}
    assert changes <= abs(fleet[0] - 3) + abs(fleet[1] - 3) + 4


def test_decode_is_expected_to_get_no_more_than_prefill_computes():
    """Prefill may have three of the seven engines that it needs: half of the answers begin, and decode's ITL is of those."""
    limits = {"max_replicas": {P: 3, D: 4}}
    found, _ = decided_after(60, prefill=3, decode=4, config=replace(CONFIG, **limits), **OVERLOAD)
    free, _ = decided_after(60, prefill=3, decode=4, config=replace(CONFIG, max_replicas={D: 4}), **OVERLOAD)
    behind, all_of_it = (step_of(each[D], "limit").inputs["itl_s_expected"] for each in (found, free))
    assert all_of_it is None or behind <= all_of_it


def test_nothing_moves_right_after_a_role_has_changed():
    """Within the hold-down of a minute."""
    found, _ = decided_after(30, prefill=1, decode=5, config=replace(CONFIG, max_gpu_budget=6), **OVERLOAD)
    assert found[D].action is Action.HOLD


@pytest.mark.parametrize(
    ("changes", "binds"),
    [
        ({"max_gpu_budget": 4}, "maxGpuBudget 4"),
        ({"max_replicas": {P: 2}}, "maxReplicas 2 of prefill"),
        ({"max_gpu_budget": 4, "max_replicas": {P: 2}}, "maxGpuBudget 4 and maxReplicas 2 of prefill"),
    ],
)
def test_demand_beyond_the_limits_names_them_and_what_to_expect(changes, binds):
    """Two prefill engines of 10,000 tokens/s compute a third of 60,000: TTFT grows without end, and that is said."""
    found, _ = decided_after(60, prefill=2, decode=2, config=replace(CONFIG, **changes), **OVERLOAD)
    step = step_of(found[P], "limit")
    assert step.outcome == f"{binds} binds: expect unbounded TTFT: only 33% of prompt tokens can be computed"
    assert f"workers are needed and {binds} allows 2: expect unbounded TTFT" in found[P].sentence
    assert step.inputs["replicas_needed"] >= 7
    assert (step.inputs["ttft_s_expected"], step.threshold) == (None, 2)


def test_a_limit_just_too_low_tells_the_ttft_and_the_share_in_time():
    """Three engines at 0.93 of what they can: requests wait, by the queue's formula, and most are in time."""
    config = replace(CONFIG, max_replicas={P: 3})
    found, _ = decided_after(60, prefill=3, decode=9, rate=28.0, running=40.0, kv=0.05, config=config)
    inputs = step_of(found[P], "limit").inputs
    assert 1.0 < inputs["ttft_s_expected"] < 10.0
    assert 0.5 < inputs["in_time_expected"] < 0.99
    assert "of requests on time, but 3 is the maximum number of replicas" in found[P].sentence


def test_decode_at_its_limit_tells_the_itl():
    """24 answers/s of 100 tokens on two engines of 25 ms each, where 20 ms are to be held."""
    config = replace(CONFIG, max_replicas={D: 2})
    found, _ = decided_after(60, rate=24.0, prefill=10, decode=2, running=60.0, kv=0.05, config=config)
    step = step_of(found[D], "limit")
    assert step.inputs["itl_s_expected"] == pytest.approx(step_of(found[D], "itl").inputs["itl_s_ahead"])
    assert step.outcome.startswith("maxReplicas 2 of decode binds: expect ITL of ")


def test_demand_within_the_limits_says_nothing_of_them():
    """64 GPUs are enough."""
    found, _ = decided_after(60, prefill=2, decode=2, **OVERLOAD)
    assert not [
        step for role in found.values() for step in role.steps if step.name in {"limit", "budget_share"}
    ]
