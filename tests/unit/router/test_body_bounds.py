"""What a request's JSON may hold, and how deep: refused before it costs memory or the loop's time."""

import threading

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.router.policy.prefixes import MAX_BYTES, render_chat
from penstock.router.proxy.completion import (
    MAX_CONTAINERS,
    MAX_DEPTH,
    MAX_STRINGS,
    MAX_VALUES,
    RequestRefused,
    check_depth,
    check_size,
    parse_completion,
)
from penstock.router.proxy.prefix import ExactKeys, PromptReader, PromptTokenizer, read_prompt

CHAT = "/v1/chat/completions"
BASE = {"model": "llama", "messages": [{"role": "user", "content": "x"}]}


def nested(levels):
    """Return lists within each other."""
    value = []
    for _ in range(levels - 1):
        value = [value]
    return value


def steps(raw):
    """Return in how many steps a body is let through."""
    return sum(1 for _ in check_size(raw))


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b'{"messages":[' + b",".join([b'{"role":"u"}'] * 1_000_000) + b"]}", "objects and lists"),
        (b"[" + b"[]," * MAX_CONTAINERS + b"1]", f"more than {MAX_CONTAINERS} objects and lists"),
        (orjson.dumps(["a"] * (MAX_STRINGS + 1)), f"more than {MAX_STRINGS} strings"),
        (orjson.dumps([1] * (MAX_VALUES + 2)), f"more than {MAX_VALUES} values"),
    ],
)
def test_bodies_of_too_many_values_are_refused_unparsed(raw, words):
    """Whatever they are made of; the message has the bound."""
    with pytest.raises(RequestRefused, match=words) as caught:
        steps(raw)

    assert (caught.value.status, caught.value.code) == (400, "body_too_complex")


@pytest.mark.parametrize(
    "raw",
    [
        b"{}",
        b"[" * 60_000,
        orjson.dumps({"prompt": [123456] * 1_048_576}),
        orjson.dumps({"prompt": 'if (x[0]) { say("no\\", no"); }\n' * 200_000}),
        orjson.dumps({"prompt": "1,2,3," * 1_000_000}),
        orjson.dumps({"prompt": "\\" * 500_001 + '"' * 500_001}),
        orjson.dumps(["[]"] * (MAX_STRINGS - 1)),
    ],
)
def test_what_a_prompt_says_is_not_counted(raw):
    """Braces, quotes and commas of text are not values, and token ids may fill the longest context."""
    assert steps(raw) >= 0


def test_a_long_body_is_counted_in_steps():
    """So that others are served meanwhile; a short one needs none."""
    assert steps(orjson.dumps({"prompt": "x" * 16_000_000})) == 62
    assert steps(orjson.dumps({"prompt": "x" * 60_000})) == 0


@settings(max_examples=30)
@given(st.text('\\"{[,a\n', min_size=1, max_size=40), st.integers(0, 7))
def test_escapes_are_understood_wherever_a_step_ends(text, shift):
    """A string of any text is one string, and what follows it is counted."""
    said = text * (70_000 // len(text))
    inside = orjson.dumps(["a" * shift + said])
    assert steps(inside) >= 0
    with pytest.raises(RequestRefused, match="objects and lists"):
        steps(inside[:-1] + b"," + b"[]," * MAX_CONTAINERS + b"1]")


@pytest.mark.parametrize("key", ["messages", "tools", "prompt", "unknown"])
def test_depth_is_bounded_in_every_field(key):
    """The bound is the last that passes."""
    for levels, is_refused in ((MAX_DEPTH - 1, False), (MAX_DEPTH, True), (300, True), (1000, True)):
        body = {**BASE, key: nested(levels)}
        raw = b'{"k":' + b"[" * levels + b"]" * levels + b"}"
        if is_refused:
            with pytest.raises(RequestRefused, match=f"deeper than {MAX_DEPTH} levels"):
                check_depth(raw, body)
        else:
            check_depth(raw, body)


def test_a_chat_is_rendered_as_far_as_keys_reach():
    """The rest could change no key, and costs nothing."""
    long = [{"role": "user", "content": "x" * 1000}] * 5000

    assert len(render_chat(long)) == MAX_BYTES
    assert render_chat(long) == render_chat(long[:2000])


def parsed(**body):
    """Parse a request."""
    path = CHAT if "messages" in body else "/v1/completions"
    raw = orjson.dumps({"model": "llama", **body})
    return parse_completion(path, b"application/json", raw, model="llama")


@pytest.mark.parametrize(
    "body",
    [{"prompt": "word " * 1_000_000}, {"messages": [{"role": "user", "content": "word " * 1_000_000}]}],
)
async def test_long_prompts_are_tokenized_off_the_loop_and_only_so_far(body):
    """The text of the keys and no more; the count of a text that was cut is not known."""
    seen = []

    def tokenize(text):
        seen.append((threading.current_thread().name.split("_")[0], len(text)))
        return list(range(len(text) // 4))

    reader = PromptReader(ExactKeys(PromptTokenizer(tokenize)))
    keyed = await reader.read(parsed(**body))
    reader.close()

    assert seen == [("prompts", MAX_BYTES)]
    assert (len(keyed.chain), keyed.tokens) == (512, None)


async def test_short_prompts_are_tokenized_where_they_are():
    """A thread would cost more than the work; their tokens are counted."""
    seen = []

    def tokenize(text):
        seen.append(threading.current_thread() is threading.main_thread())
        return text.split()

    reader = PromptReader(ExactKeys(PromptTokenizer(lambda text: [len(each) for each in tokenize(text)])))
    keyed = reader.read_at_once(parsed(prompt="three short words"))
    reader.close()

    assert (seen, keyed.tokens) == ([True], 3)


def threads_of_readers():
    """Return the threads in which prompts are read."""
    return [each for each in threading.enumerate() if each.name.startswith("prompts")]


@pytest.mark.parametrize(("count", "threads"), [(512, 0), (513, 1)])
async def test_long_chats_are_read_off_the_loop(count, threads):
    """By their number of messages, without a tokenizer too; the keys are the same."""
    for each in threads_of_readers():
        each.join(5)
    reader = PromptReader(None)
    request = parsed(messages=[{"role": "user", "content": "x"}] * count)

    assert (reader.read_at_once(request) or await reader.read(request)) == read_prompt(request)
    assert len(threads_of_readers()) == threads
    reader.close()
