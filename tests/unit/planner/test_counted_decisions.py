"""Decisions that change nothing are a count in the ledger, and a decision of their own for everyone who reads it."""

from __future__ import annotations

import errno
import itertools
import os
from dataclasses import replace

import orjson
import pytest

from penstock.api import Role
from penstock_planner.decide.config import Mode
from penstock_planner.decide.demand.observation import Demand
from penstock_planner.explain import select
from penstock_planner.ledger import read_ledger
from penstock_planner.recorder import MAX_COUNTED_DECISIONS
from penstock_planner.replay import replay


def _written(folder):
    """Return the decisions that the file itself has."""
    lines = (folder / "ledger.jsonl").read_bytes().splitlines()
    return [record for record in map(orjson.loads, lines) if record["type"] == "decision"]


def _read(folder):
    return [record for record in read_ledger(folder).records if record["type"] == "decision"]


@pytest.fixture(name="steady")
def _steady(world):
    """Mode adaptive with a decision every two seconds and traffic that stays as it is."""
    world.config = replace(world.config, mode=Mode.ADAPTIVE, metric_pulling_interval_s=1.0)
    world.load.kv = lambda _now, workers: 0.6 if workers > 1 else 0.95
    world.load.demand = lambda _now: Demand(
        period_s=1.0,
        arrivals=2.0,
        prompt_tokens=8012.0,
        uncached_tokens=4012.0,
        completed=2.0,
        output_tokens=412.0,
        prefilled_tokens=4012.0,
        ttft_sum_s=0.812345,
        ttft_count=2.0,
        itl_sum_s=4.123456,
        itl_count=410.0,
        in_flight={Role.PREFILL: 1.0, Role.DECODE: 12.0},
        in_flight_tokens=2000.0,
        prefilling_workers=1.0,
    )
    return world


async def test_decisions_like_the_last_one_are_counted_and_read_back(steady):
    """Four minutes: every decision can be replayed and explained, few but the first are in the file; the next one has their count."""
    await steady.run_until(240)
    taken = [decision.id for decision in steady.watcher.decisions]
    assert [record["decision"]["id"] for record in _read(steady.folder)] == taken
    result = replay(read_ledger(steady.folder))
    assert (result.decisions, result.differences) == (len(taken), ())
    written = _written(steady.folder)
    assert len(taken) > 110
    assert len(written) < 16
    assert max(record["held"] for record in written) <= MAX_COUNTED_DECISIONS
    numbers = [int(record["decision"]["id"][1:]) for record in written]
    assert [record["held"] for record in written[1:]] == [
        later - earlier - 1 for earlier, later in itertools.pairwise(numbers)
    ]
    explained = select(read_ledger(steady.folder), last=1, decision_id=taken[-2])
    assert explained[0]["decision"]["roles"][0]["steps"]
    for last in (1, 5, 60, 1000):
        in_part = select(read_ledger(steady.folder, newest=last), last=last, decision_id=None)
        assert in_part == select(read_ledger(steady.folder), last=last, decision_id=None)


async def test_a_day_of_mode_adaptive_takes_less_than_65_megabytes(steady):
    """At speed 1, pulls included, each with its time of the calendar; it was 357 with every decision in full."""
    sizes = []
    for until_s in (150, 450):  # The fleet has its size after two minutes.
        await steady.run_until(until_s)
        sizes.append((steady.folder / "ledger.jsonl").stat().st_size)
    assert (sizes[1] - sizes[0]) / 300 * 86_400 < 65e6


async def test_decisions_behind_a_lost_pull_are_in_the_ledger_themselves(steady, monkeypatch):
    """A disk that was full for some seconds: nobody could make them again from what is there."""
    real = os.pwrite

    def pwrite(*args):
        if 1100 < steady.time.at_s < 1111.5:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args)

    monkeypatch.setattr(os, "pwrite", pwrite)
    await steady.run_until(200)
    assert replay(read_ledger(steady.folder)).differences == ()
    assert [r["decision"]["id"] for r in _read(steady.folder)] == [d.id for d in steady.watcher.decisions]


async def test_a_restart_goes_on_behind_counted_decisions(steady):
    """Neither ids nor memory fall back to the last decision in the file, on the same clock and on another."""
    await steady.run_until(61)
    await steady.run_until(75)
    steady.timeline = "test@20"
    await steady.run_until(100)
    ids = [int(decision.id[1:]) for decision in steady.watcher.decisions]
    assert ids == list(range(1, len(ids) + 1))
    assert replay(read_ledger(steady.folder)).differences == ()
