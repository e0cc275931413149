"""One role of a fleet as a queue: requests in order of arrival, workers that come and go; a thousand times the world's pace.

What it leaves out (caches, hand-over, decode steps between prompts) is why a schedule made with it is simulated in full
before it counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from math import inf

from penstock.planner.decide.baselines.settings import Sizes


def worker_changes(sizes: Sizes, start: int, cold_start_s: float) -> list[tuple[float, int]]:
    """Return (second, +1 or -1) for every worker that begins or ends to serve, in order of time.

    Args:
        sizes: Replicas asked for over time.
        start: Ready at time 0.
        cold_start_s: From asking until serving. Who has not begun to serve leaves first, newest first.
    """
    changes: list[tuple[float, int]] = []
    starting: list[float] = []
    current = start
    for at_s, wanted in sizes:
        starting += [at_s + cold_start_s] * (wanted - current)
        for _ in range(current - wanted):
            if starting and starting[-1] > at_s:
                starting.pop()
            else:
                changes.append((at_s, -1))
        current = wanted
    return sorted([*changes, *((ready_s, 1) for ready_s in starting)])


def share_in_time(
    arrivals: Sequence[float],
    first_s: Sequence[float],
    busy_s: Sequence[float],
    changes: Sequence[tuple[float, int]],
    *,
    start: int,
    deadline_s: float,
) -> float:
    """Return the share of the requests whose first token comes within ``deadline_s`` of their arrival.

    Args:
        arrivals: Seconds, never decreasing, one at least.
        first_s: From the beginning of service to the first token, of the same requests.
        busy_s: How long a worker is busy with each.
        changes: See `worker_changes`.
        start: Workers at time 0.
        deadline_s: Seconds.
    """
    free = [0.0] * start
    heapify(free)
    upcoming = iter([*changes, (inf, 0)])
    change_s, change = next(upcoming)
    good = 0
    for arrival_s, until_first_s, work_s in zip(arrivals, first_s, busy_s, strict=True):
        while change_s <= (max(arrival_s, free[0]) if free else inf) and change:
            if change > 0:
                heappush(free, change_s)
            elif free:
                heappop(free)
            change_s, change = next(upcoming)
        if not free:
            break
        begin_s = max(arrival_s, heappop(free))
        heappush(free, begin_s + work_s)
        good += begin_s + until_first_s - arrival_s < deadline_s
    return good / len(arrivals)
