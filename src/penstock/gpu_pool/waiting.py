"""Who holds the GPUs that a graph of a pool lacks, and when they come. Pure.

The drivers say what each graph holds and how long its drains took; planners, status and Events repeat the words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.core.stamps import seconds
from penstock.gpu_pool.allocator import Grant

NEWEST: Final = 0.5
"""Weight of the newest drain in what is learnt. Chosen: drains follow the answers that run, which change within the day."""


@dataclass(frozen=True, slots=True)
class DrainTimes:
    """How long a graph's workers take to drain.

    Attributes:
        begun: Of each worker that drains, when that began, seconds of the driver's clock.
        took_s: Learnt, seconds; None: no drain has been seen to its end.
    """

    begun: Mapping[str, float] = field(default_factory=dict)
    took_s: float | None = None

    def after(self, draining: Mapping[str, float], now_s: float) -> DrainTimes:
        """Return what is known once ``draining`` is what drains, with the begin of each; the others have ended."""
        took_s = self.took_s
        for name in sorted(self.begun.keys() - draining.keys()):
            newest = max(0.0, now_s - self.begun[name])
            took_s = newest if took_s is None else NEWEST * newest + (1.0 - NEWEST) * took_s
        return DrainTimes(dict(draining), took_s)

    @property
    def ends_s(self) -> float | None:
        """When the last of them is expected to end; None: none drains, or nothing is learnt yet."""
        if self.took_s is None or not self.begun:
            return None
        return max(self.begun.values()) + self.took_s


@dataclass(frozen=True, slots=True)
class Holding:
    """What one graph of a pool has.

    Attributes:
        guaranteed: GPUs that it gets whenever it wants them.
        held: GPUs of its existing workers.
        grant: What it may hold, is to have, and wants.
        returns_s: When the last of what it gives back is expected, seconds; None: not known.
    """

    guaranteed: int
    held: int
    grant: Grant
    returns_s: float | None = None

    @property
    def gives_back(self) -> int:
        """GPUs that it holds above what it is to have."""
        return max(0, self.held - self.grant.target)


@dataclass(frozen=True, slots=True)
class PoolRow:
    """What one graph of a pool holds, may hold and wants, GPUs; ``waits_for`` are graphs that have yet to give back."""

    graph: str
    guaranteed: int
    held: int
    grant: int
    wanted: int
    target: int
    waits_for: tuple[str, ...]


def holdings_in(status: Mapping[str, Any] | None) -> dict[str, Holding]:
    """Return what each graph has by a GpuPool's status."""
    return {
        row["name"]: Holding(
            row.get("guaranteed", 0),
            row.get("held", 0),
            Grant(row["granted"], row["serial"], row.get("target", row["granted"]), row.get("wanted", 0)),
            seconds(row.get("returnTime")),
        )
        for row in (status or {}).get("graphs") or ()
    }


def rows_of(holdings: Mapping[str, Holding]) -> list[PoolRow]:
    """Return a row of each graph, as it is shown."""
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


def waits_for(graph: str, holdings: Mapping[str, Holding]) -> tuple[str, ...]:
    """Return the graphs that have yet to give back what a graph is to have; empty where it waits for none."""
    grant = holdings[graph].grant
    if grant.target <= grant.gpus:
        return ()
    return tuple(name for name, each in sorted(holdings.items()) if name != graph and each.gives_back)


def lacking(graph: str, holdings: Mapping[str, Holding], when: Callable[[float], str]) -> str:
    """Return who holds what a graph wants above its grant, and when it comes; empty: it lacks nothing.

    Args:
        graph: Whose.
        holdings: Of all graphs of the pool.
        when: Writes a time: ``at 21:14:05``.
    """
    grant = holdings[graph].grant
    coming, more = grant.target - grant.gpus, grant.wanted - max(grant.target, grant.gpus)
    said = []
    if coming > 0:
        givers = [_giving(name, holdings[name], when) for name in waits_for(graph, holdings)]
        said.append(f"{coming} more on their way, {' and '.join(givers) or 'free at the next look'}")
    if more > 0:
        others = [
            _keeping(name, each)
            for name, each in sorted(holdings.items())
            if name != graph and (each.held or each.grant.target)
        ]
        until = f" until another wants less: {', '.join(others)}" if others else ": the pool has no more"
        said.append(f"no {more} more{until}")
    return "; ".join(said)


def _keeping(name: str, holding: Holding) -> str:
    due = "" if holding.held == holding.grant.target else f", is to have {holding.grant.target}"
    return f"{name} holds {holding.held}{due} (guaranteed {holding.guaranteed})"


def _giving(name: str, holding: Holding, when: Callable[[float], str]) -> str:
    expected = "" if holding.returns_s is None else f", expected {when(holding.returns_s)}"
    return f"{name} gives back {holding.gives_back}{expected}"
