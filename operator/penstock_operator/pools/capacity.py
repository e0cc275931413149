"""How many GPUs the nodes of a pool offer its graphs now, and which ResourceQuotas allow fewer than it shares out. Pure.

Nodes that cannot take pods, and foreign pods, are left out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.kube.objects.names import FINISHED_PHASES, GRAPH_LABEL
from penstock.kube.objects.quantity import quantity

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PoolNodes:
    """What was counted.

    Attributes:
        gpus: That the pool's graphs may hold; None: not known, and what the pool says or what was counted last counts.
        words: From how many nodes, and what was left out; or why nothing is known.
        unavailable: GPUs of these nodes that were left out.
    """

    gpus: int | None
    words: str
    unavailable: int = 0


def usable_nodes(nodes: Sequence[Object], resource: str) -> tuple[dict[str, int], dict[str, int]]:
    """Return the GPUs of each node that takes pods, and of the others that have some, by what is said of them.

    Args:
        nodes: Those of the pool.
        resource: Extended resource that is counted.
    """
    found, left_out = {}, {}
    for node in nodes:
        name, gpus = node["metadata"]["name"], _allocatable(node, resource)
        if not gpus:
            continue
        if not _is_ready(node):
            left_out[f"{name} is NotReady ({gpus})"] = gpus
        elif node.get("spec", {}).get("unschedulable"):
            left_out[f"{name} is cordoned ({gpus})"] = gpus
        else:
            found[name] = gpus
    return found, left_out


def foreign_gpus(pods: Sequence[Object], resource: str, graphs: Collection[tuple[str, str]]) -> int:
    """Return the GPUs that unfinished pods of others ask for.

    Args:
        pods: On the pool's nodes.
        resource: Extended resource that is counted.
        graphs: Of the pool, whose pods are counted as held; namespace and name.
    """
    total = 0
    for pod in pods:
        metadata = pod["metadata"]
        graph = (metadata["namespace"], (metadata.get("labels") or {}).get(GRAPH_LABEL))
        if graph in graphs or pod.get("status", {}).get("phase") in FINISHED_PHASES:
            continue
        for container in pod.get("spec", {}).get("containers", ()):
            asked = container.get("resources", {}).get("requests", {}).get(resource, 0)
            total += int(quantity(asked) or 0)
    return total


def counted(
    nodes: Sequence[Object],
    usable: Mapping[str, int],
    left_out: Mapping[str, int],
    foreign: int | None,
) -> PoolNodes:
    """Return what the nodes offer.

    Where no node offers any, or every one is NotReady, nothing is known: a wrong selector, or a network that cuts off all
    kubelets, would end every worker.

    Args:
        nodes: Those of the pool.
        usable: As of `usable_nodes`.
        left_out: Likewise.
        foreign: As of `foreign_gpus`; None: the operator may not see other namespaces' pods.
    """
    if not nodes:
        return PoolNodes(None, "no node carries the labels of nodeSelector")
    if not usable and not any(_is_ready(each) for each in nodes):
        return PoolNodes(None, f"all {len(nodes)} nodes are NotReady, as if the network were cut")
    if not usable and not left_out:
        return PoolNodes(None, f"none of the {len(nodes)} nodes offers the resource")
    total = sum(usable.values())
    said = [f"{len(usable)} nodes offer {total} GPUs", *left_out]
    if foreign is None:
        said.append("foreign pods are not known: the operator may not list other namespaces' pods")
    elif foreign:
        said.append(f"foreign pods hold {foreign}")
    offered = max(0, total - (foreign or 0))
    return PoolNodes(offered, "; ".join(said), total + sum(left_out.values()) - offered)


def quota_problems(
    quotas: Sequence[Object], resource: str, gpus: int, *, namespace: str | None = None
) -> list[str]:
    """Return a sentence of each quota that is lower than the pool.

    Args:
        quotas: Of one namespace; one with scopes is for some pods alone and is left out.
        resource: Extended resource of the pool.
        gpus: That its graphs may hold together; of a ClusterGpuPool, what is guaranteed to those of the namespace.
        namespace: Of the quotas, in a ClusterGpuPool; None: the pool's own.
    """
    said = []
    for each in sorted(quotas, key=lambda quota: str(quota["metadata"]["name"])):
        spec = each.get("spec") or {}
        most = quantity((spec.get("hard") or {}).get(f"requests.{resource}"))
        if most is not None and most < gpus and not spec.get("scopes") and not spec.get("scopeSelector"):
            name = each["metadata"]["name"]
            what, key = f"the pool's {gpus}", "spec.gpus"
            if namespace is not None:
                name = f"{namespace}/{name}"
                what, key = f"the {gpus} guaranteed to graphs there", "guaranteedGpus"
            said.append(
                f"ResourceQuota {name} allows {int(most)} {resource}, fewer than {what}, so granted workers are refused; "
                f"raise it or lower {key}"
            )
    return said


def _allocatable(node: Object, resource: str) -> int:
    return int(quantity(node.get("status", {}).get("allocatable", {}).get(resource, 0)) or 0)


def _is_ready(node: Object) -> bool:
    conditions = node.get("status", {}).get("conditions", ())
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
