"""SSE comments for clients whose stream is silent while it waits, so that no load balancer or proxy cuts the connection.

A begun stream that waits for another worker always gets them. Before the first token they are sent only where
``router.keepAliveSeconds`` is set: the first comment needs the head of a 200, so that an error after it is an event.
"""

from __future__ import annotations

import asyncio
from typing import Final

from penstock.core.http.messages import EVENT_STREAM
from penstock.router.proxy.call import CompletionCall

COMMENT_REAL_S: Final = 15.0
"""Chosen: half of the shortest idle time-out that balancers have by default, 30 s; real seconds."""

COMMENT: Final = b": waiting for a worker that continues the answer\n\n"
"""Clients skip lines that begin with a colon (HTML standard, section 9.2.6)."""
KEEP_ALIVE: Final = b": keep-alive\n\n"
"""That of a stream of which nothing has come yet."""


class WaitComments:
    """The silent streams of one router, each with the timer of its next comment."""

    def __init__(self, keep_alive_real_s: float | None) -> None:
        """Prepare; ``keep_alive_real_s`` is the time between comments before the first token, None for none."""
        self._keep_alive_real_s = keep_alive_real_s
        self._begun_real_s = min(COMMENT_REAL_S, keep_alive_real_s or COMMENT_REAL_S)
        self._timers: dict[CompletionCall, asyncio.TimerHandle] = {}

    def arrive(self, call: CompletionCall) -> None:
        """Send comments to a stream that arrives, until it begins; does nothing where that is off."""
        if self._keep_alive_real_s is not None:
            self._arm(call, self._keep_alive_real_s, KEEP_ALIVE)

    def begin(self, call: CompletionCall) -> None:
        """Send a comment every `COMMENT_REAL_S`, or less, from now on; does nothing for a stream that waits already."""
        if call not in self._timers:
            self._arm(call, self._begun_real_s, COMMENT)

    def end(self, call: CompletionCall) -> None:
        """Stop, because a worker speaks or the stream ends; does nothing for one that does not wait."""
        timer = self._timers.pop(call, None)
        if timer is not None:
            timer.cancel()

    def _arm(self, call: CompletionCall, every_real_s: float, comment: bytes) -> None:
        loop = asyncio.get_running_loop()
        self._timers[call] = loop.call_later(every_real_s, self._send, call, every_real_s, comment)

    def _send(self, call: CompletionCall, every_real_s: float, comment: bytes) -> None:
        self._arm(call, every_real_s, comment)
        responder = call.responder
        if not responder.started:
            responder.start(200, content_type=EVENT_STREAM, headers=call.headers)
            call.has_comments_alone = True
        responder.write(comment)
