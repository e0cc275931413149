"""Renders chats with the model's own template, like transformers and vLLM, so that prefix keys match the workers' prompts.

If the template cannot be found or rendered, chats are distinguished by their messages instead.
"""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from penstock.core.errors import ConfigError
from penstock.core.logs import get_logger

log = get_logger(__name__)

_TOKEN_NAMES: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
    "mask_token",
)
_PARTS_LOOP: Final = re.compile(r"for\s+\w+\s+in\s+\w+(\.content|\[['\"]content['\"]\])")
"""A template that matches this expects content as a list of parts; vLLM passes one text to other templates."""
_TEXT_PARTS: Final = frozenset({"text", "input_text", "output_text"})
_ELSEWHERE: Final = ("chat_template", "continue_final_message", "documents", "mm_processor_kwargs")
"""Fields of a request that change the prompt in a way that is not implemented here."""


class ChatTemplate:
    """The chat template of one model: the text by which the model server makes a prompt of the messages of a chat."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile the template.

        Args:
            source: Jinja source of the template.
            special_tokens: The tokenizer's special tokens by name, such as ``bos_token``.

        Raises:
            ConfigError: it cannot be compiled, or jinja2 is not installed.
        """
        try:
            self._template = _compiled(source)
        except ImportError as exc:
            raise ConfigError(
                "router.tokenizer: needs the package jinja2; pip install 'penstock[tokenizer]'"
            ) from exc
        self._special_tokens = dict(special_tokens)
        self._takes_parts = _PARTS_LOOP.search(source) is not None

    def render(self, body: Mapping[str, Any]) -> str | None:
        """Return the prompt of a chat request with this body; None if it cannot be determined here.

        That is the case if a message contains more than text, a field changes the template, or the template fails.
        """
        if any(body.get(name) for name in _ELSEWHERE):
            return None
        messages = [_message(each, takes_parts=self._takes_parts) for each in body["messages"]]
        if any(each is None for each in messages):
            return None
        given = body.get("chat_template_kwargs")
        values = {
            **self._special_tokens,
            "messages": messages,
            "tools": [_tool(each) for each in body.get("tools") or ()] or None,
            "documents": None,
            "add_generation_prompt": body.get("add_generation_prompt", True),
            **(given if isinstance(given, dict) else {}),
        }
        if (effort := body.get("reasoning_effort")) is not None:
            # As in vLLM, for templates that think only if they are asked to.
            values = {"enable_thinking": effort != "none", **values, "reasoning_effort": effort}
        try:
            return str(self._template.render(values))
        except Exception as exc:  # noqa: BLE001 - templates are programs: any error may come; the worker will say so
            log.debug("chat not rendered", why=str(exc))
            return None


_TOOL_OPTIONS: Final = ("strict", "defer_loading")
"""Keys of a function that vLLM passes to templates only if they are given."""


def _tool(tool: Any) -> Any:
    """Return the definition of a tool as vLLM 0.32 passes it to templates: the keys that it knows, in its own order.

    A definition that vLLM refuses is returned unchanged.
    """
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping):
        return tool
    deferred = tool.get("defer_loading")
    if deferred is not None:
        function = {"defer_loading": deferred, **function}
    known = {key: function.get(key) for key in ("name", "description", "parameters")}
    known |= {key: function[key] for key in _TOOL_OPTIONS if function.get(key) is not None}
    outer = {"type": "function", "function": known}
    return outer if deferred is None else {**outer, "defer_loading": deferred}


def _compiled(source: str) -> Any:
    """Return a compiled template in the same environment as that of transformers' chat_template_utils."""
    from jinja2 import TemplateError  # noqa: PLC0415 - an extra
    from jinja2.ext import Extension, loopcontrols  # noqa: PLC0415
    from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: PLC0415

    class Generation(Extension):
        """Ignores the tags around the model's own messages, which are only used in training."""

        tags = {"generation"}  # noqa: RUF012 - as the base class has it

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except TemplateError as exc:
        raise ConfigError(f"router.tokenizer: the model's chat template: {exc}") from exc


def load_chat_template(tokenizer: Path) -> ChatTemplate | None:
    """Return the template next to a ``tokenizer.json``; None if there is none.

    Raises:
        ConfigError: it cannot be read or compiled.
    """
    config = _tokenizer_config(tokenizer.with_name("tokenizer_config.json"))
    jinja = tokenizer.with_name("chat_template.jinja")
    try:
        source = (
            jinja.read_text(encoding="utf-8") if jinja.is_file() else _default(config.get("chat_template"))
        )
    except OSError as exc:
        raise ConfigError(f"router.tokenizer: {jinja}: {exc.strerror}") from exc
    if source is None:
        log.warning(
            "no chat template alongside the tokenizer: KV events do not join chats", path=str(tokenizer)
        )
        return None
    tokens = {name: _token(config[name]) for name in _TOKEN_NAMES if config.get(name)}
    return ChatTemplate(source, {name: token for name, token in tokens.items() if token is not None})


def _tokenizer_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_bytes()) if path.is_file() else {}
    except (OSError, ValueError) as exc:
        raise ConfigError(f"router.tokenizer: {path}: {exc}") from exc
    return config if isinstance(config, dict) else {}


def _default(template: Any) -> str | None:
    """Return the template for plain chats; a model can have several by name. None if there is none."""
    if isinstance(template, list):
        named = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _token(value: Any) -> str | None:
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _message(message: Mapping[str, Any], *, takes_parts: bool) -> dict[str, Any] | None:
    """Return a message in the form in which vLLM 0.32 passes it to templates; None if it contains more than text."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(content, list):
        content = [] if content is None else [content]
    texts = [text for text in map(_text, content) if text is not None]
    if len(texts) < len(content):
        return None
    is_list = takes_parts and role != "tool"
    made: dict[str, Any] = {
        "role": role,
        "content": [{"type": "text", "text": text} for text in texts] if is_list else "\n".join(texts),
    }
    if role == "assistant" and isinstance(calls := message.get("tool_calls"), list) and calls:
        made["tool_calls"] = [_call(each) for each in calls]
    if role == "assistant" and message.get("reasoning") is not None:
        made["reasoning"] = made["reasoning_content"] = message["reasoning"]
    names = ("name", "tool_call_id") if role == "tool" else ("name",)
    return made | {name: message[name] for name in names if isinstance(message.get(name), str)}


def _text(part: Any) -> str | None:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict) or str(part.get("type")) not in _TEXT_PARTS:
        return None
    text = part.get("text")
    return text if isinstance(text, str) else None


def _call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(arguments := function.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(arguments) if arguments else {}}}
    except ValueError:
        return call


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - templates may give it by place
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(form: str) -> str:
    return dt.datetime.now().strftime(form)  # noqa: DTZ005 - as transformers does, in the host's time zone
