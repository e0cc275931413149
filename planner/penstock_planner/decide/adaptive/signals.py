"""What a planner follows from pull to pull: arrivals and prefill work, KV cache in use, and how both continue.

Requests per second are followed fast and their tokens slowly: half of the noise of tokens/s is the spread of lengths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.api import Role
from penstock_planner.decide.observation import Demand, Pull

STARTUP_S = 30.0
"""Chosen: the start-up assumed until one has been seen: a process with its model on a local disk. The least
that can be prepared for."""

SPAN_S = 300.0
"""Chosen: five minutes of requests tell what lasts from a moment's: late ones (with ten *drifting-prompts*
was 95.9% in time, with five 97.8%), and the most that came within a quarter of an hour; noise is averaged as
long, as a variance needs more samples than a mean."""

CHANCE_SIGMAS = 2.0
"""Chosen: what is within this many standard errors may be chance and starts nothing: a jump of arrivals
within seconds (step went from 86 to 98% in time, and poisson stayed), late requests alongside those allowed."""


@dataclass(frozen=True, slots=True)
class TrendForecast:
    """What a trend predicts.

    Attributes:
        now: Value now, without the averages' lag.
        ahead: Value at the horizon, along the slope.
        error: Standard error of ``ahead``, from the noise of the samples.
    """

    now: float
    ahead: float
    error: float

    def times(self, factor: float) -> TrendForecast:
        """Return the forecast of this many times the value."""
        return TrendForecast(self.now * factor, self.ahead * factor, self.error * factor)


@dataclass(frozen=True, slots=True)
class Trend:
    """A level, a slope and their noise from irregular samples: Brown's double exponential smoothing.

    Attributes:
        first: Exponential average of the values.
        second: Exponential average of ``first``.
        noise: Average of the squared deviations from ``first``, each times the seconds that it lasted.
        seen_s: Seconds followed so far.
    """

    first: float = 0.0
    second: float = 0.0
    noise: float = 0.0
    seen_s: float = 0.0

    def followed(self, value: float, dt_s: float, tau_s: float, *, lasts_s: float = 0.0) -> Trend:
        """Return the trend after a value that held for ``dt_s``, averaged over ``tau_s``.

        Until ``tau_s`` has passed the averages are plain ones, so that the first values do not linger. A sum
        of things that last for ``lasts_s`` repeats itself within twice that: its values there are no more
        than one, for the noise.
        """
        seen_s = self.seen_s + dt_s
        weight = max(dt_s / seen_s, 1.0 - math.exp(-dt_s / tau_s))
        deviation = value - self.first
        noise_weight = max(dt_s / seen_s, 1.0 - math.exp(-dt_s / SPAN_S))
        noise = self.noise
        if self.seen_s > 0:
            noise += noise_weight * (deviation * deviation * max(dt_s, 2.0 * lasts_s) - noise)
        first = self.first + weight * deviation
        second = self.second + weight * (first - self.second)
        return Trend(first, second, noise, min(seen_s, 100.0 * tau_s))

    def forecast(self, horizon_s: float, tau_s: float) -> TrendForecast:
        """Return value, prediction and its error; values are at least 0.

        The slope is followed for the average's span and for as long as the values were, at most; then it
        stays. Followed for 6 spans, a sine of ten minutes asked for workers that came after its crest: 99.6%
        in time for 2.86 in place of 2.56 GPU-hours.

        With a = 1/tau and k = horizon/tau the prediction weighs a sample of age t by
        a ((2 + k) exp(-a t) - (1 + k) a t exp(-a t)), so for white noise of density S its variance is
        S a ((2 + k)^2 / 2 - (2 + k)(1 + k) / 2 + (1 + k)^2 / 4). Of a prediction of nothing only the error
        of the present is left: a slope that ends at 0 goes nowhere.

        Example: tau 60 s, horizon 30 s, 2.4 requests/s of 8,000 +- 8,000 tokens: S = 2.4 x 2 x 8,000^2 =
        3.07e8, error 3,045 tokens/s on a mean of 19,200.
        """
        k = min(horizon_s, self.seen_s, tau_s) / tau_s
        slope = (self.first - self.second) / tau_s
        now = 2.0 * self.first - self.second
        ahead = max(0.0, now + slope * k * tau_s)
        k = k if ahead > 0 else 0.0
        factor = (2.0 + k) ** 2 / 2.0 - (2.0 + k) * (1.0 + k) / 2.0 + (1.0 + k) ** 2 / 4.0
        error = math.sqrt(self.noise * factor / tau_s)
        return TrendForecast(max(0.0, now), ahead, error)


RATE_TAU_S = 40.0
"""Chosen: longer lags behind a rise of ten minutes, shorter is noise; at 2 requests/s the prediction's error
is some 15%. KV usage, a sum over many requests, and a worker's throughput, by its time of computing, are
averaged as long: of 30 and 60 s nothing was better by half a point (TRIED.md)."""

LEVEL_TAU_S = 6.0
"""Chosen: a jump of arrivals is known within seconds. Of 15, 10, 6 and 4 s, flash was 73.8, 74.8, 76.8 and
76.8% in time, step 96.1, 96.3, 97.9 and 98.3%, and 4 s cost 2% more GPU-hours on bursts."""

WORK_TAU_S = 120.0
"""Chosen: prompt lengths, whose spread is most of the noise of tokens/s, and the KV that a token costs change
more slowly than arrivals."""

LEAST_BUSY_S = LEVEL_TAU_S
"""Worker-seconds of computing; less is not a measure of throughput. At 2 s the first prompts of a start asked
for two workers too many."""

SIZE_QUANTILES = (-1.534, -0.887, -0.489, -0.157, 0.157, 0.489, 0.887, 1.534)
"""The middles of eight equal parts of a normal distribution, in standard deviations; prompts are log-normal
between traces' two humps and a constant."""

ASSUMED_REQUESTS = 10.0
"""Chosen: this many requests are assumed alongside those seen: prompts of a CV of 1, as chat has it, and first
tokens in time while nothing waited."""

SLACK_SHARE = 0.8
"""Chosen: of the slack that the size of a prompt leaves what it may wait; the worker's present prompt, the
transfer of KV and the first step of decode take the rest. At the whole the model predicted half of what was
late (TRIED.md)."""

MEMORY_S = 6 * 3600.0
"""Chosen: after six hours what was seen weighs half, or a third of it, so that a night forgets the day and a
morning's bursts are known at noon. What a deployment decides, as the order of a queue, is remembered as
long."""

SHARED_LEAST = 1.0 / RATE_TAU_S
"""The share that one worker-second adds. At nine tenths of what it can do a pool is at some 0.7."""

HUNG_TIMES = 4.0
"""Bound: a pool that finishes no prompt for this many times as long as its prompts should take, and as a
first token may take, hangs or compiles; what comes on top is not computing time."""


def may_wait_s(sizes: Sequence[float], tokens_per_s: float, slo_s: float) -> float:
    """Return how long a second of work may wait and its prompt be in time: each prompt's own slack, weighed by its work.

    Long prompts have the least slack and are most of a queue. Those that take longer than the SLO by
    themselves are left out, and where almost all do, the share that no queue may take is what they wait:
    another fleet would not have them in time either.

    Args:
        sizes: Uncached tokens of prompts, each as frequent as another.
        tokens_per_s: Of one worker, > 0.
        slo_s: TTFT in time.
    """
    fit = [(size, slo_s - size / tokens_per_s) for size in sizes if size < slo_s * tokens_per_s]
    work = sum(size for size, _ in fit)
    slack_s = sum(size * slack_s for size, slack_s in fit) / work if work else slo_s
    return max(SLACK_SHARE * slack_s, (1.0 - SLACK_SHARE) * slo_s)


@dataclass(frozen=True, slots=True)
class Work:
    """Prefill work at the frontend.

    Attributes:
        rate: Of requests/s arriving.
        level: Requests/s over the last seconds, without a slope.
        sized: Requests, decayed over minutes.
        sized_tokens: Their uncached tokens, decayed alike.
        sized_squares: Of the tokens of each pull beyond the mean's, squared, decayed alike.
        done_tokens: Tokens whose prefill ended, decayed over busy time.
        busy_s: Worker-seconds in which a prompt was being computed, decayed alike.
        shared: Share of that time in which requests met: more were there than workers had a prompt; averaged
            over computing.
        unfinished_s: Worker-seconds of computing since the last prompt was finished.
        overdue: First tokens that came while a request had waited longer than the SLO, decayed over hours.
        overdue_in_time: Those of them that were in time, decayed alike: none where the first to arrive is
            always next.
    """

    rate: Trend = Trend()
    level: float = 0.0
    sized: float = 0.0
    sized_tokens: float = 0.0
    sized_squares: float = 0.0
    done_tokens: float = 0.0
    busy_s: float = 0.0
    shared: float = 0.0
    unfinished_s: float = 0.0
    overdue: float = 0.0
    overdue_in_time: float = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """Return what one worker is seen to do while it computes; None until it has been seen enough."""
        return (
            self.done_tokens / self.busy_s if self.busy_s >= LEAST_BUSY_S and self.done_tokens > 0 else None
        )

    @property
    def is_alone(self) -> bool:
        """Whether no request has lately met another: what was done then is what was asked for, not what workers can do."""
        return self.shared < SHARED_LEAST

    @property
    def serves_in_time_first(self) -> bool:
        """Whether requests that can still meet their deadline were seen to be served before those that cannot."""
        return 2.0 * self.overdue_in_time > self.overdue

    @property
    def size(self) -> float:
        """Return the mean uncached tokens of a request; 0 before the first."""
        return self.sized_tokens / self.sized if self.sized > 0 else 0.0

    @property
    def sizes(self) -> tuple[float, ...]:
        """Return the uncached tokens of requests at `SIZE_QUANTILES`."""
        mean = self.size
        assumed = ASSUMED_REQUESTS * mean * mean
        squares = (self.sized_squares + assumed) / (self.sized + ASSUMED_REQUESTS)
        spread = math.sqrt(math.log(1.0 + squares / (mean * mean))) if mean else 0.0
        return tuple(mean * math.exp(spread * (z - spread / 2)) for z in SIZE_QUANTILES)

    @property
    def lately(self) -> TrendForecast:
        """Return the requests/s of the last seconds, taken to stay."""
        # Arrivals as random as Poisson's; a mean over less than the average's span is as sure as its span is long.
        seen_s = self.rate.seen_s
        error = math.sqrt(self.level / min(2.0 * LEVEL_TAU_S, seen_s)) if seen_s > 0 else 0.0
        return TrendForecast(self.level, self.level, error)

    def arriving(self, ahead_s: float) -> TrendForecast:
        """Return the requests/s along the trend."""
        return self.rate.forecast(ahead_s, RATE_TAU_S)

    def followed(self, demand: Demand, slo_s: float, entry: Role) -> Work:
        """Return the work after one pull's demand.

        Throughput is tokens done per worker-second in which a worker had a prompt: a worker that idles half
        of the time is not taken for one that does half as much, nor one that hangs or compiles for a slow
        one.

        Args:
            demand: Of the pull.
            slo_s: TTFT that counts as in time.
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
        # Of n prompts the sum differs from n means by n variances, squared.
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
            shared=self.shared + (1.0 - math.exp(-met_s / RATE_TAU_S)) * (is_shared - self.shared),
            unfinished_s=unfinished_s,
            overdue=self.overdue * order_kept + overdue,
            overdue_in_time=self.overdue_in_time * order_kept + in_time,
        )

    def _longest_s(self, demand: Demand, slo_s: float) -> float:
        """Return the worker-seconds within which workers finish a prompt; infinite while their throughput is unknown."""
        speed = self.tokens_per_s
        if speed is None:
            return math.inf
        return max(slo_s * demand.prefilling_workers, HUNG_TIMES * demand.in_flight_tokens / speed)


@dataclass(frozen=True, slots=True)
class WorkView:
    """What is known of prefill work at a decision.

    Attributes:
        tokens_per_s: Of one worker; None until one has been seen to work.
        is_alone: No request has lately met another one, so that the workers can do more than that, and nothing waits.
        rate: Uncached tokens/s arriving, now and when a new replica could be ready.
        level: Uncached tokens/s arriving over the last seconds; ``ahead`` is the same.
        far_rate: The same when a replica removed now could have been started again.
        backlog_tokens: Waiting and in flight, not computed.
        sizes: Uncached tokens of requests, a few quantiles.
        recalled: Uncached tokens/s that the week's record expects until a new replica could be ready; 0: no
            more than there are.
        far_recalled: The same until a replica removed now could have been started again.
        belief: Share of the jumps it told that came.
    """

    tokens_per_s: float | None
    rate: TrendForecast
    level: TrendForecast
    far_rate: float
    backlog_tokens: float
    sizes: tuple[float, ...]
    is_alone: bool = False
    recalled: float = 0.0
    far_recalled: float = 0.0
    belief: float = 0.0


FULL = 0.9
"""KV usage above which a worker counts as full: the planner document's threshold for growing."""

SLOWDOWN = 3.0
"""By how much longer a worker with a full KV cache takes for a token than an idle one, against the idle one's
time: 2.9, 3.3 and 7.3 in the shipped profiles of H100 70B, A100 8B and H200 8B. Without it ten times the load
held thirty times the KV, and a flash crowd found its decode workers a start-up late."""

LOAD_MOST = 2.0
"""Bound: an overloaded worker counts as two full ones at most; beyond that the excess is unknown."""

WAITING_SHARE = 0.02
"""KV of a waiting request where running ones give no figure: the planner document's own figure."""


def light_of(usage: float) -> float:
    """Return the KV usage that a worker's answers would have if it stayed as fast as an idle one, below 1 / `SLOWDOWN`.

    This, not usage, adds up over workers: of two at 0.22 one alone would be more than full.
    """
    return usage / (1.0 + SLOWDOWN * usage)


def usage_of(light: float) -> float:
    """Return the KV usage of a worker whose answers would have ``light`` on an idle one; the inverse of `light_of`."""
    return light / (1.0 - SLOWDOWN * light)


def kv_load_of(pull: Pull, role: Role) -> float | None:
    """Return the pull's KV load in workers' worth, unknown workers counted as empty; None when nothing is known.

    A waiting request weighs what a running one holds on average, and `WAITING_SHARE` where nothing runs.
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
    """KV cache in use, in workers' worth.

    Attributes:
        load: Of KV usage summed over workers, waiting requests' share included.
        light_s: Worker-seconds of KV over some minutes, as if every worker had decoded as fast as an idle one.
        done_tokens: Uncached tokens whose prefill ended, decayed alike.
    """

    load: Trend = Trend()
    light_s: float = 0.0
    done_tokens: float = 0.0

    def followed(self, load: float, tokens: float, *, ready: int, dt_s: float, lasts_s: float) -> KvLoad:
        """Return the KV load after one pull.

        Args:
            load: Of the pull, held for ``dt_s``.
            tokens: Uncached tokens whose prefill ended meanwhile.
            ready: Workers that hold it.
            dt_s: Since the pull before, > 0.
            lasts_s: How long a request holds it; longer than the average's span is a change, not noise.
        """
        kept = math.exp(-dt_s / WORK_TAU_S)
        usage = min(1.0, load / ready) if ready else 1.0
        return KvLoad(
            load=self.load.followed(load, dt_s, RATE_TAU_S, lasts_s=min(lasts_s, RATE_TAU_S)),
            light_s=self.light_s * kept + load * dt_s / (1.0 + SLOWDOWN * usage),
            done_tokens=self.done_tokens * kept + tokens,
        )


class Decoding(Protocol):
    """Expected answers, and what they hold of a pool's KV cache."""

    def load_on(self, workers: int) -> float:
        """Return the KV load of that many workers, in workers' worth; all of it where there are none."""
        ...


@dataclass(frozen=True, slots=True)
class LightDecoding:
    """Answers that hold as much KV per token as the last minutes' did.

    Attributes:
        light: KV load on workers that stay as fast as idle ones, in workers' worth.
    """

    light: float

    def load_on(self, workers: int) -> float:
        """Return the KV load on ``workers``, at most `LOAD_MOST` of each.

        A worker at usage u decodes `SLOWDOWN` x u longer than an idle one, and holds the KV as much longer:
        u = h (1 + s u), where h is what it would hold if it stayed fast. Hence u = h / (1 - s h).
        """
        if workers < 1:
            return self.light
        share = self.light / workers
        left = 1.0 - SLOWDOWN * share
        return workers * (LOAD_MOST if share > LOAD_MOST * left else share / left)


@dataclass(frozen=True, slots=True)
class KvView:
    """What is known of KV usage at a decision.

    Attributes:
        load: Workers' worth of KV in use or waited for. It is taken to stay: a filling cache rises fast, then
            levels off.
        decoding: What holds the KV of the arrivals expected when a new replica could be ready.
        error: Standard error of ``load``.
    """

    load: float
    decoding: Decoding
    error: float = 0.0

    @property
    def kept_load(self) -> float:
        """Return the load to keep room for, with its standard error."""
        return self.load + self.error

    def moved(self, ready: int, workers: int) -> float:
        """Return the load that what ``ready`` workers hold, `kept_load`, would be on ``workers``."""
        load = self.kept_load
        return LightDecoding(ready * light_of(load / ready)).load_on(workers) if ready else load
