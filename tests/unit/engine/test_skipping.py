"""Foreseen steps may be skipped: the engine then stands where stepping would have brought it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.core.batching import BatchLimits
from penstock.engine.core.engine import Engine, EngineSettings
from penstock.engine.core.latency import LatencyModel, LinearDecode, QuadraticPrefill
from penstock.engine.core.lease import LeaseTerms
from penstock.engine.core.preemption import PreemptionTerms
from penstock.engine.core.requests import EngineRequest, EngineRole
from penstock.engine.core.transfer import LinkTerms

LATENCY = LatencyModel(QuadraticPrefill(0.02, 1e-4, 1e-8), LinearDecode(0.005, 1e-5, 1e-7))
BLOCK = 4

rows = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 30), st.floats(0, 0.3), st.booleans()),
    min_size=1,
    max_size=12,
)


TIERS = PreemptionTerms(reserved_fraction=0.1, host_blocks=12, host_link=LinkTerms(0.002, 5000.0))


def engine_of(blocks, seqs, preemption=None):
    """Make a decode worker whose cache may be too small for everybody at once."""
    limits = BatchLimits(40, seqs, BLOCK, by_priority=preemption is not None)
    chosen = EngineSettings(
        EngineRole.DECODE,
        blocks,
        1,
        limits,
        LeaseTerms(6),
        LinkTerms(0.01, 500.0),
        preemption=preemption,
    )
    return Engine(chosen, LATENCY)


def requests_of(workload):
    """Turn rows into requests in order of arrival."""
    arrival_s, made = 0.0, []
    for number, (prompt, outputs, gap_s, is_remote) in enumerate(workload):
        arrival_s += gap_s
        keys = list(range(prompt // BLOCK))
        priority = number * 7 % 3
        made.append(
            EngineRequest(f"r{number}", prompt, outputs, arrival_s, keys, priority, load_remote=is_remote)
        )
    return made


def run(engine, requests, *, is_skipping):
    """Drive the engine to its end; return every outcome that matters and the final state."""
    waiting, log, now_s, step = list(requests), [], 0.0, None
    while True:
        while waiting and waiting[0].arrival_s <= now_s:
            engine.add(waiting.pop(0))
        step = engine.begin_step(now_s)
        if step is None:
            due = [
                at
                for at in (engine.next_event_s(), waiting[0].arrival_s if waiting else None)
                if at is not None
            ]
            if not due:
                break
            now_s = max(now_s, min(due))
            continue
        if is_skipping:
            ends = engine.foresee(step)
            next_s = waiting[0].arrival_s if waiting else float("inf")
            steps = sum(end_s < next_s for end_s in ends[:-1])
            if steps:
                step = engine.skip(step, ends, steps)
        outcome = engine.finish_step(step)
        now_s = outcome.end_s
        names = [state.request.request_id for state in (*outcome.started, *outcome.finished)]
        if names or outcome.late_gaps_s:
            log.append((now_s, names, outcome.late_gaps_s))
    cached = [engine.cached_blocks(each.block_keys) for each in requests]
    return log, engine.counters, engine.kv_used_blocks, cached


@settings(max_examples=150)
@given(workload=rows, blocks=st.integers(20, 60), seqs=st.integers(1, 6))
def test_skipping_is_stepping(workload, blocks, seqs):
    """First tokens, ends, counters and the cache are the same, to the last bit."""
    requests = requests_of(workload)

    stepped = run(engine_of(blocks, seqs), requests, is_skipping=False)

    assert run(engine_of(blocks, seqs), requests, is_skipping=True) == stepped


def test_a_lone_decode_is_foreseen_to_its_end():
    """10 outputs: one by the prefill, then nine decode steps, foreseen at once."""
    engine = engine_of(60, 2)
    engine.add(EngineRequest("a", 8, 10, 0.0))
    first = engine.finish_step(engine.begin_step(0.0))

    step = engine.begin_step(first.end_s)
    ends = engine.foresee(step)

    assert len(ends) == 9
    assert engine.skip(step, ends, 8).end_s == ends[-1]
    assert engine.counters.generation_tokens == 9


def test_a_prompt_is_never_skipped():
    """A step that computes a prompt is foreseen alone, and skipping it is refused."""
    engine = engine_of(60, 2)
    engine.add(EngineRequest("a", 8, 10, 0.0))
    step = engine.begin_step(0.0)

    assert engine.foresee(step) == [step.end_s]
    with pytest.raises(ValueError, match="foreseen"):
        engine.skip(step, [step.end_s], 1)


@settings(max_examples=150)
@given(workload=rows, blocks=st.integers(22, 60), seqs=st.integers(1, 6))
def test_skipping_is_stepping_with_tiers(workload, blocks, seqs):
    """Whoever waits for victims, a copy or the reserve is let in by the same step."""
    requests = requests_of(workload)

    stepped = run(engine_of(blocks, seqs, TIERS), requests, is_skipping=False)

    assert run(engine_of(blocks, seqs, TIERS), requests, is_skipping=True) == stepped
