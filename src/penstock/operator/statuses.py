"""Writes the statuses of graphs and their adapters, and only those that say something new."""

from __future__ import annotations

from typing import Any

from penstock.core.stamps import stamp
from penstock.operator.apply import Applier
from penstock.operator.plan.bounds import Bounded
from penstock.operator.plan.conditions import ConditionFacts, ServiceFacts
from penstock.operator.plan.status import adapter_status, graph_status, is_current
from penstock.operator.trim import Object


class Statuses:
    """Says what `plan.status` decides."""

    def __init__(self, applier: Applier) -> None:
        self._applier = applier

    async def graph(self, raw: Object, facts: ConditionFacts, *, now_s: float) -> bool:
        """Write a graph's status; return whether it said something new."""
        old = raw.get("status") or None
        status = graph_status(facts, old=old, now=stamp(now_s))
        if not status["services"]:
            del status["services"]  # an empty map in place of a full one is stored as null, which is refused
        return await self._write(raw, status, old)

    async def adapter(self, live: Object, facts: ServiceFacts, bounds: Bounded, *, now_s: float) -> bool:
        """Write an adapter's status; return whether it said something new."""
        old = live.get("status")
        generation = live["metadata"].get("generation", 0)
        status = adapter_status(facts, bounds, generation=generation, old=old, now=stamp(now_s))
        return await self._write(live, status, old)

    async def _write(self, obj: Object, status: dict[str, Any], old: dict[str, Any] | None) -> bool:
        if is_current(status, old):
            return False
        metadata = {key: obj["metadata"][key] for key in ("name", "namespace", "uid")}
        kind = {"apiVersion": obj["apiVersion"], "kind": obj["kind"]}
        await self._applier.status({**kind, "metadata": metadata, "status": status})
        return True
