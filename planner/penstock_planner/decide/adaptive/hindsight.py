"""Which floor would have been best: fleets of every size, followed on the same arrivals, start-ups included.

Three fleets are followed for each floor n. Above it, a *prompt* one starts a replica as soon as demand asks
for it; a *patient* one once demand has asked for it as long as a start-up takes: what is over before a
replica is ready starts none; a *recurring* one never does, and once it is known when demand comes again
(`Recurrence`) it holds its floor only while more than the least is due. Each pull adds the replica-seconds
that a fleet would have held and the requests that it would have served late. The planner keeps to one of them
and changes only when another would have cost less by more than the change does:

    cost = GPU-seconds + price x late requests,
    what was kept to <= best + (1 + changes) x (dearest change + dearest pull + price x allowed late requests),

for every fleet, whatever arrives (until what is older than `MEMORY_S` weighs less; the property in
tests/unit/planner/test_hindsight.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from penstock_planner.decide.adaptive.recurrence import Recurrence
from penstock_planner.decide.adaptive.signals import MEMORY_S

PARTS = 16
"""Seconds and requests are counted in sixteenths, whose sums are exact, so that the ledger has few digits to hold."""

WAIT_S = 1800.0
"""Chosen: for half an hour the price of late requests alone says whether what came is waited for, however
short it was."""

QUIET_S = WAIT_S / 2
"""Time for which a floor is kept without enough requests to tell: most of what comes again does so within a quarter
of an hour."""

ENOUGH = 100.0
"""Chosen: of fewer requests a share of late ones means nothing."""

HOLDS_S = 2 * WAIT_S
"""What was found holds for twice as long as what came once is waited for: an hour. A fleet that never grows
is kept to once this much has been followed, as of a quiet start it would be the cheapest; what a trial found is
believed as long."""

SIZES_MOST = 64
"""Bound: floors above this are not followed; each size costs a microsecond a pull."""


class Growth(StrEnum):
    """When a fleet starts a replica above its floor."""

    PROMPT = "prompt"
    PATIENT = "patient"
    RECURRING = "recurring"


@dataclass(frozen=True, slots=True)
class ShadowFleets:
    """The fleets of one kind; element n - 1 of each is of floor n.

    Attributes:
        started_s: For how long the n-th replica has been there where the floor is below n; 0: it is not.
        backlogs: Work that the fleet would have left now, in seconds of one worker.
        late: Requests that it would have served late.
        replica_s: Replica-seconds that it would have held.
    """

    started_s: tuple[float, ...] = ()
    backlogs: tuple[float, ...] = ()
    late: tuple[float, ...] = ()
    replica_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Hindsight:
    """What is known of one role's floors; plain numbers, in ages.

    Attributes:
        floor: Kept to; 0: nothing chosen yet.
        growth: Of the fleet of that floor that is kept to.
        seen_s: Seconds followed; this and all that is counted is halved once it is `MEMORY_S`.
        arrivals: Requests.
        work_gpu_s: GPU-seconds that requests kept busy, of all roles.
        needed_s: For how long demand has asked for the n-th replica, less the time in which it did not.
        idle_s: For how long one fewer than n would have been enough.
        since_s: How long ago demand first asked for the n-th replica; 0: never.
        fleets: By when they grow.
        recurrence: When more than the least floor is asked for.
        least: Smallest floor, >= 1.
    """

    floor: int = 0
    growth: Growth = Growth.PROMPT
    seen_s: float = 0.0
    arrivals: float = 0.0
    work_gpu_s: float = 0.0
    needed_s: tuple[float, ...] = ()
    idle_s: tuple[float, ...] = ()
    since_s: tuple[float, ...] = ()
    fleets: Mapping[Growth, ShadowFleets] = field(
        default_factory=lambda: dict.fromkeys(Growth, ShadowFleets())
    )
    recurrence: Recurrence = field(default_factory=Recurrence)
    least: int = 1

    @property
    def sizes(self) -> int:
        """Return the largest floor that is followed."""
        return len(self.needed_s)

    @property
    def usual(self) -> float:
        """Return the requests of `WAIT_S`, at the rate that has been seen, `ENOUGH` at least."""
        return max(ENOUGH, WAIT_S * self.arrivals / self.seen_s) if self.seen_s else ENOUGH

    @property
    def most(self) -> int:
        """Return the largest floor that is worth holding: each replica above it has been idle for longer than it was needed.

        From its first need to its last, that is: what came again is waited for longer than what came once.
        """
        lasting = (
            place
            for place, (idle_s, since_s) in enumerate(zip(self.idle_s, self.since_s, strict=True), start=1)
            if since_s > 0 and _worth_holding_s(idle_s, since_s) >= 0
        )
        return max((self.least, *lasting))

    @property
    def given_up_in_s(self) -> float | None:
        """Return after how long without demand for it `most` goes below the floor; None: there is none above the least."""
        if self.floor <= self.least or self.floor > self.sizes:
            return None
        ages = zip(self.idle_s[self.floor - 1 :], self.since_s[self.floor - 1 :], strict=True)
        return max(
            (_worth_holding_s(idle_s, since_s) for idle_s, since_s in ages if since_s > 0), default=0.0
        )

    @property
    def floor_now(self) -> int:
        """Return the floor to hold now: the least one between two turns of what comes again."""
        is_between = self.growth is Growth.RECURRING and self.recurrence.is_between
        return self.least if is_between else self.floor

    def lasting(self, startup_s: float) -> int:
        """Return how many replicas demand has asked for as long as a start-up takes."""
        return sum(1 for needed_s in self.needed_s if needed_s >= startup_s)

    def is_idle(self, replica: int, hold_s: float) -> bool:
        """Return whether the n-th replica, above the floor, is not needed: patient fleets let its hold time expire.

        One above all sizes, which nothing has asked for, goes with the largest.
        """
        place = min(replica, self.sizes) - 1
        if place < 0 or self.growth is Growth.RECURRING:
            return True
        return self.needed_s[place] <= 0 if self.growth is Growth.PATIENT else self.idle_s[place] >= hold_s

    def is_past(self, replica: int, hold_s: float) -> bool:
        """Return whether the n-th replica was last needed longer ago than an idle one is kept; recurring need is to come."""
        if self.growth is Growth.RECURRING or not 1 <= replica <= self.sizes:
            return False
        return self.idle_s[replica - 1] >= hold_s

    def fleet(self) -> tuple[ShadowFleets, int]:
        """Return the fleets that grow as the chosen one, and the place of the chosen floor."""
        return self.fleets[self.growth], self.floor - 1

    def carried(self) -> Hindsight:
        """Return what another graph starts from: what the fleets cost, without what they are doing now."""
        still = (0.0,) * self.sizes
        fleets = {
            growth: replace(each, started_s=still, backlogs=still) for growth, each in self.fleets.items()
        }
        return replace(self, needed_s=still, idle_s=still, fleets=fleets, recurrence=Recurrence())


@dataclass(frozen=True, slots=True)
class PulledLoad:
    """One role's load of one pull; times as `counted` has them.

    Attributes:
        dt_s: Its length, > 0.
        arrivals: Requests.
        work_gpu_s: GPU-seconds of all roles that requests kept busy.
        work_s: Seconds of one worker that they take; None: they wait for room instead, of which ``held`` are in use.
        may_wait_s: Longest wait in time.
        is_in_time_first: What can still be in time is served before what cannot, so that only the excess is late.
        held: Workers' worth in use; of no meaning where ``work_s`` is given.
        grows_at: Workers' worth that demand asks for.
        shrinks_at: Workers' worth that demand asks to keep, >= ``grows_at``.
        startup_s: From asked for to ready.
        hold_s: How long a fleet keeps an idle replica, >= ``startup_s``.
        sizes: Largest floor that may be chosen, >= 1.
        least: Smallest one, >= 1.
        given: Replicas that there are; at the first pull those that a person asked for, which count as needed.
        served_at_once_by: No request was seen to wait in a fleet of this many or more; None: unknown.
    """

    dt_s: float
    arrivals: float
    work_gpu_s: float
    work_s: float | None
    may_wait_s: float
    held: float
    grows_at: float
    shrinks_at: float
    startup_s: float
    hold_s: float
    sizes: int
    least: int = 1
    given: int = 0
    served_at_once_by: int | None = None
    is_in_time_first: bool = False


def counted(value: float) -> float:
    """Return a time or a number of requests in sixteenths."""
    return round(PARTS * value) / PARTS


def followed(known: Hindsight, load: PulledLoad) -> Hindsight:
    """Return what is known after one pull; the floor stays, the first is that of the fleet that was given."""
    given = 0 if known.seen_s else load.given
    asked = max(known.sizes, math.ceil(load.grows_at) + 1, known.floor, given, 1)
    known = _faded(_grown(known, min(load.sizes, SIZES_MOST, asked)))
    dt_s, hold_s, startup_s = load.dt_s, load.hold_s, load.startup_s
    is_needed = [load.grows_at > index for index in range(known.sizes)]
    needed = [
        min(each + dt_s, hold_s) if now else max(0.0, each - dt_s)
        for each, now in zip(known.needed_s, is_needed, strict=True)
    ]
    idle = [each + dt_s if load.shrinks_at <= index else 0.0 for index, each in enumerate(known.idle_s)]
    since = [
        each + dt_s if each > 0 or now or index < given else 0.0
        for index, (each, now) in enumerate(zip(known.since_s, is_needed, strict=True))
    ]
    kept = {
        Growth.PROMPT: (is_needed, [each < hold_s for each in idle]),
        Growth.PATIENT: ([each >= startup_s for each in needed], [each > 0 for each in needed]),
    }
    recurrence = known.recurrence.followed(dt_s, startup_s, is_asked=load.grows_at > load.least)
    fleets = {}
    for growth, each in known.fleets.items():
        started_s = _started(each.started_s, *kept[growth], load) if growth in kept else each.started_s
        ready, held = _supply(growth, started_s, recurrence, load)
        fleets[growth] = _worked(each, started_s, load, ready=ready, held=held)
    return replace(
        known,
        floor=known.floor or min(given, known.sizes),
        fleets=fleets,
        recurrence=recurrence,
        least=load.least,
        seen_s=known.seen_s + dt_s,
        arrivals=known.arrivals + load.arrivals,
        work_gpu_s=known.work_gpu_s + load.work_gpu_s,
        needed_s=tuple(needed),
        idle_s=tuple(idle),
        since_s=tuple(since),
    )


def _faded(known: Hindsight) -> Hindsight:
    """Return it with all counts halved once `MEMORY_S` has been followed."""
    if known.seen_s < MEMORY_S:
        return known

    def halved(values: Sequence[float]) -> tuple[float, ...]:
        return tuple(counted(each / 2) for each in values)

    seen_s, arrivals, work_gpu_s = halved((known.seen_s, known.arrivals, known.work_gpu_s))
    fleets = {
        growth: replace(each, late=halved(each.late), replica_s=halved(each.replica_s))
        for growth, each in known.fleets.items()
    }
    return replace(known, seen_s=seen_s, arrivals=arrivals, work_gpu_s=work_gpu_s, fleets=fleets)


def _grown(known: Hindsight, sizes: int) -> Hindsight:
    """Return it with this many sizes; a new one starts as the largest, with more replicas."""
    more = sizes - known.sizes
    if more <= 0:
        return known

    def longer(values: tuple[float, ...], each_more: float = 0.0) -> tuple[float, ...]:
        last = values[-1] if values else 0.0
        return values + tuple(last + each_more * (place + 1) for place in range(more))

    still = (0.0,) * more
    fleets = {
        growth: ShadowFleets(
            each.started_s + still,
            longer(each.backlogs),
            longer(each.late),
            longer(each.replica_s, known.seen_s),
        )
        for growth, each in known.fleets.items()
    }
    return replace(
        known,
        needed_s=known.needed_s + still,
        idle_s=known.idle_s + still,
        since_s=known.since_s + still,
        fleets=fleets,
    )


def _started(
    started_s: Sequence[float], starts: Sequence[bool], stays: Sequence[bool], load: PulledLoad
) -> tuple[float, ...]:
    """Return for how long each replica above a floor has been there, after those that start and leave."""
    dt_s, startup_s = load.dt_s, load.startup_s
    return tuple(
        (age_s + dt_s if age_s < startup_s else startup_s) if (stay if age_s > 0 else start) else 0.0
        for age_s, start, stay in zip(started_s, starts, stays, strict=True)
    )


def _supply(
    growth: Growth, started_s: Sequence[float], recurrence: Recurrence, load: PulledLoad
) -> tuple[Sequence[int], Sequence[int]]:
    """Return how many replicas of each floor's fleet are ready, and how many hold GPUs."""
    floors = range(1, len(started_s) + 1)
    if growth is Growth.RECURRING and not recurrence.is_known:
        return floors, floors
    if growth is Growth.RECURRING:
        between = [min(load.least, floor) for floor in floors]
        is_ready = recurrence.due_s >= load.startup_s
        return (floors if is_ready else between), (between if recurrence.is_between else floors)
    ready, held = [0] * len(floors), [0] * len(floors)
    above = ready_above = 0
    for index in range(len(floors) - 1, -1, -1):
        ready[index], held[index] = index + 1 + ready_above, index + 1 + above
        if started_s[index] > 0:
            above += 1
            ready_above += started_s[index] >= load.startup_s
    return ready, held


def _worked(
    fleets: ShadowFleets,
    started_s: tuple[float, ...],
    load: PulledLoad,
    *,
    ready: Sequence[int],
    held: Sequence[int],
) -> ShadowFleets:
    """Let every fleet of a kind take the pull's arrivals and work for its length.

    Args:
        fleets: As they were.
        started_s: For how long each replica above a floor has been there now.
        load: Of the pull.
        ready: Replicas of each floor's fleet that work.
        held: Replicas of each floor's fleet that hold GPUs.
    """
    served = [
        served_by(workers, backlog_s, load) for workers, backlog_s in zip(ready, fleets.backlogs, strict=True)
    ]
    return ShadowFleets(
        started_s,
        tuple(left_s for left_s, _ in served),
        tuple(late + missed for late, (_, missed) in zip(fleets.late, served, strict=True)),
        tuple(each + load.dt_s * count for each, count in zip(fleets.replica_s, held, strict=True)),
    )


def served_by(workers: int, backlog_s: float, load: PulledLoad) -> tuple[float, float]:
    """Return the work that ``workers`` have left after one pull's load, and how many of its requests they serve late."""
    count, work_s = load.arrivals, load.work_s
    if work_s is None:
        return 0.0, count if load.held > workers else 0.0
    done_s, most_s = workers * load.dt_s, load.may_wait_s * workers
    left_s, missed = max(0.0, backlog_s + work_s - done_s), 0.0
    if not load.is_in_time_first:
        # The middle one of the pull's arrivals finds half of them, and half of the pull's work done.
        missed = count if backlog_s + (work_s - done_s) / 2 > most_s else 0.0
    elif left_s > most_s:
        missed = counted(count * min(1.0, (left_s - most_s) / work_s)) if work_s else 0.0
        left_s = most_s
    if load.served_at_once_by is not None and workers >= load.served_at_once_by:
        missed = 0.0
    return left_s, missed


@dataclass(frozen=True, slots=True)
class Objective:
    """What is wanted, and what it may cost.

    Attributes:
        in_time: Share of requests, in (0, 1); more earns nothing.
        price_gpu_s: GPU-seconds that one late request may cost, > 0.
        gpus: Of one replica.
        unused_s: How long a replica that was not needed holds its GPUs: start-up plus drain.
    """

    in_time: float
    price_gpu_s: float
    gpus: float
    unused_s: float


def chosen(known: Hindsight, objective: Objective) -> Hindsight:
    """Return it with the floor to keep to: another one only where it would have saved more than the change costs."""
    least, most = min(known.least, known.sizes), min(known.most, known.sizes)
    if not known.floor:
        known = replace(known, floor=least)
    if known.floor > most:
        known = replace(known, floor=most, growth=Growth.PROMPT)
    # A replica started at the first pull must have had the time to be of use.
    if known.seen_s < objective.unused_s:
        return known
    if known.arrivals < ENOUGH:
        is_idle = known.idle_s[known.floor - 1] >= max(QUIET_S, objective.unused_s)
        return replace(known, floor=least) if is_idle else known
    known = replace(known, floor=max(known.floor, least))
    fleets, place = known.fleet()
    cost, held_s = cost_of(fleets, place, objective), fleets.replica_s[place]
    is_good = fleets.late[place] <= (1.0 - objective.in_time) * known.arrivals
    best, largest = None, 0.0
    for growth, others in known.fleets.items():
        if growth is Growth.RECURRING and known.seen_s < HOLDS_S:
            continue
        for index in range(least - 1, most):
            if is_good and others.replica_s[index] >= held_s:
                continue
            gain = cost - cost_of(others, index, objective) - change_gpu_s(index - place, objective)
            if gain > largest:
                best, largest = (index + 1, growth), gain
    return known if best is None else replace(known, floor=best[0], growth=best[1])


def cost_of(fleets: ShadowFleets, place: int, objective: Objective) -> float:
    """Return what the fleet of floor ``place`` + 1 would have cost, in GPU-seconds."""
    return objective.gpus * fleets.replica_s[place] + objective.price_gpu_s * fleets.late[place]


def change_gpu_s(replicas: int, objective: Objective) -> float:
    """Return the GPU-seconds that changing by this many replicas may waste; at least one."""
    return objective.gpus * objective.unused_s * max(1, abs(replicas))


_GROWTH_WORDS = {
    Growth.PROMPT: "",
    Growth.PATIENT: ", started after demand has lasted for one start-up time",
    Growth.RECURRING: ", none above it, held while demand recurs as before",
}


def _worth_holding_s(idle_s: float, since_s: float) -> float:
    """Return for how long more a replica is worth holding without demand: as long as it was needed, half an hour at least."""
    return max(WAIT_S, since_s - idle_s) - idle_s


def in_words(known: Hindsight, gpus: float) -> str:
    """Return why the floor is what it is, in one line; empty before one was chosen."""
    if not known.floor or known.arrivals < ENOUGH:
        return ""
    fleets, place = known.fleet()
    other = place - 1 if place else place + 1
    words = (
        f"floor {place + 1} would have had {_share_and_cost(known, fleets, place, gpus)} over the last "
        f"{known.seen_s / 3600:.1f} h"
    )
    if other < known.sizes:
        words += f", floor {other + 1} {_share_and_cost(known, fleets, other, gpus)}"
    left_s = known.given_up_in_s
    given_up = (
        "" if left_s is None else f"; released in {max(0.0, left_s) / 60:.0f} min unless demand returns"
    )
    return words + _GROWTH_WORDS[known.growth] + given_up


def _share_and_cost(known: Hindsight, fleets: ShadowFleets, place: int, gpus: float) -> str:
    share = 1.0 - min(1.0, fleets.late[place] / known.arrivals)
    return f"{share:.1%} on time for {gpus * fleets.replica_s[place] / 3600:.2f} GPU-h"
