"""Asks a worker for batches of KV events again, as vLLM's publisher replays them; bounded in time, number and size.

Asked for on a socket of its own: a number, 8 bytes, big-endian. Answered with each batch that its buffer still holds from
there on, oldest first, and a number of all ones at the end. The worker's socket drops what it cannot queue, so that
a long answer may have holes and no end: whoever reads it asks again from the first hole.

Source: vLLM, vllm/distributed/kv_events.py, ``ZmqEventPublisher._service_replay``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, Final

NUMBER_BYTES: Final = 8
FIRST_ANSWER_S: Final = 1.0
"""Chosen: vLLM looks for questions each 0.1 s, between two batches of a busy engine."""
NEXT_ANSWER_S: Final = 0.5
"""Chosen: what comes later than this after the batch before it was dropped."""
MAX_BATCHES: Final = 1 << 17
"""Chosen: 13 times vLLM's default buffer; whoever sends more in one answer does not end it."""
MAX_BYTES: Final = 1 << 28
"""Chosen: 256 MiB in one answer, some 60 M tokens."""
_END: Final = (1 << 8 * NUMBER_BYTES) - 1
_LAST_FRAMES: Final = 2
"""Number and payload. A topic goes before them since vLLM 0.32, and nothing did earlier."""


async def replayed(zmq: Any, context: Any, address: str, first: int) -> AsyncGenerator[tuple[int, bytes]]:
    """Yield a worker's batches from a number on, each with its number, until the answer ends or falls silent.

    Args:
        zmq: The library.
        context: Of asynchronous sockets.
        address: Where the worker answers.
        first: The first number asked for, >= 0.
    """
    socket = context.socket(zmq.DEALER)
    try:
        socket.setsockopt(zmq.IPV6, 1)
        # Without a bound of its own the size below is the bound: what this side drops would be a hole, too.
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.connect(address)
        await socket.send_multipart((b"", first.to_bytes(NUMBER_BYTES, "big")))
        patience_s, left_bytes = FIRST_ANSWER_S, MAX_BYTES
        for _ in range(MAX_BATCHES):
            try:
                frames = await asyncio.wait_for(socket.recv_multipart(), patience_s)
            except TimeoutError:
                return
            if len(frames) < _LAST_FRAMES or len(frames[-2]) != NUMBER_BYTES:
                return
            number, payload = int.from_bytes(frames[-2], "big"), frames[-1]
            left_bytes -= len(payload)
            if number == _END or left_bytes < 0:
                return
            patience_s = NEXT_ANSWER_S
            yield number, payload
    finally:
        socket.close(linger=0)
