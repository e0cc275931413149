"""The price of lateness, and the floor that it makes the cheapest: the minimum number of replicas to keep even while idle. Pure.

The simulated fleets of `shadow_fleets` show what each floor would have cost. The planner follows one of these fleets,
and changes to another one only if that would have cost less by more than the change costs:

    cost = GPU-seconds + price x late requests,
    cost of the followed fleets <= cost of the best fleet + (1 + changes) x (dearest change + dearest pull + price x
        allowed late requests),

for every fleet and all arrivals, until observations older than 6 hours (`MEMORY_S`) are weighted less. The property is
tested in tests/unit/planner/test_hindsight.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock_planner.decide.config import DecideConfig
from penstock_planner.decide.objective.shadow_fleets import (
    ENOUGH,
    HOLDS_S,
    QUIET_S,
    Growth,
    Hindsight,
    ShadowFleets,
)

HELD_TO_BUSY = 4.0
"""Chosen: GPU-seconds that a fleet is assumed to hold for each GPU-second in which requests keep its workers busy.

It was set with loads of hours, in which a fleet that serves 99% on time is busy for a quarter of the time. With 1 the
price of late requests was so low that three in four bursts were served late (TRIED.md)."""


@dataclass(frozen=True, slots=True)
class Objective:
    """Target and prices for choosing a floor, the minimum number of replicas that the planner keeps.

    Attributes:
        in_time: Fraction of requests to serve within the latency targets, in (0, 1). Exceeding it has no value.
        price_gpu_s: GPU-seconds that avoiding one late request is worth, > 0.
        gpus: GPUs of one replica.
        unused_s: Seconds for which a replica that turns out not to be needed holds its GPUs: the start-up time plus the
            time for which an idle replica is kept.
    """

    in_time: float
    price_gpu_s: float
    gpus: float
    unused_s: float


def chosen(known: Hindsight, objective: Objective) -> Hindsight:
    """Return a role's learned state with the floor (minimum number of replicas) to use from now on.

    The floor changes only if another floor would have saved more GPU-seconds (with late requests at their price) than
    the change can waste, or if the present floor is outside its bounds.

    Args:
        known: Learned state of the role, with what each floor would have cost in a simulation.
        objective: Fraction of requests to serve on time, and prices of late requests and unused replicas.
    """
    least, most = min(known.least, known.sizes), min(known.largest_useful_floor, known.sizes)
    if not known.floor:
        known = replace(known, floor=least)
    if known.floor > most:
        known = replace(known, floor=most, growth=Growth.IMMEDIATE)
    # Wait until a replica started at the first pull could have been useful.
    if known.seen_s < objective.unused_s:
        return known
    if known.arrivals < ENOUGH:
        is_idle = known.idle_s[known.floor - 1] >= max(QUIET_S, objective.unused_s)
        return replace(known, floor=least) if is_idle else known
    known = replace(known, floor=max(known.floor, least))
    fleets, floor_index = known.fleet()
    cost, held_s = cost_of(fleets, floor_index, objective), fleets.replica_s[floor_index]
    is_good = fleets.late[floor_index] <= (1.0 - objective.in_time) * known.arrivals
    best, largest = None, 0.0
    for growth, others in known.fleets.items():
        if growth is Growth.SCHEDULED and known.seen_s < HOLDS_S:
            continue
        for index in range(least - 1, most):
            if is_good and others.replica_s[index] >= held_s:
                continue
            gain = cost - cost_of(others, index, objective) - change_gpu_s(index - floor_index, objective)
            if gain > largest:
                best, largest = (index + 1, growth), gain
    return known if best is None else replace(known, floor=best[0], growth=best[1])


def cost_of(fleets: ShadowFleets, floor_index: int, objective: Objective) -> float:
    """Return the cost of a simulated fleet in GPU-seconds: what its replicas use, plus the price of the requests it served late.

    Args:
        fleets: Simulated fleets that start replicas in the same way.
        floor_index: Minimum number of replicas that the fleet keeps, minus 1.
        objective: Fraction of requests to serve on time, GPUs of a replica, and price of a late request.
    """
    return objective.gpus * fleets.replica_s[floor_index] + objective.price_gpu_s * fleets.late[floor_index]


def change_gpu_s(replicas: int, objective: Objective) -> float:
    """Return the GPU-seconds that a change of the floor (minimum number of replicas) can waste; at least the waste of one replica.

    The sign of ``replicas`` is ignored, and 0 counts as one replica.

    Args:
        replicas: Number of replicas by which the floor changes.
        objective: Price of a replica that turns out not to be needed: its GPUs, and the time for which it holds them.
    """
    return objective.gpus * objective.unused_s * max(1, abs(replicas))


_GROWTH_WORDS = {
    Growth.IMMEDIATE: "",
    Growth.DELAYED: ", started after demand has lasted for one start-up time",
    Growth.SCHEDULED: ", none above it, held while demand recurs as before",
}


def in_words(known: Hindsight, gpus: float) -> str:
    """Return in one line what the chosen floor (minimum of kept replicas) and a neighbouring one would have cost.

    Returns an empty text if no floor has been chosen or fewer than 100 requests (`ENOUGH`) were counted.

    Args:
        known: Learned state of the role.
        gpus: GPUs of one replica.
    """
    if not known.floor or known.arrivals < ENOUGH:
        return ""
    fleets, floor_index = known.fleet()
    other = floor_index - 1 if floor_index else floor_index + 1
    words = (
        f"floor {floor_index + 1} would have had {_share_and_cost(known, fleets, floor_index, gpus)} over the last "
        f"{known.seen_s / 3600:.1f} h"
    )
    if other < known.sizes:
        words += f", floor {other + 1} {_share_and_cost(known, fleets, other, gpus)}"
    left_s = known.given_up_in_s
    given_up = (
        "" if left_s is None else f"; released in {max(0.0, left_s) / 60:.0f} min unless demand returns"
    )
    return words + _GROWTH_WORDS[known.growth] + given_up


def _share_and_cost(known: Hindsight, fleets: ShadowFleets, floor_index: int, gpus: float) -> str:
    share = 1.0 - min(1.0, fleets.late[floor_index] / known.arrivals)
    return f"{share:.1%} on time for {gpus * fleets.replica_s[floor_index] / 3600:.2f} GPU-h"


def late_price_gpu_s(known: Hindsight, config: DecideConfig) -> float:
    """Return the GPU-seconds that are worth spending to avoid one late request.

    It is the configured percentage ``gpu_percent_per_point`` (20 by default) of four times (`HELD_TO_BUSY`) the
    GPU-seconds in which a hundred requests keep workers busy. It does not depend on the GPUs that are really held.

    Args:
        known: Learned state of one role with the number of requests and the busy GPU-seconds.
        config: Configuration with the accepted cost per percentage point.
    """
    usually_held_s = HELD_TO_BUSY * known.work_gpu_s
    return config.gpu_percent_per_point * usually_held_s / max(1.0, known.arrivals)
