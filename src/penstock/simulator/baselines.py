"""The planners that a simulation compares, and the hardware measurements that their users would have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from penstock.api import GraphDeployment, Role, SloConfig
from penstock.core.closest import did_you_mean
from penstock.core.errors import ConfigError
from penstock.engine import profiles
from penstock.engine.profiles.performance import EngineSpeed, performance_of
from penstock.performance.profile import PerformanceProfile
from penstock.simulator.scenario import PlannerPatience, PoolSpec, ProfiledModel
from penstock_planner.decide.config import DecideConfig, targets_of
from penstock_planner.decide.policy import policy_names, policy_of
from penstock_planner.options import join


def configured(config: DecideConfig, mode: str, pools: Sequence[PoolSpec]) -> DecideConfig:
    """Return the configuration of a mode, with its knowledge of the pools; an oracle's schedule comes with its run."""
    policy = policy_of(mode)
    if policy.needs_profile and not has_profile(pools):
        raise ConfigError(
            f"mode {mode}: it plans with a latency profile, which the simple server does not have; give --profile"
            f" one of {', '.join(profiles.names())}"
        )
    config = config.in_mode(mode)
    if policy.parameters is not None and config.parameters is None:
        config = replace(config, parameters=measured(policy.parameters, pools))
    if not policy.needs_profile or policy.is_oracle:
        return config
    return replace(config, performance=performance_profile(pools))


def has_profile(pools: Sequence[PoolSpec]) -> bool:
    """Return whether every pool's engines have a latency profile."""
    return all(isinstance(pool.model, ProfiledModel) for pool in pools)


def measured(parameters: type[Any], pools: Sequence[PoolSpec]) -> Any:
    """Return a policy's parameters, those that its user would have measured of the hardware taken from the pools.

    ``prefill_tokens_per_s`` is the peak prefill throughput of one replica, ``kv_tokens`` its KV cache.
    """
    names = {each.name for each in fields(parameters)}
    return parameters(**{name: value for name, value in hardware_of(pools).items() if name in names})


def hardware_of(pools: Sequence[PoolSpec]) -> dict[str, float]:
    """Return what a user would measure: ``prefill_tokens_per_s`` of one replica and the tokens of its KV cache, ``kv_tokens``.

    The simple server, which has no profile, computes at a constant rate and has its cache for KV.
    """
    found: dict[str, float] = {}
    for pool in pools:
        model = pool.model
        if not isinstance(model, ProfiledModel):
            cached = float(model.cache_tokens)
            return {"prefill_tokens_per_s": 1 / model.prefill_s_per_token, "kv_tokens": cached}
        profile = profiles.load(model.profile)
        if pool.role is not Role.DECODE:
            step_s = profile.latency().prefill.ttft_s(model.max_num_batched_tokens)
            found["prefill_tokens_per_s"] = model.max_num_batched_tokens / step_s
        if pool.role is not Role.PREFILL:
            found["kv_tokens"] = float(model.kv_tokens or profile.kv_capacity_tokens)
    return found


def performance_profile(pools: Sequence[PoolSpec]) -> PerformanceProfile:
    """Return a profiler's measurements of the simulated engines; all have a latency profile."""
    entry = next(pool for pool in pools if pool.role is not Role.DECODE)
    holder = next(pool for pool in pools if pool.role is not Role.PREFILL)
    return performance_of(_engine(entry), _engine(holder))


def _engine(pool: PoolSpec) -> EngineSpeed:
    model = pool.model
    assert isinstance(model, ProfiledModel)  # noqa: S101 - the caller's
    return EngineSpeed(model.profile, model.kv_tokens, model.max_num_seqs, pool.gpus)


DEFAULT_PLANNER = "default"
ALL = "all"


def planner_config(
    graph: GraphDeployment | None, pools: Sequence[PoolSpec], *, max_gpus: int | None, slo: SloConfig
) -> DecideConfig:
    """Return the options that every planner of a simulation begins with."""
    given: dict[str, Any] = {} if max_gpus is None else {"max-gpu-budget": max_gpus}
    if graph is None:
        for pool in pools:
            given["prefill-engine-num-gpu" if pool.role is Role.PREFILL else "decode-engine-num-gpu"] = (
                pool.gpus
            )
    return replace(join(given=given, graph=graph).decide_config(graph), **targets_of(slo))


def patience_of(graph: GraphDeployment) -> PlannerPatience:
    """Return how long the planner of a graph waits, live and simulated."""
    options = join(given={}, graph=graph)
    return PlannerPatience(options.adjustment_deadline, options.metrics_max_age)


def chosen_planners(
    names: tuple[str, ...], config: DecideConfig, pools: Sequence[PoolSpec]
) -> dict[str, DecideConfig | None]:
    """Return each planner's configuration by name; a single None where nothing plans."""
    if not names:
        return {"": None}
    known = policy_names()
    unknown = [name for name in names if name not in {*known, DEFAULT_PLANNER, ALL}]
    if unknown:
        meant = did_you_mean(unknown[0], known)
        raise ConfigError(f"--planner {','.join(unknown)}: choose from {', '.join(known)}, or all{meant}")
    if ALL in names:
        names = tuple(name for name in known if has_profile(pools) or not policy_of(name).needs_profile)
    return {name: configured(config, name if name in known else config.mode, pools) for name in names}
