"""Reconciles one graph: observe, validate, build, compare, drain, ungate, apply, report.

Level-triggered: everything is decided from what the watches show now, so a crash between any two writes costs
a second look and a lost event costs one interval. Nothing is written that is right already. The decisions are
in `plan` and the objects in `build`, both pure; this module only puts them in order.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from penstock.api import GraphDeployment
from penstock.core.errors import ClusterError, InvalidSpecError, Problem, UnavailableError
from penstock.core.logs import get_logger
from penstock.kube.client import KubeClient
from penstock.kube.events import EventMessage, EventRecorder
from penstock.kube.informer import key_of
from penstock.kube.kinds import SCALING_ADAPTER
from penstock.kube.objects.names import child_name, drain_finalizer, paused_by
from penstock.kube.objects.refusals import RefusalKind, Refusals
from penstock.kube.objects.served import ServedSpec, current_spec, kept_spec, with_spec
from penstock_operator.apply import Applied, Applier, Owner, failure_of, name_of
from penstock_operator.cluster import Cluster, GraphSnapshot
from penstock_operator.draining import Drains, scale_message
from penstock_operator.gates import Gates
from penstock_operator.loads import MetricsReader
from penstock_operator.memory import LruCache
from penstock_operator.metrics import OperatorMetrics
from penstock_operator.namespaces import NamespaceAllowances
from penstock_operator.observed import ObservedGraph
from penstock_operator.plan.agreement import RolloutOrder, rollout_order
from penstock_operator.plan.budget import blocked, blocked_on_budget
from penstock_operator.plan.diagnose import refusal
from penstock_operator.plan.drain import WorkerPool, bounded, held
from penstock_operator.plan.drift import stamped
from penstock_operator.plan.facts import (
    ConditionFacts,
    Failure,
    ReconcileState,
    ServiceState,
    graph_facts,
    late_services,
    missing_definition,
    needed_kinds,
    observed_facts,
    worst_failure,
)
from penstock_operator.plan.rollout import rollout_view, unavailable
from penstock_operator.queue import Key
from penstock_operator.reporting import Reporter
from penstock_operator.resources.accelerators import uncounted_devices
from penstock_operator.resources.children import BuildContext, adapter, children
from penstock_operator.resources.metadata import inherit
from penstock_operator.router_secret import RouterSecrets
from penstock_operator.trim import Object
from penstock_operator.validity import ValidatedGraph, message_of, validated
from penstock_operator.workloads import (
    WORKLOADS,
    is_own,
    known_replicas,
    marked,
    obsolete,
    replicas_of,
    template_changed,
    template_generation,
    with_generations,
    workload_of,
)

DRAIN_REQUEUE_S: Final = 1.0
"""Between two reconciles while workers drain; as far apart as two readings that find one idle must be."""

UNREADY_REQUEUE_S: Final = 15.0
"""Between two reconciles while a pod is not ready, because some troubles only show by their duration. Chosen."""

MODELS: Final = 256
BUILT: Final = 64
"""Validated graphs, and graphs with their built objects, that are kept for the next reconcile; one at rest needs none.
Chosen: five megabytes each."""

CONFLICT_REQUEUE_S: Final = 60.0
"""Between two reconciles while another owner's object has a child's name. Chosen: a person has to act first."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Dependencies:
    """What the reconcilers of graphs and of ProfileRequests work with; of every build uid and namespace are the object's."""

    client: KubeClient
    cluster: Cluster
    applier: Applier
    loads: MetricsReader
    recorder: EventRecorder
    metrics: OperatorMetrics
    context: BuildContext
    allowances: NamespaceAllowances
    operator_class: str


@dataclass(frozen=True, slots=True)
class ReconcileResult:
    """How one reconcile of a graph ended: for the metrics, and when to come again though nothing changes."""

    outcome: str
    requeue_after_s: float | None = None


class Reconciler:
    """Reconciles graphs; keeps no truth of its own, only what saves work."""

    def __init__(self, parts: Dependencies) -> None:
        self._parts = parts
        self._drains = Drains(parts.applier, parts.loads)
        self._gates = Gates(parts.applier)
        self._secrets = RouterSecrets(parts.applier)
        self._models: LruCache[Key, tuple[tuple[str, int], ValidatedGraph]] = LruCache(MODELS)
        self._valid: LruCache[Key, tuple[str, ServedSpec, GraphDeployment]] = LruCache(MODELS)
        self._reporter = Reporter(parts.applier, parts.recorder)
        self._short: dict[Key, dict[str, float]] = {}
        self._settled: dict[Key, tuple[object, ...]] = {}
        self._deletions: dict[str, asyncio.Event] = {}
        self._built: LruCache[Key, tuple[tuple[object, ...], list[Object]]] = LruCache(BUILT)

    async def reconcile(self, key: Key) -> float | None:
        """Reconcile one graph; return seconds until it is to be requeued though nothing changes, or None.

        Raises:
            ClusterError: the API server does not answer, refused, or another writer was first; nothing is lost
                by looking again later.
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

    async def deleted(self, uid: str) -> None:
        """Wait until nothing is left of the graph with this UID, which is being deleted."""
        await self._deletions.setdefault(uid, asyncio.Event()).wait()
        del self._deletions[uid]

    async def refused(self, raw: Object, refusals: Refusals) -> None:
        """Say what keeps a graph from being taken up at all."""
        if refusals.lasting:
            facts = observed_facts(raw, (), failure=failure_of((), refusals))
            await self._reporter.status(raw, facts, refusals)
            await self._reporter.events(key_of(raw), raw, facts, refusals)

    def forget(self, key: Key) -> None:
        """Forget a deleted graph."""
        self._models.forget(key)
        self._valid.forget(key)
        self._settled.pop(key, None)
        self._reporter.forget(key)
        self._short.pop(key, None)
        self._built.forget(key)
        self._gates.forget(key)
        self._secrets.forget(key)

    async def _reconcile(self, key: Key) -> ReconcileResult:
        snapshot = self._parts.cluster.snapshot(key)
        raw = snapshot.graph
        if raw is None:
            self._parts.applier.forget(key[0], snapshot.children)
            self.forget(key)
            return ReconcileResult("unchanged")
        if raw["metadata"].get("deletionTimestamp"):
            return await self._delete(key, raw, snapshot)
        if self._settled.get(key) == snapshot.fingerprint():
            return ReconcileResult("unchanged")
        self._settled.pop(key, None)
        model, problems = self._validated(key, raw)
        edits = [] if model is None else [(current_spec(raw), model)]
        last = self._last_valid(key, raw)
        if last is not None and last[0].generation not in {each.generation for each, _ in edits}:
            edits.append(last)
        for served, each in edits:
            try:
                return await self._reconcile_valid(
                    await self._graph(key, each, raw, snapshot, served=served, problems=problems)
                )
            except InvalidSpecError as exc:  # before the first write
                problems = problems or exc.problems
        if not edits or not snapshot.pods:
            return await self._invalid(key, raw, snapshot, problems)
        # Nothing can be built, as when the operator allows less than before: pods start, drain and end all the same.
        served, each = edits[-1]
        graph = await self._graph(key, each, raw, snapshot, served=served, problems=problems)
        return await self._reconcile_valid(replace(graph, can_be_built=False))

    def _last_valid(self, key: Key, raw: Object) -> tuple[ServedSpec, GraphDeployment] | None:
        """Return the last edit that was carried out, from memory or else from the graph's status; None: there is none."""
        known = self._valid.get(key)
        if known is not None and known[0] == raw["metadata"]["uid"]:
            return known[1:]
        kept = kept_spec(raw)
        model = None if kept is None else validated(GraphDeployment, with_spec(raw, kept))[0]
        return None if kept is None or model is None else (kept, model)

    def _validated(self, key: Key, raw: Object) -> ValidatedGraph:
        identity = (raw["metadata"]["uid"], raw["metadata"].get("generation", 0))
        known = self._models.get(key)
        if known is None or known[0] != identity:
            known = identity, validated(GraphDeployment, raw)
            self._models.put(key, known)
        return known[1]

    async def _graph(
        self,
        key: Key,
        model: GraphDeployment,
        raw: Object,
        snapshot: GraphSnapshot,
        *,
        served: ServedSpec,
        problems: tuple[Problem, ...],
    ) -> ObservedGraph:
        cluster, spec, fingerprint = self._parts.cluster, model.spec, snapshot.fingerprint()
        kinds = [kind for kind in needed_kinds(spec) if await cluster.serves(kind)]
        context = replace(
            inherit(self._parts.context, raw["metadata"], spec.inherited_annotations),
            owner_uid=raw["metadata"]["uid"],
            namespace=key[0],
            allowed=await self._parts.allowances.of(key[0]),
            kinds=frozenset(kinds),
        )
        return ObservedGraph(
            key, model, raw, snapshot, fingerprint, context, time.time(), served=served, problems=problems
        )

    async def _reconcile_valid(self, graph: ObservedGraph) -> ReconcileResult:
        seen = ReconcileState(paused=paused_by(graph.raw), served=graph.served)
        if not graph.can_be_built:
            seen.paused = seen.paused or "the operator refuses every edit that it knows"
        self._find_desired_replicas(graph, seen)
        try:
            return await self._take_steps(graph, seen)
        except UnavailableError as exc:
            if self._parts.cluster.problem() is None:  # it answers, but not to this
                failure = Failure(RefusalKind.REJECTED, str(exc))
                with suppress(ClusterError):
                    await self._report(graph, seen, Applied(refusals=seen.refusals), failure=failure)
            raise

    async def _take_steps(self, graph: ObservedGraph, seen: ReconcileState) -> ReconcileResult:
        if graph.can_be_built:
            self._wanted(graph, seen)  # a podTemplate that cannot be laid over stops before the first write
            self._valid.put(graph.key, (graph.uid, graph.served, graph.model))
        emitted = await self._scale(graph, seen)
        applied, gone = Applied(refusals=seen.refusals), False
        if not seen.paused:
            wanted = self._wanted(graph, seen)
            applied = await self._apply(graph, seen, wanted)
            gone = await self._prune(graph, seen, wanted)
        ungated = await self._ungate(graph, seen)
        facts = await self._report(graph, seen, applied)
        for message in emitted:
            await self._parts.recorder.emit(graph.raw, message)
        await self._reporter.events(
            graph.key, graph.raw, facts, seen.refusals, applied=applied, invalid=graph.invalid
        )
        result = self._end(graph, seen, applied, wrote=bool(emitted or gone or ungated))
        is_at_rest = result == ReconcileResult("unchanged") and seen.failure is None
        if is_at_rest and self._parts.cluster.snapshot(graph.key).fingerprint() == graph.fingerprint:
            # What changed meanwhile was not part of it.
            self._settled[graph.key] = graph.fingerprint
        return result

    def _end(
        self, graph: ObservedGraph, seen: ReconcileState, applied: Applied, *, wrote: bool
    ) -> ReconcileResult:
        snapshot = self._parts.cluster.snapshot(graph.key)
        plans = (each.plan for each in seen.services.values())
        draining = any(each is not None and each.draining and not each.held for each in plans)
        unready = any(not view.ready and not view.finished for view in snapshot.views())
        unready = unready or bool(self._short.get(graph.key))
        requeue_after_s = DRAIN_REQUEUE_S if draining else UNREADY_REQUEUE_S if unready else None
        if any(not each.kind.is_lasting for each in seen.refusals.found):
            return ReconcileResult("conflict", DRAIN_REQUEUE_S)
        if seen.refusals.found:
            return ReconcileResult("refused", requeue_after_s or UNREADY_REQUEUE_S)
        if graph.problems:
            return ReconcileResult("invalid", requeue_after_s)
        if applied.conflicts:
            return ReconcileResult("conflict", CONFLICT_REQUEUE_S)
        wrote = wrote or applied.wrote
        return ReconcileResult(
            "changed" if wrote else "unchanged" if requeue_after_s is None else "waiting", requeue_after_s
        )

    def _find_desired_replicas(self, graph: ObservedGraph, seen: ReconcileState) -> None:
        """Note every service's desired number within its bounds, and the first number of adapters yet to be made."""
        for name, service in graph.model.spec.services.items():
            workload = workload_of(graph.model, name, graph.snapshot.children)
            there = replicas_of(workload)
            desired: int | None = None
            if service.scaling is not None:
                child = child_name(graph.model.name, name)
                live = graph.snapshot.children.get((SCALING_ADAPTER.kind, child))
                if live is not None and is_own(live, graph.uid):
                    desired = live["spec"].get("replicas")
                else:
                    # An adapter that was deleted comes back with the number that runs, not with the first one.
                    desired = seen.first_replicas[child] = service.replicas if there is None else there
            bounds = bounded(desired, service, max_gpu_budget=graph.budget)
            bounds = held(bounds, there) if seen.paused else bounds
            state = ServiceState(service, bounds, running=bounds.replicas if there is None else there)
            if workload is not None:
                newest = template_generation(workload)
                state.rollout = rollout_view(name, service.role, workload, template_generation=newest)
                state.refused = refusal(name, workload)
            seen.services[name] = state

    async def _scale(self, graph: ObservedGraph, seen: ReconcileState) -> list[EventMessage]:
        messages = []
        pods = graph.workers
        allowed = self._gates.plan(
            graph.key, pods, budget=graph.budget, priorities=graph.priorities, now_s=graph.now_s
        )
        seen.blocked = blocked(allowed, pods)
        # A rollout that waits for GPUs which only a scale-down can free makes no progress either.
        waiting = blocked_on_budget(allowed, pods)
        for name, service in graph.model.spec.workers.items():
            state = seen.services[name]
            rollout = state.rollout
            is_rolling = rollout is not None and rollout.rolling and not rollout.stuck
            pool = WorkerPool(
                desired=state.bounds.replicas,
                spec_replicas=state.running,
                grace_s=service.termination_grace_period_seconds,
                rolling=is_rolling and name not in waiting,
                pods=[each for each in pods if each.service == name],
                known_replicas=known_replicas(workload_of(graph.model, name, graph.snapshot.children)),
            )
            state.plan = plan = await self._drains.step(pool, now_s=graph.now_s, refusals=seen.refusals)
            text = scale_message(name, plan, pool.desired)
            if text is not None:
                messages.append(EventMessage("Draining" if plan.begin else "Restored", text, action="Drain"))
        return messages

    def _wanted(self, graph: ObservedGraph, seen: ReconcileState) -> list[Object]:
        model, services = graph.model, seen.services
        workers = [each for each in services.values() if each.spec.role.is_worker]
        replicas = {name: each.number for name, each in services.items()}
        away = {
            name: unavailable(
                role=each.spec.role,
                gpus_per_replica=each.spec.gpus,
                wanted_gpus=sum(worker.bounds.replicas * worker.spec.gpus for worker in workers),
                budget=graph.budget,
                blocked=seen.blocked.get(name, 0),
                view=each.rollout,
            )
            for name, each in services.items()
        }
        # A reconcile builds twice, and the next one mostly the same.
        known = (graph.uid, model, replicas, away, graph.context)
        built = self._built.get(graph.key)
        if built is None or built[0] != known:
            scaled = [name for name, each in services.items() if each.spec.scaling is not None]
            adapters = [adapter(model, name, graph.context, replicas=None) for name in scaled]
            others = children(model, graph.context, replicas=replicas, unavailable=away)
            built = known, [stamped(each) for each in (*adapters, *map(marked, others))]
            self._built.put(graph.key, built)
        return built[1]

    async def _apply(self, graph: ObservedGraph, seen: ReconcileState, wanted: list[Object]) -> Applied:
        live = graph.snapshot.children
        names = {child_name(graph.model.name, name): name for name in graph.model.spec.services}
        workloads = {names[each["metadata"]["name"]]: each for each in wanted if each["kind"] in WORKLOADS}
        changed: set[str] = set()
        for name, want in workloads.items():
            there = live.get((want["kind"], want["metadata"]["name"]))
            if there is not None:
                found = self._parts.applier.differences(want, there)
                if template_changed(want, there, found):
                    changed.add(name)
        views = [each.rollout for each in seen.services.values() if each.rollout is not None]
        order = rollout_order(wanted, live, workloads, views, changed=changed)
        is_new = any((each["kind"], each["metadata"]["name"]) not in live for each in workloads.values())
        await self._warn(graph, order, of_devices=is_new or bool(changed))
        rolling = [workloads[name]["metadata"]["name"] for name in changed]
        now = with_generations([each for each in wanted if each not in order.later], live, rolling)
        owner = Owner(graph.uid, graph.model.name, first_replicas=seen.first_replicas)
        secret = await self._secrets.make(graph, wanted, seen.refusals)
        if secret is not None:
            await self._parts.recorder.emit(graph.raw, secret)
        applied = await self._parts.applier.apply(now, live, owner, refusals=seen.refusals)
        for name in order.waiting.keys() & workloads.keys():  # Their new pod templates have to wait.
            want = workloads[name]
            there, number = live[want["kind"], want["metadata"]["name"]], want["spec"]["replicas"]
            if replicas_of(there) == number:
                continue
            with seen.refusals.of(f"{name_of(there)}: its replicas", "Apply"):
                await self._parts.applier.patch(there, {"spec": {"replicas": number}})
        for name, state in seen.services.items():
            state.held, state.running = order.waiting.get(name, ""), state.number
        return applied

    async def _warn(self, graph: ObservedGraph, order: RolloutOrder, *, of_devices: bool) -> None:
        """Say what an edit costs: requests that its rollout refuses, and devices that escape the budget."""
        words = [] if order.lost is None else [("RequestsRefused", order.lost)]
        if of_devices:
            found = uncounted_devices(graph.model, graph.context.gpu_resources)
            words += [("DeviceNotCounted", f"{each.path}: {each.message}") for each in found]
        for reason, message in words:
            await self._parts.recorder.emit(
                graph.raw, EventMessage(reason, message, "Apply", is_warning=True)
            )

    async def _prune(self, graph: ObservedGraph, seen: ReconcileState, wanted: list[Object]) -> bool:
        """Delete the graph's children that it no longer wants, workloads after their pods; return whether any."""
        names = {(each["kind"], each["metadata"]["name"]) for each in wanted}
        # Not built because their definition is missing; they are still wanted.
        missing = {each.kind for each in needed_kinds(graph.model.spec) if each not in graph.context.kinds}
        names |= {key for key in graph.snapshot.children if key[0] in missing}
        workloads, rest = obsolete(graph.snapshot.children, names, owner_uid=graph.uid)
        for child in workloads:
            await self._drains.retire(child, graph.snapshot, now_s=graph.now_s, refusals=seen.refusals)
        for child in rest:
            if not child["metadata"].get("deletionTimestamp"):
                with seen.refusals.of(name_of(child), "Delete"):
                    await self._parts.applier.delete(child)
        return bool(workloads or rest)

    async def _ungate(self, graph: ObservedGraph, seen: ReconcileState) -> bool:
        allowed, released = await self._gates.ungate(
            graph.key,
            graph.workers,
            budget=graph.budget,
            priorities=graph.priorities,
            replicas={name: each.running for name, each in seen.services.items()},
            now_s=graph.now_s,
            refusals=seen.refusals,
        )
        seen.waiting = allowed.waiting
        return bool(released)

    async def _report(
        self, graph: ObservedGraph, seen: ReconcileState, applied: Applied, *, failure: Failure | None = None
    ) -> ConditionFacts:
        snapshot = self._parts.cluster.snapshot(graph.key)
        generation = graph.raw["metadata"].get("generation", 0)
        facts = graph_facts(graph.model, generation, snapshot.views(), seen, now_s=graph.now_s)
        before = self._short.get(graph.key, {})
        self._short[graph.key] = since = {name: before.get(name, graph.now_s) for name in facts.short}
        facts = replace(facts, late=late_services(graph.model, since, now_s=graph.now_s))
        await self._reporter.adapters(graph.model, snapshot, facts, seen, owner_uid=graph.uid)
        # Last, so that it names every refused write but itself.
        missing = missing_definition(graph.model.spec, graph.context.kinds)
        seen.failure = worst_failure([graph.invalid, failure, applied.failure, missing])
        facts = replace(facts, failure=seen.failure)
        await self._reporter.status(graph.raw, facts, seen.refusals)
        return facts

    async def _invalid(
        self, key: Key, raw: Object, snapshot: GraphSnapshot, problems: tuple[Problem, ...]
    ) -> ReconcileResult:
        """Report every problem of a graph of which no edit was ever carried out; nothing of it is touched."""
        invalid, refusals = Failure("InvalidSpec", message_of(problems)), Refusals()
        facts = observed_facts(raw, snapshot.views(), failure=invalid)
        await self._reporter.status(raw, facts, refusals)
        await self._reporter.events(key, raw, facts, refusals, invalid=invalid)
        return ReconcileResult("invalid")

    async def _delete(self, key: Key, raw: Object, snapshot: GraphSnapshot) -> ReconcileResult:
        finalizers = raw["metadata"].get("finalizers", [])
        if drain_finalizer(self._parts.operator_class) not in finalizers:
            return ReconcileResult("unchanged")
        if "orphan" not in finalizers:  # the user wants to keep the children
            refusals = Refusals()
            step = await self._drains.delete_graph(raw, snapshot, now_s=time.time(), refusals=refusals)
            if not step.release:
                facts = observed_facts(
                    raw, snapshot.views(), failure=failure_of((), refusals), deleting=step.message
                )
                await self._reporter.status(raw, facts, refusals)
                await self._reporter.events(key, raw, facts, refusals)
                wait_s = DRAIN_REQUEUE_S if step.waits_for_idleness else UNREADY_REQUEUE_S
                return ReconcileResult("waiting", wait_s)
        log.info("graph deleted", namespace=key[0], name=key[1])
        # Kopf's handler waits for this, and kopf removes the finalizer then.
        self._deletions.setdefault(raw["metadata"]["uid"], asyncio.Event()).set()
        return ReconcileResult("changed")
