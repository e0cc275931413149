"""What cannot be continued exactly ends as it did, for a reason that is in one table, in the docs too."""

import re
from pathlib import Path

import orjson
import pytest

from penstock.router.proxy.completion import parse_completion
from penstock.router.proxy.continuation import emitted_prefix
from penstock.router.proxy.not_resumable import (
    ENDING,
    NO_IDS,
    NOT_KEPT,
    OF_REQUEST,
    OF_STREAM,
    STARTED_PART,
    refusal_of,
)
from penstock.router.proxy.stream_record import RecordedBytes, StreamRecord

ROOT = Path(__file__).parents[3]
COMPLETION = {"prompt": "Tell me of the sea."}
CHAT = {"messages": [{"role": "user", "content": "Tell me of the sea."}]}
IDS = {"return_token_ids": True}
GRAMMARS = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")


def asked(path, **fields):
    """Return a request as the router has it."""
    raw = orjson.dumps({"model": "llama", "stream": True} | fields)
    return parse_completion(f"/v1/{path}", b"application/json", raw, model="llama")


CASES = [
    (
        "`/v1/responses` with tools, `text.format`, `top_logprobs` or an earlier response",
        [
            ("responses", {"input": "Tell me."} | fields)
            for fields in (
                {"tools": [{"type": "function", "name": "f"}]},
                {"text": {"format": {"type": "json_object"}}},
                {"top_logprobs": 2},
                {"previous_response_id": "resp_1"},
            )
        ],
    ),
    (
        "`/v1/messages` with tools, `thinking`, `output_config`, `stop_sequences` or more than text",
        [
            ("messages", CHAT | {"max_tokens": 8} | fields)
            for fields in (
                {"tools": [{"name": "f"}]},
                {"thinking": {"type": "enabled"}},
                {"output_config": {"effort": "low"}},
                {"stop_sequences": ["x"]},
                {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
                {"messages": [*CHAT["messages"], {"role": "assistant", "content": "The"}]},
                {"messages": [{"role": "system", "content": "x"}, *CHAT["messages"]]},
            )
        ],
    ),
    (
        "`n`, `best_of`, several prompts",
        [
            ("completions", COMPLETION | {"n": 2}),
            ("completions", COMPLETION | {"best_of": 2}),
            ("completions", {"prompt": ["a", "b"]}),
            ("chat/completions", CHAT | {"n": 2}),
        ],
    ),
    ("`use_beam_search`", [("chat/completions", CHAT | {"use_beam_search": True})]),
    ("`response_format`", [("chat/completions", CHAT | {"response_format": {"type": "json_object"}})]),
    (
        "`structured_outputs`, `guided_json`, `guided_regex`, `guided_choice`, `guided_grammar`",
        [("chat/completions", CHAT | {key: {"a": "b"}}) for key in GRAMMARS],
    ),
    (
        "`tool_choice` that requires a call",
        [
            ("chat/completions", CHAT | {"tool_choice": choice})
            for choice in ("required", {"type": "function", "function": {"name": "f"}})
        ],
    ),
    (
        "`presence_penalty`, `frequency_penalty`, `bad_words`",
        [
            ("completions", COMPLETION | fields)
            for fields in ({"presence_penalty": 1}, {"frequency_penalty": -0.5}, {"bad_words": ["no no"]})
        ],
    ),
    ("`echo`", [("completions", COMPLETION | {"echo": True})]),
    ("`suffix`", [("completions", COMPLETION | {"suffix": "end"})]),
    ("`prompt_logprobs`", [("completions", COMPLETION | {"prompt_logprobs": 1})]),
    ("`truncate_prompt_tokens`", [("completions", COMPLETION | {"truncate_prompt_tokens": 4})]),
    (
        "`stop` with `include_stop_str_in_output`",
        [("completions", COMPLETION | {"stop": "x", "include_stop_str_in_output": True})],
    ),
    ("`stop` with `return_token_ids`", [("completions", COMPLETION | IDS | {"stop": ["x"]})]),
    ("a chat's `return_token_ids`", [("chat/completions", CHAT | IDS)]),
    ("`prompt_embeds`", [("completions", {"prompt_embeds": "AAAA"})]),
    ("a prompt of token ids without `return_token_ids`", [("completions", {"prompt": [1, 2, 3]})]),
    ("`add_generation_prompt: false`", [("chat/completions", CHAT | {"add_generation_prompt": False})]),
    ("`include_reasoning: false`", [("chat/completions", CHAT | {"include_reasoning": False})]),
]


@pytest.mark.parametrize(("what", "requests"), CASES, ids=[what for what, _ in CASES])
def test_what_a_request_asks_for_that_cannot_go_on_says_why(what, requests):
    """Each way to ask for it is found, and the log has the row's words."""
    reasons = {each.what: str(each) for each in OF_REQUEST}
    assert {refusal_of(asked(path, **fields)) for path, fields in requests} == {reasons[what]}


def test_every_row_has_a_case():
    """A reason that no request meets would be no reason."""
    assert [what for what, _ in CASES] == [each.what for each in OF_REQUEST]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("completions", COMPLETION | {"stop": ["x"], "logprobs": 2, "repetition_penalty": 1.2, "seed": 3}),
        ("completions", {"prompt": [1, 2, 3]} | IDS),
        ("messages", CHAT | {"max_tokens": 8, "system": "Be brief."}),
        ("responses", {"input": "Tell me.", "tools": [], "text": {"format": {"type": "text"}}}),
        ("completions", {"prompt": ["only one"], "presence_penalty": 0, "echo": False, "n": 1}),
        (
            "chat/completions",
            CHAT | {"logprobs": True, "top_logprobs": 2, "tools": [{}], "tool_choice": "auto"},
        ),
        ("chat/completions", CHAT | {"response_format": {"type": "text"}, "include_reasoning": True}),
        (
            "chat/completions",
            CHAT | {"add_generation_prompt": False, "continue_final_message": True},
        ),
    ],
)
def test_what_can_go_on_is_refused_for_nothing(path, fields):
    """What counts or shapes nothing over the seam does not end a stream."""
    assert refusal_of(asked(path, **fields)) == ""


def test_what_has_no_stream_has_no_rest():
    """Embeddings and the like are complete at once."""
    assert refusal_of(asked("embeddings", input="a", stream=False)) == "its answer is complete at once"


def kept_of(request, *choices, bound_bytes=1 << 20):
    """Return the record of a stream of events with one choice each."""
    kept = StreamRecord(request, RecordedBytes(), bound_bytes=bound_bytes)
    for choice in choices:
        kept.append(b"data: " + orjson.dumps({"id": "x", "choices": [{"index": 0, **choice}]}) + b"\n\n")
        kept.read()
    return kept


@pytest.mark.parametrize(
    "delta",
    [
        {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": '{"a'}}]},
        {"reasoning": "Hm"},
        {"reasoning_content": "Hm"},
    ],
)
def test_a_tool_call_or_a_thought_that_has_begun_is_not_taken_up(delta):
    """Also where text follows: the next worker's template would leave the thought out."""
    kept = kept_of(asked("chat/completions", **CHAT), {"delta": delta}, {"delta": {"content": "So"}})
    assert emitted_prefix(kept).refusal == str(STARTED_PART)


@pytest.mark.parametrize(
    ("kind", "more", "reason"),
    [
        ("response.reasoning_text.delta", {"delta": "Hm"}, STARTED_PART),
        ("response.output_item.added", {"item": {"type": "function_call", "id": "f"}}, STARTED_PART),
        ("response.output_text.done", {"text": "The"}, ENDING),
    ],
)
def test_a_response_is_not_taken_up_in_a_thought_a_call_or_its_end(kind, more, reason):
    """Nor behind them."""
    kept = StreamRecord(asked("responses", input="Tell me."), RecordedBytes())
    for event in ({"type": kind, **more}, {"type": "response.output_text.delta", "delta": "The"}):
        kept.append(b"event: x\ndata: " + orjson.dumps(event) + b"\n\n")
    assert emitted_prefix(kept).refusal == str(reason)


def test_a_stream_without_the_ids_that_were_asked_for_is_not_taken_up():
    """A worker that does not know the field ignores it."""
    kept = kept_of(asked("completions", **COMPLETION, **IDS), {"text": "The"})
    assert emitted_prefix(kept).refusal == str(NO_IDS)


def test_a_stream_that_is_not_kept_says_so():
    """What was said is gone."""
    kept = kept_of(asked("completions", **COMPLETION), {"text": "The"}, bound_bytes=8)
    assert emitted_prefix(kept).refusal == str(NOT_KEPT)


def test_the_docs_have_the_table():
    """Row by row, in its order."""
    text = (ROOT / "docs/router.md").read_text(encoding="utf-8")
    shown = re.search(r"do not continue:\n\n((?:- .*\n)+)", text)
    assert shown is not None
    assert shown[1].splitlines() == [f"- {each.row}" for each in (*OF_REQUEST, *OF_STREAM)]
