"""Lifts the scheduling gate of worker pods within the graph's GPU budget; the plan is `plan.budget`, pure.

What was lifted counts from before the call until the watch shows it, so a lost answer never exceeds the budget. How many
replicas each service held is remembered from look to look; an operator that was restarted may give the GPUs of a lost
replica to another service, and never more than the budget.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.core.errors import InvalidObjectError, NotFoundError
from penstock.kube.kinds import POD
from penstock.kube.objects.names import BUDGET_GATE
from penstock.operator.apply import Applier
from penstock.operator.plan.budget import Holding, Releases, holdings, released, releases
from penstock.operator.plan.pods import PodView
from penstock.operator.queue import Key


class Gates:
    """Remembers per graph which releases the watch has not shown yet, and how many replicas held GPUs."""

    def __init__(self, applier: Applier) -> None:
        self._applier = applier
        self._released: dict[Key, set[str]] = {}
        self._held: dict[Key, dict[str, Holding]] = {}

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
        return releases(
            released(pods, self._pending(key, pods)),
            budget=budget,
            priorities=priorities,
            held=self._held.get(key, {}),
            now_s=now_s,
        )

    async def ungate(
        self,
        key: Key,
        pods: Sequence[PodView],
        *,
        budget: int | None,
        priorities: Mapping[str, int],
        replicas: Mapping[str, int],
        now_s: float,
    ) -> tuple[Releases, list[str]]:
        """Ungate the worker pods that the budget allows now; return the plan, and the ungated pods' names.

        ``replicas`` are, by service, the number that its workload is to have; more are not given back to it.
        """
        by_uid = {each.uid: each for each in pods}
        pending = self._pending(key, pods)
        self._remember(key, pending)
        plan = self.plan(key, pods, budget=budget, priorities=priorities, now_s=now_s)
        self._held[key] = holdings(
            released(pods, {*pending, *plan.release}),
            self._held.get(key, {}),
            replicas=replicas,
            now_s=now_s,
        )
        names = []
        for uid in plan.release:
            pending.add(uid)
            self._remember(key, pending)
            if await self._ungate(by_uid[uid]):
                names.append(by_uid[uid].name)
            else:
                pending.discard(uid)
        # A release whose answer was lost is tried again: it may or may not have happened.
        for uid in pending - set(plan.release):
            await self._ungate(by_uid[uid])
        return plan, names

    def forget(self, key: Key) -> None:
        """Forget a deleted graph."""
        self._released.pop(key, None)
        self._held.pop(key, None)

    def _pending(self, key: Key, pods: Sequence[PodView]) -> set[str]:
        """Return the released pods that still look gated."""
        gated = {each.uid for each in pods if each.gated}
        return self._released.get(key, set()) & gated

    def _remember(self, key: Key, pending: set[str]) -> None:
        if pending:
            self._released[key] = pending
        else:
            self._released.pop(key, None)

    async def _ungate(self, pod: PodView) -> bool:
        """Remove the gate from this very pod; return False if it is certain that nothing was ungated."""
        path = f"/spec/schedulingGates/{pod.gates.index(BUDGET_GATE)}"
        patch = [
            {"op": "test", "path": "/metadata/uid", "value": pod.uid},
            {"op": "test", "path": f"{path}/name", "value": BUDGET_GATE},
            {"op": "remove", "path": path},
        ]
        try:
            await self._applier.patch(POD.of({"name": pod.name, "namespace": pod.namespace}), patch)
        except NotFoundError:
            return False
        except InvalidObjectError:
            return True  # another pod of that name, or the gate is gone already: the watch will say which
        return True
