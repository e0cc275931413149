"""Keeps one small process beside the arbiter that starts it again after `kill -9`; the arbiter does the same for it.

Only killing both at once ends supervision, and then the graph's processes serve on until the next `penstock up` or
`penstock down`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from penstock.core import logs
from penstock.local import watchdog_child

_log = logs.get_logger(__name__)

_PERIOD_S = 0.2
"""Real seconds between two checks of it. Chosen."""
_END_S = 2.0
"""Real seconds that it may take to end. Chosen: it does nothing but exit."""


class Watchdog:
    """The process, from the arbiter's side."""

    def __init__(self, successor: Sequence[str], environment: Mapping[str, str]) -> None:
        """Name what follows the arbiter; nothing is started yet."""
        self._successor = list(successor)
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Its newest process, or None before the first."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start it.

        Raises:
            OSError: it cannot be forked.
        """
        self._close_pipe()
        self._process = subprocess.Popen(  # noqa: S603 - this interpreter, a module of this package
            [sys.executable, "-I", "-S", watchdog_child.__file__, *self._successor],
            stdin=subprocess.PIPE,
            env=self._environment,
            start_new_session=True,
        )

    async def keep(self) -> None:
        """Start it again whenever it has died, until cancelled."""
        while True:
            await asyncio.sleep(_PERIOD_S)
            if self._process is None or self._process.poll() is not None:
                _log.warning("watchdog started again")
                try:
                    self.start()
                except OSError as exc:
                    _log.warning("watchdog cannot be started", why=str(exc))

    def end(self) -> None:
        """Say that the arbiter ends by itself, and wait until the process is gone. Never fails."""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None  # noqa: S101 - asked for above
        with contextlib.suppress(OSError):
            os.write(process.stdin.fileno(), b"end")
        self._close_pipe()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _close_pipe(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
