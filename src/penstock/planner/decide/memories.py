"""The modes' memories by their key, and their translation when a planner resumes elsewhere or later."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from penstock.planner.decide.adaptive import memory as adaptive_memory
from penstock.planner.decide.sla import memory as sla_memory
from penstock.planner.decide.state import Memory, PlannerState

MEMORIES: Final = {"adaptive": adaptive_memory, "sla": sla_memory}
"""What reads, writes and moves each of the keys of a state's memory."""


def carried(memory: Memory) -> Memory:
    """Return what another graph's planner starts from; another autoscaler's memory is left out."""
    made: Memory = {}
    for key, mode in MEMORIES.items():
        if key in memory:
            made = {**made, **mode.write(mode.carried(mode.read(memory)))}
    return made


def resumed(state: PlannerState, by_s: float, now_s: float) -> PlannerState:
    """Return the state of a planner after a restart, its times moved to another clock.

    Args:
        state: As the ledger has it.
        by_s: How much more the clock shows than the ledger's; another autoscaler's memory, whose times are not known,
            is forgotten unless it is 0.
        now_s: No remembered time is after it.
    """
    memory: Memory = {} if by_s else state.memory
    for key, mode in MEMORIES.items():
        if key in state.memory:
            memory = {**memory, **mode.write(mode.resumed(mode.read(state.memory), by_s, now_s))}
    return replace(state, memory=memory)
