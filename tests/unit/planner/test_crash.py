"""Kills the planner at every step it takes and compares with one that lived."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from sla_load import FEW_POINTS

from penstock.api import Role
from penstock_planner.decide.config import Mode
from penstock_planner.decide.demand.observation import Demand
from penstock_planner.ledger import read_ledger
from penstock_planner.replay import replay

D, P = Role.DECODE, Role.PREFILL
HORIZON_S = 260.0
ROUND = 7


def _prepare(world):
    """Load both roles up and down within a few minutes, six pulls an interval."""
    world.load.kv = lambda now, _workers: 0.95 if now < 1080 else 0.2
    world.load.queue = lambda now, workers: 2.0 * workers if now < 1060 else 0.0
    world.config = replace(world.config, metric_pulling_interval_s=5.0)
    return world


def _prepare_failing(world):
    """Let every new decode worker be given up by the backend: withdrawals and backoff."""
    world.config = replace(world.config, metric_pulling_interval_s=5.0)
    world.load.kv = lambda _now, _workers: 0.95
    world.backend.never_ready = frozenset({D})
    world.backend.gives_up_s = 20.0
    return world


def _prepare_going_on(world):
    """Let a mode that does not wait ask for more while replicas start: 40 s each, a decision every 15 s."""
    config = replace(world.config, mode=Mode.HPA, metric_pulling_interval_s=5.0, adjustment_interval_s=15.0)
    world.config = replace(config, max_step=None)
    world.backend.start_s = 40.0
    world.load.kv = lambda now, _workers: 0.6 if now < 1080 else 0.47
    world.load.queue = lambda now, workers: (1.0 if now < 1035 else 3.0 if now < 1050 else 1.0) * workers
    return world


def _prepare_failing_on(world):
    """Let both of two prefill workers that are asked for at once never come up, in a mode that does not wait."""
    _prepare_going_on(world)
    world.deadline_s = 50.0
    world.backend.never_ready = frozenset({P})
    return world


def _prepare_adaptive(world):
    """Let demand at the frontend rise and fall in mode adaptive: 10 s to start, a decision every 2 s, and 1 s after growing."""
    world.config = replace(world.config, mode=Mode.ADAPTIVE, metric_pulling_interval_s=1.0)
    world.backend.start_s = 10.0
    world.load.kv = lambda now, workers: min(1.0, 1.3 / workers) if now < 1020 else 0.1
    world.load.demand = lambda now: (
        Demand(
            period_s=1.0,
            arrivals=2.0,
            prompt_tokens=16_000.0,
            uncached_tokens=16_000.0,
            prefilled_tokens=10_000.0,
            waiting=30.0,
            waiting_tokens=240_000.0,
            oldest_wait_s=12.0,
            in_flight_tokens=8000.0,
            prefilling_workers=1.0,
        )
        if now < 1020
        else Demand(period_s=1.0, arrivals=1.0, uncached_tokens=1000.0, prefilled_tokens=1000.0)
    )
    return world


def _prepare_sla(world):
    """The same in mode sla: what it learns and corrects is in the recorded state."""
    _prepare_adaptive(world)
    world.config = replace(world.config, mode=Mode.SLA, itl_slo_s=0.02, performance=FEW_POINTS)
    return world


def _prepare_switching(world):
    """Let a worker of prefill, which has nothing to do, go to decode, and later come back: 7 s to drain."""
    world.config = replace(world.config, metric_pulling_interval_s=5.0, switches_roles=True)
    world.backend.replicas = {P: 2, D: 1}
    world.load.kv = lambda now, _workers: 0.95 if now < 1040 else 0.2
    world.load.queue = lambda now, workers: 0.0 if now < 1040 else 2.0 * workers
    return world


SCENARIOS = {
    "switching": (_prepare_switching, 100.0, [(D, 2), (P, 2)]),
    "up and down": (_prepare, 260.0, [(D, 2), (P, 2), (D, 3), (P, 1), (D, 2), (D, 1)]),
    "never ready": (_prepare_failing, 260.0, [(D, 2), (D, 2)]),
    # How much it asks for is the policy's own tests' business.
    "adaptive": (_prepare_adaptive, 30.0, None),
    "sla": (_prepare_sla, 15.0, None),
    "up while others start": (_prepare_going_on, 110.0, [(D, 2), (P, 3), (D, 3)]),
    "never ready while others start": (
        _prepare_failing_on,
        125.0,
        [(D, 2), (P, 3), (D, 3), (P, 2), (P, 1)],
    ),
}


def _outcome(world):
    decisions = {}
    for record in read_ledger(world.folder).records:
        if record["type"] == "decision":
            assert record["decision"]["id"] not in decisions
            decisions[record["decision"]["id"]] = (record["decision"], record["state"], record.get("window"))
    return decisions, world.backend.calls


def _hook_disk(monkeypatch, world):
    """Make writes and fsyncs steps too: before, torn in half, and after."""
    real_write, real_sync = os.pwrite, os.fsync

    def pwrite(descriptor, data, position):
        world.killer.step("write: before")
        half = real_write(descriptor, bytes(data)[: len(data) // 2], position)
        world.killer.step("write: torn")
        rest = real_write(descriptor, bytes(data)[half:], position + half)
        world.killer.step("write: after")
        return half + rest

    def fsync(descriptor):
        real_sync(descriptor)
        world.killer.step("fsync")

    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(os, "fsync", fsync)


async def _live(world, at, kill_type, horizon_s=HORIZON_S):
    """Run to the horizon, dying once at step ``at``; True if it died."""
    world.killer.at = at
    try:
        await world.run_until(horizon_s)
    except kill_type:
        world.killer.at = None
        await world.run_until(horizon_s)
        return True
    return False


def _telling(labels):
    """Return the steps at which to die, ascending: of those with equal steps around them the first and the last.

    A round of pulling is 7 steps. One in the middle of a long wait has equal rounds on either side, and is left out.
    """
    equals = {}
    for at in range(1, len(labels)):
        equals.setdefault(tuple(labels[max(0, at - ROUND) : at + ROUND]), []).append(at)
    return sorted({at for steps in equals.values() for at in (steps[0], steps[-1])})


@pytest.mark.slow
@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(
            name,
            marks=()
            if name in {"adaptive", "never ready", "switching", "up and down"}
            else pytest.mark.nightly,
        )
        for name in SCENARIOS
    ],
)
async def test_a_kill_at_any_step_changes_no_decision(new_world, kill_type, monkeypatch, scenario):
    """At each write, sync, observation, read, sleep and scale call: same decisions, same states, same calls."""
    prepare, horizon_s, calls = SCENARIOS[scenario]
    expected = prepare(new_world())
    _hook_disk(monkeypatch, expected)
    await _live(expected, None, kill_type, horizon_s)
    monkeypatch.undo()
    reference = _outcome(expected)
    assert {d["no_operation"] for d, _, _ in reference[0].values()} == {False}
    assert reference[1]
    assert calls is None or [call[:2] for call in reference[1]] == calls
    labels = expected.killer.labels
    for at in _telling(labels):
        world = prepare(new_world())
        _hook_disk(monkeypatch, world)
        assert await _live(world, at, kill_type, horizon_s), f"step {at} {labels[at - 1]} was not reached"
        monkeypatch.undo()
        assert _outcome(world) == reference, f"killed at step {at}: {labels[at - 1]}"
        assert replay(read_ledger(world.folder)).differences == ()


async def test_a_recorded_decision_is_carried_out_after_the_restart(world, kill_type):
    """Killed between the ledger and the backend: the next planner asks the backend."""
    world.killer.at = world.killer.steps
    await _die_before_scaling(world, kill_type)
    assert world.backend.calls == []
    await world.run_until(31)
    assert world.backend.calls == [(D, 2, "d000001"), (P, 2, "d000001")]


async def _die_before_scaling(world, kill_type, prepare=_prepare):
    """Run until a decision is recorded, and die before the backend hears of it."""
    prepare(world)

    async def dying(*_args, **_keys):
        raise kill_type("before scale")

    world.backend.scale, scale = dying, world.backend.scale
    with pytest.raises(kill_type):
        await world.run_until(HORIZON_S)
    world.backend.scale = scale


async def test_an_old_recorded_decision_is_abandoned(world, kill_type):
    """An hour later its load is gone: it is written off and planned from what is there."""
    await _die_before_scaling(world, kill_type)
    world.time.at_s += 3600
    await world.run_until(3640)
    outcomes = [r["outcome"] for r in read_ledger(world.folder).records if r["type"] == "actuation"]
    assert outcomes == ["abandoned", "abandoned"]
    assert world.backend.calls == []
    assert replay(read_ledger(world.folder)).differences == ()


async def test_a_recorded_decision_of_another_clock_is_not_carried_out(world, kill_type):
    """Its age cannot be told; nothing stays outstanding."""
    await _die_before_scaling(world, kill_type)
    world.timeline = "test@20"
    await world.run_until(45)
    assert world.backend.calls == []
    header = [r for r in read_ledger(world.folder).records if r["type"] == "header"][-1]
    assert (header["resumed"], header["state"]["roles"]["decode"]["pending_replicas"]) == (False, None)


async def test_a_recorded_scale_up_by_several_needs_room_for_all_of_them(world, kill_type):
    """Engines turn out to have two GPUs: after decode's one there is room for one prefill worker of the two."""

    def prepare(world):
        _prepare_going_on(world)
        world.load.queue = lambda _now, workers: 3.0 * workers

    await _die_before_scaling(world, kill_type, prepare)
    world.backend.gpus = 2
    await world.run_until(world.time.at_s - 1000.0 + 1)
    decision = next(r for r in read_ledger(world.folder).records if r["type"] == "decision")["decision"]
    changes = [(r["role"], r["desired"] - r["current"]) for r in decision["roles"] if r["action"] == "up"]
    assert changes == [("decode", 1), ("prefill", 2)]
    assert world.backend.calls == [(D, 2, decision["id"])]
    assert max(world.backend.seen_gpus) <= 8


async def test_after_a_long_absence_a_fresh_interval_begins(world, kill_type):
    """Old pulls say nothing about now, but the grace period is remembered."""
    world.load.kv = lambda now, _workers: 0.95 if now <= 1030 else 0.1
    await world.run_until(55)
    world.time.at_s = 1500.0
    world.watcher.decisions.clear()
    await world.run_until(535)
    assert [d.at_s for d in world.watcher.decisions] == [1530.0]
    decode = next(r for r in world.watcher.decisions[0].roles if r.role is D)
    assert decode.reason.value == "decode_grace_period"
    assert world.watcher.decisions[0].id == "d000002"


async def test_another_clock_starts_a_fresh_interval_with_the_old_memory(world):
    """After a reboot or at another speed times cannot be compared; sequence and grace continue."""
    world.load.kv = lambda _now, _workers: 0.95
    await world.run_until(55)
    world.timeline = "test@20"
    world.time.at_s = 1000.0
    world.watcher.decisions.clear()
    await world.run_until(31)
    assert [(d.id, d.at_s) for d in world.watcher.decisions] == [("d000002", 1030.0)]
    assert replay(read_ledger(world.folder)).differences == ()
