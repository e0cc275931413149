"""Computes a pool's status from observation and allocation; it is written before any graph uses its grant. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

from penstock.api import ClusterGpuPool
from penstock.api.pool_rules import pool_problems
from penstock.api.rule import dotted
from penstock.core.stamps import stamp
from penstock.gpu_pool.allocator import Grant, Share
from penstock.gpu_pool.waiting import PoolRow, holdings_from_status, pool_rows, shortage_message
from penstock_operator.plan.status import ConditionResult, conditions
from penstock_operator.pools.capacity import PoolNodes, quota_problems
from penstock_operator.pools.keys import graph_of
from penstock_operator.pools.observe import PoolMember, PoolObservation, Status, rows_of
from penstock_operator.pools.share_out import PoolShares, guarantees

VALID: Final = "Valid"
GUARANTEES_MET: Final = "GuaranteesMet"
CEILING_RESPECTED: Final = "CeilingRespected"
NODES_COUNTED: Final = "NodesCounted"
MAX_SHOWN: Final = 20
"""Maximum number of graphs of a pool in the status of each of its graphs. Chosen: it bounds that status and its writes."""
QUEUE_LABEL: Final = "kueue.x-k8s.io/queue-name"
"""Label on pods with which Kueue decides when they start."""


def pool_status(observed: PoolObservation, found: PoolShares) -> dict[str, Any]:
    """Return the complete status of a pool, for server-side apply.

    Args:
        observed: Observation on which the allocation was based.
        found: Grants of all graphs, from `share_out`.
    """
    members, nodes, total = observed.members, observed.nodes, found.total
    guaranteed_gpus = guarantees(found.gpus, members)
    rows = [
        _row(name, members[name], share, found.grants.get(name), guaranteed_gpus[name])
        for name, share in sorted(found.shares.items())
    ]
    held = sum(row["held"] for row in rows)
    results = [
        _valid(list(problems_of(observed, found))),
        _guarantees_met(rows, members),
        _ceiling(held, total),
    ]
    known = observed.last_count
    if nodes is not None:
        results.append(_counted(observed, nodes))
        known = known if nodes.gpus is None else nodes.gpus
    return {
        **_head(results, old=observed.status, generation=observed.generation, now_s=observed.now_s),
        "gpus": {
            "total": total,
            "held": held,
            "draining": sum(each.draining for each in members.values()),
            "free": max(0, total - held),
            "unavailable": found.unavailable,
            "borrowed": sum(row["borrowed"] for row in rows),
            **({} if nodes is None or known is None else {"counted": known}),
        },
        "graphs": rows,
    }


def refused_status(problem: str, *, old: Status | None, generation: int, now_s: float) -> dict[str, Any]:
    """Return the status of a pool whose own manifest is invalid; the grants in the old status remain.

    Args:
        problem: Sentence that says why the manifest is invalid.
        old: Current status; None if there is none.
        generation: ``metadata.generation`` of the pool.
        now_s: Current Unix time in seconds.
    """
    unchanged = {key: each for key, each in (old or {}).items() if key in {"gpus", "graphs"}}
    return {**_head([_valid([problem])], old=old, generation=generation, now_s=now_s), **unchanged}


def shortage_in(status: Status | None, name: str) -> str:
    """Return a sentence about the graphs that occupy GPUs which graph ``name`` lacks, from the pool's ``status``.

    Returns an empty string if the graph lacks no GPUs or is not in the status.
    """
    holdings = holdings_from_status(status)
    if name not in holdings:
        return ""
    return shortage_message(name, holdings, lambda at_s: f"at {stamp(at_s)}")


def own_budget_message(graph: Mapping[str, Any], *, wanted: int, pool_gpus: int) -> str:
    """Return a sentence if a graph's own budget, which is below the pool's GPUs, limits the graph now; else an empty string.

    Args:
        graph: The GraphDeployment as the API server returned it. Its budget may be a default that an older API version
            wrote.
        wanted: Number of GPUs that the graph requests from its pool.
        pool_gpus: Number of GPUs of the pool.
    """
    own = (graph["spec"].get("planner") or {}).get("maxGpuBudget")
    if not isinstance(own, int) or own >= pool_gpus or wanted < own:
        return ""
    return f"limited by planner.maxGpuBudget ({own}), below the pool's {pool_gpus}; remove the key to use the pool's limit"


def allocation_of(status: Status | None, name: str) -> tuple[str, int, int]:
    """Return three values about graph ``name`` from its pool's status: sentence about GPUs that it lacks, guaranteed GPUs, requested GPUs.

    Returns ``("", 0, 0)`` if there is no status or the graph is not in it.
    """
    row = rows_of(status).get(name, {})
    return shortage_in(status, name), row.get("guaranteed", 0), row.get("wanted", 0)


def listed_graphs(status: Status | None, name: str) -> tuple[PoolRow, ...]:
    """Return the graphs of a GPU pool that the status of graph ``name`` shows: this graph, then those that hold the most GPUs.

    At most 20 graphs (`MAX_SHOWN`) are returned. ``status`` is the pool's status. The result is empty if the graph is not
    in it.
    """
    rows = pool_rows(holdings_from_status(status))
    if all(each.graph != name for each in rows):
        return ()
    rows.sort(key=lambda each: (each.graph != name, -each.held, each.graph))
    return tuple(rows[:MAX_SHOWN])


def problems_of(observed: PoolObservation, found: PoolShares) -> Iterator[str]:
    """Yield a sentence for each problem of a pool, its graphs and its namespaces' ResourceQuotas; nothing if there are none.

    Args:
        observed: The pool with its graphs, nodes and quotas.
        found: Result of allocating its GPUs.
    """
    pool = observed.pool
    graphs = [each.graph for each in observed.members.values() if each.graph is not None]
    for path, message in pool_problems(pool, graphs, found.gpus):
        yield f"{dotted(path)}: {message}"
    for name, other in sorted(observed.in_other_pool.items()):
        yield f"graph {name} belongs to {other}, which is older; change one of them so that only one matches it"
    for graph in graphs:
        queued = sorted(name for name, each in graph.spec.workers.items() if _is_queued(each.pod_template))
        if queued:
            yield (
                f"graph {pool.called(graph)}: pods of {', '.join(queued)} carry {QUEUE_LABEL}, so Kueue also decides when they start, "
                "and a granted GPU may stay idle until then; use the pool or Kueue on these nodes"
            )
    for name in sorted(observed.without_planner):
        yield f"graph {name} has planner.enabled: false and therefore no GPU budget; enable it, or change the entries so that none matches it"
    for namespace, gpus in sorted(needed_by_namespace(observed, found.total).items()):
        shown = namespace if isinstance(pool, ClusterGpuPool) else None
        yield from quota_problems(
            observed.quotas.get(namespace, ()), pool.spec.resource, gpus, namespace=shown
        )


def needed_by_namespace(observed: PoolObservation, total: int) -> Mapping[str, int]:
    """Return how many GPUs the ResourceQuotas of each namespace must allow, by namespace.

    For a GpuPool the number is ``total``, the number of GPUs of the pool; for a ClusterGpuPool it is the number of
    GPUs guaranteed to the graphs in the namespace. ``observed`` is the pool with its graphs.
    """
    if not isinstance(observed.pool, ClusterGpuPool):
        return {observed.pool.metadata.namespace or "": total}
    guaranteed = Counter[str]()
    for name, each in observed.members.items():
        if each.entry is not None:
            guaranteed[graph_of(("", observed.pool.name), name)[0]] += each.entry.guaranteed_gpus
    return guaranteed


def _head(
    results: Sequence[ConditionResult], *, old: Status | None, generation: int, now_s: float
) -> dict[str, Any]:
    return {
        "observedGeneration": generation,
        "conditions": conditions(
            sorted(results, key=lambda each: each.type),
            old=(old or {}).get("conditions") or (),
            generation=generation,
            now=stamp(now_s),
        ),
    }


def _is_queued(pod_template: Mapping[str, Any]) -> bool:
    labels = (pod_template.get("metadata") or {}).get("labels") or {}
    return QUEUE_LABEL in labels


def _row(name: str, member: PoolMember, share: Share, grant: Grant | None, guaranteed: int) -> dict[str, Any]:
    wanted = member.held if grant is None else grant.wanted
    row: dict[str, Any] = {
        "name": name,
        "guaranteed": guaranteed,
        "held": member.held,
        "granted": share.gpus,
        "wanted": wanted,
        "target": share.gpus if grant is None else grant.target,
        "borrowed": max(0, member.held - guaranteed),
        "shortfall": 0 if grant is None else max(0, min(guaranteed, grant.target) - share.gpus),
        "serial": share.serial,
        "maxHeld": share.max_held,
    }
    if member.drains.duration_s is not None:
        row["drainSeconds"] = math.ceil(member.drains.duration_s)
    times = {
        "gainedTime": share.gained_s,
        "lostTime": share.lost_s,
        "returnTime": member.drains.expected_end_s,
    }
    return {**row, **{key: stamp(at_s) for key, at_s in times.items() if at_s is not None}}


def _valid(problems: Collection[str]) -> ConditionResult:
    if problems:
        return ConditionResult(VALID, False, "InvalidSpec", "; ".join(problems))
    return ConditionResult(VALID, True, "Valid", "guarantees and graphs fit into the pool")


def _guarantees_met(rows: Sequence[Mapping[str, Any]], members: Mapping[str, PoolMember]) -> ConditionResult:
    shortfalls = [
        f"{row['name']} lacks {row['shortfall']} of {row['guaranteed']} GPUs"
        for row in rows
        if row["shortfall"]
    ]
    if not shortfalls:
        return ConditionResult(GUARANTEES_MET, True, "Met", "every guarantee is satisfied")
    returning = [
        f"{row['name']} returns {row['maxHeld'] - row['granted']}"
        for row in rows
        if row["maxHeld"] > row["granted"] and members[row["name"]].held > row["granted"]
    ]
    return ConditionResult(GUARANTEES_MET, False, "Waiting", "; ".join([*shortfalls, *returning]))


def _counted(observed: PoolObservation, nodes: PoolNodes) -> ConditionResult:
    known = observed.last_count
    if nodes.gpus is not None:
        return ConditionResult(NODES_COUNTED, True, "Counted", nodes.message)
    if observed.pool.spec.gpus is not None:
        text = "using spec.gpus"
    elif known is not None:
        text = f"using the last known count of {known} GPUs"
    else:
        text = "the GPUs were never counted, so the graphs keep what they hold and gain nothing; correct the cause, or set spec.gpus"
    return ConditionResult(NODES_COUNTED, False, "NotKnown", f"{nodes.message}; {text}")


def _ceiling(held: int, gpus: int) -> ConditionResult:
    used = f"{held} of {gpus} GPUs are in use"
    if held > gpus:
        text = f"{used}; no new workers start until enough workers exit"
        return ConditionResult(CEILING_RESPECTED, False, "OverPool", text)
    return ConditionResult(CEILING_RESPECTED, True, "WithinPool", used)
