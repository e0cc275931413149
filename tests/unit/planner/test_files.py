"""The files that show the planner, where the thread that writes them is slow: changes are never lost, and blame is deserved."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from math import inf

import orjson
import pytest
from patience import LIMIT_S

from penstock_planner import files
from penstock_planner.dashboard import Dashboard
from penstock_planner.dashboard_picture import DAY_S
from penstock_planner.files import QUEUED, FileObservers, FileThread
from penstock_planner.ledger import FormerRuns
from penstock_planner.stats import PlannerStats


@pytest.fixture(name="thread")
def _thread():
    thread = FileThread()
    yield thread
    thread.close()


def state_of(world):
    """Return what the page reads."""
    return orjson.loads((world.folder / "state.json").read_bytes())


async def test_a_held_thread_costs_ticks_and_no_change(world, thread, monkeypatch):
    """Two hundred ticks and some changes while the thread is held: all changes are shown then, and how many ticks are not."""
    monkeypatch.setattr(files, "MIN_PERIOD_S", 0.0)
    stats, board = PlannerStats(), Dashboard(world.folder / "board", world.config, draw=thread.draw)
    shown = FileObservers(world.folder, world.config, board, thread, stats)
    goes_on = threading.Event()
    thread.submit(goes_on.wait)
    world.watch(shown)
    kinds = []
    world.load.kv = lambda now_s, _workers: kinds.append(now_s) or (0.95 if now_s % 240 < 120 else 0.01)
    await world.run_until(600)
    assert stats.dropped_updates >= 100
    goes_on.set()
    shown.close()
    thread.close()
    state = state_of(world)
    recorded = FormerRuns.before_now(world.folder).changes(100)
    assert len(recorded) > 3
    assert [each["id"] for each in state["decisions"]] == [each.decision.id for each in recorded][-20:]
    (problem,) = [each for each in state["problems"] if "missing from the dashboard" in each]
    assert problem.startswith(f"{stats.dropped_updates} ticks")
    (events, *_) = sorted((world.folder / "board" / "planner").glob("events*"))
    written = events.read_bytes()
    assert all(each.decision.id.encode() in written for each in recorded)


async def test_a_picture_delays_no_file(world, thread, monkeypatch):
    """While one is drawn, for however long, ticks and decisions are written."""
    monkeypatch.setattr(files, "MIN_PERIOD_S", 0.0)
    stats = PlannerStats()
    board = Dashboard(world.folder / "board", world.config, draw=thread.draw)
    shown = FileObservers(world.folder, world.config, board, thread, stats)
    is_drawing, goes_on = threading.Event(), threading.Event()

    def draws(*_arguments):
        is_drawing.set()
        goes_on.wait()
        return b"\x89PNG" + bytes(40)

    monkeypatch.setattr("penstock_planner.dashboard.picture", draws)
    ticks = []

    class Slowly:
        """Lets the thread keep up, so that no tick is dropped for lack of time."""

        def tick(self, view):
            shown.tick(view)
            written = threading.Event()
            thread.submit(written.set)
            assert written.wait()
            ticks.append(view.at_s)

        def decided(self, decision, view):
            shown.decided(decision, view)

    world.watch(Slowly())
    await world.run_until(120)
    assert is_drawing.is_set()
    assert stats.dropped_updates == 0
    assert state_of(world)["at_s"] == ticks[-1]
    goes_on.set()
    shown.close()
    thread.close()
    assert list((world.folder / "board").glob("**/events*"))


async def test_a_restarted_planner_shows_what_the_ledger_has(world):
    """Page, text and picture begin with the runs before, each change once, whatever became of the state file."""
    world.load.kv = lambda now_s, _workers: 0.95 if now_s % 240 < 120 else 0.01
    await world.run_until(400)
    recorded = [each.decision.id for each in FormerRuns.before_now(world.folder).changes(100)]
    assert recorded
    thread, stats = FileThread(), PlannerStats()
    board = Dashboard(world.folder / "board", world.config, draw=thread.draw)
    shown = FileObservers(world.folder, world.config, board, thread, stats)
    world.watch(shown)
    await world.run_until(800)
    shown.close()
    thread.close()
    moments, changes = board._history.of(DAY_S)
    times = [each.at_s for each in moments]
    assert times == sorted(times)
    # While an adjustment is under way nothing is pulled.
    assert sum(each < 400 for each in times) >= 20
    assert {each.decision_id for each in changes} >= set(recorded)
    later = [each.decision.id for each in FormerRuns.before_now(world.folder).changes(100)]
    assert len(later) > len(recorded)
    assert [each["id"] for each in state_of(world)["decisions"]] == later[-20:]


async def test_pulls_of_another_timeline_are_not_taken(world):
    """Their times say nothing of this one's."""
    await world.run_until(100)
    former = FormerRuns.before_now(world.folder)
    (origin_s,) = {each["origin_s"] for each in world.records("header")}
    found = [each.at_s for each in former.pulls(origin_s, lambda _: 10.0)]
    assert found == sorted(found)
    assert len(found) >= 9
    assert former.pulls(origin_s + 7, lambda _: 10.0) == []
    assert [each.at_s for each in former.pulls(origin_s, lambda age_s: 10.0 if age_s < 50 else inf)] == found[
        -6:
    ]


def test_a_busy_process_waits_for_its_last_files_and_blames_no_disk(caplog, monkeypatch):
    """Works that compute for longer than a late write takes; all of them are done at the end."""
    monkeypatch.setattr(files, "LATE_S", 0.3)
    thread, done = FileThread(), []

    def computes():
        until_s = time.thread_time() + 0.5
        while time.thread_time() < until_s:
            sum(range(100))
        done.append(1)

    thread.submit(computes)
    thread.submit(computes)
    with caplog.at_level(logging.WARNING):
        thread.close()
    assert len(done) == 2
    assert not caplog.records


def test_a_disk_is_blamed_that_does_not_answer(caplog, monkeypatch, tmp_path):
    """A pipe without a reader holds whoever opens it; the process ends without it."""
    monkeypatch.setattr(files, "LATE_S", 0.1)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    thread = FileThread()
    thread.submit(lambda: pipe.write_bytes(b""))
    with caplog.at_level(logging.WARNING):
        thread.close()
    with pipe.open("rb") as file:  # lets the thread end
        file.read()
    assert "the disk does not respond" in caplog.text


def test_a_write_that_fails_ends_no_thread(caplog):
    """The next one is done all the same."""
    thread, done = FileThread(), []
    with caplog.at_level(logging.WARNING):
        thread.submit(lambda: 1 / 0)
        thread.submit(lambda: done.append(1))
        thread.close()
    assert done
    (record,) = caplog.records
    assert "ZeroDivisionError" in record.keys["error"]


ENDS = """
import sys, time
from penstock_planner.files import FileThread
from penstock_planner.dashboard_picture import Clock, Moment, picture
thread = FileThread()
moments = [Moment(float(at), {"decode": 1}, 1, 0.0, 1.0, 0.0, ()) for at in range(200)]
for _ in range(3):
    thread.draw(lambda: picture(moments, [], "last hour", Clock(0.0, 0.0, 1.0, "UTC"), None))
time.sleep(float(sys.argv[1]))
if sys.argv[2] == "close":
    thread.close()
raise SystemExit(5)
"""


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["close", "not closed"])
def test_a_process_ends_in_order_while_a_picture_is_drawn(ends):
    """Whenever it ends, its code is its own: the interpreter's end would abort a thread within a library."""
    for wait_s in (0.0, 0.3, 0.6):
        ended = subprocess.run(
            [sys.executable, "-c", ENDS, str(wait_s), ends], check=False, timeout=LIMIT_S, capture_output=True
        )
        assert (ended.returncode, ended.stderr) == (5, b"")


def test_at_least_half_a_minute_of_ticks_is_kept():
    """A disk that takes this long for once loses nothing."""
    assert QUEUED >= 30
