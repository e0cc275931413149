"""The last published batches of KV events, for subscribers that missed them; what vLLM's publisher answers.

Asked with a number, 8 bytes, big-endian, on a ROUTER socket; answered with each batch that is still held from there on,
oldest first, then a number of all ones. Answers wait for nobody: what the asker's queue cannot take is dropped.

Source: vLLM, vllm/distributed/kv_events.py, ``ZmqEventPublisher._service_replay``.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Final

NUMBER_BYTES: Final = 8
MAX_BYTES: Final = 1 << 26
"""Chosen: 64 MiB a worker, some 15 M tokens, since simulated workers share a host by the dozen; vLLM has no such bound."""
_END: Final = b"\xff" * NUMBER_BYTES
_QUESTION_FRAMES: Final = 3
"""Who asks, nothing, and the number."""


class KvReplay:
    """One worker's answers; its socket lives with the running event loop."""

    def __init__(self, zmq: Any, topic: bytes, batches: int) -> None:
        """Hold nothing yet; nothing is bound before `start`.

        Args:
            zmq: The library.
            topic: Sent with each batch.
            batches: Held at most, >= 1.
        """
        self._zmq = zmq
        self._topic = topic
        self._held: deque[tuple[bytes, bytes]] = deque(maxlen=batches)
        self._bytes = 0
        self._socket: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def endpoint(self) -> str:
        """Where it answers, with the port that was taken."""
        return str(self._socket.getsockopt_string(self._zmq.LAST_ENDPOINT))

    def start(self, context: Any, endpoint: str) -> None:
        """Bind; `zmq.ZMQError` where that cannot be done."""
        self._socket = context.socket(self._zmq.ROUTER)
        # A whole buffer and its end fit into the queue of one who asks.
        self._socket.set_hwm(0)
        self._socket.bind(endpoint)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.getsockopt(self._zmq.FD), self._answer_all)

    def close(self) -> None:
        """Answer no more; the context closes the socket."""
        if self._loop is not None:
            self._loop.remove_reader(self._socket.getsockopt(self._zmq.FD))
            self._loop = None

    def add(self, number: bytes, payload: bytes) -> None:
        """Hold a published batch; the oldest go for it."""
        if len(self._held) == self._held.maxlen:
            self._drop_oldest()
        self._held.append((number, payload))
        self._bytes += len(payload)
        while self._bytes > MAX_BYTES:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        self._bytes -= len(self._held.popleft()[1])

    def _answer_all(self) -> None:
        while self._socket.getsockopt(self._zmq.EVENTS) & self._zmq.POLLIN:
            question = self._socket.recv_multipart(self._zmq.NOBLOCK)
            if len(question) == _QUESTION_FRAMES and len(question[2]) == NUMBER_BYTES:
                self._answer(*question)

    def _answer(self, asker: bytes, empty: bytes, first: bytes) -> None:
        # Big-endian numbers of one length compare as their bytes do.
        for number, payload in self._held:
            if number >= first:
                self._socket.send_multipart((asker, empty, self._topic, number, payload), self._zmq.NOBLOCK)
        self._socket.send_multipart((asker, empty, b"", _END, b""), self._zmq.NOBLOCK)
