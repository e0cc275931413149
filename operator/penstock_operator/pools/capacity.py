"""Counts the GPUs that a pool's nodes offer to its graphs, and finds ResourceQuotas that allow fewer than the pool. Pure.

Nodes that cannot run pods, and GPUs of foreign pods (pods that belong to no graph of the pool), are not counted.
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
    """Result of counting the GPUs of a pool's nodes.

    Attributes:
        gpus: Number of GPUs that the pool's graphs can use; None if unknown, in which case ``spec.gpus`` or the last
            count applies.
        message: Sentence with the number of nodes and what was not counted, or with the reason why the number is
            unknown.
        unavailable: Number of GPUs of the pool's nodes that its graphs cannot use, because the node is not ready or
            cordoned, or because other pods hold the GPUs.
    """

    gpus: int | None
    message: str
    unavailable: int = 0


def usable_nodes(nodes: Sequence[Object], resource: str) -> tuple[dict[str, int], dict[str, int]]:
    """Return two mappings: GPUs of each usable node by its name, and GPUs of each unusable node by a text with the reason.

    A node is unusable if it is NotReady or cordoned (accepts no new pods). Nodes without GPUs are in neither mapping.

    Args:
        nodes: Nodes of the pool.
        resource: Extended resource that is counted, such as ``nvidia.com/gpu``.
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
    """Return the number of GPUs requested by unfinished pods that do not belong to a graph of the pool.

    Args:
        pods: Pods on the pool's nodes.
        resource: Extended resource that is counted.
        graphs: Namespace and name of the pool's graphs, whose pods are counted elsewhere.
    """
    total = 0
    for pod in pods:
        metadata = pod["metadata"]
        graph = (metadata["namespace"], (metadata.get("labels") or {}).get(GRAPH_LABEL))
        if graph in graphs or pod.get("status", {}).get("phase") in FINISHED_PHASES:
            continue
        for container in pod.get("spec", {}).get("containers", ()):
            requested = container.get("resources", {}).get("requests", {}).get(resource, 0)
            total += int(quantity(requested) or 0)
    return total


def counted(
    nodes: Sequence[Object],
    usable: Mapping[str, int],
    left_out: Mapping[str, int],
    foreign: int | None,
) -> PoolNodes:
    """Return the number of GPUs of a pool's nodes that its graphs can use, with a sentence about GPUs that were not counted.

    Not counted are GPUs of unusable nodes, and GPUs that pods outside the pool's graphs hold.

    If no node has GPUs, or if all nodes are NotReady, the number is unknown (None) instead of 0: after a wrong
    selector, or a network failure that separates all kubelets, 0 would remove every worker.

    Args:
        nodes: Nodes of the pool.
        usable: GPUs of each usable node by its name, from `usable_nodes`.
        left_out: GPUs of unusable nodes by a text with the reason, from `usable_nodes`.
        foreign: GPUs requested by pods that do not belong to a graph of the pool, from `foreign_gpus`; None if the
            operator has no right to list pods of other namespaces.
    """
    if not nodes:
        return PoolNodes(None, "no node has the labels of nodeSelector")
    if not usable and not any(_is_ready(each) for each in nodes):
        return PoolNodes(None, f"all {len(nodes)} nodes are NotReady, which suggests a network failure")
    if not usable and not left_out:
        return PoolNodes(None, f"none of the {len(nodes)} nodes offers the resource")
    total = sum(usable.values())
    messages = [f"{len(usable)} nodes offer {total} GPUs", *left_out]
    if foreign is None:
        messages.append(
            "GPUs of other pods are unknown: the operator has no right to list pods in other namespaces"
        )
    elif foreign:
        messages.append(f"pods outside the pool's graphs hold {foreign}")
    offered = max(0, total - (foreign or 0))
    return PoolNodes(offered, "; ".join(messages), total + sum(left_out.values()) - offered)


def quota_problems(
    quotas: Sequence[Object], resource: str, gpus: int, *, namespace: str | None = None
) -> list[str]:
    """Return a sentence about each ResourceQuota that allows fewer GPUs than the pool.

    Args:
        quotas: ResourceQuotas of one namespace; those with scopes apply only to some pods and are ignored.
        resource: Extended resource of the pool.
        gpus: GPUs of the pool; for a ClusterGpuPool, the GPUs guaranteed to graphs in the namespace.
        namespace: Namespace of the quotas, for a ClusterGpuPool; None for a GpuPool, which is in the same namespace.
    """
    messages = []
    for each in sorted(quotas, key=lambda quota: str(quota["metadata"]["name"])):
        spec = each.get("spec") or {}
        allowed = quantity((spec.get("hard") or {}).get(f"requests.{resource}"))
        if (
            allowed is not None
            and allowed < gpus
            and not spec.get("scopes")
            and not spec.get("scopeSelector")
        ):
            name = each["metadata"]["name"]
            what, key = f"the pool's {gpus}", "spec.gpus"
            if namespace is not None:
                name = f"{namespace}/{name}"
                what, key = f"the {gpus} guaranteed to graphs there", "guaranteedGpus"
            messages.append(
                f"ResourceQuota {name} allows {int(allowed)} {resource}, fewer than {what}, so workers within the grant are rejected; "
                f"raise it or lower {key}"
            )
    return messages


def _allocatable(node: Object, resource: str) -> int:
    return int(quantity(node.get("status", {}).get("allocatable", {}).get(resource, 0)) or 0)


def _is_ready(node: Object) -> bool:
    conditions = node.get("status", {}).get("conditions", ())
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
