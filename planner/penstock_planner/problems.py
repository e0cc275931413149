"""Reasons that prevent a planner from scaling, as text: unknown signals, unavailable sources, a ledger (decision log) that cannot be written. Pure.

`penstock status`, `penstock doctor --local` and ``/ui`` read them from ``state.json``; on Kubernetes the first one is a condition.
"""

from __future__ import annotations

from typing import Final

from penstock.api import MetricsSource
from penstock.core.findings import NOT_RECORDED
from penstock.core.worker_metrics import NOT_ON_PAGE
from penstock_planner.core.phase import PlannerPhase
from penstock_planner.observers import PlannerView

MISSING_S: Final = 10.0
"""Simulated seconds for which a metric or source must be unavailable before it is reported; the default of metrics.maxAgeSeconds."""


class UnknownSignals:
    """Tracks which metrics a planner loop knows at its ticks (metrics scrapes), and reports those that are unknown for long.

    The metrics are KV usage, prefill queue and demand; "long" is 10 simulated seconds.
    """

    def __init__(self, *, needs_demand: bool) -> None:
        """Start with all signals known; ``needs_demand`` tells whether the mode decides by the demand at the routers."""
        self._needs_demand = needs_demand
        self._known_s: float | None = None
        self._said = ""

    def after(self, view: PlannerView) -> str:
        """Process the planner's state at a tick (metrics scrape); return a sentence about metrics that are unknown for long.

        The metrics are KV usage, prefill queue and demand. Returns an empty string if none has been unknown for 10
        simulated seconds (`MISSING_S`). The sentence stays the same while the same metrics are unknown.
        """
        if view.phase is PlannerPhase.ADJUSTING:
            self._known_s, self._said = None, ""
            return ""
        if view.pull is None:
            return self._said  # an interval starts, and no metrics were scraped yet
        unknown = self._unknown(view)
        if not unknown or self._known_s is None:
            self._known_s = view.at_s
        is_long = unknown and view.at_s - self._known_s >= MISSING_S
        self._said = (
            f"cannot be scaled because {' and '.join(unknown)} {'is' if len(unknown) == 1 else 'are'} "
            f"unknown{_asked(view)}: no role shrinks, and a role grows only if the known values alone "
            "justify it"
            if is_long
            else ""
        )
        return self._said

    def _unknown(self, view: PlannerView) -> list[str]:
        assert view.pull is not None  # noqa: S101 - the caller has looked
        kv, queue = view.pull.kv, view.pull.queue
        return [
            *(["KV usage"] if kv.unknown and not kv.fresh else []),
            *(["prefill queue"] if queue is not None and not queue.is_known else []),
            *(["demand at the routers"] if self._needs_demand and view.pull.demand is None else []),
        ]


def _asked(view: PlannerView) -> str:
    """Return the names of the failed sources; their error messages change too often, except for metric names missing on a page."""
    if view.pull is None:
        return ""
    kv, queue = view.pull.kv, view.pull.queue
    why = f"{kv.unknown_reasons}; {queue.why if queue is not None else ''}"
    found = [each.value for each in MetricsSource if f"{each.value}: " in why]
    asked = f" to {', '.join(found)}" if found else ""
    if NOT_ON_PAGE in why:
        asked += f" ({NOT_ON_PAGE}: a runtime with other names declares them, RuntimeTraits.metric_names)"
    return asked


class ProblemTracker:
    """Follows a planner loop by its ticks (metrics scrapes), and reports all problems that keep it from scaling, as sentences."""

    def __init__(self, *, needs_demand: bool) -> None:
        """Start without problems; ``needs_demand`` tells whether the mode decides by the demand at the routers."""
        self._signals = UnknownSignals(needs_demand=needs_demand)
        self._gone_since_s: dict[str, float] = {}
        self._gone: dict[str, str] = {}

    def after(self, view: PlannerView) -> tuple[str, ...]:
        """Process the planner's state at a tick (metrics scrape); return all problems that now keep it from scaling, as sentences.

        Returns an empty tuple if there are none.
        """
        if view.pull is not None:
            self._gone = dict(view.failed_sources)
            self._gone_since_s = {name: self._gone_since_s.get(name, view.at_s) for name in self._gone}
        found = [f"{NOT_RECORDED}: {view.ledger_problem}"] if view.ledger_problem else []
        if unknown := self._signals.after(view):
            found.append(unknown)
        found += [
            f"{why}; the planner uses other metrics sources instead of {name}"
            for name, why in self._gone.items()
            if view.at_s - self._gone_since_s[name] >= MISSING_S
        ]
        return tuple(found)
