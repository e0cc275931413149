"""What routers say to each other, and who of them picks: both pure."""

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api import Role
from penstock.router.picker import messages as wire
from penstock.router.picker.group import Leader, elect
from penstock.router.picker.messages import FrameReader, ProtocolError, arrival_of, frames, prompt_of
from penstock.router.picker.relay import RECENT_KEYS, RecentPrompts
from penstock.router.policy.arrival import Arrival


def status(**values):
    """A sign of life."""
    fields = {"instance": "a", "since_s": 1.0, "term": 1, "is_leader": True, "is_active": True}
    return wire.Status(**{**fields, "is_stopping": False, "sees": ("a",), **values})


ARRIVAL = Arrival((1, 2**64 - 1), 900, frozenset({"w"}), 480.5, 8, "s", True, tenant="t")
MESSAGES = [
    status(thresholds=(3, [None, 7, 0.5], [None, None, None])),
    wire.Ask(7, Role.PREFILL, prompt_of(ARRIVAL), True, 1.5),
    wire.Go(2, 7, "w", 0.0, "lowest prefix cost"),
    wire.Progress((7, 8), (900, 1)),
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


def view(name, sees, *, since_s=None, term=0, is_leader=False, is_stopping=False):
    """A router, as old as its letter."""
    since_s = float(ord(name)) if since_s is None else since_s
    return wire.Status(name, since_s, term, is_leader, True, is_stopping, tuple(sees))


@pytest.mark.parametrize(
    ("own", "heard", "members", "expected"),
    [
        (view("a", "a"), [], 1, Leader("a", 1)),
        (view("a", "ab"), [view("b", "ab")], 2, Leader("a", 1)),
        (view("b", "ab"), [view("a", "ab")], 2, None),
        (view("b", "ab"), [view("a", "ab", term=1, is_leader=True)], 2, Leader("a", 1)),
        # Half of four is no majority; three of four are.
        (view("b", "bc"), [view("c", "bc")], 4, None),
        (view("b", "bcd"), [view("c", "bcd"), view("d", "bcd")], 4, Leader("b", 1)),
        # A claim whose owner no majority sees is followed by nobody, whoever hears it.
        (view("b", "abc"), [view("a", "ab", term=3, is_leader=True), view("c", "bc", term=3)], 4, Leader("b", 4)),
        # An older router that comes back finds a higher term, and does not take it back.
        (view("a", "abc", term=1, is_leader=True), [view("b", "abc", term=2, is_leader=True), view("c", "abc", term=2)], 3, Leader("b", 2)),
        # Of two claims of one term the older router's holds, for both.
        (view("b", "ab", term=2, is_leader=True), [view("a", "ab", term=2, is_leader=True)], 2, Leader("a", 2)),
        # One that stops hands on.
        (view("b", "ab", term=1), [view("a", "ab", term=1, is_leader=True, is_stopping=True)], 2, Leader("b", 2)),
    ],
)  # fmt: skip
def test_who_picks(own, heard, members, expected):
    """The claim of the highest term whose owner a majority sees, else the oldest that one sees."""
    assert elect(own, heard, members) == expected


@given(st.data())
def test_two_never_claim_one_term_while_all_see_each_other(data):
    """Every router comes to the same answer from what all have told."""
    names = "abcde"[: data.draw(st.integers(1, 5))]
    terms = data.draw(st.lists(st.integers(0, 4), min_size=len(names), max_size=len(names)))
    claims = data.draw(st.lists(st.booleans(), min_size=len(names), max_size=len(names)))
    views = [
        view(name, names, term=term, is_leader=claim and term > 0)
        for name, term, claim in zip(names, terms, claims, strict=True)
    ]
    found = {elect(each, [other for other in views if other is not each], len(names)) for each in views}
    assert len(found - {None}) == 1
