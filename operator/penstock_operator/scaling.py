"""Plans the current number of replicas of every service, and executes the next step of the necessary drains.

`plan` writes nothing, so that objects are built with its numbers before the first write. The replicas are written
together with the workload.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from penstock.gpu_pool.bid import sizes
from penstock.gpu_pool.reclaim import cut_drain_message, drain_grace_s
from penstock.kube.events import EventMessage
from penstock.kube.kinds import POD, SCALING_ADAPTER
from penstock.kube.objects.names import DELETION_COST_ANNOTATION, DRAIN_ANNOTATION, child_name
from penstock.kube.objects.refusals import Refusals
from penstock_operator.apply import Applier
from penstock_operator.draining import Drains, scale_message
from penstock_operator.gates import Gates
from penstock_operator.observed import ObservedGraph
from penstock_operator.plan.budget import UngatePlan, blocked, blocked_on_budget
from penstock_operator.plan.diagnose import refusal
from penstock_operator.plan.drain import (
    LimitedReplicas,
    ScalePlan,
    ServicePool,
    limited_replicas,
    replicas_while_paused,
    with_one_more,
)
from penstock_operator.plan.pods import PodView
from penstock_operator.plan.replacement import cordoned_nodes, replacements
from penstock_operator.plan.replicas import ReplicasPlan, RoleSwitch, ServiceState
from penstock_operator.plan.rollout import rollout_view
from penstock_operator.plan.switch import keeping_switched_workers, plan_switches, pods_kept_for_switch
from penstock_operator.pools.grant import bids_of, with_wants, within_grant
from penstock_operator.workloads import (
    is_own,
    known_replicas,
    replicas_of,
    template_generation,
    workload_of,
)


class Scaling:
    """Plans the number of replicas of each service of a graph, and drains the workers above this number.

    A worker that drains finishes its requests and gets no new ones, and is deleted then.
    """

    def __init__(self, drains: Drains, gates: Gates, applier: Applier) -> None:
        self._applier = applier
        self._drains = drains
        self._gates = gates

    async def plan(self, graph: ObservedGraph) -> ReplicasPlan:
        """Return the number of replicas and the next scaling step (such as pods to drain) of each service.

        This method only reads: the graph's observed state, and the load of pods that may be removed.
        """
        pods = graph.workers
        allowed = self._gates.plan(
            graph.key,
            pods,
            budget=graph.effective.gpus,
            priorities=graph.model.spec.priorities,
            now_s=graph.now_s,
        )
        services, first_replicas, bid = _service_states(graph)
        for name, pool in _pools(graph, services, allowed).items():
            plan = await self._drains.plan(pool, now_s=graph.now_s)
            services[name] = replace(services[name], plan=plan)
        spec = graph.model.spec
        kept_gated = pods_kept_for_switch(spec, services, pods)
        switches = plan_switches(spec, services, pods, now_s=graph.now_s)
        services = keeping_switched_workers(services, switches)
        return ReplicasPlan(services, first_replicas, blocked(allowed, pods), switches, kept_gated, bid)

    async def drain(self, graph: ObservedGraph, plan: ReplicasPlan, refusals: Refusals) -> list[EventMessage]:
        """Execute the drains in ``plan``: mark pods, and switch the role of drained workers; return the messages to emit as Events.

        Args:
            graph: The graph with its observed state.
            plan: Result of `plan` for the graph.
            refusals: Collects the writes that the API server rejects.
        """
        messages = []
        for name, state in plan.services.items():
            if state.plan is None:
                continue
            pods = [each for each in graph.workers if each.service == name]
            await self._drains.mark(state.plan, pods, now_s=graph.now_s, refusals=refusals)
            text = scale_message(name, state.plan, state.bounds.replicas)
            if text is not None:
                reason = "Draining" if state.plan.start_drain else "Restored"
                messages.append(EventMessage(reason, text, action="Drain"))
            messages += _cut_drains(graph, name, state.plan, pods)
        return [*messages, *await self._switch(graph, plan.switches, refusals)]

    async def _switch(
        self, graph: ObservedGraph, switches: Sequence[RoleSwitch], refusals: Refusals
    ) -> list[EventMessage]:
        """Give drained workers the other role by copying the labels of the pods that they replace; return the messages to emit.

        Each switch is one write, which can be repeated.
        """
        messages = []
        for each in switches:
            worker, own, new = each.worker, _labels(graph, each.worker), _labels(graph, each.replaced)
            labels = dict.fromkeys(own, None) | new
            annotations = {DRAIN_ANNOTATION: None, DELETION_COST_ANNOTATION: None}
            head = {"name": worker.name, "namespace": worker.namespace}
            change = {"labels": labels, "annotations": annotations, "uid": worker.uid}
            with refusals.of(f"Pod {worker.name}: its role", "Switch") as attempt:
                await self._applier.patch(POD.of(head), {"metadata": change})
            if attempt.refusal is None:
                text = f"{worker.name} has drained and serves {each.replaced.service}, so that no new pod has to start"
                messages.append(EventMessage("RoleSwitched", text, action="Switch"))
        return messages


def _labels(graph: ObservedGraph, pod: PodView) -> dict[str, Any]:
    return dict(graph.snapshot.pods[POD.kind, pod.name]["metadata"].get("labels", {}))


def _cut_drains(
    graph: ObservedGraph, name: str, plan: ScalePlan, pods: Sequence[PodView]
) -> Iterator[EventMessage]:
    """Yield a message for each worker that is ended before its requests finished, because the GPU pool reclaims its GPUs."""
    bound_s = None if graph.grant is None else graph.grant.reclaim_s
    for each in pods:
        if bound_s is None or each.drain_since_s is None or each.name not in plan.removable:
            continue
        if bound_s <= graph.now_s - each.drain_since_s < each.grace_s and each.may_hold_requests:
            text = f"{name}: {cut_drain_message(each.name, bound_s)}"
            yield EventMessage("DrainCut", text, action="Drain")


def _service_states(
    graph: ObservedGraph,
) -> tuple[dict[str, ServiceState], dict[str, int], tuple[int, ...]]:
    """Return every service's state with its bounded replicas, the first replicas of adapters that do not exist yet, and the GPU bid.

    The bid is the GPU count of each requested worker replica, the most important first; replacements for replicas on
    cordoned nodes come last.
    """
    services: dict[str, ServiceState] = {}
    wanted, first_replicas = _wanted(graph)
    bids = bids_of(
        graph.model, with_wants(graph.model, wanted, graph.wants, max_gpu_budget=graph.effective.ceiling)
    )
    if graph.grant is not None:
        asked = bids_of(graph.model, wanted)
        wanted = within_grant(wanted, asked, gpus=graph.grant.gpus, pool=graph.grant.title)
    for name, service in graph.model.spec.services.items():
        workload = workload_of(graph.model, name, graph.snapshot.children)
        existing = replicas_of(workload)
        bounds = replicas_while_paused(wanted[name], existing) if graph.paused else wanted[name]
        state = ServiceState(service, bounds, running=bounds.replicas if existing is None else existing)
        if workload is not None:
            newest = template_generation(workload)
            rollout = rollout_view(name, service.role, workload, template_generation=newest)
            state = replace(state, rollout=rollout, refused=refusal(name, workload))
        services[name] = state
    services = _with_replacements(graph, services)
    # A replacement needs GPUs beyond the desired replicas until the worker on the cordoned node has drained.
    extra = [each.spec.gpus for each in services.values() if each.replacement is not None and each.spec.gpus]
    return services, first_replicas, (*sizes(bids), *extra)


def _with_replacements(graph: ObservedGraph, services: dict[str, ServiceState]) -> dict[str, ServiceState]:
    """Return the service states; a service whose serving replicas are all on cordoned nodes gets one more if the budget has room."""
    if graph.paused:
        return services
    pods, nodes = graph.snapshot.views(), {}
    for name, state in services.items():
        if state.rollout is None or not state.rollout.rolling:
            own = [each for each in pods if each.service == name]
            is_worker = state.spec.role.is_worker
            nodes[name] = cordoned_nodes(own, wanted=state.bounds.replicas, is_drained=is_worker)
    found = replacements(
        nodes,
        {name: each.spec.gpus if each.spec.role.is_worker else 0 for name, each in services.items()},
        wanted_gpus=sum(
            each.bounds.replicas * each.spec.gpus for each in services.values() if each.spec.role.is_worker
        ),
        budget=graph.effective.gpus,
    )
    return {
        name: replace(
            state,
            replacement=found[name],
            bounds=with_one_more(state.bounds) if found[name].fits else state.bounds,
        )
        if name in found
        else state
        for name, state in services.items()
    }


def _wanted(graph: ObservedGraph) -> tuple[dict[str, LimitedReplicas], dict[str, int]]:
    """Return each service's replicas before the GPU pool's grant applies, and the first replicas of adapters that do not exist yet."""
    wanted: dict[str, LimitedReplicas] = {}
    first_replicas: dict[str, int] = {}
    for name, service in graph.model.spec.services.items():
        existing = replicas_of(workload_of(graph.model, name, graph.snapshot.children))
        desired: int | None = None
        if service.scaling is not None:
            child = child_name(graph.model.name, name)
            live = graph.snapshot.children.get((SCALING_ADAPTER.kind, child))
            if live is not None and is_own(live, graph.uid):
                desired = live["spec"].get("replicas")
            else:
                # A deleted adapter is recreated with the number of running replicas, not with the initial number.
                desired = first_replicas[child] = service.first_replicas if existing is None else existing
        wanted[name] = limited_replicas(desired, service, max_gpu_budget=graph.effective.ceiling)
    return wanted, first_replicas


def _pools(
    graph: ObservedGraph, services: dict[str, ServiceState], allowed: UngatePlan
) -> dict[str, ServicePool]:
    """Return the pods and target of each worker service, as input of the drain plan."""
    pods = graph.workers
    # A rollout that waits for GPUs which only a scale-down can free does not progress, so it must not block that.
    waiting = blocked_on_budget(allowed, pods)
    pools = {}
    grant = graph.grant
    is_above = grant is not None and allowed.gpus > grant.gpus
    reclaim_s = None if grant is None else grant.reclaim_s
    for name, service in graph.model.spec.workers.items():
        state = services[name]
        rollout = state.rollout
        is_rolling = rollout is not None and rollout.rolling and not rollout.stuck
        pools[name] = ServicePool(
            desired=state.bounds.replicas,
            spec_replicas=state.running,
            grace_s=drain_grace_s(
                service.termination_grace_period_seconds, reclaim_s=reclaim_s, is_above=is_above
            ),
            rolling=is_rolling and name not in waiting,
            pods=[each for each in pods if each.service == name],
            known_replicas=known_replicas(workload_of(graph.model, name, graph.snapshot.children)),
        )
    return pools
