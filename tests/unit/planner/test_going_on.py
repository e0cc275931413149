"""Modes that plan on while replicas start and drain: nothing blocks, starts are timed, what never comes is taken back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.api import Role
from penstock_planner.core.phase import PlannerPhase
from penstock_planner.decide.config import DecideConfig, Mode
from penstock_planner.decide.policy import policy_of
from penstock_planner.ledger import read_ledger
from penstock_planner.replay import replay

D, P = Role.DECODE, Role.PREFILL


@pytest.fixture(name="going_on")
def _going_on(world, monkeypatch):
    """A world whose planner decides every 15 s by the HPA's rule, but keeps a ledger; replicas take 40 s."""
    with_ledger = replace(policy_of(Mode.HPA), has_ledger=True)
    monkeypatch.setattr(DecideConfig, "policy", property(lambda _config: with_ledger))
    world.config = replace(world.config, mode=Mode.HPA, adjustment_interval_s=15.0, max_step=None)
    world.backend.start_s = 40.0
    world.load.queue = lambda _now, workers: 1.0 * workers
    return world


async def test_a_start_stops_neither_pulls_nor_decisions(going_on):
    """A pull every second and a decision every 15 s, also while decode starts and prefill is asked for as well."""
    going_on.load.kv = lambda _now, _workers: 0.95
    going_on.load.queue = lambda now, workers: 3.0 * workers if 1025 < now < 1050 else 1.0 * workers
    await going_on.run_until(60)
    assert [p["at_s"] - 1000 for p in going_on.records("pull")] == [float(t) for t in range(1, 61)]
    assert [d.at_s - 1000 for d in going_on.watcher.decisions] == [15.0, 30.0, 45.0, 60.0]
    assert going_on.backend.calls[:2] == [(D, 2, "d000001"), (P, 3, "d000002")]
    assert {view.phase for view in going_on.watcher.views} == {PlannerPhase.OBSERVING}


async def test_a_replicas_start_is_timed_from_its_decision(going_on):
    """Asked for at 15 s, ready at 55 s; the ledger has both and the views the newest time."""
    going_on.load.kv = lambda now, _workers: 0.95 if now < 1020 else 0.5
    await going_on.run_until(70)
    (started,) = going_on.records("started")
    assert (started["role"], started["asked_s"], started["at_s"], started["took_s"]) == (
        "decode",
        1015.0,
        1055.0,
        40.0,
    )
    assert going_on.watcher.views[-1].startup_s == {D: 40.0}
    assert going_on.watcher.views[50].startup_s == {}


async def test_a_late_replica_is_withdrawn_while_the_other_role_goes_on(going_on):
    """Decode never comes: taken back at the deadline; prefill, asked for later, becomes ready meanwhile."""
    going_on.deadline_s = 50.0
    going_on.backend.never_ready = frozenset({D})
    going_on.load.kv = lambda now, _workers: 0.95 if now < 1020 else 0.5
    going_on.load.queue = lambda now, workers: 3.0 * workers if now < 1020 else 1.0 * workers
    await going_on.run_until(80)
    assert [call[:2] for call in going_on.backend.calls] == [(D, 2), (P, 3), (D, 1)]
    (withdrawal,) = [r for r in going_on.records("decision") if r["kind"] == "withdrawal"]
    assert withdrawal["at_s"] == 1066.0
    assert withdrawal["decision"]["roles"][0]["sentence"].endswith("not ready after 50 s")
    # All pools count: prefill 3, decode 1 and the late one.
    assert (withdrawal["decision"]["gpus"], set(withdrawal["pull"]["pools"])) == (5, {"prefill", "decode"})
    assert replay(read_ledger(going_on.folder)).differences == ()


async def test_a_drain_that_never_ends_blocks_nothing(going_on):
    """Decisions continue alongside it; its GPUs count."""
    going_on.backend.replicas[D] = 2
    going_on.backend.drain_s = 1e9
    going_on.config = replace(going_on.config, mode="dynamo-load", max_step=1)
    going_on.load.kv = lambda _now, _workers: 0.05
    await going_on.run_until(100)
    assert len(going_on.watcher.decisions) == 6
    assert not any(view.overdue for view in going_on.watcher.views)


async def test_a_start_outlives_another_clock_with_a_new_deadline(going_on):
    """After a reboot its age is unknown: it is waited for from then on."""
    going_on.deadline_s = 50.0
    going_on.backend.never_ready = frozenset({D})
    going_on.load.kv = lambda now, _workers: 0.95 if now < 1020 else 0.5
    await going_on.run_until(40)
    going_on.timeline = "other@1"
    await going_on.run_until(100)
    (withdrawal,) = [r for r in going_on.records("decision") if r["kind"] == "withdrawal"]
    assert 1090.0 <= withdrawal["at_s"] <= 1092.0
