"""`router.retries.continueBy: tokens`: the next worker gets the exact tokens of prompt and answer, and no client sees the ids.

The workers answer by the simulated engine's own parser and formats, as in `test_stream_continuation`.
"""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_not_resumable import CHAT, COMPLETION
from test_not_resumable import asked as request_of
from test_stream_continuation import APIS, PATIENT, Speakers, answer_to, asked, read

from penstock.core.http.sse import EventSplitter, payload
from penstock.core.simulated_tokens import token_ids
from penstock.router.proxy.continuation import EmittedPrefix, continuation_request
from penstock.router.proxy.hidden_ids import without_ids
from penstock.router.proxy.not_resumable import BY_TEXT, OF_REQUEST, takes_tokens

COMPLETIONS, CHATS = APIS
BY_TOKENS = {**PATIENT, "retries": {"minPerSecond": 1000, "continueBy": "tokens"}}
TOKENS = 24


@pytest.fixture
async def served(harness):
    """Two workers and a router that continues by tokens, and gives no worker up."""
    *workers, router = await harness.served("aggregated", "aggregated", config=BY_TOKENS)
    return Speakers(*workers), router


def places(path: str, body: bytes, step: int) -> range:
    """Return bytes of a worker's stream at which it may break: behind its first token, before its last event."""
    whole = answer_to(path, body, 0)
    first = whole.index(b'"token_ids":[')
    return range(whole.index(b"\n\n", first) + 2, whole.rindex(b'data: {"id"'), step)


def ids_of(stream: bytes) -> list[int]:
    """Return the ids that a client sees of an answer."""
    datas = [payload(event) for event in EventSplitter().feed(stream)]
    chunks = [orjson.loads(data) for data in datas if data is not None and data.startswith(b"{")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return [each for choice in choices for each in choice.get("token_ids") or ()]


CASES = {
    "completion": (COMPLETIONS, {}),
    "chat": (CHATS, {}),
    "chat that asks for ids": (CHATS, {"return_token_ids": True}),
    "chat with an open message": (
        CHATS,
        {
            "messages": [{"role": "user", "content": "Go on"}, {"role": "assistant", "content": "The"}],
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
    ),
    "chat without a prompt for the answer": (CHATS, {"add_generation_prompt": False}),
    "prompt of ids": (COMPLETIONS, {"prompt": [7, 8, 9]}),
    "with a stop": (COMPLETIONS, {"stop": ["nowhere in it"]}),
    "chat with a stop": (CHATS, {"stop": ["nowhere in it"]}),
    "with the stop string in the output": (
        COMPLETIONS,
        {"stop": ["nowhere in it"], "include_stop_str_in_output": True},
    ),
    "with a stop and ids": (COMPLETIONS, {"stop": ["nowhere in it"], "return_token_ids": True}),
}


@pytest.mark.parametrize(("path", "more"), CASES.values(), ids=CASES)
async def test_a_stream_continues_by_its_tokens_wherever_its_worker_breaks_off(served, path, more):
    """Text, end, counts, id and the client's own ids are those of an undisturbed stream; nothing twice, nothing lost."""
    speakers, router = served
    undisturbed = await asked(router, path, **more)
    expected, own_ids = read(undisturbed), ids_of(undisturbed)
    worker_body = speakers.seen[0]
    assert worker_body["return_token_ids"] is True
    step = 211
    for place in places(path, orjson.dumps(worker_body), step):
        speakers.breaks = [(place, b"")]
        speakers.seen.clear()
        got = await asked(router, path, **more)
        shown = read(got)
        assert {**shown, "identity": None} == {**expected, "identity": None}, place
        assert ids_of(got) == own_ids, place
        assert got.count(b'"prompt_token_ids":[') == bool(more.get("return_token_ids")), place
        first, rest = speakers.seen
        if first == rest:
            continue  # nothing had been shown: a retry
        limit = rest["max_tokens"]
        assert "messages" not in rest
        said = rest["prompt"][limit - TOKENS :] if limit < TOKENS else []
        prompt = rest["prompt"][: len(rest["prompt"]) - len(said)]
        if "prompt" in first:
            known = first["prompt"]
            assert prompt == (known if isinstance(known, list) else list(token_ids(known.encode())))
    assert bool(own_ids) == bool(more.get("return_token_ids"))


async def test_a_stop_string_over_the_seam_is_found(served):
    """A worker finds stop strings in its own text alone; half of one may have come before the break."""
    speakers, router = served
    whole = read(await asked(router, COMPLETIONS))["text"]
    stop = whole[36:47]
    for more in ({"stop": stop}, {"stop": stop, "include_stop_str_in_output": True}):
        speakers.breaks = []
        speakers.seen.clear()
        expected = read(await asked(router, COMPLETIONS, **more))
        assert expected["reasons"] == ["stop"]
        for place in places(COMPLETIONS, orjson.dumps(speakers.seen[0]), 97):
            speakers.breaks = [(place, b"")]
            got = read(await asked(router, COMPLETIONS, **more))
            assert {**got, "identity": None} == {**expected, "identity": None}, place


async def test_a_stream_continues_several_times(served):
    """The tokens of all workers make the prompt of the last one."""
    speakers, router = served
    expected = read(await asked(router, CHATS))
    speakers.breaks = [(2600, b""), (1500, b""), (1500, b"")]
    speakers.seen.clear()
    assert {**read(await asked(router, CHATS)), "identity": None} == {**expected, "identity": None}
    lengths = [len(each["prompt"]) for each in speakers.seen[1:]]
    assert lengths == sorted(lengths)
    assert (
        len({length + each["max_tokens"] for length, each in zip(lengths, speakers.seen[1:], strict=True)})
        == 1
    )


async def test_a_stream_that_lacks_only_its_end_gets_its_usage(served):
    """The ids show how many tokens the prompt has, although no worker has lived to count it."""
    speakers, router = served
    expected = read(await asked(router, COMPLETIONS))
    whole = answer_to(COMPLETIONS, orjson.dumps(speakers.seen[0]), 0)
    speakers.breaks = [(whole.rindex(b'data: {"id"'), b"")]
    assert {**read(await asked(router, COMPLETIONS)), "identity": None} == {**expected, "identity": None}
    assert not speakers.breaks


async def test_an_undisturbed_stream_is_a_workers_with_null_for_its_ids(served):
    """As a worker writes it that is not asked for them."""
    speakers, router = served
    got = await asked(router, COMPLETIONS)
    own = answer_to(COMPLETIONS, orjson.dumps(speakers.seen[0]), 0)
    chunks = [orjson.loads(payload(each)) for each in EventSplitter().feed(own)[:-1]]
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        for key in choice.keys() & {"token_ids", "prompt_token_ids"}:
            choice[key] = None
    shown = [orjson.loads(payload(each)) for each in EventSplitter().feed(got)[:-1]]
    assert [each["choices"] for each in shown] == [each["choices"] for each in chunks]


@pytest.mark.parametrize(
    ("path", "more", "answer"),
    [
        (CHATS, {"tools": [{"type": "function", "function": {"name": "f"}}]}, answer_to),
        (
            CHATS,
            {},
            lambda path, body, serial: answer_to(path, body.replace(b"return_token_ids", b"x"), serial),
        ),
    ],
    ids=["tools", "worker without ids"],
)
async def test_what_tokens_cannot_continue_continues_by_text(harness, path, more, answer):
    """The calls of an answer are found by the engine's chat layer; another engine may not know the key."""
    *workers, router = await harness.served("aggregated", "aggregated", config=BY_TOKENS)
    speakers = Speakers(*workers, answer=answer)
    expected = read(await asked(router, path, **more))
    speakers.breaks = [(2000, b"")]
    assert {**read(await asked(router, path, **more)), "identity": None} == {**expected, "identity": None}
    assert speakers.seen[-1]["messages"][-1]["role"] == "assistant"


async def test_prefill_workers_are_not_asked_for_ids(harness):
    """Their answer is for the router alone."""
    prefill, decode, router = await harness.served("prefill", "decode", config=BY_TOKENS)
    stream = await router.stream(max_tokens=2)
    await stream.read(limit_bytes=1 << 16)
    assert "return_token_ids" not in prefill.seen[0].body
    assert decode.seen[0].body["return_token_ids"] is True


@pytest.mark.parametrize("more", [{"stream": False}, {"n": 2}, {"response_format": {"type": "json_object"}}])
async def test_what_does_not_continue_is_sent_as_it_came(harness, more):
    """No ids are asked for in vain."""
    worker, router = await harness.served("aggregated", config=BY_TOKENS)
    await router.post(**{"stream": True, **more})
    assert "return_token_ids" not in worker.seen[0].body


REQUESTS = {
    "`/v1/responses` and `/v1/messages`": ("responses", {"input": "Tell me."}),
    "a chat with `tools`, unless `tool_choice` is `none`": ("chat/completions", CHAT | {"tools": [{"a": 1}]}),
    "images, audio, video and files": (
        "chat/completions",
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}
            ]
        },
    ),
    "a chat's `logprobs`": ("chat/completions", CHAT | {"logprobs": True}),
    "`stop` at a temperature other than 0": ("completions", COMPLETION | {"stop": ["x"]}),
    "a prompt of more than 262,144 tokens": ("completions", {"prompt": "x" * 600_000}),
}


@pytest.mark.parametrize("row", BY_TEXT, ids=lambda each: each.what)
def test_each_row_of_what_continues_by_text_has_a_case(row):
    """It takes no tokens, whatever the limit."""
    path, fields = REQUESTS[row.what]
    assert row.holds(request_of(path, **fields))
    assert not takes_tokens(request_of(path, **fields, max_tokens=8), 4096)


def test_a_chat_without_a_limit_needs_the_models_context():
    """A completion without a limit ends after 16 tokens; the rest may fill the context."""
    chat = request_of("chat/completions", **CHAT)
    assert not takes_tokens(chat, None)
    assert takes_tokens(chat, 4096)
    said = EmittedPrefix(text="abcdefgh", shown="abcdefgh", tokens=2, token_ids=(1, 2, 3, 4, 5))
    rest = continuation_request(chat, said, context_tokens=100)
    assert (rest.path, rest.body["max_tokens"]) == (COMPLETIONS, 95)
    assert rest.body.keys().isdisjoint({"messages", "max_completion_tokens"})


def test_the_newer_limit_of_a_chat_holds():
    """As in vLLM."""
    chat = request_of("chat/completions", **CHAT, max_completion_tokens=10, max_tokens=99)
    said = EmittedPrefix(tokens=4, token_ids=(1, 2, 3, 4, 5))
    assert continuation_request(chat, said).body["max_tokens"] == 6


def test_rows_that_tokens_lift_are_lifted():
    """What text refuses and tokens do not."""
    lifted = [
        ("completions", {"prompt": [1, 2, 3]}),
        ("completions", COMPLETION | {"truncate_prompt_tokens": 4}),
        ("completions", COMPLETION | {"stop": "x", "include_stop_str_in_output": True, "temperature": 0}),
        ("completions", COMPLETION | {"stop": "x", "return_token_ids": True, "temperature": 0}),
        ("chat/completions", CHAT | {"return_token_ids": True, "max_tokens": 4}),
        ("chat/completions", CHAT | {"add_generation_prompt": False, "max_tokens": 4}),
    ]
    requests = [request_of(path, **fields) for path, fields in lifted]
    assert all(takes_tokens(each, None) for each in requests)
    for row in (each for each in OF_REQUEST if not each.binds_tokens):
        assert any(row.holds(each) for each in requests), row.what


@given(st.lists(st.tuples(st.text(max_size=20), st.lists(st.integers(0, 2**32 - 1), max_size=5)), max_size=5))
def test_ids_are_hidden_and_nothing_else(events):
    """Also where a text quotes the key."""
    asked_for, plain = b"", b""
    for text, ids in events:
        choice = {"text": f'{text}"token_ids":[1]{text}', "prompt_token_ids": ids}
        asked_for += b"data: " + orjson.dumps({"choices": [{**choice, "token_ids": ids}]}) + b"\n\n"
        none = {**choice, "prompt_token_ids": None, "token_ids": None}
        plain += b"data: " + orjson.dumps({"choices": [none]}) + b"\n\n"
    assert without_ids(asked_for) == plain


@pytest.mark.parametrize(
    ("malformed", "shown"),
    [
        (b'data: {"token_ids":[1,2\n\n', b'data: {"token_ids":[1,2\n\n'),
        (b'data: {"token_ids":[1],"token_ids":[2\n\n', b'data: {"token_ids":null,"token_ids":[2\n\n'),
        (b'data: ]"token_ids":[\n\n', b'data: ]"token_ids":[\n\n'),
    ],
)
def test_a_list_of_ids_that_never_ends_is_passed_on(malformed, shown):
    """A worker's malformed event neither hangs the router nor loses a byte."""
    assert without_ids(malformed) == shown
