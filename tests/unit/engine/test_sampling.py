"""Every field's type and range is checked, so that no request can make a worker answer 500."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.core.requests import EngineRole
from penstock.engine.serve.fields import REFUSED, ChatFields, RequestError
from penstock.engine.serve.prompts import UNANSWERABLE, ResponseFields
from penstock.engine.serve.protocol import Api, parse
from penstock.engine.serve.settings import ServeFlags, resolve

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
BODIES = {Api.COMPLETIONS: {"prompt": "hello"}, Api.CHAT: CHAT, Api.RESPONSES: {"input": "hello"}}
OTHERS = ("prompt", "messages", "input", "tools", "tool_choice", "nobody_knows")
FIELDS = sorted({*ChatFields.model_fields, *ResponseFields.model_fields, *REFUSED, *UNANSWERABLE, *OTHERS})
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.fixture(scope="module")
def settings_of():
    """Make the settings of a role."""
    made = {
        role: resolve(ServeFlags("llama", "h200-llama-3.1-8b-tp1", role=role, max_model_len=1000))
        for role in EngineRole
    }
    return made.__getitem__


@pytest.fixture(scope="module")
def refused(settings_of):
    """Return the refusal of a request, or None."""

    def refuse(api=Api.COMPLETIONS, role=EngineRole.AGGREGATED, **fields):
        try:
            parse(json.dumps({**BODIES[api], **fields}).encode(), settings_of(role), api=api)
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


@given(
    params=st.dictionaries(
        st.sampled_from(
            ["do_remote_prefill", "do_remote_decode", "remote_engine_id", "remote_request_id", "remote_host",
             "remote_port", "remote_prefill_cached_tokens"]
        ),
        JSON_VALUES | st.just(True),
    ),
    role=st.sampled_from(EngineRole),
)  # fmt: skip
def test_any_hand_over_is_answered_or_refused(refused, params, role):
    """What a worker is told of another's KV is checked like all else."""
    error = refused(Api.COMPLETIONS, role, kv_transfer_params=params)

    assert error is None or error.status == 400


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("temperature", [0, 0.7, 2, None], [-0.1, "1", True, []]),
        ("top_p", [0.1, 1], [0, 1.1, -1, "x"]),
        ("top_k", [-1, 0, 50], [-2, 1.5, "1", True]),
        ("min_p", [0, 1], [-0.1, 1.1]),
        ("presence_penalty", [-2, 0, 2], [-2.1, 2.1, {}]),
        ("frequency_penalty", [-2, 2], [3, "a"]),
        ("repetition_penalty", [0.1, 1.2], [0, -1, []]),
        ("n", [1, 2, 128], [0, -1, 129, 1.5, "2", [], {}, True]),
        ("best_of", [1], [0, 2, [], {}, "1", True]),
        ("seed", [0, -5, 2**63 - 1], [2**63, 1.5, "x"]),
        ("stop", ["x", [], ["a", "b"]], ["", [""], [1], {}, 5, ["a"] * 65, "x" * 1025]),
        ("stop_token_ids", [[], [1, 2]], [1, "1", ["1"], [True]]),
        ("logit_bias", [{}, {"5": -100}], [{"a": 1}, {"5": 101}, {"5": "x"}, []]),
        ("response_format", [{"type": "text"}], [{"type": "json_object"}, {"type": "x"}, {}, "text", []]),
        ("ignore_eos", [True, False], [1, "yes"]),
        ("skip_special_tokens", [True], [0, "no"]),
        ("use_beam_search", [False], [True, "x"]),
        ("prompt_logprobs", [None], [0, 1]),
        ("guided_json", [None], [{"a": 1}, "x"]),
        ("structured_outputs", [None], [{"json": {}}]),
        ("suffix", ["", None], ["x", 5]),
        ("cache_salt", ["s"], ["", 5]),
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
    ("fields", "words"),
    [
        ({"logprobs": 21}, "at most 20"),
        ({"logprobs": True}, "valid integer"),
        ({"echo": "x"}, "valid boolean"),
    ],
)
def test_completions_have_logprobs_as_a_number(refused, fields, words):
    """And echo as a flag."""
    assert words in str(refused(**fields))
    assert refused(logprobs=0, echo=True) is None
    assert refused(logprobs=False) is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"logprobs": 5}, "valid boolean"),
        ({"top_logprobs": 2}, "`logprobs` must be set to true"),
        ({"logprobs": True, "top_logprobs": 21}, "at most 20"),
        ({"echo": True}, "echo is not supported in a chat"),
        ({"tools": {}}, "tools must be a list"),
        ({"tools": [{}]}, "tools must be a list of functions"),
        ({"tools": [{"type": "function", "function": {"name": 5}}]}, "tools must be"),
        ({"tool_choice": "auto"}, "`tools` must be set"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice must be none or auto"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "send tools"),
    ],
)
def test_chats_have_their_own_rules(refused, fields, words):
    """A call that must be made cannot be simulated; tools that may be left alone can."""
    assert words in str(refused(Api.CHAT, **fields))
    for choice in ("none", "auto", None):
        assert refused(Api.CHAT, tools=[TOOL], tool_choice=choice, logprobs=True, top_logprobs=3) is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"input": ""}, "input must be"),
        ({"input": [{}]}, "each item must be"),
        ({"input": [{"type": "reasoning"}]}, "each item must be"),
        ({"instructions": 5}, "instructions: "),
        ({"previous_response_id": "resp_1"}, "stores no responses"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"text": 5}, "text must be an object"),
        ({"include": ["file_search_call.results"]}, "reasoning.encrypted_content"),
        ({"truncation": "middle"}, "'auto' or 'disabled'"),
        ({"background": True}, "leave it out"),
        ({"max_output_tokens": 0}, "at least 1"),
        ({"temperature": -1}, "temperature"),
    ],
)
def test_responses_have_their_own_rules(refused, fields, words):
    """What would need a store or a grammar is refused."""
    assert words in str(refused(Api.RESPONSES, **fields))
    assert (
        refused(Api.RESPONSES, store=False, include=["reasoning.encrypted_content"], background=False) is None
    )


def test_a_hand_over_carries_one_answer(refused):
    """Blocks are kept for one reader."""
    params = {"do_remote_decode": True}

    assert "one prompt and n=1" in str(refused(role=EngineRole.PREFILL, n=2, kv_transfer_params=params))
    assert "one prompt and n=1" in str(
        refused(role=EngineRole.PREFILL, prompt=["a", "b"], kv_transfer_params=params)
    )


def test_tools_are_part_of_the_prompt(settings_of):
    """As a template writes them: they count as tokens, and come first."""
    body = json.dumps({**CHAT, "tools": [TOOL]}).encode()
    (choice,) = parse(body, settings_of(EngineRole.AGGREGATED), api=Api.CHAT).choices

    assert choice.prompt.startswith(b'<|start_header_id|>system<|end_header_id|>\n\n[{"type":"function"')


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
        parse(body, settings_of(EngineRole.AGGREGATED), api=api)
