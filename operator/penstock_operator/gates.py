"""Removes the scheduling gate of worker pods within the graph's GPU budget; the decisions are pure functions in `plan.budget`.

The GPUs of an ungated pod count from before the API call until the watch shows the change, so that a lost answer
never exceeds the budget. The number of replicas that each service has with GPUs is remembered between reconciles. An
operator that was restarted may give the GPUs of a lost replica to another service, but never exceeds the budget.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from penstock.kube.kinds import POD
from penstock.kube.objects.names import BUDGET_GATE
from penstock.kube.objects.refusals import RefusalKind, Refusals, WriteRefusal
from penstock_operator.apply import Applier
from penstock_operator.plan.budget import (
    ServiceReservation,
    UngatePlan,
    WaitingPod,
    plan_ungating,
    reservations,
    with_gates_removed,
)
from penstock_operator.plan.pods import PodView
from penstock_operator.queue import Key


@dataclass(slots=True)
class _GraphGates:
    """Ungating state of one graph.

    Attributes:
        released: UIDs of pods that were ungated but that the watch still shows as gated.
        held: Replicas with GPUs, by service.
    """

    released: set[str] = field(default_factory=set)
    held: dict[str, ServiceReservation] = field(default_factory=dict)


class Gates:
    """Removes the scheduling gates with which worker pods wait, unscheduled, until their graph's GPU budget has room.

    It remembers for each graph the pods whose gate it has removed although the watch does not show it yet, and the
    number of replicas of each service that occupy GPUs, so that the GPUs of a lost replica stay reserved for its
    replacement.
    """

    def __init__(self, applier: Applier) -> None:
        self._applier = applier
        self._graphs: defaultdict[Key, _GraphGates] = defaultdict(_GraphGates)

    def plan(
        self,
        key: Key,
        pods: Sequence[PodView],
        *,
        budget: int | None,
        priorities: Mapping[str, int],
        now_s: float,
    ) -> UngatePlan:
        """Return the pods whose scheduling gate can be removed now within the GPU budget, and those that have to wait; writes nothing.

        Args:
            key: Namespace and name of the graph.
            pods: The graph's worker pods.
            budget: Maximum number of GPUs of the graph; None means no limit.
            priorities: Priority of each service that has one; GPUs go to the highest first.
            now_s: Current Unix time in seconds.
        """
        state = self._graphs[key]
        pods = with_gates_removed(pods, state.released)
        return plan_ungating(pods, budget=budget, priorities=priorities, held=state.held, now_s=now_s)

    def held(self, key: Key, pods: Sequence[PodView]) -> int:
        """Return the number of GPUs that a graph's workers occupy; workers that wait at their scheduling gate do not count.

        Pods whose scheduling gate was removed, so that they can start, count even if the watch does not show it yet.

        Args:
            key: Namespace and name of the graph.
            pods: The graph's worker pods.
        """
        return self.plan(key, pods, budget=None, priorities={}, now_s=0.0).gpus

    async def ungate(
        self,
        key: Key,
        pods: Sequence[PodView],
        *,
        budget: int | None,
        priorities: Mapping[str, int],
        replicas: Mapping[str, int],
        now_s: float,
        refusals: Refusals,
    ) -> tuple[UngatePlan, list[str]]:
        """Remove the scheduling gate, with which worker pods wait for GPUs, from the pods that fit into the graph's GPU budget now.

        If the API server rejects the removal for a pod, that pod waits, and its GPUs go to the next pod in line.

        Args:
            key: Namespace and name of the graph.
            pods: The graph's worker pods whose gate can be removed or that occupy GPUs.
            budget: Maximum number of GPUs of the graph; None means no limit.
            priorities: Priority of each service that has one; GPUs go to the highest first.
            replicas: Desired replicas by service. The GPUs of lost replicas stay reserved for the service only up to
                this number of replicas.
            now_s: Current Unix time in seconds.
            refusals: Collects the writes that the API server rejects.

        Returns:
            Which pods can start and which wait (rejected ones among them), and the names of the pods whose gate was
            removed now.
        """
        by_uid = {each.uid: each for each in pods}
        state = self._graphs[key]
        state.released &= {each.uid for each in pods if each.gated}
        unconfirmed = set(state.released)
        names: list[str] = []
        refused: dict[str, WaitingPod] = {}
        while True:
            able = [each for each in pods if each.uid not in refused]
            plan = self.plan(key, able, budget=budget, priorities=priorities, now_s=now_s)
            for uid in plan.ungate:
                state.released.add(uid)
                pod = by_uid[uid]
                refusal = await self._ungate(pod, refusals)
                if refusal is None:
                    names.append(pod.name)
                else:
                    refused[uid] = WaitingPod(uid, pod.name, pod.service, str(refusal), refusal.kind.value)
                    state.released.discard(uid)
            if not any(uid in refused for uid in plan.ungate):
                break
        state.held = reservations(
            with_gates_removed(pods, state.released), state.held, replicas=replicas, now_s=now_s
        )
        # Retry ungating pods that the watch still shows as gated: the answer to the earlier call may have been lost.
        for uid in unconfirmed:
            await self._ungate(by_uid[uid], refusals)
        waiting = sorted([*plan.waiting, *refused.values()], key=lambda each: each.name)
        return replace(plan, waiting=tuple(waiting)), names

    def forget(self, key: Key) -> None:
        """Drop what is remembered about the pods and replicas of a deleted graph; does nothing if there is nothing."""
        self._graphs.pop(key, None)

    async def _ungate(self, pod: PodView, refusals: Refusals) -> WriteRefusal | None:
        """Remove the gate from the pod with this UID; return the refusal if the gate certainly remains, None if it may be removed."""
        path = f"/spec/schedulingGates/{pod.gates.index(BUDGET_GATE)}"
        patch = [
            {"op": "test", "path": "/metadata/uid", "value": pod.uid},
            {"op": "test", "path": f"{path}/name", "value": BUDGET_GATE},
            {"op": "remove", "path": path},
        ]
        with refusals.of(f"Pod {pod.name}: its scheduling gate", "Ungate") as attempt:
            await self._applier.patch(POD.of({"name": pod.name, "namespace": pod.namespace}), patch)
        refusal = attempt.refusal
        if refusal is None or refusal.kind is RefusalKind.GONE or attempt.may_have_succeeded:
            return None  # the name has another pod, or the gate is already removed; the watch will show which
        return refusal
