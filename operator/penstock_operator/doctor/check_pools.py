"""Turns node pools into findings: whether each service has a suitable node with the GPUs that it requests. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from penstock.api import GraphDeployment, NodePool, ServiceSpec, Toleration
from penstock.kube.objects.quantity import quantity
from penstock_operator.doctor.facts import Object, Unreadable, full_name
from penstock_operator.doctor.findings import Finding, ok, problem, unknown, warning
from penstock_operator.resources.node_pool import gpu_request
from penstock_operator.resources.pod import stated_gpu_ceiling

Requested = Mapping[str, Mapping[str, int]] | Unreadable
"""Extended resources that pods request, by node and then by resource name; Unreadable if the pods could not be
listed."""


class _Need(NamedTuple):
    """Resources that one service requests from its nodes: an extended resource (empty if none), and its amount per pod."""

    service: str
    spec: ServiceSpec
    resource: str
    per_pod: int


class _Pool(NamedTuple):
    """One node pool of one graph: name (None means any node), specification, services that use it, and the graph's GPU limit."""

    subject: str
    name: str | None
    spec: NodePool
    needs: list[_Need]
    ceiling: int | None


def pool_findings(
    raw: Object, nodes: tuple[Object, ...] | Unreadable, requested: Requested
) -> Iterator[Finding]:
    """Yield the findings about one graph's node pools: whether each service has a node with the GPUs of one pod.

    Yields nothing if the graph's manifest is invalid.

    Args:
        raw: The GraphDeployment as the API server returned it.
        nodes: All nodes.
        requested: Amount of each extended resource that pods request, by node and then by resource name.
    """
    try:
        graph = GraphDeployment.model_validate({**raw, "status": None})
    except ValueError:
        return
    name = full_name(raw)
    if isinstance(nodes, Unreadable):
        remedy = "ask for the right: list nodes; or see kubectl get nodes"
        yield unknown(f"nodes for {name}", nodes.why, remedy)
        return
    for pool in (None, *graph.spec.node_pools):
        needs = [
            _Need(service, each, *(gpu_request(graph, service) or ("", 0)))
            for service, each in graph.spec.workers.items()
            if each.node_pool == pool
        ]
        if pool is not None or any(need.resource for need in needs):
            subject = f"any node of {name}" if pool is None else f"pool {pool} of {name}"
            spec = NodePool() if pool is None else graph.spec.node_pools[pool]
            yield from _pool(_Pool(subject, pool, spec, needs, stated_gpu_ceiling(raw)), nodes, requested)


def _pool(pool: _Pool, nodes: tuple[Object, ...], requested: Requested) -> Iterator[Finding]:
    selector = sorted(pool.spec.node_selector.items())
    labels = [f"{key}={value}" for key, value in selector]
    matching = [
        each
        for each in nodes
        if all(each["metadata"].get("labels", {}).get(key) == value for key, value in selector)
    ]
    if not matching:
        message = f"no node has the labels {' and '.join(labels)}" if labels else "there is no node"
        fix = (
            f"kubectl label node NODE {' '.join(labels)}, or correct spec.nodePools.{pool.name}.nodeSelector"
        )
        yield (problem if pool.needs else warning)(
            pool.subject, message, fix if labels else "kubectl get nodes"
        )
        return
    usable = [each for each in matching if _is_usable(each)]
    if not usable:
        show = f"kubectl get nodes{' -l ' if labels else ''}{','.join(labels)}; kubectl uncordon NODE"
        yield problem(pool.subject, f"none of its {len(matching)} nodes is ready and schedulable", show)
        return
    refused = {each["metadata"]["name"]: _taints(each, pool.spec.tolerations) for each in usable}
    open_nodes = [each for each in usable if not refused[each["metadata"]["name"]]]
    taints = [taint for each in refused.values() for taint in each]
    if taints:
        names = ", ".join(dict.fromkeys(map(_shown, taints)))
        message = f"{len(usable) - len(open_nodes)} of {len(usable)} nodes are tainted {names}"
        where = (
            "the service's podTemplate" if pool.name is None else f"spec.nodePools.{pool.name}.tolerations"
        )
        match = f"value: {taints[0]['value']}" if taints[0].get("value") else "operator: Exists"
        toleration = f"{{key: {taints[0]['key']}, {match}, effect: {taints[0]['effect']}}}"
        yield (warning if open_nodes else problem)(pool.subject, message, f"add to {where}: {toleration}")
    if open_nodes:
        yield from _gpus(pool, open_nodes, requested)


def _is_usable(node: Object) -> bool:
    conditions = node.get("status", {}).get("conditions", ())
    ready = next((each["status"] for each in conditions if each["type"] == "Ready"), "Unknown")
    return ready == "True" and not node.get("spec", {}).get("unschedulable", False)


def _taints(node: Object, tolerations: tuple[Toleration, ...]) -> list[Mapping[str, str]]:
    """Return the taints that keep pods with these tolerations off a node."""
    return [
        each
        for each in node.get("spec", {}).get("taints", ())
        if each["effect"] != "PreferNoSchedule" and not any(_tolerates(one, each) for one in tolerations)
    ]


def _shown(taint: Mapping[str, str]) -> str:
    value = f"={taint['value']}" if taint.get("value") else ""
    return f"{taint['key']}{value}:{taint['effect']}"


def _tolerates(toleration: Toleration, taint: Mapping[str, str]) -> bool:
    if toleration.effect not in (None, "", taint["effect"]):
        return False
    if toleration.key is not None and toleration.key != taint["key"]:
        return False
    return toleration.operator == "Exists" or (toleration.value or "") == taint.get("value", "")


def _gpus(pool: _Pool, nodes: list[Object], requested: Requested) -> Iterator[Finding]:
    with_gpus = [need for need in pool.needs if need.resource]
    if not with_gpus:
        yield ok(pool.subject, f"{len(nodes)} nodes; no service requests their GPUs")
        return
    resource = with_gpus[0].resource  # all services of a pool use the pool's resource
    offered = {
        each["metadata"]["name"]: int(
            quantity(each.get("status", {}).get("allocatable", {}).get(resource, 0)) or 0
        )
        for each in nodes
    }
    total = sum(offered.values())
    if not total:
        remedy = "check the device plugin: kubectl get daemonsets -A; kubectl describe node NODE"
        yield problem(pool.subject, f"none of its {len(nodes)} nodes offers {resource}", remedy)
        return
    yield from _shortages(pool, with_gpus, total, max(offered.values()))
    if isinstance(requested, Unreadable):
        use = f"; the number in use is unknown: {requested.why}"
    else:
        in_use = sum(requested.get(node, {}).get(resource, 0) for node in offered)
        use = f": {in_use} in use, {total - in_use} free"
    yield ok(pool.subject, f"{len(offered)} nodes with {total} {resource}{use}")


def _shortages(pool: _Pool, needs: list[_Need], total: int, largest: int) -> Iterator[Finding]:
    resource, now, maximum = needs[0].resource, 0, 0
    for need in needs:
        now += need.spec.first_replicas * need.spec.nodes_per_replica * need.per_pod
        maximum += need.spec.replica_bounds[1] * need.spec.nodes_per_replica * need.per_pod
        if need.per_pod > largest:
            message = f"{need.service} requests {need.per_pod} {resource} on one node; the largest node has {largest}"
            remedy = f"lower services.{need.service}.gpusPerReplica, or raise its nodesPerReplica"
            yield problem(pool.subject, message, remedy)
    maximum = maximum if pool.ceiling is None else min(maximum, pool.ceiling)
    has = f"{resource}, the nodes have {total}"
    if now > total:
        yield problem(pool.subject, f"its services start with {now} {has}", "add nodes, or lower replicas")
    elif maximum > total:
        remedy = "add nodes, or lower maxReplicas or planner.maxGpuBudget"
        message = f"its services may grow to {maximum} {has}; more replicas stay pending"
        yield warning(pool.subject, message, remedy)
