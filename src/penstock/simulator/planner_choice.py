"""Which planners a simulation compares, and what each is configured with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from penstock.api import GraphDeployment, Role
from penstock.core.errors import ConfigError
from penstock.planner.decide.config import DecideConfig
from penstock.planner.decide.policy import policy_names, policy_of
from penstock.planner.options import join
from penstock.simulator.baselines import configured, has_profile
from penstock.simulator.scenario import PoolSpec

DEFAULT_PLANNER = "default"
ALL = "all"


def planner_config(
    graph: GraphDeployment | None, pools: Sequence[PoolSpec], *, max_gpus: int | None, slo_s: float
) -> DecideConfig:
    """Return the options that every planner of a simulation begins with.

    Args:
        graph: Whose planner settings are taken; None: the defaults.
        pools: Their GPUs count where there is no graph.
        max_gpus: GPU budget; None: the graph's, or the default.
        slo_s: TTFT that counts as in time.
    """
    given: dict[str, Any] = {} if max_gpus is None else {"max-gpu-budget": max_gpus}
    if graph is None:
        for pool in pools:
            given["prefill-engine-num-gpu" if pool.role is Role.PREFILL else "decode-engine-num-gpu"] = (
                pool.gpus
            )
    return replace(join(given=given, graph=graph).decide_config(graph), ttft_slo_s=slo_s)


def chosen_planners(
    names: tuple[str, ...], config: DecideConfig, pools: Sequence[PoolSpec], *, itl_slo_s: float | None
) -> dict[str, DecideConfig | None]:
    """Return each planner's configuration by name; a single None where nothing plans.

    Args:
        names: Modes, `DEFAULT_PLANNER`, or `ALL`: those that can be run with these pools.
        config: What each begins with.
        pools: What is scaled.
        itl_slo_s: Mean gap between tokens that counts as in time; None: any.

    Raises:
        ConfigError: a name is unknown, or needs a latency profile that a pool does not have.
    """
    if not names:
        return {"": None}
    known = policy_names()
    unknown = [name for name in names if name not in {*known, DEFAULT_PLANNER, ALL}]
    if unknown:
        raise ConfigError(f"--planner {','.join(unknown)}: choose from {', '.join(known)}, or all")
    if ALL in names:
        names = tuple(name for name in known if has_profile(pools) or not policy_of(name).needs_profile)
    return {
        name: configured(config, name if name in known else config.mode, pools, itl_slo_s) for name in names
    }
