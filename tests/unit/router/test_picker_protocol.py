"""What routers say to each other, and who of them picks: both pure."""

from itertools import combinations, pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api import Role, Tier
from penstock.router.picker import messages as wire
from penstock.router.picker.group import Leader, elect, majority
from penstock.router.picker.messages import FrameReader, ProtocolError, arrival_of, frames, prompt_of
from penstock.router.picker.relay import RECENT_KEYS, RecentPrompts
from penstock.router.policy.arrival import Arrival
from penstock.router.policy.busy import BusyThresholds
from penstock.router.policy.slo_monitor import EndedRequest
from penstock.router.thresholds import ThresholdState


def status(**values):
    """A sign of life."""
    fields = {"instance": "a", "since_s": 1.0, "term": 1, "is_leader": True, "is_active": True}
    return wire.Status(**{**fields, "is_stopping": False, "sees": ("a",), **values})


ARRIVAL = Arrival((1, 2**64 - 1), 900, frozenset({"w"}), 480.5, 8, "s", True, tenant="t")
MESSAGES = [
    status(thresholds=ThresholdState(3, BusyThresholds(1, 7, 0.5), BusyThresholds())),
    wire.Ask(7, Role.PREFILL, prompt_of(ARRIVAL), True, 1.5),
    wire.Assigned(2, 7, "w", 0.0, "lowest prefix cost"),
    wire.Progress((7, 8), (900, 1)),
    wire.TierOutcome(Tier.PREMIUM, 0.5),
    wire.TierOutcome(Tier.PREMIUM, ended=EndedRequest(0.5, None, 3.0, is_failed=True)),
    wire.TierOutcome(Tier.BACKGROUND),
]


@given(cuts=st.lists(st.integers(0, 400), max_size=6))
def test_messages_arrive_however_the_stream_is_cut(cuts):
    """All of them, in order; a request comes out as it went in."""
    data, reader = frames(MESSAGES), FrameReader()
    bounds = [0, *sorted(min(each, len(data)) for each in cuts), len(data)]
    found = [each for a, b in pairwise(bounds) for each in reader.feed(data[a:b])]
    assert found == MESSAGES
    assert arrival_of(found[1].prompt) == ARRIVAL


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xff\xff\xff",
        (wire.MAX_FRAME_BYTES + 1).to_bytes(4, "big"),
        b"\x00\x00\x00\x01\xc1",
        b"GET / HTTP/1.1\r\n\r\n",
        msgspec.msgpack.encode([[99, 1]]),
        msgspec.msgpack.encode([[4, -1, 0, None]]),
        msgspec.msgpack.encode([[1, 0, "term 0 is nobody's", "x", 1.0]]),
        msgspec.msgpack.encode([[2, "w" * 257, None]]),
        *(
            msgspec.msgpack.encode([[0, "a", 1.0, 1, True, True, False, [], "", [1, wrong, [None] * 3]]])
            for wrong in ([1.5, None, None], [None, 7.5, None], [None, None, -1], [None, None, float("inf")])
        ),
    ],
)
def test_what_is_no_message_is_an_error(content):
    """Too long, cut wrongly, of an unknown kind, or out of its bounds."""
    framed = content if content[:1] in b"\x00\xffG" else len(content).to_bytes(4, "big") + content
    with pytest.raises(ProtocolError):
        list(FrameReader().feed(framed))


def test_keys_that_are_cut_off_are_an_error():
    """Eight bytes each."""
    prompt = msgspec.structs.replace(prompt_of(ARRIVAL), keys=b"seven b")
    with pytest.raises(ProtocolError, match="7 bytes"):
        arrival_of(prompt)


def test_recent_prompts_are_bounded_by_their_keys():
    """The oldest go first; what has no key and no session says nothing."""
    recent = RecentPrompts()
    recent.add("w", Arrival((), 5))
    for number in range(600):
        recent.add("w", Arrival((number,) * 512, 5))
    kept = list(recent)
    assert sum(len(arrival.chain) for _, arrival in kept) == RECENT_KEYS
    assert kept[-1][1].chain[0] == 599


# ---------------------------------------------------------------------- election


def view(name, sees, *, term=0, is_leader=False, is_active=False, is_stopping=False, leader=""):
    """A router, as old as its letter."""
    return wire.Status(
        name, float(ord(name)), term, is_leader, is_active, is_stopping, tuple(sees), leader=leader
    )


@pytest.mark.parametrize(
    ("own", "heard", "members", "expected"),
    [
        (view("a", "a"), [], 1, Leader("a", 1)),
        (view("a", "ab"), [view("b", "ab")], 2, Leader("a", 1)),
        (view("b", "ab"), [view("a", "ab")], 2, None),
        (view("b", "ab"), [view("a", "ab", term=1, is_leader=True)], 2, Leader("a", 1)),
        # Half of four is not a majority; three of four are.
        (view("b", "bc"), [view("c", "bc")], 4, None),
        (view("b", "bcd"), [view("c", "bcd"), view("d", "bcd")], 4, Leader("b", 1)),
        # A claim whose owner no majority sees is followed by nobody, whoever hears it.
        (view("b", "abc"), [view("a", "ab", term=3, is_leader=True), view("c", "bc", term=3)], 4, Leader("b", 4)),
        # An older router that comes back finds a higher term, and does not take it back.
        (view("a", "abc", term=1, is_leader=True), [view("b", "abc", term=2, is_leader=True), view("c", "abc", term=2)], 3, Leader("b", 2)),
        # Of two claims of one term the older router's holds, for both.
        (view("b", "ab", term=2, is_leader=True), [view("a", "ab", term=2, is_leader=True)], 2, Leader("a", 2)),
        # One that a majority follows stays, whatever term another claims.
        (view("a", "ab", term=1, is_leader=True, is_active=True), [view("b", "ab", term=2, is_leader=True)], 2, Leader("a", 1)),
        # A picker that the others follow and this one does not hear: it has none. Where one of three follows, it is gone.
        (view("b", "bc", term=1), [view("c", "abc", term=1, leader="a")], 3, None),
        (view("b", "bcd", term=1), [view("c", "bcd", term=1, leader="a"), view("d", "bcd", term=1)], 4, Leader("b", 2)),
        # One that stops hands on.
        (view("b", "ab", term=1), [view("a", "ab", term=1, is_leader=True, is_stopping=True)], 2, Leader("b", 2)),
    ],
)  # fmt: skip
def test_who_picks(own, heard, members, expected):
    """The one that a majority follows, else the claim of the highest term whose owner one sees, else the oldest that one sees."""
    assert elect(own, heard, members) == expected


class Net:
    """Routers that tell each other who they are, where they can; ``first`` picks for all at the start."""

    def __init__(self, names, cut, first):
        self.names, self.cut = names, cut
        self.leaders = dict.fromkeys(names, first and Leader(first, 1))
        self.terms = dict.fromkeys(names, 1 if first else 0)
        self.told = {name: self.status(name) for name in names}

    def heard(self, name):
        """Those that it hears, itself among them."""
        return [each for each in self.names if each == name or {each, name} not in self.cut]

    def followers(self, name):
        """Those that follow a router, itself among them."""
        return [each for each in self.heard(name) if self.leaders[each] == self.leaders[name]]

    def active(self):
        """Those that claim to pick and that a majority follows."""
        claims = [each for each, leader in self.leaders.items() if leader and leader.instance == each]
        return [each for each in claims if len(self.followers(each)) >= majority(len(self.names))]

    def status(self, name):
        """What a router tells now."""
        leader = self.leaders[name]
        is_leader = leader is not None and leader.instance == name
        return view(
            name,
            self.heard(name),
            term=leader.term if is_leader else self.terms[name],
            is_leader=is_leader,
            is_active=name in self.active(),
            leader=leader.instance if leader else "",
        )

    def run(self, rng, rounds=12):
        """Let all look and tell, in any order, and some later than others."""
        for _ in range(rounds):
            for name in rng.sample(self.names, len(self.names)):
                heard = [self.told[each] for each in self.heard(name) if each != name]
                leader = self.leaders[name] = elect(self.status(name), heard, len(self.names))
                self.terms[name] = max(
                    self.terms[name], leader.term if leader else 0, *(each.term for each in heard), 0
                )
                if rng.random() < 0.8:
                    self.told[name] = self.status(name)
                assert len(self.active()) <= 1
        return self


@given(st.randoms(use_true_random=False), st.integers(1, 5), st.floats(0, 1))
def test_whatever_is_cut_one_at_most_picks_and_in_the_end_all_follow_one(rng, count, share):
    """No majority follows two, however late words are; once all hear each other, all follow the one that picks."""
    names = "abcde"[:count]
    cut = [set(pair) for pair in combinations(names, 2) if rng.random() < share]
    net = Net(names, cut, rng.choice([None, *names])).run(rng)
    net.cut = []
    net.told = {name: net.status(name) for name in names}
    net.run(rng)
    assert len(set(net.leaders.values())) == 1
    assert len(net.active()) == 1


@given(st.randoms(use_true_random=False), st.integers(3, 5), st.data())
def test_one_that_is_cut_from_the_picker_alone_claims_nothing(rng, count, data):
    """It would be followed, the picker would claim the next term, and so on: instead all others stay, and it has no picker."""
    names = "abcde"[:count]
    picker, lone = data.draw(st.permutations(names))[:2]
    net = Net(names, [{picker, lone}], picker).run(rng)
    assert net.leaders == {**dict.fromkeys(names, Leader(picker, 1)), lone: None}
