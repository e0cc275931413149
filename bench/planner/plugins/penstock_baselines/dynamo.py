"""NVIDIA Dynamo 1.6's load loop for the target ``throughput``: one replica per role and tick of 5 s.

Dynamo reads each engine's own iterations. Here the interval's newest sums stand for them, so "any engine" and "all
engines" are both the mean: under a router that balances by load the difference is small.

Source: the planner of ai-dynamo 1.6.1: its load-based scaling, consolidation guard and start-up cancellation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from penstock.api import Role
from penstock_planner.decide.config import DecideConfig
from penstock_planner.decide.decision import Proposal, Step
from penstock_planner.decide.demand.observation import Pull, Window
from penstock_planner.decide.policies.drafting import drafted, proposed, waiting_requests
from penstock_planner.decide.policy import PlannerPolicy
from penstock_planner.decide.state import PlannerState, PolicyState

TICK_S = 5.0
"""The load interval."""
PREFILL_UP, PREFILL_DOWN = 1.0, 0.1
"""Queued prompt tokens / context length: up at or above, down below."""
DECODE_UP, DECODE_DOWN = 1.0, 0.6
"""(Scheduled + queued KV) / KV cache: up above, down below."""
CANCEL_AFTER = 2
"""Agreeing observations after which a starting replica is dropped."""


@dataclass(frozen=True, slots=True)
class DynamoParameters:
    """What a user would have measured.

    Attributes:
        context_tokens: Longest context, tokens, > 0; its prefill queue is measured in it.
        kv_tokens: KV cache of one replica, tokens, > 0.
    """

    context_tokens: float = 16_384.0
    kv_tokens: float = 400_000.0


def prefill_change(queued_contexts: float, ready: int) -> int:
    """Return +1, 0 or -1 for prefill.

    Args:
        queued_contexts: Queued prompt tokens of an engine / context length.
        ready: Ready engines, >= 1.

    Example: 0.05 on 2 engines: one would have 0.1: -1. 1.0: +1.
    """
    if queued_contexts >= PREFILL_UP:
        return 1
    return (
        -1 if queued_contexts < PREFILL_DOWN and not _would_refill(queued_contexts, ready, PREFILL_UP) else 0
    )


def decode_change(kv_fraction: float, ready: int) -> int:
    """Return +1, 0 or -1 for decode.

    Args:
        kv_fraction: (Scheduled + queued KV) / KV cache of an engine; may exceed 1.
        ready: Ready engines, >= 1.

    Example: 0.55 on 2 engines: one would have 1.1, so 0, whatever the down threshold says; on 3: 0.825, so -1.
    """
    if kv_fraction > DECODE_UP:
        return 1
    return -1 if kv_fraction < DECODE_DOWN and not _would_refill(kv_fraction, ready, DECODE_UP) else 0


@dataclass(frozen=True, slots=True)
class DynamoState(PolicyState):
    """What the load loop keeps between two decisions.

    Attributes:
        agreeing: Number of consecutive decisions in which each role was to shrink.
    """

    KEY: ClassVar[str] = "dynamo"

    agreeing: Mapping[Role, int] = field(default_factory=dict)


def dynamo_load(window: Window, state: PlannerState, config: DecideConfig) -> Proposal:
    """Return what the load loop asks for; without data of an engine, and while one starts, nothing grows."""
    pull = window.pulls[-1]
    proposals, agreed = [], dict(DynamoState.read(state.learned).agreeing)
    for role, pool in pull.pools.items():
        change, inputs = _change(pull, role, window, config)
        agreeing = agreed.get(role, 0)
        agreeing = agreeing + 1 if change is not None and change < 0 else 0
        desired, words = pool.replicas, "within"
        if change is None:
            words = "no data of the engines"
        elif pool.starting:
            is_cancelled = agreeing >= CANCEL_AFTER
            desired -= 1 if is_cancelled else 0
            words = "drops a starting replica" if is_cancelled else "scaling in progress"
        else:
            desired += change
            words = {1: "above", 0: "within", -1: "below"}[change]
        agreed[role] = 0 if desired < pool.replicas else agreeing
        step = Step("dynamo_load", inputs, None, words)
        proposals.append(drafted(role, pull, None if change is None else desired, step, config))
    return proposed(proposals, state, DynamoState(agreed))


def _change(
    pull: Pull, role: Role, window: Window, config: DecideConfig
) -> tuple[int | None, dict[str, float | None]]:
    pool = pull.pools[role]
    inputs: dict[str, float | None] = {}
    if not pool.ready:
        return None, inputs
    changes: list[int | None] = []
    if role is not Role.DECODE:
        queued = None if pull.demand is None else pull.demand.waiting_tokens / pool.ready
        contexts = None if queued is None else queued / config.parameters_as(DynamoParameters).context_tokens
        inputs["queued_contexts"] = contexts
        changes.append(None if contexts is None else prefill_change(contexts, pool.ready))
    if role is not Role.PREFILL:
        load = _kv_load(pull, role, window, config)
        inputs["kv_fraction"] = load
        changes.append(None if load is None else decode_change(load, pool.ready))
    known = [change for change in changes if change is not None]
    return (max(known) if len(known) == len(changes) else None), inputs


def _kv_load(pull: Pull, role: Role, window: Window, config: DecideConfig) -> float | None:
    kv, waiting = pull.kv, waiting_requests(pull, role)
    if not kv.fresh or kv.unknown or waiting is None:
        return None
    demands = [each.demand for each in window.pulls if each.demand is not None]
    arrivals = sum(demand.arrivals for demand in demands)
    prompt = sum(demand.prompt_tokens for demand in demands) / arrivals if arrivals else 0.0
    return kv.total / kv.fresh + waiting * prompt / (
        kv.fresh * config.parameters_as(DynamoParameters).kv_tokens
    )


def _would_refill(value: float, ready: int, up: float) -> bool:
    """Tell whether one engine fewer would be at the up threshold: the consolidation guard."""
    return ready < 2 or value * ready / (ready - 1) >= up


POLICY = PlannerPolicy(dynamo_load, has_ledger=False, interval_s=TICK_S, parameters=DynamoParameters)
