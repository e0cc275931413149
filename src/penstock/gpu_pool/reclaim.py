"""Time limit of drains when a pool reclaims GPUs, and the messages about drains that were cut short. Pure.

The operator, the local supervisor and the simulator use it; each ends the worker in its own way.
"""

from __future__ import annotations

from typing import Final

CUT_SHOWN_S: Final = 180.0
"""Seconds for which the planner's messages repeat that a drain was cut short. Chosen: the validity of a bid."""


def drain_grace_s(own_s: float, *, reclaim_s: float | None, is_above: bool) -> float:
    """Return the maximum duration of a worker's drain: ``own_s`` or, while its GPU pool reclaims GPUs, at most ``reclaim_s``, in seconds.

    Args:
        own_s: The worker's terminationGracePeriodSeconds; infinite if its drains are not limited.
        reclaim_s: The pool's reclaim.graceSeconds; None if the pool sets no limit.
        is_above: Whether the graph holds more GPUs than its grant; only then the pool's limit applies, else ``own_s`` alone.
    """
    return min(own_s, reclaim_s) if is_above and reclaim_s is not None else own_s


def cut_drain_message(worker: str, reclaim_s: float) -> str:
    """Return the message that the drain of ``worker`` was cut short after ``reclaim_s`` seconds, because its pool reclaims the GPUs."""
    return (
        f"{worker} has drained for {reclaim_s:g} s, the pool's reclaim.graceSeconds, and is terminated; its streams are resumed on "
        "another worker or lost"
    )


def with_cut_drain(note: str, sentence: str, ago_s: float) -> str:
    """Return a pool's message to a graph, extended by ``sentence`` if the drain was cut in the last 180 seconds (`CUT_SHOWN_S`).

    Args:
        note: Message to extend.
        sentence: Sentence about the graph's last drain that was cut short; empty if none was.
        ago_s: Seconds since that drain was cut short.
    """
    return f"{note}; {sentence}" if sentence and ago_s <= CUT_SHOWN_S else note
