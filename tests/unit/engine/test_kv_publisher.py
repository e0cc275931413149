"""KV events of a simulated worker over real ZMQ sockets, field by field as vLLM sends them."""

import asyncio
import builtins
import json
import socket

import pytest

from penstock.core.errors import ConfigError, PortInUseError
from penstock.core.simulated_tokens import token_ids
from penstock.engine.core.kv_blocks import prefix_keys
from penstock.engine.serve.kv_publisher import KvEventsConfig, KvPublisher, ReplayBuffer, parse_events_config

msgspec = pytest.importorskip("msgspec", reason="the extra kv-events is not installed")
zmq = pytest.importorskip("zmq", reason="pyzmq is not installed")

PROMPT = "0123456789abcdef" * 12
"""192 bytes: 48 tokens, 3 blocks of 16."""
KEYS = prefix_keys(PROMPT.encode(), 16)


def config(**changes):
    """Return the flag's value; port 0 takes a free one."""
    return json.dumps({"enable_kv_cache_events": True, "endpoint": "tcp://127.0.0.1:*", **changes})


async def reset(client):
    """Ask a worker to forget its cache; return whether it did."""
    answer = await client.pool.request("POST", f"{client.server.url}/reset_prefix_cache")
    assert answer.status == 200
    return json.loads(answer.body)["success"]


class Subscriber:
    """The router's side."""

    def __init__(self, endpoint):
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(endpoint)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._context.destroy(linger=0)

    async def message(self):
        """Return the next message: topic, number and batch."""
        while True:
            try:
                topic, number, payload = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                await asyncio.sleep(0.005)
            else:
                return topic, int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)

    async def joined(self, client):
        """Return once messages arrive, and the number of the last; a subscription takes a moment."""
        while True:
            assert await reset(client)
            try:
                _, number, _ = await asyncio.wait_for(self.message(), 0.05)
            except TimeoutError:
                continue
            return number


async def test_events_have_vllms_fields(serving):
    """Stored, removed and cleared: three frames, numbers without gaps, a map per event, all fields by name."""
    flags = {"kv_events_config": config(topic="kv"), "num_gpu_blocks_override": 4, "max_model_len": 64}
    async with serving(**flags) as worker:
        with Subscriber(worker.server.worker.publisher.endpoint) as subscriber:
            number = await subscriber.joined(worker)
            await worker.complete(PROMPT, max_tokens=1)
            topic, next_number, (sent_s, events, rank) = await subscriber.message()

            assert (topic, next_number, rank) == (b"kv", number + 1, 0)
            assert sent_s > 1.7e9
            assert events == [
                {
                    "type": "BlockStored",
                    "block_hashes": KEYS,
                    "parent_block_hash": None,
                    "token_ids": token_ids(PROMPT.encode()).tolist(),
                    "block_size": 16,
                    "lora_id": None,
                    "medium": "GPU",
                    "lora_name": None,
                    "extra_keys": [None] * 3,
                    "group_idx": 0,
                    "kv_cache_spec_kind": "full_attention",
                }
            ]

            await worker.complete("x" * 128, max_tokens=1)
            _, last_number, (_, events, _) = await subscriber.message()
            removed = {"type": "BlockRemoved", "block_hashes": KEYS[:1:-1], "medium": "GPU", "group_idx": 0}
            assert (last_number, events[0]) == (number + 2, removed)
            assert events[1]["block_hashes"] == prefix_keys(b"x" * 128, 16)

            assert await reset(worker)
            _, _, (_, events, _) = await subscriber.message()
            assert events == [{"type": "AllBlocksCleared"}]


@pytest.mark.parametrize("value", [None, "{}", '{"enable_kv_cache_events": true, "publisher": "null"}'])
def test_nothing_is_published_unless_asked_for(value):
    """As in vLLM."""
    assert not parse_events_config(value).is_on


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", "JSON"),
        ('{"publisher": "kafka"}', "publisher"),
        ('{"endpoint": "5557"}', "endpoint"),
        ('{"hwm": -1}', "hwm"),
    ],
)
def test_bad_values_are_named(value, message):
    """Flag and field are in the message."""
    with pytest.raises(ConfigError, match=rf"--kv-events-config: .*{message}"):
        parse_events_config(value)


def test_a_taken_port_is_named():
    """Two workers of one host with one port."""
    first = KvPublisher(parse_events_config(config()), 16)
    first.start()
    second = KvPublisher(KvEventsConfig(endpoint=first.endpoint), 16)
    try:
        with pytest.raises(PortInUseError, match=f"{first.endpoint} is in use"):
            second.start()
    finally:
        first.close()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_subscribers_of_either_family_reach_it():
    """As in pods, whose workers listen on every address."""
    publisher = KvPublisher(KvEventsConfig(endpoint="tcp://[::]:*"), 16)
    publisher.start()
    port = int(publisher.endpoint.rpartition(":")[2])
    try:
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, port)).close()
    finally:
        publisher.close()


def test_an_address_of_another_host_is_refused():
    """The message has the endpoint."""
    with pytest.raises(ConfigError, match=r"cannot bind tcp://192\.0\.2\.1:5557"):
        KvPublisher(KvEventsConfig(endpoint="tcp://192.0.2.1:5557"), 16).start()


@pytest.mark.parametrize("missing", ["msgspec", "zmq"])
def test_a_missing_library_names_its_extra(monkeypatch, missing):
    """At start, with the command that installs it."""
    original = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name == missing:
            raise ImportError(name=name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ConfigError, match=rf"the package {missing}; pip install 'penstock\[kv-events\]'"):
        KvPublisher(KvEventsConfig(), 16)


async def replayed(endpoint, first):
    """Ask a worker for what it published, as a router does; return the frames of each answer after the delimiter."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(endpoint)
    socket.send_multipart((b"", first.to_bytes(8, "big")))
    found = []
    try:
        while not found or found[-1][1] != b"\xff" * 8:
            try:
                found.append(socket.recv_multipart(zmq.NOBLOCK)[1:])
            except zmq.Again:
                await asyncio.sleep(0.005)
    finally:
        context.destroy(linger=0)
    return found


async def test_what_was_published_is_replayed_from_a_number_on(serving):
    """As vLLM's publisher does: topic, number and payload of what the buffer holds, then the end."""
    replay = {"replay_endpoint": "tcp://127.0.0.1:*", "buffer_steps": 2, "topic": "kv"}
    async with serving(kv_events_config=config(**replay)) as worker:
        for _ in range(3):
            assert await reset(worker)
        endpoint = worker.server.worker.publisher.replay_endpoint
        whole, last = await replayed(endpoint, 0), await replayed(endpoint, 2)

    assert [(topic, int.from_bytes(number, "big")) for topic, number, _ in whole[:-1]] == [
        (b"kv", 1),
        (b"kv", 2),
    ]
    assert msgspec.msgpack.decode(whole[0][2])[1] == [{"type": "AllBlocksCleared"}]
    assert whole[-1] == [b"", b"\xff" * 8, b""]
    assert last == whole[1:]


def test_a_buffer_is_bounded_in_number_and_size(monkeypatch):
    """The oldest go first."""
    monkeypatch.setattr("penstock.engine.serve.kv_publisher.MAX_BYTES", 10)
    for batches, held in ((100, [3, 4]), (1, [4])):
        buffer = ReplayBuffer(batches)
        for number in range(5):
            buffer.add(bytes([number]), b"1234")
        assert buffer.since(bytes([0])) == [(bytes([number]), b"1234") for number in held]
