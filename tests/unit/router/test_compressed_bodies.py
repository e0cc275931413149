"""gzip request bodies: within the same limits as others, however small they are on the wire."""

import gzip
import tracemalloc

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from router_harness import error_of

from penstock.core.http.content_encoding import MalformedBodyError, gunzip

JSON_TYPE = (b"content-type", b"application/json")
GZIP = (JSON_TYPE, (b"content-encoding", b"gzip"))
BODY = {"model": "llama", "prompt": "hello " * 500}


@given(st.binary(max_size=300_000) | st.integers(0, 3_000_000).map(bytes))
def test_pieces_are_the_body_and_bounded(body):
    """Also a body of several pieces that takes few bytes."""
    pieces = list(gunzip(gzip.compress(body)))
    assert b"".join(pieces) == body
    assert max(map(len, pieces), default=0) <= 1 << 18


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        gzip.compress(b"x" * 1000)[:-1],
        gzip.compress(b"x" * 1000)[:-9] + b"\0" * 9,
        gzip.compress(b"x") + b"y",
        gzip.compress(b"x") + bytes(1 << 17),
        gzip.compress(b"x") * 2,
    ],
    ids=["empty", "plain", "cut", "check sum", "trailing", "padded", "members"],
)
def test_what_is_not_one_gzip_member_is_refused(body):
    """Nothing is read over."""
    with pytest.raises(MalformedBodyError):
        list(gunzip(body))


async def test_the_worker_gets_the_body_uncompressed(harness):
    """Its bytes are what the client compressed, and nothing stays counted."""
    worker, router = await harness.served("aggregated")
    raw = orjson.dumps(BODY)
    for name in (b"gzip", b"x-gzip", b"GZIP"):
        headers = (JSON_TYPE, (b"content-encoding", name))
        assert (await router.post(raw=gzip.compress(raw), headers=headers)).status == 200
    assert [each.raw for each in worker.seen] == [raw] * 3
    assert b"content-encoding" not in worker.seen[0].headers
    assert router.server.intake.buffered_bytes == 0


@pytest.mark.parametrize(
    ("raw", "encoding", "status", "code"),
    [
        (b"{}", b"gzip", 400, "invalid_encoding"),
        (gzip.compress(b"{"), b"gzip", 400, "invalid_json"),
        (gzip.compress(b" " * 5000), b"gzip", 413, "body_too_large"),
        (b"{}", b"zstd", 415, "unsupported_media_type"),
        (b"{}", b"gzip, gzip", 415, "unsupported_media_type"),
    ],
    ids=["plain", "not JSON", "too large", "zstd", "twice"],
)
async def test_bad_ones_never_reach_a_worker(harness, raw, encoding, status, code):
    """The message of another encoding names the one that is read."""
    worker, router = await harness.served("aggregated", config={"limits": {"maxBodyBytes": 4096}})
    answer = await router.post(raw=raw, headers=(JSON_TYPE, (b"content-encoding", encoding)))
    assert (answer.status, error_of(answer)["code"]) == (status, code)
    assert worker.seen == []
    assert router.server.intake.buffered_bytes == 0
    if status == 415:
        assert "gzip" in error_of(answer)["message"]
        assert answer.headers[b"accept-encoding"] == b"gzip"


async def test_a_bomb_takes_little_memory(harness):
    """300 kB that are 64 MiB: refused once they exceed the bound, and never held in full."""
    worker, router = await harness.served("aggregated", config={"limits": {"maxBodyBytes": 2 << 20}})
    bomb = gzip.compress(bytes(64 << 20), compresslevel=1)
    tracemalloc.start()
    try:
        answer = await router.post(raw=bomb, headers=GZIP)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (answer.status, worker.seen) == (413, [])
    assert most < 16 << 20
