"""Reports the results of a reconcile: status of the graph, status of its ScalingAdapters, and Events. Called only by `reconcile`."""

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
from penstock_operator.plan.budget import WaitingPod
from penstock_operator.plan.diagnose import Category
from penstock_operator.plan.replacement import Replacement
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
    """What one reconcile of a valid graph planned, wrote and left waiting, up to the point where the reconcile ended.

    Attributes:
        services: Planned state of each service, by its name.
        applied: Result of writing the graph's objects.
        waiting: Pods that keep their scheduling gate because the GPU budget is used up.
    """

    services: Mapping[str, ServiceState]
    applied: Applied
    waiting: Sequence[WaitingPod] = ()


class Reporter:
    """Writes the statuses of graphs and ScalingAdapters, and Events.

    It remembers per graph the problems that were already emitted as Events, and since when each service has too few
    replicas.
    """

    def __init__(self, applier: Applier, recorder: EventRecorder, *, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._applier = applier
        self._recorder = recorder
        self._emitted: dict[Key, frozenset[EventMessage]] = {}
        self._lacking_since: dict[Key, dict[str, float]] = {}

    def forget(self, key: Key) -> None:
        """Drop the emitted problems and the times that are remembered for a deleted graph; does nothing if there are none."""
        self._emitted.pop(key, None)
        self._lacking_since.pop(key, None)

    async def status(
        self, raw: Object, inputs: StatusInput, refusals: Refusals, grant: PoolGrant | None
    ) -> None:
        """Compute a graph's status (conditions, phase, replicas) from ``inputs``, and write it unless the graph already has it.

        Args:
            raw: The GraphDeployment as the API server returned it, with its current status.
            inputs: Facts from which the status is computed.
            refusals: Collects the status write if the API server rejects it.
            grant: GPUs that the graph's GPU pool grants it, for ``status.pool``; None if it is in no pool.
        """
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
        """Write the statuses of a valid graph and of its ScalingAdapters; return the facts from which the graph's status was computed.

        Args:
            graph: The specification that the operator applies, with the observed state.
            snapshot: Children and pods after this reconcile's writes.
            found: What the reconcile planned for each service, wrote, and left waiting for GPUs.
            refusals: Rejected writes, which the status names; rejected status writes are added.
            failure: Reason why the reconcile ended early; None if it did not end early.
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
        before = self._lacking_since.get(graph.key, {})
        self._lacking_since[graph.key] = since = {
            name: before.get(name, graph.now_s) for name in inputs.lacking_replicas
        }
        late = late_services(graph.model, since, now_s=graph.now_s)
        await self._adapters(graph, snapshot, inputs, found, refusals)
        # The graph's status is written last, so that it names every other refused write.
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
                status = adapter_status(
                    inputs.services[name],
                    found.services[name].bounds,
                    generation=live["metadata"].get("generation", 0),
                    old=live.get("status"),
                    now=stamp(self._now_s()),
                )
                await self._write(live, status, refusals)

    async def events(
        self,
        key: Key,
        raw: Object,
        inputs: StatusInput,
        refusals: Refusals,
        *,
        applied: Applied | None = None,
        invalid: Failure | None = None,
        replacements: Mapping[str, Replacement] | None = None,
    ) -> None:
        """Emit an Event for every child that was restored after another writer changed it, and for each new problem.

        A problem is new if the previous reconcile did not find it.

        Args:
            key: Namespace and name of the graph.
            raw: The GraphDeployment as the API server returned it, with the status from before this reconcile.
            inputs: Facts from which the graph's new status was computed.
            refusals: Writes that the API server rejected.
            applied: Result of writing the graph's objects; None if none were written.
            invalid: Why the newest specification is invalid; None if it is valid.
            replacements: Replacements for replicas on cordoned nodes, by service.
        """
        found = applied or Applied()
        emitted = self._emitted.get(key, frozenset())
        problems = [EventMessage("NameConflict", each, "Apply", is_warning=True) for each in found.conflicts]
        if invalid is not None:
            problems.append(EventMessage(invalid.reason, invalid.message, "Validate", is_warning=True))
        problems += [
            EventMessage(each.kind.value, str(each), each.step, is_warning=True)
            for each in refusals.permanent
        ]
        # A pod whose ungating was rejected is reported as a refusal.
        reasons = sorted(
            {f"{each.service}: {each.reason}" for each in inputs.waiting if not each.cause_is_refusal}
        )
        problems += [
            EventMessage(
                "Replacing" if each.fits else "NoRoomForReplacement",
                each.sentence(name),
                "Scale",
                is_warning=not each.fits,
            )
            for name, each in sorted((replacements or {}).items())
        ]
        problems += [EventMessage("WaitingForBudget", each, "Ungate") for each in reasons]
        problems += [
            EventMessage(each.category.value, str(each), "Observe", is_warning=True)
            for each in inputs.diagnoses
            if each.category in {Category.REFUSED, Category.NODE_LOST}
        ]
        self._emitted[key] = frozenset(problems)
        new = [each for each in problems if each not in emitted]
        for each in refusals.permanent:
            if any(message.text == str(each) for message in new):
                namespace, name = key
                log.warning(
                    "write refused", namespace=namespace, name=name, write=each.write, message=each.message
                )
        repairs = [EventMessage("Repaired", each, "Apply") for each in found.repaired]
        for message in (*repairs, *new, *_unready(raw, inputs)):
            await self._recorder.emit(raw, message)

    async def _write(self, obj: Object, status: Mapping[str, Any], refusals: Refusals) -> None:
        with refusals.of(f"{name_of(obj)}: its status", "Report"):
            await self._applier.status(obj, status)


def _unready(raw: Object, inputs: StatusInput) -> Iterator[EventMessage]:
    """Yield a warning Event if a graph that was ready no longer is; a new graph that is not ready yet gets none.

    ``raw`` has the status from before this reconcile, so that the Event is emitted only at the transition.
    """
    old = (raw.get("status") or {}).get("conditions") or ()
    before = next((each.get("status") for each in old if each.get("type") == READY), None)
    (now,) = (each for each in condition_results(inputs) if each.type == READY)
    if before == "True" and not now.status and not inputs.deleting:
        yield EventMessage(now.reason, f"Ready is False: {now.message}", "Observe", is_warning=True)
