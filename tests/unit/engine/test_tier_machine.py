"""Invariants of preemption by tier under arbitrary arrivals, aborts and pauses, as a state machine."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.core.tiers import TierPriority
from penstock.engine.core.batching import BatchLimits
from penstock.engine.core.engine import Engine, EngineSettings
from penstock.engine.core.latency import LatencyModel, LinearDecode, QuadraticPrefill
from penstock.engine.core.preemption import PreemptionTerms
from penstock.engine.core.requests import EngineRequest, EngineRole, Status
from penstock.engine.core.transfer import LinkTerms

LATENCY = LatencyModel(QuadraticPrefill(0.02, 1e-4, 1e-6), LinearDecode(0.005, 1e-5, 1e-7))
BLOCK = 4
COPIED = {Status.SWAPPING, Status.LOADING}

terms = st.builds(
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


class Tiers(RuleBasedStateMachine):
    """Requests of all tiers come and go while the engine steps."""

    @initialize(
        terms=terms,
        blocks=st.integers(20, 28),
        seqs=st.integers(1, 6),
        role=st.sampled_from(
            [EngineRole.AGGREGATED, EngineRole.AGGREGATED, EngineRole.DECODE, EngineRole.PREFILL]
        ),
        budget=st.integers(6, 40),
    )
    def start(self, terms, blocks, seqs, role, budget):
        """Make an engine with a small cache."""
        limits = BatchLimits(budget, seqs, BLOCK, by_priority=True)
        chosen = EngineSettings(role, blocks, 1, limits, link=LinkTerms(0.01, 500.0), preemption=terms)
        self.engine = Engine(chosen, LATENCY)
        self.terms, self.blocks, self.role = terms, blocks, role
        self.now_s, self.step, self.number = 0.0, None, 0
        self.states, self.ended = [], set()
        self.waited = {}

    @rule(burst=bursts)
    def arrive(self, burst):
        """Requests join the queue at one moment."""
        for prompt, outputs, priority, family, is_remote in burst:
            keys = [family * 1000 + place for place in range(prompt // BLOCK)]
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
        if self.step is not None:
            outcome = self.engine.finish_step(self.step)
            self.now_s = outcome.end_s
            for state in outcome.finished:
                assert state.outputs == state.request.output_tokens
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
        if self.step is not None:
            self.check_order(self.step.batch)

    def check_order(self, batch):
        """Nobody was let in before a request of a higher tier that went on waiting."""
        waiting = [each for each in self.states if each.status is Status.WAITING]
        highest = min((each.request.priority for each in waiting if each not in batch.preempted), default=9)
        fresh = [*batch.admitted, *(state for state, _ in batch.swapped_in)]
        assert all(state.request.priority <= highest for state in fresh)

    def note_end(self, state):
        """Note an end, of which each request has one."""
        name = state.request.request_id
        assert name not in self.ended
        self.ended.add(name)

    @invariant()
    def blocks_are_conserved(self):
        """What is in use is some request's; copies under way still hold theirs."""
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        assert engine.kv_used_blocks == len({block for state in self.states for block in state.blocks})
        assert engine.swapped_blocks == sum(state.host_blocks for state in self.states)
        assert 0 <= engine.swapped_blocks <= self.terms.host_blocks
        assert engine.running <= engine.settings.limits.max_num_seqs

    @invariant()
    def the_reserve_is_kept(self):
        """Lower tiers together never hold more than what is not reserved."""
        if not hasattr(self, "engine"):
            return
        lower = {
            block
            for state in self.states
            if state.request.priority > TierPriority.PREMIUM
            for block in state.blocks
        }
        assert len(lower) <= self.blocks - int(self.terms.reserved_fraction * self.blocks)

    @invariant()
    def nobody_is_preempted_too_often(self):
        """The limit holds for victims and for those that give way to their own tier."""
        if not hasattr(self, "engine"):
            return
        assert all(state.preemptions <= self.terms.max_per_request for state in self.states)
        counters = self.engine.counters
        assert counters.preemptions == sum(state.preemptions for state in self.states)
        assert counters.preemptions == counters.preemptions_by.total()

    def teardown(self):
        """Every request ends, and nothing is left behind."""
        if not hasattr(self, "engine"):
            return
        for _ in range(20_000):
            if not self.advance():
                break
        assert self.ended == {state.request.request_id for state in self.states}
        assert self.engine.is_idle
        assert (self.engine.kv_used_blocks, self.engine.swapped_blocks) == (0, 0)


TestTiers = Tiers.TestCase
TestTiers.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
