import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api import BreakerConfig, Role
from penstock.core.errors import StreamBroken, WrongAnswer
from penstock.router.core.retries import Assignment
from penstock.router.core.worker import WorkerPool, WorkerSpec
from penstock.router.metrics import RouterMetrics
from penstock.router.proxy.kv_transfer import PrefillResponse
from penstock.router.proxy.stream import RelayMeter

ROLE = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
DONE = b"data: [DONE]\n\n"


def _event(chunk):
    return b"data: " + orjson.dumps(chunk) + b"\n\n"


def _token(text="x", **more):
    return _event({"choices": [{"index": 0, "text": text, "finish_reason": None}], **more})


def _usage(cached=100):
    usage = {"prompt_tokens": 100, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": cached}}
    return _event({"choices": [], "usage": usage})


def _prefilled(cached_tokens):
    return PrefillResponse(None, None, cached_tokens, None)


def _meter(correction=None):
    fleet = WorkerPool(BreakerConfig())
    fleet.apply([WorkerSpec("w", Role.DECODE, "http://127.0.0.1:9")])
    metrics = RouterMetrics()
    assignment = Assignment(None, fleet.get("w"), 100, now_s=0)
    meter = RelayMeter(
        metrics,
        assignment,
        on_first_token=lambda: None,
        arrived_real_s=0,
        dispatched_real_s=0,
        speed=1,
        prefilled=correction,
    )
    return meter, metrics, assignment


def _total(histogram):
    return histogram.cumulative()[-1]


def test_the_first_token_is_ttft_and_the_others_are_gaps():
    """Three tokens in two reads: one TTFT, two gaps, three tokens in flight; a chat's first event names the role alone."""
    meter, metrics, assignment = _meter()
    for data in (_event(ROLE), _token(), _token() + _token(), _usage(), DONE):
        assert meter.observe(data) is data

    assert (_total(metrics.ttft), _total(metrics.itl), meter.tokens) == (1, 2, 3)
    assert assignment.tokens == 103
    assert meter.usage["completion_tokens"] == 3


def test_the_time_before_the_dispatch_counts_for_ttft_alone():
    """Arrived ten seconds before its dispatch: the same first token is in both histograms, ten seconds later in one."""
    meter, metrics, _ = _meter()
    meter.dispatched_real_s = meter.arrived_real_s + 10.0
    meter.observe(_token() + _token())

    assert _total(metrics.dispatched_ttft) == _total(metrics.ttft) == 1
    assert metrics.ttft.total - metrics.dispatched_ttft.total == pytest.approx(10.0)


def test_the_gaps_between_events_of_several_choices_are_not_measured():
    """Two choices get a token each at a time, so half of the gaps would be zero; the tokens count all the same."""
    meter, metrics, assignment = _meter()
    meter.is_single = False
    for _ in range(3):
        for index in range(2):
            meter.observe(_event({"choices": [{"index": index, "delta": {"content": " word"}}]}))

    assert (_total(metrics.ttft), _total(metrics.itl), meter.tokens) == (1, 0, 6)
    assert assignment.tokens == 106
    assert assignment.worker.speed.output_tokens == 0


@pytest.mark.parametrize(
    "chunk",
    [
        {"choices": [{"delta": {"reasoning_content": "x"}}]},
        {"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]},
        {"choices": [{"text": "", "finish_reason": "stop"}]},
    ],
)
def test_thoughts_tool_calls_and_ends_are_tokens(chunk):
    """Whatever a model generates first ends the wait for it."""
    meter, metrics, _ = _meter()
    meter.observe(_event(chunk))

    assert _total(metrics.ttft) == 1


@pytest.mark.parametrize(
    "data", [b": ping\n\n", DONE, b"data: nonsense\n\n", b'data: "text"\n\n', b"\n\n", _usage()]
)
def test_what_is_no_token_passes_uncounted(data):
    """Comments, ends, garbage and usage."""
    meter, metrics, _ = _meter()

    assert meter.observe(data) == data
    assert (meter.tokens, _total(metrics.ttft)) == (0, 0)


def test_null_usage_on_every_event_is_no_usage():
    """As vLLM and OpenAI send it when usage is asked for."""
    meter, _, _ = _meter(_prefilled(16))
    token = _token(usage=None)
    for _ in range(3):
        assert meter.observe(token + token) == token + token

    assert (meter.tokens, meter.usage) == (6, None)


@pytest.mark.parametrize(("cached", "details"), [(16, {"cached_tokens": 16}), (None, None)])
def test_only_the_usage_event_is_rewritten(cached, details):
    """It carries the prefill's count; every other byte is the worker's."""
    meter, _, _ = _meter(_prefilled(cached))
    token = b'data: {"choices":[{"text":"\\u00fc  spaced"}], "x" : 1.50}\n\n'

    sent = meter.observe(token + token + _usage() + DONE)

    assert sent.startswith(token + token)
    assert sent.endswith(DONE)
    (rewritten,) = sent.removeprefix(token + token).removesuffix(DONE).split(b"\n\n")[:-1]
    usage = orjson.loads(rewritten.removeprefix(b"data: "))["usage"]
    assert usage == {"prompt_tokens": 100, "completion_tokens": 3, "prompt_tokens_details": details}
    assert meter.usage == usage


STREAM = [_event(ROLE), _token(), _token("\n\ndata: {"), b": ping\n\n", _token(), _usage(), DONE]


@given(st.lists(st.integers(1, 40), max_size=60), st.booleans())
def test_pieces_of_any_size_give_the_same_bytes_and_counts(sizes, correct):
    """However the network cuts the stream: the same events, tokens and usage, and no byte lost."""
    correction = _prefilled(16) if correct else None
    body = b"".join(STREAM)
    whole_meter, _, _ = _meter(correction)
    expected = whole_meter.observe(body)
    meter, metrics, assignment = _meter(correction)
    sent = b""
    for size in sizes:
        sent += meter.observe(body[:size]) if body else b""
        body = body[size:]
    sent += meter.observe(body) if body else b""

    assert sent + meter.take_remaining() == expected
    assert (meter.tokens, assignment.tokens) == (3, 103)
    assert meter.usage == whole_meter.usage
    assert _total(metrics.ttft) == 1
    assert _total(metrics.itl) <= 2


def test_bytes_of_an_unfinished_event_are_not_lost():
    """Without a correction they pass at once; with one they follow when the stream ends in order."""
    plain, _, _ = _meter()
    correcting, _, _ = _meter(_prefilled(16))

    assert plain.observe(b"data: {") == b"data: {"
    assert plain.is_mid_event
    assert plain.take_remaining() == b""
    assert correcting.observe(b"data: {") == b""
    assert correcting.take_remaining() == b"data: {"


@pytest.mark.parametrize(
    ("pieces", "done", "complete"),
    [
        ([_token(), DONE], True, True),
        ([_token() + DONE], True, True),
        ([_token(), b"data: [DO", b"NE]\n\n"], True, True),
        ([_token(), b"data: [DONE]"], False, True),
        ([_token(), b"data: [DONE]\n"], False, True),
        ([_token()], False, False),
        ([_token(text="[DONE]")], False, False),
        ([_token(), b"data: [DO"], False, False),
    ],
)
@pytest.mark.parametrize("correct", [False, True])
def test_only_done_completes_a_stream(pieces, done, complete, correct):
    """However it is cut, and without the blank line behind it; text that says so does not."""
    meter, _, _ = _meter(_prefilled(16) if correct else None)
    for piece in pieces:
        meter.observe(piece)

    assert (meter.is_done, meter.is_complete) == (done, complete)


def test_usage_that_cannot_be_written_again_is_a_wrong_answer():
    """JSON nested deeper than the encoder goes must not end the relay in an exception of its own."""
    meter, _, _ = _meter(_prefilled(16))
    deep = b'{"a":' * 300 + b"1" + b"}" * 300

    with pytest.raises(WrongAnswer):
        meter.observe(b'data: {"choices":[],"usage":{"prompt_tokens":1},"deep":' + deep + b"}\n\n")


def test_an_endless_event_breaks_the_stream():
    """A worker must not fill the router's memory."""
    meter, _, _ = _meter(_prefilled(16))
    for _ in range(4):
        meter.observe(b"data: " + b"x" * 1_000_000)

    with pytest.raises(StreamBroken):
        meter.observe(b"x" * 1_000_000)


def _framed(event):
    return b"%x\r\n%b\r\n" % (len(event), event), len(b"%x\r\n" % len(event))


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"id":"1","choices":[{"text":"%d"}]}\n\n',
        b'data: {"id":"1","choices":[{"text":"%d"}],"usage":null}\n\n',
        b'data: {"choices":[{"delta":{"content":"%d"}}],"created":1,"id":"1"}\n\n',
        b'data: {"created":%d,"choices":[{"text":"x"}]}\n\n',
        b'data: {"x": "%d", "choices": [{"text": "x"}]}\n\n',
    ],
)
def test_whole_chunks_pass_as_they_came(event):
    """Whatever a worker's events begin and end with, a chunk of one is a token and is sent on as the same object."""
    meter, metrics, _ = _meter(_prefilled(16))
    for number in range(4):
        framed, at = _framed(event % number)
        assert meter.observe(framed, at) is framed
    framed, at = _framed(event % 5 + event % 6)
    assert meter.observe(framed, at) is framed

    assert (meter.tokens, _total(metrics.itl), meter.has_error) == (6, 5, False)


def test_what_follows_usual_events_in_chunks_is_still_read():
    """Usage is corrected, without its chunk's frame; an error and the end are noticed; none of them is a token."""
    token = b'data: {"choices":[{"text":"x"}]}\n\n'
    usage = b'data: {"choices":[{"text":""}],"usage":{"prompt_tokens":9}}\n\n'
    meter, _, _ = _meter(_prefilled(16))
    for _ in range(3):
        meter.observe(*_framed(token))
    sent = meter.observe(*_framed(usage))
    meter.observe(*_framed(b'data: {"error":{"message":"x"}}\n\n'))
    meter.observe(*_framed(DONE))

    found = orjson.loads(sent.removeprefix(b"data: "))["usage"]
    assert found["prompt_tokens_details"] == {"cached_tokens": 16}
    assert (meter.tokens, meter.has_error, meter.is_done) == (3, True, True)
