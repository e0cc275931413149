"""Invariants of the engine under arbitrary arrivals, aborts, pauses and limits, with preemption by tier and without.

Simulators skip steps: doing so leaves the same state, to the last bit.
"""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.core.tiers import TierPriority
from penstock.engine.core.batching import BatchLimits
from penstock.engine.core.engine import Engine, EngineSettings
from penstock.engine.core.latency import LatencyModel, LinearDecode, QuadraticPrefill
from penstock.engine.core.lease import LeaseTerms
from penstock.engine.core.preemption import PreemptionTerms
from penstock.engine.core.requests import EngineRequest, EngineRole, RequestStage
from penstock.engine.core.transfer import LinkTerms

LATENCY = LatencyModel(QuadraticPrefill(0.02, 1e-4, 1e-6), LinearDecode(0.005, 1e-5, 1e-7))
BLOCK = 4
COPIED = {RequestStage.SWAPPING, RequestStage.LOADING}


def make_engine(role, blocks, limits, preemption):
    """Make an engine whose cache may be too small for everybody at once."""
    link, lease = LinkTerms(0.01, 500.0), LeaseTerms(6)
    return Engine(EngineSettings(role, blocks, 1, limits, lease, link, preemption=preemption), LATENCY)


tiers = st.builds(
    PreemptionTerms,
    max_per_request=st.integers(0, 3),
    reserved_fraction=st.sampled_from([0.0, 0.3]),
    host_blocks=st.sampled_from([0, 6, 40]),
    host_link=st.builds(LinkTerms, st.sampled_from([0.0, 0.02]), st.sampled_from([500.0, 50_000.0])),
    drop_above_s=st.sampled_from([None, None, 0.0225]),
)
bursts = st.lists(
    st.tuples(
        st.integers(1, 20),
        st.integers(1, 32),
        st.sampled_from([-1, 0, 0, 1, 1, 2, 2, 2]),
        st.integers(0, 4),
        st.booleans(),
    ),
    min_size=1,
    max_size=4,
)


class Machine(RuleBasedStateMachine):
    """Requests of all priorities come and go while the engine steps."""

    engine = None

    @initialize(
        terms=st.none() | tiers,
        blocks=st.integers(20, 28),
        seqs=st.integers(1, 6),
        role=st.sampled_from(
            [EngineRole.AGGREGATED, EngineRole.AGGREGATED, EngineRole.DECODE, EngineRole.PREFILL]
        ),
        budget=st.integers(6, 40),
        by_priority=st.booleans(),
        caches=st.booleans(),
    )
    def start(self, *, terms, blocks, seqs, role, budget, by_priority, caches):
        """Make an engine with a small cache."""
        self.by_priority = by_priority or terms is not None
        limits = BatchLimits(budget, seqs, BLOCK, by_priority=self.by_priority)
        self.engine = make_engine(role, blocks, limits, terms)
        self.terms, self.blocks, self.role, self.caches = terms, blocks, role, caches
        self.now_s, self.step, self.number, self.tokens = 0.0, None, 0, 0
        self.states, self.started, self.ended = [], [], set()

    @rule(burst=bursts)
    def arrive(self, burst):
        """Requests join the queue at one moment; prompts of one family share their beginning."""
        for prompt, outputs, priority, family, is_remote in burst:
            keys = [family * 1000 + place for place in range(prompt // BLOCK)] if self.caches else ()
            request = EngineRequest(
                f"r{self.number}",
                prompt,
                outputs,
                self.now_s,
                keys,
                priority,
                load_remote=is_remote and self.role is EngineRole.DECODE,
                pin_blocks=is_remote and self.role is EngineRole.PREFILL,
            )
            self.number += 1
            self.states.append(self.engine.add(request))

    @precondition(lambda self: self.states)
    @rule(place=st.integers(0, 50))
    def abort(self, place):
        """A client goes away, at whatever point its request is."""
        state = self.states[place % len(self.states)]
        if self.engine.abort(state.request.request_id, self.now_s):
            self.note_end(state)

    @precondition(lambda self: any(state.status in COPIED for state in self.states))
    @rule()
    def abort_in_flight(self):
        """A client goes away while its KV is on a link."""
        state = next(state for state in self.states if state.status in COPIED)
        assert self.engine.abort(state.request.request_id, self.now_s)
        self.note_end(state)

    @rule(steps=st.integers(1, 8))
    def run(self, steps):
        """Step, or wait for a copy, a transfer or a lease."""
        for _ in range(steps):
            if not self.advance():
                return

    def advance(self):
        """Do the next thing; False when nothing is due."""
        if self.step is None:
            self.begin()
            if self.step is None:
                due_s = self.engine.next_event_s()
                if due_s is None:
                    return False
                self.now_s = max(self.now_s, due_s)
                self.begin()
                return True
        outcome = self.engine.finish_step(self.step)
        self.now_s = outcome.end_s
        self.started += outcome.started
        self.tokens += outcome.steady_tokens + len(outcome.started) + len(outcome.late_gaps_s)
        for state in outcome.finished:
            assert state.outputs == state.request.output_tokens
            times = (state.request.arrival_s, state.first_scheduled_s, state.first_token_s, state.finished_s)
            assert list(times) == sorted(times)
            self.note_end(state)
        self.begin()
        return True

    def begin(self):
        """Begin a step, and look at whom it let in and threw out."""
        self.step = self.engine.begin_step(self.now_s)
        for state in self.engine.take_events().dropped:
            assert self.terms.drop_above_s is not None
            self.note_end(state)
        self.blocks_are_conserved()
        self.the_reserve_is_kept()
        if self.step is not None and self.by_priority:
            self.check_order(self.step.batch)

    def check_order(self, batch):
        """Nobody was let in before a request of a higher tier that continued waiting."""
        waiting = [each for each in self.states if each.status is RequestStage.WAITING]
        highest = min((each.request.priority for each in waiting if each not in batch.preempted), default=9)
        fresh = [*batch.admitted, *(state for state, _ in batch.swapped_in)]
        assert all(state.request.priority <= highest for state in fresh)

    def note_end(self, state):
        """Note an end, of which each request has one."""
        name = state.request.request_id
        assert name not in self.ended
        self.ended.add(name)

    @precondition(lambda self: self.engine)
    @invariant()
    def blocks_are_conserved(self):
        """What is in use is some request's; copies under way still hold theirs."""
        engine = self.engine
        assert engine.pool.used == len({block for state in self.states for block in state.blocks})
        assert engine.swapped_blocks == sum(state.host_blocks for state in self.states)
        assert 0 <= engine.swapped_blocks <= (self.terms.host_blocks if self.terms else 0)
        assert engine.batcher.running <= engine.settings.limits.max_num_seqs

    @precondition(lambda self: self.engine)
    @invariant()
    def the_reserve_is_kept(self):
        """Lower tiers together never hold more than what is not reserved."""
        lower = {
            block
            for state in self.states
            if state.request.priority > TierPriority.PREMIUM
            for block in state.blocks
        }
        reserved = int(self.terms.reserved_fraction * self.blocks) if self.terms else 0
        assert len(lower) <= self.blocks - reserved

    @precondition(lambda self: self.engine)
    @invariant()
    def nobody_is_preempted_too_often(self):
        """The limit holds for victims and for those that give way to their own tier."""
        if self.terms:
            assert all(state.preemptions <= self.terms.max_per_request for state in self.states)
        counters = self.engine.counters
        assert counters.preemptions == sum(state.preemptions for state in self.states)
        assert counters.preemptions == counters.preemptions_by.total()

    def teardown(self):
        """Every request ends, each has begun once at most, all outputs were counted, and nothing is left behind."""
        if self.engine is None:
            return
        for _ in range(20_000):
            if not self.advance():
                break
        assert self.ended == {state.request.request_id for state in self.states}
        assert len({id(state) for state in self.started}) == len(self.started)
        if all(state.outputs == state.request.output_tokens for state in self.states):
            assert self.tokens == self.engine.counters.generation_tokens
        assert self.engine.is_idle
        assert (self.engine.pool.used, self.engine.swapped_blocks) == (0, 0)


TestEngine = Machine.TestCase
TestEngine.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)

TIERS = PreemptionTerms(reserved_fraction=0.1, host_blocks=12, host_link=LinkTerms(0.002, 5000.0))

rows = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 30), st.floats(0, 0.3), st.booleans()),
    min_size=1,
    max_size=12,
)


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
            arrival_s = waiting[0].arrival_s if waiting else None
            due = [at for at in (engine.next_event_s(), arrival_s) if at is not None]
            if not due:
                break
            now_s = max(now_s, min(due))
            continue
        if is_skipping:
            ends = engine.predict_end_times(step)
            next_s = waiting[0].arrival_s if waiting else float("inf")
            steps = sum(end_s < next_s for end_s in ends[:-1])
            if steps:
                step = engine.skip(step, ends, steps)
        outcome = engine.finish_step(step)
        now_s = outcome.end_s
        names = [state.request.request_id for state in (*outcome.started, *outcome.finished)]
        if names or outcome.late_gaps_s:
            log.append((now_s, names, outcome.late_gaps_s))
    cached = [engine.pool.count_hits(each.block_keys) for each in requests]
    return log, engine.counters, engine.pool.used, cached


@settings(max_examples=200)
@given(
    workload=rows,
    blocks=st.integers(22, 60),
    seqs=st.integers(1, 6),
    preemption=st.sampled_from([None, TIERS]),
)
def test_skipping_is_stepping(workload, blocks, seqs, preemption):
    """First tokens, ends, counters and the cache are the same, to the last bit.

    Whoever waits for victims, a copy or the reserve is let in by the same step.
    """
    requests = requests_of(workload)
    limits = BatchLimits(40, seqs, BLOCK, by_priority=preemption is not None)

    stepped, skipped = (
        run(make_engine(EngineRole.DECODE, blocks, limits, preemption), requests, is_skipping=is_skipping)
        for is_skipping in (False, True)
    )

    assert skipped == stepped


def test_decodes_are_foreseen_to_their_end_and_prompts_are_not():
    """10 outputs: one by the prefill, foreseen alone, then nine decode steps at once."""
    engine = make_engine(EngineRole.DECODE, 60, BatchLimits(40, 2, BLOCK), None)
    engine.add(EngineRequest("a", 8, 10, 0.0))
    prefill = engine.begin_step(0.0)
    assert engine.predict_end_times(prefill) == [prefill.end_s]

    step = engine.begin_step(engine.finish_step(prefill).end_s)
    ends = engine.predict_end_times(step)

    assert len(ends) == 9
    assert engine.skip(step, ends, 8).end_s == ends[-1]
    assert engine.counters.generation_tokens == 9
