"""How many replicas of which size carry a load within targets, from a profile; docs/capacity.md has the formulas.

One role at a time: every engine size gets the fewest replicas that hold the target's percentile, and the size of the fewest
GPUs wins.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from penstock.core.errors import ConfigError
from penstock.core.flags import attainment_flag, flag
from penstock.performance.profile import DecodeRow
from penstock.performance.recommend import DecodeChoice, Targets, decode_choices, prefill_choice
from penstock.performance.sweep import EngineSweep, Sweep


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

    In flight are as many as a Poisson variable of that mean, where none waits; by its normal approximation.
    """
    return mean + max(0.0, NormalDist().inv_cdf(quantile)) * math.sqrt(mean)


MAX_REPLICAS = 10_000
"""Chosen: beyond any deployment; a load that needs more is a mistake in its unit."""
ROUTER_REQUEST_S, ROUTER_TOKEN_S = 1 / 2_700, 1 / 34_400
"""A router's processor seconds for a request of prefill and decode, and for a token. Source: the slower runs of
bench/router.py, bench/RESULTS.md."""
_ITERATIONS = 1000
_CLOSE = 1e-6
_TINY = 1e-3
"""A load so small changes nothing."""


@dataclass(frozen=True, slots=True)
class OfferedLoad:
    """What arrives; the help of its fields is the command line's, where the KV transfer is in milliseconds."""

    rps: float = flag("Requests per second.", gt=0)
    arrival_cv: float = flag(
        "Coefficient of variation of the times between arrivals; 1: Poisson.", default=1.0, ge=0
    )
    isl_cv: float = flag(
        "Coefficient of variation of prompt lengths, a factor of their mean.", default=0.0, ge=0
    )
    quantile: float = attainment_flag("Fraction of the requests that must meet the targets.", default=0.99)
    transfer_s: float | None = flag(
        "Time to hand a prompt's KV from prefill to decode, milliseconds.",
        name="--kv-transfer-ms",
        default=None,
        unset="the profile's; 0 where it does not say",
        ge=0,
        convert=lambda milliseconds: milliseconds / 1000,
    )

    @property
    def variability(self) -> float:
        """(ca² + cs²) / 2."""
        return (self.arrival_cv**2 + self.isl_cv**2) / 2


@dataclass(frozen=True, slots=True)
class RolePlan:
    """The fewest replicas of one role, of ``gpus`` each, that hold the target.

    Attributes:
        latency_s: TTFT or ITL to expect at the percentile, seconds.
        utilisation: Share of the pool's capacity in use: of its time in prefill, of the requests that it may run in decode.
        binds: Which limit needs the last replica.
    """

    gpus: int
    replicas: int
    latency_s: float
    utilisation: float
    binds: str

    @property
    def total_gpus(self) -> int:
        """GPUs of all replicas."""
        return self.gpus * self.replicas


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """What carries a load.

    Attributes:
        decode: The pool that decodes; the same as ``prefill`` in an aggregated graph.
        is_aggregated: One pool does both.
    """

    prefill: RolePlan
    decode: RolePlan
    is_aggregated: bool

    @property
    def gpus(self) -> int:
        """GPUs of all pools."""
        return self.prefill.total_gpus + (0 if self.is_aggregated else self.decode.total_gpus)


def router_cores(rps: float, osl: float) -> float:
    """Return the cores that routers keep busy; each has one, of which half is room for bursts."""
    return rps * (ROUTER_REQUEST_S + osl * ROUTER_TOKEN_S)


class UnreachableError(ConfigError):
    """No number of replicas meets a target."""


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """What one engine size does with a load, and the pools of it that hold the targets.

    Attributes:
        ttft_s: Of one prompt that does not wait.
        choices: Its batches by requests in flight.
        row: ITL over requests in flight, at the target's context.
        transfer_s: To hand a prompt's KV to this engine.
    """

    gpus: int
    ttft_s: float
    choices: tuple[DecodeChoice, ...]
    row: DecodeRow
    targets: Targets
    load: OfferedLoad
    transfer_s: float

    def itl_s(self, in_flight: float) -> float:
        """Return the ITL of this many requests, that of one below it."""
        return self.row.itl_of(max(1.0, in_flight))

    def wait_s(self, replicas: int) -> float:
        """Return how long a prompt waits at the percentile."""
        load = self.load
        return wait_quantile_s(
            replicas, load.rps, self.ttft_s, variability=load.variability, quantile=load.quantile
        )

    def first_token_s(self, replicas: int) -> float:
        """Return what a first token takes after its prefill: the KV's transfer, the running step's end, and its own step."""
        mean = self._mean_in_flight(self.load.rps / replicas)
        steps = 2 if self._is_running(mean) else 1
        return self.transfer_s + steps * self.itl_s(mean or 1.0)

    def _is_running(self, mean: float | None) -> bool:
        """Return whether the percentile has to count a step that runs, of ``mean`` requests in flight; None: any number.

        One runs with probability 1 - e^-mean: it counts where that is more than the share that may be late.
        """
        return mean is None or -math.expm1(-mean) > 1 - self.load.quantile

    def prefill_pool(self, after_s: float) -> RolePlan | None:
        """Return the fewest replicas whose TTFT percentile holds the target; None: the TTFT alone exceeds it."""
        least_s, most_s = self.ttft_s + after_s, self.targets.ttft_s
        if least_s > most_s:
            return None
        busy = self.load.rps * self.ttft_s
        replicas = least = _bounded(math.floor(busy) + 1)
        while (waited_s := self.wait_s(replicas)) + least_s > most_s:
            replicas = _bounded(replicas + 1)
        is_rate = replicas == least
        binds = "the rate of prompts" if is_rate else f"waiting, at the {self.load.quantile:.0%} of TTFT"
        return RolePlan(self.gpus, replicas, waited_s + least_s, busy / replicas, binds)

    def decode_pool(self) -> RolePlan | None:
        """Return the fewest replicas whose requests in flight stay within ITL and KV cache; None: one request exceeds it."""
        limit, quantile = self._limit(self.targets.itl_s), self.load.quantile
        if limit is None or most_in_flight(_TINY, quantile) > limit[0]:
            return None
        replicas = 1
        while (mean := self._mean_within(self.load.rps / replicas, limit[0])) is None:
            replicas = _bounded(replicas + 1)
        return RolePlan(
            self.gpus, replicas, self.itl_s(most_in_flight(mean, quantile)), mean / limit[0], limit[1]
        )

    def aggregated_pool(self) -> RolePlan | None:
        """Return the fewest replicas that hold both targets while they do both; None: none does.

        A replica that spends a share of its time on prompts decodes in the rest, so its ITL grows by 1 / (1 - share).
        """
        rps = self.load.rps
        if self.ttft_s > self.targets.ttft_s or self._limit(self.targets.itl_s) is None:
            return None
        for replicas in range(math.floor(rps * self.ttft_s) + 1, MAX_REPLICAS):
            share = rps * self.ttft_s / replicas
            is_running = self._is_running(self._mean_in_flight(rps / replicas / (1 - share)))
            ttft_s = self.wait_s(replicas) + self.ttft_s + is_running * self.itl_s(1)
            limit = self._limit(self.targets.itl_s * (1 - share))
            if ttft_s <= self.targets.ttft_s and limit is not None:
                mean = self._mean_within(rps / replicas / (1 - share), limit[0])
                if mean is not None:
                    used = share + (1 - share) * mean / limit[0]
                    return RolePlan(self.gpus, replicas, ttft_s, used, limit[1])
            if share < _TINY:
                break  # more replicas do not help: one request alone is too slow
        return None

    def _limit(self, itl_s: float) -> tuple[float, str] | None:
        """Return the most requests that may run, and what ends it; None: one alone exceeds the ITL."""
        meeting = [each.concurrency for each in self.choices if each.itl_s <= itl_s]
        if not meeting:
            return None
        is_last = meeting[-1] == self.choices[-1].concurrency
        return meeting[-1], "the KV cache, or the largest batch" if is_last else "ITL"

    def _mean_within(self, rps: float, most: float) -> float | None:
        """Return the mean in flight where the percentile stays within ``most``."""
        mean = self._mean_in_flight(rps, most)
        return mean if mean is not None and most_in_flight(mean, self.load.quantile) <= most else None

    def _mean_in_flight(self, rps: float, most: float = math.inf) -> float | None:
        """Return how many requests run on average, by Little: rate · output tokens · ITL of this many.

        The smallest number that answers as fast as requests come; None: none up to ``most`` does.
        """
        mean = 0.0
        for _ in range(_ITERATIONS):
            wanted = rps * self.targets.osl * self.itl_s(mean)
            if wanted > most:
                return None
            if wanted - mean <= _CLOSE * wanted:
                return wanted
            mean = wanted
        return mean


def figures(sweep: Sweep, targets: Targets, load: OfferedLoad) -> list[EngineFigures]:
    """Return the figures of every size.

    Raises:
        ConfigError: the lengths are beyond what was measured.
    """
    return [
        EngineFigures(
            engine.gpus,
            prefill_choice(engine, targets).ttft_s,
            tuple(decode_choices(engine, targets)),
            engine.decode_table().at_context(targets.context),
            targets,
            load,
            _transfer_s(engine, targets, load),
        )
        for engine in sweep.engines
    ]


def _transfer_s(engine: EngineSweep, targets: Targets, load: OfferedLoad) -> float:
    if load.transfer_s is not None:
        return load.transfer_s
    return 0.0 if engine.transfer is None else engine.transfer.of(targets.isl)


def plan_capacity(sweep: Sweep, targets: Targets, load: OfferedLoad) -> CapacityPlan:
    """Return the pools of the fewest GPUs that hold the targets.

    Raises:
        ConfigError: the lengths are beyond what was measured.
        UnreachableError: no number of replicas meets a target; the message names the nearest and what it takes.
    """
    engines = figures(sweep, targets, load)
    if sweep.is_aggregated:
        pool = _cheapest(engine.aggregated_pool() for engine in engines)
        if pool is not None:
            return CapacityPlan(pool, pool, is_aggregated=True)
    elif (decode := _cheapest(engine.decode_pool() for engine in engines)) is not None:
        (chosen,) = (engine for engine in engines if engine.gpus == decode.gpus)
        after_s = chosen.first_token_s(decode.replicas)
        prefill = _cheapest(engine.prefill_pool(after_s) for engine in engines)
        if prefill is not None:
            return CapacityPlan(prefill, decode, is_aggregated=False)
    raise UnreachableError(_unreachable(engines, targets, is_aggregated=sweep.is_aggregated))


def _cheapest(plans: Iterable[RolePlan | None]) -> RolePlan | None:
    found = [plan for plan in plans if plan is not None]
    return min(found, key=lambda pool: (pool.total_gpus, pool.latency_s), default=None)


def _bounded(replicas: int) -> int:
    if replicas > MAX_REPLICAS:
        raise ConfigError(
            f"--rps: more than {MAX_REPLICAS:,} replicas would be needed; is it requests per second?"
        )
    return replicas


def _unreachable(engines: Sequence[EngineFigures], targets: Targets, *, is_aggregated: bool) -> str:
    """Return which target no number of replicas meets, the nearest one that can be met, and what it takes."""
    itl_s, itl_gpus = min((engine.itl_s(1), engine.gpus) for engine in engines)
    ttft_s, ttft_gpus = min((engine.ttft_s, engine.gpus) for engine in engines)
    after_s = 0.0 if is_aggregated else min(engine.transfer_s for engine in engines) + itl_s
    least_s = ttft_s + after_s
    found = []
    if itl_s > targets.itl_s:
        found.append(
            f"ITL {targets.itl_s * 1000:g} ms: one request alone takes {itl_s * 1000:.1f} ms on TP{itl_gpus}, the fastest"
            " measured"
        )
    if least_s > targets.ttft_s:
        found.append(
            f"TTFT {targets.ttft_s * 1000:g} ms: without any wait it is {least_s * 1000:.1f} ms on TP{ttft_gpus}, the"
            " fastest measured"
        )
    both = f"TTFT {targets.ttft_s * 1000:g} ms and ITL {targets.itl_s * 1000:g} ms at once, with any size measured"
    return (
        f"no number of replicas meets {'; nor '.join(found) or both}; allow more, or profile a faster engine"
    )
