"""What each rule of a role finds: its reason, its words and its numbers, with one worker and with several."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from penstock.api import Role
from penstock_planner.decide.adaptive.hindsight import Hindsight
from penstock_planner.decide.adaptive.observed import ObservedWorkers
from penstock_planner.decide.adaptive.rules import (
    Case,
    lacks,
    spares,
)
from penstock_planner.decide.adaptive.signals import KvView, LightDecoding, TrendForecast, WorkView
from penstock_planner.decide.adaptive.trial import Trial
from penstock_planner.decide.observation import PoolCounts

P, D = Role.PREFILL, Role.DECODE


@dataclass
class Gaps:
    """Gaps that halve with twice the workers; the target is 40 ms, 30 ms before one may go."""

    one_s: float = 0.06
    target_s: float = 0.04
    after_s: float = 0.03

    def itl_with(self, workers):
        """The ITL of so many."""
        return self.one_s / workers


def _work(rate=9000.0, **changes):
    steady = TrendForecast(rate, rate, 0.0)
    base = WorkView(
        tokens_per_s=10_000.0, rate=steady, level=steady, far_rate=rate, backlog_tokens=0.0, sizes=(100.0,)
    )
    return replace(base, **changes)


def _case(ready=1, *, role=P, **changes):
    base = Case(
        role=role,
        pool=PoolCounts(ready, gpus=1),
        slo_s=5.0,
        horizon_s=7.0,
        hold_s=60.0,
        arrivals_s=(),
        work=None,
        kv=None,
        gaps=None,
        oldest_wait_s=None,
        rejected=0.0,
        workers=ObservedWorkers(),
    )
    return replace(base, **changes)


def _kv(now, ahead=None):
    return KvView(TrendForecast(now, now if ahead is None else ahead, 0.0), LightDecoding(0.0))


def _lack(case, name):
    return next(each for each in lacks(case) if each.step.name == name)


def _spare(case, name):
    return next(each for each in spares(case) if each.step.name == name)


@pytest.mark.parametrize(
    ("finding", "words"),
    [
        (
            _lack(_case(work=_work(8000.0, backlog_tokens=91_903.0)), "backlog"),
            "77903 tokens will be left in 7 s, more than 1 worker clears in 10 s",
        ),
        (
            _lack(_case(2, work=_work(8000.0, backlog_tokens=184_000.0)), "backlog"),
            "100000 tokens will be left in 7 s, more than 2 workers clear in 10 s",
        ),
        (
            _lack(_case(work=_work(9500.0)), "demand"),
            "9500 tokens/s in 7 s exceed 9000, 90% of the 10000 that 1 worker can compute",
        ),
        (_lack(_case(rejected=1.0), "rejected"), "1 request refused or timed out"),
        (_lack(_case(rejected=2.0), "rejected"), "2 requests refused or timed out"),
        (
            _lack(_case(role=D, kv=_kv(0.8)), "kv"),
            "KV usage of 1 worker will be 0.80 in 7 s, more than 0.70",
        ),
        (_lack(_case(role=D, gaps=Gaps()), "itl"), "ITL of 1 worker will be 60.0 ms, to hold are 40 ms"),
        (
            _lack(_case(2, role=D, gaps=Gaps()), "itl"),
            "ITL of 2 workers will be 30.0 ms, to hold are 40 ms",
        ),
        (_spare(_case(2, hindsight=Hindsight()), "idle"), "1 prefill worker would have been enough"),
        (
            _spare(_case(3, role=D, hindsight=Hindsight()), "idle"),
            "2 decode workers would have been enough",
        ),
        (_spare(_case(2, trial=Trial()), "tried"), "1 worker is enough for what is served in time"),
        (_spare(_case(3, trial=Trial()), "tried"), "2 workers are enough for what is served in time"),
        (
            _spare(_case(2, work=_work(6000.0)), "projected_work"),
            "1 worker would be 60% busy, at most 75%",
        ),
        (_spare(_case(1, work=_work(0.0)), "projected_work"), "no demand is left"),
        (
            _spare(_case(2, role=D, kv=_kv(0.0)), "projected_kv"),
            "KV usage of 1 worker would be 0.00, at most 0.45",
        ),
        (
            _spare(_case(1, role=D, gaps=Gaps()), "itl_after"),
            "ITL of 0 workers will be without end, to hold are 40 ms",
        ),
    ],
)
def test_a_rule_names_the_unit_of_each_number(finding, words):
    """One worker clears, two workers clear."""
    assert finding.detail == words
