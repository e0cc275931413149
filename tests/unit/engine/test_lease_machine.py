"""Leases under every order of events: a network that reorders, repeats, delays and loses, crashes, and clocks that step.

The model is the document's: a lease ends at max(old, now + extension), now being the prefill worker's own clock, and a
prompt is free when all its readers have said so or its lease has ended.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.engine.core.batching import BatchLimits
from penstock.engine.core.engine import Engine, EngineSettings
from penstock.engine.core.latency import LatencyModel, LinearDecode, QuadraticPrefill
from penstock.engine.core.lease import HeartbeatSchedule, LeaseTerms, reads_of
from penstock.engine.core.requests import EngineRequest, EngineRole

LATENCY = LatencyModel(QuadraticPrefill(0.01, 0.0, 0.0), LinearDecode(0.01, 0.0, 0.0))
TERMS = LeaseTerms(30.0, 60.0)
BLOCK, BLOCKS = 4, 24

places = st.integers(0, 1000)


class LeaseMachine(RuleBasedStateMachine):
    """One prefill worker, one decode worker that may crash and come back, and the messages between them."""

    def __init__(self):
        super().__init__()
        self.now_s, self.decode_now_s = 1000.0, 5000.0
        self.engine, self.schedule = None, None
        self.number = 0
        self.network = []
        self.ends, self.unread, self.blocks = {}, {}, {}
        self.waiting, self.reading = [], []

    @initialize(ranks=st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 4)]))
    def start(self, ranks):
        """Workers of any two degrees of parallelism."""
        self.source, self.reader = ranks
        settings_ = EngineSettings(
            EngineRole.PREFILL,
            BLOCKS,
            1,
            BatchLimits(block_size=BLOCK),
            TERMS,
            ranks=self.source,
        )
        self.engine = Engine(settings_, LATENCY)
        self.schedule = HeartbeatSchedule(TERMS.heartbeat_interval_s)

    # -- the prefill worker ---------------------------------------------------------------------------

    @rule(tokens=st.integers(1, 20), is_handed_over=st.booleans())
    def prefill(self, tokens, is_handed_over):
        """A prompt is computed and kept, where it fits alongside what is kept already; decode may have it at once."""
        name = f"r{self.number}"
        self.number += 1
        self.take_in()
        self.engine.add(EngineRequest(name, tokens, 1, self.now_s, pin_blocks=True))
        step = self.engine.begin_step(self.now_s)
        if step is None:
            self.engine.abort(name, self.now_s)
            return
        self.engine.finish_step(step)
        self.now_s = max(self.now_s, step.end_s)
        blocks = set(self.engine.pinned.blocks_of(name))
        assert len(blocks) == -(-tokens // BLOCK)
        for other, held in self.blocks.items():
            assert not blocks & held, f"{name} was given blocks that {other} may still read"
        self.ends[name] = step.end_s + TERMS.duration_s
        self.unread[name] = {(each.rank, each.reader) for each in reads_of(name, self.source, self.reader)}
        self.blocks[name] = blocks
        self.waiting.append(name)
        if is_handed_over:
            self.enter(-1)
        self.take_in()

    @rule(seconds=st.floats(0, 12))
    def time_passes(self, seconds):
        """Both clocks continue."""
        self.now_s += seconds
        self.decode_now_s += seconds
        self.take_in()

    @rule(seconds=st.one_of(st.floats(-100, 5), st.just(40.0)))
    def a_clock_steps(self, seconds):
        """The prefill worker's clock is set forward or back."""
        self.now_s += seconds
        self.take_in()

    @rule(seconds=st.floats(-100, 100))
    def the_other_clock_steps(self, seconds):
        """The decode worker's is."""
        self.decode_now_s += seconds

    def take_in(self):
        """Let both the engine and the model reach the prefill worker's time."""
        self.engine.advance(self.now_s)
        gone = {name for name, end_s in self.ends.items() if end_s <= self.now_s}
        assert set(self.engine.take_events().expired) == gone
        for name in gone:
            self.let_go(name)

    def let_go(self, name):
        """The model frees a prompt."""
        del self.ends[name], self.blocks[name], self.unread[name]

    # -- the decode worker ----------------------------------------------------------------------------

    @precondition(lambda self: self.waiting)
    @rule(place=places)
    def enter_late(self, place):
        """A request has waited elsewhere."""
        self.enter(place)

    def enter(self, place):
        """A request enters decode's scheduler and is renewed from then on."""
        name = self.waiting.pop(place % len(self.waiting))
        self.schedule.track("prefill", name)
        self.reading.append(name)

    @rule()
    def heartbeat(self):
        """What is due goes out: at most one message, however many requests wait."""
        messages = self.schedule.due(self.decode_now_s)
        assert len(messages) <= 1
        self.network += [("heartbeat", names) for names in messages.values()]

    @precondition(lambda self: self.reading)
    @rule(place=places, arrived=st.lists(places, max_size=4))
    def read(self, place, arrived):
        """Every rank has read, or the client left before: each says so by itself, some of them at once."""
        name = self.reading.pop(place % len(self.reading))
        self.schedule.untrack("prefill", name)
        reads = [("read", each) for each in reads_of(name, self.source, self.reader)]
        before, self.network = self.network, reads
        for each in arrived:
            if self.network:
                self.arrive(each, is_repeated=False)
        self.network = before + self.network

    @rule(tokens=st.integers(1, 20), arrived=st.lists(places, max_size=4))
    def serve(self, tokens, arrived):
        """All goes well for one request, up to the messages of its ranks."""
        before = len(self.reading)
        self.prefill(tokens, is_handed_over=True)
        if len(self.reading) > before:
            self.read(-1, arrived)

    @rule()
    def crash(self):
        """The decode worker is gone with all it knew; another one takes its place."""
        self.reading.clear()
        self.schedule = HeartbeatSchedule(TERMS.heartbeat_interval_s)

    # -- the network ----------------------------------------------------------------------------------

    @precondition(lambda self: self.network)
    @rule(arrivals=st.lists(st.tuples(places, st.booleans()), min_size=1, max_size=4))
    def deliver(self, arrivals):
        """Any messages arrive next, in any order, and may arrive again later."""
        for place, is_repeated in arrivals:
            if self.network:
                self.arrive(place, is_repeated)

    def arrive(self, place, is_repeated):
        """One message arrives."""
        index = place % len(self.network)
        kind, what = self.network[index] if is_repeated else self.network.pop(index)
        self.take_in()
        if kind == "heartbeat":
            unknown = self.engine.pinned.renew(what, self.now_s)
            assert set(unknown) == {name for name in what if name not in self.ends}
            for name in set(what) - set(unknown):
                self.ends[name] = max(self.ends[name], self.now_s + TERMS.extension_s)
            return
        unknown = self.engine.pinned.read([what])
        assert bool(unknown) == (what.request_id not in self.ends)
        if not unknown:
            self.unread[what.request_id].discard((what.rank, what.reader))
            if not self.unread[what.request_id]:
                self.let_go(what.request_id)

    @precondition(lambda self: self.network)
    @rule(place=places)
    def lose(self, place):
        """A message never arrives."""
        self.network.pop(place % len(self.network))

    # -- what must hold -------------------------------------------------------------------------------

    @invariant()
    def leases_are_the_models(self):
        """Each ends when the document says, so that none is ever shortened."""
        if self.engine is not None:
            assert {name: self.engine.pinned.expiry_s(name) for name in self.ends} == self.ends
            assert len(self.engine.pinned) == len(self.ends)
            assert self.engine.pinned.next_expiry_s() == min(self.ends.values(), default=None)

    @invariant()
    def blocks_of_live_leases_are_kept(self):
        """Exactly those: none is freed that may be read, and none stays that nobody may read."""
        if self.engine is not None:
            held = set().union(*self.blocks.values()) if self.blocks else set()
            assert self.engine.pool.used == self.engine.pinned.blocks == len(held)
            for name, blocks in self.blocks.items():
                assert set(self.engine.pinned.blocks_of(name)) == blocks

    def teardown(self):
        """Whatever crashed or was lost: once time has passed, every block is free."""
        if self.engine is not None:
            self.engine.advance(max(self.ends.values(), default=self.now_s))
            assert (self.engine.pool.used, len(self.engine.pinned)) == (0, 0)
            assert self.engine.is_idle


TestLeases = LeaseMachine.TestCase
TestLeases.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
