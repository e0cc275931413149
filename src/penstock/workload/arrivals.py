"""Shapes a trace: spreads batches, selects requests, sets the mean rate and draws tiers. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import groupby

import numpy as np
import xxhash

from penstock.api import Tier
from penstock.core.errors import ConfigError
from penstock.core.flags import check_bounds, flag
from penstock.workload.traces import BLOCK_TOKENS, TraceRequest

GROUP_INTERVAL_S = 3.0
"""Seconds between Mooncake's batches: 99.9% of the conversation trace's gaps are 3.000 +- 0.002 s."""


class Spread(StrEnum):
    """How the requests of one batch are placed inside its interval.

    EVEN: request i of n arrives at i/n of the interval: the batch's rate, with no burst of its own.
    POISSON: n independent uniform places, sorted: a Poisson process that has n arrivals.
    NONE: all at the batch's own time, as recorded.
    """

    EVEN = "even"
    POISSON = "poisson"
    NONE = "none"


def spread(
    requests: Sequence[TraceRequest],
    how: Spread,
    *,
    rng: np.random.Generator,
    interval_s: float = GROUP_INTERVAL_S,
) -> list[TraceRequest]:
    """Return the requests with each batch spread over its interval, in order of arrival.

    A batch is a run of rows with one and the same time; a row alone keeps its time under EVEN and NONE.
    """
    if how is Spread.NONE:
        return list(requests)
    moved: list[TraceRequest] = []
    for start_s, batch, room_s in _batches(requests, interval_s):
        count = len(batch)
        places = np.arange(count) / count if how is Spread.EVEN else np.sort(rng.random(count))
        moved.extend(
            replace(request, arrival_s=start_s + float(place) * room_s)
            for request, place in zip(batch, places, strict=True)
        )
    return moved


def _batches(
    requests: Sequence[TraceRequest], interval_s: float
) -> Iterator[tuple[float, list[TraceRequest], float]]:
    batches = [(at, list(rows)) for at, rows in groupby(requests, key=lambda request: request.arrival_s)]
    for index, (at, rows) in enumerate(batches):
        until_next = batches[index + 1][0] - at if index + 1 < len(batches) else interval_s
        yield at, rows, min(interval_s, until_next)


def mean_rate(requests: Sequence[TraceRequest]) -> float | None:
    """Return requests/s between the first and the last arrival, or None when no time passes.

    n arrivals span n - 1 gaps, so the rate is (n - 1) / (last - first).
    """
    if len(requests) < 2:
        return None
    span_s = requests[-1].arrival_s - requests[0].arrival_s
    return (len(requests) - 1) / span_s if span_s > 0 else None


def rescale(
    requests: Sequence[TraceRequest], *, rate_rps: float | None = None, rate_scale: float | None = None
) -> tuple[list[TraceRequest], float]:
    """Return the requests with time stretched or shrunk about 0, and the rate factor applied."""
    if rate_rps is not None and rate_scale is not None:
        raise ConfigError("--rate and --rate-scale: both set the arrival rate; give one")
    if rate_rps is not None:
        current = mean_rate(requests)
        if current is None:
            raise ConfigError("--rate: the selected requests all arrive at once, there is no rate to scale")
        rate_scale = rate_rps / current
    elif rate_scale is None:
        return list(requests), 1.0
    return [replace(request, arrival_s=request.arrival_s / rate_scale) for request in requests], rate_scale


_HASH_RANGE = 2.0**64


class OnLong(StrEnum):
    """What to do with a prompt above the limit: cut it there, or leave the request out."""

    TRUNCATE = "truncate"
    DROP = "drop"


@dataclass(frozen=True, slots=True)
class Selection:
    """What to take from a trace; the help of its fields is the command line's.

    The window is closed at its start, which becomes the replay's zero, and open at its end. A hash of seed and line
    chooses the sample: a seed keeps the same rows in any window, and a smaller share a subset of a larger one.
    """

    start_s: float = flag(
        "Start of the replay window, seconds from the start of the trace.", default=0.0, ge=0
    )
    duration_s: float | None = flag("Length of the window, seconds of the trace.", gt=0, unset="to its end")
    sample: float = flag(
        "Share of the requests that is kept, above 0 and at most 1.",
        default=1.0,
        gt=0,
        le=1,
        metavar="FRACTION",
    )
    limit: int | None = flag(
        "Maximum number of requests, applied after all other filters.", ge=1, unset="all"
    )
    max_input_tokens: int | None = flag(
        "Maximum prompt length, tokens; needs --on-long.", ge=1, unset="no limit"
    )
    on_long: OnLong | None = flag("Cut longer prompts, or leave their requests out.", default=None)

    def __post_init__(self) -> None:
        check_bounds(self)
        if (self.max_input_tokens is None) != (self.on_long is None):
            raise ConfigError(
                "--max-input-tokens and --on-long go together: a limit on the prompt length changes the"
                " workload, so say whether longer prompts are cut (truncate) or left out (drop)"
            )


def select(
    requests: Sequence[TraceRequest], chosen: Selection, *, seed: int = 0
) -> tuple[list[TraceRequest], int, int]:
    """Return what ``chosen`` selects, in order, arrivals counted from the window; how many prompts were cut, and left out."""
    end_s = math.inf if chosen.duration_s is None else chosen.start_s + chosen.duration_s
    window = [request for request in requests if chosen.start_s <= request.arrival_s < end_s]
    sampled = [request for request in window if _is_sampled(request.line, chosen.sample, seed)]
    kept, truncated, dropped = _fit(sampled, chosen)
    if not kept:
        last_s = max((request.arrival_s for request in requests), default=0.0)
        raise ConfigError(
            f"--start-s {chosen.start_s:g}, --duration-s {chosen.duration_s}, --sample {chosen.sample:g},"
            f" --max-input-tokens {chosen.max_input_tokens}: no request is left"
            f" ({len(window)} in the window, {len(sampled)} sampled; the trace ends at {last_s:.0f} s)"
        )
    moved = [replace(request, arrival_s=request.arrival_s - chosen.start_s) for request in kept]
    return moved, truncated, dropped


def _is_sampled(line: int, share: float, seed: int) -> bool:
    if share >= 1:
        return True
    return xxhash.xxh3_64_intdigest(b"%d" % line, seed=seed % 2**64) / _HASH_RANGE < share


def _fit(requests: Sequence[TraceRequest], chosen: Selection) -> tuple[list[TraceRequest], int, int]:
    kept: list[TraceRequest] = []
    truncated = dropped = 0
    for request in requests:
        if chosen.limit is not None and len(kept) == chosen.limit:
            break
        if chosen.max_input_tokens is None or request.input_tokens <= chosen.max_input_tokens:
            kept.append(request)
        elif chosen.on_long is OnLong.DROP:
            dropped += 1
        else:
            truncated += 1
            kept.append(_cut(request, chosen.max_input_tokens))
    return kept, truncated, dropped


def _cut(request: TraceRequest, tokens: int) -> TraceRequest:
    ids = request.block_ids
    return replace(
        request,
        input_tokens=tokens,
        block_ids=None if ids is None else ids[: -(-tokens // BLOCK_TOKENS)],
    )


TierMix = Mapping[Tier, float]
"""Weights by tier, > 0; only their ratios count."""

TIERS_FLAG = "--tiers"


def parse_mix(text: str) -> TierMix:
    """Return the mix that ``premium=20,standard=50,background=30`` stands for."""
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
    """Return the requests with tiers drawn in the mix's proportions; unchanged without a mix.

    Raises:
        ConfigError: there is a mix, but requests of the trace name their tiers themselves.
    """
    if mix is None:
        return list(requests)
    named = sum(request.tier is not None for request in requests)
    if named:
        raise ConfigError(
            f"{TIERS_FLAG}: {named:,} of {len(requests):,} requests of the trace name their tier themselves; leave the option out, "
            'or remove "tier" from the rows'
        )
    tiers = list(mix)
    weights = np.array(list(mix.values()), dtype=np.float64)
    drawn = np.random.default_rng([seed, 2]).choice(len(tiers), size=len(requests), p=weights / weights.sum())
    return [replace(request, tier=tiers[place]) for request, place in zip(requests, drawn, strict=True)]
