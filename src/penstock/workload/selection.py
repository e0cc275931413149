"""Chooses which requests of a trace are replayed: a window of time, a sample, a length limit, a count.

Pure. Applied after spreading, in the order of `Selection`'s fields, so that a window of a trace sends
exactly what the whole trace would have sent in it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import xxhash

from penstock.core.errors import ConfigError
from penstock.workload.traces import BLOCK_TOKENS, TraceRequest

_HASH_RANGE = 2.0**64


class OnLong(StrEnum):
    """What to do with a prompt above the limit: cut it there, or leave the request out."""

    TRUNCATE = "truncate"
    DROP = "drop"


@dataclass(frozen=True, slots=True)
class Selection:
    """What to take from a trace.

    Attributes:
        start_s: Begin of the window in trace seconds, >= 0, closed; it becomes the replay's zero.
        duration_s: Length of the window, > 0, open at its end; None takes the rest.
        sample: Share of requests kept, in (0, 1], chosen by a hash of seed and line: a seed keeps
            the same rows in any window, and a smaller share keeps a subset of a larger one.
        max_input_tokens: Longest prompt in tokens, >= 1; None for no limit.
        on_long: Required with ``max_input_tokens``.
        limit: Most requests, >= 1; None for all.
    """

    start_s: float = 0.0
    duration_s: float | None = None
    sample: float = 1.0
    max_input_tokens: int | None = None
    on_long: OnLong | None = None
    limit: int | None = None

    def __post_init__(self) -> None:
        """Check the bounds.

        Raises:
            ConfigError: a value is out of its range; the message names the flag.
        """
        checks = (
            ("--start-s", self.start_s, math.isfinite(self.start_s) and self.start_s >= 0, "at least 0"),
            ("--duration-s", self.duration_s, self.duration_s is None or self.duration_s > 0, "above 0"),
            ("--sample", self.sample, 0 < self.sample <= 1, "above 0 and at most 1"),
            ("--limit", self.limit, self.limit is None or self.limit >= 1, "at least 1"),
            (
                "--max-input-tokens",
                self.max_input_tokens,
                self.max_input_tokens is None or self.max_input_tokens >= 1,
                "at least 1",
            ),
        )
        for flag, value, is_fine, bound in checks:
            if not is_fine:
                raise ConfigError(f"{flag}: {value!r} must be {bound}")
        if (self.max_input_tokens is None) != (self.on_long is None):
            raise ConfigError(
                "--max-input-tokens and --on-long go together: a limit on the prompt length changes the"
                " workload, so say whether longer prompts are cut (truncate) or left out (drop)"
            )


@dataclass(frozen=True, slots=True)
class Selected:
    """The requests to replay, and how many the length limit touched."""

    requests: tuple[TraceRequest, ...]
    truncated: int
    dropped: int


def select(requests: Sequence[TraceRequest], chosen: Selection, *, seed: int = 0) -> Selected:
    """Return what ``chosen`` takes from ``requests``, in order, with arrivals counted from the window.

    Args:
        requests: Arrivals never decrease.
        chosen: See `Selection`.
        seed: Of the sample; taken modulo 2**64.

    Raises:
        ConfigError: nothing is left; the message says how far the trace reaches.
    """
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
    moved = tuple(replace(request, arrival_s=request.arrival_s - chosen.start_s) for request in kept)
    return Selected(moved, truncated, dropped)


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
