"""The number of replicas that would have been best to keep (the "floor"): simulated fleets of every size serve the same arrivals.

The floor is the minimum number of replicas that the planner keeps even while they are idle. For each floor n, three
simulated fleets ("shadow fleets") are followed alongside the real one. They differ in when they start replicas above
the floor. An immediate one (`Growth.IMMEDIATE`) starts a replica as soon as demand needs it. A delayed one
(`Growth.DELAYED`) starts it after demand has needed it for as long as a start-up takes, so a burst that ends before a
replica would be ready starts none. A scheduled one (`Growth.SCHEDULED`) never starts any; after it is known when demand
returns (`Recurrence`), it keeps its floor only while demand above the smallest floor is expected.

Each pull (one metrics scrape) adds to each fleet the replica-seconds that it would have held and the requests that it
would have served late, that is, over the TTFT target. `cost`
chooses which of these fleets the planner follows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from penstock_planner.decide.demand.load import MEMORY_S
from penstock_planner.decide.demand.recurrence import Recurrence

PARTS = 16
"""Resolution of seconds and requests: they are counted in sixteenths, whose sums are exact, so the ledger stores few
digits."""

WAIT_S = 1800.0
"""Chosen: half an hour, in seconds, for which a floor is kept after demand last needed it, however short the need was.

It depends only on the price of late requests."""

QUIET_S = WAIT_S / 2
"""Seconds without need (a quarter of an hour) after which a floor is dropped if fewer than 100 requests (`ENOUGH`) were counted.

With that few requests, costs cannot be compared. Most demand that returns does so within a quarter of an hour."""

ENOUGH = 100.0
"""Chosen: minimum number of requests for which a fraction of late ones is meaningful."""

HOLDS_S = 2 * WAIT_S
"""Seconds for which a finding remains valid: an hour, twice the time for which the planner waits for demand that occurred once.

A fleet that never grows can be chosen only after this long, because after a quiet start it would be the cheapest. The
result of a trial (see `trial`) is valid for as long."""

SIZES_MOST = 64
"""Largest floor (minimum number of replicas) that is simulated. Each floor costs a microsecond per metrics scrape."""


class Growth(StrEnum):
    """When a fleet of one role starts a replica above its floor, the minimum number of replicas that it keeps.

    The fleet is the real one, or one that the planner simulates.

    Attributes:
        IMMEDIATE: As soon as demand needs the replica.
        DELAYED: After demand has needed the replica for as long as a start-up takes.
        SCHEDULED: Never; even the floor is kept only while demand that recurs is expected (at times with a known
            period).
    """

    IMMEDIATE = "immediate"
    DELAYED = "delayed"
    SCHEDULED = "scheduled"


@dataclass(frozen=True, slots=True)
class ShadowFleets:
    """Fleets of one role that are simulated alongside the real one, all with the same `Growth`, one for each floor.

    A floor is the minimum number of replicas that a fleet keeps even while the replicas are idle. Each attribute is a
    tuple: in ``started_s``, element n - 1 belongs to the n-th replica, in the other ones to the fleet with floor n.
    Times are durations in simulated seconds.

    Attributes:
        started_s: Seconds since the start of the n-th replica in the fleets whose floor is below n, at most the
            start-up time; 0 if it does not exist.
        backlogs: Work that each fleet would have left to do now, in seconds of one worker.
        late: Number of requests that each fleet would have served over the TTFT target; halved, like all counts, each
            time 6 hours of demand have been counted.
        replica_s: Replica-seconds for which each fleet would have held GPUs; halved likewise.
    """

    started_s: tuple[float, ...] = ()
    backlogs: tuple[float, ...] = ()
    late: tuple[float, ...] = ()
    replica_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Hindsight:
    """Learned state from which one role's floor is chosen: the minimum number of replicas that the planner keeps even while idle.

    All times are durations in simulated seconds, so that the state does not depend on a clock. A replica is needed
    while the demand exceeds what the replicas before it can serve; "the n-th replica" is needed if demand needs at
    least n replicas.

    Attributes:
        floor: Chosen floor; 0 if none has been chosen yet.
        growth: Chosen way to start replicas above the floor: at once, after a delay, or never.
        seen_s: Seconds of demand that are counted. This and all other counts are halved each time it reaches 6 hours
            (`MEMORY_S`).
        arrivals: Number of requests that arrived.
        work_gpu_s: GPU-seconds of all roles in which workers were busy with requests.
        needed_s: For each n, seconds for which demand has needed the n-th replica, minus the seconds since then in
            which it did not; from 0 to the time for which an idle replica is kept.
        idle_s: For each n, seconds for which n - 1 replicas have been enough; 0 if n - 1 are not enough now.
        since_s: For each n, seconds since demand first needed the n-th replica; 0 if it never did.
        fleets: Simulated fleets by the way in which they start replicas; they show what every floor would have cost.
        recurrence: Record of the times at which demand needed more than the smallest floor.
        least: Smallest floor that can be chosen, >= 1.
    """

    floor: int = 0
    growth: Growth = Growth.IMMEDIATE
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
        """Return the largest floor (minimum number of replicas) for which a fleet is simulated; 0 before the first interval."""
        return len(self.needed_s)

    @property
    def usual_requests(self) -> float:
        """Return the number of requests that arrive in half an hour (`WAIT_S`) at the observed rate, but at least 100.

        100 (`ENOUGH`) is the number from which a fraction of late requests is reliable.
        """
        return max(ENOUGH, WAIT_S * self.arrivals / self.seen_s) if self.seen_s else ENOUGH

    @property
    def largest_useful_floor(self) -> int:
        """Return the largest floor (minimum number of replicas) worth keeping even while idle.

        Each replica above it has been idle for longer than the time from its first need to its last, and for at least
        half an hour.

        So a replica is kept longer for demand that returned than for demand that occurred once. The result is at least
        the smallest floor that can be chosen.
        """
        lasting = (
            floor
            for floor, (idle_s, since_s) in enumerate(zip(self.idle_s, self.since_s, strict=True), start=1)
            if since_s > 0 and _worth_holding_s(idle_s, since_s) >= 0
        )
        return max((self.least, *lasting))

    @property
    def given_up_in_s(self) -> float | None:
        """Return the simulated seconds after which the floor (minimum number of replicas) is lowered if demand does not need it.

        Negative or 0 if it is due to be lowered now. Returns None if the floor is the smallest one that can be chosen.
        """
        if self.floor <= self.least or self.floor > self.sizes:
            return None
        ages = zip(self.idle_s[self.floor - 1 :], self.since_s[self.floor - 1 :], strict=True)
        return max(
            (_worth_holding_s(idle_s, since_s) for idle_s, since_s in ages if since_s > 0), default=0.0
        )

    @property
    def floor_now(self) -> int:
        """Return the minimum number of replicas to keep now even while they are idle; 0 if no floor has been chosen yet.

        It is the floor that was chosen as the cheapest, or the smallest possible one if the floor is kept only for
        demand that recurs and no such demand is expected within a start-up time.
        """
        is_between = self.growth is Growth.SCHEDULED and self.recurrence.is_between
        return self.least if is_between else self.floor

    def lasting(self, startup_s: float) -> int:
        """Return the number of replicas that demand has needed for at least ``startup_s`` simulated seconds.

        The seconds in which demand did not need the replica are subtracted from those in which it did.
        """
        return sum(1 for needed_s in self.needed_s if needed_s >= startup_s)

    def is_idle(self, replica: int, hold_s: float) -> bool:
        """Return whether the n-th replica, which is above the floor (minimum number of replicas), is not needed any more.

        The result depends on the chosen way of starting replicas (`growth`). If replicas start as soon as they are
        needed (IMMEDIATE), the replica is kept until it has been idle for ``hold_s``; if replicas start after a delay
        (DELAYED), until it has been idle for as long as demand needed it; and if only the floor is kept (SCHEDULED), it
        is not kept at all. If ``replica`` is above the largest simulated floor, the result for that floor is returned.

        Args:
            replica: n, counted from 1.
            hold_s: Simulated seconds for which an idle replica is kept.
        """
        floor_index = min(replica, self.sizes) - 1
        if floor_index < 0 or self.growth is Growth.SCHEDULED:
            return True
        return (
            self.needed_s[floor_index] <= 0
            if self.growth is Growth.DELAYED
            else self.idle_s[floor_index] >= hold_s
        )

    def is_past(self, replica: int, hold_s: float) -> bool:
        """Return whether demand last needed the n-th replica longer ago than ``hold_s``.

        Always False if ``replica`` is above the largest simulated floor (minimum number of replicas). Also always False
        if replicas are kept only for demand that recurs, because that demand is expected to return.

        Args:
            replica: n, counted from 1.
            hold_s: Simulated seconds for which an idle replica is kept.
        """
        if self.growth is Growth.SCHEDULED or not 1 <= replica <= self.sizes:
            return False
        return self.idle_s[replica - 1] >= hold_s

    def fleet(self) -> tuple[ShadowFleets, int]:
        """Return the simulated fleets that start replicas in the chosen way, and the index of the fleet with the chosen floor.

        A floor is the minimum number of replicas that a fleet keeps. The index is the floor minus 1; it selects the
        fleet's values in the tuples ``late`` and ``replica_s``.
        """
        return self.fleets[self.growth], self.floor - 1

    def for_other_graph(self) -> Hindsight:
        """Return the state with which another graph of the same model starts.

        The costs that each minimum number of replicas would have had in a simulation are kept; the simulated replicas
        and their remaining work are dropped.
        """
        still = (0.0,) * self.sizes
        fleets = {
            growth: replace(each, started_s=still, backlogs=still) for growth, each in self.fleets.items()
        }
        return replace(self, needed_s=still, idle_s=still, fleets=fleets, recurrence=Recurrence())


@dataclass(frozen=True, slots=True)
class PulledLoad:
    """Load of one role in one decision interval, which simulated fleets serve.

    Times are durations in simulated seconds, rounded to sixteenths.

    Attributes:
        dt_s: Length of the interval, > 0.
        arrivals: Number of requests that arrived.
        work_gpu_s: GPU-seconds of all roles in which workers were busy with requests.
        work_s: Computing time of the arrivals' prompts on one worker. None for a role whose requests wait for room in
            the KV cache instead; then ``kv_busy_workers`` is used.
        may_wait_s: Longest wait with which a request still meets the TTFT target.
        kv_busy_workers: Number of workers, such as 2.4, whose KV caches the running answers would fill; ignored if
            ``work_s`` is set.
        workers_needed: Number of workers, such as 2.4, that demand needs; a pool (the workers of one role) with fewer
            grows.
        workers_to_keep: Number of workers, such as 2.4, down to which a pool can shrink without growing again soon, >=
            ``workers_needed``.
        startup_s: Time from requesting a replica until it is ready.
        hold_s: Time for which a fleet keeps an idle replica, >= ``startup_s``.
        sizes: Largest floor (minimum number of replicas, even while idle) that can be chosen, >= 1.
        least: Smallest floor that can be chosen, >= 1.
        existing: Number of existing replicas. At the first interval all existing replicas count as needed, because a
            person requested them. 0 if the number is not evidence of need.
        served_at_once_by: Number of replicas with which no request was observed to wait, so that with this number or
            more no request is counted as late (over the TTFT target); None if unknown.
        is_in_time_first: Whether requests that can still meet the TTFT target are served before requests that cannot,
            so that only the requests beyond what the workers can serve are late.
    """

    dt_s: float
    arrivals: float
    work_gpu_s: float
    work_s: float | None
    may_wait_s: float
    kv_busy_workers: float
    workers_needed: float
    workers_to_keep: float
    startup_s: float
    hold_s: float
    sizes: int
    least: int = 1
    existing: int = 0
    served_at_once_by: int | None = None
    is_in_time_first: bool = False


def counted(value: float) -> float:
    """Return a time or a number of requests rounded to sixteenths.

    Sums of such numbers are exact in floating point, and the ledger (the planner's decision log) stores few digits.
    """
    return round(PARTS * value) / PARTS


def followed(known: Hindsight, load: PulledLoad) -> Hindsight:
    """Return a role's learned state after one decision interval, in which every simulated fleet has served the interval's load.

    The floor (minimum number of replicas) does not change here, except that the first interval sets it to the number of
    existing replicas.

    Args:
        known: State before the interval.
        load: Load of the interval.
    """
    existing = 0 if known.seen_s else load.existing
    asked = max(known.sizes, math.ceil(load.workers_needed) + 1, known.floor, existing, 1)
    known = _faded(_grown(known, min(load.sizes, SIZES_MOST, asked)))
    dt_s, hold_s, startup_s = load.dt_s, load.hold_s, load.startup_s
    is_needed = [load.workers_needed > index for index in range(known.sizes)]
    needed = [
        min(each + dt_s, hold_s) if now else max(0.0, each - dt_s)
        for each, now in zip(known.needed_s, is_needed, strict=True)
    ]
    idle = [each + dt_s if load.workers_to_keep <= index else 0.0 for index, each in enumerate(known.idle_s)]
    since = [
        each + dt_s if each > 0 or now or index < existing else 0.0
        for index, (each, now) in enumerate(zip(known.since_s, is_needed, strict=True))
    ]
    kept = {
        Growth.IMMEDIATE: (is_needed, [each < hold_s for each in idle]),
        Growth.DELAYED: ([each >= startup_s for each in needed], [each > 0 for each in needed]),
    }
    recurrence = known.recurrence.followed(dt_s, startup_s, is_asked=load.workers_needed > load.least)
    fleets = {}
    for growth, each in known.fleets.items():
        started_s = _started(each.started_s, *kept[growth], load) if growth in kept else each.started_s
        ready, held = _supply(growth, started_s, recurrence, load)
        fleets[growth] = _worked(each, started_s, load, ready=ready, held=held)
    return replace(
        known,
        floor=known.floor or min(existing, known.sizes),
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
    """Return the state with all counts halved if 6 hours (`MEMORY_S`) of demand are counted."""
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
    """Return the state extended to ``sizes`` floors. A new floor starts with the counts of the largest one plus its own replicas."""
    more = sizes - known.sizes
    if more <= 0:
        return known

    def longer(values: tuple[float, ...], each_more: float = 0.0) -> tuple[float, ...]:
        last = values[-1] if values else 0.0
        return values + tuple(last + each_more * (index + 1) for index in range(more))

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
    """Return the age of each replica above a floor, after replicas have started and stopped in this pull."""
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
    if growth is Growth.SCHEDULED and not recurrence.is_known:
        return floors, floors
    if growth is Growth.SCHEDULED:
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
    """Return the fleets of one kind after they have served the pull's arrivals.

    Args:
        fleets: Fleets before the pull.
        started_s: Age of each replica above a floor.
        load: Load of the pull.
        ready: Number of ready replicas of each floor's fleet.
        held: Number of replicas of each floor's fleet that hold GPUs.
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
    """Return the outcome of one decision interval for a simulated fleet: the work left, and the number of requests served late.

    Args:
        workers: Number of workers of the fleet.
        backlog_s: Computing time of the prompts left from earlier intervals, in seconds of one worker.
        load: Load of the interval.

    Returns:
        (computing time of the prompts left after the interval in seconds of one worker, 0 for a role whose requests
        wait for room in the KV cache; number of the interval's requests served over the TTFT target).
    """
    count, work_s = load.arrivals, load.work_s
    if work_s is None:
        return 0.0, count if load.kv_busy_workers > workers else 0.0
    done_s, most_s = workers * load.dt_s, load.may_wait_s * workers
    left_s, missed = max(0.0, backlog_s + work_s - done_s), 0.0
    if not load.is_in_time_first:
        # The middle one of the pull's arrivals finds half of the pull's work queued, and half of the pull's time spent on work.
        missed = count if backlog_s + (work_s - done_s) / 2 > most_s else 0.0
    elif left_s > most_s:
        missed = counted(count * min(1.0, (left_s - most_s) / work_s)) if work_s else 0.0
        left_s = most_s
    if load.served_at_once_by is not None and workers >= load.served_at_once_by:
        missed = 0.0
    return left_s, missed


def _worth_holding_s(idle_s: float, since_s: float) -> float:
    """Return for how many more seconds a replica is worth keeping without need; negative if it is not worth keeping any longer.

    It is kept for as long as it was needed, but at least for half an hour (`WAIT_S`).
    """
    return max(WAIT_S, since_s - idle_s) - idle_s
