"""Event streams cut anywhere, token times, usage, and streams that end badly."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_core.errors import StreamBroken
from penstock_workload import sse
from penstock_workload.meter import StreamError, StreamMeter
from penstock_workload.sse import SseParser

STREAM = (
    b": hello\n\n"
    b'data: {"choices":[{"index":0,"text":"abcd"}]}\n\n'
    b"event: x\r\ndata: one\r\ndata:two\r\n\r\n"
    b"retry: 3\n\n"
    b"data: [DONE]\n\n"
)
PAYLOADS = [b'{"choices":[{"index":0,"text":"abcd"}]}', b"one\ntwo", b"[DONE]"]


@given(st.lists(st.integers(0, len(STREAM)), max_size=8).map(sorted))
def test_events_are_the_same_wherever_the_reads_were_cut(cuts):
    """A read boundary inside an event, a line end or a name changes nothing."""
    parser = SseParser()
    edges = [0, *cuts, len(STREAM)]

    found = [p for a, b in pairwise(edges) for p in parser.feed(STREAM[a:b])]

    assert found == PAYLOADS
    assert parser.is_between_events


def test_an_event_without_end_is_cut_off(monkeypatch):
    """A server that streams no events cannot fill the client's memory."""
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 10)
    parser = SseParser()

    with pytest.raises(StreamBroken, match="longer than 10 bytes"):
        parser.feed(b"data: 0123456789")
    assert not parser.is_between_events


def _event(body):
    return b"data: " + body + b"\n\n"


def test_token_events_are_timed_and_others_are_not():
    """A role chunk, an empty text and the usage chunk are no tokens."""
    meter = StreamMeter()
    chat = [
        b'{"choices":[{"delta":{"role":"assistant","content":""}}]}',
        b'{"choices":[{"delta":{"content":"a"}}]}',
    ]

    counts = [
        meter.feed(1.0, _event(chat[0])),
        meter.feed(2.0, _event(chat[1])),
        meter.feed(2.5, _event(chat[1]) + _event(chat[1])),
        meter.feed(3.0, _event(b'{"choices":[{"text":"","finish_reason":"length"}]}')),
        meter.feed(
            4.0,
            _event(
                b'{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3,'
                b'"prompt_tokens_details":{"cached_tokens":2}}}'
            )
            + _event(b"[DONE]"),
        ),
    ]

    assert counts == [0, 1, 2, 0, 0]
    assert (meter.first_s, meter.last_s, list(meter.gaps_s)) == (2.0, 2.5, [0.5, 0.0])
    assert (meter.prompt_tokens, meter.output_tokens, meter.cached_tokens) == (7, 3, 2)
    assert meter.is_done


def test_usage_without_details_leaves_the_cached_count_unknown():
    """Unknown is never zero."""
    meter = StreamMeter()

    meter.feed(0.0, _event(b'{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":"x"}}'))

    assert (meter.prompt_tokens, meter.output_tokens, meter.cached_tokens) == (7, None, None)


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        (b'{"error":{"message":"KV lost","code":500}}', StreamError, "KV lost"),
        (b'{"error":"KV lost"}', StreamError, "KV lost"),
        (b"{oops", StreamBroken, "not JSON"),
        (b"[1]", StreamBroken, "no JSON object"),
        (b'{"choices":[],"usage":3}', StreamBroken, "usage: 3"),
        (b'{"choices":3}', StreamBroken, "choices"),
    ],
)
def test_a_stream_that_goes_wrong_says_how(body, kind, message):
    """Errors inside a stream are told apart from garbage."""
    with pytest.raises(kind, match=message):
        StreamMeter().feed(0.0, _event(body))
