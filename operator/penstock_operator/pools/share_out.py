"""Allocates a pool's GPUs to its graphs; the allocator's state is stored in the pool's status. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.gpu_pool.allocator import Grant, GraphBid, PoolTerms, Share, allocate
from penstock_operator.pools.observe import PoolMember, PoolObservation


@dataclass(frozen=True, slots=True)
class PoolShares:
    """Result of allocating a pool's GPUs.

    Attributes:
        grants: GPUs granted to each graph whose bid (GPUs of each desired worker replica) is known, by graph name.
        shares: State of each graph (grant, serial number, times of the last changes) for the next allocation, by graph
            name; it also includes graphs whose bid is unknown.
        total: Number of GPUs that all graphs of the pool together can occupy now.
        unavailable: Number of further GPUs of the pool that its graphs cannot occupy now, since nodes are missing or
            not ready, or since other pods hold these GPUs.
    """

    grants: Mapping[str, Grant]
    shares: Mapping[str, Share]
    total: int
    unavailable: int = 0

    @property
    def gpus(self) -> int:
        """Number of GPUs of the entire pool (``total + unavailable``), including those that its graphs cannot occupy now.

        Graphs cannot occupy GPUs of nodes that are missing or not ready, and GPUs that pods outside the pool's graphs
        hold.
        """
        return self.total + self.unavailable


def share_out(observed: PoolObservation) -> PoolShares | None:
    """Return the grants (maximum GPUs) of all graphs of a pool, and the state for the next allocation.

    Returns None if a graph that is new in the pool has not been reconciled since it joined, because the number of GPUs
    that its workers may occupy is unknown before that.
    """
    members, before = observed.members, observed.shares
    state = {name: share for name, share in before.items() if name in members}
    for name, each in members.items():
        if name in state:
            continue
        if each.initial_gpus is None:
            return None
        state[name] = Share(each.initial_gpus, 0, max(each.initial_gpus, each.held))
    max_held = sum(share.max_held for share in state.values())
    total, unavailable = _gpus(observed, max_held)
    gpus = total + unavailable
    guaranteed_gpus = guarantees(gpus, members)
    bids = {
        name: _bid(gpus, each, state[name], each.bid, guaranteed_gpus[name])
        for name, each in members.items()
        if each.bid is not None
    }
    spec = observed.pool.spec
    terms = PoolTerms(total, spec.hold_seconds, spec.reclaim.order)
    grants, after = allocate(terms, bids, state, observed.now_s)
    return PoolShares(grants, after, total, unavailable)


def guarantees(gpus: int, members: Mapping[str, PoolMember]) -> dict[str, int]:
    """Return the GPUs guaranteed to each graph, by name: the number in the pool's entry for the graph, or fewer if the pool lacks GPUs.

    The youngest graphs then get fewer, so that no user can take another user's guarantee by creating more graphs that
    an entry matches.

    Args:
        gpus: Number of GPUs of the pool.
        members: Graphs of the pool by name.
    """
    remaining_gpus, found = gpus, {}
    for name, each in sorted(members.items(), key=lambda item: (item[1].created, item[0])):
        found[name] = 0 if each.entry is None else min(each.entry.guaranteed_gpus, remaining_gpus)
        remaining_gpus -= found[name]
    return found


def grant_changes(observed: PoolObservation, found: PoolShares) -> dict[str, tuple[bool, str]]:
    """Return the graphs whose grant (maximum GPUs) has changed with an allocation.

    Args:
        observed: State before the allocation.
        found: Result of the allocation, from `share_out`.

    Returns:
        By graph name, whether its grant was lowered, and a sentence for an Event. The sentence names the graphs that
        now get the GPUs, or that have returned them.
    """
    before, messages = observed.shares, {}
    for name, share in found.shares.items():
        was = before.get(name)
        if was is None or was.gpus == share.gpus:
            continue
        lowered = share.gpus < was.gpus
        text = f"{observed.pool.title} grants {share.gpus} GPUs (before: {was.gpus})"
        others = _waiting_for_gpus(found) if lowered else _returning(before, found)
        others = [each for each in others if each != name]
        if others:
            text += f"; {'requested by' if lowered else 'returned by'} {', '.join(others)}"
        messages[name] = (lowered, text)
    return messages


def _gpus(observed: PoolObservation, max_held: int) -> tuple[int, int]:
    """Return the number of GPUs that a pool's graphs can occupy now, and the number that its nodes have but do not offer.

    If the nodes are unknown, no grant shrinks: ``spec.gpus`` applies, else the last count, else ``max_held`` (the GPUs
    that the graphs can occupy until they acknowledge their grants), so that no graph gains any.
    """
    written, nodes, counted = observed.pool.spec.gpus, observed.nodes, observed.last_count
    if nodes is not None and nodes.gpus is not None:
        if written is None:
            return nodes.gpus, nodes.unavailable
        return min(written, nodes.gpus), max(0, written - nodes.gpus)
    if written is not None:
        return written, 0
    return max_held if counted is None else counted, 0


def _bid(gpus: int, member: PoolMember, share: Share, bid: tuple[int, ...], guaranteed: int) -> GraphBid:
    serial = -1 if member.serial is None else member.serial
    if member.entry is None or member.graph is None:
        return GraphBid(0, 0, 0, (), member.held, share.serial if member.entry is None else serial)
    entry = member.entry
    max_gpus = entry.max_gpus_of(gpus, member.graph)
    return GraphBid(guaranteed, entry.priority.rank, max_gpus, bid, member.held, serial)


def _waiting_for_gpus(found: PoolShares) -> list[str]:
    return sorted(name for name, each in found.grants.items() if each.target > each.gpus)


def _returning(before: Mapping[str, Share], found: PoolShares) -> list[str]:
    return sorted(
        name
        for name, share in found.shares.items()
        if name in before and share.max_held < before[name].max_held
    )
