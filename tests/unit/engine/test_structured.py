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
from penstock.engine.serve.protocol import Api, parse
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
    call = parse(orjson.dumps(body), SETTINGS, api=api)
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
