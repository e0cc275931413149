"""A worker's circuit: after failures in a row it is ejected, then tried with one request. Pure.

A circuit opens for ``open_seconds`` times the number of its recent openings, at most ``max_open_seconds``. The beginning of one probe's
answer closes it, because answers may last minutes; until the first answer is complete, one failure opens it again. What
counts as a failure is `penstock.router.proxy.failures`' to say.

Source: Envoy's outlier detection (consecutive failures, base and maximum ejection time, maximum ejected share).
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from penstock.api import BreakerConfig


class Circuit(StrEnum):
    """States of a breaker."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


def may_eject(*, ejected: int, pool: int, max_fraction: float) -> bool:
    """Return whether one more worker may be ejected of a pool of so many that would serve if no circuit were open.

    ``max_fraction``, 0-1, is the largest share; one worker may be ejected however small the pool is.
    """
    return ejected < max(1, int(pool * max_fraction))


class CircuitBreaker:
    """Counts failures in a row; ``now_s`` is always an argument, in simulated seconds.

    Attributes:
        threshold: Failures in a row that open the circuit.
        failures: Failures since the last success, including those that opened the circuit.
        openings: Times that the circuit has opened.
        is_closed: The worker is not ejected.
        is_on_probation: One failure opens the circuit again.
    """

    def __init__(
        self,
        config: BreakerConfig,
        *,
        may_open: Callable[[], bool] = lambda: True,
        touched: Callable[[], None] = lambda: None,
    ) -> None:
        """Start closed; ``may_open`` is called before it opens, ``touched`` when the state changes."""
        self.threshold = config.consecutive_failures
        self._open_s = config.open_seconds
        self._max_open_s = max(config.open_seconds, config.max_open_seconds)
        self._may_open = may_open
        self._touched = touched
        self.openings = 0
        self.reset()

    def reset(self) -> None:
        """Forget everything; for a worker whose process is a new one."""
        self._enter(Circuit.CLOSED)
        self.failures = 0
        self.is_on_probation = False
        self._ejections = 0
        self._opened_s = 0.0
        self._open_until_s = 0.0
        self._probing = False

    def state(self, now_s: float) -> Circuit:
        """Return the state; an open circuit becomes half-open when its time is over."""
        if self._state is Circuit.OPEN and now_s >= self._open_until_s:
            return Circuit.HALF_OPEN
        return self._state

    @property
    def is_failing(self) -> bool:
        """Whether its last answers were failures, as many as open a circuit, opened or not."""
        return not self.is_closed or self.failures >= self.threshold

    def probe_in_s(self, now_s: float) -> float:
        """Return how long an open circuit admits no probe yet; 0 when it is not open."""
        return max(0.0, self._open_until_s - now_s) if self._state is Circuit.OPEN else 0.0

    def allows(self, now_s: float, *, is_last: bool = False) -> bool:
        """Return whether a request may be sent: closed, or half-open without a probe under way.

        With ``is_last`` no other worker can take it: an open circuit is then probed after ``open_seconds``, however often it has
        opened.
        """
        if self._state is Circuit.OPEN:
            first_s = min(self._open_until_s, self._opened_s + self._open_s)
            return now_s >= (first_s if is_last else self._open_until_s)
        return self.is_closed or not self._probing

    def sent(self, now_s: float) -> bool:
        """Record a request sent; returns whether it is the probe of a half-open circuit."""
        if self.is_closed or self._probing or not self.allows(now_s, is_last=True):
            return False
        self._enter(Circuit.HALF_OPEN)
        self._probing = True
        return True

    def began(self) -> None:
        """Record the correct beginning of the probe's answer: the circuit closes, and the next failure opens it."""
        self._enter(Circuit.CLOSED)
        self._probing = False
        self.is_on_probation = True
        self.failures = self.threshold - 1

    def succeeded(self, *, probe: bool) -> None:
        """Record a correct answer; only the probe closes an opened circuit."""
        if probe:
            self.began()
        if self.is_closed:
            self.failures = 0
            self.is_on_probation = False

    def failed(self, now_s: float, *, probe: bool, proven: bool = True) -> bool:
        """Record a failure, ``proven`` if it is the worker's without doubt; return whether it was counted.

        Those of requests sent before the circuit opened change nothing. After one that is not proven, the circuit of a
        worker that is not being probed stays closed until `convicted`.
        """
        if not probe and not self.is_closed:
            return False
        self.failures += 1
        if probe or proven:
            self.convicted(now_s, probe=probe)
        return True

    def convicted(self, now_s: float, *, probe: bool = False) -> None:
        """Open the circuit if the failures in a row, one of them proven now, suffice."""
        if probe or self.failures >= self.threshold:
            self.trip(now_s)

    def trip(self, now_s: float) -> None:
        """Open the circuit if that is allowed: for longer each time, unless it served for long in between."""
        if self._state is Circuit.OPEN or (self.is_closed and not self._may_open()):
            return
        if self.is_closed:
            served_s = 0.0 if self.is_on_probation else max(0.0, now_s - self._open_until_s)
            self._ejections = max(0, self._ejections - int(served_s / self._open_s))
        self._ejections += 1
        self.openings += 1
        self._enter(Circuit.OPEN)
        self._opened_s = now_s
        self._open_until_s = now_s + min(self._max_open_s, self._open_s * self._ejections)
        self._probing = False

    def pardoned(self, now_s: float, *, probe: bool) -> None:
        """Take back a counted failure that was not the worker's; an opening that rests on it is undone.

        After a ``probe``'s failure the circuit is then half-open again.
        """
        self.failures = max(0, self.failures - 1)
        if self._state is not Circuit.OPEN or (self.failures >= self.threshold and not probe):
            return
        self._ejections = max(0, self._ejections - 1)
        self._enter(Circuit.HALF_OPEN if probe else Circuit.CLOSED)
        self._open_until_s = now_s

    def abandoned(self, *, probe: bool) -> None:
        """Record that a request ended without a verdict, such as a client that left."""
        if probe:
            self._probing = False

    def _enter(self, state: Circuit) -> None:
        self._state = state
        self.is_closed = state is Circuit.CLOSED
        self._touched()
