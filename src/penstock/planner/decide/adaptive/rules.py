"""The rules of one role: does it lack workers, and could it do with one fewer?

Each rule gives a finding with its numbers, whether it applies or not, so that `explain` shows all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.api import Role
from penstock.planner.decide.adaptive import gaps
from penstock.planner.decide.adaptive.findings import RoleFinding, finding, grows
from penstock.planner.decide.adaptive.gaps import GapsView
from penstock.planner.decide.adaptive.kv import FULL, KvView
from penstock.planner.decide.adaptive.work import WorkView
from penstock.planner.decide.adaptive.workers import Workers
from penstock.planner.decide.decision import Reason, Step
from penstock.planner.decide.observation import PoolCounts

LEVEL_SIGMAS = 2.0
"""Chosen: a jump within seconds counts once it is this many standard errors of Poisson arrivals above what the fleet
can do, so that chance starts nothing: step went from 86 to 98% in time, and poisson stayed."""

LATE_MOST = 0.01
"""Share of arrivals that may be late before the fleet grows: the goal is 99% in time."""

LATE_SAVED = 0.01
"""Chosen: share of arrivals that one more worker must keep from being late, or it is not worth its GPUs."""

LATE_LOST = 0.005
"""Chosen: half of it is the most that one worker fewer may cost, so that growing and shrinking do not meet."""

LATE_BUSY_LEAST = 0.5
"""Chosen: a fleet that what comes keeps less busy than this serves it in time, however late requests were before. At
0.75 the packaged Mooncake slice was 86.3 in place of 89.4% in time."""

CLEAR_SLOS = 2.0
"""Chosen: a backlog that is left when a new replica could be ready may take this many SLOs to clear; a replica for less
than one SLO of late arrivals costs more than it saves."""

KV_AHEAD_MOST = 0.85
"""Chosen: mean KV usage, at the horizon, above which a pool grows; what does not fit preempts streams. At 0.75 the tuned
cases were served no better, for 1% more GPU-hours."""

KV_TREND_MOST = 2.0
"""Chosen: a trend may predict at most twice the present KV load; a filling cache rises fast and then no more."""

FULL_TIME_MOST = 0.05
"""Chosen: share of recent time in which the workers' KV caches may be full."""


@dataclass(frozen=True, slots=True)
class Case:
    """What one role's rules look at.

    Attributes:
        role: prefill, decode or aggregated.
        pool: Counts at the newest pull.
        slo_s: TTFT that counts as in time.
        horizon_s: When a replica asked for now would be ready.
        arrivals_s: When each of those that start will be, in seconds from now.
        work: Prefill work; None for decode.
        kv: KV usage; None for prefill.
        gaps: Gaps between tokens; None for prefill, and where there is no target.
        oldest_wait_s: In the routers, while every role had a ready replica; None when nothing waits there.
        rejected: Requests refused or timed out in the interval for want of the role's workers.
        workers: What they are taken to be able to do.
    """

    role: Role
    pool: PoolCounts
    slo_s: float
    horizon_s: float
    arrivals_s: Sequence[float]
    work: WorkView | None
    kv: KvView | None
    gaps: GapsView | None
    oldest_wait_s: float | None
    rejected: float
    workers: Workers


def lacks(case: Case) -> list[RoleFinding]:
    """Return every rule for growing; one that applies is enough."""
    found = []
    if case.work is not None:
        found.append(_demand(case, case.work))
        if case.workers.has_shadows:
            found.append(_late(case, case.work))
        found.append(_backlog(case, case.work))
    if case.kv is not None:
        found.append(_kv(case, case.kv))
    if case.gaps is not None:
        found.append(gaps.lacking(case.gaps, case.pool.replicas))
    return [*found, _rejected(case)]


def missing(case: Case, most: int) -> int:
    """Return how many replicas to add, 1 to ``most``: until no rule asks for another, each counted as starting."""
    count = 1
    while count < most:
        pool = replace(case.pool, starting=case.pool.starting + 1)
        case = replace(case, pool=pool, arrivals_s=(*case.arrivals_s, case.horizon_s))
        if not any(found.applies for found in lacks(case)):
            break
        count += 1
    return count


def spares(case: Case) -> list[RoleFinding]:
    """Return every condition for shrinking by one; all must apply."""
    found = []
    if case.work is not None:
        found.append(_work_after(case, case.work))
    if case.kv is not None:
        found.append(_kv_after(case, case.kv))
    if case.gaps is not None:
        found.append(gaps.spare(case.gaps, case.pool.replicas - 1))
    return found


def _demand(case: Case, work: WorkView) -> RoleFinding:
    """Compare what may arrive per second with what the fleet, starting replicas included, can compute."""
    workers = case.pool.replicas
    expected = _expected(case, work)
    able = workers * (work.tokens_per_s or 0.0)
    inputs = {
        "tokens_per_s": work.rate.now,
        "tokens_per_s_ahead": work.rate.ahead,
        "tokens_per_s_error": work.rate.error,
        "tokens_per_s_lately": work.level.now,
        "tokens_per_s_lately_error": work.level.error,
        "worker_tokens_per_s": work.tokens_per_s,
        "workers": workers,
        "horizon_s": case.horizon_s,
    }
    most = case.workers.busy_most(case.role, workers)
    applies = work.tokens_per_s is not None and expected > most * able
    detail = (
        f"{expected:.0f} tokens/s in {case.horizon_s:.0f} s against {able:.0f} that {workers} can compute"
    )
    if not case.workers.has_shadows:
        detail += f", {most * able:.0f} of them with a wait within the SLO"
    return finding(Reason.DEMAND_ABOVE_CAPACITY, detail, Step("demand", inputs, most, grows(applies)))


def _expected(case: Case, work: WorkView) -> float:
    """Return the uncached tokens/s to be ready for: with a margin along the trend, or at once if they jumped."""
    return max(work.rate.ahead + case.workers.sigmas_ahead * work.rate.error, _jump(work))


def arriving_per_s(work: WorkView) -> float:
    """Return the uncached tokens/s expected to arrive: along the trend, or at once if they jumped."""
    return max(work.rate.ahead, _jump(work))


def left_tokens(work: WorkView, pool: PoolCounts, arrivals_s: Sequence[float], horizon_s: float) -> float:
    """Return the tokens that ready and starting workers will not have computed at the horizon."""
    worked_s = pool.ready * horizon_s + sum(max(0.0, horizon_s - at_s) for at_s in arrivals_s)
    arrived = work.backlog_tokens + work.level.now * horizon_s
    return max(0.0, arrived - worked_s * (work.tokens_per_s or 0.0))


def prefilled_per_s(
    work: WorkView, pool: PoolCounts, arrivals_s: Sequence[float], *, horizon_s: float, slo_s: float
) -> float:
    """Return the tokens/s whose prefill is expected to end at the horizon, which decode then has to hold.

    That is what arrives; while a backlog is cleared, as much more as its workers can do.
    """
    arriving = arriving_per_s(work)
    left = left_tokens(work, pool, arrivals_s, horizon_s)
    clearing = arriving + left / (CLEAR_SLOS * slo_s) if left else 0.0
    return max(arriving, min(clearing, pool.replicas * (work.tokens_per_s or 0.0)))


def _jump(work: WorkView) -> float:
    return work.level.now - LEVEL_SIGMAS * work.level.error


def _late(case: Case, work: WorkView) -> RoleFinding:
    """Grow for requests that come as those did which were late; what has been served late is past help."""
    workers = case.pool.replicas
    late, saved, lately = work.late_with(workers), work.saved(workers), work.saved_lately(workers)
    able = workers * (work.tokens_per_s or 0.0)
    busy = _expected(case, work) / able if able else 0.0
    is_coming = busy > LATE_BUSY_LEAST
    applies = is_coming and late > LATE_MOST and saved > LATE_SAVED and lately > LATE_LOST
    inputs = {
        "workers": workers,
        "late_share": late,
        "saved_by_one": saved,
        "saved_lately": lately,
        "busy_ahead": busy,
    }
    detail = f"{workers} workers serve {late:.1%} of the requests later than {case.slo_s:g} s, one more saves {saved:.1%}"
    return finding(Reason.DEMAND_ABOVE_CAPACITY, detail, Step("late", inputs, LATE_MOST, grows(applies)))


def _backlog(case: Case, work: WorkView) -> RoleFinding:
    """Compare the time to clear what will be left when a new replica could be ready with the SLO."""
    if work.tokens_per_s is None:
        return _first_wait(case)
    horizon_s, speed = case.horizon_s, work.tokens_per_s
    left = left_tokens(work, case.pool, case.arrivals_s, horizon_s)
    pace = case.pool.replicas * speed - work.level.now
    clears_s = left / pace if pace > 0 else (math.inf if left else 0.0)
    most_s = CLEAR_SLOS * case.slo_s
    applies = clears_s > most_s
    inputs = {
        "backlog_tokens": work.backlog_tokens,
        "oldest_wait_s": case.oldest_wait_s,
        "starting": len(case.arrivals_s),
        "left_tokens": left,
        "clears_in_s": clears_s if math.isfinite(clears_s) else None,
    }
    detail = f"{left:.0f} tokens will be left in {horizon_s:.0f} s, more than {case.pool.replicas} clear in {most_s:.0f} s"
    return finding(Reason.BACKLOG_ABOVE_SLO, detail, Step("backlog", inputs, most_s, grows(applies)))


def _first_wait(case: Case) -> RoleFinding:
    """Grow by the wait alone while no worker's throughput is known, one replica at a time."""
    waits_s = case.oldest_wait_s or 0.0
    applies = waits_s > case.slo_s / 2 and not case.pool.starting
    inputs = {"oldest_wait_s": case.oldest_wait_s, "starting": case.pool.starting}
    step = Step("backlog", inputs, case.slo_s / 2, grows(applies))
    return finding(Reason.BACKLOG_ABOVE_SLO, f"a request has waited {waits_s:.1f} s", step)


def _rejected(case: Case) -> RoleFinding:
    """Grow once for rejected requests; while a replica starts, demand and backlog say whether more is needed."""
    applies = case.rejected > 0 and not case.pool.starting
    step = Step("rejected", {"requests": case.rejected}, 0, grows(applies))
    return finding(Reason.REQUESTS_REJECTED, f"{case.rejected:.0f} requests refused or timed out", step)


def _kv(case: Case, kv: KvView) -> RoleFinding:
    workers = case.pool.replicas
    demanded = kv.demanded(workers)
    expected = max(min(kv.load.ahead, KV_TREND_MOST * kv.load.now), demanded)
    ahead = expected / workers if workers else math.inf
    share = kv.full_with(workers)
    is_full = share > FULL_TIME_MOST and kv.load.now > FULL * workers
    applies = ahead > KV_AHEAD_MOST or is_full
    inputs = {
        "kv_load": kv.load.now,
        "kv_load_ahead": kv.load.ahead,
        "kv_load_demanded": demanded,
        "workers": workers,
        "full_share": share,
    }
    detail = f"KV usage of {workers} workers will be {ahead:.2f} in {case.horizon_s:.0f} s"
    return finding(Reason.KV_ABOVE_CAPACITY, detail, Step("kv", inputs, KV_AHEAD_MOST, grows(applies)))


def _work_after(case: Case, work: WorkView) -> RoleFinding:
    workers, kept = case.pool.replicas - 1, case.workers.restraint
    rate = max(
        max(work.rate.now, work.rate.ahead) + kept.sigmas * work.rate.error,
        work.far_rate,
        work.level.now + work.level.error,
    )
    able = workers * (work.tokens_per_s or 0.0)
    busy = rate / able if able else (math.inf if rate > 0 or work.backlog_tokens > 0 else 0.0)
    lost = work.saved_lately(workers)
    peak = work.peak / able if able else math.inf
    most = case.workers.busy_after(case.role, workers)
    applies = busy <= most and lost <= kept.late and (peak <= kept.peak or work.peak == 0)
    inputs = {
        "workers_after": workers,
        "tokens_per_s": rate,
        "worker_tokens_per_s": work.tokens_per_s,
        "busy_after": busy if math.isfinite(busy) else None,
        "peak_after": peak if math.isfinite(peak) else None,
        "late_added": lost,
    }
    step = Step("projected_work", inputs, most, "shrink" if applies else "hold")
    detail = f"{workers} would be {busy:.0%} busy" if workers else "no demand is left"
    return finding(Reason.SPARE_CAPACITY, detail, step)


def _kv_after(case: Case, kv: KvView) -> RoleFinding:
    workers, kept = case.pool.replicas - 1, case.workers.restraint
    load = max(kv.load.now, kv.load.ahead)
    usage = max(load, kv.demanded(workers)) / workers if workers else math.inf
    peak = kv.peak / workers if workers else math.inf
    applies = usage <= kept.kv and peak <= kept.kv_peak
    inputs = {"workers_after": workers, "kv_load": load, "projected_kv": usage, "projected_kv_peak": peak}
    step = Step("projected_kv", inputs, kept.kv, "shrink" if applies else "hold")
    return finding(Reason.SPARE_CAPACITY, f"KV usage of {workers} would be {usage:.2f}", step)
