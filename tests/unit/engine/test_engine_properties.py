"""Invariants of the engine under arbitrary workloads, cache sizes, roles and aborts."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.engine.core.batching import BatchLimits
from penstock.engine.core.engine import Engine, EngineSettings
from penstock.engine.core.latency import LatencyModel, LinearDecode, QuadraticPrefill
from penstock.engine.core.lease import LeaseTerms
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
