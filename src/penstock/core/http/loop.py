"""Runs a process's main coroutine on uvloop, with termination signals converted to an event."""

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
"""Wall-clock seconds within which further SIGTERMs count as the same request to stop: a supervisor that signals a
process and then its process group reaches the group's leader twice. Chosen: these arrive within milliseconds."""


END_REAL_S = 10.0
"""Maximum wall-clock seconds from the end of ``main`` to the end of every remaining task and thread; then the process
exits immediately. Chosen: a cancelled task takes milliseconds, and supervisors send SIGKILL only minutes later."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT)

_on_signal: ContextVar[Callable[[signal.Signals], None] | None] = ContextVar("on_signal", default=None)

log = get_logger(__name__)


def run(main: Callable[[asyncio.Event], Coroutine[Any, Any, T]]) -> T:
    """Run ``main(stop)`` and return its result; the first SIGTERM or SIGINT sets ``stop``, the second cancels ``main``.

    A SIGTERM within one second (`ECHO_REAL_S`) of the first signal is ignored; a SIGINT, such as a user's second
    Ctrl-C, always counts. The soft limit of open files is raised to the hard limit, because each stream needs two
    sockets. Tasks that remain after ``main`` are cancelled; if they do not end within ten wall-clock seconds
    (`END_REAL_S`), the process exits with status 1.

    Raises:
        asyncio.CancelledError: A second signal arrived before ``main`` returned.
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
    """Wait until ``task`` has ended, ``stop`` is set, or ``timeout_s`` has passed; the task is not cancelled.

    Args:
        task: The task.
        stop: Event that ends the wait.
        timeout_s: Maximum wall-clock seconds to wait; None means no limit.
    """
    stopped = asyncio.create_task(stop.wait(), name="stop")
    try:
        await asyncio.wait({task, stopped}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()


async def run_until(stop: asyncio.Event, work: Coroutine[Any, Any, None], *, grace_s: float) -> bool:
    """Run ``work`` until it ends or ``stop`` is set; return False if it was cancelled and did not end within ``grace_s``, else True.

    When ``stop`` is set, the work is cancelled. An exception that ``work`` raises is raised.

    Args:
        stop: Event that ends the work.
        work: The coroutine.
        grace_s: Maximum wall-clock seconds for the work to end after it was cancelled.
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
    """Restore the handlers of SIGTERM and SIGINT after a library replaced them; outside of `run` the handlers are removed."""
    if threading.current_thread() is not threading.main_thread():
        return  # only the main thread can handle signals
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
