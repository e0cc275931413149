"""What kube-state-metrics says of a HorizontalPodAutoscaler, and which of its metrics can be simulated. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from penstock_planner.decide.policies.baselines.hpa import HpaParameters

PREFIX: Final = "kube_horizontalpodautoscaler"

_SIGNALS: Final[Mapping[str, tuple[str, ...]]] = {
    "kv_usage": ("cache_usage", "kv_usage", "token_usage", "kv_cache_util"),
    "waiting": ("waiting", "queue", "pending", "unserved"),
    "running": ("running", "inflight", "in_flight", "concurren", "batch_current_size"),
}
"""Parts of metric names that say what is measured, in the order in which they are looked for."""
_PERCENT: Final = 100.0


@dataclass(frozen=True, slots=True)
class Autoscaler:
    """An HPA as it was configured last.

    Attributes:
        targets: What it keeps of each replica, of the metrics that can be simulated; None: there is none such.
        unknown: Its other metrics.
    """

    name: str
    min_replicas: int
    max_replicas: int
    targets: HpaParameters | None
    unknown: tuple[str, ...] = ()

    @property
    def note(self) -> str | None:
        """Return what cannot be simulated; None: everything can."""
        if not self.unknown:
            return None
        names = ", ".join(self.unknown)
        if self.targets is None:
            return f"the HPA {self.name} scales on {names}, which is not simulated; the HPA has common settings instead"
        return f"the HPA {self.name} scales on {names} as well, which is not simulated"

    @property
    def words(self) -> str:
        """Return its settings in short."""
        kept = self.targets
        parts = [] if kept is None or kept.kv_usage is None else [f"KV usage {kept.kv_usage:.0%}"]
        if kept is not None and kept.waiting is not None:
            parts.append(f"{kept.waiting:g} waiting")
        if kept is not None and kept.running is not None:
            parts.append(f"{kept.running:g} running")
        return f"{', '.join(parts)}, {self.min_replicas} to {self.max_replicas} replicas"


def autoscaler_of(name: str, specs: list[tuple[dict[str, str], float]]) -> Autoscaler:
    """Return the HPA that kube-state-metrics describes by those series."""
    bounds = {"min_replicas": 1.0, "max_replicas": 0.0}
    known: dict[str, float] = {}
    unknown = []
    for labels, value in specs:
        kind = labels.get("__name__", "").removeprefix(f"{PREFIX}_spec_")
        if kind in bounds:
            bounds[kind] = value
        elif kind == "target_metric":
            metric = labels.get("metric_name", "")
            signal = signal_of(metric)
            if signal is None or value <= 0:
                unknown.append(metric)
            else:
                is_percent = signal == "kv_usage" and value > 1
                known[signal] = value / _PERCENT if is_percent else value
    targets = None
    if known:
        targets = HpaParameters(known.get("kv_usage"), known.get("waiting"), known.get("running"))
    low = max(1, round(bounds["min_replicas"]))
    return Autoscaler(
        name, low, max(low, round(bounds["max_replicas"])), targets, tuple(sorted(set(unknown)))
    )


def signal_of(metric: str) -> str | None:
    """Return which simulated signal a metric's name means: a field of `HpaParameters`; None: none of them."""
    name = metric.lower().replace("-", "_")
    return next((signal for signal, parts in _SIGNALS.items() if any(part in name for part in parts)), None)
