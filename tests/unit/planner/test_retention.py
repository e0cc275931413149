"""What keeps replicas that demand alone does not need: named, with since when and until when at most."""

from __future__ import annotations

from dataclasses import replace

import pytest
from adaptive_cases import case_of, work_of

from penstock.api import Role
from penstock_planner.decide.capacity.decoding import KvView, ObservedDecoding
from penstock_planner.decide.decision import Retention
from penstock_planner.decide.objective.shadow_fleets import Growth, Hindsight
from penstock_planner.decide.objective.trial import Trial
from penstock_planner.decide.policies.adaptive.retention import Clock, kept_by
from penstock_planner.decide.policies.adaptive.rules import needed

NOW_S = 10_000.0
CLOCK = Clock(NOW_S, 1767580200.0, 1.0, "UTC")
"""2026-01-05 02:30."""
UNKNOWN = replace(CLOCK, wall_s=None)


def _case(replicas=7, *, role=Role.PREFILL, rate=5000.0, **changes):
    return case_of(role, replicas, **{"work": work_of(rate), **changes})


def _known(*, floor=1, idle_s=1200.0, since_s=9000.0, **changes):
    base = Hindsight(
        floor=floor,
        needed_s=(0.0,) * 7,
        idle_s=(idle_s,) * 7,
        since_s=(since_s,) * 7,
    )
    return replace(base, **changes)


HELPED = Trial(
    tried=7, outcome=True, helped_per_s=20.0, requests=6000.0, seen_s=300.0, age_s=1200.0, lately=6000.0
)
JUDGED = replace(HELPED, outcome=None)


@pytest.mark.parametrize(
    ("case", "clock", "expected"),
    [
        pytest.param(
            _case(trial=HELPED),
            CLOCK,
            (
                "tried",
                "a trial at 02:10 helped; kept until 03:10 or less load; demand needs 1",
                Retention(1, NOW_S - 1200.0, NOW_S + 2400.0),
            ),
            id="a trial that helped",
        ),
        pytest.param(
            _case(trial=HELPED),
            replace(CLOCK, time_zone="Europe/Berlin"),
            (
                "tried",
                "a trial at 03:10 helped; kept until 04:10 or less load; demand needs 1",
                Retention(1, NOW_S - 1200.0, NOW_S + 2400.0),
            ),
            id="in the planner's time zone",
        ),
        pytest.param(
            _case(trial=HELPED),
            replace(CLOCK, speed=60.0),
            (
                "tried",
                "a trial at 02:29 helped; kept until 02:30 or less load; demand needs 1",
                Retention(1, NOW_S - 1200.0, NOW_S + 2400.0),
            ),
            id="where simulated time passes faster",
        ),
        pytest.param(
            _case(trial=HELPED),
            UNKNOWN,
            (
                "tried",
                "a trial 20 min ago helped; kept for 40 min or less load; demand needs 1",
                Retention(1, NOW_S - 1200.0, NOW_S + 2400.0),
            ),
            id="without a wall clock",
        ),
        pytest.param(
            _case(trial=JUDGED),
            CLOCK,
            (
                "tried",
                "a trial that began at 02:10 is still being judged; kept until 03:10 at most; demand needs 1",
                Retention(1, NOW_S - 1200.0, NOW_S + 2400.0),
            ),
            id="a trial that runs",
        ),
        pytest.param(
            _case(hindsight=_known(floor=7)),
            CLOCK,
            (
                "hindsight",
                "the learnt floor is 7, last needed at 02:10; kept until 04:20 unless demand returns; demand needs 1",
                Retention(1, NOW_S - 1200.0, NOW_S + 6600.0),
            ),
            id="a learnt floor",
        ),
        pytest.param(
            _case(hindsight=_known(idle_s=20.0)),
            UNKNOWN,
            (
                "idle",
                "7 were needed 20 s ago; kept for 40 s unless demand returns; demand needs 1",
                Retention(1, NOW_S - 20.0, NOW_S + 40.0),
            ),
            id="an idle hold",
        ),
        pytest.param(
            _case(hindsight=_known(growth=Growth.DELAYED, needed_s=(15.0,) * 7, idle_s=45.0)),
            UNKNOWN,
            (
                "idle",
                "7 were needed 45 s ago; kept for 15 s unless demand returns; demand needs 1",
                Retention(1, NOW_S - 45.0, NOW_S + 15.0),
            ),
            id="an idle hold of a patient fleet",
        ),
        pytest.param(
            _case(hindsight=_known(floor=7, least=7)),
            CLOCK,
            ("floor", "its floor is 7; demand needs 1", Retention(1)),
            id="the configured floor has no end",
        ),
        pytest.param(
            _case(hindsight=_known(idle_s=20.0), trial=HELPED),
            CLOCK,
            (
                "tried",
                "a trial at 02:10 helped; kept until 03:10 or less load; demand needs 1",
                Retention(1, NOW_S - 1200.0, NOW_S + 2400.0),
            ),
            id="of two rules the one that keeps it longer",
        ),
    ],
)
def test_the_rule_that_keeps_replicas_is_named_with_its_times(case, clock, expected):
    """The sentence, and the same numbers in the record."""
    found = kept_by(case, clock)
    needs = needed(case)
    assert (found.rule, found.in_words(needs, clock), found.kept(needs)) == expected


def test_nothing_is_named_where_no_such_rule_keeps_a_replica():
    """The trial was of more replicas than the load needs now, and the seventh has been idle for long."""
    less = replace(HELPED, requests=300.0)
    assert less.floor < 7
    assert kept_by(_case(trial=less, hindsight=_known()), CLOCK) is None


@pytest.mark.parametrize(
    ("rate", "needs"),
    [(0.0, 1), (7_500.0, 1), (7_501.0, 2), (15_001.0, 3), (45_000.0, 6), (60_000.0, 7)],
)
def test_demand_alone_needs_as_many_as_it_keeps_three_quarters_busy(rate, needs):
    """At 10,000 tokens/s of a worker; never more than there are."""
    assert needed(_case(rate=rate)) == needs


def test_demand_alone_counts_kv_where_decode_holds_it():
    """A load of 0.7 on seven workers would fill two of them to 1.39, and three to 0.39, below the maximum of 0.43."""
    kv = KvView(0.7, ObservedDecoding(0.0))
    assert needed(_case(role=Role.DECODE, work=None, kv=kv)) == 3
