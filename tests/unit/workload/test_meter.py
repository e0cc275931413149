"""Token times, usage, and streams that end badly."""

import pytest

from penstock.core.errors import StreamBroken
from penstock.workload.exchange import MAX_EVENT_BYTES, ClientStreamMeter, StreamError


def test_an_event_without_end_is_cut_off():
    """A server that streams no events cannot fill the client's memory."""
    measured = ClientStreamMeter()

    with pytest.raises(StreamBroken, match=f"exceeds {MAX_EVENT_BYTES} bytes"):
        measured.feed(0.0, b"data: " + b"0" * MAX_EVENT_BYTES)


def _event(body):
    return b"data: " + body + b"\n\n"


def test_token_events_are_timed_and_others_are_not():
    """A role chunk, an empty text and the usage chunk are no tokens."""
    meter = ClientStreamMeter()
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
        ClientStreamMeter().feed(0.0, _event(body))
