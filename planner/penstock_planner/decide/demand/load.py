"""Load signals that a planner follows from one metrics scrape ("pull") to the next: arrivals, prefill work, KV usage, and how they change.

Requests per second are averaged over a short time and their tokens over a longer one, because half of the noise of
tokens/s is the spread of prompt lengths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.api import Role
from penstock_planner.decide.demand.observation import Demand, Pull
from penstock_planner.decide.demand.trend import RATE_TAU_S, Trend, TrendForecast

LEVEL_TAU_S = 6.0
"""Chosen: time constant in seconds of the average that detects jumps of arrivals.

With 15, 10, 6 and 4 s, *flash* was 73.8, 74.8, 76.8 and 76.8% on time and *step* 96.1, 96.3, 97.9 and 98.3%,
but 4 s cost 2% more GPU-hours on *bursts*."""

WORK_TAU_S = 120.0
"""Chosen: time constant in seconds of the averages of prompt lengths and of KV per token.

Both change more slowly than arrivals, and the spread of prompt lengths is most of the noise of tokens/s."""

LEAST_BUSY_S = LEVEL_TAU_S
"""Worker-seconds of computing (6) from which on a throughput counts as measured.

With 2 s, the first prompts after a start requested two workers too many."""

SIZE_QUANTILES = (-1.534, -0.887, -0.489, -0.157, 0.157, 0.489, 0.887, 1.534)
"""Midpoints of eight equally likely parts of a normal distribution, in standard deviations.

They are used for log-normal prompt lengths, which are between the extremes of traces with two peaks and constant
lengths."""

ASSUMED_REQUESTS = 10.0
"""Chosen: number of assumed requests that are added to the observed ones.

They keep few observations from being taken as the rule. The assumed prompts have a coefficient of variation of 1, as in
chat, and their first tokens met the TTFT target while no request waited."""

SLACK_SHARE = 0.8
"""Chosen: fraction (0.8) of a prompt's slack, which is the TTFT target minus its computing time, that the prompt is allowed to wait.

The rest is for the prompt that the worker is computing, the KV transfer and the first decode step. With the full slack,
the planner's latency model predicted only half of the late requests (TRIED.md)."""

MEMORY_S = 6 * 3600.0
"""Chosen: 6 hours, in seconds, after which old observations weigh half (counts, which are halved) or a third (averages).

With six hours, the day is forgotten during the night, and a morning's bursts are known at noon. Properties of
the deployment, such as the order of its queue, are remembered equally long."""

SHARED_LEAST = 1.0 / RATE_TAU_S
"""Fraction of computing time with overlapping requests (1/40) below which requests count as never overlapping.

It is what one worker-second adds to the average. A pool at nine tenths of its throughput has a fraction of about 0.7."""

HUNG_TIMES = 4.0
"""Multiple of the expected computing time (4) after which a pool that has finished no prompt counts as hung or compiling.

The time must also exceed the TTFT target. From then on it does not count as computing time."""


def may_wait_s(sizes: Sequence[float], tokens_per_s: float, slo_s: float) -> float:
    """Return the seconds for which a typical prompt may wait in the queue and still meet the TTFT target.

    The result is the mean of each prompt's slack (TTFT target minus its computing time), weighted by computing time,
    times 0.8 (`SLACK_SHARE`). Long prompts have the least slack and are most of a queue. Prompts that alone take longer
    than the target are left out; if almost all do, the result is at least a fifth (1 - `SLACK_SHARE`) of the target,
    because no number of workers would serve them on time.

    Args:
        sizes: Uncached tokens of prompts, each value equally frequent.
        tokens_per_s: Prompt tokens that one worker computes per second, > 0.
        slo_s: TTFT target, in seconds.
    """
    fit = [(size, slo_s - size / tokens_per_s) for size in sizes if size < slo_s * tokens_per_s]
    work = sum(size for size, _ in fit)
    slack_s = sum(size * slack_s for size, slack_s in fit) / work if work else slo_s
    return max(SLACK_SHARE * slack_s, (1.0 - SLACK_SHARE) * slo_s)


@dataclass(frozen=True, slots=True)
class Work:
    """Prefill work at the frontend, as averages over the pulls (metrics scrapes) so far. Times are simulated seconds.

    "Decayed" sums lose weight with a time constant: 2 minutes for the prompt lengths (``sized…``), 40 s of computing
    time for ``done_tokens`` and ``busy_s``, 6 hours for ``overdue…``.

    Attributes:
        rate: Trend of the arriving requests/s, with a time constant of 40 s.
        level: Arriving requests/s as a plain average with a time constant of 6 s, in which a jump shows within seconds.
        sized: Number of requests that arrived, decayed.
        sized_tokens: Uncached prompt tokens of those requests, decayed.
        sized_squares: Sum over the pulls of (uncached tokens that arrived - number of arrivals x mean tokens of a
            request) squared, decayed; it gives the variance of prompt lengths.
        done_tokens: Uncached prompt tokens of the requests whose prefill was completed, decayed.
        busy_s: Worker-seconds in which a prompt was being computed, decayed.
        contended_fraction: Fraction of computing time in which requests overlapped, that is, there were more requests
            than workers with a prompt. Averaged over 40 s of computing time.
        unfinished_s: Worker-seconds of computing since the last prompt was finished; it grows while workers hang.
        overdue: Number of first tokens that were sent while another request had waited longer than the TTFT target,
            decayed.
        overdue_in_time: Number of those first tokens that met the TTFT target themselves, decayed. It is 0 if requests
            are served in order of arrival.
    """

    rate: Trend = Trend()
    level: float = 0.0
    sized: float = 0.0
    sized_tokens: float = 0.0
    sized_squares: float = 0.0
    done_tokens: float = 0.0
    busy_s: float = 0.0
    contended_fraction: float = 0.0
    unfinished_s: float = 0.0
    overdue: float = 0.0
    overdue_in_time: float = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """Return the observed prompt tokens/s of one worker while it computes.

        Returns None until 6 worker-seconds (`LEAST_BUSY_S`) were observed.
        """
        return (
            self.done_tokens / self.busy_s if self.busy_s >= LEAST_BUSY_S and self.done_tokens > 0 else None
        )

    @property
    def is_uncontended(self) -> bool:
        """Whether hardly any requests overlapped recently, so that the observed throughput is limited by demand.

        The throughput of the workers can then be higher than observed.
        """
        return self.contended_fraction < SHARED_LEAST

    @property
    def serves_in_time_first(self) -> bool:
        """Whether requests that can still meet the TTFT target were observed to be served before those that cannot."""
        return 2.0 * self.overdue_in_time > self.overdue

    @property
    def size(self) -> float:
        """Return the mean number of uncached prompt tokens of a request; 0 before the first request."""
        return self.sized_tokens / self.sized if self.sized > 0 else 0.0

    @property
    def sizes(self) -> tuple[float, ...]:
        """Return eight typical uncached prompt lengths of requests, in tokens, each equally frequent.

        They are the values at eight quantiles (`SIZE_QUANTILES`) of a log-normal distribution with the observed mean
        and variance. All are 0 before the first request.
        """
        mean = self.size
        assumed = ASSUMED_REQUESTS * mean * mean
        squares = (self.sized_squares + assumed) / (self.sized + ASSUMED_REQUESTS)
        spread = math.sqrt(math.log(1.0 + squares / (mean * mean))) if mean else 0.0
        return tuple(mean * math.exp(spread * (z - spread / 2)) for z in SIZE_QUANTILES)

    @property
    def recent_rate(self) -> TrendForecast:
        """Return the mean arriving requests/s of the last seconds (time constant 6 s) as a forecast that stays constant."""
        # Standard error of a Poisson rate. Until the average's full span has passed, only the observed time counts.
        seen_s = self.rate.seen_s
        error = math.sqrt(self.level / min(2.0 * LEVEL_TAU_S, seen_s)) if seen_s > 0 else 0.0
        return TrendForecast(self.level, self.level, error)

    def arriving(self, ahead_s: float) -> TrendForecast:
        """Return the forecast of arriving requests/s along their trend, for ``ahead_s`` simulated seconds from now."""
        return self.rate.forecast(ahead_s, RATE_TAU_S)

    def followed(self, demand: Demand, slo_s: float, entry: Role) -> Work:
        """Return the averages of prefill work and throughput after one pull (metrics scrape).

        Throughput is tokens computed per worker-second in which a worker had a prompt. So a worker that is idle half of
        the time does not count as half as fast, and one that hangs or compiles does not count as slow.

        Args:
            demand: Requests at the frontend since the previous pull.
            slo_s: TTFT target, in seconds.
            entry: Role that requests reach first.
        """
        dt_s = demand.period_s
        order_kept = math.exp(-dt_s / MEMORY_S)
        overdue = demand.ttft_count if (demand.oldest_wait_s or 0.0) > slo_s else 0.0
        in_time = overdue if demand.ttft_sum_s <= slo_s * demand.ttft_count else 0.0
        computing_s = demand.prefilling_workers * dt_s
        met_s = computing_s or (dt_s if demand.waiting else 0.0)
        is_shared = demand.waiting + demand.in_flight.get(entry, 0.0) > demand.prefilling_workers
        unfinished_s = 0.0 if demand.prefilled_tokens > 0 else self.unfinished_s + computing_s
        if unfinished_s > self._longest_s(demand, slo_s):
            computing_s = 0.0
        # The squared difference between the sum of n prompts and n times the mean is n variances on average.
        beyond = demand.uncached_tokens - demand.arrivals * self.size if self.sized > 0 else 0.0
        kept, sized_kept = math.exp(-computing_s / RATE_TAU_S), math.exp(-dt_s / WORK_TAU_S)
        rate = self.rate.followed(demand.arrivals / dt_s, dt_s, RATE_TAU_S)
        weight = max(dt_s / rate.seen_s, 1.0 - math.exp(-dt_s / LEVEL_TAU_S))
        return Work(
            rate=rate,
            level=self.level + weight * (demand.arrivals / dt_s - self.level),
            sized=self.sized * sized_kept + demand.arrivals,
            sized_tokens=self.sized_tokens * sized_kept + demand.uncached_tokens,
            sized_squares=self.sized_squares * sized_kept + beyond * beyond,
            done_tokens=self.done_tokens * kept + demand.prefilled_tokens,
            busy_s=self.busy_s * kept + computing_s,
            contended_fraction=self.contended_fraction
            + (1.0 - math.exp(-met_s / RATE_TAU_S)) * (is_shared - self.contended_fraction),
            unfinished_s=unfinished_s,
            overdue=self.overdue * order_kept + overdue,
            overdue_in_time=self.overdue_in_time * order_kept + in_time,
        )

    def _longest_s(self, demand: Demand, slo_s: float) -> float:
        """Return the worker-seconds within which workers should finish a prompt; infinite while their throughput is unknown."""
        speed = self.tokens_per_s
        if speed is None:
            return math.inf
        return max(slo_s * demand.prefilling_workers, HUNG_TIMES * demand.in_flight_tokens / speed)


@dataclass(frozen=True, slots=True)
class WorkView:
    """Prefill work in the form that the rules of one decision need, with forecasts for a role's horizon.

    The horizon is the time when a replica requested now could be ready. The far horizon is the time when a replica
    removed now could have been started again.

    Attributes:
        tokens_per_s: Prompt tokens/s that one worker can compute; None until it is known.
        rate: Forecast of the arriving uncached tokens/s along their trend; ``rate.ahead`` is the value at the horizon.
        level: Mean uncached tokens/s that arrived over the last seconds, to detect a jump. The forecast is constant:
            ``ahead`` equals ``now``.
        far_rate: Uncached tokens/s forecast to arrive at the far horizon.
        backlog_tokens: Uncached tokens of the requests that are queued or being computed.
        sizes: Eight typical uncached prompt lengths of requests, in tokens, each equally frequent.
        is_uncontended: Whether hardly any requests overlapped recently, so that workers can do more than
            ``tokens_per_s`` shows.
        recalled: Largest uncached tokens/s until the horizon as forecast from the weekly record, the demand learned by
            time of the week. 0 if the forecast is not above the present rate, or if the record has not predicted well
            enough.
        far_recalled: The same as ``recalled``, until the far horizon.
        confidence: Confidence in the weekly record: the fraction of the jumps predicted from it that occurred.
    """

    tokens_per_s: float | None
    rate: TrendForecast
    level: TrendForecast
    far_rate: float
    backlog_tokens: float
    sizes: tuple[float, ...]
    is_uncontended: bool = False
    recalled: float = 0.0
    far_recalled: float = 0.0
    confidence: float = 0.0


FULL = 0.9
"""KV usage fraction above which a worker counts as full: 0.9, the NVIDIA Dynamo planner's threshold for growing."""

SLOWDOWN = 3.0
"""Slowdown of decoding with a full KV cache: the extra time per token divided by an idle worker's time per token.

It is 2.9, 3.3 and 7.3 in the shipped profiles of H100 70B, A100 8B and H200 8B. Without it, ten times the load used
thirty times the KV, and in a flash crowd new decode workers were one start-up time too late."""

WAITING_SHARE = 0.02
"""KV usage that a waiting request will need, as a fraction of one worker, if none is running to measure it: 0.02.

It is the figure of the NVIDIA Dynamo planner's documentation."""


def idle_speed_usage(usage: float) -> float:
    """Return the KV usage that a worker would have if it decoded as fast as an idle one, given its real KV usage (a fraction).

    A full worker decodes more slowly and therefore holds requests for longer. The result is below a third (1 /
    `SLOWDOWN`). Unlike real KV usages, the results for several workers can be added: the `actual_usage` of their sum is
    the usage of one worker with the requests of all.
    """
    return usage / (1.0 + SLOWDOWN * usage)


def actual_usage(light: float) -> float:
    """Return the real KV usage of a worker, given the usage that it would have if it decoded as fast as an idle one.

    A full worker decodes more slowly and therefore holds requests for longer. This function is the inverse of
    `idle_speed_usage`, which computes the argument from the real usage.

    Args:
        light: Usage at the speed of an idle worker, as a fraction, >= 0 and below a third.
    """
    return light / (1.0 - SLOWDOWN * light)


def kv_load_of(pull: Pull, role: Role) -> float | None:
    """Return the KV usage at a metrics scrape, summed over the workers of a role (1.0 for a full one), with waiting requests added.

    Workers whose usage is unknown count as empty. A waiting request counts as much as a running one on average, or 0.02
    (`WAITING_SHARE`) if none is running. Returns None if no worker's usage is known.

    Args:
        pull: Metrics scrape with the KV usage of the workers.
        role: Role of those workers, decode or aggregated.
    """
    if not pull.kv.fresh:
        return None
    waiting = pull.worker_waiting.total if pull.worker_waiting is not None else 0.0
    in_flight = pull.demand.in_flight.get(role, 0.0) if pull.demand is not None else 0.0
    running = in_flight - waiting
    share = pull.kv.total / running if running > 0 and pull.kv.total > 0 else WAITING_SHARE
    return pull.kv.total + waiting * min(share, 1.0)


@dataclass(frozen=True, slots=True)
class KvLoad:
    """KV cache that the workers of one role use, in units of one full worker, as averages over the pulls (metrics scrapes) so far.

    The two sums ``light_s`` and ``done_tokens`` lose weight with a time constant of 2 minutes. ``light_s /
    done_tokens`` is the KV use that one prompt token causes, in seconds of one full worker, if workers decode as fast
    as idle ones ("light" load). This value times prompt tokens/s is the number of workers whose KV caches would be
    full.

    Attributes:
        load: Level and slope of the KV usage, summed over the workers (1.0 for a full one), waiting requests included.
        light_s: Sum of KV usage times duration, decayed. The usage is the one that there would have been if every
            worker had decoded as fast as an idle one: full workers decode more slowly, and so hold requests for longer.
        done_tokens: Uncached prompt tokens of the requests whose prefill was completed, decayed.
    """

    load: Trend = Trend()
    light_s: float = 0.0
    done_tokens: float = 0.0

    def followed(self, load: float, tokens: float, *, ready: int, dt_s: float, lasts_s: float) -> KvLoad:
        """Return the averages of KV usage after one pull (metrics scrape).

        Args:
            load: KV usage of the pull, summed over the workers (1.0 for a full one), waiting requests included.
            tokens: Uncached prompt tokens of the requests whose prefill was completed since the previous pull.
            ready: Number of ready workers that hold this load.
            dt_s: Simulated seconds since the previous pull, > 0.
            lasts_s: Simulated seconds for which a request holds its KV, for estimating the noise. Values above 40 s,
                the time constant of the average, count as 40 s, because slower changes are not noise.
        """
        kept = math.exp(-dt_s / WORK_TAU_S)
        usage = min(1.0, load / ready) if ready else 1.0
        return KvLoad(
            load=self.load.followed(load, dt_s, RATE_TAU_S, lasts_s=min(lasts_s, RATE_TAU_S)),
            light_s=self.light_s * kept + load * dt_s / (1.0 + SLOWDOWN * usage),
            done_tokens=self.done_tokens * kept + tokens,
        )
