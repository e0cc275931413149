"""Work that runs until it ends or a process is told to stop."""

from __future__ import annotations

import asyncio

import pytest

from penstock.core.errors import ClusterError
from penstock.core.http.loop import ended_or_stopped, run_until


async def stubborn(started, freed):
    """Continue after a cancellation until it is freed."""
    started.set()
    while not freed.is_set():
        try:
            await freed.wait()
        except asyncio.CancelledError:
            continue


async def test_work_that_ends_by_itself_was_in_time():
    """Its process returns without a signal."""
    assert await run_until(asyncio.Event(), asyncio.sleep(0), grace_s=5.0)


async def test_the_works_error_is_raised():
    """A process that cannot work says why."""

    async def fail():
        raise ClusterError("no API server")

    with pytest.raises(ClusterError, match="no API server"):
        await run_until(asyncio.Event(), fail(), grace_s=5.0)


async def test_work_that_goes_on_after_the_stop_is_late():
    """The grace bounds the wait; whether it was enough is returned."""
    stop, started, freed = asyncio.Event(), asyncio.Event(), asyncio.Event()
    running = asyncio.create_task(run_until(stop, stubborn(started, freed), grace_s=0.0))
    await started.wait()
    stop.set()
    assert not await running
    freed.set()


async def test_a_task_goes_on_after_the_stop():
    """Who waits decides what becomes of it."""
    stop, freed = asyncio.Event(), asyncio.Event()
    task = asyncio.create_task(freed.wait())
    stop.set()
    await ended_or_stopped(task, stop)
    assert not task.done()
    await ended_or_stopped(task, asyncio.Event(), timeout_s=0.0)
    assert not task.done()
    freed.set()
    await ended_or_stopped(task, asyncio.Event())
    assert task.done()
