"""The synthetic mixed traffic of three tiers: Poisson arrivals with surges, log-normal prompts and outputs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.core.tiers import TierPriority

Integers = NDArray[np.int64]

TIERS = (TierPriority.PREMIUM, TierPriority.STANDARD, TierPriority.BACKGROUND)

SHARES = (0.25, 0.40, 0.35)
"""Of arrivals. Premium: "20-30% of total volume" in the document; the rest chosen."""

PROMPT_TOKENS = (200, 400, 700)
OUTPUT_TOKENS = (150, 200, 250)
"""Means by tier, chosen: chat, chat with context, summaries."""

LONGEST_PROMPT = (600, 1500, 3000)
SPREAD = 0.5
"""Sigma of the logarithm, chosen: the 99th percentile is 3.2 times the median."""

SURGE_EVERY_S, SURGE_S, SURGE_FACTOR = 60.0, 6.0, 2.5
"""Each minute six seconds of two and a half times the rate, chosen: a queue that comes and goes."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request of the traffic; times in seconds, lengths in tokens."""

    arrival_s: float
    tier: TierPriority
    prompt_tokens: int
    output_tokens: int


def traffic(rate: float, seconds: float, seed: int) -> list[Request]:
    """Return the arrivals of ``seconds`` at ``rate`` requests/s outside of surges, in order."""
    rng = np.random.default_rng(seed)
    highest = rate * SURGE_FACTOR
    times = np.cumsum(rng.exponential(1 / highest, int(highest * seconds * 1.5) + 100))
    times = times[times < seconds]
    in_surge = times % SURGE_EVERY_S >= SURGE_EVERY_S - SURGE_S
    times = times[in_surge | (rng.random(times.size) < 1 / SURGE_FACTOR)]
    tiers = rng.choice(len(TIERS), times.size, p=SHARES)
    prompts = _lengths(rng, np.array(PROMPT_TOKENS)[tiers], np.array(LONGEST_PROMPT)[tiers])
    outputs = _lengths(rng, np.array(OUTPUT_TOKENS)[tiers], np.full(times.size, 1000))
    return [
        Request(float(at_s), TIERS[tier], int(prompt), int(output))
        for at_s, tier, prompt, output in zip(times, tiers, prompts, outputs, strict=True)
    ]


def _lengths(rng: np.random.Generator, means: Integers, longest: Integers) -> Integers:
    drawn = means * np.exp(rng.normal(-(SPREAD**2) / 2, SPREAD, len(means)))
    return np.clip(drawn, 8, longest).astype(np.int64)
