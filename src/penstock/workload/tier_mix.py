"""Gives a workload's requests priority tiers, in given proportions. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from penstock.api import Tier
from penstock.core.errors import ConfigError
from penstock.workload.traces import TraceRequest

TierMix = Mapping[Tier, float]
"""Weights by tier, > 0; only their ratios count."""

TIERS_FLAG = "--tiers"


def parse_mix(text: str) -> TierMix:
    """Return the mix that ``premium=20,standard=50,background=30`` stands for.

    Raises:
        ConfigError: not of this form, an unknown tier, one given twice, or a weight that is not above 0.
    """
    mix: dict[Tier, float] = {}
    for part in text.split(","):
        name, _, weight = part.partition("=")
        try:
            tier, value = Tier(name.strip()), float(weight)
        except ValueError as exc:
            raise ConfigError(
                f"{TIERS_FLAG} {text}: {part!r} must be TIER=WEIGHT, as premium=20; tiers are {', '.join(Tier)}"
            ) from exc
        if tier in mix:
            raise ConfigError(f"{TIERS_FLAG} {text}: {tier} is given twice; give each tier once")
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{TIERS_FLAG} {text}: {weight!r} must be a finite number above 0")
        mix[tier] = value
    return mix


def with_tiers(requests: Sequence[TraceRequest], mix: TierMix | None, *, seed: int) -> list[TraceRequest]:
    """Return the requests with tiers drawn in the mix's proportions; unchanged without a mix."""
    if mix is None:
        return list(requests)
    tiers = list(mix)
    weights = np.array(list(mix.values()), dtype=np.float64)
    drawn = np.random.default_rng([seed, 2]).choice(len(tiers), size=len(requests), p=weights / weights.sum())
    return [replace(request, tier=tiers[place]) for request, place in zip(requests, drawn, strict=True)]
