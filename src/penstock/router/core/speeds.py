"""How fast each worker was lately, by what this router saw of its answers, and which are far slower than their equals. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

SLOW: Final = 3.0
"""Times as long as its equals from which a worker is named. Chosen: batches of different sizes make ITL differ by two."""
_WINDOW_S: Final = 60.0
_STEP_S: Final = 5.0
"""Chosen: as long as the live page's minute, marked as often."""
_LEAST_TOKENS: Final = 50
_LEAST_PREFILLS: Final = 5
"""Chosen: fewer say little; a single long gap would name a worker."""


@dataclass(slots=True)
class SpeedCounts:
    """What a worker has done since it joined; simulated seconds.

    Attributes:
        output_tokens: Tokens of streams behind the first of each.
        decode_s: The gaps before them.
        prompt_tokens: Of the prompts whose prefill was seen to end, without those found in a cache where that is known.
        prefill_s: From their dispatch to their end.
        prefills: Those prompts.
    """

    output_tokens: int = 0
    decode_s: float = 0.0
    prompt_tokens: int = 0
    prefill_s: float = 0.0
    prefills: int = 0

    def prefilled(self, tokens: int, took_s: float) -> None:
        """Count a prompt."""
        self.prompt_tokens += tokens
        self.prefill_s += max(0.0, took_s)
        self.prefills += 1


@dataclass(frozen=True, slots=True)
class WorkerSpeed:
    """One worker's last minute; None: too little was seen.

    Attributes:
        equals: Its role: only workers of one role are compared.
        prompt_tokens_per_s: While it had a prompt to compute.
        prefill_s: Mean of a prompt, waiting in the engine included.
        output_tokens_per_s: Over the whole time.
        itl_s: Mean.
    """

    equals: str
    prompt_tokens_per_s: float | None = None
    prefill_s: float | None = None
    output_tokens_per_s: float | None = None
    itl_s: float | None = None


class SpeedMeter:
    """Marks the workers' counts."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, dict[str, SpeedCounts]]] = deque(
            maxlen=round(_WINDOW_S / _STEP_S) + 1
        )

    def tick(self, counts: Mapping[str, SpeedCounts], now_s: float) -> None:
        """Mark once in a step; called repeatedly."""
        if not self._marks or now_s - self._marks[-1][0] >= _STEP_S:
            self._marks.append((now_s, {name: replace(each) for name, each in counts.items()}))

    def read(
        self, counts: Mapping[str, SpeedCounts], roles: Mapping[str, str], now_s: float
    ) -> dict[str, WorkerSpeed]:
        """Return each worker's speed of the last minute; one that has joined or restarted since counts from then."""
        then_s, before = next(
            (mark for mark in self._marks if mark[0] >= now_s - _WINDOW_S - _STEP_S), (now_s, {})
        )
        nothing = SpeedCounts()
        return {
            name: _speed(roles[name], before.get(name, nothing), now, now_s - then_s)
            for name, now in counts.items()
        }


def _speed(role: str, then: SpeedCounts, now: SpeedCounts, period_s: float) -> WorkerSpeed:
    if now.output_tokens < then.output_tokens or now.prefills < then.prefills:
        then = SpeedCounts()
    output, prefills = now.output_tokens - then.output_tokens, now.prefills - then.prefills
    prefill_s = now.prefill_s - then.prefill_s
    streams, prompts = output >= _LEAST_TOKENS and period_s > 0, prefills >= _LEAST_PREFILLS and prefill_s > 0
    return WorkerSpeed(
        role,
        (now.prompt_tokens - then.prompt_tokens) / prefill_s if prompts else None,
        prefill_s / prefills if prompts else None,
        output / period_s if streams else None,
        (now.decode_s - then.decode_s) / output if streams else None,
    )


def slow_workers(speeds: Mapping[str, WorkerSpeed]) -> dict[str, str]:
    """Return, by name, how far workers are slower than their equals, whose medians are alongside their figures.

    A prefill is slow if it makes fewer tokens a second and is not shorter: ten new tokens behind a cached prompt take the
    time of a launch, and are few a second on any worker.
    """
    found = {}
    for name, own in speeds.items():
        others = [each for other, each in speeds.items() if other != name and each.equals == own.equals]
        words = [*_slow_decode(own, others), *_slow_prefill(own, others)]
        if words:
            found[name] = "; ".join(words)
    return found


def _slow_decode(own: WorkerSpeed, others: Sequence[WorkerSpeed]) -> Iterable[str]:
    theirs = _median(each.itl_s for each in others)
    if own.itl_s is None or not theirs:
        return
    if own.itl_s >= SLOW * theirs:
        yield (
            f"{own.itl_s / theirs:.1f} times as slow as its equals: ITL {own.itl_s * 1000:,.1f} ms instead of "
            f"{theirs * 1000:,.1f} ms"
        )


def _slow_prefill(own: WorkerSpeed, others: Sequence[WorkerSpeed]) -> Iterable[str]:
    rate = _median(each.prompt_tokens_per_s for each in others)
    theirs_s = _median(each.prefill_s for each in others)
    if own.prompt_tokens_per_s is None or own.prefill_s is None or rate is None or theirs_s is None:
        return
    if own.prompt_tokens_per_s * SLOW <= rate and own.prefill_s >= theirs_s:
        yield (
            f"{rate / max(own.prompt_tokens_per_s, 1e-9):.1f} times as slow as its equals: "
            f"{own.prompt_tokens_per_s:,.0f} prompt tokens/s against {rate:,.0f}, a prefill takes "
            f"{own.prefill_s:,.2f} s against {theirs_s:,.2f} s"
        )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
