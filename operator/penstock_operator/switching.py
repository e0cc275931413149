"""Gives drained workers the other role, by the labels of the pods whose place they take; the plan is `plan.switch`, pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.kube.events import EventMessage
from penstock.kube.kinds import POD
from penstock.kube.objects.names import DELETION_COST_ANNOTATION, DRAIN_ANNOTATION
from penstock.kube.objects.refusals import Refusals
from penstock_operator.apply import Applier
from penstock_operator.observed import ObservedGraph
from penstock_operator.plan.pods import PodView
from penstock_operator.plan.replicas import RoleSwitch


class Switching:
    """Carries role switches out; each is one write, which may be made again."""

    def __init__(self, applier: Applier) -> None:
        self._applier = applier

    async def carry_out(
        self, graph: ObservedGraph, switches: Sequence[RoleSwitch], refusals: Refusals
    ) -> list[EventMessage]:
        """Write the labels; return what to emit of it."""
        messages = []
        for each in switches:
            worker, own, new = each.worker, _labels(graph, each.worker), _labels(graph, each.place)
            labels = dict.fromkeys(own, None) | new
            annotations = {DRAIN_ANNOTATION: None, DELETION_COST_ANNOTATION: None}
            head = {"name": worker.name, "namespace": worker.namespace}
            change = {"labels": labels, "annotations": annotations, "uid": worker.uid}
            with refusals.of(f"Pod {worker.name}: its role", "Switch") as attempt:
                await self._applier.patch(POD.of(head), {"metadata": change})
            if attempt.refusal is None:
                text = f"{worker.name} has drained and serves {each.place.service}, in place of a start"
                messages.append(EventMessage("RoleSwitched", text, action="Switch"))
        return messages


def _labels(graph: ObservedGraph, pod: PodView) -> dict[str, Any]:
    return dict(graph.snapshot.pods[POD.kind, pod.name]["metadata"].get("labels", {}))
