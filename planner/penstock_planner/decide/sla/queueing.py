"""How long requests wait for one of several workers: the Allen-Cunneen approximation of a G/G/c queue.

A request waits at all with the probability that Erlang's C formula gives for Poisson arrivals. If it waits, its wait is
taken as exponential with the mean s (Ca2 + Cs2) / (2 (c - a)), for c workers, a offered load of a erlangs, a mean service
of s seconds, and squared coefficients of variation of the gaps between arrivals and of the services. Exact for M/M/c.

Source: A. O. Allen, Probability, Statistics and Queueing Theory, 2nd ed. 1990, 5.2; W. Whitt, Approximations for the
GI/G/m queue, 1993.
"""

from __future__ import annotations

import math

from penstock.api import Role
from penstock.performance.capacity import wait_probability

_HALVINGS = 30
"""Bisection to a part in a thousand million."""


def queue_of(role: Role, workers: int, load: float) -> tuple[int, float]:
    """Return how many workers serve one queue, and its load: all of a pool, but each aggregated one has its own.

    Prompts wait in front of prefill workers in the router, and inside aggregated ones. The router sends them where least KV is in
    use, which says more of the answers that are decoded than of the prompts that wait; so they wait as if sent by chance.

    Args:
        role: prefill or aggregated.
        workers: Of the pool, >= 1.
        load: Offered to the pool, in erlangs.
    """
    return (1, load / workers) if role is Role.AGGREGATED else (workers, load)


def mean_wait_s(workers: int, load: float, *, service_s: float, variability: float) -> float:
    """Return the mean wait of an arrival, those that do not wait included.

    Args:
        workers: >= 1.
        load: Offered, in erlangs, 0 to below ``workers``.
        service_s: Mean service, > 0.
        variability: Ca2 + Cs2, > 0; 2 for Poisson arrivals and exponential services, 1 for constant services.

    Example: one worker at 0.8, 1 s of service, 2: 4 s, as M/M/1 has it.
    """
    return wait_probability(workers, load) * service_s * variability / (2.0 * (workers - load))


def late_share(
    workers: int, load: float, *, service_s: float, variability: float, may_wait_s: float
) -> float:
    """Return the share of arrivals that wait longer than ``may_wait_s``; 1 from ``workers`` erlangs on.

    Other arguments as of `mean_wait_s`.
    """
    if load >= workers:
        return 1.0
    mean_s = service_s * variability / (2.0 * (workers - load))
    return wait_probability(workers, load) * math.exp(-may_wait_s / mean_s)


def most_load(workers: int, *, service_s: float, variability: float, may_wait_s: float, late: float) -> float:
    """Return the greatest load, in erlangs, at which no more than a share of ``late`` waits longer than it may.

    Other arguments as of `late_share`.

    Example: one worker, 1 s of service, 2, 5 s, 1%: 0.27; three of them 1.68, so each may be twice as busy.
    """
    low, high = 0.0, float(workers)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        share = late_share(
            workers, middle, service_s=service_s, variability=variability, may_wait_s=may_wait_s
        )
        low, high = (middle, high) if share <= late else (low, middle)
    return low
