"""What a user of another autoscaler would have measured of a pool's hardware beforehand, from its profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.api import Role
from penstock.core.errors import ConfigError
from penstock.engine import profiles
from penstock.engine.profiles.performance import SimulatedEngine, performance_of
from penstock.performance.profile import PerformanceProfile
from penstock.planner.decide.baselines.settings import BaselineSettings
from penstock.planner.decide.config import DecideConfig
from penstock.planner.decide.policy import policy_of
from penstock.simulator.scenario import PoolSpec, ProfiledModel


def configured(
    config: DecideConfig, mode: str, pools: Sequence[PoolSpec], itl_slo_s: float | None = None
) -> DecideConfig:
    """Return the configuration of a mode, with what it may know of the pools; an oracle's schedule comes with its run.

    Args:
        config: The options.
        mode: Which policy decides.
        pools: What it scales.
        itl_slo_s: Mean gap between tokens that counts as in time, > 0; None: any.

    Raises:
        ConfigError: the mode needs a latency profile and a pool has none.
    """
    policy = policy_of(mode)
    if policy.needs_profile and not has_profile(pools):
        raise ConfigError(
            f"mode {mode}: it plans with a latency profile, which the simple server does not have; give --profile"
            f" one of {', '.join(profiles.names())}"
        )
    config = replace(config.in_mode(mode), baseline=baseline_settings(pools))
    if not policy.needs_profile or policy.is_oracle:
        return config
    itl_slo_s = config.itl_slo_s if itl_slo_s is None else itl_slo_s
    return replace(config, itl_slo_s=itl_slo_s, performance=performance_profile(pools))


def has_profile(pools: Sequence[PoolSpec]) -> bool:
    """Tell whether every pool's engines have a latency profile."""
    return all(isinstance(pool.model, ProfiledModel) for pool in pools)


def baseline_settings(pools: Sequence[PoolSpec]) -> BaselineSettings:
    """Return the settings for pools: peak prefill throughput of one replica, and its KV cache.

    The simple server, which has no profile, computes at a constant pace and has its cache for KV.
    """
    throughput = BaselineSettings().prefill_tokens_per_s
    kv_tokens = BaselineSettings().kv_tokens
    for pool in pools:
        model = pool.model
        if not isinstance(model, ProfiledModel):
            return BaselineSettings(1 / model.prefill_s_per_token, kv_tokens=float(model.cache_tokens))
        profile = profiles.load(model.profile)
        if pool.role is not Role.DECODE:
            step_s = profile.latency().prefill.ttft_s(model.max_num_batched_tokens)
            throughput = model.max_num_batched_tokens / step_s
        if pool.role is not Role.PREFILL:
            kv_tokens = float(model.kv_tokens or profile.kv_capacity_tokens)
    return BaselineSettings(prefill_tokens_per_s=throughput, kv_tokens=kv_tokens)


def performance_profile(pools: Sequence[PoolSpec]) -> PerformanceProfile:
    """Return what a profiler would measure of the simulated engines; all have a latency profile."""
    entry = next(pool for pool in pools if pool.role is not Role.DECODE)
    holder = next(pool for pool in pools if pool.role is not Role.PREFILL)
    return performance_of(_engine(entry), _engine(holder))


def _engine(pool: PoolSpec) -> SimulatedEngine:
    model = pool.model
    assert isinstance(model, ProfiledModel)  # noqa: S101 - the caller's
    return SimulatedEngine(model.profile, model.kv_tokens, model.max_num_seqs, pool.gpus)
