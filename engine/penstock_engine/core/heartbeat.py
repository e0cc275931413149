"""Which heartbeats a decode worker owes to which prefill worker, and when; the server sends them.

A request is tracked from its arrival in the scheduler, waiting included, until its KV has been read or it
ends. One message per remote engine renews all its requests.
"""

from __future__ import annotations

import math


class HeartbeatSchedule:
    """Batches heartbeats per remote engine; times in simulated seconds."""

    __slots__ = ("_interval_s", "_sent_s", "_tracked")

    def __init__(self, interval_s: float) -> None:
        """Set the pause between two messages to the same engine, > 0."""
        self._interval_s = interval_s
        self._tracked: dict[str, dict[str, None]] = {}
        self._sent_s: dict[str, float] = {}

    def track(self, engine_id: str, remote_request_id: str) -> None:
        """Renew this request's lease from now on."""
        self._tracked.setdefault(engine_id, {})[remote_request_id] = None

    def untrack(self, engine_id: str, remote_request_id: str) -> None:
        """Stop renewing; unknown ids are ignored."""
        requests = self._tracked.get(engine_id)
        if requests is not None:
            requests.pop(remote_request_id, None)
            if not requests:
                del self._tracked[engine_id]
                self._forget_idle()

    def due(self, now_s: float) -> dict[str, list[str]]:
        """Return the messages to send now, remote request ids by engine, and count them as sent."""
        batch = {}
        for engine_id, requests in self._tracked.items():
            if self._next_s(engine_id) <= now_s:
                self._sent_s[engine_id] = now_s
                batch[engine_id] = list(requests)
        return batch

    def next_s(self) -> float | None:
        """Return when the next message is due (in the past: at once), or None if nothing is tracked."""
        return min((self._next_s(engine_id) for engine_id in self._tracked), default=None)

    def _next_s(self, engine_id: str) -> float:
        return self._sent_s.get(engine_id, -math.inf) + self._interval_s

    def _forget_idle(self) -> None:
        if len(self._sent_s) > 2 * len(self._tracked) + 64:
            self._sent_s = {engine: sent for engine, sent in self._sent_s.items() if engine in self._tracked}
