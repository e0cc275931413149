"""Leaders of the operator end one after the other while what they carry out changes: specification, budget, rollouts."""

from __future__ import annotations

import contextlib
import random
import signal

import pytest
from operating import (
    BudgetWatch,
    edit,
    graph,
    has_round,
    pods_of,
    process,
    says,
    scale,
    set_round,
    until,
)

from penstock.kube.kinds import GRAPH_DEPLOYMENT

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

LEADERS = 16
"""Chosen: some five minutes, most of them the terms of Leases that nobody gave back."""

CANDIDATES = 2
"""That exist at the same time. One that froze and continues stands again: whichever of them leads next is right."""

LEADS = "penstock_operator_leader 1.0"
BUDGETS = (2, 3, 4, 6)


class ReleaseWatch(BudgetWatch):
    """Notes each release that takes a graph above its budget: the newest, or the one before, which may still be read."""

    def __init__(self, client, namespace, budget):
        super().__init__(client, namespace)
        self.budgets = [budget]
        self.excess = []
        self._held = 0

    def _changed(self, change, pod):
        super()._changed(change, pod)
        held = self.held()
        if held > self._held and held > max(self.budgets[-2:]):
            self.excess.append((held, self.budgets[-2:]))
        self._held = held


class Edits:
    """Random edits of the graph, and what they asked for last."""

    def __init__(self, rng, client, namespace, watch):
        self._rng, self._client, self._namespace, self._watch = rng, client, namespace, watch
        self.number = 0

    async def make(self):
        """Change one thing."""
        self.number += 1
        what = self._rng.choice(("roll", "budget", "decode", "prefill"))
        if what == "roll":
            await set_round(self._client, self._namespace, self.number)
        elif what == "budget":
            await self.set_budget(self._rng.choice(BUDGETS))
        else:
            await scale(self._client, self._namespace, what, self._rng.randint(1, 3))

    async def set_budget(self, gpus):
        """Change the budget; the watch knows first."""
        self._watch.budgets.append(gpus)
        await edit(self._client, self._namespace, {"planner": {"maxGpuBudget": gpus}})


async def leading(candidates):
    """Return the candidate that leads; None: none says so."""
    for each in candidates:
        if await says(each[1], "/metrics", LEADS)():
            return each
    return None


@pytest.mark.nightly
async def test_leaders_change_while_spec_budget_and_rollouts_do(crds, kwok, make_node, client, namespace):
    """Told to end, killed or frozen amid seeded edits: no release above the budget, and the last edits come about."""
    make_node(gpus=16)
    rng = random.Random(11)
    await client.create(graph(namespace), field_manager="test")
    watch = ReleaseWatch(client, namespace, 4)
    edits = Edits(rng, client, namespace, watch)
    async with watch.on():
        with contextlib.ExitStack() as stack:
            candidates = [stack.enter_context(process(crds.kubeconfig, namespace))]
            leader = await until(lambda: leading(candidates), "the first leader")
            await until(lambda: pods_of(client, namespace, "decode"), "a worker")
            for number in range(LEADERS):
                while len(candidates) < CANDIDATES:
                    candidates.append(stack.enter_context(process(crds.kubeconfig, namespace)))
                    await until(says(candidates[-1][1], "/healthz"), f"candidate {number}")
                for _ in range(rng.randint(1, 4)):
                    await edits.make()
                how = rng.choice((signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP))
                leader[0].send_signal(how)
                candidates.remove(leader)
                await edits.make()
                before, leader = (
                    leader,
                    await until(lambda: leading(candidates), f"leader {number} after {how.name}"),
                )
                if how == signal.SIGSTOP:  # it stands again, as any other
                    before[0].send_signal(signal.SIGCONT)
                    candidates.append(before)
            await edits.set_budget(4)
            await set_round(client, namespace, edits.number + 1)
            await scale(client, namespace, "prefill", 1)
            await scale(client, namespace, "decode", 3)

            async def right():
                live = await client.get(GRAPH_DEPLOYMENT, "g", namespace=namespace)
                services = live["status"].get("services", {})
                found = {name: services.get(name, {}).get("ready") for name in ("prefill", "decode")}
                is_current = live["status"]["observedGeneration"] == live["metadata"]["generation"]
                return (
                    is_current and live["status"]["phase"] == "Ready" and found == {"prefill": 1, "decode": 3}
                )

            await until(right, "what was asked for last")
            assert await has_round(client, namespace, edits.number + 1)
    assert watch.excess == []
    assert watch.seen > LEADERS
