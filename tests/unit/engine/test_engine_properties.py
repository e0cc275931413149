"""Invariants of the engine under arbitrary workloads, cache sizes, roles and aborts."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.engine.core.batching import BatchLimits
from penstock.engine.core.engine import Engine, EngineSettings
from penstock.engine.core.latency import LatencyModel, LinearDecode, QuadraticPrefill
from penstock.engine.core.lease import LeaseTerms
from penstock.engine.core.preemption import PreemptionTerms
from penstock.engine.core.requests import EngineRequest, EngineRole
from penstock.engine.core.timeline import Timeline
from penstock.engine.core.transfer import LinkTerms

LATENCY = LatencyModel(QuadraticPrefill(0.02, 1e-4, 1e-8), LinearDecode(0.005, 1e-5, 1e-7))
BLOCK = 4

requests = st.lists(
    st.fixed_dictionaries(
        {
            "prompt": st.integers(1, 40),
            "outputs": st.integers(1, 12),
            "gap_s": st.floats(0, 0.2),
            "family": st.integers(0, 2),
            "priority": st.integers(0, 2),
            "remote": st.booleans(),
        }
    ),
    min_size=1,
    max_size=20,
)
options = st.fixed_dictionaries(
    {
        "role": st.sampled_from(list(EngineRole)),
        "blocks": st.integers(13, 40),
        "seqs": st.integers(1, 6),
        "budget": st.integers(6, 40),
        "by_priority": st.booleans(),
        "caching": st.booleans(),
    }
)


def build(chosen):
    """Make an engine on a timeline."""
    limits = BatchLimits(chosen["budget"], chosen["seqs"], BLOCK, chosen["by_priority"])
    return Timeline(
        Engine(
            EngineSettings(
                chosen["role"], chosen["blocks"], 1, limits, LeaseTerms(6), LinkTerms(0.01, 500.0)
            ),
            LATENCY,
        )
    )


def submit_all(timeline, chosen, rows):
    """Hand in the workload; prompts of one family share their beginning."""
    arrival_s = 0.0
    for number, row in enumerate(rows):
        arrival_s += row["gap_s"]
        keys = [row["family"] * 1000 + place for place in range(row["prompt"] // BLOCK)]
        timeline.submit(
            EngineRequest(
                f"r{number}",
                row["prompt"],
                row["outputs"],
                arrival_s,
                keys if chosen["caching"] else (),
                row["priority"],
                load_remote=chosen["role"] is EngineRole.DECODE and row["remote"],
                pin_blocks=chosen["role"] is EngineRole.PREFILL and row["remote"],
            )
        )


def check(timeline, chosen):
    """What must hold between any two steps."""
    engine = timeline.engine
    assert 0 <= engine.kv_used_blocks <= chosen["blocks"]
    assert engine.running <= chosen["seqs"]


@settings(max_examples=120, suppress_health_check=[HealthCheck.too_slow])
@given(options, requests)
def test_every_request_ends_once_and_no_block_is_lost(chosen, rows):
    """All outputs come out, exactly once each, under every limit; at the end the cache is empty."""
    timeline = build(chosen)
    submit_all(timeline, chosen, rows)
    finished, firsts, tokens = [], [], 0
    for _ in range(20_000):
        if (due_s := timeline.next_due_s()) is None:
            break
        for outcome in timeline.run_until(due_s, max_steps=1):
            finished += outcome.finished
            firsts += outcome.started
            tokens += outcome.steady_tokens + len(outcome.started) + len(outcome.late_gaps_s)
        check(timeline, chosen)
    assert sorted(state.request.request_id for state in finished) == sorted(f"r{n}" for n in range(len(rows)))
    assert len({id(state) for state in firsts}) == len(firsts) == len(rows)
    for state in finished:
        assert state.outputs == state.request.output_tokens
        assert state.request.arrival_s <= state.first_scheduled_s <= state.first_token_s <= state.finished_s
    assert tokens == timeline.engine.counters.generation_tokens == sum(row["outputs"] for row in rows)
    assert timeline.is_idle
    assert timeline.engine.kv_used_blocks == 0


@settings(max_examples=120, suppress_health_check=[HealthCheck.too_slow])
@given(options, requests, st.lists(st.tuples(st.integers(0, 60), st.integers(0, 19)), max_size=15))
def test_aborts_at_any_time_are_clean(chosen, rows, aborts):
    """Requests aborted before, within and between steps leave nothing behind and disturb nobody."""
    timeline = build(chosen)
    submit_all(timeline, chosen, rows)
    aborted, finished = set(), set()
    for turn in range(20_000):
        if (due_s := timeline.next_due_s()) is None:
            break
        for outcome in timeline.run_until(due_s, max_steps=1):
            finished |= {state.request.request_id for state in outcome.finished}
        for at, number in aborts:
            name = f"r{number}"
            if at == turn and timeline.abort(name, due_s):
                assert name not in aborted | finished
                aborted.add(name)
                timeline.retry(due_s)
        check(timeline, chosen)
    assert aborted.isdisjoint(finished)
    assert aborted | finished == {f"r{n}" for n in range(len(rows))}
    assert timeline.is_idle
    assert timeline.engine.kv_used_blocks == 0


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
