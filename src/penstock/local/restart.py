"""When a crashed process is started again, and when not any more: a pure policy in real seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Exponential backoff with a cap and an end.

    Attributes:
        first_delay_s: Pause after the first failure in a row, real seconds.
        factor: Each further failure multiplies the pause by this.
        max_delay_s: Longest pause, real seconds.
        give_up_after: Failures in a row after which the process is left alone.
        stable_after_s: A process that was ready and ran this long, real seconds, starts a new count.

    All values are chosen: a worker that cannot start is given up after 3.75 s of pauses and its GPUs are free
    again, while one that dies once is on its way back before a planner's next interval.
    """

    first_delay_s: float = 0.25
    factor: float = 2.0
    max_delay_s: float = 30.0
    give_up_after: int = 5
    stable_after_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Restart:
    """Start again after ``delay_s`` real seconds; ``failures`` in a row so far."""

    delay_s: float
    failures: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Leave it alone after ``failures`` in a row."""

    failures: int


def after_exit(policy: RestartPolicy, *, failures: int, ran_s: float, was_ready: bool) -> Restart | GiveUp:
    """Decide what follows an unwanted exit.

    Args:
        policy: The figures.
        failures: Failures in a row before this one.
        ran_s: How long the process ran, real seconds.
        was_ready: Whether this run ever answered its health check.
    """
    stable = was_ready and ran_s >= policy.stable_after_s
    count = 1 if stable else failures + 1
    if count >= policy.give_up_after:
        return GiveUp(count)
    delay = policy.first_delay_s * policy.factor ** (count - 1)
    return Restart(min(delay, policy.max_delay_s), count)
