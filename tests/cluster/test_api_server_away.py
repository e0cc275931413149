"""The API server stutters, hangs and is killed under load: real routers and workers serve on, and edits come about after."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from operating import until

pytestmark = [pytest.mark.cluster]

STOPPED_S, GOING_S = 0.8, 0.2
"""An API server that has a fifth of its time."""


async def stutter(plane):
    """Let the API server answer for a moment only, repeatedly."""
    try:
        while True:
            plane.freeze("kube-apiserver")
            await asyncio.sleep(STOPPED_S)
            plane.thaw("kube-apiserver")
            await asyncio.sleep(GOING_S)
    finally:
        plane.thaw("kube-apiserver")


async def test_a_slow_api_server_delays_a_rollout_and_loses_nothing(own, serving):
    """Workers roll while it answers for a fifth of the time."""
    plane, _ = own
    task = asyncio.create_task(stutter(plane))
    try:
        await serving.change("a roll", {"env": [{"name": "ROUND", "value": "1"}]})
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    assert serving.lost == {}


async def test_an_api_server_that_hangs_and_dies_costs_no_request(own, serving):
    """A hundred requests are served while it hangs, as many while it is gone; then an edit is carried out."""
    plane, _ = own

    async def hundred_more(what):
        before = serving.load.answered

        async def answered():
            return serving.load.answered >= before + 100

        await until(answered, f"a hundred requests {what}")

    plane.freeze("kube-apiserver")
    await hundred_more("while it hangs")
    plane.kill("kube-apiserver")
    await hundred_more("while it is gone")
    await asyncio.to_thread(plane.start_api_server)
    await serving.change("a roll", {"env": [{"name": "ROUND", "value": "1"}]})
    assert serving.load.lost == []
