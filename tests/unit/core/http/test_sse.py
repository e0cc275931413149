from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import StreamBroken
from penstock.core.http.sse import DONE, EventSplitter, encode_event, payload

TOKEN = b'data: {"choices":[{"text":"a"}]}\n\n'


@pytest.mark.parametrize(
    ("data", "event"),
    [
        (b"x", b"data: x\n\n"),
        (b"", b"data: \n\n"),
        (b"a\nb", b"data: a\ndata: b\n\n"),
        (b"a\r\nb\rc", b"data: a\ndata: b\ndata: c\n\n"),
    ],
)
def test_encode(data, event):
    """Data with line breaks takes several data lines."""
    assert encode_event(data) == event


@pytest.mark.parametrize(
    ("event", "data"),
    [
        (b"data: x\n\n", b"x"),
        (b"data:x\n\n", b"x"),
        (b"data:  x\n\n", b" x"),
        (b"data: x\r\n\r\n", b"x"),
        (b"id: 7\ndata: x\ndata: y\nevent: e\n\n", b"x\ny"),
        (b": ping\n\n", None),
        (b"event: ping\n\n", None),
        (DONE, b"[DONE]"),
    ],
)
def test_payload(event, data):
    """Field names go, lines are joined, comments have no data."""
    assert payload(event) == data


@pytest.mark.parametrize(
    ("chunks", "events"),
    [
        ([TOKEN], [TOKEN]),
        ([TOKEN + TOKEN], [TOKEN, TOKEN]),
        ([TOKEN[:5], TOKEN[5:]], [TOKEN]),
        ([TOKEN[:-1], b"\n" + TOKEN], [TOKEN, TOKEN]),
        ([b"data: x\r\n\r\n"], [b"data: x\r\n\r\n"]),
        ([b"data: x\r\n\r", b"\ndata: y\n\n"], [b"data: x\r\n\r\n", b"data: y\n\n"]),
        ([b"data: x\r\n\r\ndata: y\n\n"], [b"data: x\r\n\r\n", b"data: y\n\n"]),
        ([b"data: x"], []),
        ([b""], []),
    ],
)
def test_split(chunks, events):
    """Events are cut at blank lines, wherever the pieces were cut."""
    splitter = EventSplitter()
    assert [event for chunk in chunks for event in splitter.feed(chunk)] == events


MIXED = (
    b": hello\n\n"
    b'data: {"choices":[{"index":0,"text":"abcd"}]}\n\n'
    b"event: x\r\ndata: one\r\ndata:two\r\n\r\n"
    b"retry: 3\n\n"
    b"data: [DONE]\n\n"
)


@given(st.lists(st.integers(0, len(MIXED)), max_size=8).map(sorted))
def test_payloads_are_the_same_wherever_the_reads_were_cut(cuts):
    """A read boundary inside an event, a line end or a name changes nothing."""
    splitter = EventSplitter()
    edges = [0, *cuts, len(MIXED)]

    events = [event for a, b in pairwise(edges) for event in splitter.feed(MIXED[a:b])]

    found = [content for event in events if (content := payload(event)) is not None]
    assert found == [b'{"choices":[{"index":0,"text":"abcd"}]}', b"one\ntwo", b"[DONE]"]
    assert not splitter.tail


def test_a_cut_off_event_is_kept_and_named():
    """What exceeds the bound is an error, and what was cut off is still between the events."""
    splitter = EventSplitter(max_event_bytes=10)

    with pytest.raises(StreamBroken, match="exceeds 10 bytes"):
        splitter.feed(b"data: 0123456789")
    assert splitter.tail
