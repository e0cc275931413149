"""What requests may say, and how refusals are worded."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.core.requests import EngineRole
from penstock.engine.serve.fields import REFUSED, ChatFields, RequestError
from penstock.engine.serve.protocol import Api, parse
from penstock.engine.serve.response_fields import ResponseFields
from penstock.engine.serve.settings import ServeFlags, resolve
from penstock.engine.serve.words import WORDS, find_stop, words


@pytest.fixture(scope="module")
def settings():
    """A worker with room for 100 tokens."""
    return resolve(
        ServeFlags("llama", "h200-llama-3.1-8b-tp1", max_model_len=100, served_names=("llama", "alias"))
    )


@pytest.fixture(scope="module")
def settings_of():
    """Make the settings of a role, with room for 1,000 tokens."""
    made = {
        role: resolve(ServeFlags("llama", "h200-llama-3.1-8b-tp1", role=role, max_model_len=1000))
        for role in EngineRole
    }
    return made.__getitem__


def completion(settings, **fields):
    """Parse a completion."""
    return parse(json.dumps({"prompt": "abcdefgh", **fields}).encode(), settings, api=Api.COMPLETIONS)[0]


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [("abcd", 1), ("abcde", 2), ("é", 1), ([1, 2, 3], 3), (["abcd"], 1), ([[5, 6]], 2), ("x" * 396, 99)],
)
def test_prompts_are_counted_in_pieces_of_four_bytes(settings, prompt, tokens):
    """Text counts its UTF-8 bytes, token ids count themselves."""
    assert completion(settings, prompt=prompt, max_tokens=1).prompt_tokens == tokens


def test_defaults_of_a_completion(settings):
    """16 tokens at most, not streamed, first served name."""
    call = completion(settings, ignore_eos=True)
    assert (call.output_tokens, call.ends_by_stop, call.stream, call.model) == (16, False, False, "llama")
    assert completion(settings, model="alias").model == "alias"


def test_chat_counts_rendered_messages(settings):
    """Roles and markers are part of the prompt; text parts are joined; the rest of the context is the limit."""
    body = {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]},
            {"role": "assistant", "content": None},
        ],
        "ignore_eos": True,
    }
    call = parse(json.dumps(body).encode(), settings, api=Api.CHAT)[0]
    assert b"<|start_header_id|>user<|end_header_id|>\n\nHello<|eot_id|>" in call.prompt
    assert call.prompt.endswith(b"<|start_header_id|>assistant<|end_header_id|>\n\n")
    assert call.prompt_tokens == -(-len(call.prompt) // 4)
    assert call.output_tokens == 100 - call.prompt_tokens


def test_output_is_cut_at_the_context(settings):
    """As vLLM does: a limit that the context has no room for is lowered, not refused."""
    assert completion(settings, prompt="x" * 40, max_tokens=99, ignore_eos=True).output_tokens == 90


@pytest.mark.parametrize(
    ("fields", "expected"), [({"max_completion_tokens": 3, "max_tokens": 9}, 3), ({"max_tokens": 9}, 9)]
)
def test_newer_limit_wins_in_chat(settings, fields, expected):
    """max_completion_tokens goes before max_tokens."""
    body = {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True, **fields}
    assert parse(json.dumps(body).encode(), settings, api=Api.CHAT)[0].output_tokens == expected


def test_the_model_ends_by_itself_reproducibly(settings):
    """Without ignore_eos the length depends on the prompt only; min_tokens and max_tokens bound it."""
    lengths = [completion(settings, prompt=f"prompt {n}", max_tokens=90).output_tokens for n in range(200)]
    assert lengths == [
        completion(settings, prompt=f"prompt {n}", max_tokens=90).output_tokens for n in range(200)
    ]
    assert len(set(lengths)) > 20
    assert 1 <= min(lengths) < 20
    assert max(lengths) == 90
    bounded = [completion(settings, prompt=f"prompt {n}", max_tokens=90, min_tokens=50) for n in range(200)]
    assert min(call.output_tokens for call in bounded) == 50
    assert {call.ends_by_stop for call in bounded} == {True, False}


def test_prefill_role_pins_and_runs_to_its_limit(settings_of):
    """do_remote_decode is honoured by prefill workers only."""
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    call = completion(settings_of("prefill"), max_tokens=1, kv_transfer_params=params)
    assert (call.pin, call.ends_by_stop, call.remote) == (True, False, None)
    assert not completion(settings_of("aggregated"), kv_transfer_params=params).pin
    assert not completion(settings_of("decode"), kv_transfer_params=params).pin


REMOTE = {
    "do_remote_prefill": True,
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "remote_host": "10.0.0.1",
    "remote_port": "8100",
}


def test_decode_role_fetches(settings_of):
    """do_remote_prefill is honoured by decode workers only."""
    call = completion(settings_of("decode"), kv_transfer_params=REMOTE)
    assert (call.remote.engine_id, call.remote.request_id, call.remote.ranks) == ("e", "r", 1)
    assert call.remote.notify_url("http") == "http://10.0.0.1:8100/kv/notify"
    assert completion(settings_of("prefill"), kv_transfer_params=REMOTE).remote is None


@pytest.mark.parametrize("missing", sorted(REMOTE.keys() - {"do_remote_prefill"}))
def test_incomplete_hand_over_is_refused(settings_of, missing):
    """A decode worker that cannot find the KV says which fields it needs."""
    for value in (None, "", {}):
        with pytest.raises(RequestError, match="a remote prompt needs"):
            completion(settings_of("decode"), kv_transfer_params={**REMOTE, missing: value})


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"model": "gpt"}, 404, "The model `gpt` does not exist. Valid aliases: "),
        ({"model": 5}, 400, "model: Input should be a valid string"),
        ({"best_of": 3}, 400, "best_of must be at most 1, got 3"),
        ({"n": 129}, 400, "n must be at most 128, got 129"),
        ({"prompt": ""}, 400, "at least one token"),
        ({"prompt": None}, 400, "prompt: Field required"),
        ({"prompt": ["a", "b"]}, 400, "prompt: must be one string or one list of token ids"),
        ({"prompt": [-1]}, 400, "token ids must be in"),
        ({"prompt": ["a", 1]}, 400, "prompt: must be one string"),
        ({"prompt": [True]}, 400, "prompt: must be one string"),
        (
            {"prompt": "x" * 404},
            400,
            "maximum context length is 100 tokens. However, your prompt contains 101 input",
        ),
        (
            {"prompt": "x" * 400},
            400,
            r"max_tokens must be at least 1, got 0\. \(parameter=max_tokens, value=0\)",
        ),
        ({"max_tokens": 101}, 400, "max_tokens=101 cannot be greater than max_model_len=100"),
        ({"max_tokens": 0}, 400, "max_tokens must be at least 1, got 0"),
        ({"max_tokens": 1.5}, 400, "max_tokens: Input should be a valid integer"),
        ({"max_tokens": 5, "min_tokens": 6}, 400, "less than or equal to max_tokens=5, got 6"),
        ({"min_tokens": -1}, 400, "min_tokens must be at least 0"),
        ({"priority": 3}, 400, "Got priority 3 but Priority scheduling is not enabled"),
        ({"stream": "yes"}, 400, "stream: Input should be a valid boolean"),
        ({"stream_options": {"include_usage": True}}, 400, "only be defined when `stream=True`"),
        ({"stream_options": 1, "stream": True}, 400, "stream_options must be an object"),
        ({"kv_transfer_params": []}, 400, "kv_transfer_params must be an object"),
    ],
)
def test_refusals(settings, fields, status, message):
    """Each refusal has vLLM's status, a type and a message with the bound."""
    with pytest.raises(RequestError, match=message) as caught:
        completion(settings, **fields)
    error = json.loads(caught.value.body())["error"]
    assert caught.value.status == error["code"] == status
    assert error["type"] == ("NotFoundError" if status == 404 else "BadRequestError")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"'])
def test_bodies_that_are_no_object(settings, body):
    """Malformed JSON and other JSON are refused alike."""
    with pytest.raises(RequestError, match="JSON"):
        parse(body, settings, api=Api.COMPLETIONS)[0]


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        "hi",
        ["hi"],
        [{"content": "x"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{}]}],
    ],
)
def test_messages_that_cannot_be_rendered(settings, messages):
    """Only roles with text are messages."""
    with pytest.raises(RequestError, match="messages"):
        parse(json.dumps({"messages": messages}).encode(), settings, api=Api.CHAT)[0]


CHAT = {"messages": [{"role": "user", "content": "hi"}]}
BODIES = {
    Api.COMPLETIONS: {"prompt": "hello"},
    Api.CHAT: CHAT,
    Api.RESPONSES: {"input": "hello"},
    Api.MESSAGES: {**CHAT, "max_tokens": 16},
}
OTHERS = ("prompt", "messages", "input", "tools", "tool_choice", "nobody_knows")
FIELDS = sorted(
    {*ChatFields.model_fields, *ResponseFields.model_fields, "max_completion_tokens", *REFUSED, *OTHERS}
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]


@pytest.fixture(scope="module")
def refused(settings_of):
    """Return the refusal of a request, or None."""

    def refuse(api=Api.COMPLETIONS, role=EngineRole.AGGREGATED, **fields):
        try:
            parse(json.dumps({**BODIES[api], **fields}).encode(), settings_of(role), api=api)[0]
        except RequestError as error:
            return error
        return None

    return refuse


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
    | st.sampled_from(["auto", "none", "text", "json_object", "function", "message"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.text(max_size=3) | st.sampled_from(["type", "role", "content", "function", "name", "format"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)


@given(
    api=st.sampled_from(Api),
    role=st.sampled_from(EngineRole),
    fields=st.dictionaries(st.sampled_from(FIELDS), JSON_VALUES, min_size=1, max_size=4),
)
def test_any_value_of_any_field_is_answered_or_refused(refused, api, role, fields):
    """Never another error; a refusal names a field and has OpenAI's shape."""
    error = refused(api, role, **fields)

    if error is not None:
        body = json.loads(error.body())["error"]
        assert (error.status in {400, 404}, set(body)) == (True, {"message", "type", "param", "code"})
        assert body["message"]


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("temperature", [0, 0.7, 2, None], [-0.1, "1", True, []]),
        ("top_p", [0.1, 1], [0, 1.1, -1, "x"]),
        ("top_k", [-1, 0, 50], [-2, 1.5, "1", True]),
        ("n", [1, 128], [0, 129, 1.5, "1", [], {}, True]),
        ("logprobs", [None, 0, 20], [21, -1, True]),
        ("echo", [False], [True, 1]),
        ("seed", [0, -5, 2**63 - 1], [2**63, 1.5, "x"]),
        ("stop", ["x", [], ["a", "b"]], ["", [""], [1], {}, 5, ["a"] * 65, "x" * 1025]),
        ("stop_token_ids", [[]], [[1]]),
        ("logit_bias", [{}, {"5": -100}], [{"a": 1}, {"5": 101}, {"5": "x"}, []]),
        ("response_format", [{"type": "text"}, {"type": "json_object"}], [{"type": "x"}, {}, "text", []]),
        ("prompt_logprobs", [None], [0, 1]),
        (
            "structured_outputs",
            [None, {"json": {"type": "object"}}, {"json_object": True}, {"choice": ["a", "b"]}],
            [{}, [], {"regex": "a"}, {"choice": []}, {"choice": ["ä"]}, {"json": {}, "choice": ["a"]}],
        ),
        ("user", ["", "me"], [5, {}]),
    ],
)
def test_types_and_ranges_are_vllms(refused, name, good, bad):
    """The ends of each range; refusals name the field."""
    assert [value for value in good if refused(**{name: value})] == []
    for value in bad:
        error = refused(**{name: value})
        assert error is not None, value
        assert error.param.startswith(name)
        assert name in str(error)


@pytest.mark.parametrize(
    ("api", "fields", "words"),
    [
        (Api.CHAT, {"top_logprobs": 21}, "top_logprobs"),
        (Api.CHAT, {"tools": {}}, "tools: Input should be a valid list"),
        (
            Api.CHAT,
            {"tools": [TOOL], "tool_choice": "any"},
            "knows none, auto, required",
        ),
        (Api.RESPONSES, {"tools": [TOOL], "tool_choice": "any"}, "knows none, auto, required"),
        (Api.RESPONSES, {"tools": [], "tool_choice": "required"}, "names no function of tools"),
        (Api.RESPONSES, {"n": 2}, "n must be at most 1"),
        (Api.MESSAGES, {"tool_choice": {"type": "required"}}, "knows none, auto, required"),
        (Api.MESSAGES, {"tool_choice": {"type": "tool"}}, "needs the name of a tool"),
        (Api.CHAT, {"response_format": {"type": "grammar"}}, "text, json_object and json_schema"),
        (Api.CHAT, {"messages": IMAGE}, "this model takes no images; send text alone"),
        (Api.CHAT, {"functions": [{"name": "f"}]}, "send tools"),
        (Api.RESPONSES, {"input": []}, "input: List should have at least 1 item"),
        (Api.RESPONSES, {"input": [{}]}, "input.0.role: Field required"),
        (Api.RESPONSES, {"input": [{"type": "reasoning"}]}, "input.0: must be a message, a function_call"),
        (Api.RESPONSES, {"instructions": 5}, "instructions: "),
        (Api.RESPONSES, {"previous_response_id": "resp_1"}, "stores no responses"),
        (Api.RESPONSES, {"text": {"format": {"type": "json_schema"}}}, "text.format"),
        (Api.RESPONSES, {"text": 5}, "text must be an object"),
        (Api.RESPONSES, {"include": ["file_search_call.results"]}, "reasoning.encrypted_content"),
        (Api.RESPONSES, {"truncation": "middle"}, "'auto' or 'disabled'"),
        (Api.RESPONSES, {"background": True}, "leave it out"),
        (Api.RESPONSES, {"max_output_tokens": 0}, "at least 1"),
        (Api.RESPONSES, {"temperature": -1}, "temperature"),
    ],
)
def test_each_api_has_rules_of_its_own(refused, api, fields, words):
    """A call that must be made, a store and a grammar cannot be simulated."""
    assert words in str(refused(api, **fields))


@pytest.mark.parametrize(
    ("api", "fields"),
    [
        (Api.CHAT, {"logprobs": False, "top_logprobs": 0}),
        *((Api.CHAT, {"tools": [TOOL], "tool_choice": choice}) for choice in ("none", "auto", None)),
        (Api.RESPONSES, {"store": False, "include": ["reasoning.encrypted_content"], "background": False}),
    ],
)
def test_what_asks_for_nothing_more_is_answered(refused, api, fields):
    """Tools that may be left alone, and what clients always send."""
    assert refused(api, **fields) is None


def test_tools_are_part_of_the_prompt(settings_of):
    """As a template writes them: they count as tokens, and come first."""
    body = json.dumps({**CHAT, "tools": [TOOL]}).encode()
    call = parse(body, settings_of(EngineRole.AGGREGATED), api=Api.CHAT)[0]

    assert call.prompt.startswith(b'<|start_header_id|>system<|end_header_id|>\n\n[{"type":"function"')


@pytest.mark.parametrize(
    ("api", "fields"),
    [
        (Api.CHAT, {"tools": [{**TOOL, "deep": "NESTED"}]}),
        (Api.CHAT, {"messages": [{"role": "assistant", "tool_calls": ["NESTED"]}]}),
        (Api.RESPONSES, {"tools": [{"type": "function", "name": "f", "deep": "NESTED"}]}),
        (Api.RESPONSES, {"input": [{"type": "function_call", "deep": "NESTED"}]}),
        (Api.RESPONSES, {"metadata": {"deep": "NESTED"}}),
    ],
)
def test_what_is_too_deep_to_be_written_again_is_refused(settings_of, api, fields):
    """JSON of 300 levels can be read, but neither rendered nor answered with."""
    body = json.dumps({**BODIES[api], **fields}).replace('"NESTED"', "[" * 300 + "]" * 300).encode()

    with pytest.raises(RequestError, match=r"cannot be rendered|metadata.deep: "):
        parse(body, settings_of(EngineRole.AGGREGATED), api=api)[0]


SALT = 7


def test_words_need_no_escape_and_do_not_depend_on_how_they_are_cut():
    """256 different words of 4 ASCII bytes, all of which come before one comes again."""
    whole = words(SALT, 0, 300)
    assert len(set(whole)) == len(set(WORDS)) == 256
    assert words(SALT, 0, 100) + words(SALT, 100, 300) == whole
    assert all(json.dumps(word.decode()) == f'"{word.decode()}"' and len(word) == 4 for word in WORDS)


@given(st.integers(0, 300), st.integers(1, 30), st.integers(0, 40))
def test_a_stop_is_where_the_text_first_holds_it(start, length, min_tokens):
    """Found without writing the text; the token that completes it is the last. Later texts hold it too late."""
    text = b"".join(words(SALT, 0, 1000)).decode()
    string = text[start : start + length]
    at = text.find(string)
    while -(-(at + length) // 4) < min_tokens:
        at = text.find(string, at + 1)
    tokens = -(-(at + length) // 4)

    assert find_stop(SALT, ["never said", string], 1000, min_tokens=min_tokens) == (tokens, at, string)
    assert find_stop(SALT, [string], tokens - 1, min_tokens=min_tokens) is None
