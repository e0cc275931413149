"""How long DualMap's hash keys become, alongside the paper's figure 6; the tree is the router's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from setups import HOT_SHARES, INSTANCES, Case

from penstock.router.policy.rings import HotnessTree
from penstock.simulator.workload import prepare

THRESHOLDS: Mapping[str, Mapping[str, float]] = {"2/n and 1/n, the paper's": {}, "the artefact's": HOT_SHARES}


def key_depths(case: Case, shares: Mapping[str, float]) -> dict[int, float]:
    """Return the share of requests by their key's length in blocks of 512 tokens.

    Args:
        case: Its requests are counted, those of the warm-up too.
        shares: What `HotnessTree` is told of hot and cold; empty: 2/n and 1/n.
    """
    tree = HotnessTree(**shares)
    found: Counter[int] = Counter()
    for request in prepare(case.workload, seed=0).requests:
        ids = request.block_ids or ()
        # A block's id stands for all before it, as a key does.
        found[ids.index(tree.key(ids, INSTANCES)) + 1] += 1
    total = found.total()
    return {depth: count / total for depth, count in sorted(found.items())}


def measured(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Return a row per workload and pair of thresholds, its depths in words; models do not matter."""
    return [
        {"workload": case.title, "thresholds": label, "depths": in_words(key_depths(case, shares))}
        for case in cases
        for label, shares in THRESHOLDS.items()
    ]


def in_words(depths: Mapping[int, float], *, least: float = 0.005) -> str:
    """Return depths as ``2: 45.2%, 6: 14.9%``; those below ``least`` are left out."""
    return ", ".join(f"{depth}: {share:.1%}" for depth, share in depths.items() if share >= least)
