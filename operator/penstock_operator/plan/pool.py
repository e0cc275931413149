"""What the graphs of a GpuPool may hold now, and what its status says; the allocator's state is kept in that status.

Pure. `pools` brings what the watches show and writes the status before any graph acts on it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.api import GraphDeployment, PoolEntry, PoolObject
from penstock.api.pool_rules import pool_problems
from penstock.api.rule import dotted
from penstock.core.stamps import seconds, stamp
from penstock.gpu_pool.allocator import Grant, GraphBid, PoolState, PoolTerms, Share, allocate
from penstock.gpu_pool.waiting import DrainTimes, holdings_in, lacking
from penstock_operator.plan.pods import PodView
from penstock_operator.plan.pool_nodes import PoolNodes
from penstock_operator.plan.status import ConditionResult, conditions

VALID: Final = "Valid"
GUARANTEES_MET: Final = "GuaranteesMet"
CEILING_RESPECTED: Final = "CeilingRespected"
NODES_COUNTED: Final = "NodesCounted"
QUEUE_LABEL: Final = "kueue.x-k8s.io/queue-name"
"""By which Kueue takes over when a pod starts."""


@dataclass(frozen=True, slots=True)
class PoolMember:
    """One graph of a pool.

    Attributes:
        entry: Its first entry in the pool; None: none matches any more, or the graph is gone, so it gives all back.
        graph: With its labels, as it is carried out; None: unknown, and it keeps its share.
        bid: GPUs of each replica wanted, in order of need; None: unknown likewise.
        held: GPUs of its existing workers.
        leaving: Of those, of workers that drain or end.
        serial: Of the grant that it acts under; None: unknown.
        arrived_with: GPUs that it may hold while it has no share yet; None: it does not act under the pool yet.
        drains: Of its workers.
        created: When the graph was made, RFC 3339; empty: unknown.
    """

    entry: PoolEntry | None
    graph: GraphDeployment | None = None
    bid: tuple[int, ...] | None = None
    held: int = 0
    leaving: int = 0
    serial: int | None = None
    arrived_with: int | None = None
    drains: DrainTimes = field(default_factory=DrainTimes)
    created: str = ""


@dataclass(frozen=True, slots=True)
class PoolShares:
    """What the graphs may do from now on, and the state that says so.

    Attributes:
        grants, shares: By graph.
        total: GPUs that the graphs may hold together now.
        unavailable: GPUs of the pool besides, which its nodes do not offer now.
    """

    grants: Mapping[str, Grant]
    shares: Mapping[str, Share]
    total: int
    unavailable: int = 0

    @property
    def gpus(self) -> int:
        """GPUs of the pool, also those that its nodes do not offer now."""
        return self.total + self.unavailable


def entry_of(pool: PoolObject, name: str, labels: Mapping[str, str], namespace: str) -> PoolEntry | None:
    """Return the first entry that matches a graph."""
    return next((each for each in pool.spec.graphs if each.match.covers(name, labels, namespace)), None)


def leaving_gpus(pods: Iterable[PodView]) -> int:
    """Return the GPUs of workers that are marked to leave or end."""
    return sum(each.gpus for each in _leaving(pods))


def drains_after(
    before: DrainTimes | None, row: Mapping[str, Any], pods: Iterable[PodView], now_s: float
) -> DrainTimes:
    """Return how long a graph's workers take to drain.

    Args:
        before: What is known; None: nothing but ``row``, as after a restart.
        row: Of the graph, of the pool's status.
        pods: The graph's workers.
        now_s: Seconds since the epoch.
    """
    known = DrainTimes(took_s=row.get("drainSeconds")) if before is None else before
    begun = {each.uid: each.drain_since_s for each in _leaving(pods)}
    return known.after({uid: at_s for uid, at_s in begun.items() if at_s is not None}, now_s)


def gpus_of(status: Mapping[str, Any] | None) -> int | None:
    """Return a pool's GPUs by its status, also those that its nodes do not offer now; None: it has none yet."""
    gpus = (status or {}).get("gpus")
    return None if gpus is None else gpus["total"] + gpus["unavailable"]


def lacking_in(status: Mapping[str, Any] | None, name: str) -> str:
    """Return who holds what a graph lacks, by its pool's status; empty: it lacks nothing."""
    holdings = holdings_in(status)
    if name not in holdings:
        return ""
    return lacking(name, holdings, lambda at_s: f"at {stamp(at_s)}")


def own_bound(graph: Mapping[str, Any], *, wanted: int, pool_gpus: int) -> str:
    """Return that a graph wants all that its own budget lets it have, less than the pool has; empty: nothing of the kind.

    Args:
        graph: The object, whose budget may be one that the API server wrote when it had a default for it.
        wanted: GPUs that it bids for.
        pool_gpus: Of the pool.
    """
    own = (graph["spec"].get("planner") or {}).get("maxGpuBudget")
    if not isinstance(own, int) or own >= pool_gpus or wanted < own:
        return ""
    return f"limited by planner.maxGpuBudget ({own}), below the pool's {pool_gpus}; remove the key to use the pool's limit"


def _leaving(pods: Iterable[PodView]) -> Iterable[PodView]:
    present = (each for each in pods if not each.gated and not each.finished)
    return (each for each in present if each.terminating or each.drain_since_s is not None)


def shares_of(status: Mapping[str, Any] | None) -> dict[str, Share]:
    """Return the allocator's state from a pool's status."""
    return {
        row["name"]: Share(
            row["granted"],
            row["serial"],
            row["exposed"],
            seconds(row.get("gainedTime")),
            seconds(row.get("lostTime")),
        )
        for row in (status or {}).get("graphs") or ()
    }


def pool_gpus(
    pool: PoolObject, nodes: PoolNodes | None, *, counted: int | None, exposed: int
) -> tuple[int, int]:
    """Return the GPUs that a pool's graphs may hold together now, and those that its nodes have besides and do not offer.

    Nodes that are not known shrink nothing: what is written counts, without that what was counted last, and before that
    what the graphs hold, so that none gains.

    Args:
        pool: The pool.
        nodes: What its nodes offer; None: it selects none.
        counted: What they offered when they were counted last; None: never yet.
        exposed: That its graphs may hold until they act under their grants.
    """
    written = pool.spec.gpus
    if nodes is not None and nodes.gpus is not None:
        if written is None:
            return nodes.gpus, nodes.unavailable
        return min(written, nodes.gpus), max(0, written - nodes.gpus)
    if written is not None:
        return written, 0
    return exposed if counted is None else counted, 0


def guarantees(gpus: int, members: Mapping[str, PoolMember]) -> dict[str, int]:
    """Return what each graph is guaranteed: what its entry says as far as the pool has it, the oldest graph first.

    So that no user takes what another one is guaranteed, by making more graphs that an entry matches.
    """
    left, found = gpus, {}
    for name, each in sorted(members.items(), key=lambda item: (item[1].created, item[0])):
        found[name] = 0 if each.entry is None else min(each.entry.guaranteed_gpus, left)
        left -= found[name]
    return found


def share_out(
    pool: PoolObject,
    members: Mapping[str, PoolMember],
    shares: PoolState,
    now_s: float,
    *,
    nodes: PoolNodes | None = None,
    counted: int | None = None,
) -> PoolShares | None:
    """Return what every graph may hold; None while a graph that is new in the pool does not act under it yet.

    Args:
        pool: The pool.
        members: Its graphs, and those of ``shares`` of which workers are left; the others' shares are dropped.
        shares: What the last allocation left.
        now_s: Seconds since the epoch.
        nodes: What its nodes offer; None: it selects none.
        counted: What they offered when they were counted last; None: never yet.
    """
    state = {name: share for name, share in shares.items() if name in members}
    for name, each in members.items():
        if name in state:
            continue
        if each.arrived_with is None:
            return None
        state[name] = Share(each.arrived_with, 0, max(each.arrived_with, each.held))
    exposed = sum(share.exposed for share in state.values())
    total, unavailable = pool_gpus(pool, nodes, counted=counted, exposed=exposed)
    gpus = total + unavailable
    promised = guarantees(gpus, members)
    bids = {
        name: _bid(gpus, each, state[name], each.bid, promised[name])
        for name, each in members.items()
        if each.bid is not None
    }
    terms = PoolTerms(total, pool.spec.hold_seconds, pool.spec.reclaim.order)
    grants, after = allocate(terms, bids, state, now_s)
    return PoolShares(grants, after, total, unavailable)


def _bid(gpus: int, member: PoolMember, share: Share, bid: tuple[int, ...], guaranteed: int) -> GraphBid:
    serial = -1 if member.serial is None else member.serial
    if member.entry is None or member.graph is None:
        return GraphBid(0, 0, 0, (), member.held, share.serial if member.entry is None else serial)
    entry = member.entry
    most = entry.most(gpus, member.graph)
    return GraphBid(guaranteed, entry.priority.rank, most, bid, member.held, serial)


def pool_status(
    pool: PoolObject,
    members: Mapping[str, PoolMember],
    found: PoolShares,
    problems: Collection[str],
    *,
    old: Mapping[str, Any] | None,
    generation: int,
    now_s: float,
    nodes: PoolNodes | None = None,
) -> dict[str, Any]:
    """Return the complete status of a pool, for server-side apply.

    Args:
        pool: The pool.
        members: As of `share_out`.
        found: What that returned.
        problems: What is wrong with the pool beside its graphs, each as a sentence.
        old: The status there, for transition times.
        generation: Of the pool.
        now_s: Seconds since the epoch.
        nodes: As of `share_out`.
    """
    total = found.total
    promised = guarantees(found.gpus, members)
    rows = [
        _row(name, members[name], share, found.grants.get(name), promised[name])
        for name, share in sorted(found.shares.items())
    ]
    held = sum(row["held"] for row in rows)
    results = [_valid(problems), _met(rows, members), _ceiling(held, total)]
    known = ((old or {}).get("gpus") or {}).get("counted")
    if nodes is not None:
        results.append(_counted(pool, nodes, known))
        known = known if nodes.gpus is None else nodes.gpus
    return {
        "observedGeneration": generation,
        "conditions": conditions(
            sorted(results, key=lambda each: each.type),
            old=(old or {}).get("conditions") or (),
            generation=generation,
            now=stamp(now_s),
        ),
        "gpus": {
            "total": total,
            "held": held,
            "leaving": sum(each.leaving for each in members.values()),
            "free": max(0, total - held),
            "unavailable": found.unavailable,
            "borrowed": sum(row["borrowed"] for row in rows),
            **({} if nodes is None or known is None else {"counted": known}),
        },
        "graphs": rows,
    }


def refused_status(
    problems: Collection[str], *, old: Mapping[str, Any] | None, generation: int, now_s: float
) -> dict[str, Any]:
    """Return the status of a pool whose own manifest is wrong: its graphs keep what they may hold."""
    rows = conditions(
        [_valid(problems)],
        old=(old or {}).get("conditions") or (),
        generation=generation,
        now=stamp(now_s),
    )
    kept = {key: each for key, each in (old or {}).items() if key in {"gpus", "graphs"}}
    return {"observedGeneration": generation, "conditions": rows, **kept}


def problems_of(
    pool: PoolObject,
    members: Mapping[str, PoolMember],
    elsewhere: Mapping[str, str],
    unbounded: Collection[str],
    gpus: int,
) -> list[str]:
    """Return what is wrong with a pool beside its graphs, each as a sentence.

    Args:
        pool: The pool.
        members: As of `share_out`.
        elsewhere: Graphs that an older pool has already, with its kind and name.
        unbounded: Graphs without a planner, which have no budget that the pool could set.
        gpus: Of the pool.
    """
    graphs = [each.graph for each in members.values() if each.graph is not None]
    said = [f"{dotted(path)}: {message}" for path, message in pool_problems(pool, graphs, gpus)]
    said += [
        f"graph {name} draws from {other}, which is older; let one of them match it"
        for name, other in sorted(elsewhere.items())
    ]
    said += [
        f"graph {pool.called(graph)}: pods of {', '.join(queued)} carry {QUEUE_LABEL}, so Kueue too decides when they start, and "
        "a GPU that is granted may wait for it; use the pool or Kueue on these nodes"
        for graph in graphs
        if (
            queued := sorted(
                name for name, each in graph.spec.workers.items() if _is_queued(each.pod_template)
            )
        )
    ]
    said += [
        f"graph {name} has planner.enabled false, so no budget; enable it, or let no entry match it"
        for name in sorted(unbounded)
    ]
    return said


def _is_queued(pod_template: Mapping[str, Any]) -> bool:
    labels = (pod_template.get("metadata") or {}).get("labels") or {}
    return QUEUE_LABEL in labels


def moved(before: PoolState, found: PoolShares, pool: str) -> dict[str, tuple[bool, str]]:
    """Return the graphs whose grant changed: whether it was lowered, and a sentence that names who wants or gives.

    Args:
        before: The shares until now.
        found: Those from now on.
        pool: Its kind and name.
    """
    said = {}
    for name, share in found.shares.items():
        was = before.get(name)
        if was is None or was.gpus == share.gpus:
            continue
        lowered = share.gpus < was.gpus
        text = f"{pool} grants {share.gpus} GPUs in place of {was.gpus}"
        others = _growing(found) if lowered else _shrunk(before, found)
        others = [each for each in others if each != name]
        if others:
            text += f"; {', '.join(others)} {'wants them' if lowered else 'gave back'}"
        said[name] = (lowered, text)
    return said


def _growing(found: PoolShares) -> list[str]:
    return sorted(name for name, each in found.grants.items() if each.target > each.gpus)


def _shrunk(before: PoolState, found: PoolShares) -> list[str]:
    return sorted(
        name
        for name, share in found.shares.items()
        if name in before and share.exposed < before[name].exposed
    )


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
        "owed": 0 if grant is None else max(0, min(guaranteed, grant.target) - share.gpus),
        "serial": share.serial,
        "exposed": share.exposed,
    }
    if member.drains.took_s is not None:
        row["drainSeconds"] = math.ceil(member.drains.took_s)
    times = {"gainedTime": share.gained_s, "lostTime": share.lost_s, "returnTime": member.drains.ends_s}
    return {**row, **{key: stamp(at_s) for key, at_s in times.items() if at_s is not None}}


def _valid(problems: Collection[str]) -> ConditionResult:
    if problems:
        return ConditionResult(VALID, False, "InvalidSpec", "; ".join(problems))
    return ConditionResult(VALID, True, "Valid", "guarantees and graphs fit the pool")


def _met(rows: Sequence[Mapping[str, Any]], members: Mapping[str, PoolMember]) -> ConditionResult:
    owed = [f"{row['name']} lacks {row['owed']} of {row['guaranteed']} GPUs" for row in rows if row["owed"]]
    if not owed:
        return ConditionResult(GUARANTEES_MET, True, "Met", "every guarantee is satisfied")
    giving = [
        f"{row['name']} gives back {row['exposed'] - row['granted']}"
        for row in rows
        if row["exposed"] > row["granted"] and members[row["name"]].held > row["granted"]
    ]
    return ConditionResult(GUARANTEES_MET, False, "Waiting", "; ".join([*owed, *giving]))


def _counted(pool: PoolObject, nodes: PoolNodes, known: int | None) -> ConditionResult:
    if nodes.gpus is not None:
        return ConditionResult(NODES_COUNTED, True, "Counted", nodes.words)
    if pool.spec.gpus is not None:
        text = "spec.gpus counts"
    elif known is not None:
        text = f"using the last known count of {known} GPUs"
    else:
        text = "the GPUs were never counted, so the graphs keep what they hold and gain nothing; correct the cause, or set spec.gpus"
    return ConditionResult(NODES_COUNTED, False, "NotKnown", f"{nodes.words}; {text}")


def _ceiling(held: int, gpus: int) -> ConditionResult:
    used = f"{held} of {gpus} GPUs are held"
    if held > gpus:
        text = f"{used}; no new workers start until enough workers exit"
        return ConditionResult(CEILING_RESPECTED, False, "OverPool", text)
    return ConditionResult(CEILING_RESPECTED, True, "WithinPool", used)
