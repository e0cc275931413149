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
from penstock.core.flags import check_bounds, flag
from penstock.workload.traces import BLOCK_TOKENS, TraceRequest

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

    start_s: float = flag("Begin of the window, seconds into the trace.", default=0.0, ge=0)
    duration_s: float | None = flag("Length of the window, seconds of the trace.", gt=0, unset="to its end")
    sample: float = flag(
        "Share of the requests that is kept, above 0 and at most 1.",
        default=1.0,
        gt=0,
        le=1,
        metavar="FRACTION",
    )
    limit: int | None = flag("Most requests, after all other choices.", ge=1, unset="all")
    max_input_tokens: int | None = flag("Longest prompt, tokens; needs --on-long.", ge=1, unset="no limit")
    on_long: OnLong | None = flag("Cut longer prompts, or leave their requests out.", default=None)

    def __post_init__(self) -> None:
        """Check the bounds.

        Raises:
            ConfigError: a value is out of its range; the message names the flag.
        """
        check_bounds(self)
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
