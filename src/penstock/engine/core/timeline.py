"""Runs an engine along simulated time; the real-time server and virtual-time simulators share it.

The start of a step is the end of the previous one while there is work, so lateness of the caller never
accumulates: a caller that comes late gets several steps at once, each with its own scheduled time.
"""

from __future__ import annotations

from collections import deque

from penstock.engine.core.engine import Engine, EngineStep, StepOutcome
from penstock.engine.core.requests import EngineRequest


class Timeline:
    """An engine, its running step and the requests that arrived after the simulated time reached so far."""

    def __init__(self, engine: Engine, start_s: float = 0.0) -> None:
        self.engine = engine
        self._now_s = start_s
        self._step: EngineStep | None = None
        self._inbox: deque[EngineRequest] = deque()

    @property
    def now_s(self) -> float:
        """Simulated time reached so far."""
        return self._now_s

    @property
    def backlog(self) -> int:
        """Requests handed in whose arrival the timeline has not reached."""
        return len(self._inbox)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to do, pinned prompts included."""
        return not self._inbox and self.engine.is_idle

    def submit(self, request: EngineRequest) -> None:
        """Hand in a request; arrivals must come in order of ``arrival_s``."""
        self._inbox.append(request)

    def next_due_s(self) -> float | None:
        """Return when `run_until` has something to do, or None while nothing will ever be due."""
        if self._step is not None:
            return self._step.end_s
        event_s = self.engine.next_event_s()
        if self._inbox:
            arrival_s = self._inbox[0].arrival_s
            event_s = arrival_s if event_s is None else min(event_s, arrival_s)
        return None if event_s is None else max(event_s, self._now_s)

    def run_until(self, now_s: float, *, max_steps: int) -> list[StepOutcome]:
        """Do everything due at or before ``now_s``; return the outcomes of the steps that ended.

        It stops after ``max_steps``, so that a late server can flush in between; more may then be due.
        """
        outcomes: list[StepOutcome] = []
        while len(outcomes) < max_steps and (due_s := self.next_due_s()) is not None and due_s <= now_s:
            self._now_s = due_s
            step, self._step = self._step, None
            if step is not None:
                outcomes.append(self.engine.finish_step(step))
            self._begin(due_s)
        return outcomes

    def retry(self, now_s: float) -> None:
        """Begin a step if none runs: to be called after blocks were released from outside."""
        if self._step is None:
            self._now_s = max(self._now_s, now_s)
            self._begin(self._now_s)

    def abort(self, request_id: str, now_s: float) -> bool:
        """End a request wherever it is; False if it is unknown or has ended."""
        for request in self._inbox:
            if request.request_id == request_id:
                self._inbox.remove(request)
                return True
        return self.engine.abort(request_id, now_s)

    def _begin(self, now_s: float) -> None:
        while self._inbox and self._inbox[0].arrival_s <= now_s:
            self.engine.add(self._inbox.popleft())
        self._step = self.engine.begin_step(now_s)
