"""Determines the graphs that hold the GPUs which a graph of the pool lacks, and the expected time of their return. Pure.

The drivers pass the GPUs that each graph holds and the durations of its drains. Planners, statuses and Events repeat the messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.core.stamps import seconds
from penstock.gpu_pool.allocator import Grant

NEWEST: Final = 0.5
"""Weight, 0-1, of the newest drain in the learned duration. Chosen: drains last as long as the running answers, which change during a day."""


@dataclass(frozen=True, slots=True)
class DrainTimes:
    """When the draining workers of a graph began to drain, and how long a drain takes. Times are seconds of the caller's clock.

    Attributes:
        started_s: Start time of the drain of each draining worker by name, seconds.
        duration_s: Learned duration of a drain, seconds: a mean in which each newer drain has half of the weight (`NEWEST`); None before the
            first drain has ended.
    """

    started_s: Mapping[str, float] = field(default_factory=dict)
    duration_s: float | None = None

    def updated(self, draining: Mapping[str, float], now_s: float) -> DrainTimes:
        """Return these times updated for the workers that drain at ``now_s``, with the learned duration if a drain has ended.

        A worker that was draining before and is missing in ``draining`` counts as having ended its drain at ``now_s``.

        Args:
            draining: Start time of the drain of each worker that drains now, by name.
            now_s: Current time, seconds of the clock that ``draining`` uses.
        """
        duration_s = self.duration_s
        for name in sorted(self.started_s.keys() - draining.keys()):
            newest = max(0.0, now_s - self.started_s[name])
            duration_s = newest if duration_s is None else NEWEST * newest + (1.0 - NEWEST) * duration_s
        return DrainTimes(dict(draining), duration_s)

    @property
    def expected_end_s(self) -> float | None:
        """Time, on the caller's clock, at which the last of the current drains will probably end; None without drains or learned duration."""
        if self.duration_s is None or not self.started_s:
            return None
        return max(self.started_s.values()) + self.duration_s


@dataclass(frozen=True, slots=True)
class GraphHolding:
    """GPUs that one graph of a GPU pool holds, is granted and wants.

    Attributes:
        guaranteed: GPUs that the pool gives to the graph whenever its planner wants them.
        held: GPUs of the graph's existing workers, draining ones included.
        grant: Maximum GPUs that the graph is allowed to hold, its target and the GPUs that it wants.
        returns_s: Time, in seconds of the clock of the pool's status, at which the graph is expected to have returned its GPUs above the
            target; None if unknown.
    """

    guaranteed: int
    held: int
    grant: Grant
    returns_s: float | None = None

    @property
    def excess_gpus(self) -> int:
        """Number of GPUs that the graph holds above its target (what it will be granted), and so has to return; 0 if it holds no more."""
        return max(0, self.held - self.grant.target)


@dataclass(frozen=True, slots=True)
class PoolRow:
    """One graph of a pool for display, in GPUs.

    Attributes:
        graph: Name of the graph.
        guaranteed: Guaranteed GPUs.
        held: GPUs of existing workers.
        grant: Maximum GPUs that the graph is allowed to hold now.
        wanted: GPUs of the replicas that the graph's planner wants.
        target: GPUs that the graph will be granted when other graphs have returned theirs.
        waits_for: Names of the other graphs that still have to return GPUs before this graph can have its target.
    """

    graph: str
    guaranteed: int
    held: int
    grant: int
    wanted: int
    target: int
    waits_for: tuple[str, ...]


def holdings_from_status(status: Mapping[str, Any] | None) -> dict[str, GraphHolding]:
    """Return the held, granted and wanted GPUs of each graph, by name, from the status of a GpuPool; empty if the status is None."""
    return {
        row["name"]: GraphHolding(
            row.get("guaranteed", 0),
            row.get("held", 0),
            Grant(row["granted"], row["serial"], row.get("target", row["granted"]), row.get("wanted", 0)),
            seconds(row.get("returnTime")),
        )
        for row in (status or {}).get("graphs") or ()
    }


def pool_rows(holdings: Mapping[str, GraphHolding]) -> list[PoolRow]:
    """Return one row per graph of a GPU pool for display: its guaranteed, held, granted and wanted GPUs, and the graphs it waits for."""
    return [
        PoolRow(
            name,
            each.guaranteed,
            each.held,
            each.grant.gpus,
            each.grant.wanted,
            each.grant.target,
            waits_for(name, holdings),
        )
        for name, each in holdings.items()
    ]


def waits_for(graph: str, holdings: Mapping[str, GraphHolding]) -> tuple[str, ...]:
    """Return the names of the graphs that still have to return GPUs before ``graph`` can have its target (final grant).

    Returns an empty tuple if ``graph`` is granted its target already. ``holdings`` are the GPUs of all graphs of the pool, by name.
    """
    grant = holdings[graph].grant
    if grant.target <= grant.gpus:
        return ()
    return tuple(name for name, each in sorted(holdings.items()) if name != graph and each.excess_gpus)


def shortage_message(graph: str, holdings: Mapping[str, GraphHolding], when: Callable[[float], str]) -> str:
    """Return a message about the GPUs that a graph wants above its grant: their holders and expected return; empty if it wants no more.

    Args:
        graph: Name of the graph.
        holdings: GPUs of all graphs of the pool, by name.
        when: Function that formats a time, for example as ``at 21:14:05``.
    """
    grant = holdings[graph].grant
    on_the_way, more = grant.target - grant.gpus, grant.wanted - max(grant.target, grant.gpus)
    messages = []
    if on_the_way > 0:
        returning = [_return_message(name, holdings[name], when) for name in waits_for(graph, holdings)]
        messages.append(
            f"{on_the_way} more {'GPU' if on_the_way == 1 else 'GPUs'} will follow: {' and '.join(returning) or 'they are free at the next allocation'}"
        )
    if more > 0:
        others = [
            _held_message(name, each)
            for name, each in sorted(holdings.items())
            if name != graph and (each.held or each.grant.target)
        ]
        until = (
            f"until another graph needs fewer: {', '.join(others)}"
            if others
            else "because the pool has no more"
        )
        messages.append(f"{more} more {'is' if more == 1 else 'are'} not available {until}")
    return "; ".join(messages)


def _held_message(name: str, holding: GraphHolding) -> str:
    due = "" if holding.held == holding.grant.target else f" and will hold {holding.grant.target}"
    return f"{name} holds {holding.held}{due} (guaranteed {holding.guaranteed})"


def _return_message(name: str, holding: GraphHolding, when: Callable[[float], str]) -> str:
    expected = "" if holding.returns_s is None else f", expected {when(holding.returns_s)}"
    return f"{name} returns {holding.excess_gpus}{expected}"
