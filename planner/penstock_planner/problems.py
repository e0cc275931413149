"""What keeps a planner from scaling, as text: signals that are unknown, sources that are gone, a ledger without room. Pure.

``state.json`` shows them to `penstock status`, `penstock doctor --local` and ``/ui``; on Kubernetes the first is a condition.
"""

from __future__ import annotations

from typing import Final

from penstock.api import MetricsSource
from penstock.core.worker_metrics import NOT_ON_PAGE
from penstock_planner.core.phase import PlannerPhase
from penstock_planner.observers import View

MISSING_S: Final = 10.0
"""Simulated seconds without a usable metric, or with a dead source, before it is said; the default of
metrics.maxAgeSeconds."""


class UnknownSignals:
    """Follows ticks, and says which signals have been unknown for `MISSING_S`."""

    def __init__(self, *, needs_demand: bool) -> None:
        """Say whether the mode decides by demand."""
        self._needs_demand = needs_demand
        self._known_s: float | None = None
        self._said = ""

    def after(self, view: View) -> str:
        """Return why nothing can be scaled well after one more tick, as text that stays the same; empty: all is known."""
        if view.phase is PlannerPhase.ADJUSTING:
            self._known_s, self._said = None, ""
            return ""
        if view.pull is None:
            return self._said  # an interval begins; nothing new is known yet
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

    def _unknown(self, view: View) -> list[str]:
        assert view.pull is not None  # noqa: S101 - the caller has looked
        kv, queue = view.pull.kv, view.pull.queue
        return [
            *(["KV usage"] if kv.unknown and not kv.fresh else []),
            *(["prefill queue"] if queue is not None and not queue.is_known else []),
            *(["demand at the routers"] if self._needs_demand and view.pull.demand is None else []),
        ]


def _asked(view: View) -> str:
    """Return which sources failed; their reasons vary from pull to pull, except for names that no page has."""
    if view.pull is None:
        return ""
    kv, queue = view.pull.kv, view.pull.queue
    why = f"{kv.why}; {queue.why if queue is not None else ''}"
    found = [each.value for each in MetricsSource if f"{each.value}: " in why]
    asked = f" to {', '.join(found)}" if found else ""
    if NOT_ON_PAGE in why:
        asked += f" ({NOT_ON_PAGE}: a runtime with other names declares them, RuntimeTraits.metric_names)"
    return asked


class ProblemTracker:
    """Follows ticks, and says all that is wrong."""

    def __init__(self, *, needs_demand: bool) -> None:
        """Say whether the mode decides by demand."""
        self._signals = UnknownSignals(needs_demand=needs_demand)
        self._gone_since_s: dict[str, float] = {}
        self._gone: dict[str, str] = {}

    def after(self, view: View) -> tuple[str, ...]:
        """Return what is wrong after one more tick."""
        if view.pull is not None:
            self._gone = dict(view.gone_sources)
            self._gone_since_s = {name: self._gone_since_s.get(name, view.at_s) for name in self._gone}
        found = (
            [f"decisions cannot be recorded, so they are not applied: {view.ledger_problem}"]
            if view.ledger_problem
            else []
        )
        if unknown := self._signals.after(view):
            found.append(unknown)
        found += [
            f"metrics source {name} is unavailable; other sources are used instead: {why}"
            for name, why in self._gone.items()
            if view.at_s - self._gone_since_s[name] >= MISSING_S
        ]
        return tuple(found)
