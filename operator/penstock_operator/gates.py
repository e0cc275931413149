"""Lifts the scheduling gate of worker pods within the graph's GPU budget; the plan is `plan.budget`, pure.

What was lifted counts from before the call until the watch shows it, so a lost answer never exceeds the budget. How many
replicas each service held is remembered from look to look; an operator that was restarted may give the GPUs of a lost
replica to another service, and never more than the budget.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from penstock.kube.kinds import POD
from penstock.kube.objects.names import BUDGET_GATE
from penstock.kube.objects.refusals import RefusalKind, Refusals, WriteRefusal
from penstock_operator.apply import Applier
from penstock_operator.plan.budget import Holding, Releases, Waiting, holdings, released, releases
from penstock_operator.plan.pods import PodView
from penstock_operator.queue import Key


@dataclass(slots=True)
class _GraphGates:
    """Uids of one graph's pods whose release the watch has not shown yet, and what its services hold."""

    released: set[str] = field(default_factory=set)
    held: dict[str, Holding] = field(default_factory=dict)


class Gates:
    """Remembers per graph which releases the watch has not shown yet, and how many replicas held GPUs."""

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
    ) -> Releases:
        """Return the releases that the budget allows now; arguments as in `ungate`."""
        state = self._graphs[key]
        pods = released(pods, state.released)
        return releases(pods, budget=budget, priorities=priorities, held=state.held, now_s=now_s)

    def held(self, key: Key, pods: Sequence[PodView]) -> int:
        """Return the GPUs that a graph's workers hold, those whose release the watch has not shown yet included."""
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
    ) -> tuple[Releases, list[str]]:
        """Ungate the worker pods that the budget allows now; return the plan, and the ungated pods' names.

        ``replicas`` are, by service, the number that its workload is to have; more are not given back to it. A pod whose
        release is refused waits, and its GPUs go to the next in line.
        """
        by_uid = {each.uid: each for each in pods}
        state = self._graphs[key]
        state.released &= {each.uid for each in pods if each.gated}
        unconfirmed = set(state.released)
        names: list[str] = []
        refused: dict[str, Waiting] = {}
        while True:
            able = [each for each in pods if each.uid not in refused]
            plan = self.plan(key, able, budget=budget, priorities=priorities, now_s=now_s)
            for uid in plan.release:
                state.released.add(uid)
                pod = by_uid[uid]
                refusal = await self._ungate(pod, refusals)
                if refusal is None:
                    names.append(pod.name)
                else:
                    refused[uid] = Waiting(uid, pod.name, pod.service, str(refusal), refusal.kind.value)
                    state.released.discard(uid)
            if not any(uid in refused for uid in plan.release):
                break
        state.held = holdings(released(pods, state.released), state.held, replicas=replicas, now_s=now_s)
        # A release whose answer was lost is tried again: it may or may not have happened.
        for uid in unconfirmed:
            await self._ungate(by_uid[uid], refusals)
        waiting = sorted([*plan.waiting, *refused.values()], key=lambda each: each.name)
        return replace(plan, waiting=tuple(waiting)), names

    def forget(self, key: Key) -> None:
        """Forget a deleted graph."""
        self._graphs.pop(key, None)

    async def _ungate(self, pod: PodView, refusals: Refusals) -> WriteRefusal | None:
        """Remove the gate from this very pod; return why it certainly stays, None where it may be gone."""
        path = f"/spec/schedulingGates/{pod.gates.index(BUDGET_GATE)}"
        patch = [
            {"op": "test", "path": "/metadata/uid", "value": pod.uid},
            {"op": "test", "path": f"{path}/name", "value": BUDGET_GATE},
            {"op": "remove", "path": path},
        ]
        with refusals.of(f"Pod {pod.name}: its scheduling gate", "Ungate") as attempt:
            await self._applier.patch(POD.of({"name": pod.name, "namespace": pod.namespace}), patch)
        refusal = attempt.refusal
        if refusal is None or refusal.kind is RefusalKind.GONE or attempt.may_have_happened:
            return None  # another pod of that name, or the gate is gone already: the watch will say which
        return refusal
