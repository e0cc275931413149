"""Runs a process's main coroutine on uvloop with termination signals turned into an event."""

from __future__ import annotations

import asyncio
import resource
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")


def run(main: Callable[[asyncio.Event], Coroutine[Any, Any, T]]) -> T:
    """Run ``main(stop)`` to its end; the first SIGTERM or SIGINT sets ``stop``, the second cancels ``main``.

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

    def on_signal() -> None:
        if stop.is_set() and task is not None:
            task.cancel()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
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
