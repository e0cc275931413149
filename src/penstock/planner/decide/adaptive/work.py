"""Prefill work: what arrives, what a worker is seen to do, and what fleets of other sizes would have done.

A *shadow fleet* of n workers is a queue of tokens that fills with the real arrivals and empties at n times the
throughput of one worker. It costs a few numbers per size and pull, and answers whether n workers would have carried
the load that was, bursts included, without a model of arrivals. For the fleet that exists the real queue stands.

Requests per second are followed fast and their tokens slowly: half of the noise of tokens/s is the spread of lengths.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
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

PEAK_TAU_S = 300.0
"""Chosen: a peak of arrivals fades over the time that the HPA's stabilisation window holds one."""

LATE_TAU_S = 300.0
"""Chosen: five minutes of arrivals weigh in the share of late ones, as in the stabilisation window of the HPA."""

RECENT_TAU_S = 60.0
"""Chosen: the last minute, so that a peak that is over lets the fleet shrink."""

RECENT_MOST = 0.05
"""Chosen: ``recent`` counts no more than this share, or a bad peak would take long to fade."""

BUSY_TAU_S = 60.0
"""Chosen: a worker's throughput is averaged over a minute of computing, however long that takes to come by."""

LEAST_BUSY_S = 5.0
"""Chosen: worker-seconds of computing; less says nothing about throughput. At 2 s the first prompts of a start asked for
two workers too many."""

OWN_SHARE_MOST = 0.5
"""Chosen: a prompt whose own prefill takes more than this share of the SLO is late in almost any fleet; it counts as
late only if it waits for the rest."""

TREND_MOST = 2.0
"""Chosen: a trend may predict at most twice the last minutes' highest rate; a jump has a slope, and goes no further."""

IN_FLIGHT_LEFT = 0.5
"""A prompt in flight counts whole until it was computed; on average half of it is left. With it, and with workers that
idle counted, the packaged Mooncake slice took 1.45 GPU-hours in place of 1.73, 89% in place of 90% in time."""


class Speed(Protocol):
    """Says how fast one worker computes prompts."""

    def tokens_per_s(self, work: Work) -> float | None:
        """Return prompt tokens per second of one worker; None: not known yet."""
        ...


class WorkProjection(Speed, Protocol):
    """Says what arrives, too."""

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
        late: Share of the last minutes' arrivals that n workers would have served late; element n - 1.
        recent: The same of the last minute, against an average minute's arrivals; element n - 1.
    """

    tokens_per_s: float | None
    rate: Forecast
    level: Forecast
    far_rate: float
    peak: float
    backlog_tokens: float
    late: tuple[float, ...]
    recent: tuple[float, ...]

    def saved(self, workers: int) -> float:
        """Return the share of arrivals that one more than ``workers`` would have kept from being late."""
        return _of_size(self.late, workers) - _of_size(self.late, workers + 1)

    def saved_lately(self, workers: int) -> float:
        """Return the same of the last minute."""
        return _of_size(self.recent, workers) - _of_size(self.recent, workers + 1)

    def late_with(self, workers: int) -> float:
        """Return ``late`` for a fleet of ``workers``."""
        return _of_size(self.late, workers)


def _of_size(shares: tuple[float, ...], workers: int) -> float:
    if not shares:
        return 0.0
    return shares[min(workers, len(shares)) - 1] if workers >= 1 else 1.0


def tokens_per_s(work: Work) -> float | None:
    """Return what one worker is seen to do while it computes; None until it has been seen enough."""
    return work.done_tokens / work.busy_s if work.busy_s >= LEAST_BUSY_S and work.done_tokens > 0 else None


def followed(work: Work, demand: Demand, workers: Speed, *, ready: int, sizes: int, slo_s: float) -> Work:
    """Return the work after one pull.

    Throughput is tokens done per worker-second in which a worker had a prompt: a worker that idles half of the time
    is not taken for one that does half as much.

    Args:
        work: Before.
        demand: Of the pull.
        workers: Says what one worker computes per second.
        ready: Workers that there are; what they have left is seen, not reckoned.
        sizes: Shadow fleets of 1 to this many workers are followed.
        slo_s: TTFT that counts as in time.
    """
    dt_s = demand.period_s
    computing_s = demand.prefilling_workers * dt_s
    kept, sized_kept = math.exp(-computing_s / BUSY_TAU_S), math.exp(-dt_s / SIZE_TAU_S)
    rate = trend.followed(work.rate, demand.arrivals / dt_s, dt_s, RATE_TAU_S)
    weight = max(dt_s / rate.seen_s, 1.0 - math.exp(-dt_s / LEVEL_TAU_S))
    level = work.level + weight * (demand.arrivals / dt_s - work.level)
    # A mean over less than the average's span is no peak yet.
    peak = max(work.peak * math.exp(-dt_s / PEAK_TAU_S), level if rate.seen_s >= LEVEL_TAU_S else 0.0)
    after = replace(
        work,
        rate=rate,
        level=level,
        peak=peak,
        sized=work.sized * sized_kept + demand.arrivals,
        sized_tokens=work.sized_tokens * sized_kept + demand.uncached_tokens,
        done_tokens=work.done_tokens * kept + demand.prefilled_tokens,
        busy_s=work.busy_s * kept + computing_s,
        arrivals=work.arrivals * math.exp(-dt_s / LATE_TAU_S) + demand.arrivals,
    )
    speed = workers.tokens_per_s(after)
    return (
        after
        if speed is None
        else _shadowed(after, demand, speed=speed, ready=ready, sizes=sizes, slo_s=slo_s)
    )


def _shadowed(work: Work, demand: Demand, *, speed: float, ready: int, sizes: int, slo_s: float) -> Work:
    """Let every shadow fleet take the pull's arrivals and work for its length."""
    dt_s, tokens, count = demand.period_s, demand.uncached_tokens, demand.arrivals
    kept, faded = math.exp(-dt_s / LATE_TAU_S), math.exp(-dt_s / RECENT_TAU_S)
    own_s = tokens / count / speed if count else 0.0
    may_wait_s = max(slo_s - own_s, OWN_SHARE_MOST * slo_s)
    most = RECENT_MOST * work.arrivals * RECENT_TAU_S / LATE_TAU_S
    # A long prompt occupies one worker, however many tokens it has: with another one idle nothing waits for it.
    is_idle_somewhere = not demand.waiting_tokens and demand.prefilling_workers < ready
    backlogs, late, recent = [], [], []
    for size in range(1, sizes + 1):
        is_followed = size <= len(work.late)
        backlog = work.backlogs[size - 1] if is_followed else 0.0
        pace = size * speed
        left = max(0.0, backlog + tokens - pace * dt_s)
        if size == ready:
            left = demand.waiting_tokens + IN_FLIGHT_LEFT * demand.in_flight_tokens
            backlog = max(0.0, left - tokens + pace * dt_s)
        # The middle one of the pull's arrivals finds half of them, and half of the pull's work done.
        waits_s = (backlog + tokens / 2 - pace * dt_s / 2) / pace
        if size == ready and is_idle_somewhere:
            waits_s = 0.0
        missed = count if waits_s > may_wait_s else 0.0
        before = work.recent[size - 1] * faded if is_followed else 0.0
        backlogs.append(left)
        late.append((work.late[size - 1] * kept if is_followed else 0.0) + missed)
        recent.append(min(before + missed, max(most, before)))
    return replace(work, backlogs=tuple(backlogs), late=tuple(late), recent=tuple(recent))


def view(work: Work, demand: Demand, workers: WorkProjection, *, horizon_s: float, far_s: float) -> WorkView:
    """Return what the rules look at, ``horizon_s`` and ``far_s`` ahead."""
    minute = work.arrivals * RECENT_TAU_S / LATE_TAU_S
    size = work.sized_tokens / work.sized if work.sized > 0 else 0.0
    # Arrivals as random as Poisson's; a mean over less than the average's span is as sure as its span is long.
    error = math.sqrt(work.level / min(2.0 * LEVEL_TAU_S, work.rate.seen_s)) if work.rate.seen_s > 0 else 0.0

    def arriving(ahead_s: float) -> Forecast:
        along = trend.forecast(work.rate, ahead_s, RATE_TAU_S)
        most = max(along.now, TREND_MOST * work.peak)
        return workers.arriving(replace(along, ahead=min(along.ahead, most)))

    return WorkView(
        tokens_per_s=workers.tokens_per_s(work),
        rate=_times(arriving(horizon_s), size),
        level=_times(Forecast(work.level, work.level, error), size),
        far_rate=arriving(far_s).ahead * size,
        peak=work.peak * size,
        backlog_tokens=demand.waiting_tokens + demand.in_flight_tokens,
        late=tuple(_share(late, work.arrivals) for late in work.late),
        recent=tuple(_share(late, minute) for late in work.recent),
    )


def _times(requests: Forecast, tokens: float) -> Forecast:
    return Forecast(requests.now * tokens, requests.ahead * tokens, requests.error * tokens)


def _share(late: float, arrivals: float) -> float:
    return min(1.0, late / arrivals) if arrivals > 0 else 0.0
