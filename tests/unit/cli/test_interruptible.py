"""A command that a signal cuts short clears up and says which signal it was."""

import asyncio
import os
import signal

import pytest

from penstock.cli.terminal import run_interruptible


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_cancels_and_later_ones_do_not_disturb_the_clearing_up(number):
    """What the command withdraws is withdrawn whole; the exit code is 128 and the first signal."""
    cleared = []

    async def command():
        try:
            os.kill(os.getpid(), number)
            await asyncio.Event().wait()
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            for _ in range(20):
                await asyncio.sleep(0)
            cleared.append(True)

    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as exit_info:
        run_interruptible(command())
    assert exit_info.value.code == 128 + number
    assert cleared == [True]
    assert signal.getsignal(number) is before


def test_a_signal_that_the_caller_ignores_stays_ignored():
    """As nohup does with SIGHUP."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    async def command():
        os.kill(os.getpid(), signal.SIGHUP)
        for _ in range(20):
            await asyncio.sleep(0)
        return 7

    assert run_interruptible(command()) == 7
