"""Makes requests that no trace recorded: arrival processes, lengths and shared prefixes; always called synthetic. Pure."""

from __future__ import annotations

import hashlib
import heapq
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from itertools import accumulate, count, islice, takewhile
from typing import Final

import numpy as np

from penstock.core.errors import ConfigError
from penstock.core.flags import bounds_text, flag, flags, is_within
from penstock.workload.traces import (
    BLOCK_TOKENS,
    OnBadRow,
    Trace,
    TraceFormat,
    TraceRequest,
    load_trace,
)

Rate = Callable[[float], float]
"""Requests/s at a time in seconds."""


def sine(rate: float, *, amplitude: float, period_s: float) -> Rate:
    """Return a rate that swings about ``rate`` by ``amplitude`` of it."""
    turn = 2 * math.pi / period_s
    return lambda at_s: rate * (1 + amplitude * math.sin(turn * at_s))


def step(rate: float, *, peak: float, start_s: float, length_s: float, every_s: float = math.inf) -> Rate:
    """Return ``rate``, and ``rate * peak`` in [start_s, start_s + length_s), again after each ``every_s``."""
    return lambda at_s: rate * (peak if at_s >= start_s and (at_s - start_s) % every_s < length_s else 1.0)


def sawtooth(rate: float, *, peak: float, period_s: float) -> Rate:
    """Return a rate that climbs from ``rate`` to ``rate * peak`` in a straight line and falls back at once, each period."""
    return lambda at_s: rate * (1 + (peak - 1) * (at_s % period_s) / period_s)


DAY_S: Final = 86_400.0
_QUIET_DAYS: Final = frozenset({3, 5, 6})
"""Quiet days of a week that begins on Monday: a holiday on Thursday, and the weekend."""


def week(rate: float, *, peak: float, length_s: float, rng: np.random.Generator) -> Rate:
    """Return weeks that begin on Monday, between ``rate`` at night and some ``rate * peak`` at noon.

    Two thirds of the day's work come from one time zone, from eight to six, and a third from one eight hours behind; morning and
    evening are half cosines of ``length_s``. On Thursday, a holiday, and at the weekend a seventh of it comes. Each night at two a batch
    of half an hour adds half of ``rate * peak``, up to twenty minutes early or late.
    """
    jitters: list[float] = []

    def work(at_s: float) -> float:
        number, phase_s = divmod(at_s, DAY_S)
        share = _smooth(_share(phase_s, 8 * 3600, length_s)) - _smooth(_share(phase_s, 18 * 3600, length_s))
        return share / 7 if int(number) % 7 in _QUIET_DAYS else share

    def at(at_s: float) -> float:
        night = int(at_s // DAY_S)
        while len(jitters) <= night:
            jitters.append(float(rng.uniform(-1200, 1200)))
        begun_s = at_s - night * DAY_S - 2 * 3600 - jitters[night]
        batch = 0.5 * peak if 0 <= begun_s < 1800 else 0.0
        return rate * (1 + (peak - 1) * (2 * work(at_s) + work(at_s - 8 * 3600)) / 3 + batch)

    return at


def ramp(rate: float, *, peak: float, start_s: float, length_s: float) -> Rate:
    """Return ``rate`` until start_s, then a straight line to ``rate * peak`` within length_s, which lasts."""
    return lambda at_s: rate * (1 + (peak - 1) * _share(at_s, start_s, length_s))


def regimes(rate: float, *, peak: float, hold_s: float, rng: np.random.Generator) -> Rate:
    """Return a rate that jumps to levels between ``rate`` and ``rate * peak``, each held for an exponential time.

    The logarithm of the levels is uniform.
    """
    ends: list[float] = []
    levels: list[float] = []

    def at(at_s: float) -> float:
        while not ends or at_s >= ends[-1]:
            ends.append((ends[-1] if ends else 0.0) + float(rng.exponential(hold_s)))
            levels.append(rate * peak ** float(rng.random()))
        return levels[bisect_right(ends, at_s)]

    return at


def day(rate: float, *, peak: float, period_s: float, length_s: float) -> Rate:
    """Return a night at ``rate`` and a day at ``rate * peak``, half the period each.

    Morning and evening are half cosines of length_s; the morning begins a quarter of the period after the
    night does, so that day and night are equally long.
    """

    def at(at_s: float) -> float:
        phase_s = at_s % period_s
        morning = _share(phase_s, period_s / 4, length_s)
        evening = _share(phase_s, period_s * 3 / 4, length_s)
        return rate * (1 + (peak - 1) * (_smooth(morning) - _smooth(evening)))

    return at


def thinned(rate: Rate, top: float, rng: np.random.Generator) -> Iterator[float]:
    """Yield the arrivals of a Poisson process of changing rate: candidates at ``top``, kept at rate / top."""
    at_s = 0.0
    while True:
        at_s += float(rng.exponential(1 / top))
        if rng.random() * top < rate(at_s):
            yield at_s


def bursts(rate: float, *, peak: float, cv: float, rng: np.random.Generator) -> Iterator[float]:
    """Yield the arrivals of an interrupted Poisson process: on at ``rate * peak``, off without any.

    On and off times are exponential. The share of time on is p = 1 / peak, peak > 1, and with the switching rates' sum s the
    gaps, whose CV is above 1, have CV^2 = 1 + 2 * rate * peak * (1 - p) / s, which gives s. Source: Heffes and Lucantoni's
    moments of an interrupted Poisson process.

    Example: rate 2, peak 10, CV 13: bursts of 20/s for 5.2 s on average, every 52 s.
    """
    share_on = 1 / peak
    switching = 2 * rate * peak * (1 - share_on) / (cv**2 - 1)
    on_s, off_s = 1 / (switching * (1 - share_on)), 1 / (switching * share_on)
    return _switched(
        rate * peak, lambda: float(rng.exponential(on_s)), lambda: float(rng.exponential(off_s)), rng
    )


def tenants(
    rate: float, *, number: int, peak: float, on_s: float, rng: np.random.Generator
) -> Iterator[float]:
    """Yield the arrivals of tenants that are on and off for heavy-tailed times (Pareto of shape 1.5).

    Each has an equal share of ``rate``, and is on 1 / ``peak`` of the time, ``peak`` > 1.
    """

    def one(own: np.random.Generator) -> Iterator[float]:
        # The mean of 1 + pareto(a) is a / (a - 1), so 3 for the shape 1.5.
        def lasts(mean_s: float) -> float:
            return mean_s * (1 + float(own.pareto(1.5))) / 3

        off_s = on_s * (peak - 1)
        start_s = lasts(off_s) * float(own.random()) if own.random() * peak > 1 else 0.0
        return _switched(rate / number * peak, lambda: lasts(on_s), lambda: lasts(off_s), own, start_s)

    return heapq.merge(*(one(own) for own in rng.spawn(number)))


def _switched(
    rate: float,
    on_s: Callable[[], float],
    off_s: Callable[[], float],
    rng: np.random.Generator,
    start_s: float = 0.0,
) -> Iterator[float]:
    """Yield Poisson arrivals at ``rate`` while on; ``on_s`` and ``off_s`` draw how long each time lasts."""
    while True:
        end_s = start_s + on_s()
        at_s = start_s + float(rng.exponential(1 / rate))
        while at_s < end_s:
            yield at_s
            at_s += float(rng.exponential(1 / rate))
        start_s = end_s + off_s()


def _share(at_s: float, start_s: float, length_s: float) -> float:
    return min(1.0, max(0.0, (at_s - start_s) / length_s))


def _smooth(share: float) -> float:
    return (1 - math.cos(math.pi * share)) / 2


MOST_REQUESTS: Final = 1_000_000
"""Chosen: bounds a workload whose duration alone is given."""

_UNIQUE_IDS_FROM: Final = 1 << 40
"""Ids of unshared blocks start here, far above those of any shared prefix."""


_KINDS: Final = {"int": int, "float": float, "str": str}


class Process(StrEnum):
    """How arrivals are placed.

    POISSON: independent gaps. GAMMA: independent gaps of a given coefficient of variation.
    CONSTANT: equal gaps. BURSTS: Poisson that is switched on and off, with gaps of a given coefficient of
    variation. TENANTS: several of these side by side, each on and off for heavy-tailed times. The others are
    Poisson with a rate that changes: SINE swings about its mean, STEP jumps up and back, RAMP rises once and stays,
    REGIMES jumps to random levels at random times, DAY goes from night to day and back, SAWTOOTH climbs and falls at once, WEEK has
    work days, nights with a batch, a holiday and a weekend.
    """

    POISSON = "poisson"
    GAMMA = "gamma"
    SINE = "sine"
    STEP = "step"
    CONSTANT = "constant"
    RAMP = "ramp"
    REGIMES = "regimes"
    DAY = "day"
    SAWTOOTH = "sawtooth"
    WEEK = "week"
    BURSTS = "bursts"
    TENANTS = "tenants"


_TITLES: Final = {
    Process.POISSON: "Random arrivals at a steady rate",
    Process.GAMMA: "Arrivals in clusters at a steady rate",
    Process.SINE: "A rate that swings",
    Process.STEP: "A step in the rate",
    Process.CONSTANT: "Evenly spaced arrivals",
    Process.RAMP: "A rising rate",
    Process.REGIMES: "A rate that jumps at random",
    Process.DAY: "Days and nights",
    Process.SAWTOOTH: "A rate that climbs and falls at once",
    Process.WEEK: "Weeks of work days, nights and a holiday",
    Process.BURSTS: "Bursts",
    Process.TENANTS: "Tenants that come and go",
}


@dataclass(frozen=True, slots=True)
class SyntheticSpec:
    """One made-up workload; lengths are tokens, those of STEP and RAMP begin at ``step_s``."""

    process: Process = Process.POISSON
    rate: float = flag(
        "Mean arrivals, requests/s; of STEP, RAMP, DAY and SAWTOOTH those at the beginning, of REGIMES and WEEK the lowest.",
        default=1.0,
        gt=0,
    )
    count: int = flag("Requests at most.", default=1000, ge=1)
    cv: float = flag(
        "GAMMA, BURSTS: coefficient of variation of the gaps, of BURSTS above 1; 1 is Poisson.",
        default=3.0,
        gt=0,
    )
    amplitude: float = flag("SINE: largest deviation as a share of the mean.", default=0.5, ge=0, le=1)
    period_s: float = flag(
        "SINE, DAY, SAWTOOTH: length of a swing, of DAY at least 4 step_length_s.", default=600.0, gt=0
    )
    peak: float = flag(
        "STEP, RAMP, REGIMES, DAY, SAWTOOTH, WEEK: largest factor on the rate; BURSTS, TENANTS: the factor while on, above 1.",
        default=3.0,
        gt=0,
    )
    step_s: float = flag("STEP, RAMP: when the change begins.", default=300.0, ge=0)
    step_length_s: float = flag(
        "How long it lasts; REGIMES: mean length of a level; TENANTS: of a time on; DAY, WEEK: of morning and evening.",
        default=300.0,
        gt=0,
    )
    every_s: float = math.inf
    """STEP: it comes again this often, above ``step_length_s``; infinite: once."""
    tenants: int = flag("TENANTS: how many share the mean rate.", default=10, ge=1)
    duration_s: float = math.inf
    """Arrivals from here on are left out, > 0; infinite: ``count`` alone decides."""
    input_tokens: int = flag("Mean prompt length.", default=2048, ge=1)
    output_tokens: int = flag("Mean output length.", default=256, ge=1)
    shift_s: float = math.inf
    """From here on prompts and outputs have other lengths, >= 0; infinite: never."""
    shift_every_s: float = math.inf
    """Then lengths go back and forth this often, > 0; infinite: they stay."""
    shift_input: float = flag("Factor on the prompts' lengths then.", default=1.0, gt=0)
    shift_output: float = flag("Factor on the outputs' lengths then.", default=1.0, gt=0)
    drift_input: float = flag(
        "Factor on the prompts' lengths that is reached at the last arrival, in a straight line.",
        default=1.0,
        gt=0,
    )
    length_cv: float = flag("Coefficient of variation of both lengths, log-normal.", default=1.0, ge=0)
    max_tokens: int = flag("Longest prompt and output; longer draws are cut there.", default=131_072, ge=1)
    share: float = flag("Share of the requests that begin with a shared prefix.", default=0.0, ge=0, le=1)
    prefixes: int = flag("How many shared prefixes there are.", default=16, ge=1)
    prefix_tokens: int = flag("Length of each, rounded up to full blocks of 512.", default=1024, ge=1)
    skew: float = flag("Zipf exponent of their popularity; 0: all are equally popular.", default=1.0, ge=0)
    requests: str = ""
    """Trace whose prompts and outputs arrive at these times, in its order and again from its first one; empty: none. They
    are cut at ``max_tokens`` and ``output_tokens``, and all else about lengths and prefixes has no effect."""

    def __post_init__(self) -> None:
        for name, each in flags(self).items():
            value = getattr(self, name)
            if not is_within(each, value):
                raise ConfigError(f"--trace: {name}={value!r} must be {bounds_text(each, value)}")
        is_on_and_off = self.process in {Process.BURSTS, Process.TENANTS}
        length = f"step_length_s={self.step_length_s:g}"
        for name, is_fine, bound in (
            ("duration_s", self.duration_s > 0, "above 0"),
            ("shift_s", self.shift_s >= 0, "at least 0"),
            ("shift_every_s", self.shift_every_s > 0, "above 0"),
            ("every_s", self.every_s > self.step_length_s, f"above {length}"),
            ("cv", self.process is not Process.BURSTS or self.cv > 1, "above 1 for bursts"),
            ("peak", not is_on_and_off or self.peak > 1, f"above 1 for {self.process.value}"),
            (
                "period_s",
                self.process is not Process.DAY or self.period_s >= 4 * self.step_length_s,
                f"at least four times {length}",
            ),
        ):
            if not is_fine:
                raise ConfigError(f"--trace: {name}={getattr(self, name)!r} must be {bound}")

    @property
    def name(self) -> str:
        """The workload's name: ``synthetic poisson rate=4 count=1000 ...`` with what differs from the default."""
        given = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name != "process" and getattr(self, field.name) not in {field.default, MOST_REQUESTS}
        }
        described = [
            f"{name}={value}" if isinstance(value, str) else f"{name}={value:g}"
            for name, value in given.items()
        ]
        return " ".join(("synthetic", self.process.value, *described))

    @property
    def title(self) -> str:
        """Return the load as text, without figures: a load may be stretched."""
        return _TITLES[self.process] + (f" with the requests of {self.requests}" if self.requests else "")


def parse_synthetic(text: str) -> SyntheticSpec | None:
    """Return the spec that ``poisson:rate=4,count=1000`` stands for, or None if it names no process."""
    word, _, rest = text.partition(":")
    if word not in set(Process):
        return None
    kinds = {field.name: _KINDS[str(field.type)] for field in fields(SyntheticSpec)[1:]}
    values: dict[str, float | str] = {}
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        key = key.strip().replace("-", "_")
        if key not in kinds:
            raise ConfigError(f"--trace {word}: unknown key {key!r}; known: {', '.join(kinds)}")
        try:
            values[key] = kinds[key](value)
        except ValueError as exc:
            raise ConfigError(f"--trace {word}: {key}={value!r} is not a number of its kind") from exc
    if "duration_s" in values:
        values.setdefault("count", MOST_REQUESTS)
    return SyntheticSpec(process=Process(word), **values)  # type: ignore[arg-type]  # kinds checked above


def read_source(
    source: str, *, on_bad_row: OnBadRow = OnBadRow.REFUSE, block_tokens: int | None = None, seed: int = 0
) -> Trace:
    """Return the trace that a command line names.

    Args:
        source: A file, a packaged trace's name, or a synthetic process.
        on_bad_row: What becomes of a file's rows that cannot be read.
        block_tokens: That one hash id of a file stands for; None: its format's own.
        seed: Of a synthetic process: the same requests as in the simulator.

    Raises:
        ConfigError: no such source, or nothing is left of it.
    """
    synthetic = parse_synthetic(source)
    if synthetic is None:
        return load_trace(source, on_bad_row=on_bad_row, block_tokens=block_tokens)
    requests = tuple(synthesise(synthetic, np.random.default_rng([seed, 1])))
    digest = hashlib.sha256(synthetic.name.encode()).hexdigest()
    return Trace(synthetic.name, TraceFormat.SYNTHETIC, digest, requests, {}, title=synthetic.title)


def synthesise(spec: SyntheticSpec, rng: np.random.Generator) -> list[TraceRequest]:
    """Return the requests in order of arrival, ids included; `TraceRequest.line` counts from 1."""
    arrivals = arrival_times(spec, rng)
    if not arrivals:
        raise ConfigError(f"--trace: duration_s={spec.duration_s:g} ends before the first arrival")
    if spec.requests:
        return _of_trace(spec, arrivals)
    inputs = _shifted(_lengths(spec.input_tokens, len(arrivals), spec, rng), arrivals, spec.shift_input, spec)
    inputs = _drifted(inputs, arrivals, spec)
    outputs = _shifted(
        _lengths(spec.output_tokens, len(arrivals), spec, rng), arrivals, spec.shift_output, spec
    )
    prefixes = _prefixes(len(arrivals), spec, rng)
    unique = _UNIQUE_IDS_FROM
    requests = []
    for line, (at_s, prompt, output, prefix) in enumerate(
        zip(arrivals, inputs, outputs, prefixes, strict=True), start=1
    ):
        blocks = -(-prompt // BLOCK_TOKENS)
        shared = 0 if prefix is None else min(blocks, -(-spec.prefix_tokens // BLOCK_TOKENS))
        first = 0 if prefix is None else prefix * -(-spec.prefix_tokens // BLOCK_TOKENS)
        own = range(unique, unique + blocks - shared)
        unique += blocks - shared
        requests.append(TraceRequest(at_s, prompt, output, (*range(first, first + shared), *own), line))
    return requests


def _of_trace(spec: SyntheticSpec, arrivals: Sequence[float]) -> list[TraceRequest]:
    rows = load_trace(spec.requests).requests
    ids = 1 + max((block for row in rows for block in row.block_ids or ()), default=0)
    made = []
    for place, at_s in enumerate(arrivals):
        again, row = divmod(place, len(rows))
        prompt = min(rows[row].input_tokens, spec.max_tokens)
        output = min(rows[row].output_tokens, spec.output_tokens)
        blocks = rows[row].block_ids
        if blocks is not None:
            blocks = tuple(again * ids + each for each in blocks[: -(-prompt // BLOCK_TOKENS)])
        made.append(TraceRequest(at_s, prompt, output, blocks, place + 1))
    return made


def arrival_times(spec: SyntheticSpec, rng: np.random.Generator) -> list[float]:
    """Return at most ``spec.count`` arrival times in seconds before ``spec.duration_s``, never decreasing."""
    before_end = takewhile(lambda at_s: at_s < spec.duration_s, _arrivals(spec, rng))
    return list(islice(before_end, spec.count))


def _arrivals(spec: SyntheticSpec, rng: np.random.Generator) -> Iterator[float]:
    if spec.process is Process.GAMMA:
        shape = 1 / spec.cv**2
        return accumulate(map(float, rng.gamma(shape, 1 / (shape * spec.rate), spec.count)))
    if spec.process is Process.POISSON:
        return accumulate(map(float, rng.exponential(1 / spec.rate, spec.count)))
    if spec.process is Process.CONSTANT:
        return (place / spec.rate for place in count())
    if spec.process is Process.BURSTS:
        return bursts(spec.rate, peak=spec.peak, cv=spec.cv, rng=rng)
    if spec.process is Process.TENANTS:
        return tenants(spec.rate, number=spec.tenants, peak=spec.peak, on_s=spec.step_length_s, rng=rng)
    # A week's batch falls into its night, when some of the other time zone's evening is still there.
    tops = {Process.SINE: 1 + spec.amplitude, Process.WEEK: 1 + spec.peak}
    top = tops.get(spec.process, max(1.0, spec.peak))
    return thinned(_rate(spec, rng), spec.rate * top, rng)


def _rate(spec: SyntheticSpec, rng: np.random.Generator) -> Rate:
    rate, peak, length_s, period_s = spec.rate, spec.peak, spec.step_length_s, spec.period_s
    made: dict[Process, Callable[[], Rate]] = {
        Process.SINE: lambda: sine(rate, amplitude=spec.amplitude, period_s=period_s),
        Process.STEP: lambda: step(
            rate, peak=peak, start_s=spec.step_s, length_s=length_s, every_s=spec.every_s
        ),
        Process.RAMP: lambda: ramp(rate, peak=peak, start_s=spec.step_s, length_s=length_s),
        Process.REGIMES: lambda: regimes(rate, peak=peak, hold_s=length_s, rng=rng.spawn(1)[0]),
        Process.DAY: lambda: day(rate, peak=peak, period_s=period_s, length_s=length_s),
        Process.SAWTOOTH: lambda: sawtooth(rate, peak=peak, period_s=period_s),
        Process.WEEK: lambda: week(rate, peak=peak, length_s=length_s, rng=rng.spawn(1)[0]),
    }
    return made[spec.process]()


def _lengths(mean: int, number: int, spec: SyntheticSpec, rng: np.random.Generator) -> list[int]:
    if spec.length_cv == 0:
        return [min(mean, spec.max_tokens)] * number
    sigma2 = math.log(1 + spec.length_cv**2)
    drawn = rng.lognormal(math.log(mean) - sigma2 / 2, math.sqrt(sigma2), number)
    return [int(each) for each in np.clip(np.rint(drawn), 1, spec.max_tokens)]


def _shifted(
    lengths: Sequence[int], arrivals: Sequence[float], factor: float, spec: SyntheticSpec
) -> list[int]:
    return [
        min(max(1, round(length * factor)), spec.max_tokens)
        if at_s >= spec.shift_s and (at_s - spec.shift_s) // spec.shift_every_s % 2 == 0
        else length
        for length, at_s in zip(lengths, arrivals, strict=True)
    ]


def _drifted(lengths: list[int], arrivals: Sequence[float], spec: SyntheticSpec) -> list[int]:
    if spec.drift_input == 1:
        return lengths
    gained = (spec.drift_input - 1) / arrivals[-1]
    return [
        min(max(1, round(length * (1 + gained * at_s))), spec.max_tokens)
        for length, at_s in zip(lengths, arrivals, strict=True)
    ]


def _prefixes(number: int, spec: SyntheticSpec, rng: np.random.Generator) -> list[int | None]:
    weights = np.arange(1, spec.prefixes + 1, dtype=np.float64) ** -spec.skew
    chosen = rng.choice(spec.prefixes, size=number, p=weights / weights.sum())
    has_one = rng.random(number) < spec.share
    return [int(index) if given else None for index, given in zip(chosen, has_one, strict=True)]
