"""A worker's circuit breaker: after consecutive failures the worker is ejected, and later probed with one request. Pure.

A circuit opens for ``open_seconds`` times the number of its recent openings, at most ``max_open_seconds``. When the first
part of one probe's response arrives, the circuit closes, because complete responses can take minutes; until a first response
is complete, one failure opens it again. `penstock.router.proxy.failures` decides what counts as a failure.

Source: Envoy's outlier detection (consecutive failures, base and maximum ejection time, maximum ejection percentage).
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from penstock.api import BreakerConfig


class Circuit(StrEnum):
    """States of a circuit breaker.

    Attributes:
        CLOSED: Requests are sent.
        OPEN: No requests are sent until the ejection time has passed.
        HALF_OPEN: One request at a time is sent, as a probe.
    """

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


def may_eject(*, ejected: int, pool: int, max_fraction: float) -> bool:
    """Return whether one more worker may be ejected: excluded from new requests by its circuit breaker.

    Args:
        ejected: Number of workers of the role that are ejected now.
        pool: Number of workers of the role that would serve if none were ejected.
        max_fraction: Maximum fraction of ``pool`` that may be ejected at a time, 0-1; at least one worker may always be
            ejected.
    """
    return ejected < max(1, int(pool * max_fraction))


class CircuitBreaker:
    """The circuit breaker of one worker; it counts consecutive failures. ``now_s`` is always in simulated seconds.

    A probe is the one request by which an open circuit is tested after its ejection time (the time for which it stays
    open); the argument ``probe`` is True for the request for which `sent` returned True. ``config`` contains the limits and
    times, ``may_open`` returns whether the circuit may open now (False while too many workers of the role are ejected), and
    ``on_change`` is called after each change of the state.

    Attributes:
        threshold: Number of consecutive failures that open the circuit.
        failures: Number of failures since the last success, including those that opened the circuit.
        openings: Number of times that the circuit has opened since it was created.
        is_closed: Whether the circuit is closed, so that the worker is not ejected.
        is_on_probation: Whether the circuit has just closed after a probe, so that one failure opens it again.
    """

    def __init__(
        self,
        config: BreakerConfig,
        *,
        may_open: Callable[[], bool] = lambda: True,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """Start with a closed circuit.

        Args:
            config: Failure threshold and ejection times.
            may_open: Called before the circuit opens; it stays closed if this returns False.
            on_change: Called whenever the state changes.
        """
        self.threshold = config.consecutive_failures
        self._open_s = config.open_seconds
        self._max_open_s = max(config.open_seconds, config.max_open_seconds)
        self._may_open = may_open
        self._on_change = on_change
        self.openings = 0
        self.reset()

    def reset(self) -> None:
        """Close the circuit of a worker whose process is a new one: failures, ejection time and state are as after creation."""
        self._enter(Circuit.CLOSED)
        self.failures = 0
        self.is_on_probation = False
        self._ejections = 0
        self._opened_s = 0.0
        self._open_until_s = 0.0
        self._probing = False

    def state(self, now_s: float) -> Circuit:
        """Return whether the circuit is closed (requests are sent), open (none are sent) or half-open (one is sent as a test).

        ``now_s`` is the current time in simulated seconds. An open circuit counts as half-open when its ejection time (the
        time for which no requests are sent) has passed.
        """
        if self._state is Circuit.OPEN and now_s >= self._open_until_s:
            return Circuit.HALF_OPEN
        return self._state

    @property
    def is_failing(self) -> bool:
        """Whether the worker is ejected or should be: the circuit is not closed, or enough requests in a row have failed.

        Enough are `threshold` requests. The circuit stays closed in spite of that many failures if too many workers of the
        role are ejected already.
        """
        return not self.is_closed or self.failures >= self.threshold

    def probe_in_s(self, now_s: float) -> float:
        """Return the simulated seconds until an open circuit admits a probe (a single test request); 0 if the circuit is not open."""
        return max(0.0, self._open_until_s - now_s) if self._state is Circuit.OPEN else 0.0

    def allows(self, now_s: float, *, is_last: bool = False) -> bool:
        """Return whether a request may be sent: the circuit is closed, or half-open while no probe (test request) is in flight.

        ``is_last`` says that no other worker can take the request: an open circuit then admits a probe as soon as
        ``open_seconds`` (the ejection time of the first opening) have passed, even if the circuit has opened several times
        and its present ejection time is longer.
        """
        if self._state is Circuit.OPEN:
            first_s = min(self._open_until_s, self._opened_s + self._open_s)
            return now_s >= (first_s if is_last else self._open_until_s)
        return self.is_closed or not self._probing

    def sent(self, now_s: float) -> bool:
        """Record that a request was sent; return whether it is the probe: the single request that tests a circuit that is not closed."""
        if self.is_closed or self._probing or not self.allows(now_s, is_last=True):
            return False
        self._enter(Circuit.HALF_OPEN)
        self._probing = True
        return True

    def probe_started_ok(self) -> None:
        """Record that the first part of the response to the probe (test request) was correct.

        The circuit closes, and the next failure opens it again.
        """
        self._enter(Circuit.CLOSED)
        self._probing = False
        self.is_on_probation = True
        self.failures = self.threshold - 1

    def succeeded(self, *, probe: bool) -> None:
        """Record a complete, correct response, which sets the number of consecutive failures to 0.

        If the circuit is not closed, only the response to the ``probe`` (the request that tests the circuit) closes it;
        other responses then change nothing.
        """
        if probe:
            self.probe_started_ok()
        if self.is_closed:
            self.failures = 0
            self.is_on_probation = False

    def failed(self, now_s: float, *, probe: bool, proven: bool = True) -> bool:
        """Record a failed request; return whether the failure was counted.

        A failure of a request that was sent before the circuit opened is not counted. The circuit opens if there are enough
        consecutive failures, or if the request was the ``probe`` (the request that tests an open circuit). A failure that is
        not ``proven`` (it might be the request's fault) is counted as well, but unless the request was the probe, it opens the
        circuit only when `failure_confirmed` is called for it. ``now_s`` is in simulated seconds.
        """
        if not probe and not self.is_closed:
            return False
        self.failures += 1
        if probe or proven:
            self.failure_confirmed(now_s, probe=probe)
        return True

    def failure_confirmed(self, now_s: float, *, probe: bool = False) -> None:
        """Record that a counted failure was proven to be the worker's fault; open the circuit if there are enough consecutive failures.

        Enough are `threshold` failures. If the request was the ``probe`` (the request that tests an open circuit), one
        failure is enough.
        """
        if probe or self.failures >= self.threshold:
            self.trip(now_s)

    def trip(self, now_s: float) -> None:
        """Open the circuit at ``now_s`` (simulated seconds), so that the worker gets no requests for some time (is ejected).

        Does nothing if the circuit is open already, or if too many workers of the role are ejected (``may_open``).

        The n-th opening lasts n times ``open_seconds`` (of the configuration), at most ``max_open_seconds``; n is reduced by
        one for each ``open_seconds`` for which the circuit was closed in between.
        """
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

    def failure_retracted(self, now_s: float, *, probe: bool) -> None:
        """Take back a counted failure that was not the worker's fault; close the circuit if it opened only because of this failure.

        If the failed request was the ``probe`` (the request that tests an open circuit), the circuit becomes half-open
        instead of closed.
        """
        self.failures = max(0, self.failures - 1)
        if self._state is not Circuit.OPEN or (self.failures >= self.threshold and not probe):
            return
        self._ejections = max(0, self._ejections - 1)
        self._enter(Circuit.HALF_OPEN if probe else Circuit.CLOSED)
        self._open_until_s = now_s

    def abandoned(self, *, probe: bool) -> None:
        """Record that a request ended without a verdict on the worker, for example because the client disconnected.

        If it was the ``probe`` (the request that tests an open circuit), another one can be sent.
        """
        if probe:
            self._probing = False

    def _enter(self, state: Circuit) -> None:
        self._state = state
        self.is_closed = state is Circuit.CLOSED
        self._on_change()
