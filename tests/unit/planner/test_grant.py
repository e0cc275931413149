"""What a graph in a GPU pool bids for, and what it does with a grant: unit tables, then whole decisions."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api import Role
from penstock.gpu_pool.bid import RoleBid, by_need, replicas_within
from penstock_planner.decide.bounds.pool import bid_sizes
from penstock_planner.decide.codec import to_plain
from penstock_planner.decide.config import DecideConfig
from penstock_planner.decide.decision import Action, Proposal, Reason, RoleProposal
from penstock_planner.decide.demand.observation import PoolCounts, Window, summarise
from penstock_planner.decide.pipeline import decide
from penstock_planner.decide.policy import PlannerPolicy
from penstock_planner.decide.state import PlannerState, RoleState
from penstock_planner.explain import in_words

P, D = Role.PREFILL, Role.DECODE

bids = st.builds(
    lambda replicas, floor, gpus: RoleBid(replicas, min(floor, replicas), gpus),
    st.integers(0, 12),
    st.integers(0, 3),
    st.sampled_from([1, 2, 4]),
)


@pytest.mark.parametrize(
    ("prefill", "decode", "expected"),
    [
        # Floors first, decode before prefill, then whichever has the smaller share of what it wants.
        (RoleBid(4, 1, 1), RoleBid(2, 1, 1), [D, P, P, D, P, P]),
        (RoleBid(3, 2, 1), RoleBid(3, 1, 1), [D, P, P, D, D, P]),
        (RoleBid(0, 0, 1), RoleBid(2, 1, 1), [D, D]),
    ],
)
def test_replicas_are_needed_floors_first_then_in_the_ratio_that_is_asked_for(prefill, decode, expected):
    """A grant takes the first ones."""
    assert list(by_need({P: replace(prefill, is_prefill=True), D: decode})) == expected


@given(bids, bids, st.integers(0, 60))
def test_a_grant_is_for_whole_replicas_that_fit(prefill, decode, gpus):
    """No more than is granted or wanted; a larger grant takes from no role."""
    both = {P: prefill, D: decode}
    fits = replicas_within(both, gpus)
    assert sum(fits[role] * both[role].gpus for role in both) <= gpus
    assert all(fits[role] <= both[role].replicas for role in both)
    assert all(replicas_within(both, gpus + 1)[role] >= fits[role] for role in both)


def decided(monkeypatch, changes, *, counts, grant, starting=None, worth=None, max_step=1, **config):
    """Return the decision of a policy that always proposes the same change of each role, and what it was asked with."""
    seen = []

    def propose(window, _state, given_config):
        seen.append(given_config)
        pools = window.pulls[-1].pools
        made = []
        for role, pool in pools.items():
            change = changes[role]
            action = Action.UP if change > 0 else Action.DOWN if change < 0 else Action.HOLD
            proposal = RoleProposal(
                role, pool, pool.gpus, action, Reason.WITHIN_CAPACITY, "as told", (), abs(change) or 1
            )
            made.append(replace(proposal, workers_for_arrivals=(worth or {}).get(role)))
        return Proposal(made, {role: RoleState() for role in pools})

    monkeypatch.setattr(DecideConfig, "policy", PlannerPolicy(propose))
    unready = dict.fromkeys(counts, 0) | (starting or {})
    pools = {
        role: PoolCounts(ready=count - unready[role], starting=unready[role], draining=0, gpus=1)
        for role, count in counts.items()
    }
    window = Window(0.0, 30.0, (summarise(30.0, pools, kv={}, queue=None),))
    chosen = DecideConfig(grant=grant, max_step=max_step, **config)
    return decide(window, PlannerState(), chosen)[0], seen[0]


def desired(decision):
    """Return what each role is to have."""
    return {each.role: each.desired for each in decision.roles}


def test_a_bid_is_made_without_budget_step_and_grant(monkeypatch):
    """Ten more are wanted: the bid says so, though two fit and one decision adds one; the manifest's budget does not count."""
    decision, asked = decided(monkeypatch, {P: 6, D: 4}, counts={P: 1, D: 1}, grant=4, max_gpu_budget=3)
    assert (asked.max_gpu_budget, asked.max_step) == (None, None)
    assert bid_sizes(decision) == (1,) * 12
    assert desired(decision) == {P: 2, D: 2}
    assert decision.max_gpu_budget == 4


@pytest.mark.parametrize(
    ("note", "worth", "bid"),
    [
        ("no 8 more", {P: 2.3}, 3 + 2),
        # Neither what exists nor the floor is bid away.
        ("no 8 more", {P: 0.4}, 2 + 2),
        # Nothing is known, or the pool has refused nothing.
        ("no 8 more", {}, 8 + 2),
        ("", {P: 2.3}, 8 + 2),
    ],
)
def test_a_graph_that_is_short_bids_for_what_arrives_and_not_for_its_queue(monkeypatch, note, worth, bid):
    """Its policy asks for six prefill workers more, to clear a queue that decode holds up."""
    decision, _ = decided(
        monkeypatch, {P: 6, D: 1}, counts={P: 2, D: 1}, grant=3, worth=worth, grant_note=note
    )
    assert len(bid_sizes(decision)) == bid


def test_a_decision_says_which_pool_it_is_and_who_holds_what_it_lacks(monkeypatch):
    """In the words of whoever shares out; `explain` repeats them alongside the grant."""
    note = "GpuPool shared: 1 more GPU will follow: batch returns 1"
    decision, _ = decided(monkeypatch, {P: 3, D: 0}, counts={P: 2, D: 1}, grant=3, grant_note=note)
    assert f"the pool grants 3 GPUs, enough for 2 ({note})" in " ".join(
        each.sentence for each in decision.roles
    )
    config = {"grant": 3, "grant_note": note}
    record = {
        "kind": "adjustment",
        "at_s": 30.0,
        "origin_s": 0.0,
        "config": config,
        "decision": to_plain(decision),
    }
    assert f"\n  grant 3 GPUs, {note}\n" in in_words(record)
    assert "grant" not in in_words({**record, "config": {}, "decision": {**record["decision"], "roles": []}})


def test_a_lowered_grant_is_given_back_at_once_and_in_ratio(monkeypatch):
    """Of eight replicas four may stay, whatever one decision may otherwise change."""
    decision, _ = decided(monkeypatch, {P: 0, D: 0}, counts={P: 6, D: 2}, grant=4)
    assert desired(decision) == {P: 3, D: 1}
    assert {each.reason for each in decision.roles} == {Reason.ABOVE_BUDGET}
    sentence = "prefill 6 -> 3: wants 6 replicas; the pool grants 4 GPUs, enough for 3"
    assert sentence in {each.sentence for each in decision.roles}
    assert bid_sizes(decision) == (1,) * 8


def test_a_role_with_more_than_its_share_gives_to_one_that_lacks(monkeypatch):
    """Decode has all that it wants and prefill a quarter, of as many GPUs as there are: decode gives one, and no second."""
    decision, _ = decided(monkeypatch, {P: 6, D: 0}, counts={P: 2, D: 3}, grant=5)
    assert desired(decision) == {P: 2, D: 2}
    assert "decode 3 -> 2: wants 3 replicas; the pool grants 5 GPUs, enough for 2" in {
        each.sentence for each in decision.roles
    }
    decision, _ = decided(monkeypatch, {P: 5, D: 1}, counts={P: 3, D: 2}, grant=5)
    assert desired(decision) == {P: 3, D: 2}


@pytest.mark.parametrize(
    ("note", "counts", "expected"),
    [
        ("no 1 more", {P: 3, D: 1}, {P: 2, D: 1}),
        ("no 1 more", {P: 2, D: 2}, {P: 2, D: 2}),
        # Nobody has refused the fifth GPU: the grant follows the bid.
        ("", {P: 3, D: 1}, {P: 3, D: 1}),
    ],
)
def test_prefill_gives_to_decode_where_the_smaller_share_rises(monkeypatch, note, counts, expected):
    """Three and two are wanted, four granted: decode's half of what it wants limits the graph more than prefill's two thirds."""
    changes = {P: 3 - counts[P], D: 2 - counts[D]}
    decision, _ = decided(monkeypatch, changes, counts=counts, grant=4, grant_note=note)
    assert desired(decision) == expected


def test_decode_gives_nothing_for_the_queue_before_prefill(monkeypatch):
    """One of seven and two of four are there: the smaller share would rise, and decode would have the smaller one."""
    decision, _ = decided(monkeypatch, {P: 6, D: 2}, counts={P: 1, D: 2}, grant=3, grant_note="no 8 more")
    assert desired(decision) == {P: 1, D: 2}


@pytest.mark.parametrize(
    ("starting", "floor", "expected"),
    [({P: 1}, 1, {P: 1, D: 2}), ({}, 1, {P: 2, D: 1}), ({P: 1}, 2, {P: 2, D: 1})],
)
def test_a_worker_that_still_starts_goes_before_one_that_serves(monkeypatch, starting, floor, expected):
    """A grant that was raised for a second is taken back: two and one would fit, and the second prefill worker serves nobody yet."""
    decision, _ = decided(
        monkeypatch,
        {P: 4, D: 2},
        counts={P: 2, D: 2},
        grant=3,
        starting=starting,
        min_replicas={P: floor, D: 1},
    )
    assert desired(decision) == expected


@pytest.mark.parametrize(
    ("changes", "counts", "grant", "floor"),
    [
        # A replica's move would leave decode the smaller share: wants change from second to second.
        ({P: 2, D: 0}, {P: 3, D: 2}, 5, 1),
        # There is room without it.
        ({P: 6, D: 0}, {P: 2, D: 3}, 6, 1),
        # Decode's floor.
        ({P: 6, D: 0}, {P: 2, D: 3}, 5, 3),
    ],
)
def test_what_fits_together_stays_though_another_ratio_is_wanted(monkeypatch, changes, counts, grant, floor):
    """No worker is drained for a ratio alone."""
    decision, _ = decided(monkeypatch, changes, counts=counts, grant=grant, min_replicas={P: 1, D: floor})
    assert desired(decision)[D] == counts[D]


@given(
    st.fixed_dictionaries({P: st.integers(1, 8), D: st.integers(1, 8)}),
    st.fixed_dictionaries({P: st.integers(1, 6), D: st.integers(1, 6)}),
    st.integers(2, 12),
    st.sampled_from(["", "no more"]),
)
def test_the_same_wants_move_no_gpu_to_and_fro(wanted, counts, grant, note):
    """Decision after decision on what the one before made, roles come to rest; what fits is never exceeded again."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        seen = [counts]
        for _ in range(24):
            changes = {role: wanted[role] - seen[-1][role] for role in wanted}
            decision, _ = decided(monkeypatch, changes, counts=seen[-1], grant=grant, grant_note=note)
            seen.append(desired(decision))
    assert seen[-1] == seen[-2] == seen[-3]
    assert all(sum(each.values()) <= max(grant, 2) for each in seen[1:])


def test_a_scale_down_of_the_planner_itself_is_kept(monkeypatch):
    """It is part of the bid, and within the grant nothing is added to it."""
    decision, _ = decided(monkeypatch, {P: -1, D: 0}, counts={P: 4, D: 2}, grant=6)
    assert desired(decision) == {P: 3, D: 2}
    assert bid_sizes(decision) == (1,) * 5


def test_growth_is_limited_to_what_fits(monkeypatch):
    """Three more are wanted and two fit."""
    decision, _ = decided(monkeypatch, {P: 3, D: 0}, counts={P: 1, D: 1}, grant=4, max_step=None)
    assert desired(decision) == {P: 3, D: 1}


def test_a_decision_of_a_graph_in_no_pool_bids_nothing(monkeypatch):
    """Its budget is the manifest's, and the policy is asked with it."""
    decision, asked = decided(monkeypatch, {P: 0, D: 0}, counts={P: 1, D: 1}, grant=None)
    assert (bid_sizes(decision), decision.max_gpu_budget, asked.max_gpu_budget) == (None, 8, 8)


def test_a_decision_without_an_observation_bids_nothing():
    """Whoever drives the pool goes by the last bid."""
    decision, _ = decide(Window(0.0, 30.0, ()), PlannerState(), replace(DecideConfig(), grant=5))
    assert (bid_sizes(decision), decision.max_gpu_budget) == (None, 5)


def test_a_graph_above_its_grant_gives_back_though_its_idle_role_is_at_its_floor(monkeypatch):
    """Prefill proposes to shrink below its floor, which is refused later: decode gives the GPU, and does not count on that one."""
    decision, _ = decided(monkeypatch, {P: -1, D: 1}, counts={P: 1, D: 4}, grant=4)
    assert desired(decision) == {P: 1, D: 3}
