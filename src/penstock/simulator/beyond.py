"""Detects request rates that no fleet within the GPU budget can serve, so that late requests are not blamed on a policy. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.api import Role
from penstock.simulator.baselines import hardware_of
from penstock.simulator.scenario import PoolSpec, Scenario


def beyond_every_fleet(scenario: Scenario, summary: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return one warning for each simulated request rate that exceeds the prefill throughput of all GPUs within the budget.

    Only prompt tokens that even an ideal prefix cache would not hold are counted. A rate without a warning can therefore still be too high.
    Returns an empty list if every rate can be served, or if the scenario resizes pools by hand.

    Args:
        scenario: Scenario of the runs; its workers, planner and GPU budget are used.
        summary: Rows that `sweep.summarise` returns; their keys ``rate_rps``, ``prompt_tokens_mean`` and ``hit_bound`` are used.
    """
    if scenario.resizes:
        return []
    replicas = max_prefill_workers(
        scenario.pools, scenario.max_gpus if scenario.planner is not None else None
    )
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


def max_prefill_workers(pools: Sequence[PoolSpec], max_gpus: int | None) -> int:
    """Return the maximum number of workers that can compute prompts.

    Args:
        pools: Worker pools at time 0.
        max_gpus: GPU budget within which a planner may scale; one replica of each other pool is reserved. None means that nothing
            scales, and the result is the number of prefill (or aggregated) workers at time 0.
    """
    entry = next(pool for pool in pools if pool.role is not Role.DECODE)
    if max_gpus is None or not entry.gpus:
        return entry.replicas
    others = sum(pool.gpus for pool in pools if pool is not entry)
    return max(entry.replicas, (max_gpus - others) // entry.gpus)
