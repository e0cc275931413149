"""When a worker is busy, how long the wait is, and that no request is rejected while a worker has room."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placement import Stage

from penstock.api import AdmissionConfig, Role, Tier
from penstock.router.core.retries import RefusalReason, Refuse
from penstock.router.core.waiting import QueueSettings
from penstock.router.policy.busy import (
    ALL_BUSY,
    NO_THRESHOLDS,
    BusyThresholds,
    DrainRate,
    Excess,
    busy_thresholds,
    worker_excess,
)

BOTH = BusyThresholds(0.85, 10_000)
POLICIES = ("prefix-cost", "dualmap", "least-loaded", "round-robin")


def excess_of(usages, *prompts, thresholds=BOTH, rest=0.0):
    """Return how far a worker is above its thresholds."""
    return worker_excess(usages, prompts, rest, thresholds=thresholds)


@pytest.mark.parametrize(
    ("blocks", "tokens", "is_busy"),
    [
        (0.85, 10_000, False),
        (0.87, 0, True),
        (0.1, 12_000, True),
        (None, 10_000, False),
        (None, 10_001, True),
        (1.2, 0, True),
        (None, 0, False),
    ],
)
def test_a_rank_is_busy_above_either_threshold_and_not_at_it(blocks, tokens, is_busy):
    """The document's examples: 87% of blocks at 0.85, 12,000 tokens at 10,000."""
    assert (excess_of([blocks], tokens) is not None) is is_busy


def test_a_worker_is_busy_only_if_all_its_ranks_are():
    """One rank with room takes the next request."""
    assert excess_of([0.9, 0.9]) == Excess(pytest.approx(0.05), 0.0)
    assert excess_of([0.9, 0.2]) is None


def test_the_lower_prefill_threshold_counts():
    """The fraction is one of the batch token limit, and says nothing where that is unknown."""
    both = BusyThresholds(None, 10_000, 0.5)
    assert both.prefill_limit(8192) == 4096
    assert both.prefill_limit(None) == 10_000
    assert BusyThresholds(None, None, 0.5).prefill_limit(None) is None


def test_mode_none_clears_the_thresholds():
    """The section's own defaults wait for mode token-capacity; without thresholds nothing is busy."""
    assert excess_of([1.0], 10**9, thresholds=NO_THRESHOLDS) is None
    assert busy_thresholds(AdmissionConfig()) == NO_THRESHOLDS
    config = AdmissionConfig.model_validate({"mode": "token-capacity"})
    assert busy_thresholds(config) == BusyThresholds(0.85, 100_000)


def test_the_drain_rate_is_that_of_work_whatever_came():
    """100 tokens each second of work are 100 tokens/s, after a pause too; it fades when work stands still."""
    rate = DrainRate()
    assert rate.tokens_per_s(0.0) is None
    for second in range(60):
        rate.at_work(1, 10.0 * second)
        rate.drained(100, 10.0 * second + 1)
        rate.at_work(0, 10.0 * second + 1)
        assert rate.tokens_per_s(10.0 * second + 9) == pytest.approx(100, rel=0.06)
    rate.at_work(2, 600.0)
    rate.drained(400, 602.0)
    assert rate.tokens_per_s(602.0) == pytest.approx(100, rel=0.15)
    assert rate.tokens_per_s(660.0) < 1


def test_prompts_are_balanced_over_ranks_whole():
    """Of three prompts of 9,000 tokens one rank has one: not all are above 10,000, although the mean is."""
    by_tokens, prompts = BusyThresholds(None, 10_000), (9000, 9000, 9000)
    assert excess_of((0.5, 0.1), *prompts, thresholds=by_tokens) is None
    assert excess_of((0.5, 0.1), *prompts, 9000, thresholds=by_tokens) == Excess(0.0, 8000.0)
    assert excess_of((None, None), thresholds=by_tokens, rest=21_000.0) == Excess(0.0, 500.0)


def test_a_worker_of_two_ranks_with_three_prompts_takes_the_next():
    """One of them waits here, two were given to it; a fourth makes both ranks busy."""
    stage = Stage("a", policy="prefix-cost", activePrefillTokensThreshold=5000, slot_tokens=9000)
    stage.read("a", 0.1, total_blocks=10_000, ranks=(0.1, 0.1))
    assert [stage.ask(4500) for _ in range(4)] == ["a", "a", "waits", "waits"]
    assert stage.ask(1).reason is RefusalReason.ALL_BUSY


def test_a_request_is_rejected_only_while_every_worker_is_busy():
    """A busy worker is passed over; the last one's reading decides; and the next reading ends it."""
    stage = Stage("a", "b")
    stage.read("a", 0.9)
    stage.read("b", 0.5)
    assert stage.ask(10) == "b"
    stage.read("b", 0.9)
    refused = stage.ask(10)
    assert (refused.reason, refused.message) == (RefusalReason.ALL_BUSY, ALL_BUSY)
    assert len(stage.core.entry_queue) == 0
    stage.read("a", 0.4)
    assert stage.ask(10) == "a"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_busy_worker_is_passed_over_whatever_the_policy(policy):
    """Also where a policy would choose it for its cache."""
    stage = Stage("a", "b", "c", policy=policy)
    stage.read("a", 0.9)
    stage.read("c", 0.99)
    assert {stage.ask(10) for _ in range(6)} == {"b"}


def test_what_was_sent_since_the_reading_counts():
    """1,600 tokens fit; 0.5 were in use, and 600 more make 0.875."""
    stage = Stage("a", activePrefillTokensThreshold=None)
    stage.read("a", 0.5)
    assert stage.ask(600) == "a"
    assert stage.ask(1).reason is RefusalReason.ALL_BUSY
    stage.leave(1)
    assert stage.ask(1) == "a"


def test_an_old_reading_makes_nobody_busy():
    """Metrics that stopped coming say nothing about now."""
    stage = Stage("a")
    stage.read("a", 1.0)
    assert stage.ask().reason is RefusalReason.ALL_BUSY
    stage.now_s = 60.0
    stage.note(stage.core.tick(stage.now_s))
    assert stage.ask() == "a"


@pytest.mark.parametrize("ranks", [(), (0.9, 0.95)])
def test_a_worker_of_unknown_size_is_busy_by_its_usage_alone(ranks):
    """Of all its ranks: with room in one, it takes requests."""
    stage = Stage("a")
    stage.read("a", 0.9, ranks=ranks)
    stage.worker("a").kv_total_blocks = stage.worker("a").kv_capacity_tokens = None
    assert stage.ask().reason is RefusalReason.ALL_BUSY
    stage.read("a", 0.9, ranks=(0.9, 0.2))
    assert stage.ask() == "a"


def test_prompts_to_be_computed_make_a_worker_busy_until_they_are():
    """Two of 600 tokens are above 1,000, a third is rejected; computed, they are not."""
    stage = Stage("a", policy="prefix-cost", activePrefillTokensThreshold=1000)
    assert [stage.ask(600), stage.ask(600)] == ["a", "a"]
    assert stage.ask(600).reason is RefusalReason.ALL_BUSY
    stage.computed(1, 1.0)
    assert stage.ask(600) == "a"


@pytest.mark.parametrize("leaves", ["withdraw", "expire"])
def test_a_request_that_leaves_the_queue_makes_room(leaves):
    """One of 600 runs, one of 600 waits for the worker; gone, another of 600 is taken."""
    stage = Stage("a", policy="prefix-cost", slot_tokens=300, activePrefillTokensThreshold=1000)
    assert [stage.ask(600), stage.ask(600)] == ["a", "waits"]
    assert stage.ask(600).reason is RefusalReason.ALL_BUSY
    if leaves == "withdraw":
        stage.core.cancel(2, Role.AGGREGATED, 0.0)
    else:
        stage.now_s = 60.0
        assert [each.item for each in stage.core.expire(60.0)] == [2]
    assert stage.ask(600) == "waits"


@pytest.mark.parametrize("policy", ["prefix-cost", "least-loaded"])
def test_each_tier_fills_its_part_of_the_threshold_whatever_others_have_there(policy):
    """Of 100,000 tokens premium has 50,000, standard 35,000 and background 15,000, against 110,000 of background."""
    stage = Stage("a", policy=policy, slot_tokens=8000, tiers={}, activePrefillTokensThreshold=100_000)
    taken = dict.fromkeys(Tier, 0)
    for tier in (Tier.BACKGROUND, Tier.STANDARD, Tier.PREMIUM):
        while isinstance(stage.ask(10_000, tier=tier), str):
            taken[tier] += 1
    assert taken == {Tier.BACKGROUND: 11, Tier.STANDARD: 4, Tier.PREMIUM: 5, Tier.SYSTEM: 0}
    assert isinstance(stage.ask(10_000, tier=Tier.SYSTEM), str)
    stage.leave(1)
    assert stage.core.entry_queue.occupancy.tiers[Tier.SYSTEM] == 0
    assert stage.ask(10, tier=Tier.BACKGROUND).reason is RefusalReason.ALL_BUSY


def test_a_prompt_that_was_not_computed_at_the_reading_counts_until_it_is():
    """It waits in the engine without blocks: 0.7 were in use by others, and 320 tokens more make 0.9."""
    stage = Stage("a", activePrefillTokensThreshold=None)
    assert stage.ask(320) == "a"
    stage.read("a", 0.7)
    assert stage.ask(1).reason is RefusalReason.ALL_BUSY
    stage.computed(1, 0.0)
    stage.read("a", 0.7)
    assert stage.ask(1) == "a"


URGENT = {
    Tier.SYSTEM: "a",
    Tier.PREMIUM: "a",
    Tier.STANDARD: "waits",
    Tier.BACKGROUND: RefusalReason.ALL_BUSY,
}
"""What becomes of a request while background holds the KV blocks."""


def outcome(answer):
    """Return a refusal's reason, and anything else as it is."""
    return answer.reason if isinstance(answer, Refuse) else answer


@pytest.mark.parametrize("policy", ["prefix-cost", "least-loaded", "dualmap"])
@pytest.mark.parametrize(("tier", "expected"), URGENT.items())
def test_above_the_threshold_of_kv_blocks_those_go_on_that_would_not_wait_for_them(policy, tier, expected):
    """Premium overtakes or preempts background in the engine; standard waits here until blocks are free."""
    stage = Stage("a", policy=policy, tiers={})
    stage.read("a", 0.5)
    assert stage.ask(100, tier=Tier.BACKGROUND) == "a"
    stage.read("a", 0.95)
    assert outcome(stage.ask(100, tier=tier)) == expected
    if expected == "waits":
        stage.note(stage.core.tick(0.0))
        assert list(stage.held) == [1]
        stage.read("a", 0.5)
        assert list(stage.held) == [1, 2]


@pytest.mark.parametrize("policy", ["prefix-cost", "least-loaded"])
def test_a_begun_stream_of_any_tier_goes_on_above_the_threshold_of_kv_blocks(policy):
    """No threshold binds it; the worker's slot does, as for all of its tier."""
    stage = Stage("a", policy=policy, tiers={}, slot_tokens=150)
    stage.read("a", 0.95)
    assert stage.ask(100, tier=Tier.STANDARD, is_continuation=True) == "a"
    assert stage.ask(100, tier=Tier.BACKGROUND, is_continuation=True) == "a"
    assert stage.ask(100, tier=Tier.STANDARD) == "waits"
    assert stage.ask(100, tier=Tier.BACKGROUND, is_continuation=True) == "waits"
    stage.computed(1, 0.0)
    assert list(stage.held) == [1, 2, 4]


@pytest.mark.parametrize("policy", ["prefix-cost", "least-loaded"])
def test_premium_beyond_a_burst_of_its_share_waits_for_blocks_in_its_turn(policy):
    """Eight rounds of its half of 8,192 tokens go at once, not a stream of them; others then have their turn."""
    stage = Stage("a", policy=policy, tiers={}, activePrefillTokensThreshold=None)
    stage.read("a", 0.5, total_blocks=100_000)
    assert stage.ask(100, tier=Tier.BACKGROUND) == "a"
    stage.read("a", 0.95, total_blocks=100_000)
    assert stage.ask(100, tier=Tier.STANDARD) == "waits"
    assert [stage.ask(4096, tier=Tier.PREMIUM) for _ in range(8)] == ["a"] * 8
    for item in range(3, 11):
        stage.computed(item, 0.0)
    assert stage.ask(4000, tier=Tier.PREMIUM) == "waits"
    stage.read("a", 0.5, total_blocks=100_000)
    assert list(stage.held)[-2:] == [2, 11]


@pytest.mark.parametrize("policy", ["prefix-cost", "least-loaded"])
def test_premium_waits_for_no_turn_where_it_waits_alone(policy):
    """However much of it there was: no other tier is there to be served first."""
    stage = Stage("a", policy=policy, tiers={}, activePrefillTokensThreshold=None)
    stage.read("a", 0.5, total_blocks=100_000)
    assert stage.ask(100, tier=Tier.BACKGROUND) == "a"
    stage.read("a", 0.95, total_blocks=100_000)
    for item in range(2, 22):
        assert stage.ask(4096, tier=Tier.PREMIUM) == "a"
        stage.computed(item, 0.0)


def test_a_worker_with_blocks_is_preferred_where_all_are_busy():
    """Prompts of lower tiers keep it busy, and premium overtakes them there; elsewhere it would have to preempt."""
    stage = Stage(
        "full", "free", policy="prefix-cost", tiers={}, slot_tokens=100, activePrefillTokensThreshold=500
    )
    stage.read("full", 0.95)
    stage.read("free", 0.1)
    assert [stage.ask(300, tier=Tier.BACKGROUND) for _ in range(2)] == ["free", "waits"]
    assert stage.core.busy[Role.AGGREGATED].are_all_busy(frozenset({"full", "free"}))
    assert stage.ask(300, tier=Tier.PREMIUM) == "free"


def test_a_full_decode_stage_rejects_at_the_frontend():
    """Nothing is prefilled that no decode worker takes."""
    stage = Stage("p", "d", is_split=True)
    stage.read("d", 0.95)
    assert stage.ask(10).reason is RefusalReason.ALL_BUSY
    assert stage.ask(10, role=Role.DECODE) == "d"


def full_decode_stage():
    """Return a stage of which background's answers hold the decode worker's blocks."""
    stage = Stage("p", "d", is_split=True, tiers={})
    assert stage.ask(10, tier=Tier.BACKGROUND, role=Role.DECODE) == "d"
    stage.read("d", 0.95)
    return stage


@pytest.mark.parametrize(("tier", "expected"), {**URGENT, Tier.SYSTEM: "p", Tier.PREMIUM: "p"}.items())
def test_a_full_decode_stage_keeps_prompts_in_tiers_at_the_frontend(tier, expected):
    """Premium continues, as it will not wait for blocks there; standard waits in the first stage until some are free."""
    stage = full_decode_stage()
    assert outcome(stage.ask(10, tier=tier)) == expected
    if expected == "waits":
        stage.worker("d").kv_usage_fraction = 0.1
        stage.core.busy[Role.DECODE].keep_only((), 0.0)
        stage.leave(1)
        assert list(stage.held) == [2]


def test_a_decode_stage_at_capacity_keeps_every_tier_at_the_frontend():
    """It has refused a request: a prefilled prompt would only hold blocks for it."""
    stage = full_decode_stage()
    stage.core.refused_at_capacity(stage.worker("d"), 0.0)
    assert stage.ask(10, tier=Tier.PREMIUM) == "waits"
    stage.now_s = 1.0
    stage.note(stage.core.tick(stage.now_s))
    assert list(stage.held) == [1, 2]


def test_one_tier_alone_keeps_the_threshold():
    """Nobody else fills the worker, so there is no share to keep; once another's prompt is computed as well."""
    stage = Stage("a", policy="prefix-cost", slot_tokens=300, tiers={}, activePrefillTokensThreshold=500)
    assert stage.ask(600) == "a"
    assert stage.ask(600).reason is RefusalReason.ALL_BUSY
    assert stage.ask(600, tier=Tier.PREMIUM) == "a"
    stage.leave(stage.count)
    assert stage.ask(600).reason is RefusalReason.ALL_BUSY


def test_requests_that_were_admitted_are_not_rejected():
    """A retry has paid already; only workers that refuse it themselves can end it."""
    stage = Stage("a")
    stage.read("a", 1.0)
    assert stage.ask(is_retry=True) == "a"
    stage.core.refused_at_capacity(stage.worker("a"), 0.0)
    assert stage.ask(is_retry=True).reason is RefusalReason.ALL_BUSY


def test_a_worker_that_refused_is_skipped_until_it_is_heard_of():
    """By its next reading, or a request that leaves it; else after a second."""
    stage = Stage("a", "b")
    assert stage.ask() == "a"
    stage.core.refused_at_capacity(stage.worker("a"), 0.0)
    assert {stage.ask() for _ in range(3)} == {"b"}
    stage.leave(1)
    assert stage.ask() == "a"
    stage.core.refused_at_capacity(stage.worker("a"), 0.0)
    stage.core.refused_at_capacity(stage.worker("b"), 0.0)
    assert stage.ask().reason is RefusalReason.ALL_BUSY
    stage.now_s = 1.0
    stage.note(stage.core.tick(stage.now_s))
    assert stage.ask() in {"a", "b"}


@pytest.mark.parametrize("gap_s", [1.0, 30.0])
def test_retry_after_is_what_workers_can_not_what_came(gap_s):
    """A worker that takes a second for 100 tokens is 600 above its threshold: 6 s, however light the traffic before."""
    stage = Stage(
        "a", policy="prefix-cost", activePrefillTokensThreshold=1000, activeDecodeBlocksThreshold=None
    )
    stage.core.entry_queue.settings = QueueSettings(slot_tokens=None)
    for _ in range(12):
        assert stage.ask(100) == "a"
        stage.now_s += 1.0
        stage.computed(stage.count, stage.now_s)
        stage.now_s += gap_s - 1.0
    for _ in range(16):
        stage.ask(100, is_retry=True)
    assert stage.ask(100).retry_after_s == pytest.approx(6, rel=0.06)


def test_retry_after_of_kv_blocks_is_how_long_answers_stay():
    """10,000 tokens in flight whose like have stayed 5 s leave by 2,000 tokens/s; 1,000 above the threshold: 0.5 s."""
    stage = Stage("a", activePrefillTokensThreshold=None, activeDecodeBlocksThreshold=0.9)
    stage.read("a", 0.0, total_blocks=625)
    assert stage.ask(100) == "a"
    stage.now_s = 5.0
    stage.leave(1)
    stage.now_s = 60.0
    for _ in range(10):
        stage.ask(1000, is_retry=True)
        stage.computed(stage.count, 60.0)
    stage.read("a", 1.0, total_blocks=625)
    assert stage.ask(100).retry_after_s == pytest.approx(0.5)


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            ["ask", "again", "leave", "prefilled", "read", "refused", "withdraw", "tick", "drain", "undrain"]
        ),
        st.integers(0, 7),
        st.floats(0, 1),
    ),
    min_size=10,
    max_size=80,
)


@settings(max_examples=200, deadline=None)
@given(events=EVENTS, policy=st.sampled_from(POLICIES))
def test_no_request_is_rejected_while_an_eligible_worker_is_not_busy(  # noqa: C901 - one case per event
    events, policy
):
    """After any history: a rejection means that each routable worker's load, counted afresh, is above a threshold."""
    stage = Stage("a", "b", "c", policy=policy, slot_tokens=300, activePrefillTokensThreshold=900)
    core, names = stage.core, ("a", "b", "c")
    for kind, number, share in events:
        stage.now_s += share / 4
        name, held = names[number % 3], sorted(stage.held)
        if kind in {"ask", "again"}:
            routable = core.pool.routable(Role.AGGREGATED, stage.now_s)
            expected = bool(routable) and not any(is_free(stage, each) for each in routable)
            outcome = stage.ask(100 + number * 100, is_retry=kind == "again")
            if isinstance(outcome, Refuse) and outcome.reason is RefusalReason.ALL_BUSY:
                assert expected
        elif kind in {"leave", "prefilled"} and held:
            item = held[number % len(held)]
            if kind == "leave":
                stage.leave(item)
            else:
                stage.computed(item, stage.now_s)
        elif kind == "read":
            stage.read(name, share)
        elif kind == "refused":
            core.refused_at_capacity(stage.worker(name), stage.now_s)
        elif kind == "withdraw":
            waiting = [each.item for each in core.entry_queue.waiting_requests()]
            if waiting:
                core.cancel(waiting[number % len(waiting)], Role.AGGREGATED, stage.now_s)
        elif kind == "tick":
            stage.note(core.tick(stage.now_s))
        elif kind in {"drain", "undrain"}:
            core.pool.set_drained(name, drained=kind == "drain")
            stage.note(core.workers_changed(stage.now_s))


def is_free(stage, worker):
    """Whether a worker's load, counted afresh, is within the thresholds, and it has not refused a request lately."""
    core, busy = stage.core, stage.core.busy[Role.AGGREGATED]
    if worker.name in busy.at_capacity():
        return False
    waiting = sum(each.uncached for each in core.entry_queue.waiting_requests() if each.worker == worker.name)
    pending = sum(stage.tokens[item] for item, held in stage.held.items() if held.worker is worker)
    usage = worker.kv_usage_fraction
    used = None
    if usage is not None:
        had_blocks = worker.scraped_tokens - worker.scraped_uncomputed_tokens
        used = usage + (worker.inflight_tokens - had_blocks) / worker.kv_capacity_tokens
    return not (waiting + pending > 900 or (used is not None and used > 0.85))
