"""Mode sla tells chance from change: of arrivals, of lengths, and of the first tokens that it sees."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sla_load import CONFIG, decided_after, pull_of, step_of

from penstock.api import Role
from penstock_planner.decide.capacity.corrections import SlaMemory, SteadyRate
from penstock_planner.decide.codec import to_plain
from penstock_planner.decide.demand.observation import PoolCounts
from penstock_planner.decide.demand.trend import TrendForecast


def followed_for(seconds, rate=3.0):
    """Return the rate of arrivals after this many seconds of them."""
    found = SteadyRate()
    for second in range(seconds):
        found = found.followed(pull_of(float(second), rate=rate).demand)
    return found


@pytest.mark.parametrize(
    ("now", "ahead", "expected"),
    [(3.2, 3.5, 3.0), (2.7, 2.5, 3.0), (3.2, 3.8, 3.8), (3.7, 2.5, 2.5), (2.9, 1.0, 1.0)],
    ids=["chance above", "chance below", "a rise", "a crest", "a fall"],
)
def test_a_trend_counts_beyond_its_error(now, ahead, expected):
    """3 requests/s for five minutes, a prediction's error of 0.4: what is 0.6 or less away from 3 is chance."""
    found = followed_for(300).steadied(TrendForecast(now, ahead, 0.4))
    assert found.ahead == pytest.approx(expected, rel=0.01)


def test_before_the_first_pull_the_trend_says():
    """Nothing is divided by no time."""
    along = TrendForecast(3.0, 4.0, 0.1)
    assert SteadyRate().steadied(along) == along


def test_memory_of_before_the_mean_was_followed_is_read():
    """A ledger of an older planner lacks it; the mean begins with the next pull."""
    plain = to_plain({"sla": SlaMemory(arrived=100.0, steady=SteadyRate(300.0, 100.0))})
    assert SlaMemory.read(plain).steady == SteadyRate(300.0, 100.0)
    del plain["sla"]["steady"]
    assert SlaMemory.read(plain) == SlaMemory(arrived=100.0)


def test_too_few_prompts_leave_the_shares_to_adaptive():
    """Ten seconds of 2 requests/s tell nothing of their lengths; a minute does, and so do a hundred prompts."""

    def share(seconds, rate):
        found, _ = decided_after(seconds, rate=rate, config=replace(CONFIG, ttft_slo_s=0.2))
        return step_of(found[Role.PREFILL], "demand").threshold

    assert share(10, 2.0) == 0.9
    assert share(90, 2.0) < 0.6
    assert share(10, 12.0) < 0.6


@pytest.mark.parametrize(("role", "is_corrected"), [(Role.PREFILL, True), (Role.AGGREGATED, False)])
def test_first_tokens_of_aggregated_workers_do_not_correct_a_prompts_own_time(role, is_corrected):
    """A TTFT of 3 s for prompts of 0.1 s: slow prefill workers, but in aggregated ones perhaps a queue that nobody sees."""
    pull = pull_of(0.0, ttft_sum_s=12.0)
    pull = replace(pull, pools={role: PoolCounts(2, gpus=1)})
    memory = SlaMemory()
    for _ in range(60):
        memory = memory.followed(pull, CONFIG.performance, mean_rate=4.0)
    assert (memory.ttft.factor > 1.5) is is_corrected
