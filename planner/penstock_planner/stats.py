"""Current statistics of one graph's planner, from which `series` makes metrics and dashboard curves."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from penstock.core.histogram import quantile, share_within
from penstock_planner.decide.bounds.pool import bid_sizes
from penstock_planner.decide.config import DecideConfig, Mode
from penstock_planner.decide.decision import Decision
from penstock_planner.decide.demand.observation import Demand, Pull
from penstock_planner.decision_steps import DemandForecast, ProfileReading, forecast_of, profile_reading
from penstock_planner.observers import PlannerView
from penstock_planner.served_shares import ServedShares, shares_of
from penstock_planner.sources.base import Buckets, gained

FORECAST_MOST_S = 60.0
"""Simulated seconds (60) after its forecast time for which a forecast counts as current. Chosen: decisions come every
few seconds."""


@dataclass(slots=True)
class PlannerStats:
    """Observer that keeps the newest values and counts of one graph's planner. Times are simulated seconds.

    Attributes:
        config: Configuration of the current planner loop; None before the first loop.
        is_held: Whether the values of the newest metrics scrape are kept until the next one, as a metrics page needs
            them. Otherwise a tick without a scrape has no values, and demands are collected until `drop_demands`, as
            dashboard curves need them.
        view: State at the newest tick; None before the first.
        pull: Newest metrics scrape; None before the first and, unless ``is_held``, at ticks without one.
        demands: Demand of the newest scrape or, unless ``is_held``, of all scrapes since `drop_demands`.
        desired: Number of replicas desired by the last decision, by role.
        decisions: Number of decisions by (role, action, rule, reason).
        ticks: Number of ticks.
        ledger_errors: Number of records that could not be written to the ledger (the decision log), over all loops.
        dropped_updates: Number of ticks and decisions that are missing in state.json and the dashboard because the disk
            was slow.
        gpu_seconds: GPU-seconds of existing workers since the process started.
        forecast: Demand forecast of the newest decision; None in a planner mode without forecasts.
        demand_needs: Number of replicas that demand alone needed at the newest decision, by role; configured and
            learned minimums are left out.
        shares: Observed and predicted fraction of requests on time (within the TTFT target) at the newest decision;
            None if unknown or in a mode without predictions.
        wanted_gpus: Number of GPUs that the newest decision requests (bids for) from a GPU pool; None if it requests
            none.
        readings: Values about the performance profile in the newest decision, by role; empty in a mode without a
            profile.
        quantiles_s: Latencies between the last two decisions, seconds, by name and percentile (such as ``ttft``,
            ``p99``).
        attained: Fraction of requests within each latency target in the last complete adjustment interval, by name
            (``ttft``, ``itl``); only in mode sla.
        newly_attained: The value of ``attained`` if the newest decision ended an adjustment interval; else empty.
    """

    config: DecideConfig | None = None
    is_held: bool = True
    view: PlannerView | None = None
    pull: Pull | None = None
    demands: list[Demand] = field(default_factory=list)
    desired: dict[str, int] = field(default_factory=dict)
    decisions: Counter[tuple[str, str, str, str]] = field(default_factory=Counter)
    ticks: int = 0
    ledger_errors: int = 0
    dropped_updates: int = 0
    gpu_seconds: float = 0.0
    forecast: DemandForecast | None = None
    demand_needs: Mapping[str, int] = field(default_factory=dict)
    shares: ServedShares | None = None
    wanted_gpus: int | None = None
    readings: Mapping[str, ProfileReading] = field(default_factory=dict)
    quantiles_s: Mapping[tuple[str, str], float] = field(default_factory=dict)
    attained: Mapping[str, float] = field(default_factory=dict)
    newly_attained: Mapping[str, float] = field(default_factory=dict)
    _errors_seen: int = 0
    _expected: list[tuple[float, float]] = field(default_factory=list)
    _due: tuple[float, float] | None = None
    _latency: dict[str, Buckets] = field(default_factory=dict)
    _decided: dict[str, Buckets] = field(default_factory=dict)
    _interval: dict[str, Buckets] = field(default_factory=dict)
    _interval_s: float | None = None
    _rejected: float = 0.0

    def begin(self, config: DecideConfig) -> None:
        """Prepare for a planner loop that starts with this configuration.

        Counters continue; forecasts and fractions of requests within the latency targets start again.
        """
        self.config = config
        self.forecast, self.readings, self.attained, self.newly_attained = None, {}, {}, {}
        self.shares = self.wanted_gpus = None
        self._expected, self._due = [], None
        self._latency, self._decided, self._interval = {}, {}, {}
        self._interval_s, self._rejected = None, 0.0

    def restarted(self) -> None:
        """Prepare for the next planner loop, after one has ended.

        Errors in writing the decision log then add up over the loops, although each loop counts them from 0.
        """
        self._errors_seen = 0

    def tick(self, view: PlannerView) -> None:
        """Store the values of a tick (metrics scrape) in these statistics: replicas, GPUs, metrics and errors of the decision log.

        Args:
            view: State of the planner at the tick.
        """
        if self.view is not None:
            self.gpu_seconds += view.gpus * max(0.0, view.at_s - self.view.at_s)
        self.ticks += 1
        self.view = view
        self.ledger_errors += view.ledger_errors - self._errors_seen
        self._errors_seen = view.ledger_errors
        self.desired.update({role.value: count for role, count in view.desired.items()})
        self._latency.update({key: buckets for key, buckets in view.latency.items() if buckets})
        if self.is_held:
            for _ in self.due(view.at_s):
                pass
        if view.pull is not None or not self.is_held:
            self.pull = view.pull
        if view.pull is None:
            return
        if self.is_held:
            self.demands = []
        if view.pull.demand is not None:
            self.demands.append(view.pull.demand)
            self._rejected += view.pull.demand.refused + view.pull.demand.timed_out

    def decided(self, decision: Decision, view: PlannerView) -> None:
        """Store the values of a decision in these statistics: counts, forecast, use of the profile, latencies since the last one.

        Args:
            decision: The decision, which is recorded and not carried out yet.
            view: State of the planner at the newest tick (metrics scrape).
        """
        for role in decision.roles:
            self.decisions[role.role.value, role.action.value, role.rule, role.reason.value] += 1
        steps = {
            role.role.value: [(step.name, step.inputs) for step in role.steps] for role in decision.roles
        }
        self.forecast = next(filter(None, map(forecast_of, steps.values())), None)
        if self.forecast is not None:
            heapq.heappush(self._expected, (view.at_s + self.forecast.horizon_s, self.forecast.tokens_per_s))
        self.demand_needs = {
            role.role.value: role.desired if role.retained_because is None else role.retained_because.needs
            for role in decision.roles
        }
        self.shares = shares_of(decision)
        bid = bid_sizes(decision)
        self.wanted_gpus = None if bid is None else sum(bid)
        found = {role: profile_reading(of_role) for role, of_role in steps.items()}
        self.readings = {role: reading for role, reading in found.items() if reading is not None}
        gains = {key: gained(self._decided.get(key, ()), now) for key, now in self._latency.items()}
        quantiles = {(key, f"p{q * 100:.0f}"): quantile(gains[key], q) for key in gains for q in (0.5, 0.99)}
        self.quantiles_s = {key: value for key, value in quantiles.items() if value is not None}
        self._decided = dict(self._latency)
        self.newly_attained = self._attained(view.at_s)
        self.attained = self.newly_attained or self.attained

    def drop_demands(self) -> None:
        """Discard the demands at the routers that were collected in ``demands`` since the last call, after they were drawn."""
        self.demands = []

    def due(self, now_s: float) -> Iterator[tuple[float, float]]:
        """Yield each demand forecast for a time up to ``now_s`` that was not yielded before.

        Each is a pair (time in simulated seconds, uncached prompt tokens/s forecast for that time).
        """
        while self._expected and self._expected[0][0] <= now_s:
            self._due = heapq.heappop(self._expected)
            yield self._due

    def expected_now(self) -> float | None:
        """Return the uncached prompt tokens/s that an earlier decision forecast for about now; None if there is none."""
        if self.view is None or self._due is None or self.view.at_s - self._due[0] > FORECAST_MOST_S:
            return None
        return self._due[1]

    def _attained(self, at_s: float) -> dict[str, float]:
        """Return the fractions within mode sla's targets in the last adjustment interval; empty if no interval has ended."""
        config = self.config
        if config is None:
            return {}
        if self._interval_s is not None and at_s - self._interval_s < config.adjustment_interval_s:
            return {}
        gains = {key: gained(self._interval.get(key, ()), now) for key, now in self._latency.items()}
        is_first, rejected = self._interval_s is None, self._rejected
        self._interval, self._interval_s, self._rejected = dict(self._latency), at_s, 0.0
        if is_first or config.mode != Mode.SLA:
            return {}
        # Each request that was refused or timed out counts as late.
        shares = {"ttft": share_within(gains.get("ttft", ()), config.ttft_slo_s, missed=rejected)}
        if config.itl_slo_s is not None:
            shares["itl"] = share_within(gains.get("itl", ()), config.itl_slo_s)
        return {name: share for name, share in shares.items() if share is not None}
