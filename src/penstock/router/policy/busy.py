"""When a worker counts as busy, and how far it is above its thresholds. Pure.

Source: NVIDIA Dynamo's document "Request Rejection", "Busy Detection Logic".
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from penstock.api import AdmissionConfig, AdmissionMode
from penstock.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class BusyThresholds:
    """Above which load a rank is busy; either threshold suffices, one that is None never does.

    Attributes:
        active_decode_blocks: Fraction of the KV blocks in use, 0-1.
        active_prefill_tokens: Prompt tokens to be computed, >= 0.
        active_prefill_tokens_frac: The same as a multiple of the worker's batch token limit, >= 0.
    """

    active_decode_blocks: float | None = None
    active_prefill_tokens: int | None = None
    active_prefill_tokens_frac: float | None = None

    @property
    def is_set(self) -> bool:
        """Whether any threshold can make a worker busy."""
        return not (
            self.active_decode_blocks is None
            and self.active_prefill_tokens is None
            and self.active_prefill_tokens_frac is None
        )

    def prefill_limit(self, batch_tokens: int | None) -> float | None:
        """Return the lower of both prefill thresholds in tokens; None: no such threshold.

        Args:
            batch_tokens: Most tokens of one step of the worker; None: unknown, the fraction then says nothing.
        """
        tokens, fraction = self.active_prefill_tokens, self.active_prefill_tokens_frac
        if fraction is None or batch_tokens is None:
            return tokens
        limit = fraction * batch_tokens
        return limit if tokens is None else min(tokens, limit)


NO_THRESHOLDS: Final = BusyThresholds()


@dataclass(frozen=True, slots=True)
class RankLoad:
    """What one data-parallel rank of a worker has to do.

    Attributes:
        decode_blocks_fraction: KV blocks in use, 0-1, or above 1 where more is on its way there; None: unknown.
        prefill_tokens: Prompt tokens given to it and not computed yet, >= 0.
    """

    decode_blocks_fraction: float | None
    prefill_tokens: float


@dataclass(frozen=True, slots=True)
class Excess:
    """How far a busy worker is above its thresholds, at the rank that is nearest to them.

    Attributes:
        decode_blocks_fraction: KV blocks above the threshold, a fraction of all, >= 0.
        prefill_tokens: Prompt tokens above the threshold, >= 0.
    """

    decode_blocks_fraction: float = 0.0
    prefill_tokens: float = 0.0


def busy_thresholds(config: AdmissionConfig) -> BusyThresholds:
    """Return the thresholds that a graph's admission section asks for; mode ``none`` clears them all."""
    if config.mode is AdmissionMode.NONE:
        return NO_THRESHOLDS
    return BusyThresholds(
        config.active_decode_blocks_threshold,
        config.active_prefill_tokens_threshold,
        config.active_prefill_tokens_threshold_frac,
    )


def admission_with(config: AdmissionConfig, given: Mapping[str, Any]) -> AdmissionConfig:
    """Return an admission section with what flags say in its place.

    Args:
        config: The graph's, or the defaults.
        given: Fields of the section by name, checked already.
    """
    return config.model_copy(update=dict(given))


def check_flags(config: AdmissionConfig, given: Mapping[str, Any]) -> None:
    """Refuse thresholds that are given as flags and change nothing.

    Args:
        config: The section with the flags in its place.
        given: The flags, as in `admission_with`.

    Raises:
        ConfigError: its mode is none.
    """
    idle = [f"--{name.replace('_', '-')}" for name in given if name.startswith("active_")]
    if idle and config.mode is AdmissionMode.NONE:
        raise ConfigError(
            f"{', '.join(idle)}: without effect under admission mode none; add --admission-control token-capacity"
        )


def rank_loads(usages: Sequence[float | None], prompts: Iterable[int], rest: float) -> list[RankLoad]:
    """Return the load of each rank of a worker, which balances whole prompts over them as they come.

    Worked: three prompts of 9,000 tokens over two ranks are 18,000 and 9,000, and not 13,500 twice.

    Args:
        usages: KV blocks in use, by rank, 0-1; None: unknown.
        prompts: Tokens to be computed of each prompt there, the oldest first.
        rest: Further tokens to be computed there whose prompts are not known; they count evenly.
    """
    tokens = [rest / len(usages)] * len(usages)
    ranks = sorted(range(len(usages)), key=lambda rank: usages[rank] or 0.0)
    for prompt in prompts:
        tokens[min(ranks, key=tokens.__getitem__)] += prompt
    return [RankLoad(usage, each) for usage, each in zip(usages, tokens, strict=True)]


def worker_excess(
    ranks: Collection[RankLoad], thresholds: BusyThresholds, batch_tokens: int | None
) -> Excess | None:
    """Return how far a worker is above its thresholds; None: it is not busy.

    A worker is busy only if all its ranks are: one with room takes the next request. What is unknown makes no rank
    busy, and a worker without ranks is none.

    Args:
        ranks: Of the worker, all of them.
        thresholds: Of the model.
        batch_tokens: Most tokens of one step of the worker; None: unknown.
    """
    limit = thresholds.prefill_limit(batch_tokens)
    nearest: Excess | None = None
    for rank in ranks:
        excess = _rank_excess(rank, thresholds.active_decode_blocks, limit)
        if excess is None:
            return None
        if nearest is None or _size(excess) < _size(nearest):
            nearest = excess
    return nearest


def _rank_excess(rank: RankLoad, blocks_limit: float | None, prefill_limit: float | None) -> Excess | None:
    used = rank.decode_blocks_fraction
    blocks = 0.0 if used is None or blocks_limit is None else used - blocks_limit
    tokens = 0.0 if prefill_limit is None else rank.prefill_tokens - prefill_limit
    if blocks <= 0 and tokens <= 0:
        return None
    return Excess(max(0.0, blocks), max(0.0, tokens))


def _size(excess: Excess) -> tuple[float, float]:
    return excess.decode_blocks_fraction, excess.prefill_tokens
