"""What each rule of a role finds: its reason, its words and its numbers, with one worker and with several."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import pytest
from adaptive_cases import case_of, work_of

from penstock.api import Role
from penstock_planner.decide.capacity.decoding import KvView, ObservedDecoding
from penstock_planner.decide.capacity.observed import ObservedWorkers
from penstock_planner.decide.decision import Reason
from penstock_planner.decide.demand.observation import PoolCounts
from penstock_planner.decide.objective.shadow_fleets import Hindsight
from penstock_planner.decide.objective.trial import Trial
from penstock_planner.decide.policies.adaptive.rules import (
    backlog_at_horizon,
    grow_findings,
    prefilled_per_s,
    shrink_findings,
    workers_needed,
    workers_to_keep,
)

P, D = Role.PREFILL, Role.DECODE


@dataclass
class Gaps:
    """Gaps that halve with twice the workers; the target is 40 ms, 30 ms before one may go."""

    one_s: float = 0.06
    target_s: float = 0.04
    after_s: float = 0.03

    def itl_with(self, workers):
        """The ITL of this many."""
        return self.one_s / workers


def _work(rate=9000.0, **changes):
    return work_of(rate, **changes)


def _case(ready=1, *, role=P, **changes):
    return case_of(role, ready, **changes)


def _kv(now):
    return KvView(now, ObservedDecoding(0.0))


def _lack(case, name):
    return next(each for each in grow_findings(case) if each.step.name == name)


def _spare(case, name):
    return next(each for each in shrink_findings(case) if each.step.name == name)


@pytest.mark.parametrize(
    ("finding", "words"),
    [
        (
            partial(_lack, _case(work=_work(8000.0, backlog_tokens=91_903.0)), "backlog"),
            "projected backlog in 7 s: 77,903 tokens; 1 worker needs more than 7 s to clear it",
        ),
        (
            partial(_lack, _case(2, work=_work(8000.0, backlog_tokens=184_000.0)), "backlog"),
            "projected backlog in 7 s: 100,000 tokens; 2 workers need more than 7 s to clear it",
        ),
        (
            partial(_lack, _case(work=_work(9500.0)), "demand"),
            "demand forecast for 7 s ahead: 9,500 tokens/s, more than 9,000 (90% of the 10,000 that 1 worker can compute)",
        ),
        (partial(_lack, _case(rejected=1.0), "rejected"), "1 request rejected or timed out"),
        (partial(_lack, _case(rejected=2.0), "rejected"), "2 requests rejected or timed out"),
        (
            partial(_lack, _case(role=D, kv=_kv(0.8)), "kv"),
            "projected KV usage of 1 worker in 7 s: 0.80, above 0.70",
        ),
        (
            # An estimate of what waits, which ends at a bound: 2.00 would look measured.
            partial(_lack, _case(role=D, kv=_kv(2.0)), "kv"),
            "projected KV usage of 1 worker in 7 s: more than full, above 0.70",
        ),
        (
            partial(_lack, _case(role=D, itl=Gaps()), "itl"),
            "projected ITL of 1 worker: 60.0 ms (target 40 ms)",
        ),
        (
            partial(_lack, _case(2, role=D, itl=Gaps()), "itl"),
            "projected ITL of 2 workers: 30.0 ms (target 40 ms)",
        ),
        (partial(_spare, _case(2, hindsight=Hindsight()), "idle"), "1 prefill worker would have been enough"),
        (
            partial(_spare, _case(3, role=D, hindsight=Hindsight()), "idle"),
            "2 decode workers would have been enough",
        ),
        (
            partial(_spare, _case(2, trial=Trial()), "tried"),
            "1 worker is enough for the requests served on time",
        ),
        (
            partial(_spare, _case(3, trial=Trial()), "tried"),
            "2 workers are enough for the requests served on time",
        ),
        (
            partial(_spare, _case(2, work=_work(6000.0)), "projected_work"),
            "1 worker would be 60% busy, within the maximum of 75%",
        ),
        (partial(_spare, _case(1, work=_work(0.0)), "projected_work"), "demand has ended"),
        (
            partial(_spare, _case(2, role=D, kv=_kv(0.0)), "projected_kv"),
            "KV usage of 1 worker would be 0.00, within the maximum of 0.43",
        ),
        (
            partial(_spare, _case(1, role=D, itl=Gaps()), "itl_after"),
            "projected ITL of 0 workers: unbounded (target 40 ms)",
        ),
    ],
)
def test_a_rule_names_the_unit_of_each_number(finding, words):
    """One worker clears, two workers clear."""
    assert finding().detail == words


LATE = Trial(requests=100.0, late=30.0, seen_s=100.0, lately=100.0, replicas=2, late_ago_s=5.0)


@pytest.mark.parametrize(
    ("finding", "name", "inputs", "threshold", "outcome"),
    [
        (partial(_lack, _case(rejected=2.0), "rejected"), "rejected", {"requests": 2.0}, 0, "grow"),
        (
            partial(_lack, _case(work=_work(9500.0)), "demand"),
            "demand",
            {
                "tokens_per_s": 9500.0,
                "tokens_per_s_ahead": 9500.0,
                "tokens_per_s_error": 0.0,
                "tokens_per_s_lately": 9500.0,
                "tokens_per_s_lately_error": 0.0,
                "worker_tokens_per_s": 10_000.0,
                "requests_met": "yes",
                "workers": 1,
                "horizon_s": 7.0,
            },
            0.9,
            "grow",
        ),
        (
            partial(_lack, _case(work=_work(12_000.0)), "backlog"),
            "backlog",
            {
                "backlog_tokens": 0.0,
                "oldest_wait_s": None,
                "starting": 0,
                "left_tokens": 14_000.0,
                "clears_in_s": None,
            },
            7.0,
            "grow",
        ),
        (
            partial(_lack, _case(work=_work(tokens_per_s=None), oldest_wait_s=2.6), "backlog"),
            "backlog",
            {"oldest_wait_s": 2.6, "starting": 0},
            2.5,
            "grow",
        ),
        (
            partial(_lack, _case(work=_work(tokens_per_s=None), slo_s=1.0), "backlog"),
            "backlog",
            {"oldest_wait_s": None, "starting": 0},
            0.5,
            "pass",
        ),
        (
            partial(_lack, _case(2, trial=LATE, price_gpu_s=100.0), "served"),
            "served",
            {
                "requests": 100.0,
                "late_unexplained": 0.3,
                "late_price_gpu_s": 100.0,
                "late_ago_s": 5.0,
                "tried": 0,
                "helped": "unknown",
            },
            0.01,
            "grow",
        ),
        (
            partial(_lack, _case(2, hindsight=Hindsight()), "hindsight"),
            "hindsight",
            {"workers": 2, "floor": 0, "growth": "immediate"},
            0,
            "pass",
        ),
        (
            partial(_lack, _case(role=D, itl=Gaps()), "itl"),
            "itl",
            {"itl_s_ahead": 0.06, "workers": 1},
            0.04,
            "grow",
        ),
        (
            partial(_lack, _case(role=D, itl=Gaps(math.inf)), "itl"),
            "itl",
            {"itl_s_ahead": None, "workers": 1},
            0.04,
            "grow",
        ),
        (
            partial(_spare, _case(3, role=D, itl=Gaps()), "itl_after"),
            "itl_after",
            {"workers_after": 2, "itl_s_after": 0.03},
            0.03,
            "shrink",
        ),
        (
            partial(_spare, _case(1, role=D, itl=Gaps()), "itl_after"),
            "itl_after",
            {"workers_after": 0, "itl_s_after": None},
            0.03,
            "hold",
        ),
        (partial(_spare, _case(2, trial=Trial(tried=2)), "tried"), "tried", {"workers": 2}, 2, "hold"),
        (
            partial(_spare, _case(2, work=_work(6000.0)), "projected_work"),
            "projected_work",
            {
                "workers_after": 1,
                "tokens_per_s": 6000.0,
                "worker_tokens_per_s": 10_000.0,
                "busy_after": 0.6,
            },
            0.75,
            "shrink",
        ),
    ],
)
def test_a_ledger_has_each_rules_name_numbers_threshold_and_outcome(
    finding, name, inputs, threshold, outcome
):
    """Ledgers, `explain` and charts are read by these names; what has no end or is not known is None."""
    step = finding().step
    assert (step.name, step.threshold, step.outcome) == (name, pytest.approx(threshold), outcome)
    assert step.inputs == inputs


@pytest.mark.parametrize(("helped", "word"), [(None, "unknown"), (True, "yes"), (False, "no")])
def test_a_trial_says_whether_it_helped(helped, word):
    """In words of the record, and in the outcome where it was in vain."""
    step = _lack(_case(2, trial=replace(LATE, outcome=helped, tried=2), price_gpu_s=100.0), "served").step
    assert step.inputs["helped"] == word
    assert ("did not help" in step.outcome) is (helped is False)


def test_nothing_known_of_hindsight_is_said():
    """A floor of none gives no reason."""
    found = _lack(_case(2, hindsight=Hindsight()), "hindsight")
    assert (found.reason, found.detail) == (Reason.HINDSIGHT_FLOOR, "nothing is known yet")


class LonelyWorkers(ObservedWorkers):
    """Workers of which few may be filled less than many, and whose wait is within the SLO by a profile."""

    uses_learned_floor = False

    def busy_after(self, role, workers):
        """A tenth per worker."""
        return 0.1 * workers


def test_demand_is_to_be_kept_by_the_workers_that_stay():
    """Of three workers two stay: they may be filled to 20%, so 4,000 tokens/s of 10,000 are two workers' worth."""
    case = _case(3, work=_work(4000.0), workers=LonelyWorkers())
    assert workers_to_keep(case) == pytest.approx(2.0)
    assert workers_needed(case) == pytest.approx(4000 / 9000)
    assert _lack(case, "demand").detail.endswith("3 workers can compute with a wait within the SLO)")


def test_prompts_that_end_while_a_backlog_clears_are_what_its_workers_can_do_at_most():
    """20,000 tokens are left at the horizon and cleared within the SLO of 5 s: 4,000 tokens/s against 5,000 that arrive."""
    work, pool = _work(5000.0, backlog_tokens=55_000.0), PoolCounts(1)
    assert backlog_at_horizon(work, pool, (), 7.0) == pytest.approx(20_000.0)
    assert backlog_at_horizon(work, pool, (5.0, 9.0), 7.0) == 0.0
    assert prefilled_per_s(work, pool, (), horizon_s=7.0, slo_s=5.0) == pytest.approx(9000.0)
    assert prefilled_per_s(work, pool, (), horizon_s=7.0, slo_s=0.5) == pytest.approx(10_000.0)


def test_kv_load_is_given_now_and_by_demand():
    """Two workers with 0.8 of one's; a demand of none holds nothing."""
    step = _lack(_case(2, role=D, kv=_kv(0.8)), "kv").step
    assert step.inputs == {"kv_load": 0.8, "kv_load_demanded": 0.0, "workers": 2}


def test_a_last_worker_with_work_is_not_spared():
    """No worker would be left for 1 token/s or for a backlog: no share of nothing is enough."""
    for work in (_work(1.0), _work(0.0, backlog_tokens=1.0)):
        step = _spare(_case(1, work=work), "projected_work").step
        assert (step.outcome, step.inputs["busy_after"]) == ("hold", None)
