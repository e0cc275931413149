"""Runs a process's main coroutine on uvloop with termination signals turned into an event."""

from __future__ import annotations

import asyncio
import resource
import signal
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")

ECHO_REAL_S = 1.0
"""SIGTERMs this close together are one request to stop: a parent with several threads that is killed makes the
kernel send its children's PR_SET_PDEATHSIG once per thread. Real seconds. Chosen: those come within milliseconds."""


def run(main: Callable[[asyncio.Event], Coroutine[Any, Any, T]]) -> T:
    """Run ``main(stop)`` to its end; the first SIGTERM or SIGINT sets ``stop``, the second cancels ``main``.

    A SIGTERM within `ECHO_REAL_S` of the first is no second one; a SIGINT, somebody's second Ctrl-C, always is.

    The limit of open files is raised to the hard limit: each stream takes two sockets.

    Raises:
        asyncio.CancelledError: a second signal came before ``main`` returned.
    """
    raise_file_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_with_signals(main))


async def _with_signals(main: Callable[[asyncio.Event], Coroutine[Any, Any, T]]) -> T:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    task = asyncio.current_task()

    first_s = 0.0

    def on_signal(number: signal.Signals) -> None:
        nonlocal first_s
        if not stop.is_set():
            first_s = time.monotonic()
            stop.set()
        elif task is not None and (number is signal.SIGINT or time.monotonic() - first_s > ECHO_REAL_S):
            task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    try:
        return await main(stop)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
