"""What keeps a planner from scaling is said in words, once it has lasted, and no longer than it lasts."""

from __future__ import annotations

import errno
import os
from dataclasses import replace

import orjson
import pytest

from penstock_planner.core.phase import PlannerPhase
from penstock_planner.decide.demand.observation import summarise
from penstock_planner.decide.demand.reading import missing
from penstock_planner.files import SnapshotWriter
from penstock_planner.ledger import FormerRuns
from penstock_planner.observers import PlannerView
from penstock_planner.problems import ProblemTracker


@pytest.fixture(name="view")
def _view(make):
    """A tick at which all is known."""
    pull = make.pull()
    return PlannerView(
        at_s=100.0,
        origin_s=0.0,
        wall_s=1.8e9,
        phase=PlannerPhase.OBSERVING,
        pools=pull.pools,
        desired={},
        gpus=2,
        max_gpu_budget=8,
        pull=pull,
        latency={},
        next_decision_s=None,
        lag_p99_s=None,
        ledger_errors=0,
        overdue=False,
        startup_s={},
    )


def blind(view, why):
    """The tick without KV usage."""
    pull = view.pull
    kv = {"w0": missing(why, source="scrape")}
    return replace(view, pull=summarise(view.at_s, pull.pools, kv=kv, queue=pull.queue))


def at(view, at_s):
    """The same at another time."""
    return replace(view, at_s=at_s)


def test_unknown_signals_are_said_after_ten_seconds_and_forgotten_when_known(view):
    """Not a single lost pull; the sources that were asked are named."""
    tracker, unknown = ProblemTracker(needs_demand=False), blind(view, "refused; scrape: refused")
    assert tracker.after(view) == ()
    assert tracker.after(at(unknown, 109.0)) == ()
    (said,) = tracker.after(at(unknown, 110.0))
    assert said == (
        "cannot be scaled because KV usage is unknown to scrape: no role shrinks, and a role grows only if the known values alone justify it"
    )
    assert tracker.after(replace(unknown, at_s=111.0, pull=None)) == (said,)
    assert tracker.after(at(view, 112.0)) == ()


def test_a_runtime_with_names_of_its_own_is_told_how_to_declare_them(view):
    """Its workers answer, but none of their names is known."""
    tracker = ProblemTracker(needs_demand=False)
    unknown = blind(view, "its page has no vllm:kv_cache_usage_perc")
    tracker.after(unknown)
    (said,) = tracker.after(at(unknown, 120.0))
    assert "RuntimeTraits.metric_names" in said


def test_a_source_that_is_gone_is_said_though_another_one_serves(view):
    """A dead Prometheus, once it has been away for ten seconds."""
    tracker, gone = (
        ProblemTracker(needs_demand=False),
        replace(view, failed_sources={"prometheus": "refused"}),
    )
    assert tracker.after(gone) == ()
    assert tracker.after(at(gone, 110.0)) == (
        "refused; the planner uses other metrics sources instead of prometheus",
    )
    assert tracker.after(at(view, 111.0)) == ()


async def test_a_full_disk_is_said_until_there_is_room(world, monkeypatch):
    """The state file is small and may still be written where the ledger cannot."""
    writer = SnapshotWriter(world.folder, world.config, now_s=lambda: world.time.at_s)
    world.watch(writer)
    await world.run_until(5)

    def problems():
        return orjson.loads((world.folder / "state.json").read_bytes())["problems"]

    assert problems() == []
    pwrite = os.pwrite

    def full(*_arguments):
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr("penstock_planner.ledger.os.pwrite", full)
    await world.run_until(10)
    (said,) = problems()
    assert said.startswith("decisions cannot be recorded, so they are not applied: ")
    assert "No space left on device; free or repair the disk" in said
    monkeypatch.setattr("penstock_planner.ledger.os.pwrite", pwrite)
    await world.run_until(15)
    assert problems() == []


async def test_changes_are_still_shown_after_a_restart(world, view):
    """The next process takes them from the ledger; on another timeline their times are unknown, not wrong."""
    world.watch(SnapshotWriter(world.folder, world.config, now_s=lambda: world.time.at_s))
    world.load.kv = lambda _now, _workers: 0.95
    await world.run_until(35)
    path = world.folder / "state.json"
    file = orjson.loads(path.read_bytes())
    (before,) = file["decisions"]
    assert before["at_s"] == 30.0
    path.unlink()
    former = FormerRuns.before_now(world.folder).changes(20)
    for origin_s, at_s in ((file["origin_s"], 30.0), (file["origin_s"] + 7, None)):
        after = SnapshotWriter(world.folder, world.config, now_s=lambda: 1e9)
        now = replace(view, origin_s=origin_s)
        after.fill(former, now)
        after.tick(now)
        (shown,) = orjson.loads(path.read_bytes())["decisions"]
        assert shown | {"wall_s": 0} == before | {"at_s": at_s, "wall_s": 0}
