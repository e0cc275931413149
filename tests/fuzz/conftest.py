"""Random broken input: how much of it, from which seed, and how bytes and lines are broken.

`make test` runs a short part; `make fuzz` runs long. A failure names its round; FUZZ_SEED and FUZZ_ROUND repeat it.
"""

import asyncio
import os
import random

import pytest

SHORT_ROUNDS = 150


def pytest_asyncio_loop_factories(config, item):
    """Run on asyncio's own loop: the transports here are objects, and its debug output names more."""
    return {"asyncio": asyncio.new_event_loop}


@pytest.fixture
def rounds():
    """Yield (name, random generator) of every round; each generator depends on seed and round alone."""
    seed = int(os.environ.get("FUZZ_SEED", "1"))
    only = os.environ.get("FUZZ_ROUND")
    count = int(os.environ.get("FUZZ_ROUNDS", str(SHORT_ROUNDS)))
    numbers = range(count) if only is None else [int(only)]
    return ((f"FUZZ_SEED={seed} FUZZ_ROUND={n}", random.Random(f"{seed}/{n}")) for n in numbers)


def _delete(rng, seed, _other, _tokens):
    begin = rng.randrange(len(seed) + 1)
    return seed[:begin] + seed[begin + rng.randrange(1, 20) :]


def _repeat(rng, seed, _other, _tokens):
    begin = rng.randrange(len(seed) + 1)
    end = begin + rng.randrange(1, 40)
    return seed[:end] + seed[begin:end] * rng.choice([1, 3, 500]) + seed[end:]


def _insert(rng, seed, _other, tokens):
    at = rng.randrange(len(seed) + 1)
    return seed[:at] + rng.choice(tokens) + seed[at:]


def _replace(rng, seed, _other, tokens):
    at = rng.randrange(len(seed) + 1)
    token = rng.choice(tokens)
    return seed[:at] + token + seed[at + len(token) :]


def _splice(rng, seed, other, _tokens):
    return seed[: rng.randrange(len(seed) + 1)] + other[rng.randrange(len(other) + 1) :]


def _swap(rng, seed, _other, _tokens):
    a, b = sorted(rng.randrange(len(seed) + 1) for _ in range(2))
    return seed[b:] + seed[a:b] + seed[:a]


_MUTATIONS = (_delete, _repeat, _insert, _replace, _splice, _swap)


@pytest.fixture
def pieces():
    """Return a function that cuts bytes into reads: mostly of one size, which may be a single byte."""

    def cut(rng, data):
        sizes = rng.choice([(1,), (7,), (100,), (5000,), (1, 7, 100, 5000, 200_000)])
        least = len(data) // 2000  # keeps a round short
        at = 0
        while at < len(data):
            size = max(least, rng.choice(sizes))
            yield data[at : at + size]
            at += size

    return cut


@pytest.fixture
def mutate():
    """Return a function that breaks one of several texts, or byte strings, in up to six places."""

    def broken(rng, corpus, tokens, *, longest=200_000):
        found = rng.choice(corpus)
        for _ in range(rng.choice([0, 1, 1, 2, 3, 6])):
            found = rng.choice(_MUTATIONS)(rng, found, rng.choice(corpus), tokens)[:longest]
        return found

    return broken


class Wire(asyncio.Transport):
    """A transport without a socket, which keeps what is written, and tells its protocol, if any, that it is closed."""

    def __init__(self):
        super().__init__()
        self.protocol = None
        self.written = bytearray()
        self.is_closed = self.has_ended = False

    def write(self, data):
        """Keep what is written."""
        assert not self.has_ended, "written behind the end of the sending side"
        self.written += data

    def _close(self):
        if not self.is_closed and self.protocol is not None:
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)
        self.is_closed = True

    abort = close = _close

    def is_closing(self):
        """Return whether it is closed."""
        return self.is_closed

    def can_write_eof(self):
        """Return that the sending side can end alone."""
        return True

    def write_eof(self):
        """End the sending side."""
        self.has_ended = True

    def get_write_buffer_size(self):
        """Return that nothing waits."""
        return 0

    def set_write_buffer_limits(self, high=None, low=None):
        """Ignore the limits."""

    def get_extra_info(self, name, default=None):
        """Return the peer's address."""
        return ("192.0.2.1", 1) if name == "peername" else default

    def pause_reading(self):
        """Deliver on: what has been read must be taken."""

    resume_reading = pause_reading


@pytest.fixture
def make_wire():
    """Return what makes a transport without a socket."""
    return Wire
