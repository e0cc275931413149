"""Says what a reconcile found: the graph's status, those of its ScalingAdapters, and Events. Called by `reconcile` alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.core.logs import get_logger
from penstock.core.stamps import stamp
from penstock.kube.events import EventMessage, EventRecorder
from penstock.kube.kinds import SCALING_ADAPTER
from penstock.kube.objects.names import child_name
from penstock.kube.objects.refusals import Refusals
from penstock_operator.apply import Applied, Applier, failure_of, name_of
from penstock_operator.cluster import GraphSnapshot
from penstock_operator.observed import ObservedGraph
from penstock_operator.plan.budget import Waiting
from penstock_operator.plan.diagnose import Category
from penstock_operator.plan.replicas import ServiceState
from penstock_operator.plan.status import READY, adapter_status, condition_results, graph_status
from penstock_operator.plan.status_input import (
    Failure,
    StatusInput,
    late_services,
    missing_definition,
    status_input,
    worst_failure,
)
from penstock_operator.pools.grant import PoolGrant
from penstock_operator.queue import Key
from penstock_operator.trim import Object
from penstock_operator.workloads import is_own

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Findings:
    """What one reconcile did with a valid graph, as far as it came.

    Attributes:
        services: What each service is to have.
        applied: What came of writing the graph's objects.
        waiting: Pods that the budget holds back.
    """

    services: Mapping[str, ServiceState]
    applied: Applied
    waiting: Sequence[Waiting] = ()


class Reporter:
    """Writes statuses and Events; remembers of each graph the troubles emitted, and since when services lack replicas."""

    def __init__(self, applier: Applier, recorder: EventRecorder, *, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._applier = applier
        self._recorder = recorder
        self._emitted: dict[Key, frozenset[EventMessage]] = {}
        self._short: dict[Key, dict[str, float]] = {}

    def forget(self, key: Key) -> None:
        """Forget a deleted graph."""
        self._emitted.pop(key, None)
        self._short.pop(key, None)

    async def status(
        self, raw: Object, inputs: StatusInput, refusals: Refusals, grant: PoolGrant | None
    ) -> None:
        """Write a graph's status; ``grant`` is what its GPU pool lets it hold."""
        status = graph_status(inputs, old=raw.get("status") or None, now=stamp(self._now_s()))
        if grant is not None:
            status["pool"] = grant.status
        await self._write(raw, status, refusals)

    async def graph(
        self,
        graph: ObservedGraph,
        snapshot: GraphSnapshot,
        found: Findings,
        refusals: Refusals,
        *,
        failure: Failure | None = None,
    ) -> StatusInput:
        """Write the statuses of a valid graph and of its ScalingAdapters; return what is known of it.

        Args:
            graph: The edit that is carried out.
            snapshot: The graph as it is after this reconcile's writes.
            found: What the reconcile did.
            refusals: Writes that were refused; those of statuses are added.
            failure: Why the reconcile ended early; None: it did not.
        """
        generation = graph.raw["metadata"].get("generation", 0)
        inputs = status_input(
            graph.model,
            generation,
            snapshot.views(),
            found.services,
            budget=graph.effective.ceiling,
            waiting=found.waiting,
            now_s=graph.now_s,
        )
        before = self._short.get(graph.key, {})
        self._short[graph.key] = since = {name: before.get(name, graph.now_s) for name in inputs.short}
        late = late_services(graph.model, since, now_s=graph.now_s)
        await self._adapters(graph, snapshot, inputs, found, refusals)
        # Last, so that it names every refused write but itself.
        missing = missing_definition(graph.model.spec, graph.context.kinds)
        worst = worst_failure(
            [graph.invalid, failure, failure_of(found.applied.conflicts, refusals), missing]
        )
        inputs = replace(inputs, late=late, paused=graph.paused, served=graph.served, failure=worst)
        await self.status(graph.raw, inputs, refusals, graph.grant)
        return inputs

    async def _adapters(
        self,
        graph: ObservedGraph,
        snapshot: GraphSnapshot,
        inputs: StatusInput,
        found: Findings,
        refusals: Refusals,
    ) -> None:
        for name, service in graph.model.spec.services.items():
            live = snapshot.children.get((SCALING_ADAPTER.kind, child_name(graph.model.name, name)))
            if service.scaling is not None and live is not None and is_own(live, graph.uid):
                said = adapter_status(
                    inputs.services[name],
                    found.services[name].bounds,
                    generation=live["metadata"].get("generation", 0),
                    old=live.get("status"),
                    now=stamp(self._now_s()),
                )
                await self._write(live, said, refusals)

    async def events(
        self,
        key: Key,
        raw: Object,
        inputs: StatusInput,
        refusals: Refusals,
        *,
        applied: Applied | None = None,
        invalid: Failure | None = None,
    ) -> None:
        """Emit every repair, and the troubles that the last reconcile did not find."""
        found = applied or Applied()
        emitted = self._emitted.get(key, frozenset())
        troubles = [EventMessage("NameConflict", each, "Apply", is_warning=True) for each in found.conflicts]
        if invalid is not None:
            troubles.append(EventMessage(invalid.reason, invalid.message, "Validate", is_warning=True))
        troubles += [
            EventMessage(each.kind.value, str(each), each.step, is_warning=True) for each in refusals.lasting
        ]
        # A refused release is among the refusals.
        reasons = sorted(
            {f"{each.service}: {each.reason}" for each in inputs.waiting if not each.cause_is_refusal}
        )
        troubles += [EventMessage("WaitingForBudget", each, "Ungate") for each in reasons]
        troubles += [
            EventMessage(each.category.value, str(each), "Observe", is_warning=True)
            for each in inputs.diagnoses
            if each.category in {Category.REFUSED, Category.NODE_LOST}
        ]
        self._emitted[key] = frozenset(troubles)
        fresh = [each for each in troubles if each not in emitted]
        for each in refusals.lasting:
            if any(message.text == str(each) for message in fresh):
                namespace, name = key
                log.warning(
                    "write refused", namespace=namespace, name=name, write=each.write, words=each.words
                )
        repairs = [EventMessage("Repaired", each, "Apply") for each in found.repaired]
        for message in (*repairs, *fresh, *_unready(raw, inputs)):
            await self._recorder.emit(raw, message)

    async def _write(self, obj: Object, status: Mapping[str, Any], refusals: Refusals) -> None:
        with refusals.of(f"{name_of(obj)}: its status", "Report"):
            await self._applier.status(obj, status)


def _unready(raw: Object, inputs: StatusInput) -> Iterator[EventMessage]:
    """Yield an Event where a graph that was ready no longer is; a new graph starts without one.

    ``raw`` has the status before this reconcile, so that the Event comes with the transition alone.
    """
    old = (raw.get("status") or {}).get("conditions") or ()
    was = next((each.get("status") for each in old if each.get("type") == READY), None)
    (now,) = (each for each in condition_results(inputs) if each.type == READY)
    if was == "True" and not now.status and not inputs.deleting:
        yield EventMessage(now.reason, f"Ready is False: {now.message}", "Observe", is_warning=True)
