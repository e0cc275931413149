"""Configures the planners that a simulation compares, with the hardware measurements that a user of each planner would supply."""

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
from penstock.simulator.scenario import PlannerTimeouts, PoolSpec, ProfiledModel
from penstock_planner.decide.config import DecideConfig, targets_of
from penstock_planner.decide.policy import policy_names, policy_of
from penstock_planner.options import join


def configured(config: DecideConfig, mode: str, pools: Sequence[PoolSpec]) -> DecideConfig:
    """Return a copy of ``config`` in which the planner scales by the policy ``mode``.

    If ``config`` has no parameters for the policy, they are derived from the engines of the worker pools, and so is the latency
    profile if the policy needs one. The schedule of an oracle mode (a reference that knows every arrival in advance) is not
    included: `oracle_search.with_best_schedule` adds it for each run.

    Args:
        config: Planner configuration to start from.
        mode: Name of a planner policy.
        pools: Worker pools of the simulation, from which the measurements are taken.

    Raises:
        ConfigError: the mode needs a latency profile and a pool has none (the simple server has none).
    """
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
    """Return whether the engines of every pool have a latency profile, that is whether no pool runs the simple server."""
    return all(isinstance(pool.model, ProfiledModel) for pool in pools)


def measured(parameters: type[Any], pools: Sequence[PoolSpec]) -> Any:
    """Return an instance of the class ``parameters`` (a planner mode's parameters) whose hardware fields are measured from the pools.

    Only the fields ``prefill_tokens_per_s`` (peak prefill throughput of one replica) and ``kv_tokens`` (KV cache capacity of one
    replica, in tokens) are set, each if the class has it. All other fields have their defaults.
    """
    names = {each.name for each in fields(parameters)}
    return parameters(**{name: value for name, value in hardware_of(pools).items() if name in names})


def hardware_of(pools: Sequence[PoolSpec]) -> dict[str, float]:
    """Return the figures that a user would measure on the hardware, by name.

    ``prefill_tokens_per_s`` is the peak prefill throughput of one replica, and ``kv_tokens`` the capacity of its KV cache in tokens. For
    the simple server (`SimpleModel`), which has no latency profile, the two figures are the server's constant throughput and its cache
    capacity.
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
    """Return the latency profile (times of prefill and decode) that a user would measure on the simulated engines of ``pools``.

    Every pool must run an engine with a latency profile, not the simple server.
    """
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
    """Return the configuration that all compared planners of a simulation share before each gets its mode (its scaling policy).

    Args:
        graph: Graph whose planner section is used. None uses the planner's defaults and the GPU sizes of the pools.
        pools: Worker pools of the simulation.
        max_gpus: GPU budget; None keeps the budget of the graph, if it has one.
        slo: Latency targets that the planner plans for.
    """
    given: dict[str, Any] = {} if max_gpus is None else {"max-gpu-budget": max_gpus}
    if graph is None:
        for pool in pools:
            given["prefill-engine-num-gpu" if pool.role is Role.PREFILL else "decode-engine-num-gpu"] = (
                pool.gpus
            )
    return replace(join(given=given, graph=graph).decide_config(graph), **targets_of(slo))


def timeouts_of(graph: GraphDeployment) -> PlannerTimeouts:
    """Return the timeouts of a graph's planner from its manifest: for a replica to become ready, and for a metric to be stale.

    A planner on a cluster and a simulated one use the same timeouts.
    """
    options = join(given={}, graph=graph)
    return PlannerTimeouts(options.adjustment_deadline, options.metrics_max_age)


def chosen_planners(
    names: tuple[str, ...], config: DecideConfig, pools: Sequence[PoolSpec]
) -> dict[str, DecideConfig | None]:
    """Return the configuration of each chosen planner, by its name.

    Args:
        names: Names of planner policies, ``default`` for the mode of ``config``, or ``all`` for every policy that the pools support.
        config: Configuration that the planners share.
        pools: Worker pools of the simulation.

    Returns:
        A configuration for each name; ``{"": None}`` if ``names`` is empty, which means that no planner scales.

    Raises:
        ConfigError: a name is unknown, or its mode needs a latency profile that a pool lacks.
    """
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
