"""Sends SSE comments to clients whose stream is silent while it waits, so that no load balancer or proxy closes the connection.

A stream that waits to be resumed on another worker always gets comments. Before the first token they are only sent if
``router.keepAliveSeconds`` is set: the first comment needs the head of a 200 response, so that a later error can only be an
event.
"""

from __future__ import annotations

import asyncio
from typing import Final

from penstock.core.http.messages import EVENT_STREAM
from penstock.router.proxy.call import CompletionCall

COMMENT_REAL_S: Final = 15.0
"""Maximum interval between comments in real seconds. Chosen: half of the shortest default idle timeout of load balancers, 30 s."""

COMMENT: Final = b": waiting for a worker that continues the answer\n\n"
"""Comment for a stream that waits to be resumed. Clients skip lines that begin with a colon (HTML standard, section 9.2.6)."""
KEEP_ALIVE: Final = b": keep-alive\n\n"
"""Comment for a stream that has not sent a token yet."""


class WaitComments:
    """Sends SSE comments (lines that clients ignore) to the streams of one router that wait for a token, so that clients stay.

    Each stream has a timer of its own. ``keep_alive_real_s`` is the interval before the first token, in real seconds;
    None sends none then.
    """

    def __init__(self, keep_alive_real_s: float | None) -> None:
        """Create the sender without any streams.

        ``keep_alive_real_s`` is the interval between comments before the first token, in real seconds; None sends none then.
        """
        self._keep_alive_real_s = keep_alive_real_s
        self._resume_interval_real_s = min(COMMENT_REAL_S, keep_alive_real_s or COMMENT_REAL_S)
        self._timers: dict[CompletionCall, asyncio.TimerHandle] = {}

    def arrive(self, call: CompletionCall) -> None:
        """Send comments to the stream of a new request, while it waits for its first token, until `end` is called for it.

        Comments are lines that clients ignore. Does nothing if comments before the first token are disabled.
        """
        if self._keep_alive_real_s is not None:
            self._arm(call, self._keep_alive_real_s, KEEP_ALIVE)

    def begin(self, call: CompletionCall) -> None:
        """Send comments (lines that clients ignore) to a stream that waits to be resumed by another worker, until `end` is called.

        At least one is sent every 15 real seconds (`COMMENT_REAL_S`). Does nothing if the stream gets comments already.
        """
        if call not in self._timers:
            self._arm(call, self._resume_interval_real_s, COMMENT)

    def end(self, call: CompletionCall) -> None:
        """Stop sending comments to a stream, because a worker sends it or it has ended; does nothing for a stream without comments."""
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
            call.has_only_comments = True
        responder.write(comment)
