"""The circuit breaker of one worker: after failures in a row it is left alone, then tried with one request.

Only 5xx answers, time-outs and broken or refused connections are failures: a 4xx is the client's doing,
and breakers that count it take whole fleets down. Numbers come from ``router.breaker``.
"""

from __future__ import annotations

from enum import StrEnum


class Circuit(StrEnum):
    """States of a breaker."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class CircuitBreaker:
    """Counts failures in a row; ``now`` is always an argument, in modelled seconds."""

    __slots__ = ("_failures", "_open_s", "_open_until_s", "_probing", "_state", "_threshold")

    def __init__(self, *, consecutive_failures: int, open_s: float) -> None:
        self._threshold = consecutive_failures
        self._open_s = open_s
        self.reset()

    def reset(self) -> None:
        """Forget everything; for a worker that was started anew."""
        self._state = Circuit.CLOSED
        self._failures = 0
        self._open_until_s = 0.0
        self._probing = False

    def state(self, now_s: float) -> Circuit:
        """Return the state; an open circuit becomes half-open when its time is over."""
        if self._state is Circuit.OPEN and now_s >= self._open_until_s:
            return Circuit.HALF_OPEN
        return self._state

    def allows(self, now_s: float) -> bool:
        """Return whether a request may be sent: closed, or half-open without a probe under way."""
        state = self.state(now_s)
        return state is Circuit.CLOSED or (state is Circuit.HALF_OPEN and not self._probing)

    def sent(self, now_s: float) -> bool:
        """Take note of a request sent; returns whether it is the probe of a half-open circuit."""
        if self.state(now_s) is not Circuit.HALF_OPEN:
            return False
        self._state = Circuit.HALF_OPEN
        self._probing = True
        return True

    def succeeded(self, *, probe: bool) -> None:
        """Take note of an answer below 500; only the probe closes an opened circuit."""
        if probe:
            self.reset()
        elif self._state is Circuit.CLOSED:
            self._failures = 0

    def failed(self, now_s: float, *, probe: bool) -> None:
        """Take note of a failure; those of requests sent before the circuit opened change nothing."""
        if probe:
            self._open(now_s)
        elif self._state is Circuit.CLOSED:
            self._failures += 1
            if self._failures >= self._threshold:
                self._open(now_s)

    def abandoned(self, *, probe: bool) -> None:
        """Take note that a request ended without a verdict, such as a client that left."""
        if probe:
            self._probing = False

    def _open(self, now_s: float) -> None:
        self._state = Circuit.OPEN
        self._open_until_s = now_s + self._open_s
        self._failures = 0
        self._probing = False
