"""Divides a request's prompt into parts that cost the engine tokens: text, tools, tool calls, images, audio, files. Pure.

`penstock.router.proxy.completion` reads a body into parts, `penstock.router.proxy.prompt_cost` learns the cost of each kind.
The supported forms are those of OpenAI's chats and responses and of Anthropic's messages.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import orjson
import xxhash

TEXT: Final = "text"
WIDE: Final = "wide"
"""Text outside of ASCII, whose bytes cost more or fewer tokens than English text: Chinese, Cyrillic, emoji."""
TOOLS: Final = "tools"
CALLS: Final = "calls"
MESSAGE: Final = "message"
IMAGE: Final = "image"
AUDIO: Final = "audio"
VIDEO: Final = "video"
FILE: Final = "file"

MEDIA: Final = frozenset({IMAGE, AUDIO, VIDEO, FILE})

UNKNOWN: Final = "unknown"
"""Suffix of the kind of an image whose size is not visible in the request, because it is a link or has an unknown format."""

_BLOCK_BYTES: Final = 1024
"""Chosen: a system prompt of at least this size is recognized when it is sent again; a shorter one costs little."""
_SYSTEM: Final = frozenset({"system", "developer"})
_HEADER_BYTES: Final = 1 << 16
"""Number of bytes of an image that are searched for its width and height; a JPEG has its metadata before them, which may contain a
preview of this size."""


class PromptPart(NamedTuple):
    """A part of a prompt other than plain text.

    Attributes:
        kind: Kind of parts that cost alike: ``tools``, ``calls``, ``message``, ``image/18``, ``audio/wav`` and so on. The
            bytes of ``wide`` and ``text`` parts are also included in the prompt's text bytes.
        units: Size of the part: bytes of text or data; for messages, images and videos their number.
        block: Hash of the part, if it is of a kind that often recurs unchanged in other requests; None otherwise.
    """

    kind: str
    units: int
    block: int | None = None


def size_of(text: str) -> int:
    """Return the number of UTF-8 bytes of a text."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


class PromptMeter:
    """Adds up the sizes of the parts of one prompt, from which the number of its tokens is then estimated.

    Long texts that often recur in other requests (system prompts, tools) become parts of their own, with a hash, because the
    number of their tokens is learned separately.

    Attributes:
        text_bytes: Number of UTF-8 bytes of the prompt's text, including recognized blocks.
    """

    __slots__ = ("_blocks", "_counts", "text_bytes")

    def __init__(self) -> None:
        self.text_bytes = 0
        self._counts: dict[str, int] = {}
        self._blocks: list[PromptPart] = []

    @property
    def parts(self) -> tuple[PromptPart, ...]:
        """Parts of the prompt other than plain text, and its long texts that often recur in other requests."""
        return (*self._blocks, *(PromptPart(kind, units) for kind, units in self._counts.items()))

    def add_message(self, message: Mapping[str, Any]) -> None:
        """Add the size of one message of a chat, or of one item of the input of the Responses API, to the sizes of the prompt.

        ``message`` is the JSON object as the client sent it: ``role``, ``content``, ``tool_calls``, ``type`` and so on. Its
        text is added to `text_bytes`, everything else to `parts`.
        """
        self._count(MESSAGE, 1)
        content = message.get("content")
        if message.get("role") in _SYSTEM:
            self.add_system(content)
        else:
            self.add_content(content)
        if "content" in message and len(message) <= _PLAIN_KEYS:
            return
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            self._add_call(call.get("function") if isinstance(call, dict) else None)
        kind = message.get("type")
        if kind == "function_call":
            self._add_call(message)
        elif kind == "function_call_output":
            self.add_content(message.get("output"))

    def add_system(self, content: Any) -> None:
        """Add the size of a system prompt to the sizes of the prompt.

        ``content`` is the value of its ``content`` key: a text, or a list of objects, each a part of the content. A text of
        at least 1 KiB gets a part of its own in `parts`, with a hash, so that the number of its tokens, once learned, is
        used for every later request with the same system prompt.
        """
        if isinstance(content, str) and len(content) >= _BLOCK_BYTES:
            raw = content.encode("utf-8", "surrogatepass")
            self.text_bytes += len(raw)
            self._blocks.append(PromptPart(TEXT, len(raw), xxhash.xxh3_64_intdigest(raw)))
        else:
            self.add_content(content)

    def add_content(self, content: Any) -> None:
        """Add the size of a message's content to the sizes of the prompt: text to `text_bytes`, images and so on to `parts`.

        ``content`` is a text, or a list of JSON objects, each a text, an image or another part. Anything else adds nothing.
        """
        if isinstance(content, str):
            self._add_text(content)
        else:
            self._add_parts(content)

    def add_tools(self, tools: Any) -> None:
        """Add the size of a request's tool definitions to `parts`, with a hash by which the same tools are recognized again.

        Many requests contain the same tools, so that the number of their tokens, once learned, is used for every later
        request with the same hash. ``tools`` is the value of the body's ``tools`` key, a list of JSON objects; an empty list,
        or anything else, adds nothing.
        """
        if isinstance(tools, list) and tools:
            raw = orjson.dumps(tools)
            self._blocks.append(PromptPart(TOOLS, len(raw), xxhash.xxh3_64_intdigest(raw)))

    def _add_text(self, text: str) -> None:
        if text.isascii():
            self.text_bytes += len(text)
            return
        raw = text.encode("utf-8", "surrogatepass")
        self.text_bytes += len(raw)
        self._count(WIDE, len(raw) - len(text.encode("ascii", "ignore")))

    def _add_parts(self, content: Any) -> None:
        for part in content if isinstance(content, list) else ():
            if not isinstance(part, dict):
                continue
            text = part.get("text")
            if isinstance(text, str):
                self._add_text(text)
            else:
                self._add_part(part, str(part.get("type")))

    def _add_part(self, part: Mapping[str, Any], kind: str) -> None:
        if kind == "tool_result":
            self.add_content(part.get("content"))
        elif kind == "tool_use":
            self._add_call(part)
        elif kind in {"image_url", "input_image", "image"}:
            self._count(f"{IMAGE}/{_size_class(_link_of(part))}", 1)
        elif kind in {"input_audio", "audio_url"}:
            self._add_audio(part)
        elif kind == "video_url":
            self._count(VIDEO, 1)
        elif kind in {"file", "input_file", "document"}:
            self._count(FILE, len(_link_of(part)))

    def _add_call(self, call: Any) -> None:
        if not isinstance(call, dict):
            return
        given = call.get("arguments", call.get("input"))
        arguments = size_of(given) if isinstance(given, str) else len(orjson.dumps(given))
        name = call.get("name")
        self._count(CALLS, arguments + (size_of(name) if isinstance(name, str) else 0))

    def _add_audio(self, part: Mapping[str, Any]) -> None:
        given = part.get("input_audio")
        if isinstance(given, dict) and isinstance(given.get("data"), str):
            self._count(f"{AUDIO}/{_FORMATS.get(str(given.get('format')), UNKNOWN)}", len(given["data"]))
            return
        link = _link_of(part)
        head, _, data = link.partition(",")
        kind = head.removeprefix("data:audio/").partition(";")[0]
        self._count(f"{AUDIO}/{_FORMATS.get(kind, UNKNOWN)}", len(data) if head.startswith("data:") else 0)

    def _count(self, kind: str, units: int) -> None:
        self._counts[kind] = self._counts.get(kind, 0) + units


_PLAIN_KEYS: Final = 2
"""Role and content: a message with only these keys has no tool calls, and is not an item of another type."""
_FORMATS: Final = {"wav": "wav", "x-wav": "wav", "mp3": "mp3", "mpeg": "mp3"}


def _link_of(part: Mapping[str, Any]) -> str:
    """Return a part's link or data, in the forms of OpenAI's chats and responses and of Anthropic's messages; empty if it has none."""
    for key in ("image_url", "audio_url", "file", "source"):
        given = part.get(key)
        if isinstance(given, str):
            return given
        if isinstance(given, dict):
            part = given
            break
    for key in ("url", "file_data", "data", "file_url"):
        given = part.get(key)
        if isinstance(given, str):
            return given
    return ""


def _size_class(link: str) -> str:
    """Return the class of images of about the same size: the number of bits of the number of pixels; `UNKNOWN` if it is not visible.

    For engines with a fixed number of tokens per image, each class gets the same cost; for others the cost grows with the
    class.
    """
    head, comma, data = link.partition(",")
    if not comma:
        head, data = "", link
    elif not head.startswith("data:"):
        return UNKNOWN
    try:
        raw = base64.b64decode(data[: _HEADER_BYTES // 3 * 4])
    except (binascii.Error, ValueError):
        return UNKNOWN
    pixels = _pixels(raw)
    return UNKNOWN if pixels < 1 else str(pixels.bit_length())


def _pixels(raw: bytes) -> int:
    """Return width times height of a PNG, GIF, WebP or JPEG from its first bytes; 0 if they do not contain them."""
    if raw.startswith(b"\x89PNG\r\n\x1a\n") and len(raw) >= 24:
        return int.from_bytes(raw[16:20]) * int.from_bytes(raw[20:24])
    if raw.startswith(b"GIF8") and len(raw) >= 10:
        return int.from_bytes(raw[6:8], "little") * int.from_bytes(raw[8:10], "little")
    if raw.startswith(b"RIFF") and raw[8:12] == b"WEBP" and len(raw) >= 30:
        return _webp_pixels(raw)
    return _jpeg_pixels(raw) if raw.startswith(b"\xff\xd8") else 0


def _webp_pixels(raw: bytes) -> int:
    if raw[12:16] == b"VP8X":
        return (int.from_bytes(raw[24:27], "little") + 1) * (int.from_bytes(raw[27:30], "little") + 1)
    if raw[12:16] == b"VP8L":
        bits = int.from_bytes(raw[21:25], "little")
        return ((bits & 0x3FFF) + 1) * ((bits >> 14 & 0x3FFF) + 1)
    return (int.from_bytes(raw[26:28], "little") & 0x3FFF) * (int.from_bytes(raw[28:30], "little") & 0x3FFF)


def _jpeg_pixels(raw: bytes) -> int:
    """Walk a JPEG's segments to the frame header (ITU T.81, B.2.2)."""
    at = 2
    while at + 9 <= len(raw) and raw[at] == 0xFF:
        marker = raw[at + 1]
        if 0xC0 <= marker <= 0xCF and marker not in {0xC4, 0xC8, 0xCC}:
            return int.from_bytes(raw[at + 5 : at + 7]) * int.from_bytes(raw[at + 7 : at + 9])
        at += 2 + int.from_bytes(raw[at + 2 : at + 4])
    return 0
