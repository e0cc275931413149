"""Prefill work: what arrives, and what a worker is seen to do.

Requests per second are followed fast and their tokens slowly: half of the noise of tokens/s is the spread of lengths.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from penstock.planner.decide.adaptive import trend
from penstock.planner.decide.adaptive.memory import Work
from penstock.planner.decide.adaptive.trend import Forecast
from penstock.planner.decide.observation import Demand

RATE_TAU_S = 40.0
"""Chosen: longer lags behind a rise of ten minutes, shorter is noise; at 2 requests/s the prediction's error is some
15%."""

LEVEL_TAU_S = 6.0
"""Chosen: a jump of arrivals is known within seconds. Of 15, 10, 6 and 4 s, flash was 73.8, 74.8, 76.8 and 76.8% in time,
step 96.1, 96.3, 97.9 and 98.3%, and 4 s cost 2% more GPU-hours on bursts."""

SIZE_TAU_S = 120.0
"""Chosen: prompt lengths change more slowly than arrivals, and their spread is most of the noise of tokens/s."""

OWN_SHARE_MOST = 0.5
"""Chosen: a prompt whose own prefill takes more than this share of the SLO is late in almost any fleet; it counts as
late only if it waits for the rest."""

BUSY_TAU_S = 60.0
"""Chosen: a worker's throughput is averaged over a minute of computing, however long that takes to come by."""

ORDER_TAU_S = 6 * 3600.0
"""Chosen: in which order a queue is served changes with a deployment alone."""

LEAST_BUSY_S = 5.0
"""Chosen: worker-seconds of computing; less is no measure of throughput. At 2 s the first prompts of a start asked for
two workers too many."""


class WorkProjection(Protocol):
    """Says how fast one worker computes prompts, and what arrives."""

    def tokens_per_s(self, work: Work) -> float | None:
        """Return prompt tokens per second of one worker; None: not known yet."""
        ...

    def arriving(self, along: Forecast) -> Forecast:
        """Return the requests/s expected, given those along the trend."""
        ...


@dataclass(frozen=True, slots=True)
class WorkView:
    """What is known of prefill work at a decision.

    Attributes:
        tokens_per_s: Of one worker; None until one has been seen to work.
        rate: Uncached tokens/s arriving, now and when a new replica could be ready.
        level: Uncached tokens/s arriving over the last seconds; ``ahead`` is the same.
        far_rate: The same when a replica removed now could have been started again.
        backlog_tokens: Waiting and in flight, not computed.
    """

    tokens_per_s: float | None
    rate: Forecast
    level: Forecast
    far_rate: float
    backlog_tokens: float


def tokens_per_s(work: Work) -> float | None:
    """Return what one worker is seen to do while it computes; None until it has been seen enough."""
    return work.done_tokens / work.busy_s if work.busy_s >= LEAST_BUSY_S and work.done_tokens > 0 else None


def may_wait_s(own_s: float, slo_s: float) -> float:
    """Return how long a prompt that takes ``own_s`` by itself may wait and be in time."""
    return max(slo_s - own_s, OWN_SHARE_MOST * slo_s)


def serves_in_time_first(work: Work) -> bool:
    """Return whether requests that can still meet their deadline were seen to be served before those that cannot."""
    return 2.0 * work.overdue_in_time > work.overdue


def followed(work: Work, demand: Demand, slo_s: float) -> Work:
    """Return the work after one pull.

    Throughput is tokens done per worker-second in which a worker had a prompt: a worker that idles half of the time
    is not taken for one that does half as much.

    Args:
        work: Before.
        demand: Of the pull.
        slo_s: TTFT that counts as in time.
    """
    dt_s = demand.period_s
    order_kept = math.exp(-dt_s / ORDER_TAU_S)
    overdue = demand.ttft_count if (demand.oldest_wait_s or 0.0) > slo_s else 0.0
    in_time = overdue if demand.ttft_sum_s <= slo_s * demand.ttft_count else 0.0
    computing_s = demand.prefilling_workers * dt_s
    kept, sized_kept = math.exp(-computing_s / BUSY_TAU_S), math.exp(-dt_s / SIZE_TAU_S)
    rate = trend.followed(work.rate, demand.arrivals / dt_s, dt_s, RATE_TAU_S)
    weight = max(dt_s / rate.seen_s, 1.0 - math.exp(-dt_s / LEVEL_TAU_S))
    level = work.level + weight * (demand.arrivals / dt_s - work.level)
    return Work(
        rate=rate,
        level=level,
        sized=work.sized * sized_kept + demand.arrivals,
        sized_tokens=work.sized_tokens * sized_kept + demand.uncached_tokens,
        done_tokens=work.done_tokens * kept + demand.prefilled_tokens,
        busy_s=work.busy_s * kept + computing_s,
        overdue=work.overdue * order_kept + overdue,
        overdue_in_time=work.overdue_in_time * order_kept + in_time,
    )


def view(work: Work, demand: Demand, workers: WorkProjection, *, horizon_s: float, far_s: float) -> WorkView:
    """Return the input of the rules, ``horizon_s`` and ``far_s`` ahead."""
    size = work.sized_tokens / work.sized if work.sized > 0 else 0.0
    # Arrivals as random as Poisson's; a mean over less than the average's span is as sure as its span is long.
    error = math.sqrt(work.level / min(2.0 * LEVEL_TAU_S, work.rate.seen_s)) if work.rate.seen_s > 0 else 0.0

    def arriving(ahead_s: float) -> Forecast:
        return workers.arriving(trend.forecast(work.rate, ahead_s, RATE_TAU_S))

    return WorkView(
        tokens_per_s=workers.tokens_per_s(work),
        rate=_times(arriving(horizon_s), size),
        level=_times(Forecast(work.level, work.level, error), size),
        far_rate=arriving(far_s).ahead * size,
        backlog_tokens=demand.waiting_tokens + demand.in_flight_tokens,
    )


def _times(requests: Forecast, tokens: float) -> Forecast:
    return Forecast(requests.now * tokens, requests.ahead * tokens, requests.error * tokens)
