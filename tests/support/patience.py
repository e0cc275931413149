"""How long tests wait for what other processes and sockets do: the one place of their limits.

A test waits for an event. The limit says when the event will never come; it is generous, because only a failing test
reaches it, and it grows with the slowness of the machine, which is measured once at the start of a run.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

_VARIABLE = "PENSTOCK_TEST_SLOWNESS"
_ROUNDS = 400_000
_REFERENCE_S = 0.03
"""Measured: what `_work` takes on an idle core of the machine that CI's limits were chosen on."""


def _work() -> int:
    total = 0
    for number in range(_ROUNDS):
        total = (total * 31 + number) & 0xFFFFFFFF
    return total


def measured_slowness() -> float:
    """Return how many times longer this machine takes now than an idle reference machine, from 1 to 8.

    The first process of a run measures; those that it starts inherit the figure.
    """
    if (known := os.environ.get(_VARIABLE)) is not None:
        return float(known)
    began_s = time.perf_counter()
    for _ in range(8):
        _work()
    factor = (time.perf_counter() - began_s) / (8 * _REFERENCE_S)
    factor = round(min(8.0, max(1.0, factor)), 1)
    os.environ[_VARIABLE] = str(factor)
    return factor


SLOWNESS: Final = measured_slowness()
LIMIT_S: Final = min(480.0, 120.0 * SLOWNESS)
"""Real seconds after which what is waited for will never come. Chosen: an idle machine needs a tenth of it for the
slowest start of a graph, and pytest's own limit of a test comes later, so that the failure names the event."""
_LOOK_S, _OWN_LOOK_S = 0.02, 0.002
"""Between two looks at other processes, and at the state of the tests' own, which changes fast and costs nothing to see."""


def within(seconds: float) -> float:
    """Return a duration that a test asserts, as this machine needs it: for what an idle one does in ``seconds``."""
    return seconds * SLOWNESS


def eventually(condition: Callable[[], Any], what: object = None) -> Any:
    """Return the first true value of ``condition``; fail after `LIMIT_S` and name what was waited for, by default its source."""
    deadline_s = time.monotonic() + LIMIT_S
    while not (value := condition()):
        assert time.monotonic() < deadline_s, f"not within {LIMIT_S:g} s: {_named(condition, what)}"
        time.sleep(_LOOK_S)
    return value


def _named(condition: Callable[..., object], what: object) -> object:
    """Return what a failure names: ``what``, or the source of the condition."""
    if what is not None:
        return what
    try:
        return inspect.getsource(condition).strip()
    except (OSError, TypeError):
        return condition


async def until_asked(
    condition: Callable[[], Awaitable[Any]], what: object = None, *, limit_s: float = LIMIT_S
) -> Any:
    """Return the first true value that ``condition`` awaits; fail after the limit and name what was waited for."""
    deadline_s = time.monotonic() + limit_s
    while not (value := await condition()):
        assert time.monotonic() < deadline_s, f"not within {limit_s:g} s: {_named(condition, what)}"
        await asyncio.sleep(_LOOK_S)
    return value


async def until(condition: Callable[[], Any], what: object = None, *, blocks: bool = False) -> Any:
    """Return the first true value of ``condition``; fail after `LIMIT_S` and name what was waited for.

    It is asked on the event loop; in a thread if it ``blocks``, because it reads files or asks a server.
    """
    deadline_s = time.monotonic() + LIMIT_S
    while not (value := await asyncio.to_thread(condition) if blocks else condition()):
        assert time.monotonic() < deadline_s, f"not within {LIMIT_S:g} s: {_named(condition, what)}"
        await asyncio.sleep(_LOOK_S if blocks else _OWN_LOOK_S)
    return value
