"""Kill -9 of every kind of process during a replay: who loses what, and what is there again afterwards."""

import json
import os
import signal
import time
import urllib.request

import psutil
import pytest
from patience import LIMIT_S

SPEED = 10


class Kill:
    """One kill -9: what was in flight by the router's count, and when it was."""

    def __init__(self, world, name):
        self.name = name
        self.pid = world.state()[name]["pid"]
        self.inflight = world.workers().get(name, {}).get("inflight_requests", 0)
        self.began_s = time.monotonic()
        world.kill(name)
        self.ended_s = None

    def recovered(self):
        """Note that the graph is whole again."""
        self.ended_s = time.monotonic()

    def lost(self, failed, started_model_s):
        """Return those of the failed requests that ended between the kill and the recovery."""
        begin = self.began_s * SPEED - started_model_s - 1
        end = self.ended_s * SPEED - started_model_s + 1
        return [each for each in failed if begin <= each["ended_s"] <= end]


def kill_and_wait(world, eventually, name):
    """Kill one process during a replay and wait until its successor serves."""
    killed = Kill(world, name)

    def is_back():
        entry = world.state()[name]
        is_new = (
            entry["pid"] not in {None, killed.pid} and entry["state"] == "ready" and entry["restarts"] > 0
        )
        return is_new and world.is_serving() and all(w["state"] == "ready" for w in world.workers().values())

    eventually(is_back, f"{name} is back")
    killed.recovered()
    return killed


def test_kill_9_of_workers_planner_and_router_loses_only_what_was_in_flight_there(world, watch, eventually):
    """Each comes back by itself; only requests of the killed process fail; the budget holds throughout."""
    world.up(world.manifest(prefill=2, decode=2, floor=2, budget=5, interval=20), speed=SPEED)
    with watch(budget=5) as seen:
        replay = world.load(speed=SPEED, limit=480, rate=1.5)
        eventually(lambda: len(replay.results()) > 20, "the replay is under way")
        kills = {}
        for name in ("world_decode", "world_prefill", "world_planner", "world_frontend"):
            kills[name] = kill_and_wait(world, eventually, name)
            done = len(replay.results())
            eventually(lambda done=done: len(replay.results()) > done + 15, "requests continue")
        assert replay.process.poll() is None, "the kills came within the replay"
        results, summary = replay.finish()
    failed = [each for each in results if each["status"] != "ok"]
    lost = {name: kill.lost(failed, summary["started"]["model_s"]) for name, kill in kills.items()}
    assert sum(map(len, lost.values())) == len(failed), failed
    assert len(lost["world_decode"]) <= kills["world_decode"].inflight, lost["world_decode"]
    assert all(each["http_status"] == 200 for each in lost["world_decode"]), "streams that had begun"
    assert lost["world_prefill"] == [], "prefills are tried again elsewhere"
    assert lost["world_planner"] == []
    assert {each["error_class"] for each in lost["world_frontend"]} <= {"broken", "connect"}
    assert seen.problems == []
    assert seen.looks > 50
    assert {state for entry in world.entries("decode").values() for state in [entry["state"]]} == {"ready"}
    assert "0 differences" in world.replay_ledger()
    world.down()
    assert world.decisions()


def test_kill_9_of_the_arbiter_loses_nothing_and_it_comes_back_with_the_living_workers(world, eventually):
    """Every request succeeds, no process is replaced, and what dies afterwards is restarted again.

    The planner may take no worker: on a busy machine the test lasts longer than its four intervals of grace.
    """
    world.up(world.manifest(prefill=2, decode=2, floor=2, interval=20), speed=SPEED)
    replay = world.load(speed=SPEED, limit=90, rate=2)
    eventually(lambda: len(replay.results()) > 20, "the replay is under way")
    before = world.state()
    world.kill("arbiter")
    eventually(lambda: world.state()["arbiter"]["pid"] != before["arbiter"]["pid"], "it is back")
    results, _ = replay.finish()
    assert [each for each in results if each["status"] != "ok"] == [], world.logs()
    after = world.state()
    assert after["arbiter"]["restarts"] == 1
    kept = {name for name in before if after.get(name, {}).get("pid") == before[name]["pid"]}
    assert kept >= {"world_frontend", "world_planner", "world_prefill", "world_decode"}
    kill_and_wait(world, eventually, "world_decode")
    assert "0 differences" in world.replay_ledger()
    world.down()


@pytest.mark.nightly
def test_after_kill_9_of_arbiter_and_watchdog_the_next_up_needs_no_help(world, eventually):
    """What they supervised serves on; `up` ends it and starts the graph again."""
    manifest = world.manifest()
    world.up(manifest, speed=SPEED, flags=("--no-planner",))
    processes = [psutil.Process(pid) for pid in world.marked()]
    watchdogs = [each.pid for each in processes if "watchdog_child.py" in " ".join(each.cmdline())]
    assert len(watchdogs) == 1
    os.kill(watchdogs[0], signal.SIGSTOP)  # so that it takes no notice before its own end
    world.kill("arbiter")
    os.kill(watchdogs[0], signal.SIGKILL)
    assert world.is_serving()
    world.up(manifest, speed=SPEED, flags=("--no-planner",))
    assert world.is_serving()
    world.down()
    assert not [p for p in psutil.process_iter() if str(world.statefile) in " ".join(_arguments(p))]


def _arguments(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_an_edited_or_broken_manifest_is_not_what_a_killed_router_and_planner_start_with(world, eventually):
    """They come back as they were; a section that running routers follow holds again; doctor names the rest."""
    manifest = world.manifest(router="{policy: least-pending}")
    good = manifest.read_text()
    world.up(manifest, speed=SPEED)
    manifest.write_text(good + "spec: {")
    for name in ("world_planner", "world_frontend"):
        kill_and_wait(world, eventually, name)
    assert world.complete()["usage"]["completion_tokens"] == 4
    assert "the edited one is invalid" in world.run("doctor", "--local").stdout
    edited = "{policy: round-robin, admission: {mode: token-capacity, activePrefillTokensThreshold: 9}}"
    manifest.write_text(
        good.replace("{policy: least-pending}", edited).replace("maxGpuBudget: 8", "maxGpuBudget: 4")
    )
    kill_and_wait(world, eventually, "world_frontend")

    def threshold():
        with urllib.request.urlopen(f"{world.url}/busy_threshold", timeout=LIMIT_S) as answer:
            (found,) = json.load(answer)["thresholds"]
        return found["active_prefill_tokens_threshold"] == 9

    eventually(threshold, "the edited admission section holds")
    told = world.run("doctor", "--local").stdout
    assert "these keys take effect at the next start: planner.maxGpuBudget, router.policy\n" in told
