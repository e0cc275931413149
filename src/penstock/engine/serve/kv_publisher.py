"""Publishes what changes in a worker's KV cache over ZMQ, as vLLM 0.32 does; needs the extra ``penstock[kv-events]``.

Messages have three frames: topic, number (8 bytes, big-endian, from 0) and msgpack of ``[time, events, rank]``, each
event a map. Sending never waits: what a slow subscriber cannot take is dropped, and shows as a gap in the numbers; it
may ask for it again (`KvReplay`).

Source: vLLM, vllm/distributed/kv_events.py; maps instead of arrays since its pull request 42892.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from penstock.core.errors import ConfigError, PortInUseError
from penstock.core.logs import get_logger
from penstock.core.simulated_tokens import token_ids
from penstock.core.validation import read_json_flag
from penstock.engine.core.kv_blocks import BlocksRemoved, BlocksStored, KvFact

NUMBER_BYTES: Final = 8
MAX_BYTES: Final = 1 << 26
"""Chosen: 64 MiB a worker, some 15 M tokens, since simulated workers share a host by the dozen; vLLM has no such bound."""
_END: Final = b"\xff" * NUMBER_BYTES
_QUESTION_FRAMES: Final = 3
"""Who asks, nothing, and the number."""


class KvReplay:
    """One worker's answers; its socket lives with the running event loop."""

    def __init__(self, zmq: Any, topic: bytes, batches: int) -> None:
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


log = get_logger(__name__)

_FLAG = "--kv-events-config"
_MEDIUM = "GPU"
_RANK = 0
"""Data-parallel rank; a simulated worker is the only one."""


class KvEventsConfig(BaseModel):
    """vLLM's JSON; its defaults."""

    model_config = ConfigDict(extra="allow")

    enable_kv_cache_events: bool = False
    publisher: Literal["null", "zmq"] | None = None
    endpoint: str = Field(default="tcp://*:5557", pattern=r"^(tcp|ipc|inproc)://.+")
    replay_endpoint: str | None = Field(default=None, pattern=r"^(tcp|ipc|inproc)://.+")
    buffer_steps: int = Field(default=10_000, ge=1)
    hwm: int = Field(default=100_000, ge=0)
    topic: str = ""

    @property
    def is_on(self) -> bool:
        """Whether anything is published."""
        return self.enable_kv_cache_events and self.publisher != "null"


def parse_events_config(text: str | None) -> KvEventsConfig:
    """Read the flag's value."""
    if text is None:
        return KvEventsConfig()
    config = read_json_flag(KvEventsConfig, text, _FLAG)
    if config.model_extra:
        log.info("kv-events-config keys without meaning here are ignored", keys=sorted(config.model_extra))
    return config


class KvPublisher:
    """One worker's publisher."""

    def __init__(self, config: KvEventsConfig, block_size: int) -> None:
        try:
            import msgspec  # noqa: PLC0415 - an extra
            import zmq  # noqa: PLC0415 - only needed with events
        except ImportError as exc:
            raise ConfigError(
                f"{_FLAG}: needs the package {exc.name}; pip install 'penstock[kv-events]'"
            ) from exc
        self._encode: Callable[[Any], bytes] = msgspec.msgpack.encode
        self._zmq = zmq
        self._config = config
        self._block_size = block_size
        self._topic = config.topic.encode()
        self._numbers = itertools.count()
        self._replay = (
            None if config.replay_endpoint is None else KvReplay(zmq, self._topic, config.buffer_steps)
        )
        self._context: Any = None
        self._socket: Any = None

    @property
    def endpoint(self) -> str:
        """Where it publishes, with the port that was taken."""
        return str(self._socket.getsockopt_string(self._zmq.LAST_ENDPOINT))

    @property
    def replay_endpoint(self) -> str | None:
        """Where it answers for what it published, with the port that was taken; None: nowhere."""
        return None if self._replay is None else self._replay.endpoint

    def start(self) -> None:
        """Bind. vLLM connects to an endpoint without a wildcard; a simulated worker is always the one that binds."""
        config = self._config
        self._context = self._zmq.Context()
        self._socket = self._context.socket(self._zmq.PUB)
        self._socket.set_hwm(config.hwm)
        self._bind(self._socket.bind, config.endpoint)
        if self._replay is not None and config.replay_endpoint is not None:
            self._bind(partial(self._replay.start, self._context), config.replay_endpoint)

    def _bind(self, bind: Callable[[str], None], endpoint: str) -> None:
        zmq = self._zmq
        try:
            bind(endpoint)
        except zmq.ZMQError as exc:
            self.close()
            if exc.errno == errno.EADDRINUSE:
                raise PortInUseError(f"{_FLAG}: {endpoint} is in use; choose another port") from exc
            raise ConfigError(f"{_FLAG}: cannot bind {endpoint}: {exc}") from exc

    def publish(self, facts: Iterable[KvFact]) -> None:
        """Send facts as one batch; none before `start` or after `close`."""
        if self._socket is None:
            return
        batch = [time.time(), [self._event(fact) for fact in facts], _RANK]
        number = next(self._numbers).to_bytes(NUMBER_BYTES, "big")
        payload = self._encode(batch)
        self._socket.send_multipart((self._topic, number, payload))
        if self._replay is not None:
            self._replay.add(number, payload)

    def close(self) -> None:
        """Stop; what subscribers have not taken is dropped."""
        if self._replay is not None:
            self._replay.close()
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = self._socket = None

    def _event(self, fact: KvFact) -> dict[str, Any]:
        match fact:
            case BlocksStored(keys, parent, tokens):
                return {
                    "type": "BlockStored",
                    "block_hashes": keys,
                    "parent_block_hash": parent,
                    "token_ids": token_ids(tokens).tolist(),
                    "block_size": self._block_size,
                    "lora_id": None,
                    "medium": _MEDIUM,
                    "lora_name": None,
                    "extra_keys": [None] * len(keys),
                    "group_idx": 0,
                    "kv_cache_spec_kind": "full_attention",
                }
            case BlocksRemoved(keys):
                return {"type": "BlockRemoved", "block_hashes": keys, "medium": _MEDIUM, "group_idx": 0}
            case _:
                return {"type": "AllBlocksCleared"}
