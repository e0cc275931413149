"""Carries out the scale plans of a graph's worker services: asks for loads, marks victims, restores pods.

The plan itself is pure (`penstock.operator.plan.drain`); replicas are written with the workload, afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from penstock.core.errors import NotFoundError
from penstock.core.stamps import stamp
from penstock.kube.kinds import POD
from penstock.kube.objects.names import (
    DELETION_COST_ANNOTATION,
    DRAIN_ANNOTATION,
    DRAINING,
    SERVING,
    SERVING_LABEL,
)
from penstock.operator.apply import Applier
from penstock.operator.loads import LoadReader
from penstock.operator.plan.drain import plan_scale
from penstock.operator.plan.pods import PodView
from penstock.operator.plan.scale import Load, ScalePlan
from penstock.operator.trim import Object

SETTLE_S: Final = 3.0
"""After its marking a pod may still get requests from routers that have not heard; real seconds, chosen."""


@dataclass(frozen=True, slots=True)
class DrainingPool:
    """One worker service as the drains see it.

    Attributes:
        service: Its name.
        desired: Replicas wanted, within bounds.
        spec_replicas: The workload's number now; the desired number while there is no workload.
        grace_s: Longest drain, seconds.
        rolling: Whether a rollout makes progress.
        pods: Its pods, as `trim_pod` leaves them.
        has_senders: Whether a router may still send its pods requests, so that a marked one has to wait until
            all have heard of it.
        known_replicas: Replicas that the workload's controller counts; more than ``pods`` shows while the
            view of pods is behind.
    """

    service: str
    desired: int
    spec_replicas: int
    grace_s: float
    rolling: bool
    pods: tuple[Object, ...]
    has_senders: bool = True
    known_replicas: int = 0

    @property
    def views(self) -> list[PodView]:
        """Return its pods as the plans read them."""
        return [each["view"] for each in self.pods]


class Drains:
    """Takes the next step of every service's scaling."""

    def __init__(self, applier: Applier, loads: LoadReader) -> None:
        self._applier = applier
        self._loads = loads

    async def loads(self, pods: Sequence[Object]) -> dict[str, Load | None]:
        """Return what each pod does, by name; None where it is unknown."""
        return await self._loads.read([(each["view"], each["ip"]) for each in pods])

    async def step(self, pool: DrainingPool, *, now_s: float) -> ScalePlan:
        """Mark and unmark pods as the plan says; return the plan, whose ``spec_replicas`` is yet to be written.

        Args:
            pool: The service.
            now_s: Seconds since the epoch.

        Raises:
            ClusterError: the API server does not answer or refused.
        """
        loads = await self._loads.read(_to_ask(pool))
        plan = _plan(pool, loads, now_s)
        patches = pod_patches(plan, now_s=now_s)
        by_name = {each["metadata"]["name"]: each for each in pool.pods}
        for name, patch in patches.items():
            view: PodView = by_name[name]["view"]
            patch["metadata"]["uid"] = view.uid
            pod = {"apiVersion": POD.api_version, "kind": POD.kind, "metadata": by_name[name]["metadata"]}
            try:
                await self._applier.patch(pod, patch)
            except NotFoundError:
                continue  # it is gone already; the watch will say so
        return plan


def pod_patches(plan: ScalePlan, *, now_s: float) -> dict[str, dict[str, Any]]:
    """Return one merge patch per pod that the plan changes, victims first.

    Args:
        plan: Of one service.
        now_s: Beginning of the drains that start now, seconds since the epoch.
    """
    patches: dict[str, dict[str, Any]] = {}

    def metadata(name: str) -> dict[str, Any]:
        found: dict[str, Any] = patches.setdefault(name, {"metadata": {}})["metadata"]
        return found

    for name in plan.begin:
        metadata(name)["labels"] = {SERVING_LABEL: DRAINING}
        metadata(name)["annotations"] = {DRAIN_ANNOTATION: stamp(now_s)}
    for name in plan.restore:
        metadata(name)["labels"] = {SERVING_LABEL: SERVING}
        metadata(name)["annotations"] = {DRAIN_ANNOTATION: None}
    for name, cost in plan.deletion_costs.items():
        value = None if cost == 0 else str(cost)
        metadata(name).setdefault("annotations", {})[DELETION_COST_ANNOTATION] = value
    return patches


def _to_ask(pool: DrainingPool) -> list[tuple[PodView, str]]:
    """Return the pods whose load the plan needs: none at rest; all while victims are to be chosen."""
    able = [each for each in pool.pods if each["view"].alive and each["view"].may_hold_requests]
    alive = sum(view.alive for view in pool.views)
    if alive <= pool.desired or (pool.rolling and pool.desired < pool.spec_replicas):
        return []
    marked = [each for each in able if each["view"].draining]
    asked = marked if len(marked) >= alive - pool.desired else able
    return [(each["view"], each["ip"]) for each in asked]


def _plan(pool: DrainingPool, loads: Mapping[str, Load | None], now_s: float) -> ScalePlan:
    return plan_scale(
        pool.views,
        desired=pool.desired,
        current_spec_replicas=pool.spec_replicas,
        loads=loads,
        now_s=now_s,
        grace_s=pool.grace_s,
        settle_s=SETTLE_S if pool.has_senders else 0.0,
        status_replicas=pool.known_replicas,
        rolling=pool.rolling,
    )


def scale_message(service: str, plan: ScalePlan, desired: int) -> str | None:
    """Return what begins now, for an Event; None if nothing does."""
    if plan.begin:
        return f"{service}: {_names(plan.begin)} finish their requests before {service} shrinks to {desired}"
    if plan.restore:
        return f"{service}: {_names(plan.restore)} serve again; {desired} replicas are wanted"
    return None


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
