"""Whether a graph's children are left as they are, as its user says. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from penstock.api import GraphDeployment
from penstock.kube.objects.names import RECONCILE_ANNOTATION
from penstock.operator.plan.bounds import Bounded

_DISABLED: Final = "disabled"
_STAYS: Final = "children stay as they are, while budget, scheduling gates and drains hold"


def pause_reason(graph: GraphDeployment, metadata: Mapping[str, Any]) -> str:
    """Return why the graph's children are left as they are, and how that ends; empty: they are not.

    Args:
        graph: A valid graph.
        metadata: The live object's.
    """
    if graph.spec.paused:
        return f"spec.paused is true: {_STAYS}; set it to false to go on"
    if (metadata.get("annotations") or {}).get(RECONCILE_ANNOTATION) == _DISABLED:
        return f"annotation {RECONCILE_ANNOTATION} is {_DISABLED}: {_STAYS}; remove it to go on"
    return ""


def held(asked: Bounded, running: int | None) -> Bounded:
    """Return what a paused graph keeps of a service.

    Args:
        asked: The desired number within its bounds.
        running: Replicas of its workload; None: there is no workload.
    """
    kept = running or 0
    if asked.replicas == kept:
        return asked
    return Bounded(
        kept, "Paused", f"{asked.replicas} replicas are wanted; the graph is paused and keeps {kept}"
    )
