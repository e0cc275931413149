"""Mode ``sla``: mode ``adaptive`` with the workers of a performance profile, within a share of the budget by latency targets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from penstock.api import Role
from penstock.core.errors import ConfigError
from penstock.performance.profile import PerformanceProfile
from penstock_planner.decide.bounds.gpu_budget import existing_gpus
from penstock_planner.decide.capacity.corrections import SlaMemory
from penstock_planner.decide.capacity.profiled import ProfiledWorkers
from penstock_planner.decide.config import DecideConfig
from penstock_planner.decide.decision import Proposal, Step
from penstock_planner.decide.demand.observation import Window, entry_role
from penstock_planner.decide.policies.adaptive import rules
from penstock_planner.decide.policies.adaptive.memory import AdaptiveMemory
from penstock_planner.decide.policies.adaptive.policy import begun, case_of, followed, proposed, remembered
from penstock_planner.decide.policies.sla.limits import Projection, limited
from penstock_planner.decide.policy import PlannerPolicy
from penstock_planner.decide.state import PlannerState


def sla(window: Window, state: PlannerState, config: DecideConfig) -> Proposal:
    """Return the number of replicas that mode sla proposes for each role, with the reason, before most bounds apply.

    The rules are those of mode adaptive, with the throughput and latencies of a performance profile.

    A worker's throughput is looked up in the profile and divided by the learned factor of observed to profiled time.
    The number of replicas follows from the latency targets.

    Args:
        window: Pulls (metrics scrapes) of the interval, at least one.
        state: State left by the last decision.
        config: Configuration with the profile in ``performance``.

    Raises:
        ConfigError: The configuration has no profile.
    """
    if config.performance is None:
        raise ConfigError(
            "mode sla: needs a performance profile, and none was given; run `penstock profile` and "
            "give --profile, or choose mode adaptive"
        )
    known = remembered(state.learned, config)
    memory, workers = _learned(
        window, begun(known, config), SlaMemory.read(known), config.performance, config
    )
    made, projection = proposed(window, state, memory, workers, config), _projection(window, memory, workers)
    proposals = made.proposals
    needed: Mapping[Role, tuple[Step, ...]] = {}
    if projection is not None:
        pools = window.pulls[-1].pools
        out_of_hold_down = {role for role in pools if memory.hold_down_s(role, window.end_s) <= 0}
        gpus = existing_gpus(pools, config)
        proposals = limited(proposals, projection, config, gpus=gpus, out_of_hold_down=out_of_hold_down)
        needed = {role: projection.steps(role, pool.replicas) for role, pool in pools.items()}
    profiled = workers.step()
    return replace(
        made,
        proposals=[
            replace(each, steps=(profiled, *needed.get(each.role, ()), *each.steps)) for each in proposals
        ],
        learned=(*made.learned, workers.learnt),
    )


def _learned(
    window: Window,
    memory: AdaptiveMemory,
    learnt: SlaMemory,
    profile: PerformanceProfile,
    config: DecideConfig,
) -> tuple[AdaptiveMemory, ProfiledWorkers]:
    """Return the learned state after all pulls of the interval, and the workers of the profile that follow from it."""
    for pull in window.pulls:
        learnt = learnt.followed(pull, profile, mean_rate=memory.work.arriving(0.0).now)
        memory = followed(memory, pull, config)
    return memory, ProfiledWorkers(profile, learnt, config)


def _projection(window: Window, shared: AdaptiveMemory, workers: ProfiledWorkers) -> Projection | None:
    """Return the demand expected when a new replica could be ready, on the profile's workers. None if the demand is unknown."""
    pull = window.pulls[-1]
    speed, service_s = workers.tokens_per_s(shared.work), workers.service_s
    if pull.demand is None or speed is None or service_s is None:
        return None
    case = case_of(entry_role(pull.pools), window, shared, workers, workers.config)
    if case.work is None:
        return None
    return Projection(workers, shared.kv, rules.arriving_per_s(case.work), service_s, speed)


POLICY = PlannerPolicy(sla, follows_demand=True, needs_profile=True, states=(AdaptiveMemory, SlaMemory))
"""Mode sla as a policy."""
