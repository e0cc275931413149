"""What the ids of a prompt cost the router's event loop, in a stream that can continue by its tokens.

    python bench/prompt_ids.py [--batches 15] [--json]

A worker that returns token ids sends those of the prompt with its first event. The router parses that event to find the first
token, records the ids, and hides them from a client that did not ask for them. Of all batches the fastest counts.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import orjson
from options import read_options

from penstock.router.proxy.completion import CompletionRequest, parse_completion
from penstock.router.proxy.hidden_ids import without_ids
from penstock.router.proxy.stream_record import RecordedBytes, StreamRecord

VOCABULARY = 128_000


def first_event(tokens: int) -> bytes:
    """Return the first event of a chat whose prompt has this many tokens."""
    ids = [random.randrange(VOCABULARY) for _ in range(tokens)]
    delta = {"role": "assistant", "content": ""}
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
    chunk = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return b"data: " + orjson.dumps({**chunk, "choices": [choice], "prompt_token_ids": ids}) + b"\n\n"


def recorded(request: CompletionRequest, event: bytes) -> None:
    """Record an event as the router does when a stream starts."""
    record = StreamRecord(request, RecordedBytes(), by_tokens=True)
    record.append(event)
    record.read()


def fastest_ms(batches: int, run: Callable[[], object]) -> float:
    """Return the shortest processor time of a call in milliseconds."""
    times = []
    for _ in range(batches):
        began = time.process_time()
        run()
        times.append(time.process_time() - began)
    return 1e3 * min(times)


def main() -> None:
    """Print one line per prompt length, or all as JSON."""
    options = read_options(__doc__, batches=15)
    body = b'{"model":"m","stream":true,"max_tokens":9,"messages":[{"role":"user","content":"x"}]}'
    request = parse_completion("/v1/chat/completions", b"application/json", body, model="m")
    found = {}
    for tokens in (1_000, 10_000, 100_000):
        event = first_event(tokens)
        parse = fastest_ms(options.batches, lambda event=event: orjson.loads(event[6:]))
        record = fastest_ms(options.batches, lambda event=event: recorded(request, event))
        hide = fastest_ms(options.batches, lambda event=event: without_ids(event))
        found[tokens] = {"parse_ms": parse, "record_ms": record, "hide_ms": hide}
        if not options.json:
            print(f"{tokens:7,} tokens: parse {parse:.2f} ms, record {record:.2f} ms, hide {hide:.2f} ms")
    if options.json:
        print(orjson.dumps(found, option=orjson.OPT_NON_STR_KEYS).decode())


if __name__ == "__main__":
    main()
