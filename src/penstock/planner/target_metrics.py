"""What mode sla plans by, for /metrics: forecast and demand, the corrected profile, targets and their attainment.

Mode adaptive has the forecast alone, other modes nothing: what is unknown is absent, never zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily

from penstock.core import metric_names as names
from penstock.planner.dashboard_points import target_points
from penstock.planner.decide.config import DecideConfig
from penstock.planner.decide.decision import Decision
from penstock.planner.followed import Attainment, ExpectedDemand
from penstock.planner.observers import View
from penstock.planner.profiled import ProfileReading, profile_reading

_TEXTS = {
    names.PLANNER_UNCACHED_TOKENS: "Uncached prompt tokens/s that arrive, newest pull.",
    names.PLANNER_FORECAST_TOKENS: "Uncached prompt tokens/s that an earlier decision expected for now.",
    names.PLANNER_WORKER_TOKENS: "Prompt tokens/s that one worker computes by the corrected profile.",
    names.PLANNER_NEEDED_REPLICAS: "Replicas that targets and expected demand need by the profile.",
    names.PLANNER_CORRECTION: "Seconds observed over seconds by the profile.",
    names.PLANNER_TARGET: "Latency target, simulated seconds.",
    names.PLANNER_ATTAINMENT_GOAL: "Share of requests that targets are to hold for.",
    names.PLANNER_ATTAINED: "Share within the target in the last whole adjustment interval.",
}
_LABELS = {
    names.PLANNER_NEEDED_REPLICAS: "role",
    names.PLANNER_CORRECTION: "factor",
    names.PLANNER_TARGET: "latency",
    names.PLANNER_ATTAINED: "latency",
}

FORECAST_MOST_S = 60.0
"""Chosen: decisions come every few seconds; what was expected for a minute ago is no forecast of now."""

Sample = tuple[str, tuple[str, ...], float]
"""Name, value of its label if it has one, and the number."""


class TargetMetrics:
    """One graph's numbers, from the start of a loop on."""

    def __init__(self, config: DecideConfig) -> None:
        self._targets = target_points(config)
        self._attainment = Attainment(config)
        self._expected = ExpectedDemand()
        self._uncached: float | None = None
        self._forecast: tuple[float, float] | None = None
        self._at_s = 0.0
        self._attained: Mapping[str, float] = {}
        self._readings: dict[str, ProfileReading] = {}

    def tick(self, view: View) -> None:
        """Take the newest pull, and what was expected for now."""
        self._attainment.tick(view)
        self._at_s = view.at_s
        if view.pull is not None:
            demand = view.pull.demand
            self._uncached = None if demand is None else demand.uncached_tokens / demand.period_s
        for due in self._expected.due(view.at_s):
            self._forecast = due

    def decided(self, decision: Decision, view: View) -> None:
        """Take what a decision expected and read off the profile, and what its interval attained."""
        self._expected.decided(decision, view.at_s)
        found = {
            role.role.value: profile_reading((step.name, step.inputs) for step in role.steps)
            for role in decision.roles
        }
        self._readings = {role: reading for role, reading in found.items() if reading is not None}
        attained = self._attainment.points(view.at_s)
        if attained is not None:
            self._attained = attained

    def samples(self) -> Iterator[Sample]:
        """Yield what is known now."""
        targets = self._targets
        for name, value in (
            (names.PLANNER_UNCACHED_TOKENS, self._uncached),
            (names.PLANNER_FORECAST_TOKENS, self._expected_now()),
            (names.PLANNER_ATTAINMENT_GOAL, targets.get("attainment/goal")),
        ):
            if value is not None:
                yield name, (), value
        for latency in ("ttft", "itl"):
            if (target_s := targets.get(f"{latency}/target_seconds")) is not None:
                yield names.PLANNER_TARGET, (latency,), target_s
            if (share := self._attained.get(f"attainment/{latency}")) is not None:
                yield names.PLANNER_ATTAINED, (latency,), share
        yield from self._profiled()

    def _expected_now(self) -> float | None:
        if self._forecast is None:
            return None
        due_s, tokens_per_s = self._forecast
        return tokens_per_s if self._at_s - due_s <= FORECAST_MOST_S else None

    def _profiled(self) -> Iterator[Sample]:
        readings = self._readings
        for role, reading in readings.items():
            if reading.needed is not None:
                yield names.PLANNER_NEEDED_REPLICAS, (role,), reading.needed
        # Every role's reading is of the same profile and of the same corrections.
        factors = next((each.factors for each in readings.values()), {})
        for factor, value in factors.items():
            yield names.PLANNER_CORRECTION, (factor,), value
        speeds = (each.worker_tokens_per_s for each in readings.values())
        speed = next((each for each in speeds if each is not None), None)
        if speed is not None:
            yield names.PLANNER_WORKER_TOKENS, (), speed


def target_families(graphs: Mapping[tuple[str, str], TargetMetrics]) -> Iterator[GaugeMetricFamily]:
    """Yield every family.

    Args:
        graphs: By namespace and name.
    """
    families = {
        name: GaugeMetricFamily(
            name, text, labels=["namespace", "graph", *([_LABELS[name]] if name in _LABELS else [])]
        )
        for name, text in _TEXTS.items()
    }
    for key, each in graphs.items():
        for name, labels, value in each.samples():
            families[name].add_metric([*key, *labels], value)
    yield from families.values()
