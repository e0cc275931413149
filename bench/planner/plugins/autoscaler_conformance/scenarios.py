"""The situations, by name, with what is expected of any autoscaler in each.

One prefill worker computes 2 prompts/s; a decode worker holds 50 answers. What is asked for is safety first (do not
shrink on what you cannot see) and then usefulness (grow when requests wait, give back what nothing uses).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from autoscaler_conformance.plant import Edit, Situation, steady
from autoscaler_conformance.run import SituationHistory

from penstock.api import Role
from penstock.simulator.planning import SimulatedObservation
from penstock.simulator.scenario import BudgetChange, Fault, FaultPeriod, Faults

P, D, A = Role.PREFILL, Role.DECODE, Role.AGGREGATED


@dataclass(frozen=True, slots=True)
class ConformanceScenario:
    """One row of the table.

    Attributes:
        name: Unique.
        group: Heading.
        what: What happens.
        expected: In words.
        situation: The same for the plant.
        holds: Whether what happened is as expected.
    """

    name: str
    group: str
    what: str
    expected: str
    situation: Situation
    holds: Callable[[SituationHistory], bool]


def _split(prefill: int, decode: int, rps: float | Callable[[float], float], **options: object) -> Situation:
    rate = rps if callable(rps) else steady(rps)
    return Situation({P: prefill, D: decode}, rate, **options)  # type: ignore[arg-type]  # as the caller says


def _joint(workers: int, rps: float | Callable[[float], float], **options: object) -> Situation:
    rate = rps if callable(rps) else steady(rps)
    return Situation({A: workers}, rate, **options)  # type: ignore[arg-type]  # as the caller says


def _fault(kind: Fault, from_s: float, to_s: float) -> Faults:
    return Faults((FaultPeriod(kind, from_s, to_s),))


def _queue(values: Callable[[float], float]) -> Callable[[float, SimulatedObservation], SimulatedObservation]:
    """Return a script that shows a queue in place of the plant's, in every series that tells of it."""

    def script(now_s: float, seen: SimulatedObservation) -> SimulatedObservation:
        waiting = values(now_s)
        demand = seen.demand
        if demand is not None:
            wait_s = min(now_s, waiting / 2) if waiting else None
            demand = replace(demand, waiting=waiting, waiting_tokens=8000 * waiting, oldest_wait_s=wait_s)
        shown = seen.waiting if seen.waiting is None else waiting
        return replace(seen, waiting=shown, demand=demand)

    return script


def _one_silent(_: float, seen: SimulatedObservation) -> SimulatedObservation:
    first = next(iter(seen.kv), None)
    return replace(seen, kv={name: None if name == first else value for name, value in seen.kv.items()})


def _never(*roles: Role) -> Callable[[SituationHistory], bool]:
    return lambda history: not any(history.shrinks(role) for role in roles)


def _calm(most: int) -> Callable[[SituationHistory], bool]:
    return lambda history: history.reversals() <= most


_MISSING = (
    ("missing", Fault.METRICS_MISSING, "no source answers"),
    ("stale", Fault.METRICS_STALE, "every source repeats its last values"),
    ("nan", Fault.METRICS_NAN, "every gauge reads NaN"),
    ("zero", Fault.METRICS_ZERO, "every gauge reads 0, counters unknown"),
)


def _metrics() -> list[ConformanceScenario]:
    group = "Metrics"
    rows = [
        ConformanceScenario(
            f"metrics-{name}",
            group,
            f"{words} for 12 minutes at 3 of 4 workers' load",
            "nothing shrinks meanwhile",
            _split(4, 4, 6.0, hold_s=25.0, length_s=840, faults=_fault(kind, 60, 780)),
            lambda history: not history.shrinks(from_s=75, to_s=779),
        )
        for name, kind, words in _MISSING
    ]
    rows += [
        ConformanceScenario("missing-idle", group, "no source answers, nothing was running", "nothing shrinks meanwhile",
                 _split(3, 3, 0.0, length_s=600, faults=_fault(Fault.METRICS_MISSING, 1, 600)), _never(P, D)),
        ConformanceScenario("missing-from-the-start", group, "metrics begin only after 10 minutes", "nothing shrinks before",
                 _split(3, 3, 4.0, length_s=600, faults=_fault(Fault.METRICS_MISSING, 0, 600)), _never(P, D)),
        ConformanceScenario("one-silent", group, "one of four decode workers reports no KV, the others little",
                 "decode does not shrink", _split(2, 4, 3.0, length_s=600, metrics=_one_silent), _never(D)),
        ConformanceScenario("metrics-return", group, "two minutes without metrics, then overload is seen",
                 "prefill grows within two minutes of their return",
                 _split(1, 2, 4.0, length_s=360, faults=_fault(Fault.METRICS_MISSING, 0, 180)),
                 lambda history: history.grows(P, 180, 300) > 0),
        ConformanceScenario("router-outage-split", group, "router away for 10 minutes: decode runs empty", "nothing shrinks meanwhile",
                 _split(3, 3, 5.0, length_s=700, faults=_fault(Fault.ROUTER_DOWN, 60, 660)),
                 lambda history: not history.shrinks(from_s=75, to_s=659)),
        ConformanceScenario("router-outage-aggregated", group, "router away for 10 minutes: workers run empty",
                 "nothing shrinks meanwhile",
                 _joint(4, 5.0, length_s=700, faults=_fault(Fault.ROUTER_DOWN, 60, 660)),
                 lambda history: not history.shrinks(from_s=75, to_s=659)),
        ConformanceScenario("router-outage-over", group, "router back after two minutes, load above the fleet's",
                 "prefill grows within two minutes",
                 _split(1, 2, 4.0, length_s=400, faults=_fault(Fault.ROUTER_DOWN, 1, 180)),
                 lambda history: history.grows(P, 180, 300) > 0),
    ]  # fmt: skip
    return rows


def _growth() -> list[ConformanceScenario]:
    group = "Growth"

    def v_shape(now_s: float) -> float:
        return abs(now_s % 30 - 15)

    return [
        ConformanceScenario("prefill-overload", group, "4/s on one prefill worker", "prefill grows within a minute",
                 _split(1, 2, 4.0), lambda history: history.grows(P, 0, 60) > 0),
        ConformanceScenario("decode-overload", group, "answers fill decode", "decode grows within 90 s",
                 _split(2, 1, 3.0, hold_s=25), lambda history: history.grows(D, 0, 90) > 0),
        ConformanceScenario("aggregated-overload", group, "4/s on one aggregated worker, short answers",
                 "it grows within 90 s: KV alone shows nothing", _joint(1, 4.0, hold_s=2.0),
                 lambda history: history.grows(A, 0, 90) > 0),
        ConformanceScenario("aggregated-kv", group, "answers fill aggregated workers", "they grow within 90 s",
                 _joint(2, 3.0, hold_s=40), lambda history: history.grows(A, 0, 90) > 0),
        ConformanceScenario("aggregated-saturated", group, "overloaded, KV low", "never shrinks while requests wait",
                 _joint(3, 7.0, hold_s=2.0, budget=3), _never(A)),
        ConformanceScenario("v-shaped-queue", group, "the queue falls to 0 and comes back, over and over, 15 at its peak",
                 "prefill grows within two minutes", _split(1, 2, 1.5, metrics=_queue(v_shape), length_s=200),
                 lambda history: history.grows(P, 0, 120) > 0),
        ConformanceScenario("burst-over", group, "40 requests wait for 5 s, then none", "at most one more prefill worker",
                 _split(2, 2, 1.0, metrics=_queue(lambda t: 40.0 if 62 < t < 67 else 0.0), length_s=240),
                 lambda history: max(history.replicas[P]) <= 3),
        ConformanceScenario("refusals", group, "the queue is bounded at 6: the rest is refused", "prefill grows within a minute",
                 _split(1, 2, 6.0, max_queue=6), lambda history: history.grows(P, 0, 60) > 0),
        ConformanceScenario("falls-by-refusals", group, "the queue falls from 30 to 6 because its bound was lowered",
                 "prefill grows within 90 s", _split(1, 2, 6.0, max_queue=6,
                 metrics=_queue(lambda t: max(6.0, 30.0 - t / 3))), lambda history: history.grows(P, 0, 90) > 0),
        ConformanceScenario("old-wait", group, "one request after the other waits 20 s", "prefill grows within two minutes",
                 _split(1, 2, 1.9, metrics=_queue(lambda _: 38.0), length_s=200),
                 lambda history: history.grows(P, 0, 120) > 0),
        ConformanceScenario("waiting-vetoes", group, "requests wait; decode's KV is low", "prefill does not shrink meanwhile",
                 _split(2, 2, 4.2, budget=4, hold_s=2.0), _no_shrink_while_waiting),
        ConformanceScenario("flash-crowd", group, "x 10 at once", "two more prefill workers asked for within two minutes",
                 _split(1, 2, lambda t: 0.8 if t < 120 else 8.0, length_s=400, budget=16),
                 lambda history: max(history.replicas[P][:240]) >= 3),
        ConformanceScenario("flash-is-served", group, "x 6 for 5 minutes, 60 s to start", "the queue is empty 10 minutes later",
                 _split(1, 2, lambda t: 6.0 if 120 <= t < 420 else 1.0, length_s=1020, start_s=60, budget=16),
                 lambda history: history.queue[-1] < 1),
        ConformanceScenario("both-roles", group, "prefill and decode are both too small", "both grow within three minutes",
                 _split(1, 1, 4.0, hold_s=25, length_s=400),
                 lambda history: history.grows(P, 0, 180) > 0 and history.grows(D, 0, 180) > 0),
    ]  # fmt: skip


def _no_shrink_while_waiting(history: SituationHistory) -> bool:
    return not any(
        change.after < change.before and history.queue[int(change.at_s) - 1] >= 1
        for change in history.changes
        if change.role is P
    )


def _economy() -> list[ConformanceScenario]:
    group = "Economy and calm"

    def ends_at(role: Role, most: int) -> Callable[[SituationHistory], bool]:
        return lambda history: history.replicas[role][-1] <= most

    rows = [
        ConformanceScenario("idle", group, "nothing arrives for 30 minutes", "both roles end at two or fewer of four",
                 _split(4, 4, 0.0, length_s=1800), lambda h: ends_at(P, 2)(h) and ends_at(D, 2)(h)),
        ConformanceScenario("idle-aggregated", group, "nothing arrives for 30 minutes", "ends at two or fewer of four",
                 _joint(4, 0.0, length_s=1800), ends_at(A, 2)),
        ConformanceScenario("light", group, "0.5/s on four of each for 30 minutes", "both roles end at two or fewer",
                 _split(4, 4, 0.5, length_s=1800), lambda h: ends_at(P, 2)(h) and ends_at(D, 2)(h)),
        ConformanceScenario("after-a-flash", group, "a flash crowd is over", "nothing shrinks within a minute of its end",
                 _split(4, 4, lambda t: 6.0 if t < 300 else 2.0, hold_s=20, length_s=360),
                 lambda history: not history.shrinks(from_s=300, to_s=355)),
        ConformanceScenario("n-minus-one", group, "2 prefill workers at 0.75: one could not carry it", "prefill never shrinks",
                 _split(2, 2, 3.0, length_s=1800), _never(P)),
        ConformanceScenario("n-minus-one-decode", group, "2 decode workers at KV 0.48: one would be at 0.96",
                 "decode never shrinks", _split(2, 2, 2.4, hold_s=20, length_s=1800), _never(D)),
        ConformanceScenario("n-minus-one-aggregated", group, "2 aggregated workers at 0.75", "never shrinks",
                 _joint(2, 3.0, hold_s=5, length_s=1800), _never(A)),
        ConformanceScenario("sine", group, "2/s +- 80% in 10 minutes, three swings", "at most 12 reversals",
                 _split(2, 2, _sine, length_s=1800), _calm(12)),
        ConformanceScenario("noise", group, "1.5/s and 4.5/s, every 20 s the other", "at most 4 reversals in 30 minutes",
                 _split(2, 2, lambda t: 4.5 if t % 40 < 20 else 1.5, length_s=1800), _calm(4)),
    ]  # fmt: skip
    rows += [
        ConformanceScenario(f"decode-flap-{share:g}", group, f"decode at {share:g} of one worker's KV for an hour",
                 "at most 2 reversals", _split(1, 1, 2 * 0.5 * share, hold_s=50, length_s=3600), _calm(2))
        for share in (0.92, 0.97, 0.99)
    ]  # fmt: skip
    rows += [
        ConformanceScenario(f"prefill-flap-{share:g}", group, f"prefill at {share:g} of three workers for an hour",
                 "at most 2 reversals", _split(3, 3, 6 * share, hold_s=10, length_s=3600), _calm(2))
        for share in (0.5, 0.9, 0.99)
    ]  # fmt: skip
    return rows


def _sine(now_s: float) -> float:
    phase = (now_s % 600) / 600
    # A parabola through the sine's zeros and crests, exact in floats everywhere.
    return 2 + 1.6 * (16 * phase * (0.5 - phase) if phase < 0.5 else -16 * (phase - 0.5) * (1 - phase))


def _starting() -> list[ConformanceScenario]:
    group = "Start-up and supply"
    return [
        ConformanceScenario("slow-start-restraint", group, "a little too much load, 300 s to start", "at most 4 asked for meanwhile",
                 _split(1, 2, 2.4, start_s=300, length_s=320, budget=16),
                 lambda history: max(history.replicas[P]) <= 4),
        ConformanceScenario("other-role-starts", group, "prefill starts for 300 s, decode is full from 60 s on",
                 "decode grows within three minutes",
                 _split(1, 1, lambda t: 3.0 if t < 60 else 6.0, hold_s=25, start_s=300, length_s=300, budget=16),
                 lambda history: history.grows(D, 0, 240) > 0),
        ConformanceScenario("backlog-grows", group, "8/s on one worker, 120 s to start", "a second step before the first is ready",
                 _split(1, 3, 8.0, start_s=120, length_s=200, budget=16), lambda h: max(h.replicas[P][:150]) >= 3),
        ConformanceScenario("new-worker-empty", group, "a decode worker has just become ready", "decode does not shrink for 60 s",
                 _split(2, 1, 2.1, hold_s=25, length_s=400), _no_shrink_after_growth),
        ConformanceScenario("all-crash", group, "both decode workers restart", "decode does not shrink while none is ready",
                 _split(2, 2, 2.0, start_s=120, crashes=((60, D),), length_s=180),
                 lambda history: not history.shrinks(D, 60, 180)),
        ConformanceScenario("below-floor", group, "by hand to one prefill worker, floor two", "back at the floor within two minutes",
                 _split(2, 2, 0.1, edits=(Edit(100, P, 1),), config={"min_gpu_budget": 2}, length_s=300),
                 lambda history: history.replicas[P][220] >= 2),
        ConformanceScenario("unschedulable", group, "no node for a third worker; prefill overloaded",
                 "at the end no more than one replica pending",
                 _split(1, 1, 4.0, length_s=900, faults=Faults(node_gpus=2), hold_s=2),
                 lambda history: history.replicas[P][-1] - history.ready[P][-1] <= 1),
        ConformanceScenario("unschedulable-withdrawn", group, "no node, and load ends after 5 minutes",
                 "nothing is pending at the end",
                 _split(1, 1, lambda t: 4.0 if t < 300 else 0.2, length_s=1200, faults=Faults(node_gpus=2), hold_s=2),
                 lambda history: history.replicas[P][-1] == history.ready[P][-1]),
        ConformanceScenario("never-ready-other-role", group, "a prefill worker never becomes ready; decode fills after 5 minutes",
                 "decode grows within 15 minutes",
                 _split(1, 1, lambda t: 2.2 if t < 300 else 2.0, hold_s=30, length_s=1200,
                        faults=_fault(Fault.NEVER_READY, 0, 200), budget=8),
                 lambda history: history.grows(D, 0, 1200) > 0),
    ]  # fmt: skip


def _no_shrink_after_growth(history: SituationHistory) -> bool:
    ready = history.ready[D]
    rises = [second for second in range(1, len(ready)) if ready[second] > ready[second - 1]]
    return not any(history.shrinks(D, rise, rise + 60) for rise in rises)


def _hands() -> list[ConformanceScenario]:
    group = "Edits and budget"
    return [
        ConformanceScenario("edit-up", group, "by hand to 6 prefill workers, load for two", "given back within 20 minutes",
                 _split(2, 2, 2.0, edits=(Edit(100, P, 6),), length_s=1400, budget=12),
                 lambda history: history.replicas[P][-1] <= 4),
        ConformanceScenario("edit-down", group, "by hand to one of three busy prefill workers", "regrown within two minutes",
                 _split(3, 2, 5.0, edits=(Edit(100, P, 1),), length_s=400),
                 lambda history: history.grows(P, 100, 220) > 0),
        ConformanceScenario("budget-full", group, "overload with a full budget", "the budget is never exceeded",
                 _split(4, 4, 20.0, hold_s=30, length_s=600), SituationHistory.is_within_budget),
        ConformanceScenario("budget-two-gpus", group, "engines of two GPUs, 7 allowed", "the budget is never exceeded",
                 _split(1, 1, 8.0, hold_s=30, gpus=2, budget=7, length_s=600), SituationHistory.is_within_budget),
        ConformanceScenario("budget-cut-busy", group, "from 8 to 4 GPUs under full load", "nothing grows above it",
                 _split(4, 4, 7.0, hold_s=20, faults=Faults(budget=(BudgetChange(120, 4),)), length_s=600),
                 lambda history: history.is_within_budget() and not _grows_above(history)),
        ConformanceScenario("budget-cut-shrinks", group, "from 8 to 4 GPUs under half load", "at or below 4 within 20 minutes",
                 _split(4, 4, 3.5, hold_s=15, faults=Faults(budget=(BudgetChange(120, 4),)), length_s=1320),
                 lambda history: history.gpus[-1] <= 4),
        ConformanceScenario("rebalance-to-decode", group, "budget full, prefill idle, decode pressed", "decode gains one within 8 minutes",
                 _split(4, 2, 2.0, hold_s=60, budget=6, length_s=480),
                 lambda history: max(history.ready[D]) >= 3 and history.is_within_budget()),
        ConformanceScenario("rebalance-to-prefill", group, "budget full, decode idle, prefill pressed",
                 "prefill gains one within 8 minutes",
                 _split(2, 4, 6.0, hold_s=4, budget=6, length_s=480),
                 lambda history: max(history.ready[P]) >= 3 and history.is_within_budget()),
        ConformanceScenario("rebalance-impossible", group, "budget full, decode pressed at its maximum, prefill at 0.7",
                 "prefill gives nothing up", _split(4, 2, 5.6, hold_s=30, budget=6, length_s=600,
                 config={"max_replicas": {D: 2}}), _never(P)),
    ]  # fmt: skip


def _grows_above(history: SituationHistory) -> bool:
    return any(
        change.after > change.before
        and history.gpus[int(change.at_s) - 1] > history.budget[int(change.at_s) - 1]
        for change in history.changes
    )


def _restarts() -> list[ConformanceScenario]:
    group = "Restarts"
    often = Faults(restarts=tuple(float(at_s) for at_s in range(10, 900, 10)))
    return [
        ConformanceScenario("restart-busy", group, "restarted every 10 s at 3 of 4 workers' load", "nothing shrinks",
                 _split(4, 4, 6.0, hold_s=25, faults=often), _never(P, D)),
        ConformanceScenario("restart-overload", group, "restarted every 10 s, overloaded", "prefill grows within three minutes",
                 _split(1, 2, 4.0, faults=often), lambda history: history.grows(P, 0, 180) > 0),
        ConformanceScenario("restart-while-starting", group, "restarted while one starts for 120 s, a little too much load",
                 "at most two are starting at once",
                 _split(1, 2, 2.4, start_s=120, faults=Faults(restarts=(40.0, 60.0, 80.0, 100.0)), length_s=150),
                 lambda history: max(history.replicas[P]) <= 3),
        ConformanceScenario("planner-away", group, "the planner is away for 5 minutes, load meanwhile 6 times as high",
                 "prefill grows within two minutes of its return",
                 _split(1, 2, lambda t: 1.0 if t < 60 else 6.0, faults=_fault(Fault.PLANNER_DOWN, 60, 360), length_s=500),
                 lambda history: history.grows(P, 360, 480) > 0),
    ]  # fmt: skip


SCENARIOS = (*_metrics(), *_growth(), *_economy(), *_starting(), *_hands(), *_restarts())
