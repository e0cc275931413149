"""What a user of another autoscaler would have measured of a pool's hardware beforehand, from its profile."""

from __future__ import annotations

from collections.abc import Sequence

from penstock_api import Role
from penstock_engine import profiles
from penstock_planner.decide.baselines.settings import BaselineSettings
from penstock_simulator.scenario import PoolSpec, ProfiledModel


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
