"""Chats as the worker's template makes them: what transformers would render, and nothing where that is not known."""

import json

import orjson
import pytest

from penstock.core.errors import ConfigError
from penstock.local.random_model import CHAT_TEMPLATE, RandomModel, write_model
from penstock.router.chat_template import ChatTemplate, load_chat_template
from penstock.router.policy.prefixes import token_keys
from penstock.router.proxy.completion import parse_completion
from penstock.router.proxy.prefix import ExactKeys, load_tokenizer, read_prompt

LLAMA = (
    "{{- bos_token }}\n"
    "{%- for message in messages %}\n"
    "    {%- if message.tool_calls %}\n"
    "        {{- message.tool_calls[0].function.arguments | tojson }}\n"
    "    {%- else %}\n"
    "        {{- '<|' + message['role'] + '|>' + message['content'] | trim + '<|eot|>' }}\n"
    "    {%- endif %}\n"
    "{%- endfor %}\n"
    "{%- if tools %}{{- tools | tojson }}{%- endif %}\n"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}\n"
)
PARTS = (
    "{% for message in messages %}{% for part in message.content %}[{{ part.text }}]{% endfor %}{% endfor %}"
)
EFFORT = "{{ reasoning_effort or None }}|{{ enable_thinking if enable_thinking is defined else None }}"
USER = {"role": "user", "content": " Hi "}


def rendered(source, **body):
    """Return the prompt of a chat under a template."""
    return ChatTemplate(source, {"bos_token": "<s>"}).render({"messages": [USER], **body})


@pytest.mark.parametrize(
    ("source", "body", "expected"),
    [
        (LLAMA, {}, "<s><|user|>Hi<|eot|><|assistant|>"),
        (LLAMA, {"add_generation_prompt": False}, "<s><|user|>Hi<|eot|>"),
        (
            "{{ tools | tojson }}",
            {
                "tools": [
                    {"cache_control": {}, "function": {"x": 1, "strict": True, "parameters": {}, "name": "f"}}
                ]
            },
            '[{"type": "function", "function": {"name": "f", "description": null, "parameters": {}, "strict": true}}]',
        ),
        (
            "{{ tools | tojson }}",
            {"tools": [{"defer_loading": True, "function": {"name": "f", "strict": None}}]},
            (
                '[{"type": "function", "function": {"name": "f", "description": null, "parameters": null, '
                '"defer_loading": true}, "defer_loading": true}]'
            ),
        ),
        (EFFORT, {}, "None|None"),
        (EFFORT, {"reasoning_effort": "high"}, "high|True"),
        (EFFORT, {"reasoning_effort": "none"}, "none|False"),
        (
            EFFORT,
            {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}},
            "high|False",
        ),
        (
            LLAMA,
            {"tools": [{"type": "function", "name": "größe"}]},
            '<s><|user|>Hi<|eot|>[{"type": "function", "name": "größe"}]<|assistant|>',
        ),
        (
            LLAMA,
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}],
                    }
                ]
            },
            '<s>{"a": 1}<|assistant|>',
        ),
        (
            LLAMA,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}]},
            "<s><|user|>a\nb<|eot|><|assistant|>",
        ),
        (LLAMA, {"messages": [{"role": "user", "content": None}]}, "<s><|user|><|eot|><|assistant|>"),
        (
            "{{ messages[0] | tojson }}",
            {"messages": [{**USER, "weight": 1, "name": "n"}]},
            '{"role": "user", "content": " Hi ", "name": "n"}',
        ),
        (PARTS, {}, "[ Hi ]"),
        (PARTS, {"messages": [{"role": "user", "content": ["a", {"type": "text", "text": "b"}]}]}, "[a][b]"),
        ("{{ enable_thinking }}", {"chat_template_kwargs": {"enable_thinking": False}}, "False"),
        ("{% generation %}a{%- endgeneration -%} b", {}, "ab"),
        ("{% for n in [1, 2] %}{% if n == 2 %}{% break %}{% endif %}{{ n }}{% endfor %}", {}, "1"),
    ],
)
def test_a_chat_is_what_the_template_makes_of_it(source, body, expected):
    """White space, JSON, tool calls and parts as transformers and vLLM have them."""
    assert rendered(source, **body) == expected


@pytest.mark.parametrize(
    ("source", "body"),
    [
        (LLAMA, {"chat_template": "{{ messages }}"}),
        (LLAMA, {"continue_final_message": True}),
        (LLAMA, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}),
        (LLAMA, {"messages": [{"role": "user", "content": [7]}]}),
        (LLAMA, {"messages": [{"role": "user", "content": 7}]}),
        (LLAMA, {"messages": [{"role": "user", "content": [{"type": ["text"], "text": "a"}]}]}),
        (LLAMA, {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]}),
        ("{{ raise_exception('roles must alternate') }}", {}),
        ("{{ messages.__class__.__mro__ }}{{ messages.append(1) }}", {}),
    ],
)
def test_a_chat_whose_prompt_is_not_known_is_not_guessed(source, body):
    """Another template, a picture, an error of the template, or what its sandbox forbids."""
    assert rendered(source, **body) is None


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"chat_template.jinja": "file"}, "file"),
        ({"tokenizer_config.json": {"chat_template": "config"}}, "config"),
        ({"chat_template.jinja": "file", "tokenizer_config.json": {"chat_template": "config"}}, "file"),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": [
                        {"name": "rag", "template": "no"},
                        {"name": "default", "template": "{{ eos_token }}"},
                    ],
                    "eos_token": {"content": "</s>"},
                }
            },
            "</s>",
        ),
        ({"tokenizer_config.json": {}}, None),
        ({"tokenizer_config.json": {"chat_template": [{"name": "rag", "template": "no"}]}}, None),
        ({}, None),
    ],
)
def test_the_template_lies_beside_the_tokenizer(tmp_path, files, expected):
    """In a file of its own, which wins, or in the tokenizer's configuration."""
    for name, content in files.items():
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))

    template = load_chat_template(tmp_path / "tokenizer.json")

    assert (None if template is None else template.render({"messages": []})) == expected


@pytest.mark.parametrize(
    ("name", "content"), [("chat_template.jinja", "{% for %}"), ("tokenizer_config.json", "{")]
)
def test_a_template_that_cannot_be_read_is_refused(tmp_path, name, content):
    """At the router's start, by its setting."""
    (tmp_path / name).write_text(content)

    with pytest.raises(ConfigError, match=r"router\.tokenizer: "):
        load_chat_template(tmp_path / "tokenizer.json")


def _keyed(path, folder, **body):
    raw = orjson.dumps({"model": "m", **body})
    request = parse_completion(path, b"application/json", raw, model="m")
    return read_prompt(request, ExactKeys(load_tokenizer(str(folder / "tokenizer.json"))))


def test_a_chat_has_the_keys_of_its_rendered_text(tmp_path):
    """So KV events, which name the worker's tokens, are of the same prompt; a grown chat keeps its keys."""
    write_model(tmp_path, RandomModel())
    messages = [{"role": "user", "content": "Water that waits above the dam. " * 200}]
    text = f"<|user|>{messages[0]['content']}\n"
    tokens = load_tokenizer(str(tmp_path / "tokenizer.json")).text(f"{text}<|assistant|>")

    chat = _keyed("/v1/chat/completions", tmp_path, messages=messages)
    grown = _keyed(
        "/v1/chat/completions",
        tmp_path,
        messages=[*messages, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "No."}],
    )

    assert (chat.chain, chat.tokens) == (token_keys(tokens), len(tokens))
    assert chat.chain == _keyed("/v1/completions", tmp_path, prompt=f"{text}<|assistant|>").chain
    assert len(chat.chain) > 2
    assert grown.chain[: len(chat.chain) - 1] == chat.chain[:-1]


def test_a_response_is_a_chat(tmp_path):
    """Instructions and input as messages; with tools the worker's prompt is not known."""
    write_model(tmp_path, RandomModel())
    expected = _keyed(
        "/v1/chat/completions",
        tmp_path,
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    )
    asked = {"instructions": "Be brief.", "input": "Hi"}

    assert _keyed("/v1/responses", tmp_path, **asked) == expected
    assert _keyed("/v1/responses", tmp_path, **asked, tools=[{"type": "function"}]).tokens is None


def test_options_and_special_tokens_of_a_response_are_in_its_tokens(tmp_path):
    """As vLLM renders it; a message that asks for thoughts has a prompt that is not known here."""
    write_model(tmp_path, RandomModel())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ reasoning_effort }}{{ style }}{{ messages[0]['content'] }}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    begin, text = {"SpecialToken": {"id": "<|end|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    special = {"<|end|>": {"id": "<|end|>", "ids": [0], "tokens": ["<|end|>"]}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, text],
        "pair": [begin, text, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": special,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))

    options = {"reasoning": {"effort": "high"}, "chat_template_kwargs": {"style": "old"}}
    asked = _keyed("/v1/responses", tmp_path, input="Hi", **options)
    assert asked == _keyed("/v1/completions", tmp_path, prompt="higholdHi")
    chat = {"messages": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": {"style": "old"}}
    plain = _keyed("/v1/chat/completions", tmp_path, **chat, reasoning_effort="high")
    assert plain.tokens == asked.tokens - 1
    message = {"max_tokens": 1, "messages": chat["messages"]}
    assert _keyed("/v1/messages", tmp_path, **message).tokens is not None
    assert _keyed("/v1/messages", tmp_path, **message, output_config={"effort": "low"}).tokens is None


def test_the_made_models_template_is_one():
    """`penstock make-model` writes it."""
    assert rendered(CHAT_TEMPLATE) == "<|user|> Hi \n<|assistant|>"
