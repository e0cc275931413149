"""Publishes changes of a worker's KV cache over ZMQ, as vLLM 0.32 does; needs the extra ``penstock[kv-events]``.

Messages have three frames: topic, sequence number (8 bytes, big-endian, from 0) and msgpack of ``[time, events,
rank]``, where each event is a map. Sending never blocks: messages that a slow subscriber cannot receive are dropped
and appear as a gap in the sequence numbers. The subscriber can request them again as long as they are in the replay
buffer.

Source: vLLM, vllm/distributed/kv_events.py; maps instead of arrays since its pull request 42892.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from penstock.core.errors import ConfigError, PortInUseError
from penstock.core.logs import get_logger
from penstock.core.simulated_tokens import token_ids
from penstock.core.validation import read_json_flag
from penstock.engine.core.kv_blocks import BlocksRemoved, BlocksStored, KvFact

NUMBER_BYTES: Final = 8
"""Length of a sequence number in bytes."""
MAX_BYTES: Final = 1 << 26
"""Maximum size of the replay buffer. Chosen: 64 MiB per worker, some 15 M tokens, since dozens of simulated workers
share a host; vLLM has no such limit."""
_END: Final = b"\xff" * NUMBER_BYTES
_QUESTION_FRAMES: Final = 3
"""Number of frames of a replay request: identity of the subscriber, an empty frame, and the sequence number."""


class ReplayBuffer:
    """The batches of events that were published last, limited in number and total size; the oldest batches are dropped first."""

    def __init__(self, batches: int) -> None:
        self._batches = batches
        self._held: deque[tuple[bytes, bytes]] = deque()
        self._bytes = 0

    def add(self, number: bytes, payload: bytes) -> None:
        """Store a batch (the encoded message ``payload``) under its sequence number."""
        self._held.append((number, payload))
        self._bytes += len(payload)
        while len(self._held) > self._batches or self._bytes > MAX_BYTES:
            self._bytes -= len(self._held.popleft()[1])

    def since(self, first: bytes) -> list[tuple[bytes, bytes]]:
        """Return (sequence number, payload) of the stored batches from sequence number ``first`` on, oldest first.

        Big-endian numbers of equal length compare like their bytes. Returns an empty list if no such batch is stored.
        """
        return [held for held in self._held if held[0] >= first]


log = get_logger(__name__)

_FLAG = "--kv-events-config"
_MEDIUM = "GPU"
_RANK = 0
"""Data-parallel rank; a simulated worker has only this one."""


class KvEventsConfig(BaseModel):
    """vLLM's JSON configuration of KV events, with vLLM's defaults.

    Attributes:
        enable_kv_cache_events: Whether events are published.
        publisher: ``zmq``, or the text ``null`` to publish nothing; None means ``zmq``.
        endpoint: ZMQ endpoint of the publishing socket.
        replay_endpoint: ZMQ endpoint for replay requests; None disables replay.
        buffer_steps: Maximum number of batches in the replay buffer.
        hwm: Maximum number of messages queued per subscriber (ZMQ's high-water mark); 0 means no limit.
        topic: ZMQ topic of the messages.
    """

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
        """Whether events are published."""
        return self.enable_kv_cache_events and self.publisher != "null"


def parse_events_config(text: str | None) -> KvEventsConfig:
    """Parse the value of ``--kv-events-config``; None gives the defaults, with events disabled.

    Raises:
        ConfigError: The value is invalid.
    """
    if text is None:
        return KvEventsConfig()
    config = read_json_flag(KvEventsConfig, text, _FLAG)
    if config.model_extra:
        log.info("kv-events-config keys without meaning here are ignored", keys=sorted(config.model_extra))
    return config


class KvPublisher:
    """Publishes the KV events (changes of the prefix cache) of one worker."""

    def __init__(self, config: KvEventsConfig, block_size: int) -> None:
        try:
            import msgspec  # noqa: PLC0415 - optional dependency
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
        self._buffer = ReplayBuffer(config.buffer_steps)
        self._context: Any = None
        self._socket: Any = None
        self._replay: Any = None

    @property
    def endpoint(self) -> str:
        """Address at which the worker publishes, with the actual port."""
        return str(self._socket.getsockopt_string(self._zmq.LAST_ENDPOINT))

    @property
    def replay_endpoint(self) -> str:
        """Address at which the worker answers replay requests, with the actual port."""
        return str(self._replay.getsockopt_string(self._zmq.LAST_ENDPOINT))

    def start(self) -> None:
        """Bind the sockets. vLLM connects to an endpoint without a wildcard, but a simulated worker always binds.

        Raises:
            ConfigError: An endpoint cannot be bound; PortInUseError if it is in use.
        """
        config, zmq = self._config, self._zmq
        self._context = zmq.Context()
        self._socket = self._bind(zmq.PUB, config.endpoint, config.hwm)
        if config.replay_endpoint is not None:
            # No limit, so that the complete buffer and its end message fit into a subscriber's queue.
            self._replay = self._bind(zmq.ROUTER, config.replay_endpoint, 0)
            asyncio.get_running_loop().add_reader(self._replay.getsockopt(zmq.FD), self._answer_all)

    def _bind(self, kind: int, endpoint: str, most_queued: int) -> Any:
        zmq = self._zmq
        try:
            socket = self._context.socket(kind)
            socket.set_hwm(most_queued)
            if "[" in endpoint:
                socket.setsockopt(zmq.IPV6, 1)  # by default libzmq uses IPv4 only
            socket.bind(endpoint)
        except zmq.ZMQError as exc:
            self.close()
            if exc.errno == errno.EADDRINUSE:
                raise PortInUseError(f"{_FLAG}: {endpoint} is in use; choose another port") from exc
            raise ConfigError(f"{_FLAG}: cannot bind {endpoint}: {exc}") from exc
        return socket

    def publish(self, facts: Iterable[KvFact]) -> None:
        """Send changes of the prefix cache as one batch; does nothing before `start` and after `close`."""
        if self._socket is None:
            return
        batch = [time.time(), [self._event(fact) for fact in facts], _RANK]
        number = next(self._numbers).to_bytes(NUMBER_BYTES, "big")
        payload = self._encode(batch)
        self._socket.send_multipart((self._topic, number, payload))
        if self._replay is not None:
            self._buffer.add(number, payload)

    def close(self) -> None:
        """Close the sockets; messages that subscribers have not received are dropped."""
        if self._replay is not None:
            asyncio.get_running_loop().remove_reader(self._replay.getsockopt(self._zmq.FD))
        if self._context is not None:
            self._context.destroy(linger=0)
        self._context = self._socket = self._replay = None

    def _answer_all(self) -> None:
        while self._replay.getsockopt(self._zmq.EVENTS) & self._zmq.POLLIN:
            question = self._replay.recv_multipart(self._zmq.NOBLOCK)
            if len(question) != _QUESTION_FRAMES or len(question[2]) != NUMBER_BYTES:
                continue
            asker, empty, first = question
            for number, payload in [*self._buffer.since(first), (_END, b"")]:
                topic = self._topic if payload else b""
                self._replay.send_multipart((asker, empty, topic, number, payload), self._zmq.NOBLOCK)

    def _event(self, fact: KvFact) -> dict[str, Any]:
        match fact:
            case BlocksStored(keys, parent, tokens, adapter):
                return {
                    "type": "BlockStored",
                    "block_hashes": keys,
                    "parent_block_hash": parent,
                    "token_ids": token_ids(tokens).tolist(),
                    "block_size": self._block_size,
                    "lora_id": None,
                    "medium": _MEDIUM,
                    "lora_name": adapter,
                    "extra_keys": [None if adapter is None else [adapter]] * len(keys),
                    "group_idx": 0,
                    "kv_cache_spec_kind": "full_attention",
                }
            case BlocksRemoved(keys):
                return {"type": "BlockRemoved", "block_hashes": keys, "medium": _MEDIUM, "group_idx": 0}
            case _:
                return {"type": "AllBlocksCleared"}
