"""How long requests wait for one of several workers: the Allen-Cunneen approximation of a G/G/c queue.

The probability that a request waits is Erlang's C formula for Poisson arrivals. If a request waits, its wait is
assumed to be exponential with mean s (Ca2 + Cs2) / (2 (c - a)), for c workers, an offered load of a erlangs, a mean
service time of s seconds, and the squared coefficients of variation Ca2 of the gaps between arrivals and Cs2 of the
service times. This is exact for M/M/c.

Source: A. O. Allen, Probability, Statistics and Queueing Theory, 2nd ed. 1990, 5.2; W. Whitt, Approximations for the
GI/G/m queue, 1993.
"""

from __future__ import annotations

import math

from penstock.api import Role
from penstock.performance.capacity import wait_probability

_HALVINGS = 30
"""Number of bisection steps, enough for a precision of 1e-9."""


def queue_of(role: Role, workers: int, load: float) -> tuple[int, float]:
    """Return the number of workers that serve one queue, and the load of that queue in erlangs.

    Prefill workers share one queue in the router. Each aggregated worker has its own queue, because prompts wait inside
    the worker. The router sends each prompt to the worker with the lowest KV usage, which depends on the answers being
    decoded more than on the waiting prompts, so the prompts wait as if they were assigned to workers at random.

    Args:
        role: Prefill or aggregated.
        workers: Number of workers of the role, >= 1.
        load: Load of all these workers together, in erlangs (arrivals per second times seconds of service).
    """
    return (1, load / workers) if role is Role.AGGREGATED else (workers, load)


def mean_wait_s(workers: int, load: float, *, service_s: float, variability: float) -> float:
    """Return the mean wait in a queue in seconds, over all arrivals, including those that do not wait.

    Example: one worker at load 0.8, 1 s of service and variability 2 give 4 s, as M/M/1 does.

    Args:
        workers: Number of workers that serve the queue, >= 1.
        load: Load in erlangs (arrivals per second times seconds of service), from 0 to below ``workers``.
        service_s: Mean service time in seconds, > 0.
        variability: Squared coefficients of variation of the gaps between arrivals and of the service times, added (Ca2
            + Cs2), > 0; 2 for Poisson arrivals and exponential service times, 1 for Poisson arrivals and constant
            service times.
    """
    return wait_probability(workers, load) * service_s * variability / (2.0 * (workers - load))


def late_fraction(
    workers: int, load: float, *, service_s: float, variability: float, may_wait_s: float
) -> float:
    """Return the fraction of arrivals that wait longer than ``may_wait_s``; 1 if the load is ``workers`` erlangs or more.

    Args:
        workers: Number of workers that serve the queue, >= 1.
        load: Load in erlangs (arrivals per second times seconds of service), >= 0.
        service_s: Mean service time in seconds, > 0.
        variability: Squared coefficients of variation of the gaps between arrivals and of the service times, added (Ca2
            + Cs2), > 0.
        may_wait_s: Maximum wait of a request that is on time, in seconds.
    """
    if load >= workers:
        return 1.0
    mean_s = service_s * variability / (2.0 * (workers - load))
    return wait_probability(workers, load) * math.exp(-may_wait_s / mean_s)


def max_load(workers: int, *, service_s: float, variability: float, may_wait_s: float, late: float) -> float:
    """Return the largest load in erlangs at which at most a fraction ``late`` of the arrivals waits longer than ``may_wait_s``.

    The load in erlangs is arrivals per second times seconds of service.

    Example: 1 s of service, variability 2, a maximum wait of 5 s and 1% that wait longer give 0.27 for one worker and
    1.68 for three, so each of three workers can be twice as busy.

    Args:
        workers: Number of workers that serve the queue, >= 1.
        service_s: Mean service time in seconds, > 0.
        variability: Squared coefficients of variation of the gaps between arrivals and of the service times, added (Ca2
            + Cs2), > 0.
        may_wait_s: Maximum wait of a request that is on time, in seconds.
        late: Fraction of arrivals that is allowed to wait longer.
    """
    low, high = 0.0, float(workers)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        share = late_fraction(
            workers, middle, service_s=service_s, variability=variability, may_wait_s=may_wait_s
        )
        low, high = (middle, high) if share <= late else (low, middle)
    return low
