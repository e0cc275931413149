"""SSE comments for clients whose begun stream waits for a worker, so that no balancer or proxy cuts a silent connection."""

from __future__ import annotations

import asyncio
from typing import Final

from penstock.router.proxy.call import CompletionCall

COMMENT_REAL_S: Final = 15.0
"""Chosen: half of the shortest idle time-out that balancers have by default, 30 s; real seconds."""

COMMENT: Final = b": waiting for a worker that continues the answer\n\n"
"""Clients skip lines that begin with a colon (HTML standard, section 9.2.6)."""


class WaitComments:
    """The begun streams of one router that wait, each with the timer of its next comment."""

    def __init__(self) -> None:
        self._timers: dict[CompletionCall, asyncio.TimerHandle] = {}

    def begin(self, call: CompletionCall) -> None:
        """Send a comment every `COMMENT_REAL_S` from now on; does nothing for a stream that waits already."""
        if call not in self._timers:
            self._arm(call)

    def end(self, call: CompletionCall) -> None:
        """Stop, because a worker speaks or the stream ends; does nothing for one that does not wait."""
        timer = self._timers.pop(call, None)
        if timer is not None:
            timer.cancel()

    def _arm(self, call: CompletionCall) -> None:
        loop = asyncio.get_running_loop()
        self._timers[call] = loop.call_later(COMMENT_REAL_S, self._send, call)

    def _send(self, call: CompletionCall) -> None:
        self._arm(call)
        call.responder.write(COMMENT)
