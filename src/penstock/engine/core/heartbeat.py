"""Which heartbeats a decode worker owes to which prefill worker, and when; the server sends them.

A request is tracked from its arrival in the scheduler, waiting included, until its KV has been read or it
ends. One message per remote engine renews all its requests; all messages go out together, once an interval.
Source: vLLM 0.32, NixlConnector, ``build_connector_meta``.
"""

from __future__ import annotations

import math


class HeartbeatSchedule:
    """Batches heartbeats per remote engine; times in simulated seconds."""

    __slots__ = ("_interval_s", "_sent_s", "_tracked")

    def __init__(self, interval_s: float) -> None:
        """Set the pause between two rounds of messages, > 0."""
        self._interval_s = interval_s
        self._tracked: dict[str, dict[str, None]] = {}
        self._sent_s = -math.inf

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

    def due(self, now_s: float) -> dict[str, list[str]]:
        """Return the messages to send now, remote request ids by engine, and count them as sent."""
        due_s = self.next_s()
        if due_s is None or now_s < due_s:
            return {}
        self._sent_s = now_s
        return {engine_id: list(requests) for engine_id, requests in self._tracked.items()}

    def next_s(self) -> float | None:
        """Return when the next messages are due (in the past: at once), or None if nothing is tracked."""
        return self._sent_s + self._interval_s if self._tracked else None
