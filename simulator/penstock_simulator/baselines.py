"""What a user of another autoscaler would have measured of a pool's hardware beforehand, from its profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock_api import Role
from penstock_core.errors import ConfigError
from penstock_engine import profiles
from penstock_engine.core.latency import LatencyModel
from penstock_performance.profile import PerformanceProfile
from penstock_performance.tables import DecodeTable, PrefillTable
from penstock_planner.decide.baselines.rhythm import in_mode
from penstock_planner.decide.baselines.settings import BaselineSettings
from penstock_planner.decide.config import DecideConfig, Mode
from penstock_simulator.scenario import PoolSpec, ProfiledModel

_PROMPTS = tuple(100.0 * 1.5**power for power in range(19))
"""100 to 148,000 tokens."""
_CONTEXTS = tuple(250.0 * 2**power for power in range(10))
"""250 to 128,000 tokens."""
_KV_USAGE = tuple(percent / 100 for percent in range(2, 101, 2))


def configured(
    config: DecideConfig, mode: Mode, pools: Sequence[PoolSpec], itl_slo_s: float | None = None
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
    baseline = replace(baseline_settings(pools), itl_slo_s=itl_slo_s)
    if mode.needs_profile and not has_profile(pools):
        raise ConfigError(
            f"mode {mode.value}: it plans with a latency profile, which the simple server does not have; give --profile"
            f" one of {', '.join(profiles.names())}"
        )
    if mode is Mode.DYNAMO_THROUGHPUT:
        baseline = replace(baseline, profile=throughput_profile(pools))
    return replace(in_mode(config, mode), baseline=baseline)


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


def throughput_profile(pools: Sequence[PoolSpec]) -> PerformanceProfile:
    """Return what Dynamo's profiler would measure of the simulated engines, point by point; all have a profile."""
    models = {pool.role: pool.model for pool in pools}
    entry = models.get(Role.PREFILL) or models[Role.AGGREGATED]
    holder = models.get(Role.DECODE) or models[Role.AGGREGATED]
    assert isinstance(entry, ProfiledModel)  # noqa: S101 - the caller's
    assert isinstance(holder, ProfiledModel)  # noqa: S101 - the caller's
    latency = profiles.load(entry.profile).latency()
    prefill = PrefillTable(_PROMPTS, tuple(latency.prefill.ttft_s(round(tokens)) for tokens in _PROMPTS))
    return PerformanceProfile(prefill, _decode_table(holder))


def _decode_table(model: ProfiledModel) -> DecodeTable:
    profile = profiles.load(model.profile)
    latency = profile.latency()
    kv_tokens = float(model.kv_tokens or profile.kv_capacity_tokens)
    rows = [
        [_decode_point(latency, context, usage, kv_tokens, model) for usage in _KV_USAGE]
        for context in _CONTEXTS
    ]
    return DecodeTable(
        _CONTEXTS,
        _KV_USAGE,
        tuple(tuple(itl_s for itl_s, _ in row) for row in rows),
        tuple(tuple(rate for _, rate in row) for row in rows),
        kv_tokens,
    )


def _decode_point(
    latency: LatencyModel, context: float, usage: float, kv_tokens: float, model: ProfiledModel
) -> tuple[float, float]:
    """Return (ITL, tokens/s) of the batch that uses that share of the cache, or of the largest that may run."""
    batch = min(float(model.max_num_seqs), max(1.0, usage * kv_tokens / context))
    itl_s = latency.decode.step_s(batch, batch * context)
    return itl_s, batch / itl_s
