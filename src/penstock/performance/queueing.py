"""Waiting in a pool of equal servers, M/G/c style; docs/capacity.md has the formulas and how close they come."""

from __future__ import annotations

import math
from statistics import NormalDist


def wait_probability(servers: int, load: float) -> float:
    """Return the probability that an arrival waits, Erlang's C.

    Args:
        servers: c, >= 1.
        load: Arrival rate times service time, servers busy on average; at ``servers`` and above everything waits.
    """
    if load >= servers:
        return 1.0
    blocked = 1.0  # Erlang's B, by its recurrence
    for count in range(1, servers + 1):
        blocked = load * blocked / (count + load * blocked)
    return blocked / (1 - load / servers * (1 - blocked))


def wait_quantile_s(
    servers: int, arrivals_per_s: float, service_s: float, *, variability: float, quantile: float
) -> float:
    """Return the wait that a share of the arrivals stays within; infinite where the servers cannot keep up.

    A share C waits at all, for a time that is exponential with mean service · v / (c · (1 - utilisation)), v being
    ``variability`` (Allen and Cunneen). So the quantile q of all is that mean times ln(C / (1 - q)), or 0 below.

    Example: 1 server, 5 arrivals/s of 0.1 s, v 1, q 0.9: C = 0.5, mean 0.2 s, 0.2 · ln 5 = 0.32 s.

    Args:
        servers: >= 1.
        arrivals_per_s: >= 0.
        service_s: Mean time of one request on one server, > 0.
        variability: (ca² + cs²) / 2, the squared coefficients of variation of the times between arrivals and of service,
            >= 0.
        quantile: 0 to below 1.
    """
    load = arrivals_per_s * service_s
    if load >= servers:
        return math.inf
    waiting = wait_probability(servers, load)
    if waiting <= 1 - quantile:
        return 0.0
    mean_s = service_s * variability / (servers - load)
    return mean_s * math.log(waiting / (1 - quantile))


def most_in_flight(mean: float, quantile: float) -> float:
    """Return the number of requests in flight that is exceeded for less than 1 - ``quantile`` of the time.

    In flight are as many as a Poisson variable of that mean, where nobody waits; by its normal approximation.
    """
    return mean + max(0.0, NormalDist().inv_cdf(quantile)) * math.sqrt(mean)
