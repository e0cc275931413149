"""Structured outputs and tool calls of simulated workers satisfy their schemas, and are equal for equal requests."""

import json

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.http.sse import EventSplitter, payload
from penstock.engine.core.requests import FinishReason
from penstock.engine.serve.answers import CompletionFormat, Finished
from penstock.engine.serve.fields import RequestError
from penstock.engine.serve.message_answers import MessageFormat
from penstock.engine.serve.protocol import Api, parse
from penstock.engine.serve.response_answers import ResponseFormat
from penstock.engine.serve.settings import ServeFlags, resolve
from penstock.engine.serve.structured import json_of

jsonschema = pytest.importorskip("jsonschema", reason="judges what is made")
SETTINGS = resolve(ServeFlags("llama", served_names=("llama",)))
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 9},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 3, "maximum": 5},
        "at": {"type": "string", "format": "date-time"},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["name", "next"],
        }
    },
    "$ref": "#/$defs/node",
}
LEAVES = st.sampled_from(
    [
        {"type": "string"},
        {"type": "string", "minLength": 12, "maxLength": 14},
        {"type": "integer", "minimum": -7, "maximum": -3},
        {"type": "number", "exclusiveMinimum": 2, "maximum": 3},
        {"type": "integer", "multipleOf": 5, "minimum": 12},
        {"type": ["boolean", "null"]},
        {"type": "null"},
        {"const": {"a": 1}},
        {"enum": [1, "x", None]},
        True,
    ]
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.fixed_dictionaries({"type": st.just("array"), "items": inner, "minItems": st.integers(0, 3)}),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3).map(
            lambda made: {"type": "object", "properties": made, "required": sorted(made)[:2]}
        ),
        st.lists(inner, min_size=1, max_size=3).map(lambda made: {"anyOf": made}),
    ),
    max_leaves=8,
)


@given(SCHEMAS, st.integers(0, 2**64 - 1))
def test_values_satisfy_their_schemas(schema, seed):
    """And the same seed makes the same value."""
    schema = {"type": "object", "properties": {"it": schema}, "required": ["it"]}
    made = json_of(schema, seed, param="response_format")
    jsonschema.validate(json.loads(made), schema)
    assert json_of(schema, seed, param="response_format") == made


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "string", "pattern": "^a$"}, "does not support the keyword pattern"),
        ({"$ref": "http://example.com/x"}, "within the schema alone"),
        ({"$ref": "#/$defs/lacking"}, "finds no #/\\$defs/lacking"),
        ({"type": "integer", "minimum": 5, "maximum": 4}, "finds no number within these bounds"),
        ({"type": "thing"}, "knows no type 'thing'"),
    ],
)
def test_what_cannot_be_satisfied_is_refused_with_the_remedy(schema, why):
    """A value that does not fit would be worse than none."""
    with pytest.raises(RequestError, match=why):
        json_of(schema, 1, param="response_format")


def test_a_recursive_schema_ends():
    """By the choice that needs no other schema."""
    jsonschema.validate(json.loads(json_of(TREE, 3, param="response_format")), TREE)


def answered(api=Api.CHAT, **fields):
    """Return a call and how its answer is encoded."""
    body = {"model": "llama", "max_tokens": 400, **fields}
    body |= {"messages": [{"role": "user", "content": "Hi"}]} if api is Api.CHAT else {"prompt": "Hi"}
    call = parse(orjson.dumps(body), SETTINGS, api=api)[0]
    reason = FinishReason.STOP if call.ends_by_stop else FinishReason.LENGTH
    return call, CompletionFormat(call, "r", 0), reason, Finished(call.output_tokens, reason, 0)


SHAPE = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER, "strict": True}}


@pytest.mark.parametrize("api", [Api.CHAT, Api.COMPLETIONS])
def test_structured_output_satisfies_its_schema_complete_and_streamed(api):
    """It ends by itself, and the stream has the same text."""
    call, made, reason, done = answered(api, response_format=SHAPE)
    (choice,) = orjson.loads(made.complete(done))["choices"]
    text = choice["message"]["content"] if api is Api.CHAT else choice["text"]
    jsonschema.validate(json.loads(text), WEATHER)
    assert choice["finish_reason"] == "stop"
    events = EventSplitter().feed(made.events(0, call.texts(0, call.output_tokens), reason))
    choices = [orjson.loads(payload(each))["choices"][0] for each in events]
    assert "".join(each["delta"]["content"] if api is Api.CHAT else each["text"] for each in choices) == text
    assert len(events) == call.output_tokens


@pytest.mark.parametrize("api", [Api.CHAT, Api.COMPLETIONS])
def test_vllms_own_form_gives_json_or_one_of_several_texts(api):
    """A schema as `response_format` has it; a choice comes as it is, and each of them for some seed."""

    def text_of(seed=0, **fields):
        _, made, _, done = answered(api, seed=seed, structured_outputs=fields)
        (choice,) = orjson.loads(made.complete(done))["choices"]
        assert choice["finish_reason"] == "stop"
        return choice["message"]["content"] if api is Api.CHAT else choice["text"]

    jsonschema.validate(json.loads(text_of(json=WEATHER)), WEATHER)
    assert isinstance(json.loads(text_of(json_object=True)), dict)
    texts = {text_of(seed, choice=["positive", "negative"]) for seed in range(20)}
    assert texts == {"positive", "negative"}


def test_a_limit_cuts_structured_output():
    """As in a real engine, whose client then reads half an object."""
    call, _, reason, _ = answered(response_format=SHAPE, max_tokens=2)
    assert (call.output_tokens, reason) == (2, FinishReason.LENGTH)


TOOLS = [
    {"type": "function", "function": {"name": "now"}},
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
]


@pytest.mark.parametrize(
    ("choice", "name", "ends"),
    [
        ("required", "now", "tool_calls"),
        ({"type": "function", "function": {"name": "weather"}}, "weather", "stop"),
    ],
)
def test_a_required_call_has_arguments_of_its_schema(choice, name, ends):
    """Complete and streamed, with the finish reasons of vLLM."""
    call, made, reason, done = answered(tools=TOOLS, tool_choice=choice)
    (answer,) = orjson.loads(made.complete(done))["choices"]
    (called,) = answer["message"]["tool_calls"]
    assert (called["type"], called["function"]["name"]) == ("function", name)
    arguments = called["function"]["arguments"]
    jsonschema.validate(json.loads(arguments), WEATHER if name == "weather" else {"type": "object"})
    assert (answer["finish_reason"], answer["message"]["content"]) == (ends, None)

    events = EventSplitter().feed(made.events(0, call.texts(0, call.output_tokens), reason))
    choices = [orjson.loads(payload(each))["choices"][0] for each in events]
    parts = [each["delta"]["tool_calls"][0] for each in choices]
    assert (parts[0]["id"], parts[0]["function"]["name"]) == (called["id"], name)
    assert "".join(each["function"]["arguments"] for each in parts) == arguments
    assert all("id" not in each for each in parts[1:])
    assert choices[-1]["finish_reason"] == ends


FORMATS = {Api.CHAT: CompletionFormat, Api.RESPONSES: ResponseFormat, Api.MESSAGES: MessageFormat}
FUNCTIONS = {
    Api.CHAT: TOOLS,
    Api.RESPONSES: [{"type": "function", **each["function"]} for each in TOOLS],
    Api.MESSAGES: [{"name": "now", "input_schema": {}}, {"name": "weather", "input_schema": WEATHER}],
}


def said(api, *turns, **fields):
    """Return the call of a request with two tools after some turns, its response, and the events of its stream."""
    roles = [{"role": role, "content": content} for role, content in turns]
    items = [turns[0][1]] if len(turns) == 1 else roles
    given = {"input": items[0] if len(items) == 1 else items} if api is Api.RESPONSES else {"messages": roles}
    limit = "max_output_tokens" if api is Api.RESPONSES else "max_tokens"
    body = {"model": "llama", limit: 400, "tools": FUNCTIONS[api], **given, **fields}
    call = parse(orjson.dumps(body), SETTINGS, api=api)[0]
    reason = FinishReason.STOP if call.ends_by_stop else FinishReason.LENGTH
    done = Finished(call.output_tokens, reason, 0)
    made = FORMATS[api](call, "resp_r", 0)
    texts = call.texts(0, call.output_tokens)
    raw = made.opening() + made.events(0, texts, reason) + made.closing(done)
    events = [orjson.loads(payload(each)) for each in EventSplitter().feed(raw) if b"[DONE]" not in each]
    return call, orjson.loads(FORMATS[api](call, "resp_r", 0).complete(done)), events


WEATHER_TOOL = {
    Api.CHAT: {"type": "function", "function": {"name": "weather"}},
    Api.RESPONSES: {"type": "function", "name": "weather"},
    Api.MESSAGES: {"type": "tool", "name": "weather"},
}


def test_a_response_calls_a_function():
    """As an item of its own, complete and in the events of a stream."""
    call, whole, events = said(Api.RESPONSES, ("user", "Hi"), tool_choice=WEATHER_TOOL[Api.RESPONSES])
    (item,) = whole["output"]
    jsonschema.validate(json.loads(item["arguments"]), WEATHER)
    assert (item["type"], item["name"], item["status"]) == ("function_call", "weather", "completed")
    assert item["id"].startswith("fc_")
    assert item["call_id"].startswith("call_")
    kinds = [each["type"].removeprefix("response.") for each in events]
    deltas = ["function_call_arguments.delta"] * call.output_tokens
    assert kinds == [
        *("created", "in_progress", "output_item.added"),
        *deltas,
        *("function_call_arguments.done", "output_item.done", "completed"),
    ]
    assert "".join(each.get("delta", "") for each in events) == item["arguments"]
    assert events[-2]["item"] == item
    assert [each["sequence_number"] for each in events] == list(range(len(events)))


def test_a_message_uses_a_tool():
    """As a block of its own, complete and in the events of a stream, which begins with an empty input."""
    _, whole, events = said(Api.MESSAGES, ("user", "Hi"), tool_choice=WEATHER_TOOL[Api.MESSAGES])
    (block,) = whole["content"]
    jsonschema.validate(block["input"], WEATHER)
    assert (block["type"], block["name"], whole["stop_reason"]) == ("tool_use", "weather", "tool_use")
    begun, *deltas = events[1:-3]
    assert begun["content_block"] == {**block, "input": {}}
    assert {each["delta"]["type"] for each in deltas} == {"input_json_delta"}
    assert json.loads("".join(each["delta"]["partial_json"] for each in deltas)) == block["input"]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


def test_a_limit_cuts_the_use_of_a_tool():
    """The input of a complete message is then empty, and the reason says why."""
    _, whole, _ = said(Api.MESSAGES, ("user", "Hi"), tool_choice=WEATHER_TOOL[Api.MESSAGES], max_tokens=2)
    assert (whole["content"][0]["input"], whole["stop_reason"]) == ({}, "max_tokens")


TURNS = [("user", "Hi"), ("assistant", "Yes"), ("user", "And the weather?")]


@pytest.mark.parametrize("api", FORMATS)
@pytest.mark.parametrize("choice", ["auto", None])
def test_a_tool_is_called_in_the_users_turn_if_the_model_decides(api, choice):
    """The one that the message names; after anything else, and where none may be called, it answers with text."""
    choices = {} if choice is None else {"tool_choice": {"type": "auto"} if api is Api.MESSAGES else "auto"}
    call, *_ = said(api, *TURNS, **choices)
    assert (call.tool.name, call.tool.is_chosen) == ("weather", True)
    none = {"type": "none"} if api is Api.MESSAGES else "none"
    assert said(api, *TURNS, tool_choice=none)[0].tool is None
    assert said(api, *TURNS[:2])[0].tool is None
    assert said(api, *TURNS, tools=[])[0].tool is None


def test_the_seed_selects_a_tool_that_the_message_does_not_name():
    """The same one for the same request, and each for some request."""
    texts = [f"question {at}" for at in range(40)]
    names = [said(Api.CHAT, ("user", text))[0].tool.name for text in texts]
    assert set(names) == {"now", "weather"}
    assert [said(Api.CHAT, ("user", text))[0].tool.name for text in texts] == names


@pytest.mark.parametrize(
    ("api", "result"),
    [
        (Api.CHAT, {"messages": [{"role": "user", "content": "weather"}, {"role": "tool", "content": "x"}]}),
        (
            Api.RESPONSES,
            {
                "input": [
                    {"role": "user", "content": "weather"},
                    {"type": "function_call_output", "call_id": "c", "output": "x"},
                ]
            },
        ),
        (
            Api.MESSAGES,
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "x"}]}
                ]
            },
        ),
    ],
)
def test_an_agents_loop_ends(api, result):
    """A tool's result is answered with text."""
    assert said(api, ("user", "weather"))[0].tool is not None
    assert said(api, ("user", "weather"), **result)[0].tool is None


@pytest.mark.parametrize("fields", [{"stop": "x"}, {"ignore_eos": True}, {"min_tokens": 5}])
def test_text_of_a_requested_length_or_end_calls_no_tool(fields):
    """A benchmark with tools gets the tokens that it asks for."""
    assert said(Api.CHAT, ("user", "weather"), **fields)[0].tool is None


def test_a_tool_whose_arguments_cannot_be_made_is_not_chosen():
    """The model answers with text; a request that requires the call is refused."""
    odd = [{"type": "function", "function": {"name": "odd", "parameters": {"pattern": "x"}}}]
    assert said(Api.CHAT, ("user", "odd"), tools=odd)[0].tool is None
    with pytest.raises(RequestError, match="does not support the keyword pattern"):
        said(Api.CHAT, ("user", "odd"), tools=odd, tool_choice="required")


def test_a_response_has_the_format_of_its_text():
    """With the schema next to the type; the response repeats the format."""
    shape = {"type": "json_schema", "name": "weather", "schema": WEATHER}
    _, whole, _ = said(Api.RESPONSES, ("user", "Hi"), tools=[], text={"format": shape})
    jsonschema.validate(json.loads(whole["output"][0]["content"][0]["text"]), WEATHER)
    assert whole["text"]["format"] == shape
    with pytest.raises(RequestError, match=r"text\.format: a simulated worker does not support"):
        said(Api.RESPONSES, ("user", "Hi"), tools=[], text={"format": {**shape, "schema": {"not": {}}}})


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"tool_choice": "required"}, "names no function of tools"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "names no function",
        ),
        ({"response_format": {"type": "json_schema"}}, "json_schema needs a schema"),
        ({"response_format": SHAPE, "stop": ["x"]}, "does not cut JSON"),
    ],
)
def test_what_cannot_be_made_is_refused(fields, why):
    """With the key at fault."""
    with pytest.raises(RequestError, match=why):
        answered(**fields)


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "array", "items": True, "minItems": 10**9}, "makes at most 10,000 values"),
        ({"type": "string", "minLength": 10**9}, "makes strings of at most 10,000 characters"),
        ({"type": "number", "multipleOf": 0, "minimum": 1}, "not a valid JSON schema"),
        ({"type": "object", "properties": ["a"]}, "not a valid JSON schema"),
        ({"type": "integer", "minimum": "two"}, "not a valid JSON schema"),
        ({"allOf": [1]}, "not a valid JSON schema"),
    ],
)
def test_a_schema_that_costs_too_much_or_is_none_is_refused(schema, why):
    """At once, with the reason, in place of gigabytes or a 500."""
    with pytest.raises(RequestError, match=why):
        json_of(schema, 1, param="response_format")


def test_nested_arrays_are_bounded_together():
    """Twelve levels of ten items each would be a million million values."""
    schema: dict = {"type": "string"}
    for _ in range(11):
        schema = {"type": "array", "items": schema, "minItems": 10}
    with pytest.raises(RequestError, match="at most 10,000 values"):
        json_of(schema, 1, param="response_format")
