"""Runs an engine along simulated time; used by the real-time server and by virtual-time simulators.

While there is work, each step starts at the end of the previous one, so delays of the caller never accumulate: a late
caller gets several steps at once, each with its own scheduled time.
"""

from __future__ import annotations

from collections import deque

from penstock.engine.core.engine import Engine, EngineStep, StepOutcome
from penstock.engine.core.requests import EngineRequest


class Timeline:
    """An engine, its running step, and requests whose arrival is later than the current simulated time. Times are simulated seconds.

    Attributes:
        engine: The engine.
    """

    def __init__(self, engine: Engine, start_s: float = 0.0) -> None:
        self.engine = engine
        self._now_s = start_s
        self._step: EngineStep | None = None
        self._inbox: deque[EngineRequest] = deque()

    @property
    def now_s(self) -> float:
        """Current simulated time in seconds."""
        return self._now_s

    @property
    def backlog(self) -> int:
        """Number of submitted requests whose arrival time has not been reached yet."""
        return len(self._inbox)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to do. Prompts that are kept for other workers count as work."""
        return not self._inbox and self.engine.is_idle

    def submit(self, request: EngineRequest) -> None:
        """Add a request; requests must be added in order of ``arrival_s``."""
        self._inbox.append(request)

    def next_due_s(self) -> float | None:
        """Return the simulated time at which `run_until` has something to do; None if nothing is pending."""
        if self._step is not None:
            return self._step.end_s
        event_s = self.engine.next_event_s()
        if self._inbox:
            arrival_s = self._inbox[0].arrival_s
            event_s = arrival_s if event_s is None else min(event_s, arrival_s)
        return None if event_s is None else max(event_s, self._now_s)

    def run_until(self, now_s: float, *, max_steps: int) -> list[StepOutcome]:
        """Process everything up to ``now_s``; return the outcomes of the steps that ended.

        Args:
            now_s: Simulated time in seconds.
            max_steps: Maximum number of steps to process, so that a server that is behind its schedule can send data in
                between. Further steps can then be pending.
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
        """Start a step if none is running and a request can run; call this after blocks were released by something other than a step."""
        if self._step is None:
            self._now_s = max(self._now_s, now_s)
            self._begin(self._now_s)

    def abort(self, request_id: str, now_s: float) -> bool:
        """End a request, whether it has reached the engine or not; return False if it is unknown or has ended."""
        for request in self._inbox:
            if request.request_id == request_id:
                self._inbox.remove(request)
                return True
        return self.engine.abort(request_id, now_s)

    def _begin(self, now_s: float) -> None:
        while self._inbox and self._inbox[0].arrival_s <= now_s:
            self.engine.add(self._inbox.popleft())
        self._step = self.engine.begin_step(now_s)
