"""More load than a fleet can serve, through the live router's core: rejection keeps TTFT, tiers keep premium's."""

from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from penstock.api import Role, RouterConfig, Tier
from penstock.engine.serve.settings import PreemptionFlag
from penstock.router.policy.busy import NO_THRESHOLDS, BusyThresholds
from penstock.simulator.jobs import JobOutcome
from penstock.simulator.scenario import PoolSpec, ProfiledModel, Scenario, SimulatedRouters, unbounded_router
from penstock.simulator.scoreboard import tier_scores
from penstock.simulator.simulation import Simulation
from penstock.simulator.workload import Workload
from penstock.workload.arrivals import Spread
from penstock.workload.traces import TraceRequest
from penstock_planner.decide.config import DecideConfig, Mode

PROFILE = ProfiledModel("a100-llama-8b-bf16-tp1", request_queue=2)
OK, REJECTED = JobOutcome.OK, JobOutcome.REJECTED
POLICIES = ("least-loaded", "prefix-cost")
PROMPT_TOKENS = 2000
"""About 0.13 s of prefill."""


def evenly(gap_s, last_s, tiers=(None,)):
    """Return requests at equal gaps that share nothing and ask for the tiers in turn."""
    return [
        TraceRequest(at * gap_s, PROMPT_TOKENS, 20, None, at + 1, tier=tiers[at % len(tiers)])
        for at in range(int(last_s / gap_s))
    ]


def world_of(policy, requests, *, thresholds=NO_THRESHOLDS, split=False, model=PROFILE, workers=2, **more):
    """Make a world of a few workers a role behind a queue without bounds, unless the section has some."""
    admission = {
        "mode": "none" if thresholds is NO_THRESHOLDS else "token-capacity",
        "activeDecodeBlocksThreshold": thresholds.active_decode_blocks_threshold,
        "activePrefillTokensThreshold": thresholds.active_prefill_tokens_threshold,
    }
    router = more.pop("router", None) or unbounded_router(policy, **more.pop("section", {}))
    router = RouterConfig.model_validate({**router.to_manifest(), "policy": policy, "admission": admission})
    roles = (Role.PREFILL, Role.DECODE) if split else (Role.AGGREGATED,)
    return Simulation(Scenario([PoolSpec(role, workers, model) for role in roles], router, **more), requests)


def ran(*arguments, **more):
    """Return the jobs of a world when it has run."""
    world = world_of(*arguments, **more)
    world.run()
    return world.jobs


def count(jobs, outcome, tier=None):
    """Return how many jobs ended so, of one tier or of all."""
    return sum(job.outcome is outcome and tier in {None, job.request.tier} for job in jobs)


def ttft_p99_s(jobs):
    """Return the p99 TTFT of those that were served, seconds."""
    served = [job.first_token_s - job.request.arrival_s for job in jobs if job.outcome is OK]
    return float(np.percentile(served, 99))


def ttft_by_third(jobs):
    """Return the same for each third of a run."""
    third_s = jobs[-1].request.arrival_s / 3
    return [
        ttft_p99_s([job for job in jobs if min(2, int(job.request.arrival_s / third_s)) == third])
        for third in range(3)
    ]


# -- rejection ------------------------------------------------------------------------------------------


ARRIVAL = {"prefillQueue": {"order": "arrival"}}


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("policy", ["prefix-cost", pytest.param("least-loaded", marks=pytest.mark.nightly)])
def test_accepted_requests_keep_their_ttft_under_twice_the_load(policy, split):
    """Two workers get a request each 0.033 s for 60 s; without rejection TTFT grows to the end."""
    shape = {"split": split, "section": ARRIVAL}
    with_it = ran(policy, evenly(0.033, 60.0), thresholds=BusyThresholds(0.9, 4000), **shape)
    kept, grown = ttft_by_third(with_it), ttft_by_third(ran(policy, evenly(0.033, 60.0), **shape))

    assert max(kept) < 1.0
    assert kept[2] < 1.5 * kept[0]
    assert grown[2] > 4 * grown[0] / 3 > 4
    assert count(with_it, OK) + count(with_it, REJECTED) == len(with_it)
    assert 0.3 < count(with_it, REJECTED) / len(with_it) < 0.7


@pytest.mark.parametrize("split", [False, True])
def test_rejection_does_not_hide_demand_from_thresholds(split):
    """Mode load: one worker of each role at one and a half times its load grows, though nothing ever waits.

    Without it a third of all requests is rejected to the end.
    """
    jobs = ran(
        "least-loaded", evenly(0.09, 120.0), thresholds=BusyThresholds(0.9, 4000), split=split, workers=1,
        section=ARRIVAL, planner=DecideConfig(mode=Mode.LOAD), max_gpus=8, cold_start_s=5.0,
    )  # fmt: skip
    rejected = [job.request.arrival_s for job in jobs if job.outcome is REJECTED]
    at_first, later = (sum(low <= at_s < low + 30 for at_s in rejected) for low in (0, 40))
    assert later < at_first / 4


@pytest.mark.parametrize("policy", ["prefix-cost", "dualmap", "least-loaded"])
@pytest.mark.parametrize("deaths", [(), (5.0, 10.0)])
def test_several_routers_oversubscribe_a_worker_by_a_prompt_at_most(policy, deaths):
    """As one does, also after its picker's death: the successor knows what is in flight."""
    limit = 8000
    group = SimulatedRouters(4, pick_delay_s=0.001, picker_deaths_s=deaths)
    thresholds = BusyThresholds(None, limit)
    world = world_of(policy, evenly(0.02, 20.0), thresholds=thresholds, section=ARRIVAL, routers=group)
    peaks = dict.fromkeys(("aggregated-0", "aggregated-1"), 0)

    def watch():
        queue = world.routers[-1].core.entry_queue
        for name in peaks:
            queued = queue.workers.queued_tokens(name) + queue.prompt_tokens.pending.get(name, 0)
            peaks[name] = max(peaks[name], queue.backlog_tokens / 2 or queued)

    world.run(watch, watch_events=1)

    assert limit < max(peaks.values()) <= limit + PROMPT_TOKENS
    assert count(world.jobs, REJECTED)


# -- tiers ----------------------------------------------------------------------------------------------


ORDER = (Tier.STANDARD, Tier.BACKGROUND, Tier.STANDARD, Tier.BACKGROUND, Tier.PREMIUM)
SLO = {
    "premium": {"ttft": "1s", "itl": "100ms", "endToEnd": "10s"},
    "standard": {"ttft": "3s", "itl": "200ms", "endToEnd": "20s"},
    "background": {"endToEnd": "1m"},
}
NO_TARGETS = {"ttft": "24h", "itl": "24h"}
PREEMPTING = replace(PROFILE, preemption=PreemptionFlag())


def tiered(*, split=True, policy="prefix-cost", **tiers):
    """Make a world with twice its load: a fifth premium, two fifths standard, two fifths background."""
    section = {"tiers": {"enabled": True, "slo": SLO, **tiers}}
    return world_of(policy, evenly(0.033, 60.0, ORDER), split=split, model=PREEMPTING, section=section)


def of_tier(jobs, tier):
    """Return the jobs of a tier."""
    return [job for job in jobs if job.request.tier is tier]


@pytest.mark.parametrize(
    ("split", "policy"),
    [
        (True, "prefix-cost"),
        pytest.param(False, "prefix-cost", marks=pytest.mark.nightly),
        pytest.param(True, "least-loaded", marks=pytest.mark.nightly),
    ],
)
def test_premium_keeps_its_ttft_where_a_single_queue_grows(split, policy):
    """Alike, all wait longer and longer; with tiers premium is ten times as fast, and background is shed."""
    alike, world = tiered(split=split, policy=policy, enabled=False), tiered(split=split, policy=policy)
    alike.run()
    world.run()

    premium, all_alike = of_tier(world.jobs, Tier.PREMIUM), of_tier(alike.jobs, Tier.PREMIUM)
    assert ttft_p99_s(premium) < 1.0 < ttft_p99_s(all_alike) / 10
    assert count(premium, REJECTED) == 0 < count(world.jobs, REJECTED, Tier.BACKGROUND)
    assert count(world.jobs, OK) + count(world.jobs, REJECTED) == len(world.jobs)


def test_shed_requests_are_demand_and_attain_nothing():
    """The planner sees each as an arrival, refused, with its tokens; no promise to those admitted is broken."""
    world = tiered()
    recording = world.run()

    shed = sum(each.shed for each in world.routers[0].core.tiers.counts.values())
    demand = world.frontend.collect(world.kernel.now_s, {}, {})
    assert demand.refused == shed > 0
    assert (demand.arrivals, demand.prompt_tokens) == (len(world.jobs), len(world.jobs) * PROMPT_TOKENS)

    workload = Workload("synthetic", tuple(job.request for job in world.jobs), 100, None, 0, 0, Spread.NONE)
    scores = tier_scores(recording, workload, world.scenario)
    assert list(scores) == ["premium", "standard", "background"]
    assert sum(row["requests"] for row in scores.values()) == len(world.jobs) - 100
    background = scores["background"]
    admitted = 1 - background["rejected"] / background["requests"]
    assert admitted < 1
    assert background["attainment"] == pytest.approx(background["compliance"] * admitted, abs=1e-5)
    assert scores["premium"]["compliance"] > 0.99


# -- both: premium at 40% of the capacity, and so inside its half ------------------------------------------


SHARED = (Tier.PREMIUM, Tier.STANDARD, Tier.BACKGROUND)
DEFAULTS = BusyThresholds(0.85, 100_000)


def traffic(
    factor,
    *,
    rate=17.0,
    premium=0.4,
    standard=0.3,
    prompt_tokens=PROMPT_TOKENS,
    output_tokens=20,
    seconds=40.0,
):
    """Return Poisson arrivals: premium and standard as parts of ``rate``, by default inside their shares, the rest background."""
    rng = np.random.default_rng(0)
    times = np.cumsum(rng.exponential(1 / (rate * factor), int(rate * factor * seconds * 1.3)))
    times = times[times < seconds]
    tiers = rng.choice(
        len(SHARED), times.size, p=[premium / factor, standard / factor, 1 - (premium + standard) / factor]
    )
    return [
        TraceRequest(float(at_s), prompt_tokens, output_tokens, None, line, tier=SHARED[tier])
        for line, (at_s, tier) in enumerate(zip(times, tiers, strict=True), 1)
    ]


def bounded():
    """Return a router section with tiers that shed nothing and a queue of at most 60 s."""
    slo = {tier: {**NO_TARGETS, "endToEnd": "1m"} for tier in SHARED}
    return RouterConfig.model_validate(
        {"tiers": {"enabled": True, "slo": slo, "shedding": {"enabled": False}}}
    )


@cache
def shares(policy, thresholds, factor, is_split, *, request_limit=None):
    """Return each tier's share of the prompts served and part of its requests rejected."""
    model, shape = replace(PROFILE, request_limit=request_limit), {}
    if request_limit is not None:
        shape = {"prompt_tokens": 500, "output_tokens": 100, "rate": 7.0}
    requests = traffic(factor, **shape)
    jobs = ran(policy, requests, thresholds=thresholds, split=is_split, model=model, router=bounded())
    arrived = Counter(job.tier for job in jobs)
    rejected = Counter(job.tier for job in jobs if job.outcome is REJECTED)
    served = arrived - rejected
    return {tier: (served[tier] / served.total(), rejected[tier] / arrived[tier]) for tier in SHARED}


def premium_and_standard_are_served(found):
    """Return whether background alone was rejected, except for the few that met nothing but their own tier's prompts."""
    return all(found[tier][1] < 0.01 for tier in (Tier.PREMIUM, Tier.STANDARD))


@pytest.mark.parametrize("factor", [2, pytest.param(3, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "thresholds",
    [
        DEFAULTS,
        pytest.param(BusyThresholds(0.9, 8000), marks=pytest.mark.nightly),
        BusyThresholds(0.9, 1000),
    ],
)
@pytest.mark.parametrize(
    ("policy", "is_split"),
    [
        ("prefix-cost", False),
        pytest.param("least-loaded", False, marks=pytest.mark.nightly),
        ("prefix-cost", True),
    ],
)
def test_tiers_inside_their_shares_are_not_rejected(policy, is_split, thresholds, factor):
    """Background alone is, however low the threshold, and gets the 30% that is left, and what waits at the end."""
    found = shares(policy, thresholds, factor, is_split)
    assert premium_and_standard_are_served(found)
    assert 0.1 < found[Tier.BACKGROUND][0] < 0.45
    assert found[Tier.BACKGROUND][1] > 0.5


@pytest.mark.parametrize("factor", [1, pytest.param(2, marks=pytest.mark.nightly), 5])
def test_a_tier_beyond_its_share_keeps_the_ttft_that_the_threshold_allows(factor):
    """Standard asks for 40% of the capacity, of which 35% is its share: who is admitted waits for a prompt of each tier.

    It is served its share and nearly so. Where eight rounds of prompts might wait whatever the threshold, it waited 2.3 s.
    """
    thresholds = BusyThresholds(0.9, 2000)
    requests = traffic(factor, premium=0.3, standard=0.4, seconds=60.0)
    tiers = {"enabled": True, "shedding": {"enabled": False}}
    jobs = ran("prefix-cost", requests, thresholds=thresholds, section={"tiers": tiers})
    standard = of_tier(jobs, Tier.STANDARD)
    assert ttft_p99_s(standard) < 1.0
    assert count(standard, OK) / count(jobs, OK) > 0.3
    assert count(of_tier(jobs, Tier.PREMIUM), REJECTED) < 3


def test_a_deadline_that_has_passed_does_not_make_a_worker_look_empty():
    """KV blocks of 40 prompts for two workers: what waits for one without blocks is soon late, for premium after 200 ms.

    Where late requests did not count as pending it drew all that came: premium waited 7.4 s, by arrival 4.0 s.
    """
    model = replace(PROFILE, kv_tokens=20_000)
    requests = traffic(3, rate=15.0, premium=0.45, prompt_tokens=500, output_tokens=200, seconds=60.0)
    found = {}
    for order in ("in-time-first", "arrival"):
        section = {
            "tiers": {"enabled": True, "shedding": {"enabled": False}},
            "prefillQueue": {"order": order},
        }
        thresholds = BusyThresholds(0.95, 2000)
        jobs = ran("prefix-cost", requests, thresholds=thresholds, model=model, section=section)
        found[order] = ttft_p99_s(of_tier(jobs, Tier.PREMIUM))
    assert found["in-time-first"] < 1.2 * found["arrival"]


TOGETHER = ProfiledModel(
    "a100-llama-70b-bf16-tp8",
    kv_tokens=49_152,
    block_size=16,
    max_num_batched_tokens=512,
    preemption=PreemptionFlag(),
)
"""3,072 KV blocks, which 50 requests of 700 + 300 tokens fill, and which are what it runs out of first."""


@cache
def premium_and_tokens(factor, workers, *, rejects, shape=("prefix-cost", False)):
    """Return premium's p99 TTFT and part rejected, and the output tokens/s of all tiers that end while requests come."""
    policy, is_split = shape
    seconds = 60.0
    requests = traffic(factor, rate=4.5 * workers, prompt_tokens=700, output_tokens=300, seconds=seconds)
    thresholds = DEFAULTS if rejects else NO_THRESHOLDS
    jobs = ran(
        policy,
        requests,
        thresholds=thresholds,
        split=is_split,
        model=TOGETHER,
        workers=workers,
        router=bounded(),
    )
    premium = of_tier(jobs, Tier.PREMIUM)
    ended = sum(job.request.output_tokens for job in jobs if job.outcome is OK and job.ended_s <= seconds)
    return ttft_p99_s(premium), count(premium, REJECTED), ended / seconds


@pytest.mark.parametrize(
    ("factor", "workers"),
    [
        (2, 2),
        *(
            pytest.param(f, n, marks=pytest.mark.nightly)
            for f in (1, 2, 3, 5)
            for n in (1, 2, 4)
            if (f, n) != (2, 2)
        ),
    ],
)
def test_rejection_does_not_delay_premium(factor, workers):
    """With thresholds premium's p99 TTFT is that without, and the workers generate as many tokens.

    Where every tier waited for a worker above its threshold of KV blocks it was 7.6 s, and 0.3 s without.
    """
    alone_s, _, alone_tokens = premium_and_tokens(factor, workers, rejects=False)
    p99_s, rejected, tokens = premium_and_tokens(factor, workers, rejects=True)
    assert p99_s < 1.2 * alone_s < 1.0
    assert rejected == 0
    assert tokens > 0.97 * alone_tokens


@pytest.mark.parametrize("shape", [("least-loaded", False), ("dualmap", False), ("prefix-cost", True)])
def test_rejection_does_not_delay_premium_whatever_the_policy(shape):
    """Also where the decode workers are the ones without blocks."""
    alone_s, *_ = premium_and_tokens(2, 2, rejects=False, shape=shape)
    p99_s, rejected, _ = premium_and_tokens(2, 2, rejects=True, shape=shape)
    assert p99_s < 1.2 * alone_s < 1.0
    assert rejected == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_the_slots_of_workers_with_a_request_limit_go_by_tier(policy):
    """Four requests a worker: what is beyond waits by tier in the router, and premium gets no 503 behind background.

    Where it waits in the workers' own queues, premium is refused 7 to 12% and standard 37 to 47%.
    """
    found = shares(policy, NO_THRESHOLDS, 2, False, request_limit=4)
    assert premium_and_standard_are_served(found)
    assert found[Tier.BACKGROUND][1] > 0.2


def test_premium_is_given_to_engines_that_preempt_at_once():
    """Twice the load on one engine of 20 running requests, with the product's defaults: premium waits for none of them.

    Given 8,192 prompt tokens at a time like all others, its p99 was half as long again as where the router holds none back.
    """
    model = ProfiledModel("a100-llama-70b-bf16-tp8", max_num_seqs=20, preemption=PreemptionFlag())
    requests = traffic(3, rate=2.5, prompt_tokens=1500, output_tokens=150, seconds=120.0)
    p99_s = {}
    for tokens in (8192, 1_000_000):
        section = {
            "tiers": {"enabled": True, "shedding": {"enabled": False}},
            "prefillQueue": {"workerTokens": tokens},
        }
        jobs = ran("prefix-cost", requests, model=model, workers=1, section=section)
        p99_s[tokens] = ttft_p99_s(of_tier(jobs, Tier.PREMIUM))
    assert p99_s[8192] < 1.1 * p99_s[1_000_000] < 1.0


def test_a_background_request_waits_in_the_router_and_not_at_a_full_decode_worker():
    """Three times the load, decode batches full, no thresholds: no first token comes long after the queue's 60 s.

    Premium is as fast as without load. Where all continued to the decode workers, background waited up to 228 s.
    """
    preemption = PreemptionFlag(maxPerRequest=3, premiumReservedFraction=0.3, swapGigabytes=16)
    model = ProfiledModel("a100-llama-8b-bf16-tp1", max_num_seqs=16, preemption=preemption)
    requests = traffic(3, prompt_tokens=500, output_tokens=300, rate=6.5, seconds=120.0)
    jobs = ran("prefix-cost", requests, split=True, model=model, router=bounded())
    premium, background = (
        [job.first_token_s - job.request.arrival_s for job in of_tier(jobs, tier) if job.outcome is OK]
        for tier in (Tier.PREMIUM, Tier.BACKGROUND)
    )
    assert np.median(premium) < 0.2
    assert max(background) < 80


# -- preemption in an engine ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drop_above_s", "priority", "served"),
    [(None, 2, [True, True]), (0.001, 2, [False, True]), (None, 0, [True, True])],
    ids=["comes back", "is dropped", "is not a victim of its equal"],
)
def test_a_request_gives_way_to_a_higher_tier_as_live(drop_above_s, priority, served):
    """Premium needs the blocks of a long request: it does not wait for its 500 outputs, which come later in full."""
    preemption = PreemptionFlag(premiumReservedFraction=0.0, dropAboveSeconds=drop_above_s)
    model = ProfiledModel("h200-llama-3.1-8b-tp1", kv_tokens=4096, block_size=16, preemption=preemption)
    requests = [TraceRequest(0.0, 3000, 500, None, 1), TraceRequest(1.0, 2000, 4, None, 2)]
    world = Simulation(Scenario([PoolSpec(Role.AGGREGATED, 1, model)]), requests)
    world.jobs[0].priority = priority

    found = world.run().requests

    assert list(found.is_ok) == served
    assert (found.ttft_s[1] < 0.5) == (priority == 2)
    assert not served[0] or found.e2e_s[0] > 0.5
