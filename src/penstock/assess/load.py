"""Makes a trace that has the observed rates, lengths, burstiness and prefix reuse, seeded. Pure."""

from __future__ import annotations

import hashlib
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.assess.observed import Buckets, Floats, Observed, dispersion
from penstock.workload.traces import BLOCK_TOKENS, Trace, TraceFormat, TraceRequest

_SMOOTHED_S: Final = 3600.0
"""Lengths are drawn from the histogram of an hour. Chosen: a minute has too few requests for the tail."""
_PREFIXES: Final = 16
"""Shared prefixes that are equally long and popular by 1/rank, as `penstock simulate`'s synthetic loads. Prometheus does not
know how many there are."""
_UNIQUE_FROM: Final = 1 << 40
_PREFIX_IDS: Final = 1 << 20


def make_trace(observed: Observed, *, seed: int) -> Trace:
    """Return requests that are drawn to have what was observed; of an unknown step there are none.

    Prompt and answer lengths are drawn independently of each other: histograms do not say which belong together.
    """
    rng = np.random.default_rng([seed, 5])
    arrivals = _arrivals(observed, rng)
    prompts = _lengths(observed.prompts, arrivals, observed.step_s, rng)
    answers = _lengths(observed.answers, arrivals, observed.step_s, rng)
    shares = _hit_rates(observed, arrivals)
    ids = shared_prefixes(prompts, shares, rng)
    requests = [
        TraceRequest(float(at_s), int(prompts[place]), int(answers[place]), ids[place], place + 1)
        for place, at_s in enumerate(arrivals)
    ]
    name = f"{observed.model} as Prometheus has it, seed {seed}"
    digest = hashlib.sha256(repr(requests).encode()).hexdigest()
    return Trace(name, TraceFormat.TABLE, digest, tuple(requests), {}, title=name)


def shared_prefixes(prompts: NDArray[Any], shares: Floats, rng: np.random.Generator) -> list[tuple[int, ...]]:
    """Return the block ids of prompts of which those shares, 0-1, are a prefix that other prompts have as well."""
    chains = _chains(len(prompts), rng)
    rounding = rng.random(len(prompts))
    found = []
    unique = _UNIQUE_FROM
    for place, prompt in enumerate(prompts):
        blocks = -(-int(prompt) // BLOCK_TOKENS)
        shared = int(shares[place] * blocks + rounding[place])
        first = int(chains[place]) * _PREFIX_IDS
        own = range(unique, unique + blocks - shared)
        unique += blocks - shared
        found.append((*range(first, first + shared), *own))
    return found


def _arrivals(observed: Observed, rng: np.random.Generator) -> Floats:
    """Return sorted times: whole numbers of requests whose sum follows the rates, clustered as in the busiest hour."""
    counts = np.nan_to_num(observed.arrivals, nan=0.0)
    whole = np.diff(np.floor(np.cumsum(counts) + 0.5), prepend=0.0).astype(np.int64)
    slots = max(1, round(observed.step_s / observed.fine_step_s)) if observed.fine_step_s else 1
    excess = dispersion(observed.fine) - 1.0 if observed.fine is not None else 0.0
    found = []
    for step, count in enumerate(whole):
        places = rng.random(count)
        if excess > 0 and slots > 1 and count:
            # Weights of Gamma shape k raise a slot's variance from m to m + m²/k.
            shape = count / slots / excess
            weights = rng.gamma(shape, 1.0, slots)
            if weights.sum() > 0:
                drawn = rng.choice(slots, size=count, p=weights / weights.sum())
                places = (drawn + rng.random(count)) / slots
        found.append((step + np.sort(places)) * observed.step_s)
    return np.concatenate(found) if found else np.zeros(0)


def _lengths(buckets: Buckets, arrivals: Floats, step_s: float, rng: np.random.Generator) -> Floats:
    """Return a length for each arrival, whose distribution and mean are those of its hour."""
    hour = max(1, round(_SMOOTHED_S / step_s))
    lengths = np.ones(len(arrivals))
    places = (arrivals // (hour * step_s)).astype(np.int64)
    everything = _Lengths(buckets)
    for number in np.unique(places):
        own = places == number
        part = buckets.cut(int(number) * hour, (int(number) + 1) * hour)
        known = _Lengths(part) if np.nansum(part.counts) >= 1 else everything
        lengths[own] = known.draw(int(own.sum()), rng)
    return lengths


class _Lengths:
    """The distribution of an hour's lengths: bucket counts, and within a bucket a power law that keeps the mean."""

    def __init__(self, buckets: Buckets) -> None:
        total = buckets.total()
        finite = np.array(buckets.bounds[:-1])
        lows = np.concatenate(([0.0], finite)) + 1
        # The open last bucket is taken as one octave.
        highs = np.concatenate((finite, [2 * finite[-1]])) if finite.size else np.array([1.0])
        self._lows, self._highs = lows, np.maximum(highs, lows)
        self._shares = total / total.sum() if total.sum() > 0 else np.eye(1, len(total))[0]
        self._power = self._fitted(buckets.mean())

    def _fitted(self, mean: float | None) -> float:
        """Return the power p of low + (high - low) · u^p, whose mean in a bucket is low + (high - low) / (p + 1)."""
        if mean is None:
            return 1.0
        base = float(self._shares @ self._lows)
        room = float(self._shares @ (self._highs - self._lows))
        fraction = (mean - base) / room if room > 0 else 0.5
        return 1 / min(max(fraction, 0.02), 0.98) - 1

    def draw(self, count: int, rng: np.random.Generator) -> Floats:
        """Return lengths of at least one token."""
        chosen = rng.choice(len(self._shares), size=count, p=self._shares)
        lows, highs = self._lows[chosen], self._highs[chosen]
        return np.asarray(np.maximum(1, np.rint(lows + (highs - lows) * rng.random(count) ** self._power)))


def _hit_rates(observed: Observed, arrivals: Floats) -> Floats:
    """Return each request's shared fraction of its prompt: the hit rate of its hour."""
    if observed.hit_rate is None or not np.isfinite(observed.hit_rate).any():
        return np.zeros(len(arrivals))
    hour = max(1, round(_SMOOTHED_S / observed.step_s))
    overall = float(np.nanmean(observed.hit_rate))
    parts = [observed.hit_rate[first : first + hour] for first in range(0, observed.steps, hour)]
    rates = np.array([np.nanmean(part) if np.isfinite(part).any() else overall for part in parts])
    places = np.minimum((arrivals // (hour * observed.step_s)).astype(np.int64), len(rates) - 1)
    return np.asarray(np.clip(rates[places], 0.0, 0.95))


def _chains(count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    weights = 1 / np.arange(1, _PREFIXES + 1)
    return rng.choice(_PREFIXES, size=count, p=weights / weights.sum())
