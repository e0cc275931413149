"""Runs a process's main coroutine on uvloop with termination signals turned into an event."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from typing import Any, TypeVar

import uvloop

from penstock.core.logs import get_logger

T = TypeVar("T")

ECHO_REAL_S = 1.0
"""SIGTERMs this close together are one request to stop: a supervisor that signals a process and then its group reaches
its leader twice. Real seconds. Chosen: those come within milliseconds."""


END_REAL_S = 10.0
"""Longest time from the end of ``main`` to the end of every task and thread that it left, real seconds; then the
process exits at once. Chosen: a cancelled task takes milliseconds, and supervisors send SIGKILL only minutes later."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT)

_on_signal: ContextVar[Callable[[signal.Signals], None] | None] = ContextVar("on_signal", default=None)

log = get_logger(__name__)


def run(main: Callable[[asyncio.Event], Coroutine[Any, Any, T]]) -> T:
    """Run ``main(stop)`` to its end; the first SIGTERM or SIGINT sets ``stop``, the second cancels ``main``.

    A SIGTERM within `ECHO_REAL_S` of the first is not a second one; a SIGINT, a user's second Ctrl-C, always is.

    The limit of open files is raised to the hard limit: each stream takes two sockets.

    Tasks that ``main`` left are cancelled; if they do not end within `END_REAL_S`, the process exits with status 1.

    Raises:
        asyncio.CancelledError: a second signal came before ``main`` returned.
    """
    raise_file_limit()
    last_resort = threading.Timer(END_REAL_S, _exit)
    last_resort.daemon = True
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            try:
                return runner.run(_with_signals(main))
            finally:
                last_resort.start()
    finally:
        last_resort.cancel()


def _exit() -> None:
    log.error("tasks or threads do not end; exiting", after_real_s=END_REAL_S)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(1)


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

    _on_signal.set(on_signal)
    reclaim_signals()
    try:
        return await main(stop)
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


async def ended_or_stopped(
    task: asyncio.Task[Any], stop: asyncio.Event, *, timeout_s: float | None = None
) -> None:
    """Return when the task has ended, ``stop`` is set, or the real seconds are over; the task continues."""
    stopped = asyncio.create_task(stop.wait(), name="stop")
    try:
        await asyncio.wait({task, stopped}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()


async def run_until(stop: asyncio.Event, work: Coroutine[Any, Any, None], *, grace_s: float) -> bool:
    """Run ``work`` until it ends or ``stop`` is set, raising what it raises; return whether it came to its end in time.

    Once ``stop`` is set the work is cancelled, and has ``grace_s`` real seconds to end.
    """
    working = asyncio.create_task(work, name="work")
    try:
        await ended_or_stopped(working, stop)
    finally:
        working.cancel()
        _, late = await asyncio.wait({working}, timeout=grace_s)
    if working.done() and not working.cancelled():
        working.result()
    return not late


def reclaim_signals() -> None:
    """Take SIGTERM and SIGINT back from a library that claimed them; outside `run` nothing handles them afterwards."""
    if threading.current_thread() is not threading.main_thread():
        return  # signals are the main thread's
    loop, handler = asyncio.get_running_loop(), _on_signal.get()
    for number in _SIGNALS:
        if handler is None:
            loop.remove_signal_handler(number)
        else:
            loop.add_signal_handler(number, handler, number)


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
