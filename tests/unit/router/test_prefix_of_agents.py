"""What a prefix is for agents: tools, images, adapters, salts and template options count as for the engine."""

import base64

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.core.kv_blocks import prefix_keys
from penstock.engine.serve.protocol import Api, parse
from penstock.engine.serve.settings import ServeFlags, resolve
from penstock.engine.serve.words import adapter_seed
from penstock.router.policy.prefixes import BLOCK_BYTES, MEDIA_BYTES
from penstock.router.proxy.completion import parse_completion
from penstock.router.proxy.prefix import read_prompt

SYSTEM = {"role": "system", "content": "You are an agent. " * 40}
TOOLS = [
    {"type": "function", "function": {"name": f"tool_{i}", "description": "does things " * 20}}
    for i in range(30)
]


def keys(path="chat/completions", **fields):
    """Return the prefix keys of a request."""
    raw = orjson.dumps({"model": "llama"} | fields)
    adapters = ("other",)
    request = parse_completion(f"/v1/{path}", b"application/json", raw, model="llama", adapters=adapters)
    return read_prompt(request).chain


def shared(one, other):
    """Return the number of keys at the beginning that two chains share."""
    return next(
        (n for n, pair in enumerate(zip(one, other, strict=False)) if len(set(pair)) > 1),
        min(len(one), len(other)),
    )


def image(data: bytes):
    """Return a user's question about an image."""
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    return {
        "role": "user",
        "content": [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": "What is it?"},
        ],
    }


def test_agents_with_the_same_tools_share_them_and_others_do_not():
    """Tools come before the messages, as in templates; the question of each differs."""
    one, other = (
        keys(tools=TOOLS, messages=[SYSTEM, {"role": "user", "content": text}]) for text in ("a", "b")
    )
    assert shared(one, other) >= len(one) - 1
    assert shared(one, keys(messages=[SYSTEM, {"role": "user", "content": "a"}])) == 0
    assert (
        shared(one, keys(tools=TOOLS[1:], messages=[SYSTEM, {"role": "user", "content": "a"}])) < len(one) - 1
    )


def test_equal_texts_with_different_images_are_not_one_prefix():
    """Equal images are, and what precedes an image is shared."""
    big, other = b"x" * 3_000_000, b"x" * 2_999_999 + b"y"
    one = keys(messages=[SYSTEM, image(big)])
    assert keys(messages=[SYSTEM, image(big)]) == one
    assert 0 < shared(one, keys(messages=[SYSTEM, image(other)])) < len(one)
    # What follows a picture of three megabytes still has keys, and counts for itself.
    longer = keys(messages=[SYSTEM, image(big), {"role": "user", "content": "z" * 3 * BLOCK_BYTES}])
    assert len(one) + 2 <= len(longer) <= len(one) + 4
    assert len(one) <= 8 + 2 * MEDIA_BYTES // BLOCK_BYTES


def test_the_apis_of_images_are_hashed_alike():
    """Anthropic's form has its data elsewhere, and a result of a tool may contain it."""
    data = base64.b64encode(b"x" * 9000).decode()
    for content in (
        [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}],
        [{"type": "input_image", "image_url": f"data:image/png;base64,{data}"}],
        [{"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}],
    ):
        one = keys(messages=[{"role": "user", "content": content}])
        changed = orjson.loads(orjson.dumps(content).replace(data.encode(), data[:-4].encode() + b"AAAA"))
        assert keys(messages=[{"role": "user", "content": changed}])[-1] != one[-1]
        assert len(one) <= 9


@pytest.mark.parametrize(
    "more",
    [
        {"model": "other"},
        {"cache_salt": "s"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "high"},
        {"tools": TOOLS[:1]},
    ],
    ids=lambda more: next(iter(more)),
)
def test_what_changes_the_first_tokens_changes_all_keys(more):
    """An adapter's KV is another, a salt separates, and templates put options and tools first."""
    plain = {"messages": [SYSTEM]}
    assert shared(keys(**plain), keys(**plain, **more)) == 0


WORDS = st.sampled_from(["", "a", "b", "ab" * 300, "ab" * 299 + "c"])
CHATS = st.fixed_dictionaries(
    {
        "messages": st.lists(
            st.fixed_dictionaries(
                {"role": st.sampled_from(["system", "user", "assistant"]), "content": WORDS}
            ),
            min_size=1,
            max_size=3,
        )
    },
    optional={
        "tools": st.sampled_from([[], TOOLS[:1], TOOLS[:2]]),
        "model": st.sampled_from(["llama", "other"]),
        "cache_salt": st.sampled_from(["s", "t"]),
    },
)
SETTINGS = resolve(ServeFlags("llama", served_names=("llama",), lora_modules=("other=/x",)))
BLOCK_TOKENS = 4


def engine_keys(fields):
    """Return the hashes of a simulated worker's blocks of a chat's prompt."""
    call = parse(orjson.dumps({"model": "llama", "max_tokens": 1} | fields), SETTINGS, api=Api.CHAT)[0]
    return prefix_keys(call.prompt, BLOCK_TOKENS, seed=adapter_seed(call.adapter))


@given(CHATS, CHATS)
def test_keys_are_shared_only_where_the_engines_blocks_are(one, other):
    """Keys are equal to the end only for equal blocks, and shared at all only where the first blocks are."""
    first, second = keys(**one), keys(**other)
    blocks = shared(engine_keys(one), engine_keys(other))
    if one.get("cache_salt") != other.get("cache_salt"):
        # vLLM hashes the salt with the first block.
        assert shared(first, second) == 0
    elif first == second:
        assert engine_keys(one) == engine_keys(other)
    elif shared(first, second):
        assert blocks > 0


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_several_choices_have_the_prefix_and_the_cost_of_one(path):
    """Workers compute the prompt once, and count it once in the usage from which costs are learned."""
    fields = {"prompt": "x" * 5000} if path == "completions" else {"messages": [SYSTEM]}
    assert keys(path, **fields) == keys(path, n=4, **fields) != ()
    bodies = [orjson.dumps({"model": "llama", **fields, **more}) for more in ({}, {"n": 4})]
    one, four = (parse_completion(f"/v1/{path}", b"application/json", each, model="llama") for each in bodies)
    assert (one.prompt_bytes, one.parts) == (four.prompt_bytes, four.parts)


@pytest.mark.parametrize("prompt", ["x" * 5000, [7] * 2000])
def test_a_prompt_that_the_engine_cuts_is_another_prefix(prompt):
    """It keeps the last tokens, so that the first ones differ; two prompts cut alike may share."""
    whole, cut = (
        keys("completions", prompt=prompt),
        keys("completions", prompt=prompt, truncate_prompt_tokens=9),
    )
    assert shared(whole, cut) == 0
    assert cut == keys("completions", prompt=prompt, truncate_prompt_tokens=9)
    assert shared(cut, keys("completions", prompt=prompt, truncate_prompt_tokens=8)) == 0


@pytest.mark.parametrize("fields", [{"prompt": "x" * 5000}, {"messages": [SYSTEM]}])
def test_special_tokens_that_the_engine_adds_or_omits_are_part_of_the_prefix(fields):
    """They come first, and the text does not show them."""
    path = "completions" if "prompt" in fields else "chat/completions"
    assert shared(keys(path, **fields), keys(path, **fields, add_special_tokens="prompt" not in fields)) == 0


def test_a_response_has_the_prefix_of_a_chat_that_gets_special_tokens():
    """VLLM adds them to chats of the Responses API, whose blocks plain chats therefore do not share."""
    response = keys("responses", input=[SYSTEM])
    assert shared(response, keys(messages=[SYSTEM])) == 0
    assert response == keys(messages=[SYSTEM], add_special_tokens=True)


@pytest.mark.parametrize(
    ("path", "fields", "option"),
    [
        ("chat/completions", {"messages": [SYSTEM]}, {"reasoning_effort": "high"}),
        ("responses", {"input": [SYSTEM]}, {"reasoning": {"effort": "high"}}),
        ("responses", {"input": [SYSTEM]}, {"chat_template_kwargs": {"a": 1}}),
        ("responses", {"input": [SYSTEM]}, {"previous_response_id": "resp_1"}),
        (
            "messages",
            {"max_tokens": 1, "messages": [{**SYSTEM, "role": "user"}]},
            {"output_config": {"effort": "high"}},
        ),
        (
            "messages",
            {"max_tokens": 1, "messages": [{**SYSTEM, "role": "user"}]},
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        ),
    ],
)
def test_what_comes_before_the_messages_is_part_of_the_prefix_in_every_api(path, fields, option):
    """Options, which most templates put there, and earlier messages that the router does not know."""
    assert shared(keys(path, **fields), keys(path, **fields, **option)) == 0


def test_marks_for_a_providers_cache_do_not_count():
    """Agents move them to the last message with each turn; engines ignore them, and so the earlier turn's prefix stays."""
    mark = {"cache_control": {"type": "ephemeral"}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "found " * 500}
    first = {"role": "user", "content": [{"type": "text", "text": "Search. " * 300}]}
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "find", "input": {}}]}
    more = [{"role": "assistant", "content": "Done."}, {"role": "user", "content": "Thanks. " * 400}]
    before = keys(
        "messages", max_tokens=1, messages=[first, call, {"role": "user", "content": [result | mark]}]
    )
    after = keys(
        "messages", max_tokens=1, messages=[first, call, {"role": "user", "content": [result]}, *more]
    )
    assert shared(before, after) == len(before) - 1
    chat = [{"role": "user", "content": [{"type": "text", "text": "x" * 3000} | mark]}]
    assert keys(messages=chat) == keys(messages=[{"role": "user", "content": "x" * 3000}])
