"""The step machine: KV transfer, leases, aborts and refusals. The link carries 100 tokens a second + 0.5 s."""

import pytest

from penstock.engine.core.lease import Read
from penstock.engine.core.requests import FinishReason, RequestStage


def prefill(engine, request, now_s=0.0):
    """Run one request of one output to its end."""
    state = engine.add(request)
    step = engine.begin_step(now_s)
    engine.finish_step(step)
    return state, step.end_s


def test_prefill_worker_pins_blocks_until_they_are_read(make_engine, request_of):
    """Pinned blocks count as used; the read frees them, a second one is counted as too late."""
    engine = make_engine(role="prefill")
    _, end_s = prefill(engine, request_of("a", prompt=10, outputs=1, pin_blocks=True))
    assert (engine.pool.used, len(engine.pinned), engine.in_flight) == (3, 1, 0)
    assert engine.pinned.blocks_of("a") == [0, 1, 2]
    assert engine.pinned.expiry_s("a") == end_s + 30
    assert not engine.is_idle
    assert engine.pinned.read([Read("a")]) == []
    assert (engine.pool.used, engine.is_idle) == (0, True)
    assert engine.pinned.read([Read("a")]) == ["a"]
    assert engine.counters.notifications_after_expiry == 1


@pytest.mark.parametrize("ends_by", [FinishReason.LENGTH, FinishReason.STOP])
def test_blocks_are_kept_however_the_prefill_ends(make_engine, request_of, ends_by):
    """As in vLLM 0.32: a prompt that ran into its limit and one that stopped by itself; an aborted one is not kept."""
    engine = make_engine(role="prefill")
    prefill(engine, request_of("a", outputs=1, pin_blocks=True, ends_by=ends_by))
    assert "a" in engine.pinned
    engine.add(request_of("b", outputs=1, pin_blocks=True))
    assert engine.abort("b", 2.0)
    assert "b" not in engine.pinned


def test_decode_worker_fetches_then_decodes(make_engine, request_of):
    """80 tokens take 0.8 s + 0.5 s on the link; the first decode step brings the first token."""
    engine = make_engine(role="decode")
    state = engine.add(request_of("a", prompt=80, outputs=3, load_remote=True))
    assert engine.begin_step(0.0) is None
    assert (state.status, engine.batcher.loading, engine.batcher.waiting) == (RequestStage.LOADING, 1, 0)
    assert engine.pool.used == 20
    assert engine.next_event_s() == pytest.approx(1.3)
    step = engine.begin_step(1.3)
    assert (step.batch.spans, step.batch.decode_batch, step.batch.decode_kv_tokens) == ([], 1, 80)
    outcome = engine.finish_step(step)
    assert (outcome.started, outcome.steady_tokens) == ([state], 0)
    assert state.first_token_s == pytest.approx(1.4)
    assert (state.first_scheduled_s, state.external_tokens) == (pytest.approx(1.3), 80)
    for _ in range(2):
        step = engine.begin_step(step.end_s)
        outcome = engine.finish_step(step)
        assert outcome.steady_tokens == 1
    assert (state.outputs, engine.is_idle) == (3, True)
    assert (engine.counters.external_queries, engine.counters.external_hits) == (80, 80)


def test_locally_cached_prefix_is_not_fetched(make_engine, request_of):
    """A second request with the same first 36 tokens fetches 4; its blocks are shared."""
    engine = make_engine(role="decode")
    keys = list(range(10))
    engine.add(request_of("a", prompt=40, outputs=9, keys=keys, load_remote=True))
    engine.begin_step(0.0)
    engine.advance(0.9)
    second = engine.add(request_of("b", prompt=40, outputs=9, keys=keys, load_remote=True))
    engine.begin_step(0.9)
    assert (second.cached_tokens, second.external_tokens) == (36, 4)


def test_the_beginning_of_a_prompt_is_fetched_and_the_rest_computed(make_engine, request_of):
    """40 of 80 tokens are on another worker: 0.9 s on the link, then 40 tokens of prefill and the first token."""
    engine = make_engine(role="prefill")
    state = engine.add(request_of("a", prompt=80, outputs=1, load_remote=True, remote_tokens=40))
    assert engine.begin_step(0.0) is None
    assert engine.next_event_s() == pytest.approx(0.9)
    step = engine.begin_step(0.9)
    assert [(span.start, span.end) for span in step.batch.spans] == [(40, 80)]
    engine.finish_step(step)
    assert (state.external_tokens, state.outputs) == (40, 1)


def test_a_beginning_that_adds_too_little_is_computed(make_engine, request_of):
    """Of 40 tokens that are there 36 are cached here: the other four are not worth the way, and no reader comes for them."""
    engine = make_engine(role="prefill", least_load=8)
    keys = list(range(20))
    prefill(engine, request_of("a", prompt=40, outputs=1, keys=keys[:10]))
    state = engine.add(
        request_of("b", prompt=80, outputs=1, arrival_s=9.0, keys=keys, load_remote=True, remote_tokens=41)
    )
    step = engine.begin_step(9.0)
    assert [(span.start, span.end) for span in step.batch.spans] == [(40, 80)]
    assert engine.take_events().declined == [state]


def test_loading_requests_do_not_take_places_in_the_batch(make_engine, request_of):
    """While KV arrives, others run; those that have arrived go before those that wait."""
    engine = make_engine(role="decode", seqs=1)
    loading = engine.add(request_of("a", prompt=8, outputs=2, load_remote=True))
    engine.add(request_of("b", prompt=8, outputs=2))
    engine.add(request_of("c", prompt=8, outputs=1))
    step = engine.begin_step(0.0)
    assert [span.state.request.request_id for span in step.batch.spans] == ["b"]
    engine.finish_step(step)
    step = engine.begin_step(step.end_s)
    assert loading.status is RequestStage.LOADED
    engine.finish_step(step)
    step = engine.begin_step(step.end_s)
    assert step.batch.joined == [loading]


def test_preempted_decode_request_is_recomputed_here(make_engine, request_of):
    """After a preemption the prompt is computed locally, not fetched again."""
    engine = make_engine(role="decode", blocks=5)
    for name in "ab":
        engine.add(request_of(name, prompt=8, outputs=6, load_remote=True))
    engine.begin_step(0.0)
    now_s = 2.0
    kinds = []
    while engine.in_flight:
        step = engine.begin_step(now_s)
        kinds += [(span.state.request.request_id, span.start) for span in step.batch.spans]
        now_s = engine.finish_step(step).end_s
    assert [name for name, _ in kinds] == ["b"]
    assert engine.counters.external_hits == 16
    assert engine.counters.generation_tokens == 12


def test_preempting_the_only_running_request_lets_the_next_one_run(make_engine, request_of):
    """A lone request outgrows what fetched ones leave over: it is thrown out and they continue at once."""
    engine = make_engine(role="decode", blocks=6, seqs=1)
    first = engine.add(request_of("a", prompt=8, outputs=9, load_remote=True))
    second = engine.add(request_of("b", prompt=12, outputs=2, load_remote=True))
    engine.begin_step(0.0)
    now_s = 2.0
    while not second.first_token_s:
        now_s = engine.finish_step(engine.begin_step(now_s)).end_s
    assert (first.preemptions, first.status) == (1, RequestStage.WAITING)
    while engine.in_flight:
        now_s = engine.finish_step(engine.begin_step(now_s)).end_s
    assert (first.outputs, second.outputs) == (9, 2)


def test_blocks_under_transfer_are_kept_until_it_ends(make_engine, request_of):
    """An abort during the transfer does not hand its target blocks to others while they are written."""
    engine = make_engine(role="decode")
    engine.add(request_of("a", prompt=40, load_remote=True))
    engine.begin_step(0.0)
    engine.abort("a", 0.1)
    assert (engine.pool.used, engine.batcher.loading, engine.is_idle) == (10, 0, False)
    engine.advance(0.9)
    assert (engine.pool.used, engine.is_idle) == (0, True)
    assert engine.take_events().transfers == []


def test_abort_of_a_fetched_request_that_waits_for_a_place(make_engine, request_of):
    """KV that has arrived is freed at once, and the next fetched request takes its turn."""
    engine = make_engine(role="decode", seqs=1)
    engine.add(request_of("a", prompt=8, outputs=9, load_remote=True))
    gone = engine.add(request_of("gone", prompt=8, outputs=9, load_remote=True))
    stays = engine.add(request_of("stays", prompt=8, outputs=9, load_remote=True))
    engine.begin_step(0.0)
    step = engine.begin_step(5.0)
    assert (gone.status, stays.status) == (RequestStage.LOADED, RequestStage.LOADED)
    assert (engine.batcher.waiting, engine.pool.used) == (2, 6)
    engine.abort("gone", 5.0)
    assert (engine.batcher.waiting, engine.pool.used) == (1, 4)
    engine.abort("a", 5.0)
    engine.finish_step(step)
    assert engine.begin_step(step.end_s).batch.joined == [stays]
