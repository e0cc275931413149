"""Broken notifications: refused with a reason, and leases, blocks and counters stay whole."""

import orjson
import pytest

from penstock.engine.core.lease import Read
from penstock.engine.serve.notifications import encode, parse

CORPUS = [
    encode("engine-1", [Read("a"), Read("b", 1, 3, 2)], ["c", "d"]),
    encode("engine-1", [], [f"cmpl-{number:032x}" for number in range(50)]),
    encode("", [Read("", 0, 0, 1)], [""]),
    b"HB:cmpl-1,cmpl-2",
    b"cmpl-1:2",
]
TOKENS = [
    b"{", b"}", b"[", b"]", b'"', b",", b":", b"null", b"true", b"-1", b"1e999", b"0.5", b"99999999999999999999", b"\\ud800",
    b"\0", b"\xff", b'"read"', b'"engine_id"', b'["a",0,0,1]', b'["a",0,0]', b"[" * 300,
]  # fmt: skip


def test_a_notification_is_understood_or_refused(rounds, mutate):
    """Whatever comes is a message whose parts have their types, or a ValueError that says what is wrong."""
    for name, rng in rounds:
        data = mutate(rng, CORPUS, TOKENS, longest=20_000)
        try:
            message = parse(data)
        except ValueError:
            with pytest.raises(ValueError, match="a notification is"):
                parse(data)
            continue
        assert isinstance(message.engine_id, str), name
        assert all(isinstance(each, str) for each in message.heartbeat), name
        for read in message.reads:
            assert 0 <= read.rank < 1024, name
            assert 0 <= read.reader < 1024, name
            assert 1 <= read.readers <= 1024, name
        assert set(orjson.loads(orjson.dumps(message.ids))) == set(message.ids), name
