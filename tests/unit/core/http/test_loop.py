import asyncio
import os
import signal
import subprocess
import sys

import pytest

from penstock.core.http import loop
from penstock.core.http.loop import run


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_sets_the_event(number):
    """SIGTERM and SIGINT ask main to stop instead of killing it."""

    async def main(stop):
        os.kill(os.getpid(), number)
        await stop.wait()
        return "stopped"

    assert run(main) == "stopped"


@pytest.mark.parametrize(("number", "echo_real_s"), [(signal.SIGINT, 1.0), (signal.SIGTERM, 0.0)])
def test_a_second_signal_cancels_main(number, echo_real_s, monkeypatch):
    """Somebody who asks twice does not want to wait."""
    monkeypatch.setattr(loop, "ECHO_REAL_S", echo_real_s)

    async def main(stop):
        os.kill(os.getpid(), signal.SIGTERM)
        await stop.wait()
        os.kill(os.getpid(), number)
        await asyncio.sleep(5)

    with pytest.raises(asyncio.CancelledError):
        run(main)


def test_sigterms_in_a_burst_are_one():
    """The kernel repeats a parent's death signal once per thread of the parent; streams still finish."""

    async def main(stop):
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
            await stop.wait()
            await asyncio.sleep(0.02)
        return "finished"

    assert run(main) == "finished"


REFUSES_TO_END = """
import asyncio
from penstock.core.http import loop

loop.END_REAL_S = 0.2

async def stubborn():
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass

async def main(stop):
    main.task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)

loop.run(main)
"""


@pytest.mark.slow
def test_a_task_that_refuses_to_end_does_not_hold_the_process():
    """A process whose main has returned exits with status 1 and says why, whatever its tasks do."""
    ended = subprocess.run([sys.executable, "-c", REFUSES_TO_END], capture_output=True, check=False)
    assert ended.returncode == 1
    assert b"tasks or threads do not end" in ended.stdout + ended.stderr
