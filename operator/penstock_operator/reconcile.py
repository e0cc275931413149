"""Reconciles one graph in stages: observe, validate, plan, build, drain, write, ungate, report.

Each stage returns a value for the next ones. The first four write nothing. A specification that cannot be applied is
therefore found before the first write, and the last one that was applied is tried in its place.

The reconciler is level-triggered: every decision is made from the state that the watches show now. A crash between
two writes costs one more reconcile, and a lost event costs one resync interval. Nothing is written that is already
right. The decisions are pure functions in `plan` and the objects are built by pure functions in `resources`; this
module calls them in order.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from penstock.api import GraphDeployment
from penstock.core.errors import ClusterError, InvalidSpecError, ManifestProblem, UnavailableError, one_line
from penstock.core.logs import get_logger
from penstock.kube.client import KubeClient
from penstock.kube.events import EventMessage, EventRecorder
from penstock.kube.informer import key_of
from penstock.kube.objects.names import drain_finalizer, paused_by
from penstock.kube.objects.refusals import RefusalKind, Refusals
from penstock.kube.objects.served import ServedSpec
from penstock_operator.apply import Applied, Applier, failure_of
from penstock_operator.claims import ClaimReader
from penstock_operator.cluster import Cluster, GraphSnapshot
from penstock_operator.convergence import Convergence, WantedObjects
from penstock_operator.draining import Drains
from penstock_operator.edits import Edits
from penstock_operator.gates import Gates
from penstock_operator.loads import MetricsReader
from penstock_operator.metrics import OperatorMetrics
from penstock_operator.namespaces import NamespaceAllowances
from penstock_operator.observed import ObservedGraph
from penstock_operator.plan.budget import UngatePlan
from penstock_operator.plan.pods import PodView
from penstock_operator.plan.replicas import ReplicasPlan, ServiceState
from penstock_operator.plan.status_input import Failure, StatusInput, observed_status_input
from penstock_operator.pools.driver import GpuPools
from penstock_operator.pools.grant import PoolGrant, effective_budget
from penstock_operator.queue import Key
from penstock_operator.reporting import Findings, Reporter
from penstock_operator.resources.metadata import BuildContext, inherit, needed_kinds
from penstock_operator.scaling import Scaling
from penstock_operator.trim import Object

DRAIN_REQUEUE_S: Final = 1.0
"""Seconds between two reconciles while workers drain: two load readings that show a worker idle must be this far
apart."""

UNREADY_REQUEUE_S: Final = 15.0
"""Seconds between two reconciles while a pod is not ready, because some problems show only by their duration. Chosen."""

CONFLICT_REQUEUE_S: Final = 60.0
"""Seconds between two reconciles while an object of another owner has a child's name. Chosen: a person has to act
first."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Dependencies:
    """Shared objects that the reconcilers of graphs and ProfileRequests use.

    Attributes:
        client: Client of the Kubernetes API.
        cluster: In-memory view of graphs, children and pods.
        applier: Writes objects.
        loads: Reads the load of pods that drain.
        recorder: Emits Kubernetes Events.
        metrics: Metrics of the operator.
        context: Settings for building objects; UID and namespace are replaced by those of each object's owner.
        allowances: Allowed podTemplate features by namespace.
        claims: Reads the GPU count of ResourceClaimTemplates.
        operator_class: Value of ``spec.operatorClass`` that this operator handles.
        gates: Removes the scheduling gates of pods within the GPU budget.
        pools: GPU pools and the GPUs that they grant to graphs.
        now_s: Returns the API server's Unix time in seconds, which is the same for every leader.
    """

    client: KubeClient
    cluster: Cluster
    applier: Applier
    loads: MetricsReader
    recorder: EventRecorder
    metrics: OperatorMetrics
    context: BuildContext
    allowances: NamespaceAllowances
    claims: ClaimReader
    operator_class: str
    gates: Gates
    pools: GpuPools
    now_s: Callable[[], float]


@dataclass(frozen=True, slots=True)
class ReconcileResult:
    """Result of one reconcile of a graph.

    Attributes:
        outcome: Value of the metric's label ``result``: unchanged, changed, waiting, invalid, conflict or refused.
        requeue_after_s: Wall-clock seconds until the next reconcile if nothing changes before; None if only a change
            requires one.
    """

    outcome: str
    requeue_after_s: float | None = None


class Reconciler:
    """Reconciles graphs: makes the objects of each graph equal to its specification.

    It stores only caches; the state of the cluster is read from the watches.
    """

    def __init__(self, parts: Dependencies) -> None:
        self._parts = parts
        self._drains = Drains(parts.applier, parts.loads)
        self._gates = parts.gates
        self._edits = Edits()
        self._scaling = Scaling(self._drains, self._gates, parts.applier)
        self._wanted = WantedObjects()
        self._convergence = Convergence(parts.applier, parts.recorder, self._drains)
        self._reporter = Reporter(parts.applier, parts.recorder, now_s=parts.now_s)
        self._settled: dict[Key, tuple[object, ...]] = {}
        self._deletions: dict[str, asyncio.Event] = {}

    async def reconcile(self, key: Key) -> float | None:
        """Reconcile one graph; return the wall-clock seconds until the next reconcile, or None if only a change requires one.

        Raises:
            ClusterError: The API server did not answer or refused, or another writer changed an object first. A later
                reconcile repeats everything that is missing.
        """
        started_s = time.monotonic()
        outcome = "error"
        try:
            result = await self._reconcile(key)
            outcome = result.outcome
            return result.requeue_after_s
        finally:
            self._parts.metrics.reconciles.labels(outcome).inc()
            self._parts.metrics.durations.observe(time.monotonic() - started_s)

    async def wait_deleted(self, uid: str) -> None:
        """Wait until a reconcile has found that no object is left of the graph with this UID, which is being deleted."""
        await self._deletions.setdefault(uid, asyncio.Event()).wait()
        del self._deletions[uid]

    async def report_refusal(self, raw: Object, refusals: Refusals) -> None:
        """Report in status and Events why the operator cannot add its finalizer to a graph; does nothing if the refusal is temporary.

        Args:
            raw: The GraphDeployment as the API server returned it.
            refusals: The rejected write.
        """
        if refusals.permanent:
            inputs = observed_status_input(raw, (), failure=failure_of((), refusals))
            await self._reporter.status(raw, inputs, refusals, self._parts.pools.grant(raw))
            await self._reporter.events(key_of(raw), raw, inputs, refusals)

    def forget(self, key: Key) -> None:
        """Drop everything that is cached for a deleted graph; does nothing if there is nothing."""
        self._settled.pop(key, None)
        for each in (
            self._edits,
            self._gates,
            self._wanted,
            self._convergence,
            self._reporter,
            self._parts.pools,
        ):
            each.forget(key)

    async def _reconcile(self, key: Key) -> ReconcileResult:
        snapshot = self._parts.cluster.snapshot(key)
        raw = snapshot.graph
        if raw is None:
            self._parts.applier.forget(key[0], snapshot.children)
            self.forget(key)
            return ReconcileResult("unchanged")
        grant = self._parts.pools.grant(raw)
        self._parts.pools.acknowledge(raw, grant)
        if raw["metadata"].get("deletionTimestamp"):
            return await self._delete(key, raw, snapshot, grant)
        if self._settled.get(key) == (grant, *snapshot.fingerprint()):
            return ReconcileResult("unchanged")
        self._settled.pop(key, None)
        valid = self._edits.of(key, raw, is_in_pool=grant is not None)
        problems = valid.problems
        for served, model in valid.edits:
            graph = await self._observed(key, model, raw, snapshot, grant, served=served, problems=problems)
            plan = await self._scaling.plan(graph)
            try:
                wanted = self._wanted.of(graph, plan)
            except InvalidSpecError as exc:  # before the first write
                problems = problems or exc.problems
                continue
            self._edits.record_applied(graph)
            self._parts.pools.report(raw, model, plan.bid)
            return await self._carry_out(graph, plan, wanted)
        if not valid.edits or not snapshot.pods:
            return await self._invalid(key, raw, snapshot, grant, problems)
        # No objects can be built, for example because the operator allows less than before; pods still start and drain.
        served, model = valid.edits[-1]
        graph = await self._observed(key, model, raw, snapshot, grant, served=served, problems=problems)
        graph = replace(
            graph, paused=graph.paused or "the operator cannot apply any known version of the specification"
        )
        return await self._carry_out(graph, await self._scaling.plan(graph), None)

    async def _observed(
        self,
        key: Key,
        model: GraphDeployment,
        raw: Object,
        snapshot: GraphSnapshot,
        grant: PoolGrant | None,
        *,
        served: ServedSpec,
        problems: tuple[ManifestProblem, ...],
    ) -> ObservedGraph:
        kinds = [kind for kind in needed_kinds(model.spec) if await self._parts.cluster.serves(kind)]
        context = replace(
            inherit(self._parts.context, raw["metadata"], model.spec.inherited_annotations),
            owner_uid=raw["metadata"]["uid"],
            namespace=key[0],
            allowed=await self._parts.allowances.of(key[0]),
            claimed_gpus=await self._parts.claims.of(key[0], model),
            kinds=frozenset(kinds),
            in_pool=grant is not None,
        )
        planner = (
            {} if grant is not None and grant.is_bid_expired else (raw.get("status") or {}).get("planner")
        )
        return ObservedGraph(
            key,
            raw["metadata"]["uid"],
            model,
            raw,
            snapshot,
            context,
            self._parts.now_s(),
            served=served,
            effective=effective_budget(model, grant),
            workers=snapshot.workers(),
            wants=(planner or {}).get("wants") or {},
            paused=paused_by(raw),
            problems=problems,
            grant=grant,
        )

    async def _carry_out(
        self, graph: ObservedGraph, plan: ReplicasPlan, wanted: list[Object] | None
    ) -> ReconcileResult:
        """Execute every writing step: drain, write objects, ungate, report. If ``wanted`` is None, no objects are written."""
        refusals = Refusals()  # only collected for the report; no step depends on another step's refusals
        found, is_pruned, is_draining = Findings(plan.services, Applied()), False, plan.is_draining
        try:
            emitted = await self._scaling.drain(graph, plan, refusals)
            if wanted is not None and not graph.paused:
                done = await self._convergence.write(graph, plan, wanted, refusals)
                found, is_pruned = Findings(done.services, done.applied), done.has_obsolete
                is_draining = is_draining or done.is_draining
            allowed, released = await self._ungate(graph, found.services, plan.kept_gated, refusals)
            found = replace(found, waiting=allowed.waiting)
            inputs = await self._reporter.graph(graph, self._snapshot(graph), found, refusals)
        except UnavailableError as exc:
            if self._parts.cluster.problem() is None:  # only this request gets no answer
                failure = Failure(RefusalKind.REJECTED, str(exc))
                with suppress(ClusterError):
                    await self._reporter.graph(graph, self._snapshot(graph), found, refusals, failure=failure)
            raise
        for message in emitted:
            await self._parts.recorder.emit(graph.raw, message)
        await self._reporter.events(
            graph.key,
            graph.raw,
            inputs,
            refusals,
            applied=found.applied,
            invalid=graph.invalid,
            replacements={
                name: each.replacement for name, each in plan.services.items() if each.replacement is not None
            },
        )
        wrote = bool(emitted or is_pruned or released or found.applied.wrote)
        after = self._snapshot(graph)
        requeue_after_s = DRAIN_REQUEUE_S if is_draining else _requeue_after_s(inputs, after.views())
        result = _result(graph, found.applied, refusals, wrote=wrote, requeue_after_s=requeue_after_s)
        is_at_rest = result == ReconcileResult("unchanged") and inputs.failure is None
        if is_at_rest and after.fingerprint() == graph.snapshot.fingerprint():
            # The fingerprint did not change during the reconcile, so the graph stays settled until it does.
            self._settled[graph.key] = (graph.grant, *after.fingerprint())
        return result

    def _snapshot(self, graph: ObservedGraph) -> GraphSnapshot:
        """Return the current state of the graph, which includes this reconcile's own writes."""
        return self._parts.cluster.snapshot(graph.key)

    async def _ungate(
        self,
        graph: ObservedGraph,
        services: Mapping[str, ServiceState],
        kept_gated: Collection[str],
        refusals: Refusals,
    ) -> tuple[UngatePlan, list[str]]:
        # Surplus pods are not ungated: they would load their model only to be deleted. Controllers delete gated pods first.
        surplus = {name for each in services.values() if each.plan for name in each.plan.draining}
        return await self._gates.ungate(
            graph.key,
            # A new snapshot, which includes the drain labels that this reconcile has written.
            [
                each
                for each in self._snapshot(graph).workers()
                if each.uid not in kept_gated and not (each.gated and each.name in surplus)
            ],
            budget=graph.effective.gpus,
            priorities=graph.model.spec.priorities,
            replicas={name: each.running for name, each in services.items()},
            now_s=graph.now_s,
            refusals=refusals,
        )

    async def _invalid(
        self,
        key: Key,
        raw: Object,
        snapshot: GraphSnapshot,
        grant: PoolGrant | None,
        problems: tuple[ManifestProblem, ...],
    ) -> ReconcileResult:
        """Report every problem of a graph that has never had a valid specification; its objects are not changed."""
        invalid, refusals = Failure("InvalidSpec", one_line(problems)), Refusals()
        inputs = observed_status_input(raw, snapshot.views(), failure=invalid)
        await self._reporter.status(raw, inputs, refusals, grant)
        await self._reporter.events(key, raw, inputs, refusals, invalid=invalid)
        return ReconcileResult("invalid")

    async def _delete(
        self, key: Key, raw: Object, snapshot: GraphSnapshot, grant: PoolGrant | None
    ) -> ReconcileResult:
        finalizers = raw["metadata"].get("finalizers", [])
        if drain_finalizer(self._parts.operator_class) not in finalizers:
            return ReconcileResult("unchanged")
        if "orphan" not in finalizers:  # the user wants to keep the children
            refusals = Refusals()
            step = await self._drains.delete_graph(
                raw, snapshot, now_s=self._parts.now_s(), refusals=refusals
            )
            if not step.release:
                inputs = observed_status_input(
                    raw, snapshot.views(), failure=failure_of((), refusals), deleting=step.message
                )
                await self._reporter.status(raw, inputs, refusals, grant)
                await self._reporter.events(key, raw, inputs, refusals)
                if "foregroundDeletion" in finalizers:
                    await self._parts.recorder.emit(raw, _NOT_DRAINED)
                wait_s = DRAIN_REQUEUE_S if step.waits_for_idleness else UNREADY_REQUEUE_S
                return ReconcileResult("waiting", wait_s)
        log.info("graph deleted", namespace=key[0], name=key[1])
        # Kopf's handler waits for this, and kopf removes the finalizer then.
        self._deletions.setdefault(raw["metadata"]["uid"], asyncio.Event()).set()
        return ReconcileResult("changed")


_NOT_DRAINED: Final = EventMessage(
    "ForegroundDeletion",
    "Kubernetes terminates routers and workers at once, so that queued requests may be lost; next time delete with"
    " --cascade=background (Argo CD: PrunePropagationPolicy=background)",
    "Delete",
    is_warning=True,
)
"""Event for a graph whose children the garbage collector deletes before they can be drained."""


def _requeue_after_s(inputs: StatusInput, pods: Iterable[PodView]) -> float | None:
    """Return the seconds until the next reconcile even if nothing changes or drains; None if none is needed."""
    is_unready = bool(inputs.lacking_replicas) or any(not each.ready and not each.finished for each in pods)
    return UNREADY_REQUEUE_S if is_unready else None


def _result(
    graph: ObservedGraph,
    applied: Applied,
    refusals: Refusals,
    *,
    wrote: bool,
    requeue_after_s: float | None,
) -> ReconcileResult:
    """Return the most serious result that applies to a reconcile of a valid graph."""
    if any(not each.kind.is_permanent for each in refusals.found):
        return ReconcileResult("conflict", DRAIN_REQUEUE_S)
    if refusals.found:
        return ReconcileResult("refused", requeue_after_s or UNREADY_REQUEUE_S)
    if graph.problems:
        return ReconcileResult("invalid", requeue_after_s)
    if applied.conflicts:
        return ReconcileResult("conflict", CONFLICT_REQUEUE_S)
    idle_outcome = "unchanged" if requeue_after_s is None else "waiting"
    return ReconcileResult("changed" if wrote else idle_outcome, requeue_after_s)
