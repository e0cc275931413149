"""What requests may say, and how refusals are worded."""

import json

import pytest

from penstock.engine.core.requests import EngineRole
from penstock.engine.serve.fields import RequestError
from penstock.engine.serve.protocol import Api, RemoteKv, parse
from penstock.engine.serve.settings import ServeFlags, resolve


@pytest.fixture(scope="module")
def settings():
    """A worker with room for 100 tokens."""
    return resolve(
        ServeFlags("llama", "h200-llama-3.1-8b-tp1", max_model_len=100, served_names=("llama", "alias"))
    )


@pytest.fixture(scope="module")
def of_role():
    """Make the settings of a role."""
    return lambda role: resolve(ServeFlags("llama", "h200-llama-3.1-8b-tp1", role=EngineRole(role)))


def completion(settings, **fields):
    """Parse a completion."""
    return parse(json.dumps({"prompt": "abcdefgh", **fields}).encode(), settings, api=Api.COMPLETIONS)


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
    (choice,) = call.choices
    assert (choice.output_tokens, choice.ends_by_stop, call.stream, call.model) == (16, False, False, "llama")
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
    call = parse(json.dumps(body).encode(), settings, api=Api.CHAT)
    assert b"<|start_header_id|>user<|end_header_id|>\n\nHello<|eot_id|>" in call.choices[0].prompt
    assert call.choices[0].prompt.endswith(b"<|start_header_id|>assistant<|end_header_id|>\n\n")
    assert call.prompt_tokens == -(-len(call.choices[0].prompt) // 4)
    assert call.choices[0].output_tokens == 100 - call.prompt_tokens


def test_output_is_cut_at_the_context(settings):
    """As vLLM does: a limit that the context has no room for is lowered, not refused."""
    assert (
        completion(settings, prompt="x" * 40, max_tokens=99, ignore_eos=True).choices[0].output_tokens == 90
    )


@pytest.mark.parametrize(
    ("fields", "expected"), [({"max_completion_tokens": 3, "max_tokens": 9}, 3), ({"max_tokens": 9}, 9)]
)
def test_newer_limit_wins_in_chat(settings, fields, expected):
    """max_completion_tokens goes before max_tokens."""
    body = {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True, **fields}
    assert parse(json.dumps(body).encode(), settings, api=Api.CHAT).choices[0].output_tokens == expected


def test_the_model_ends_by_itself_reproducibly(settings):
    """Without ignore_eos the length depends on the prompt only; min_tokens and max_tokens bound it."""
    lengths = [
        completion(settings, prompt=f"prompt {n}", max_tokens=90).choices[0].output_tokens for n in range(200)
    ]
    assert lengths == [
        completion(settings, prompt=f"prompt {n}", max_tokens=90).choices[0].output_tokens for n in range(200)
    ]
    assert len(set(lengths)) > 20
    assert 1 <= min(lengths) < 20
    assert max(lengths) == 90
    bounded = [completion(settings, prompt=f"prompt {n}", max_tokens=90, min_tokens=50) for n in range(200)]
    assert min(call.choices[0].output_tokens for call in bounded) == 50
    assert {call.choices[0].ends_by_stop for call in bounded} == {True, False}


def test_prefill_role_pins_and_runs_to_its_limit(of_role):
    """do_remote_decode is honoured by prefill workers only."""
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    call = completion(of_role("prefill"), max_tokens=1, kv_transfer_params=params)
    assert (call.pin, call.choices[0].ends_by_stop, call.remote) == (True, False, None)
    assert not completion(of_role("aggregated"), kv_transfer_params=params).pin
    assert not completion(of_role("decode"), kv_transfer_params=params).pin


def test_decode_role_fetches(of_role):
    """do_remote_prefill is honoured by decode workers only."""
    params = {
        "do_remote_prefill": True,
        "remote_engine_id": "e",
        "remote_request_id": "r",
        "remote_host": "10.0.0.1",
        "remote_port": "8100",
    }
    call = completion(of_role("decode"), kv_transfer_params=params)
    assert call.remote == RemoteKv("e", "r", "10.0.0.1", 8100)
    assert call.remote.notify_url == "http://10.0.0.1:8100/kv/notify"
    assert completion(of_role("prefill"), kv_transfer_params=params).remote is None


@pytest.mark.parametrize("missing", ["remote_engine_id", "remote_request_id", "remote_host", "remote_port"])
def test_incomplete_hand_over_is_refused(of_role, missing):
    """A decode worker that cannot find the KV says which fields it needs."""
    params = {
        "do_remote_prefill": True,
        "remote_engine_id": "e",
        "remote_request_id": "r",
        "remote_host": "h",
        "remote_port": 1,
    }
    for value in (None, "", {}):
        with pytest.raises(RequestError, match="a remote prompt needs"):
            completion(of_role("decode"), kv_transfer_params={**params, missing: value})


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"model": "gpt"}, 404, "The model `gpt` does not exist. Valid aliases: "),
        ({"model": 5}, 400, "model: Input should be a valid string"),
        ({"best_of": 3}, 400, "best_of must equal n=1, got 3"),
        ({"prompt": ""}, 400, "at least one token"),
        ({"prompt": None}, 400, "prompt must be a string, a list of token ids, or a list of either"),
        ({"prompt": ["a", ""]}, 400, "at least one token"),
        ({"prompt": ["a"] * 1025}, 400, "send at most 1024"),
        ({"prompt": ["a"] * 500, "n": 3}, 400, "500 prompts and n=3 make more than 1024"),
        ({"prompt": [[1], ["a"]]}, 400, "prompt must be a string"),
        ({"prompt": [-1]}, 400, "token ids must be in"),
        ({"prompt": ["a", 1]}, 400, "prompt must be a string"),
        ({"prompt": [True]}, 400, "prompt must be a string"),
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
        parse(body, settings, api=Api.COMPLETIONS)


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
        parse(json.dumps({"messages": messages}).encode(), settings, api=Api.CHAT)
