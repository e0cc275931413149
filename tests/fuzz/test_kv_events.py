"""Broken KV events: counted or ignored, never an exception, and never a chain of blocks without an end."""

import pytest

from penstock.api import Role, RouterConfig
from penstock.router.admission import Admission
from penstock.router.core.build import SPLIT, build_router
from penstock.router.core.worker import WorkerSpec
from penstock.router.kv_listener import KvListener
from penstock.router.policy.kv_events import KvEvents
from penstock.router.policy.prefixes import PrefixIndex

msgspec = pytest.importorskip("msgspec", reason="the extra kv-events is not installed")
pytest.importorskip("zmq", reason="pyzmq is not installed")

HASHES = [b"a", b"b", b"c", b"d"]


def batch(*events):
    """Return a batch's payload as vLLM encodes it."""
    return msgspec.msgpack.encode([1.5, list(events), None])


CORPUS = [
    batch(["BlockStored", HASHES, None, list(range(64)), 16, None, "GPU", None]),
    batch(
        ["BlockStored", [b"e"], b"d", list(range(16)), 16, None, "CPU", None], ["BlockRemoved", HASHES, "GPU"]
    ),
    batch({"type": "BlockStored", "block_hashes": [1], "token_ids": list(range(16)), "block_size": 16}),
    batch(["BlockRemoved", HASHES, "CPU"], ["AllBlocksCleared"]),
]
TOKENS = [
    b"\x90", b"\x91" * 3000, b"\x81" * 3000, b"\xc0", b"\xc3", b"\xa1\xff", b"\xa3GPU", b"\x91\xa3GPU", b"\xc4\x01a",
    b"\xc4\x01b", b"\xc4\x01c", b"\xcf" + b"\xff" * 8, b"\xd3" + b"\xff" * 8, b"\xcb\x7f\xf8" + bytes(6), b"\x10",
    b"\xa0", b"\xc7\x00\x01", b"\xd6\xff" + bytes(4),
]  # fmt: skip


@pytest.fixture
def listener():
    """A listener of a worker that is never connected to."""
    core = build_router(RouterConfig(), SPLIT)
    admission = Admission(core, lambda: 0.0)
    admission.set_workers([WorkerSpec("a", Role.PREFILL, "http://127.0.0.1:1", supervised=True)])
    return KvListener(admission, lambda name: None, port=1)


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(b"\x91" * 100_000, id="nested"),
        b"\x81\x80\x01",
        b"\x92\xcb" + bytes(8) + b"\xa1\xff",
        b"\x92\xcb" + bytes(8) + b"\x91\x91\xa1\xff",
        batch(["BlockStored", HASHES, None, list(range(64)), 16, None, ["GPU"], None]),
        batch(["BlockStored", HASHES, None, list(range(64)), 16, None, {}, None]),
        batch(["BlockRemoved", HASHES, ["GPU"]]),
        batch(["BlockStored", HASHES, None, "x" * 64, 16, None, "GPU", None]),
    ],
)
def test_what_is_no_event_is_counted(listener, payload):
    """Deep nesting, keys that cannot be hashed, text that is not UTF-8 and wrong types cost one message or event."""
    events = KvEvents(PrefixIndex(100), engine_block_tokens=16)
    listener.apply(events, (b"", bytes(8), payload))
    assert listener.malformed == 1
    listener.apply(events, (b"", bytes(7) + b"\1", CORPUS[0]))
    assert len(events) == 4


def test_any_message_is_applied_or_counted(rounds, mutate, listener):
    """No payload raises, and what is known of a worker stays within its bounds."""
    for name, rng in rounds:
        events = KvEvents(PrefixIndex(100), engine_block_tokens=16, block_tokens=16)
        for number in range(3):
            payload = mutate(rng, CORPUS, TOKENS, longest=20_000)
            try:
                listener.apply(events, (b"", number.to_bytes(8, "big"), payload))
            except BaseException as exc:
                exc.add_note(f"{name} payload={payload[:400]!r}")
                raise
