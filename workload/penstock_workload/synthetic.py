"""Makes requests that no trace recorded: arrival processes, lengths and shared prefixes; always called synthetic.

Pure: the random generator is an argument. Called by the simulator's command line and benches; results
carry `SyntheticSpec.name`, so that nobody takes them for a trace's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from enum import StrEnum
from itertools import accumulate
from typing import Final

import numpy as np

from penstock_core.errors import ConfigError
from penstock_workload.traces import BLOCK_TOKENS, TraceRequest

_UNIQUE_IDS_FROM: Final = 1 << 40
"""Ids of blocks that nobody shares start here, far above those of any shared prefix."""


class Process(StrEnum):
    """How arrivals are placed.

    POISSON: independent gaps. GAMMA: independent gaps of a given coefficient of variation.
    SINE: Poisson with a rate that swings about its mean. STEP: Poisson with a rate that jumps up and back.
    """

    POISSON = "poisson"
    GAMMA = "gamma"
    SINE = "sine"
    STEP = "step"


@dataclass(frozen=True, slots=True)
class SyntheticSpec:
    """One made-up workload.

    Attributes:
        process: See `Process`.
        rate: Mean arrivals, requests/s, > 0; of STEP the rate outside the step.
        count: Requests, >= 1.
        cv: GAMMA: coefficient of variation of the gaps, > 0; 1 is Poisson.
        amplitude: SINE: largest deviation as a share of the mean, in [0, 1].
        period_s: SINE: length of a swing in seconds, > 0.
        peak: STEP: factor on the rate inside the step, > 0.
        step_s: STEP: when the step begins, seconds, >= 0.
        step_length_s: STEP: how long it lasts, seconds, > 0.
        input_tokens: Mean prompt length in tokens, >= 1.
        output_tokens: Mean output length in tokens, >= 1.
        length_cv: Coefficient of variation of both lengths (log-normal), >= 0; 0 makes them all equal.
        max_tokens: Longest prompt and longest output, tokens; longer draws are cut there.
        share: Share of the requests that begin with a shared prefix, in [0, 1].
        prefixes: How many shared prefixes there are, >= 1.
        prefix_tokens: Length of each in tokens, >= 1; rounded up to whole blocks of 512, and part of a
            prompt only as far as the prompt reaches.
        skew: Zipf exponent of their popularity, >= 0; 0 makes all equally popular.
    """

    process: Process = Process.POISSON
    rate: float = 1.0
    count: int = 1000
    cv: float = 3.0
    amplitude: float = 0.5
    period_s: float = 600.0
    peak: float = 3.0
    step_s: float = 300.0
    step_length_s: float = 300.0
    input_tokens: int = 2048
    output_tokens: int = 256
    length_cv: float = 1.0
    max_tokens: int = 131_072
    share: float = 0.0
    prefixes: int = 16
    prefix_tokens: int = 1024
    skew: float = 1.0

    def __post_init__(self) -> None:
        """Check the bounds.

        Raises:
            ConfigError: a value is out of its range.
        """
        above_0 = ("rate", "cv", "period_s", "peak", "step_length_s")
        at_least_1 = ("count", "input_tokens", "output_tokens", "max_tokens", "prefixes", "prefix_tokens")
        for name in above_0:
            _check(name, getattr(self, name), getattr(self, name) > 0, "above 0")
        for name in at_least_1:
            _check(name, getattr(self, name), getattr(self, name) >= 1, "at least 1")
        for name in ("step_s", "length_cv", "skew"):
            _check(name, getattr(self, name), getattr(self, name) >= 0, "at least 0")
        for name in ("amplitude", "share"):
            _check(name, getattr(self, name), 0 <= getattr(self, name) <= 1, "between 0 and 1")

    @property
    def name(self) -> str:
        """The workload's name: ``synthetic poisson rate=4 count=1000 ...`` with what differs from the default."""
        told = [
            f"{field.name}={getattr(self, field.name):g}"
            for field in fields(self)
            if field.name != "process" and getattr(self, field.name) != field.default
        ]
        return " ".join(("synthetic", self.process.value, *told))


def parse_synthetic(text: str) -> SyntheticSpec | None:
    """Return the spec that ``poisson:rate=4,count=1000`` stands for, or None if it names no process.

    Raises:
        ConfigError: a key is unknown, or a value no number or out of its range.
    """
    word, _, rest = text.partition(":")
    if word not in set(Process):
        return None
    kinds = {field.name: int if field.type == "int" else float for field in fields(SyntheticSpec)[1:]}
    values: dict[str, float] = {}
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        key = key.strip().replace("-", "_")
        if key not in kinds:
            raise ConfigError(f"--trace {word}: unknown key {key!r}; known are {', '.join(kinds)}")
        try:
            values[key] = kinds[key](value)
        except ValueError as exc:
            raise ConfigError(f"--trace {word}: {key}={value!r} is not a number of its kind") from exc
    return SyntheticSpec(process=Process(word), **values)  # type: ignore[arg-type]  # kinds checked above


def synthesise(spec: SyntheticSpec, rng: np.random.Generator) -> list[TraceRequest]:
    """Return the requests in order of arrival, ids included; `TraceRequest.line` counts from 1."""
    arrivals = arrival_times(spec, rng)
    inputs = _lengths(spec.input_tokens, spec, rng)
    outputs = _lengths(spec.output_tokens, spec, rng)
    prefixes = _prefixes(spec, rng)
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


def arrival_times(spec: SyntheticSpec, rng: np.random.Generator) -> list[float]:
    """Return ``spec.count`` arrival times in seconds, never decreasing."""
    if spec.process is Process.GAMMA:
        shape = 1 / spec.cv**2
        gaps = rng.gamma(shape, 1 / (shape * spec.rate), spec.count)
        return list(accumulate(map(float, gaps)))
    if spec.process is Process.POISSON:
        return list(accumulate(map(float, rng.exponential(1 / spec.rate, spec.count))))
    rate, top = _rate(spec)
    thinned = _thin(rate, top, rng)
    return [next(thinned) for _ in range(spec.count)]


def _rate(spec: SyntheticSpec) -> tuple[Callable[[float], float], float]:
    """Return the rate at a time, and the largest rate."""
    if spec.process is Process.SINE:
        turn = 2 * math.pi / spec.period_s
        return (
            lambda at_s: spec.rate * (1 + spec.amplitude * math.sin(turn * at_s)),
            spec.rate * (1 + spec.amplitude),
        )
    end_s = spec.step_s + spec.step_length_s
    return (
        lambda at_s: spec.rate * (spec.peak if spec.step_s <= at_s < end_s else 1.0),
        spec.rate * max(1.0, spec.peak),
    )


def _thin(rate: Callable[[float], float], top: float, rng: np.random.Generator) -> Iterator[float]:
    """Yield the arrivals of a Poisson process of changing rate: candidates at ``top``, kept at rate / top."""
    at_s = 0.0
    while True:
        at_s += float(rng.exponential(1 / top))
        if rng.random() * top < rate(at_s):
            yield at_s


def _lengths(mean: int, spec: SyntheticSpec, rng: np.random.Generator) -> list[int]:
    if spec.length_cv == 0:
        return [min(mean, spec.max_tokens)] * spec.count
    sigma2 = math.log(1 + spec.length_cv**2)
    drawn = rng.lognormal(math.log(mean) - sigma2 / 2, math.sqrt(sigma2), spec.count)
    return [int(each) for each in np.clip(np.rint(drawn), 1, spec.max_tokens)]


def _prefixes(spec: SyntheticSpec, rng: np.random.Generator) -> list[int | None]:
    weights = np.arange(1, spec.prefixes + 1, dtype=np.float64) ** -spec.skew
    chosen = rng.choice(spec.prefixes, size=spec.count, p=weights / weights.sum())
    has_one = rng.random(spec.count) < spec.share
    return [int(index) if given else None for index, given in zip(chosen, has_one, strict=True)]


def _check(name: str, value: float, is_fine: bool, bound: str) -> None:  # noqa: FBT001 - the check's outcome
    if not (is_fine and math.isfinite(value)):
        raise ConfigError(f"--trace: {name}={value!r} must be {bound}")
