from __future__ import annotations

import errno
import os
from dataclasses import replace

from penstock.api import Role
from penstock_planner.core.phase import PlannerPhase
from penstock_planner.decide.decision import Action, Reason
from penstock_planner.ledger import read_ledger
from penstock_planner.replay import replay

D, P = Role.DECODE, Role.PREFILL


def _reasons(world, role=D):
    return [r.reason for d in world.watcher.decisions for r in d.roles if r.role is role]


async def test_it_pulls_every_second_and_decides_every_thirty(world):
    """Steady load: pulls at 1..30 s after the start, one decision of 30 pulls each interval."""
    await world.run_until(95)
    assert [d.at_s for d in world.watcher.decisions] == [1030.0, 1060.0, 1090.0]
    pulls = world.records("pull")
    assert [p["at_s"] for p in pulls[:30]] == [1000.0 + t for t in range(1, 31)]
    assert [p["slot"] for p in pulls[28:32]] == [29, 30, 1, 2]
    assert [len(d["window"]["pulls"]) for d in world.records("decision")] == [30, 30, 30]


async def test_a_ramp_scales_decode_by_one_per_interval_and_blocks_in_between(world):
    """Each decision waits until the worker of the last one is ready; then a new interval begins."""
    world.load.kv = lambda _now, _workers: 0.95
    await world.run_until(140)
    assert world.backend.calls == [(D, 2, "d000001"), (D, 3, "d000002"), (D, 4, "d000003")]
    # 30 s to decide, 12 s to start, 30 s, 12 s, 30 s.
    assert [d.at_s - 1000 for d in world.watcher.decisions] == [30.0, 72.0, 114.0]
    blocked = [v.at_s - 1000 for v in world.watcher.views if v.phase is PlannerPhase.ADJUSTING]
    assert blocked[:12] == [31.0 + t for t in range(12)]
    assert not [p for p in world.records("pull") if 1030 < p["at_s"] <= 1042]


async def test_no_operation_decides_and_records_but_asks_for_nothing(world):
    """Decisions are in the ledger, the backend is never asked."""
    world.config = replace(world.config, no_operation=True)
    world.load.kv = lambda _now, _workers: 0.95
    await world.run_until(95)
    assert [r.action for d in world.watcher.decisions for r in d.roles if r.role is D] == [Action.UP] * 3
    assert world.backend.calls == []
    assert world.records("actuation") == []


async def test_a_replica_that_never_becomes_ready_is_withdrawn_at_the_deadline(world):
    """Planning continues with what is there; the next try waits for the backoff."""
    world.backend.never_ready = frozenset({D})
    world.load.kv = lambda _now, _workers: 0.95
    world.deadline_s = 100.0
    await world.run_until(400)
    assert world.backend.calls[:3] == [(D, 2, "d000001"), (D, 1, "d000002"), (D, 2, "d000005")]
    withdrawn = world.watcher.decisions[1]
    assert withdrawn.at_s == 1131.0
    assert (
        withdrawn.roles[0].sentence == "decode 2 -> 1: withdrawn, never became ready: not ready after 100 s"
    )
    assert _reasons(world)[2:4] == [Reason.WITHDRAWAL_BACKOFF] * 2


async def test_a_drain_that_never_ends_does_not_freeze_the_planner(world):
    """After the deadline it is ignored, its GPUs still counted."""
    world.load.kv = lambda now, _workers: 0.1 if now < 1100 else 0.95
    world.backend.replicas[D] = 2
    world.config = replace(world.config, decode_grace_intervals=0)
    world.backend.drain_s = float("inf")
    world.deadline_s = 100.0
    await world.run_until(200)
    assert [(r, n) for r, n, _ in world.backend.calls] == [(D, 1), (D, 2)]
    assert world.watcher.decisions[1].gpus == 3
    assert [s["overdue"] for s in world.records("settled")] == [True]


async def test_someone_elses_change_blocks_and_the_interval_starts_anew(world):
    """A replica added by hand in mid-interval: its pulls are dropped, 30 s count from its readiness."""
    await world.run_until(10)
    await world.backend.scale(P, 2, decision_id="by hand")
    await world.run_until(60)
    assert [d.at_s - 1000 for d in world.watcher.decisions] == [52.0]
    assert world.records("settled")[0]["at_s"] == 1022.0


async def test_a_refused_scale_is_recorded_and_decided_again(world):
    """The backend's refusal costs one interval and no backoff."""
    world.load.kv = lambda _now, _workers: 0.95
    world.backend.refuses = True
    await world.run_until(45)
    world.backend.refuses = False
    await world.run_until(65)
    assert [(a["id"], a["outcome"], a["error"]) for a in world.records("actuation")] == [
        ("d000001", "failed", "the arbiter does not answer"),
        ("d000002", "applied", ""),
    ]
    assert world.backend.calls == [(D, 2, "d000002")]


async def test_a_backend_that_cannot_be_read_is_waited_for(world):
    """Target unavailable: no pull, no decision, no busy loop; afterwards the overdue decision is made."""
    world.backend.fails = True
    await world.run_until(40)
    assert world.watcher.decisions == []
    assert {v.phase for v in world.watcher.views} == {PlannerPhase.TARGET_UNAVAILABLE}
    assert len(world.watcher.views) == 40
    world.backend.fails = False
    await world.run_until(80)
    assert [d.at_s - 1000 for d in world.watcher.decisions][:1] == [40.0]


def _disk_full_while(monkeypatch, is_full):
    real = os.pwrite

    def pwrite(*args):
        if is_full():
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args)

    monkeypatch.setattr(os, "pwrite", pwrite)


async def test_a_full_disk_costs_decisions_and_nothing_else(world, monkeypatch, caplog):
    """Not recorded, so not taken; the next interval after the repair decides again."""
    world.load.kv = lambda _now, _workers: 0.95
    full = [True]
    _disk_full_while(monkeypatch, lambda: full[0])
    planner = world.planner()
    await world.run_until(65, planner)
    assert world.backend.calls == []
    lines = [r for r in caplog.records if r.getMessage() == "decision not recorded, so not applied"]
    assert len(lines) == 2
    assert world.watcher.views[-1].ledger_errors > 60
    full[0] = False
    await world.run_until(95)
    assert world.backend.calls == [(D, 2, "d000001")]


async def test_a_withdrawal_that_cannot_be_recorded_is_tried_again_an_interval_later(
    world, monkeypatch, caplog
):
    """Unrecorded means not taken, here too, with one error per try."""
    world.backend.never_ready = frozenset({D})
    world.backend.gives_up_s = 20.0
    world.load.kv = lambda _now, _workers: 0.95
    _disk_full_while(monkeypatch, lambda: 1040 < world.time.at_s < 1100)
    await world.run_until(130)
    lines = [r for r in caplog.records if r.getMessage() == "decision not recorded, so not applied"]
    assert len(lines) == 2
    assert [(d.id, d.at_s) for d in world.watcher.decisions] == [("d000001", 1030.0), ("d000002", 1110.0)]
    assert world.watcher.decisions[1].roles[0].reason is Reason.NEVER_READY


async def test_slow_pulls_are_skipped_not_made_up_for(world):
    """A pull that takes 3.5 s leaves out the slots it overran; the lag says so."""
    read = world.load.read

    async def slow(query):
        world.time.at_s += 3.5
        return await read(query)

    world.load.read = slow
    await world.run_until(31)
    slots = [p["slot"] for p in world.records("pull")]
    assert slots == [1, 5, 9, 13, 17, 21, 25, 29]
    assert world.watcher.decisions[0].at_s == 1032.5
    assert world.watcher.views[-1].lag_p99_s == 0.0


async def test_a_failing_observer_is_logged_once_and_stops_nothing(world, caplog):
    """A broken dashboard is not worth an outage."""

    def explode(*_args):
        raise RuntimeError("disk quota")

    world.watcher.tick = explode
    await world.run_until(65)
    assert len(world.records("decision")) == 2
    assert [r.getMessage() for r in caplog.records if "observer" in r.getMessage()] == ["observer failed"]


async def test_ids_go_on_behind_those_known_elsewhere(world):
    """The ledger is lost, the cluster still shows d000041."""
    planner = world.planner(first_sequence=41)
    world.load.kv = lambda _now, _workers: 0.95
    await world.run_until(35, planner)
    assert [d.id for d in world.watcher.decisions] == ["d000042"]
    assert replay(read_ledger(world.folder)).differences == ()


async def test_a_number_that_somebody_else_sets_stands_for_an_interval(world):
    """The scale-up of the planner's own is forgotten, not withdrawn; a new interval begins."""
    world.backend.never_ready = frozenset({D})
    world.load.kv = lambda _now, _workers: 0.95
    world.edit_at(50.0, D, 1)
    await world.run_until(90)
    assert world.backend.calls == [(D, 2, "d000001"), (D, 2, "d000002")]
    assert [d.at_s - 1000 for d in world.watcher.decisions] == [30.0, 80.0]
    assert replay(read_ledger(world.folder)).differences == ()
