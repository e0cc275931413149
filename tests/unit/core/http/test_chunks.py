import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.http.client_connection import UNKNOWN, next_chunk_at

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(body):
    """Frame a body."""
    return b"%x\r\n%b\r\n" % (len(body), body)


@pytest.mark.parametrize(
    ("data", "at", "expected"),
    [
        (b"", 0, 0),
        (chunk(b"abc"), 0, 0),
        (chunk(b"abc") + chunk(b"x" * 300), 0, 0),
        (b"head" + chunk(b"abc"), 4, 0),
        (b"5\r\nab", 0, 5),
        (b"5\r\n", 0, 7),
        (b"xyz\r\n" + chunk(b"abc"), 5, 0),
        (b"abc", 10, 7),
        (b"5", 0, UNKNOWN),
        (b"5\r", 0, UNKNOWN),
        (b"5;ext=1\r\nabcde\r\n", 0, UNKNOWN),
        (b"0\r\n\r\n", 0, UNKNOWN),
        (b"HTTP/1.1 200 OK\r\n\r\n", 0, UNKNOWN),
        (b"f" * 30, 0, UNKNOWN),
    ],
)
def test_where_the_next_chunk_begins(data, at, expected):
    """Whole chunks end at 0, cut ones behind the read, anything unusual is unknown."""
    assert next_chunk_at(data, at) == expected


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=8), st.data())
def test_tracking_agrees_with_the_framing(bodies, data):
    """Whatever the pieces, a position that is known is right."""
    frames = [chunk(body) for body in bodies]
    whole = b"".join(frames)
    starts = {0}
    for frame in frames:
        starts.add(max(starts) + len(frame))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=10)))
    at, position = 0, 0
    for begin, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        at = next_chunk_at(whole[begin:end], at)
        position = end
        if at == UNKNOWN:
            return
        assert position + at in starts


async def collect(response):
    """Return what a sink with on_chunk gets, as (framed, body) and (None, body) pairs, and the outcome."""
    seen = []
    done = asyncio.get_running_loop().create_future()
    response.set_sink(
        lambda data: seen.append((None, data)),
        lambda: done.set_result("end"),
        lambda error: done.set_result(type(error)),
        on_chunk=lambda framed, at: seen.append((framed, framed[at:-2])),
    )
    return seen, await done


@pytest.mark.parametrize(
    ("parts", "framed", "body"),
    [
        ([HEAD, chunk(b"ab"), chunk(b"cde"), b"0\r\n\r\n"], [b"ab", b"cde"], b"abcde"),
        ([HEAD + chunk(b"ab"), chunk(b"c" * 300), b"0\r\n\r\n"], [b"c" * 300], b"ab" + b"c" * 300),
        ([HEAD, b"5\r\nab", b"cde\r\n", chunk(b"f"), b"0\r\n\r\n"], [b"f"], b"abcdef"),
        ([HEAD, chunk(b"a") + chunk(b"b"), chunk(b"c"), b"0\r\n\r\n"], [b"c"], b"abc"),
        ([HEAD, b"1", b"\r\na\r\n", chunk(b"b"), b"0\r\n\r\n"], [], b"ab"),
        ([HEAD, b"1;x=y\r\na\r\n", chunk(b"b"), b"0\r\n\r\n"], [], b"ab"),
        (
            [HEAD, b"14\r\n", chunk(b"f" * 11) + b"pad", b"!\r\n", b"0\r\n\r\n"],
            [],
            chunk(b"f" * 11) + b"pad!",
        ),
        ([HEAD[:30], HEAD[30:], chunk(b"a"), b"0\r\n\r\n"], [], b"a"),
        ([b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD, chunk(b"a"), b"0\r\n\r\n"], [], b"a"),
        ([HEAD, b"A\r\n" + b"x" * 10 + b"\r\n", b"0\r\n\r\n"], [], b"x" * 10),
        (
            [b"HTTP/1.1 200 OK\r\ncontent-length: 12\r\n\r\n", chunk(b"a"), chunk(b"b")],
            [],
            chunk(b"a") + chunk(b"b"),
        ),
    ],
)
async def test_only_whole_chunks_in_one_read_are_passed_on_framed(answering, pool, parts, framed, body):
    """The body is the same whichever way it goes; what only looks like a chunk goes through the parser."""
    upstream = await answering(*parts)
    seen, outcome = await collect(await pool.stream("GET", upstream.url))
    assert outcome == "end"
    assert b"".join(part for _, part in seen) == body
    passed = [part for frame, part in seen if frame is not None]
    assert passed == framed
    assert all(frame == chunk(part) for frame, part in seen if frame is not None)
