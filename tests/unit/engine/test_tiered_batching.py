"""Tiers in the batch: who gets room at whose expense, and how a victim comes back."""

import pytest

from penstock.engine.core.engine import EngineSettings
from penstock.engine.core.latency import LatencyModel, LinearDecode, QuadraticPrefill
from penstock.engine.core.preemption import Candidate, PreemptionCosts, PreemptionTerms, choose_victims
from penstock.engine.core.requests import (
    EngineRequest,
    EngineRole,
    FinishReason,
    PreemptionKind,
    RequestStage,
    RequestState,
)
from penstock.engine.core.transfer import LinkTerms

SLOW_LINK = LinkTerms(latency_s=0.0, bytes_per_s=10.0)
"""A token of one byte takes 0.1 s each way."""


SLOW = LatencyModel(QuadraticPrefill(100.0, 0.0, 0.0), LinearDecode(0.1, 0.0, 0.0))
"""Prompts take 100 s, so that swapping costs less."""


@pytest.fixture
def make(make_engine):
    """Make an engine of four-token blocks whose tiers preempt; recomputing costs 1 s and 1 ms a token."""

    def build(*, blocks=10, engine=None, **terms):
        terms = PreemptionTerms(**{"reserved_fraction": 0.0, **terms})
        return make_engine(blocks=blocks, by_priority=True, preemption=terms, **engine or {})

    return build


def step(engine, now_s=0.0):
    """Run one step; return its batch."""
    begun = engine.begin_step(now_s)
    engine.finish_step(begun)
    return begun.batch


def test_a_waiting_premium_takes_the_blocks_of_background(make, request_of):
    """It is computed in the very step in which it is seen; the victim's outputs are kept."""
    engine = make()
    low = engine.add(request_of("low", prompt=30, outputs=8, priority=2))
    step(engine)
    high = engine.add(request_of("high", prompt=16, outputs=2, priority=0))

    batch = step(engine)

    assert list(batch.preempted) == [low]
    assert [span.state for span in batch.spans] == [high]
    assert (low.status, low.outputs, low.preemptions) == (RequestStage.WAITING, 1, 1)
    assert engine.counters.preemptions_by == {(PreemptionKind.RECOMPUTE, 2): 1}


@pytest.mark.parametrize("priority", [1, 2])
def test_only_lower_tiers_are_victims(make, request_of, priority):
    """A standard request waits for a standard one, and a background request for a standard one."""
    engine = make()
    running = engine.add(request_of("running", prompt=30, outputs=8, priority=1))
    step(engine)
    waiting = engine.add(request_of("waiting", prompt=16, outputs=2, priority=priority))

    assert not step(engine).preempted
    assert (running.status, waiting.status) == (RequestStage.DECODING, RequestStage.WAITING)


def test_a_full_batch_gives_a_place(make, request_of):
    """Blocks there are plenty of; the one place goes to the higher tier."""
    engine = make(blocks=50, engine={"seqs": 1})
    low = engine.add(request_of("low", outputs=8, priority=2))
    step(engine)
    high = engine.add(request_of("high", outputs=1, priority=1))
    batch = step(engine)
    assert (list(batch.preempted), batch.admitted) == ([low], [high])


def test_a_higher_tier_goes_before_a_prompt_under_way(make, request_of):
    """The step's budget is premium's first; the long background prompt takes what is left."""
    engine = make(blocks=50, engine={"budget": 16})
    low = engine.add(request_of("low", prompt=60, outputs=1, priority=2))
    step(engine)
    high = engine.add(request_of("high", prompt=12, outputs=1, priority=0))

    batch = step(engine)

    assert [(span.state, span.end - span.start) for span in batch.spans] == [(high, 12), (low, 4)]
    assert high.first_token_s is not None


def test_a_swapped_victim_gives_no_block_before_its_copy_has_ended(make, request_of):
    """30 tokens take 3 s out; premium begins then, and the victim continues where it was without prefill."""
    engine = make(host_blocks=10, host_link=SLOW_LINK, engine={"latency": SLOW})
    low = engine.add(request_of("low", prompt=30, outputs=8, priority=2))
    step(engine)
    high = engine.add(request_of("high", prompt=16, outputs=1, priority=0))

    assert engine.begin_step(100.0) is None
    assert (low.status, engine.pool.used, engine.swapped_blocks) == (RequestStage.SWAPPING, 8, 8)
    assert engine.begin_step(102.9) is None
    assert engine.next_event_s() == pytest.approx(103.0)
    begun = engine.begin_step(103.0)
    assert [span.state for span in begun.batch.spans] == [high]
    assert (low.status, low.computed, engine.pool.used) == (RequestStage.WAITING, 30, 4)

    engine.finish_step(begun)
    assert engine.begin_step(begun.end_s) is None
    assert low.status is RequestStage.LOADING
    back = engine.begin_step(engine.next_event_s())
    assert (back.batch.joined, back.batch.spans, engine.swapped_blocks) == ([low], [], 0)
    outcome = engine.finish_step(back)
    assert (engine.batcher.outputs_of(low), outcome.steady_tokens, len(outcome.late_gaps_s)) == (2, 0, 1)


def test_while_a_copy_makes_room_nobody_else_is_thrown_out(make, request_of):
    """Either of two background requests is enough for premium, so the second continues decoding."""
    engine = make(host_blocks=10, host_link=LinkTerms(0.0, 100.0), engine={"latency": SLOW})
    for name in ("a", "b"):
        engine.add(request_of(name, prompt=17, outputs=8, priority=2))
    step(engine)
    high = engine.add(request_of("high", prompt=16, outputs=1, priority=0))
    now_s = 100.0
    while high.first_token_s is None:
        begun = engine.begin_step(now_s)
        now_s = begun.end_s
        engine.finish_step(begun)
    assert engine.counters.preemptions == 1
    assert high.first_scheduled_s == pytest.approx(100.2)


@pytest.mark.parametrize("at", ["out", "host", "in"])
def test_aborting_a_swapped_request_frees_both_memories(make, request_of, at):
    """While it is copied out, waits in host memory, or is copied in; blocks after the copy, not before."""
    engine = make(host_blocks=10, host_link=SLOW_LINK, engine={"latency": SLOW})
    engine.add(request_of("low", prompt=30, outputs=8, priority=2))
    step(engine)
    engine.add(request_of("high", prompt=16, outputs=1, priority=0))
    assert engine.begin_step(100.0) is None
    if at != "out":
        begun = engine.begin_step(103.0)
        if at == "in":
            engine.finish_step(begun)
            assert engine.begin_step(begun.end_s) is None
    engine.abort("low", 104.0)
    engine.abort("high", 104.0)
    if at != "host":
        assert engine.pool.used == 8
        engine.advance(engine.next_event_s())
    assert (engine.pool.used, engine.swapped_blocks) == (0, 0)
    assert engine.is_idle


def test_a_victim_past_the_bound_ends_with_an_error(make, request_of):
    """Recomputing 31 tokens costs 1.031 s, more than was allowed."""
    engine = make(drop_above_s=1.03)
    low = engine.add(request_of("low", prompt=30, outputs=8, priority=2))
    step(engine)
    engine.add(request_of("high", prompt=16, outputs=2, priority=0))
    step(engine, 2.0)
    assert engine.take_events().dropped == [low]
    assert (low.status, low.finish_reason, low.finished_s) == (
        RequestStage.FINISHED,
        FinishReason.ERROR,
        2.0,
    )
    assert engine.in_flight == 1
    assert engine.counters.preemptions_by == {(PreemptionKind.DROP, 2): 1}


def test_past_its_limit_a_request_is_no_victim_and_holds_its_whole_length(make, request_of):
    """Thrown out once, it comes back with ten blocks for its 40 tokens; the next premium waits."""
    engine = make(max_per_request=1)
    low = engine.add(request_of("low", prompt=30, outputs=8, priority=2))
    step(engine)
    engine.add(request_of("high", prompt=16, outputs=1, priority=0))
    step(engine)
    step(engine)
    assert (low.status, len(low.blocks)) == (RequestStage.DECODING, 10)
    engine.add(request_of("late", prompt=16, outputs=1, priority=0))
    assert not step(engine).preempted
    assert low.preemptions == 1


def test_a_victim_comes_back_behind_higher_tiers_and_with_headroom(make, request_of):
    """No ping-pong: of 40 blocks two more than its own must be free, unless nothing else runs."""
    engine = make(blocks=40, engine={"budget": 256})
    low = engine.add(request_of("low", prompt=80, outputs=40, priority=2))
    step(engine)
    for name, prompt in (("a", 60), ("b", 24)):
        engine.add(request_of(name, prompt=prompt, outputs=40, priority=0))
    assert list(step(engine).preempted) == [low]
    # a and b hold 16 and 7 blocks: 17 are free, low needs 21 with the token it has.
    assert low.status is RequestStage.WAITING
    engine.abort("b", 0.0)
    assert step(engine).admitted == [low]


def test_lower_tiers_leave_the_reserve_alone(make, request_of):
    """With three of ten blocks reserved, two standard prompts of four blocks do not fit; premium's does."""
    engine = make(reserved_fraction=0.3)
    engine.add(request_of("a", prompt=15, outputs=1, priority=1))
    b = engine.add(request_of("b", prompt=15, outputs=1, priority=1))
    engine.begin_step(0.0)
    assert b.status is RequestStage.WAITING
    assert (engine.pool.used, engine.reserved_free_blocks) == (4, 3)


def test_a_request_that_its_tier_can_never_hold_is_refused(make, request_of):
    """At the frontend, not by waiting for ever."""
    engine = make(reserved_fraction=0.3)
    with pytest.raises(ValueError, match="30 tokens exceed the cache"):
        engine.add(request_of("long", prompt=28, outputs=2, priority=1))
    engine.add(request_of("premium", prompt=28, outputs=2, priority=0))


def test_tiers_need_an_order(make):
    """First come first served has no lower tier."""
    with pytest.raises(ValueError, match="needs by_priority"):
        EngineSettings(EngineRole.AGGREGATED, 10, 1, preemption=PreemptionTerms())


KV_BYTES = 80 * 4096
"""Llama-3-70B: 80 layers of 8 heads of 128 values, key and value, 2 bytes each."""

A100 = PreemptionCosts(KV_BYTES, LinkTerms(0.0, 25e9), QuadraticPrefill(0.0, 1e-4, 0.0))
"""PCIe 4.0 at 25 GB/s and 10,000 prefill tokens/s, as the document that the tiers follow has them."""


@pytest.mark.parametrize(
    ("latency_s", "bytes_per_s", "crossover"),
    [
        (0.0, 25e9, 1),
        # 2 L = n (100 us - 26.2 us) at L = 10 ms.
        (0.010, 25e9, 272),
        # 6.4 GB/s: 102.4 us a token both ways, more than the prefill's 100.
        (0.0, 6.4e9, None),
    ],
)
def test_the_crossover_follows_from_link_prefill_and_latency(latency_s, bytes_per_s, crossover):
    """Both costs are straight lines here: one overtakes the other once, or never."""
    costs = PreemptionCosts(KV_BYTES, LinkTerms(latency_s, bytes_per_s), QuadraticPrefill(0.0, 1e-4, 0.0))
    if crossover is None:
        assert costs.cheapest(131_072, can_swap=True)[0] is PreemptionKind.RECOMPUTE
    elif crossover > 1:
        assert costs.cheapest(crossover - 1, can_swap=True)[0] is PreemptionKind.RECOMPUTE
    if crossover:
        assert costs.cheapest(crossover, can_swap=True)[0] is PreemptionKind.SWAP


def test_no_host_memory_no_swap_and_dropping_needs_a_bound():
    """Recompute is what is left; an error comes only where it was allowed, above its bound."""
    assert A100.cheapest(522, can_swap=False) == (PreemptionKind.RECOMPUTE, pytest.approx(0.0522))
    assert A100.cheapest(32_000, can_swap=False, drop_above_s=3.3)[0] is PreemptionKind.RECOMPUTE
    assert A100.cheapest(34_000, can_swap=False, drop_above_s=3.3)[0] is PreemptionKind.DROP
    assert A100.cheapest(34_000, can_swap=True, drop_above_s=3.3)[0] is PreemptionKind.SWAP


def candidate(index, *, priority=2, preemptions=0, freed=4, remaining=10, restore_s=1.0):
    """Make a running request."""
    state = RequestState(EngineRequest(f"r{index}", 8, 20, 0.0, (), priority), index, 8, remote_pending=False)
    state.preemptions = preemptions
    return Candidate(state, freed, remaining, restore_s)


def chosen(candidates, *, blocks=1, places=0):
    """Return the indices of the victims."""
    return [each.state.index for each in choose_victims(candidates, blocks=blocks, places=places)]


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ({"priority": 2, "preemptions": 2}, {"priority": 1}),
        ({"preemptions": 0, "freed": 1}, {"preemptions": 1, "freed": 9}),
        ({"freed": 8}, {"freed": 4}),
        ({"remaining": 20}, {"remaining": 1}),
        ({"restore_s": 0.5}, {"restore_s": 1.0}),
        ({}, {}),
    ],
    ids=["tier", "preemptions", "KV freed", "remaining work", "cost", "the latest of equals"],
)
def test_order_of_victims(better, worse):
    """Each criterion decides where those before it are equal."""
    assert chosen([candidate(0, **worse), candidate(1, **better)]) == [1]


def test_nobody_is_thrown_out_in_vain():
    """Seven blocks cannot be had of six, so none goes; nor does one whose blocks others share."""
    assert chosen([candidate(0), candidate(1, freed=2)], blocks=7) == []
    assert chosen([candidate(0), candidate(1, freed=0)], blocks=4) == [0]


def test_no_victim_is_spare():
    """The first choice of one block is not needed alongside the one of nine."""
    cheap, large = candidate(0, freed=1, restore_s=0.01), candidate(1, freed=9)
    assert chosen([cheap, large], blocks=1) == [0]
    assert chosen([cheap, large], blocks=9) == [1]
    assert chosen([cheap, large], blocks=10) == [0, 1]
