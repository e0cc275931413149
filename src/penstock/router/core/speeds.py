"""Measures the recent prefill and decode speed of each worker from its responses, and names workers that are far slower. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

SLOW: Final = 3.0
"""Factor by which a worker must be slower than the median of its role to be reported. Chosen: batches of different sizes make ITL
differ by a factor of two."""
_WINDOW_S: Final = 60.0
_STEP_S: Final = 5.0
"""Chosen: the window is as long as the live page's minute, and snapshots are as frequent as the page's."""
_MIN_TOKENS: Final = 50
_MIN_PREFILLS: Final = 5
"""Chosen: fewer say little; a single long gap would name a worker."""


@dataclass(slots=True)
class SpeedCounts:
    """Cumulative counts of a worker's prefills and decodes since it joined or its process restarted.

    Attributes:
        output_tokens: Number of tokens of streams, without the first token of each stream.
        decode_s: Sum of the gaps before these tokens, in simulated seconds; `decode_s` / `output_tokens` is the mean
            inter-token latency.
        prompt_tokens: Number of prompt tokens of the prefills whose end was observed, without cached tokens if these are
            known.
        prefill_s: Sum of the times from dispatch to the end of these prefills, in simulated seconds; divided by `prefills`,
            the mean duration.
        prefills: Number of these prefills.
    """

    output_tokens: int = 0
    decode_s: float = 0.0
    prompt_tokens: int = 0
    prefill_s: float = 0.0
    prefills: int = 0

    def prefilled(self, tokens: int, took_s: float) -> None:
        """Count one prefill: its uncached tokens, and its duration ``took_s`` in simulated seconds (a negative one counts as 0)."""
        self.prompt_tokens += tokens
        self.prefill_s += max(0.0, took_s)
        self.prefills += 1

    def set_decode(self, output_tokens: int, decode_s: float) -> None:
        """Replace `output_tokens` and `decode_s` by cumulative counts that the worker itself has made (in the simulator).

        ``decode_s`` is the sum of the gaps before the tokens, in simulated seconds.
        """
        self.output_tokens, self.decode_s = output_tokens, decode_s


@dataclass(frozen=True, slots=True)
class WorkerSpeed:
    """Speed of one worker over the last minute; None if fewer than 50 tokens (decode) or 5 prefills (prefill) were observed.

    Attributes:
        role: Role of the worker; only workers of the same role are compared.
        prompt_tokens_per_s: Prefill throughput in tokens/s while the worker had prompts to compute.
        prefill_s: Mean duration of a prefill in simulated seconds, including the wait in the engine.
        output_tokens_per_s: Decode throughput in tokens/s over the entire minute, times without a request included.
        itl_s: Mean inter-token latency in simulated seconds.
    """

    role: str
    prompt_tokens_per_s: float | None = None
    prefill_s: float | None = None
    output_tokens_per_s: float | None = None
    itl_s: float | None = None


class SpeedMeter:
    """Stores snapshots of the workers' cumulative counts (`SpeedCounts`), and calculates speeds over the last minute from these snapshots.

    All times are in simulated seconds.
    """

    def __init__(self) -> None:
        self._marks: deque[tuple[float, dict[str, SpeedCounts]]] = deque(
            maxlen=round(_WINDOW_S / _STEP_S) + 1
        )

    def tick(self, counts: Mapping[str, SpeedCounts], now_s: float) -> None:
        """Store a snapshot of the workers' counts if the last one is at least 5 simulated seconds old, else do nothing.

        Args:
            counts: Present cumulative tokens and durations of each worker, by name.
            now_s: Current time in simulated seconds.
        """
        if not self._marks or now_s - self._marks[-1][0] >= _STEP_S:
            self._marks.append((now_s, {name: replace(each) for name, each in counts.items()}))

    def read(
        self, counts: Mapping[str, SpeedCounts], roles: Mapping[str, str], now_s: float
    ) -> dict[str, WorkerSpeed]:
        """Return each worker's speed over the last simulated minute, by worker name.

        For a worker that joined or restarted within that minute, it is the speed since then.

        Args:
            counts: Present cumulative tokens and durations of each worker, by name.
            roles: Role of each worker by name.
            now_s: Current time in simulated seconds.
        """
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
    streams, prompts = output >= _MIN_TOKENS and period_s > 0, prefills >= _MIN_PREFILLS and prefill_s > 0
    return WorkerSpeed(
        role,
        (now.prompt_tokens - then.prompt_tokens) / prefill_s if prompts else None,
        prefill_s / prefills if prompts else None,
        output / period_s if streams else None,
        (now.decode_s - then.decode_s) / output if streams else None,
    )


def slow_workers(speeds: Mapping[str, WorkerSpeed]) -> dict[str, str]:
    """Return a text for each slow worker, by the worker's name: one at least 3 times slower than the others of its role.

    ``speeds`` contains the speed of each worker, by name. A worker is compared with the median of the others.

    The text contains the worker's figures and the medians of the others. Workers whose speed is unknown, or that are alone in
    their role, are not included. A worker's prefill is only slow if it computes fewer tokens per second and its prefills do
    not take less time: ten uncached tokens after a cached prompt take the time of a kernel launch, which is a low throughput
    on any worker.
    """
    found = {}
    for name, own in speeds.items():
        others = [each for other, each in speeds.items() if other != name and each.role == own.role]
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
