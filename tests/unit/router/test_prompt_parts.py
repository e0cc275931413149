"""What a prompt is made of, in the forms of each API."""

import base64
import struct

import orjson
import pytest

from penstock.router.proxy.completion import parse_completion

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
RULES = "Answer in one sentence. " * 50


def parsed(path, **fields):
    """Return a request as the router has it."""
    raw = orjson.dumps({"model": "llama", **fields})
    return parse_completion(f"/v1/{path}", b"application/json", raw, model="llama")


def units(request):
    """Return a prompt's parts by kind."""
    return {part.kind: part.units for part in request.parts}


def png(width, height):
    """Return the beginning of a picture."""
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", width, height) + bytes(20)


def gif(width, height):
    """The same as a GIF."""
    return b"GIF89a" + struct.pack("<HH", width, height) + bytes(20)


def webp(width, height):
    """The same as a WebP in its extended form."""
    return (
        b"RIFF\0\0\0\0WEBPVP8X"
        + bytes(8)
        + (width - 1).to_bytes(3, "little")
        + (height - 1).to_bytes(3, "little")
    )


def jpeg(width, height):
    """With an embedded preview before the frame header."""
    preview = b"\xff\xe1" + struct.pack(">H", 3002) + bytes(3000)
    return b"\xff\xd8" + preview + b"\xff\xc0" + struct.pack(">HBHH", 17, 8, height, width) + bytes(20)


def data_url(raw, kind="image/png"):
    """Return data as requests carry it."""
    return f"data:{kind};base64,{base64.b64encode(raw).decode()}"


def test_text_alone_is_counted_in_bytes_and_messages():
    """What is outside ASCII apart, because its bytes cost otherwise."""
    request = parsed(
        "chat/completions", messages=[{"role": "user", "content": "abc"}, {"role": "user", "content": "aé"}]
    )

    assert request.prompt_bytes == 6
    assert units(request) == {"message": 2, "wide": 2}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "chat/completions",
            {
                "tools": TOOLS,
                "messages": [
                    {"role": "user", "content": "hi"},
                    {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": [{"id": "1", "function": {"name": "look", "arguments": '{"a": 1}'}}],
                    },
                    {"role": "tool", "tool_call_id": "1", "content": "done"},
                ],
            },
        ),
        (
            "responses",
            {
                "tools": TOOLS,
                "input": [
                    {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                    {"type": "function_call", "name": "look", "arguments": '{"a": 1}'},
                    {"type": "function_call_output", "output": "done"},
                ],
            },
        ),
        (
            "messages",
            {
                "max_tokens": 8,
                "tools": TOOLS,
                "messages": [
                    {"role": "user", "content": "hi"},
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "name": "look", "input": '{"a": 1}'}],
                    },
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "content": [{"type": "text", "text": "done"}]}],
                    },
                ],
            },
        ),
    ],
)
def test_tools_and_their_calls_are_parts_in_each_api(path, body):
    """Definitions as JSON; of a call its name and arguments; what a tool returned is text."""
    request = parsed(path, **body)

    assert request.prompt_bytes == len("hidone")
    assert units(request) == {"tools": len(orjson.dumps(TOOLS)), "message": 3, "calls": len('look{"a": 1}')}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "chat/completions",
            {"messages": [{"role": "system", "content": RULES}, {"role": "user", "content": "hi"}]},
        ),
        ("responses", {"instructions": RULES, "input": "hi"}),
        ("messages", {"system": RULES, "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]}),
    ],
)
def test_a_long_system_prompt_is_recognized_in_each_api(path, body):
    """Its bytes are among those of the text, and its hash is the same wherever it comes."""
    request = parsed(path, **body)

    (block,) = (part for part in request.parts if part.block is not None)
    (other,) = (
        part for part in parsed("responses", instructions=RULES, input="more").parts if part.block is not None
    )
    assert request.prompt_bytes == len(RULES) + 2
    assert (block.kind, block.units, block.block) == ("text", len(RULES), other.block)


def test_the_same_tools_are_recognized_and_others_are_told_apart():
    """By the hash of their definitions."""
    others = [{"type": "function", "function": {"name": "listen"}}]
    blocks = [
        next(
            part.block for part in parsed("chat/completions", messages=[{"content": text}], tools=tools).parts
        )
        for text, tools in (("a", TOOLS), ("b", TOOLS), ("a", others))
    ]

    assert blocks[0] == blocks[1] != blocks[2]


@pytest.mark.parametrize("picture", [png, gif, webp, jpeg])
@pytest.mark.parametrize(("width", "height", "bits"), [(336, 336, 17), (1024, 1024, 21), (2000, 1500, 22)])
def test_an_image_is_of_the_class_of_its_pixels(picture, width, height, bits):
    """A power of two, from the header of its data."""
    part = {"type": "image_url", "image_url": {"url": data_url(picture(width, height))}}

    request = parsed("chat/completions", messages=[{"role": "user", "content": [part, part]}])

    assert units(request) == {"message": 1, f"image/{bits}": 2}
    assert request.prompt_bytes == 0


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "https://example.com/cat.png"}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 2000}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,%%%"}},
        {"type": "image_url", "image_url": {}},
        {"type": "input_image", "image_url": "https://example.com/cat.png"},
        {"type": "image", "source": {"type": "base64", "data": "AAAA"}},
        {"type": "image", "source": 5},
    ],
)
def test_an_image_whose_size_is_not_shown_is_of_a_class_of_its_own(part):
    """A link, or data in no known form."""
    request = parsed("chat/completions", messages=[{"role": "user", "content": [part]}])

    assert units(request) == {"message": 1, "image/unknown": 1}


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"type": "input_audio", "input_audio": {"data": "A" * 40, "format": "wav"}}, {"audio/wav": 40}),
        (
            {"type": "audio_url", "audio_url": {"url": "data:audio/mpeg;base64," + "A" * 40}},
            {"audio/mp3": 40},
        ),
        ({"type": "audio_url", "audio_url": {"url": "https://example.com/a.ogg"}}, {"audio/unknown": 0}),
        ({"type": "video_url", "video_url": {"url": "https://example.com/a.mp4"}}, {"video": 1}),
        ({"type": "file", "file": {"file_data": "A" * 30}}, {"file": 30}),
        ({"type": "document", "source": {"type": "base64", "data": "A" * 30}}, {"file": 30}),
        ({"type": "no such thing"}, {}),
    ],
)
def test_audio_video_and_files_are_parts(part, expected):
    """In bytes of their data, or by number."""
    request = parsed("chat/completions", messages=[{"role": "user", "content": [part]}])

    assert units(request) == {"message": 1, **expected}


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": "a", "tool_calls": 5},
        {"role": "assistant", "content": "a", "tool_calls": [5, {"function": 5}, {}]},
        {"role": "user", "content": ["a", 5, None]},
        {"role": 5, "content": {"a": 1}},
        {"role": "system", "content": [5]},
    ],
)
def test_a_malformed_message_is_left_to_the_worker(message):
    """It counts as what can be read of it."""
    assert units(parsed("chat/completions", messages=[message]))["message"] == 1
