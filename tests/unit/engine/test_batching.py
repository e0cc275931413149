"""Continuous batching by hand: blocks of 4 tokens, TTFT = 1 s + 1 ms per token, decode steps of 0.1 s."""

import pytest

from penstock.engine.core.lease import Read
from penstock.engine.core.requests import Status


def spans_of(step):
    """The prompt chunks of a step: (request, start, end)."""
    return [(span.state.request.request_id, span.start, span.end) for span in step.batch.spans]


def advance(engine, now_s=0.0):
    """Run one step; return it with its outcome."""
    step = engine.begin_step(now_s)
    return step, engine.finish_step(step)


def test_one_request_from_prompt_to_end(make_engine, request_of):
    """8 tokens take 1.008 s, then each further token 0.1 s; the blocks come back."""
    engine = make_engine()
    state = engine.add(request_of("a", prompt=8, outputs=3))
    step, outcome = advance(engine)
    assert spans_of(step) == [("a", 0, 8)]
    assert outcome.end_s == pytest.approx(1.008)
    assert outcome.started == [state]
    assert (engine.outputs_of(state), engine.kv_used_blocks) == (1, 2)
    step, outcome = advance(engine, outcome.end_s)
    assert (step.batch.decode_batch, step.batch.decode_kv_tokens) == (1, 9)
    assert (outcome.steady_tokens, outcome.gap_s) == (1, pytest.approx(0.1))
    assert engine.kv_used_blocks == 3
    _, outcome = advance(engine, outcome.end_s)
    assert outcome.finished == [state]
    assert (state.outputs, state.finish_reason, engine.kv_used_blocks) == (3, "length", 0)
    assert engine.begin_step(outcome.end_s) is None
    assert engine.is_idle


def test_budget_is_shared_by_prompts_in_order_of_arrival(make_engine, request_of):
    """With a budget of 20, a prompt of 16 is followed by 4 tokens of the next; that one goes on next step."""
    engine = make_engine(budget=20)
    engine.add(request_of("a", prompt=16))
    engine.add(request_of("b", prompt=12))
    step, outcome = advance(engine)
    assert spans_of(step) == [("a", 0, 16), ("b", 0, 4)]
    step, _ = advance(engine, outcome.end_s)
    assert (step.batch.decode_batch, spans_of(step)) == (1, [("b", 4, 12)])


def test_decodes_go_before_prompts(make_engine, request_of):
    """Running requests take their token of the budget first; the prompt gets what is left."""
    engine = make_engine(budget=8)
    for name in "abc":
        engine.add(request_of(name, prompt=2, outputs=9))
    _, outcome = advance(engine)
    engine.add(request_of("long", prompt=20))
    step, _ = advance(engine, outcome.end_s)
    assert (step.batch.decode_batch, spans_of(step)) == (3, [("long", 0, 5)])
    assert step.batch.tokens == 8


def test_no_more_than_max_num_seqs_run(make_engine, request_of):
    """The third request waits for a place, and takes the first that is free."""
    engine = make_engine(seqs=2)
    for name, outputs in (("a", 2), ("b", 5), ("c", 2)):
        engine.add(request_of(name, outputs=outputs))
    _, outcome = advance(engine)
    assert (engine.running, engine.waiting_for_capacity) == (2, 1)
    _, outcome = advance(engine, outcome.end_s)
    step, _ = advance(engine, outcome.end_s)
    assert spans_of(step) == [("c", 0, 8)]


def test_head_of_the_queue_is_not_overtaken(make_engine, request_of):
    """A short request waits behind a long one that does not fit yet."""
    engine = make_engine(blocks=10)
    engine.add(request_of("a", prompt=24, outputs=8))
    _, outcome = advance(engine)
    engine.add(request_of("long", prompt=20))
    engine.add(request_of("short", prompt=4, outputs=1))
    step, _ = advance(engine, outcome.end_s)
    assert spans_of(step) == []
    assert engine.waiting_for_capacity == 2


def test_lower_priority_value_goes_first_and_ties_by_arrival(make_engine, request_of):
    """Under the priority policy the queue is ordered by (priority, arrival)."""
    engine = make_engine(seqs=1, by_priority=True)
    for name, priority in (("a", 5), ("b", 0), ("c", 0), ("d", -1)):
        engine.add(request_of(name, outputs=1, priority=priority))
    order, now_s = [], 0.0
    for _ in range(4):
        step, outcome = advance(engine, now_s)
        order += [span.state.request.request_id for span in step.batch.spans]
        now_s = outcome.end_s
    assert order == ["d", "b", "c", "a"]


def test_second_request_reuses_the_prefix_of_the_first(make_engine, request_of):
    """12 shared tokens of 16 are not computed again; the hit shows in the counters."""
    engine = make_engine()
    first = engine.add(request_of("a", prompt=16, outputs=1, keys=[1, 2, 3, 4]))
    _, outcome = advance(engine)
    second = engine.add(request_of("b", prompt=16, outputs=1, keys=[1, 2, 3, 9]))
    step, _ = advance(engine, outcome.end_s)
    assert spans_of(step) == [("b", 12, 16)]
    assert (first.cached_tokens, second.cached_tokens) == (0, 12)
    assert (engine.counters.prefix_queries, engine.counters.prefix_hits) == (32, 12)
    assert engine.counters.prompt_tokens_cached == 12


def test_last_token_of_a_cached_prompt_is_computed(make_engine, request_of):
    """A prompt that is cached as a whole still computes its last block, for its output."""
    engine = make_engine()
    engine.add(request_of("a", prompt=8, outputs=1, keys=[1, 2]))
    _, outcome = advance(engine)
    engine.add(request_of("b", prompt=8, outputs=1, keys=[1, 2]))
    step, _ = advance(engine, outcome.end_s)
    assert spans_of(step) == [("b", 4, 8)]


def test_requests_of_one_step_share_blocks(make_engine, request_of):
    """Blocks are found from the moment they are scheduled, as in vLLM."""
    engine = make_engine()
    engine.add(request_of("a", prompt=8, keys=[1, 2]))
    engine.add(request_of("b", prompt=12, keys=[1, 2, 3]))
    assert spans_of(engine.begin_step(0.0)) == [("a", 0, 8), ("b", 8, 12)]


def test_latest_arrival_is_preempted_and_recomputed(make_engine, request_of):
    """Two requests outgrow 5 blocks: the later one starts again with its outputs as part of the prompt."""
    engine = make_engine(blocks=5)
    first = engine.add(request_of("a", prompt=8, outputs=6))
    second = engine.add(request_of("b", prompt=8, outputs=6))
    _, outcome = advance(engine)
    # Both need a third block for their ninth token; only one is left.
    step, outcome = advance(engine, outcome.end_s)
    assert step.batch.preempted == [second]
    assert (second.status, second.outputs, second.preemptions) == (Status.WAITING, 1, 1)
    assert engine.counters.preemptions == 1
    while not first.finish_reason:
        _, outcome = advance(engine, outcome.end_s)
    freed_s = outcome.end_s
    step, outcome = advance(engine, freed_s)
    # The first request evicted its second prompt block; the first one is still cached: 1 s + 5 ms.
    assert spans_of(step) == [("b", 4, 9)]
    assert outcome.late_gaps_s == [pytest.approx(freed_s + 1.005 - 1.016)]
    while not second.finish_reason:
        _, outcome = advance(engine, outcome.end_s)
    assert (second.outputs, engine.kv_used_blocks) == (6, 0)
    assert engine.counters.generation_tokens == 12


def test_lowest_priority_is_the_victim(make_engine, request_of):
    """Under the priority policy the largest value is thrown out, even if it arrived first."""
    engine = make_engine(blocks=5, by_priority=True)
    low = engine.add(request_of("low", prompt=8, outputs=6, priority=9))
    engine.add(request_of("high", prompt=8, outputs=6, priority=1))
    _, outcome = advance(engine)
    step, _ = advance(engine, outcome.end_s)
    assert step.batch.preempted == [low]


def test_nobody_is_admitted_in_the_step_of_a_preemption(make_engine, request_of):
    """Freed blocks go to running requests first."""
    engine = make_engine(blocks=5)
    engine.add(request_of("a", prompt=8, outputs=6))
    engine.add(request_of("b", prompt=8, outputs=6))
    _, outcome = advance(engine)
    engine.add(request_of("tiny", prompt=1, outputs=1))
    step, _ = advance(engine, outcome.end_s)
    assert step.batch.preempted
    assert spans_of(step) == []


def test_prompt_chunk_that_finds_no_block_preempts_itself_last(make_engine, request_of):
    """A half-computed prompt is the latest arrival: it gives its own blocks back."""
    engine = make_engine(blocks=6, budget=16)
    engine.add(request_of("a", prompt=4, outputs=12))
    long = engine.add(request_of("long", prompt=20, outputs=1))
    _, outcome = advance(engine)
    assert long.status is Status.PREFILLING
    now_s = outcome.end_s
    for _ in range(3):
        _, outcome = advance(engine, now_s)
        now_s = outcome.end_s
    while engine.in_flight:
        _, outcome = advance(engine, outcome.end_s)
    assert long.outputs == 1
    assert engine.kv_used_blocks == 0


def test_ended_requests_do_not_pile_up_in_a_blocked_queue(make_engine, request_of):
    """Aborts behind a head that does not fit leave the queue no longer than the living."""
    engine = make_engine(blocks=10)
    engine.add(request_of("a", prompt=24, outputs=8))
    advance(engine)
    engine.add(request_of("head", prompt=36))
    for number in range(500):
        engine.add(request_of(f"r{number}", prompt=4))
        assert engine.abort(f"r{number}", 1.0)
    assert engine.waiting_for_capacity == 1


def test_steps_start_where_the_last_one_ended(make_timeline, request_of, run_all):
    """TTFT 1.008 s, then gaps of exactly 0.1 s."""
    timeline = make_timeline()
    timeline.submit(request_of("a", outputs=4, arrival_s=5.0))
    assert timeline.next_due_s() == 5.0
    ends = [outcome.end_s for outcome in run_all(timeline)]
    assert ends == pytest.approx([6.008, 6.108, 6.208, 6.308])
    assert timeline.next_due_s() is None
    assert timeline.is_idle


def test_late_caller_gets_all_steps_with_their_own_times(make_timeline, request_of, run_all):
    """Waking up once at the end gives the same outcomes as waking up for each."""
    timely, late = make_timeline(), make_timeline()
    for timeline in (timely, late):
        for number in range(3):
            timeline.submit(request_of(f"r{number}", outputs=5, arrival_s=number * 1.05))
    expected = [(outcome.end_s, outcome.steady_tokens) for outcome in run_all(timely)]
    outcomes = late.run_until(1000.0, max_steps=1000)
    assert [(outcome.end_s, outcome.steady_tokens) for outcome in outcomes] == expected


def test_arrival_during_a_late_step_waits_for_its_own_time(make_timeline, request_of):
    """A step that began before a request arrived does not hold it, even if it is processed afterwards."""
    timeline = make_timeline()
    timeline.submit(request_of("a", outputs=9, arrival_s=0.0))
    timeline.submit(request_of("b", outputs=9, arrival_s=1.05))
    assert timeline.backlog == 2
    timeline.run_until(1.04, max_steps=10)
    assert timeline.backlog == 1
    outcomes = timeline.run_until(10.0, max_steps=2)
    assert [outcome.end_s for outcome in outcomes] == pytest.approx([1.108, 2.116])
    assert outcomes[1].started[0].first_scheduled_s == pytest.approx(1.108)


def test_steps_per_call_are_bounded(make_timeline, request_of):
    """The rest is due at once at the next call."""
    timeline = make_timeline()
    timeline.submit(request_of("a", outputs=9))
    assert len(timeline.run_until(100.0, max_steps=3)) == 3
    assert timeline.next_due_s() < 100.0
    assert len(timeline.run_until(100.0, max_steps=100)) == 6


def test_release_from_outside_is_used_at_once(make_timeline, request_of, run_all):
    """After a read, `retry` starts the request that waited for its blocks."""
    timeline = make_timeline(role="prefill", blocks=4)
    timeline.submit(request_of("a", prompt=12, outputs=1, pin_blocks=True))
    timeline.submit(request_of("b", prompt=12, outputs=1, arrival_s=2.0))
    run_all(timeline, until_s=3.0)
    timeline.engine.pinned.read([Read("a")])
    timeline.retry(7.0)
    assert timeline.next_due_s() == pytest.approx(8.012)
    timeline.retry(7.5)
    assert timeline.next_due_s() == pytest.approx(8.012)


def test_abort_before_arrival_is_reached(make_timeline, request_of):
    """A request that the timeline has not reached yet disappears without a trace."""
    timeline = make_timeline()
    timeline.submit(request_of("a", arrival_s=5.0))
    assert timeline.abort("a", 1.0)
    assert not timeline.abort("a", 1.0)
    assert timeline.is_idle
    assert timeline.next_due_s() is None
