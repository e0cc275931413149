"""Lifts the scheduling gate of worker pods within the graph's GPU budget; the plan is `plan.budget`, pure.

What was lifted counts from before the call until the watch shows it, so a lost answer never exceeds the budget. How many
replicas each service held is remembered from look to look; an operator that was restarted may give the GPUs of a lost
replica to another service, and never more than the budget.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.core.errors import InvalidObjectError, NotFoundError
from penstock.kube.kinds import POD
from penstock.kube.objects.names import BUDGET_GATE
from penstock_operator.apply import Applier
from penstock_operator.plan.budget import Holding, Releases, holdings, released, releases
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
        state = self._graphs[key]
        state.released &= {each.uid for each in pods if each.gated}
        unconfirmed = set(state.released)
        plan = self.plan(key, pods, budget=budget, priorities=priorities, now_s=now_s)
        state.held = holdings(
            released(pods, {*unconfirmed, *plan.release}), state.held, replicas=replicas, now_s=now_s
        )
        names = []
        for uid in plan.release:
            state.released.add(uid)
            if await self._ungate(by_uid[uid]):
                names.append(by_uid[uid].name)
            else:
                state.released.discard(uid)
        # A release whose answer was lost is tried again: it may or may not have happened.
        for uid in unconfirmed:
            await self._ungate(by_uid[uid])
        return plan, names

    def forget(self, key: Key) -> None:
        """Forget a deleted graph."""
        self._graphs.pop(key, None)

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
