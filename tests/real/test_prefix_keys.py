"""Two requests share a prefix key only where a real vLLM's own block hashes agree, read from its KV events.

One vLLM answers all of them. Its model has a tokenizer that begins each prompt with a special token and a template that
shows tools and an option first, so that each of these matters.
"""

import asyncio
import json
import os
import shutil
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from endpoint import SENTENCE
from reserved_ports import reserved_port
from test_adapters import write_adapter

from penstock.router.kv_listener import replayed
from penstock.router.policy.prefixes import BLOCK_BYTES, SUB_BLOCK_KEYS
from penstock.router.policy.prefixes import BLOCK_TOKENS as KEY_TOKENS
from penstock.router.proxy.completion import parse_completion
from penstock.router.proxy.prefix import ExactKeys, load_tokenizer, read_prompt
from penstock.runtimes.engine_flags import kv_replay_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

BLOCK_TOKENS = 128
MIN_BLOCKS = 4
"""Blocks of the shortest prompt: as many as one of the router's keys, which stands for 512 tokens."""
TEMPLATE = (
    "{{ bos_token }}{% if tools %}<|tools|>{{ tools | tojson }}\n{% endif %}"
    "{% if style is defined %}<|style|>{{ style }}\n{% endif %}"
    "{% if reasoning_effort %}<|effort|>{{ reasoning_effort }}\n{% endif %}"
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEXT = SENTENCE * 40
OTHER = "Something else is asked at the end. "
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXT}]
SCHEMA = {"type": "object", "properties": {"width": {"type": "number"}}}


def tool(name, *, turned=False):
    """Return a chat's tool; ``turned`` gives the keys of its function in another order."""
    function = {"name": name, "description": "Opens the gate. " * 60, "parameters": SCHEMA}
    function = dict(reversed(function.items())) if turned else function
    return {"type": "function", "function": function}


def completion(**fields):
    """Return a completion."""
    return "/v1/completions", {"prompt": TEXT} | fields


def chat(**fields):
    """Return a chat; tools are offered and not called, as this vLLM has no parser of calls."""
    more = {"tool_choice": "none"} if "tools" in fields else {}
    return "/v1/chat/completions", {"messages": CHAT} | more | fields


def message(**fields):
    """Return a message of Anthropic's API."""
    return "/v1/messages", {"system": "Be brief.", "messages": CHAT[1:]} | fields


def response(**fields):
    """Return a request of the Responses API."""
    return "/v1/responses", {"instructions": "Be brief.", "input": CHAT[1:]} | fields


IDS = [5 + n % 300 for n in range(900)]
PAIRS = {
    "equal completions": (completion(), completion()),
    "texts that differ at the end": (completion(), completion(prompt=TEXT + OTHER)),
    "texts that differ at the start": (completion(), completion(prompt=OTHER + TEXT)),
    "equal ids": (completion(prompt=IDS), completion(prompt=[IDS])),
    "ids that differ at the start": (completion(prompt=IDS), completion(prompt=[9, *IDS])),
    "one salt": (completion(cache_salt="a"), completion(cache_salt="a")),
    "a salt and none": (completion(), completion(cache_salt="a")),
    "two salts": (completion(cache_salt="a"), completion(cache_salt="b")),
    "one adapter": (completion(model="sql"), completion(model="sql")),
    "an adapter and the model": (completion(), completion(model="sql")),
    "two adapters": (completion(model="sql"), completion(model="law")),
    "an adapter and a salt of its name": (completion(model="sql"), completion(cache_salt="sql")),
    "without special tokens": (completion(), completion(add_special_tokens=False)),
    "cut by the engine": (completion(), completion(truncate_prompt_tokens=600)),
    "cut alike": (completion(truncate_prompt_tokens=600), completion(truncate_prompt_tokens=600)),
    "equal chats": (chat(), chat()),
    "chats that grow": (chat(), chat(messages=[*CHAT, {"role": "assistant", "content": "Yes."}, CHAT[0]])),
    "tools and none": (chat(), chat(tools=[tool("open")])),
    "equal tools, other text": (
        chat(tools=[tool("open"), tool("shut")]),
        chat(tools=[tool("open"), tool("shut")], messages=[{"role": "user", "content": OTHER * 8}]),
    ),
    "other tools, equal text": (chat(tools=[tool("open")]), chat(tools=[tool("shut")])),
    "tools in another order": (
        chat(tools=[tool("open"), tool("shut")]),
        chat(tools=[tool("shut"), tool("open")]),
    ),
    "a tool's keys in another order": (
        chat(tools=[tool("open"), tool("shut")]),
        chat(tools=[tool("open", turned=True), tool("shut", turned=True)]),
    ),
    "an option that the template shows": (chat(), chat(chat_template_kwargs={"style": "old"})),
    "an option that the template ignores": (chat(), chat(chat_template_kwargs={"unknown": 1})),
    "a special token more": (chat(), chat(add_special_tokens=True)),
    "an effort that the template shows": (chat(), chat(reasoning_effort="high")),
    "one effort": (chat(reasoning_effort="high"), chat(reasoning_effort="high")),
    "a chat and a response": (chat(), response()),
    "a chat with a special token more and a response": (chat(add_special_tokens=True), response()),
    "a response's option": (response(), response(chat_template_kwargs={"style": "old"})),
    "a response's effort": (response(), response(reasoning={"effort": "high"})),
    "a chat and a message": (chat(), message()),
    "a chat and its parts": (
        chat(),
        chat(messages=[CHAT[0], {"role": "user", "content": [{"type": "text", "text": TEXT}]}]),
    ),
    "a message's mark for a cache": (
        message(),
        message(
            messages=[
                {
                    "role": "user",
                    "content": [{"type": "text", "text": TEXT, "cache_control": {"type": "ephemeral"}}],
                }
            ]
        ),
    ),
    "a chat's salt": (chat(), chat(cache_salt="a")),
    "a text and its ids": None,
}
"""Pairs of requests; the ids of a text are known once a worker has tokenized it."""
STRICTER_BY_TEXT = {
    "an option that the template ignores",
    "a tool's keys in another order",
    "a text and its ids",
}
"""Pairs whose blocks vLLM shares and the router does not if its keys are made from text; made from tokens, there are none."""


@dataclass
class Engine:
    """One vLLM and its KV events."""

    worker: Any
    replay: str
    tokenizer: str

    def events(self, first):
        """Return the batches of events from a number on, each with its number."""

        async def read():
            context = zmq.asyncio.Context()
            try:
                return [each async for each in replayed(zmq, context, self.replay, first)]
            finally:
                context.destroy(linger=0)

        return asyncio.run(read())

    def block_hashes(self, path, fields):
        """Return the hashes of the blocks that a request stores in an empty cache, in order."""
        limit = "max_output_tokens" if path.endswith("responses") else "max_tokens"
        body = {"model": "tiny", limit: 16 if path.endswith("responses") else 1, **fields}
        self.worker.until(lambda: self.worker.post("/reset_prefix_cache") == {"success": True})
        # What was stored before is published with the next step at the latest.
        self.worker.post(model="tiny", prompt="Hello", max_tokens=1)
        known = self.events(0)
        first = known[-1][0] + 1 if known else 0
        self.worker.post(path, **body)
        hashes = []

        def is_stored():
            before = len(hashes)
            hashes[:] = [
                each
                for _, payload in self.events(first)
                for event in msgspec.msgpack.decode(payload)[1]
                if event["type"] == "BlockStored"
                for each in event["block_hashes"]
            ]
            return len(hashes) == before >= MIN_BLOCKS

        self.worker.until(is_stored)
        return hashes


@pytest.fixture(scope="module")
def engine(deployment, tmp_path_factory):
    """A vLLM with two adapters; stopped in the end, as idle workers keep cores busy."""
    folder = tmp_path_factory.mktemp("model")
    model = shutil.copytree(os.environ["PENSTOCK_VLLM_MODEL"], folder / "tiny")
    config = json.loads((model / "tokenizer_config.json").read_text())
    config |= {"chat_template": TEMPLATE, "bos_token": "<|end|>"}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    begin = {"SpecialToken": {"id": "<|end|>", "type_id": 0}}
    one, two = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    special = {"<|end|>": {"id": "<|end|>", "ids": [0], "tokens": ["<|end|>"]}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, one],
        "pair": [begin, one, two],
        "special_tokens": special,
    }
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    port = reserved_port()
    path = deployment.manifest("keys", {"kvEventsPort": port}, "aggregated")
    graph = json.loads(path.read_bytes())
    graph["spec"]["model"] |= {
        "name": str(model),
        "adapters": [
            {"name": name, "path": write_adapter(folder / name, seed)}
            for seed, name in enumerate(("sql", "law"))
        ],
    }
    path.write_text(json.dumps(graph))
    worker = deployment.workers(path)["aggregated"]
    yield Engine(worker, f"tcp://127.0.0.1:{kv_replay_port(port)}", str(model / "tokenizer.json"))
    worker.stop()


def read_request(path, fields, exact):
    """Return what the router reads from a request's prompt."""
    body = {"model": "tiny", "max_tokens": 1, **fields}
    raw = json.dumps(body).encode()
    request = parse_completion(path, b"application/json", raw, model="tiny", adapters=("sql", "law"))
    return read_prompt(request, exact)


def end_of(keys, way):
    """Return the position in a prompt up to which its first keys go, in bytes of text or in tokens."""
    if way == "tokens":
        return keys * KEY_TOKENS
    return (
        keys * BLOCK_BYTES // SUB_BLOCK_KEYS
        if keys <= SUB_BLOCK_KEYS
        else (keys + 1 - SUB_BLOCK_KEYS) * BLOCK_BYTES
    )


def common(one, other):
    """Return the number of equal items at the beginning of two sequences."""
    return next(
        (n for n, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]),
        min(map(len, (one, other))),
    )


def test_keys_are_shared_only_where_block_hashes_are(engine):
    """By text and by tokens, for each pair; where the router is stricter, it is known to be."""
    by_tokens = ExactKeys(load_tokenizer(engine.tokenizer), BLOCK_TOKENS)
    ids = engine.worker.post("/tokenize", model="tiny", prompt=TEXT)["tokens"]
    pairs = {**PAIRS, "a text and its ids": (completion(), completion(prompt=ids))}
    hashes = {}

    def blocks(request):
        key = json.dumps(request)
        if key not in hashes:
            hashes[key] = engine.block_hashes(*request)
        return hashes[key]

    stricter = {"text": set(), "tokens": set()}
    wrong, table = [], []
    for name, (one, other) in pairs.items():
        first, second = blocks(one), blocks(other)
        held = common(first, second)
        for way, exact in (("text", None), ("tokens", by_tokens)):
            mine, others = (read_request(*each, exact).chain for each in (one, other))
            assert mine, name
            assert others, name
            shared = common(mine, others)
            share = end_of(shared, way) / max(end_of(len(each), way) for each in (mine, others))
            # One block more, as the last key of a prompt may end within a block; equal prompts share it.
            if share > (held + 1) / max(len(first), len(second)) or (shared and not held):
                wrong.append((name, way, shared, held))
            if held and not shared:
                stricter[way].add(name)
            table.append(
                f"{name:40} {way:7} keys {shared}/{len(mine)}/{len(others)} blocks {held}/{len(first)}/{len(second)}"
            )
    assert wrong == [], "\n".join(table)
    assert stricter == {"text": STRICTER_BY_TEXT, "tokens": set()}, "\n".join(table)


BARE = {"type": "function", "function": {"name": "bare"}}
ODD = {"function": {"strict": True, "name": "odd", "other": 1, "parameters": SCHEMA}, "cache_control": {}}


@pytest.mark.parametrize("tools", [[tool("open", turned=True)], [BARE, ODD], []])
def test_chats_with_tools_are_counted_exactly(engine, tools):
    """Whatever the order of their keys, and whether they say all that they could."""
    path, fields = chat(tools=tools) if tools else chat()
    exact = ExactKeys(load_tokenizer(engine.tokenizer), BLOCK_TOKENS)
    counted = engine.worker.post(path, model="tiny", max_tokens=1, **fields)["usage"]["prompt_tokens"]
    assert read_request(path, fields, exact).tokens == counted
