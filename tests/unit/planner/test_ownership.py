"""Roles that somebody else scales: left alone for a while or for good, counted against the budget, never fought."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.api import Role
from penstock_planner.decide.bounds.backoff import after_decision
from penstock_planner.decide.bounds.owner import after_foreign_write, is_ceded, owner
from penstock_planner.decide.config import DecideConfig
from penstock_planner.decide.decision import Action, Reason
from penstock_planner.decide.pipeline import decide
from penstock_planner.decide.state import PlannerState, RoleState
from penstock_planner.ledger import read_ledger
from penstock_planner.replay import replay

D, P = Role.DECODE, Role.PREFILL
LOAD, ADAPTIVE = DecideConfig(), DecideConfig().in_mode("adaptive")


def _rival(world, role, wanted, every_s):
    """Let another autoscaler set a role's replicas whenever they are not what it wants."""
    observe, writes = world.backend.observe, []

    async def rivalled():
        edited = frozenset()
        if int(world.time.at_s) % every_s == 0 and world.backend.replicas[role] != wanted:
            world.backend.replicas[role], world.backend.starting[role] = wanted, []
            writes.append(world.time.at_s)
            edited = frozenset({role})
        return replace(await observe(), edited=edited, writers={role: "hpa"})

    world.backend.observe = rivalled
    return writes


async def test_a_writer_that_keeps_writing_is_fought_ever_more_seldom(world):
    """Half an hour against an autoscaler that wants four idle workers: 1, 2, 4, 8, 16 intervals of peace."""
    world.load.kv = lambda _now, _workers: 0.1
    writes = _rival(world, D, 4, every_s=5)
    await world.run_until(900)
    await world.run_until(1800)
    assert len(writes) <= 7
    assert len([call for call in world.backend.calls if call[0] is D]) <= 6
    assert replay(read_ledger(world.folder)).differences == ()
    assert {view.other_writers.get(D, "hpa") for view in world.watcher.views} == {"hpa"}
    assert world.watcher.views[-1].other_writers == {D: "hpa"}


async def test_an_external_role_is_never_scaled_and_counts_against_the_budget(world):
    """Decode's owner takes six of eight GPUs; prefill grows by what is left, and decode not at all."""
    world.config = replace(world.config, external=(D,))
    world.load.kv, world.load.queue = lambda *_: 0.1, lambda *_: 9.0
    world.backend.replicas[D] = 6
    await world.run_until(300)
    assert [call[:2] for call in world.backend.calls] == [(P, 2)]
    assert max(world.backend.seen_gpus) <= 8


@pytest.mark.parametrize(
    ("config", "writes", "decisions"), [(LOAD, 1, 0), (LOAD, 2, 1), (LOAD, 9, 15), (ADAPTIVE, 1, 14)]
)
def test_a_role_is_left_for_doubling_times(config, writes, decisions):
    """The interval that begins with the write is the first; sixteen are the longest, whatever the mode's pace."""
    state = RoleState()
    for _ in range(writes):
        state = after_foreign_write(state, "hpa")
    left = 0
    while is_ceded(D, state, config):
        state, left = after_decision(state, config), left + 1
    assert left == decisions


def test_a_writer_is_forgotten_after_a_long_silence():
    """A person who scales by hand once an hour is planned from after one interval each time."""
    state = after_foreign_write(RoleState(), "kubectl")
    for _ in range(17):
        assert state.foreign_writes == 1
        state = after_decision(state, LOAD)
    assert state == RoleState()
    assert owner(D, state, LOAD, {D: "kubectl"}) == ""


def test_a_role_of_others_keeps_total_floor_and_step_from_growing_it(make):
    """The floor over all roles is met by the role that the planner owns."""
    config = replace(LOAD, external=(D,), min_total_gpus=4)
    decision, _ = decide(make.steady(kv=[0.95]), PlannerState(), config)
    found = {each.role: (each.action, each.reason) for each in decision.roles}
    assert found == {
        D: (Action.HOLD, Reason.SCALED_BY_OTHER),
        P: (Action.UP, Reason.BELOW_TOTAL_FLOOR),
    }
