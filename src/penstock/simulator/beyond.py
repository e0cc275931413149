"""Says when a rate is beyond every fleet that a simulation may use, so that low shares on time blame no policy. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.api import Role
from penstock.simulator.baselines import hardware_of
from penstock.simulator.scenario import PoolSpec, Scenario


def beyond_every_fleet(scenario: Scenario, summary: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence for each rate whose prompts need more than all GPUs compute; empty where a fleet may do.

    It counts as computed only what no earlier request's prefix holds, so that no cache could have helped; what it lets pass may still be
    too much.

    Args:
        scenario: Of the runs: workers, planner, GPU budget.
        summary: Rows of `summarise`, with ``prompt_tokens_mean`` and ``hit_bound``.
    """
    if scenario.resizes:
        return []
    replicas = most_prefilling(scenario.pools, scenario.max_gpus if scenario.planner is not None else None)
    most = replicas * hardware_of(scenario.pools)["prefill_tokens_per_s"]
    entry = next(pool for pool in scenario.pools if pool.role is not Role.DECODE).role.value
    found: dict[float, str] = {}
    for row in summary:
        rate, tokens = row["rate_rps"], row["prompt_tokens_mean"]
        if rate is None or tokens is None:
            continue
        needed = rate * tokens * (1 - (row["hit_bound"] or 0.0))
        if needed > most:
            workers = f"{replicas} {entry} worker{'s' if replicas > 1 else ''}"
            found[rate] = (
                f"{rate:.2g} requests/s are beyond every fleet here: they bring {needed:,.0f} new prompt tokens/s, and "
                f"{workers}, the most that the GPUs allow, compute {most:,.0f}/s; give --rate a value below {most / needed * rate:.2g}"
            )
    return list(found.values())


def most_prefilling(pools: Sequence[PoolSpec], max_gpus: int | None) -> int:
    """Return the largest number of workers that compute prompts: within a planner's budget, or as they are (None)."""
    entry = next(pool for pool in pools if pool.role is not Role.DECODE)
    if max_gpus is None or not entry.gpus:
        return entry.replicas
    others = sum(pool.gpus for pool in pools if pool is not entry)
    return max(entry.replicas, (max_gpus - others) // entry.gpus)
