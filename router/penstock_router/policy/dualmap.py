"""DualMap: two candidates per prefix from two hash rings; cache affinity until the SLO is at risk, then load.

Source: the DualMap paper, sections 3.2 to 3.4 and A.7. Departures are listed in docs/routing.md. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from penstock_router.policy.hotness import WINDOW, HotnessTree
from penstock_router.policy.instance import Instance
from penstock_router.policy.placer import Arrival, Instances, Place, View
from penstock_router.policy.rings import DualRing


class PairChoice(StrEnum):
    """How one of the two candidates is chosen; the last three are the paper's ablation."""

    SLO_AWARE = "slo-aware"
    CACHE_AFFINITY = "cache-affinity"
    LEAST_LOADED = "least-loaded"
    MIN_TTFT = "min-ttft"


@dataclass(frozen=True, slots=True)
class DualMapSettings:
    """What can be set.

    Attributes:
        slo_s: TTFT aimed for, modelled seconds, > 0.
        choice: How one of the pair is chosen.
        rebalance: Move queued requests within their pair when both are overloaded.
        adaptive_prefix: Let the hotness tree choose the key's length; else always ``start_depth`` blocks.
        hot_window: Requests over which hotness is counted.
        start_depth: Blocks of a key while nothing is hot.
        bottleneck_s: T, seconds without a computed prompt after which an instance counts as decode-bound.
    """

    slo_s: float = 5.0
    choice: PairChoice = PairChoice.SLO_AWARE
    rebalance: bool = True
    adaptive_prefix: bool = True
    hot_window: int = WINDOW
    start_depth: int = 1
    bottleneck_s: float = 3.0


class DualMap:
    """The policy."""

    __slots__ = ("_hotness", "_rings", "_settings")

    def __init__(self, settings: DualMapSettings | None = None) -> None:
        self._settings = settings or DualMapSettings()
        self._rings = DualRing()
        self._hotness = HotnessTree(window=self._settings.hot_window, start_depth=self._settings.start_depth)

    def joined(self, name: str) -> None:
        """Put an instance on both rings."""
        self._rings.add(name)

    def left(self, name: str) -> None:
        """Take an instance off both rings."""
        self._rings.remove(name)

    def place(self, arrival: Arrival, instances: Instances, view: View) -> Place:
        """Return the better of the two candidates, with the other as its alternative."""
        names = self._rings.pair(self._key(arrival, len(instances)))
        usable = [name for name in names if name not in arrival.avoid] or list(names)
        if len(usable) == 1:
            if arrival.avoid:
                # Its pair has failed it: anybody else is better than the same worker again.
                rest = [each for name, each in instances.items() if name not in arrival.avoid]
                usable = [min(rest, key=lambda each: each.pending_tokens).name] if rest else usable
            return Place(usable[0], "only candidate")
        first, second = (instances[name] for name in usable)
        return self._choose(arrival, first, second, view)

    def _key(self, arrival: Arrival, count: int) -> int:
        if self._settings.adaptive_prefix:
            return self._hotness.key(arrival.chain, count)
        return arrival.chain[: self._settings.start_depth][-1] if arrival.chain else 0

    def _choose(self, arrival: Arrival, first: Instance[Any], second: Instance[Any], view: View) -> Place:
        uncached = {each.name: each.uncached(arrival.chain, arrival.tokens) for each in (first, second)}
        emptier, fuller = sorted((first, second), key=lambda each: each.pending_tokens)
        nearer, farther = sorted((first, second), key=lambda each: uncached[each.name])
        ttft = {each.name: view.ttft_s(each, uncached[each.name]) for each in (first, second)}
        is_late = {name: value is not None and value > self._settings.slo_s for name, value in ttft.items()}
        is_hot = self._settings.rebalance and all(is_late.values())
        match self._settings.choice:
            case PairChoice.LEAST_LOADED:
                return Place(emptier.name, "less loaded of its pair", fuller.name, is_hot)
            case PairChoice.MIN_TTFT:
                best = min((first, second), key=lambda each: each.pending_tokens + uncached[each.name])
                return Place(
                    best.name, "sooner of its pair", (second if best is first else first).name, is_hot
                )
            case _:
                pass
        if uncached[first.name] == uncached[second.name]:
            return Place(emptier.name, "equal hits: less loaded of its pair", fuller.name, is_hot)
        if self._settings.choice is PairChoice.SLO_AWARE and is_late[nearer.name]:
            return Place(emptier.name, "hit would miss the SLO: less loaded of its pair", fuller.name, is_hot)
        return Place(nearer.name, "larger hit of its pair", farther.name, is_hot)
