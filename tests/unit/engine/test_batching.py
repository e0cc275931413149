"""Continuous batching by hand: blocks of 4 tokens, TTFT = 1 s + 1 ms per token, decode steps of 0.1 s."""

import pytest

from penstock.engine.core.lease import Read
from penstock.engine.core.requests import RequestStage


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
    assert (engine.batcher.outputs_of(state), engine.pool.used) == (1, 2)
    step, outcome = advance(engine, outcome.end_s)
    assert (step.batch.decode_batch, step.batch.decode_kv_tokens) == (1, 9)
    assert (outcome.steady_tokens, outcome.gap_s) == (1, pytest.approx(0.1))
    assert engine.pool.used == 3
    _, outcome = advance(engine, outcome.end_s)
    assert outcome.finished == [state]
    assert (state.outputs, state.finish_reason, engine.pool.used) == (3, "length", 0)
    assert engine.begin_step(outcome.end_s) is None
    assert engine.is_idle


STEPS = {
    "the budget is shared by prompts in order of arrival": (
        {"budget": 20},
        [[("a", 16, 4), ("b", 12, 4)], []],
        [(0, [("a", 0, 16), ("b", 0, 4)]), (1, [("b", 4, 12)])],
    ),
    "running requests take their token first": (
        {"budget": 8},
        [[("a", 2, 9), ("b", 2, 9), ("c", 2, 9)], [("long", 20, 4)]],
        [(0, [("a", 0, 2), ("b", 0, 2), ("c", 0, 2)]), (3, [("long", 0, 5)])],
    ),
    "the third request waits for a place": (
        {"seqs": 2},
        [[("a", 8, 2), ("b", 8, 5), ("c", 8, 2)], [], []],
        [(0, [("a", 0, 8), ("b", 0, 8)]), (2, []), (1, [("c", 0, 8)])],
    ),
    "a short request waits behind a long one that does not fit": (
        {"blocks": 10},
        [[("a", 24, 8)], [("long", 20, 4), ("short", 4, 1)]],
        [(0, [("a", 0, 24)]), (1, [])],
    ),
    "lower priorities go first, ties by arrival": (
        {"seqs": 1, "by_priority": True},
        [[("a", 4, 1, {"priority": 5}), ("b", 4, 1), ("c", 4, 1), ("d", 4, 1, {"priority": -1})], [], [], []],
        [(0, [(name, 0, 4)]) for name in "dbca"],
    ),
    "a prompt that is cached as a whole computes its last block": (
        {},
        [[("a", 8, 1, {"keys": [1, 2]})], [("b", 8, 1, {"keys": [1, 2]})]],
        [(0, [("a", 0, 8)]), (0, [("b", 4, 8)])],
    ),
    "blocks are found from the moment they are scheduled": (
        {},
        [[("a", 8, 4, {"keys": [1, 2]}), ("b", 12, 4, {"keys": [1, 2, 3]})]],
        [(0, [("a", 0, 8), ("b", 8, 12)])],
    ),
    "nobody is admitted in the step of a preemption": (
        {"blocks": 5},
        [[("a", 8, 6), ("b", 8, 6)], [("tiny", 1, 1)]],
        [(0, [("a", 0, 8), ("b", 0, 8)]), (1, [])],
    ),
}


@pytest.mark.parametrize(("options", "arrivals", "expected"), STEPS.values(), ids=STEPS)
def test_steps_hold_what_vllms_would(make_engine, request_of, options, arrivals, expected):
    """(decodes, prompt chunks) of each step, after the (name, prompt, outputs) that arrive before it."""
    engine, now_s, found = make_engine(**options), 0.0, []
    for burst in arrivals:
        for name, prompt, outputs, *more in burst:
            engine.add(request_of(name, prompt=prompt, outputs=outputs, **dict(*more)))
        step, outcome = advance(engine, now_s)
        found.append((step.batch.decode_batch, spans_of(step)))
        now_s = outcome.end_s
    assert found == expected


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


def test_latest_arrival_is_preempted_and_recomputed(make_engine, request_of):
    """Two requests outgrow 5 blocks: the later one starts again with its outputs as part of the prompt."""
    engine = make_engine(blocks=5)
    first = engine.add(request_of("a", prompt=8, outputs=6))
    second = engine.add(request_of("b", prompt=8, outputs=6))
    _, outcome = advance(engine)
    # Both need a third block for their ninth token; only one is left.
    step, outcome = advance(engine, outcome.end_s)
    assert list(step.batch.preempted) == [second]
    assert (second.status, second.outputs, second.preemptions) == (RequestStage.WAITING, 1, 1)
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
    assert (second.outputs, engine.pool.used) == (6, 0)
    assert engine.counters.generation_tokens == 12


def test_lowest_priority_is_the_victim(make_engine, request_of):
    """Under the priority policy the largest value is thrown out, even if it arrived first."""
    engine = make_engine(blocks=5, by_priority=True)
    low = engine.add(request_of("low", prompt=8, outputs=6, priority=9))
    engine.add(request_of("high", prompt=8, outputs=6, priority=1))
    _, outcome = advance(engine)
    step, _ = advance(engine, outcome.end_s)
    assert list(step.batch.preempted) == [low]


def test_ended_requests_do_not_pile_up_in_a_blocked_queue(make_engine, request_of):
    """Aborts behind a head that does not fit leave the queue no longer than the living."""
    engine = make_engine(blocks=10)
    engine.add(request_of("a", prompt=24, outputs=8))
    advance(engine)
    engine.add(request_of("head", prompt=36))
    for number in range(500):
        engine.add(request_of(f"r{number}", prompt=4))
        assert engine.abort(f"r{number}", 1.0)
    assert engine.batcher.waiting == 1


def test_late_caller_gets_all_steps_with_their_own_times(make_timeline, request_of, run_all):
    """Waking up twice at the end, for three steps and the rest, gives the same outcomes as waking up for each."""
    timely, late = make_timeline(), make_timeline()
    for timeline in (timely, late):
        for number in range(3):
            timeline.submit(request_of(f"r{number}", outputs=5, arrival_s=number * 1.05))
    expected = [(outcome.end_s, outcome.steady_tokens) for outcome in run_all(timely)]
    outcomes = late.run_until(1000.0, max_steps=3)
    assert (len(outcomes), late.next_due_s() < 1000) == (3, True)
    outcomes += late.run_until(1000.0, max_steps=1000)
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


def test_prompt_chunk_that_finds_no_block_preempts_itself_last(make_engine, request_of):
    """A half-computed prompt is the latest arrival: it gives its own blocks back."""
    engine = make_engine(blocks=6, budget=16)
    engine.add(request_of("a", prompt=4, outputs=12))
    long = engine.add(request_of("long", prompt=20, outputs=1))
    _, outcome = advance(engine)
    assert long.status is RequestStage.PREFILLING
    now_s = outcome.end_s
    for _ in range(3):
        _, outcome = advance(engine, now_s)
        now_s = outcome.end_s
    while engine.in_flight:
        _, outcome = advance(engine, outcome.end_s)
    assert long.outputs == 1
    assert engine.pool.used == 0
