"""Builds a graph's desired objects, writes them in the order that a rollout allows, and deletes obsolete children."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from penstock.core.errors import InvalidSpecError
from penstock.core.lru_cache import LruCache
from penstock.kube.events import EventMessage, EventRecorder
from penstock.kube.objects.names import ROLE_LABEL, child_name
from penstock.kube.objects.refusals import Refusals
from penstock_operator.apply import Applied, Applier, Owner, name_of
from penstock_operator.draining import Drains, pods_of
from penstock_operator.observed import ObservedGraph
from penstock_operator.plan.agreement import RolloutOrder, rollout_order
from penstock_operator.plan.drift import with_content_digest
from penstock_operator.plan.replicas import ReplicasPlan, ServiceState
from penstock_operator.plan.retirement import replicas_to_keep
from penstock_operator.queue import Key
from penstock_operator.resources.accelerators import uncounted_devices
from penstock_operator.resources.children import adapter, children
from penstock_operator.resources.files import absent_files
from penstock_operator.resources.metadata import needed_kinds
from penstock_operator.router_secret import RouterSecrets
from penstock_operator.trim import Object
from penstock_operator.workloads import (
    WORKLOADS,
    label_of,
    obsolete,
    replicas_of,
    template_changed,
    with_generations,
    with_template_digest,
)

BUILT: Final = 64
"""Number of graphs whose desired objects are cached for the next reconcile; unchanged graphs are not reconciled and
need none. Chosen: five megabytes."""


class WantedObjects:
    """Builds the desired objects of graphs: ScalingAdapters, workloads, Services, ConfigMaps and so on.

    They are cached, because the next reconcile of a graph mostly builds the same ones.
    """

    def __init__(self) -> None:
        self._built: LruCache[Key, tuple[tuple[object, ...], list[Object]]] = LruCache(BUILT)

    def of(self, graph: ObservedGraph, plan: ReplicasPlan) -> list[Object]:
        """Return the graph's desired ScalingAdapters and its other desired objects, each annotated with a digest of its content.

        Args:
            graph: The graph with its observed state.
            plan: Number of replicas of every service, and the next scaling steps.

        Raises:
            InvalidSpecError: The graph's podTemplates use something that the operator does not allow, or pods lack
                files that the graph names.
        """
        replicas = {name: each.number for name, each in plan.services.items()}
        max_unavailable = plan.unavailable(graph.effective.gpus)
        known = (graph.uid, graph.model, replicas, max_unavailable, graph.context)
        built = self._built.get(graph.key)
        if built is None or built[0] != known:
            scaled = [name for name, each in plan.services.items() if each.spec.scaling is not None]
            adapters = [adapter(graph.model, name, graph.context, replicas=None) for name in scaled]
            others = children(graph.model, graph.context, replicas=replicas, unavailable=max_unavailable)
            if problems := list(absent_files(graph.model, others)):
                raise InvalidSpecError(problems)
            built = (
                known,
                [with_content_digest(each) for each in (*adapters, *map(with_template_digest, others))],
            )
            self._built.put(graph.key, built)
        return built[1]

    def forget(self, key: Key) -> None:
        """Drop the desired objects that are cached for a deleted graph; does nothing if there are none."""
        self._built.forget(key)


@dataclass(frozen=True, slots=True)
class WriteResult:
    """Result of writing a graph's objects.

    Attributes:
        applied: Result of creating and applying the children.
        services: State of each service by its name, with the replicas that its workload has now and the reason why a
            new pod template has to wait.
        has_obsolete: Whether children that the graph no longer desires were found; they have been deleted or are being
            drained.
        is_draining: Whether workers of a workload that the graph no longer desires are still draining.
    """

    applied: Applied
    services: Mapping[str, ServiceState]
    has_obsolete: bool
    is_draining: bool


class Convergence:
    """Writes the objects that graphs need, and deletes objects that graphs no longer need.

    Objects that workers and routers must agree on are written in an order in which, if possible, requests are served
    throughout a rollout; workers are drained (finish their requests) before they are deleted.
    """

    def __init__(self, applier: Applier, recorder: EventRecorder, drains: Drains) -> None:
        self._applier = applier
        self._recorder = recorder
        self._drains = drains
        self._secrets = RouterSecrets(applier)

    async def write(
        self, graph: ObservedGraph, plan: ReplicasPlan, wanted: list[Object], refusals: Refusals
    ) -> WriteResult:
        """Apply the desired objects that can be written now, and delete the graph's objects that are no longer desired.

        Objects that have to wait for another service's rollout are left out; a later reconcile writes them.

        Args:
            graph: The graph with its observed state.
            plan: Number of replicas of every service, and the next scaling steps.
            wanted: Desired objects from `WantedObjects.of`.
            refusals: Collects the writes that the API server rejects.

        Returns:
            What was written and deleted, and the services whose new pod template has to wait.
        """
        live = graph.snapshot.children
        names = {child_name(graph.model.name, name): name for name in graph.model.spec.services}
        workloads = {names[each["metadata"]["name"]]: each for each in wanted if each["kind"] in WORKLOADS}
        changed = self._rolling(workloads, live)
        views = [each.rollout for each in plan.services.values() if each.rollout is not None]
        order = rollout_order(wanted, live, workloads, views, changed=changed)
        is_new = any((each["kind"], each["metadata"]["name"]) not in live for each in workloads.values())
        await self._warn(graph, order, of_devices=is_new or bool(changed))
        rolling = [workloads[name]["metadata"]["name"] for name in changed]
        now = with_generations([each for each in wanted if each not in order.later], live, rolling)
        secret = await self._secrets.make(graph, wanted, refusals)
        if secret is not None:
            await self._recorder.emit(graph.raw, secret)
        owner = Owner(graph.uid, graph.model.name, first_replicas=plan.first_replicas)
        applied = await self._applier.apply(now, live, owner, refusals=refusals)
        waiting = {name: workloads[name] for name in order.waiting if name in workloads}
        await self._write_numbers(waiting, live, refusals)
        services = {
            name: replace(each, hold_reason=order.waiting.get(name, ""), running=each.number)
            for name, each in plan.services.items()
        }
        routers = {name: each for name, each in services.items() if not each.spec.role.is_worker}
        moving = {name for name, each in routers.items() if each.rollout is None or each.rollout.rolling}
        is_behind = bool(moving or routers.keys() & (changed | order.waiting.keys()))
        has_obsolete, is_draining = await self._prune(
            graph, wanted, services, refusals, routers_behind=is_behind
        )
        return WriteResult(applied, services, has_obsolete, is_draining)

    def forget(self, key: Key) -> None:
        """Drop everything that is cached for a deleted graph; does nothing if there is nothing."""
        self._secrets.forget(key)

    def _rolling(self, workloads: Mapping[str, Object], live: Mapping[tuple[str, str], Object]) -> set[str]:
        """Return the services whose pods would be replaced by a rollout if their workload was written now."""
        rolling = set()
        for name, desired in workloads.items():
            existing = live.get((desired["kind"], desired["metadata"]["name"]))
            if existing is not None and template_changed(
                desired, existing, self._applier.differences(desired, existing)
            ):
                rolling.add(name)
        return rolling

    async def _write_numbers(
        self, waiting: Mapping[str, Object], live: Mapping[tuple[str, str], Object], refusals: Refusals
    ) -> None:
        """Write only the replicas of workloads whose new pod template has to wait."""
        for desired in waiting.values():
            existing, number = live[desired["kind"], desired["metadata"]["name"]], desired["spec"]["replicas"]
            if replicas_of(existing) != number:
                with refusals.of(f"{name_of(existing)}: its replicas", "Apply"):
                    await self._applier.patch(existing, {"spec": {"replicas": number}})

    async def _warn(self, graph: ObservedGraph, order: RolloutOrder, *, of_devices: bool) -> None:
        """Emit warning Events about an edit's effects: requests that its rollout refuses, and devices that the GPU budget does not count."""
        warnings = [] if order.disruption is None else [("RequestsRefused", order.disruption)]
        if of_devices:
            found = uncounted_devices(graph.model, graph.context.gpu_resources, graph.context.claimed_gpus)
            warnings += [("DeviceNotCounted", f"{each.path}: {each.message}") for each in found]
        for reason, text in warnings:
            await self._recorder.emit(graph.raw, EventMessage(reason, text, "Apply", is_warning=True))

    async def _prune(
        self,
        graph: ObservedGraph,
        wanted: list[Object],
        services: Mapping[str, ServiceState],
        refusals: Refusals,
        *,
        routers_behind: bool,
    ) -> tuple[bool, bool]:
        """Delete the graph's obsolete children, workloads after their pods; return whether there are any, and whether pods drain."""
        names = {(each["kind"], each["metadata"]["name"]) for each in wanted}
        # Not built because their CustomResourceDefinition is missing; they are still desired.
        missing = {each.kind for each in needed_kinds(graph.model.spec) if each not in graph.context.kinds}
        names |= {key for key in graph.snapshot.children if key[0] in missing}
        workloads, rest = obsolete(graph.snapshot.children, names, owner_uid=graph.uid)
        is_draining = False
        for child in workloads:
            keep = replicas_to_keep(
                label_of(child, ROLE_LABEL),
                pods_of(child, graph.snapshot),
                services,
                graph.snapshot.views(),
                routers_behind=routers_behind,
            )
            is_draining |= await self._drains.retire(
                child, graph.snapshot, keep=keep, now_s=graph.now_s, refusals=refusals
            )
        for child in rest:
            if not child["metadata"].get("deletionTimestamp"):
                with refusals.of(name_of(child), "Delete"):
                    await self._applier.delete(child)
        return bool(workloads or rest), is_draining
