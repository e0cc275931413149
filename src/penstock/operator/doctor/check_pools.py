"""Node pools to findings: is there a node for each service, with the GPUs that it asks for? Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from penstock.api import GraphDeployment, NodePool, ServiceSpec, Toleration
from penstock.operator.doctor.facts import (
    Finding,
    GraphFacts,
    NodeFacts,
    Object,
    Unreadable,
    ok,
    problem,
    unknown,
    warning,
)
from penstock.operator.plan.drift import quantity
from penstock.operator.resources.node_pool import gpu_request

_ANY = NodePool()


@dataclass(frozen=True, slots=True)
class _Need:
    """What one service asks of its nodes: an extended resource (empty: none) and how much of it per pod."""

    service: str
    spec: ServiceSpec
    resource: str
    per_pod: int

    def of(self, replicas: int) -> int:
        """Return how much so many replicas ask for together."""
        return replicas * self.spec.nodes_per_replica * self.per_pod


@dataclass(frozen=True, slots=True)
class _Pool:
    """One pool of one graph: its name (None: any node), its specification, who uses it, and the graph's ceiling."""

    subject: str
    name: str | None
    spec: NodePool
    needs: list[_Need]
    ceiling: int | None


def pool_findings(facts: GraphFacts, nodes: NodeFacts) -> Iterator[Finding]:
    """Yield what is to be said of one graph's pools; nothing if its manifest cannot be read."""
    try:
        graph = GraphDeployment.model_validate({**facts.graph, "status": None})
    except ValueError:
        return
    name = f"{facts.graph['metadata']['namespace']}/{graph.name}"
    if isinstance(nodes.nodes, Unreadable):
        remedy = "ask for the right: list nodes; or see kubectl get nodes"
        yield unknown(f"nodes for {name}", nodes.nodes.why, remedy)
        return
    for pool in _pools(graph, name):
        yield from _pool(pool, nodes.nodes, nodes.requested)


def _pools(graph: GraphDeployment, name: str) -> Iterator[_Pool]:
    planner = graph.spec.planner
    ceiling = planner.max_gpu_budget if planner.enabled else None
    for pool in [None, *graph.spec.node_pools]:
        needs = [_need(graph, name) for name, each in graph.spec.workers.items() if each.node_pool == pool]
        if pool is None and any(need.resource for need in needs):
            yield _Pool(f"any node of {name}", None, _ANY, needs, ceiling)
        elif pool is not None:
            yield _Pool(f"pool {pool} of {name}", pool, graph.spec.node_pools[pool], needs, ceiling)


def _need(graph: GraphDeployment, service: str) -> _Need:
    resource, per_pod = gpu_request(graph, service) or ("", 0)
    return _Need(service, graph.spec.services[service], resource, per_pod)


def _pool(
    pool: _Pool, nodes: tuple[Object, ...], requested: Mapping[str, Mapping[str, int]] | Unreadable
) -> Iterator[Finding]:
    matching = [each for each in nodes if _matches(each, pool.spec.node_selector)]
    labels = [f"{key}={value}" for key, value in sorted(pool.spec.node_selector.items())]
    if not matching:
        message = f"no node carries {' and '.join(labels)}" if labels else "there is no node"
        remedy = (
            f"kubectl label node NODE {' '.join(labels)}, or correct spec.nodePools.{pool.name}.nodeSelector"
        )
        report = problem if pool.needs else warning
        yield report(pool.subject, message, remedy if labels else "kubectl get nodes")
        return
    usable = [each for each in matching if _is_usable(each)]
    if not usable:
        show = f"kubectl get nodes{' -l ' if labels else ''}{','.join(labels)}; kubectl uncordon NODE"
        yield problem(pool.subject, f"none of its {len(matching)} nodes is ready and schedulable", show)
        return
    open_nodes, taints = _split(usable, pool.spec.tolerations)
    if taints:
        message = f"{len(usable) - len(open_nodes)} of {len(usable)} nodes are tainted {', '.join(taints)}"
        where = (
            "the service's podTemplate" if pool.name is None else f"spec.nodePools.{pool.name}.tolerations"
        )
        report = warning if open_nodes else problem
        yield report(pool.subject, message, f"add to {where}: {_toleration(taints[0])}")
    if open_nodes:
        yield from _gpus(pool, open_nodes, requested)


def _matches(node: Object, selector: Mapping[str, str]) -> bool:
    labels = node["metadata"].get("labels", {})
    return all(labels.get(key) == value for key, value in selector.items())


def _is_usable(node: Object) -> bool:
    conditions = node.get("status", {}).get("conditions", ())
    ready = next((each["status"] for each in conditions if each["type"] == "Ready"), "Unknown")
    return ready == "True" and not node.get("spec", {}).get("unschedulable", False)


def _split(nodes: list[Object], tolerations: tuple[Toleration, ...]) -> tuple[list[Object], list[str]]:
    """Return the nodes whose taints are all tolerated, and the taints that keep pods from the others."""
    open_nodes: list[Object] = []
    taints: dict[str, None] = {}
    for node in nodes:
        refused = [
            each
            for each in node.get("spec", {}).get("taints", ())
            if each["effect"] != "PreferNoSchedule" and not any(_tolerates(one, each) for one in tolerations)
        ]
        if not refused:
            open_nodes.append(node)
        for each in refused:
            value = f"={each['value']}" if each.get("value") else ""
            taints[f"{each['key']}{value}:{each['effect']}"] = None
    return open_nodes, list(taints)


def _tolerates(toleration: Toleration, taint: Mapping[str, str]) -> bool:
    if toleration.effect not in (None, "", taint["effect"]):
        return False
    if toleration.key is not None and toleration.key != taint["key"]:
        return False
    return toleration.operator == "Exists" or (toleration.value or "") == taint.get("value", "")


def _toleration(taint: str) -> str:
    key, _, effect = taint.rpartition(":")
    name, has_value, value = key.partition("=")
    if has_value:
        return f"{{key: {name}, value: {value}, effect: {effect}}}"
    return f"{{key: {name}, operator: Exists, effect: {effect}}}"


def _gpus(
    pool: _Pool, nodes: list[Object], requested: Mapping[str, Mapping[str, int]] | Unreadable
) -> Iterator[Finding]:
    asked = [need for need in pool.needs if need.resource]
    if not asked:
        yield ok(pool.subject, f"{len(nodes)} nodes; no service asks them for GPUs")
        return
    resource = asked[0].resource  # one per pool: the pool names it
    here = {each["metadata"]["name"]: _allocatable(each, resource) for each in nodes}
    if not any(here.values()):
        remedy = "check the device plugin: kubectl get daemonsets -A; kubectl describe node NODE"
        yield problem(pool.subject, f"none of its {len(nodes)} nodes offers {resource}", remedy)
        return
    yield from _shortages(pool, asked, here)
    yield _use(pool.subject, resource, here, requested)


def _shortages(pool: _Pool, needs: list[_Need], here: Mapping[str, int]) -> Iterator[Finding]:
    total, largest, resource = sum(here.values()), max(here.values()), needs[0].resource
    for need in needs:
        if need.per_pod > largest:
            message = (
                f"{need.service} asks for {need.per_pod} {resource} on one node, the largest has {largest}"
            )
            remedy = f"lower services.{need.service}.gpusPerReplica, or raise its nodesPerReplica"
            yield problem(pool.subject, message, remedy)
    now = sum(need.of(need.spec.replicas) for need in needs)
    most = sum(need.of(need.spec.replica_bounds[1]) for need in needs)
    most = most if pool.ceiling is None else min(most, pool.ceiling)
    if now > total:
        message = f"its services start with {now} {resource}, the nodes have {total}"
        yield problem(pool.subject, message, "add nodes, or lower replicas")
    elif most > total:
        message = (
            f"its services may grow to {most} {resource}, the nodes have {total}; more replicas stay pending"
        )
        yield warning(pool.subject, message, "add nodes, or lower maxReplicas or planner.maxGpuBudget")


def _use(
    subject: str,
    resource: str,
    here: Mapping[str, int],
    requested: Mapping[str, Mapping[str, int]] | Unreadable,
) -> Finding:
    total = sum(here.values())
    if isinstance(requested, Unreadable):
        return ok(
            subject,
            f"{len(here)} nodes with {total} {resource}; how many are taken is not known: {requested.why}",
        )
    taken = sum(requested.get(node, {}).get(resource, 0) for node in here)
    return ok(subject, f"{len(here)} nodes with {total} {resource}: {taken} taken, {total - taken} free")


def _allocatable(node: Object, resource: str) -> int:
    return int(quantity(node.get("status", {}).get("allocatable", {}).get(resource, 0)) or 0)
