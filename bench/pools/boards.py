"""What shares a pool: two, three, five and eight graphs, each with its trace, its busy hours and what the pool grants it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.api.enums import PoolPriority

AZURE, MOONCAKE = "AzureLLMInferenceTrace_conv.csv", "mooncake_conversation_trace.jsonl"
A100, H100 = "a100-llama-8b-bf16-tp1", "h100-llama-8b-bf16-tp1"
H100_TP2, H100_TP4 = "h100-llama-3.3-70b-tp2", "h100-llama-3.3-70b-tp4"
HIGH, NORMAL, LOW = PoolPriority.HIGH, PoolPriority.NORMAL, PoolPriority.LOW


@dataclass(frozen=True, slots=True)
class Load:
    """One graph of a board.

    Attributes:
        trace: Where its requests come from; of Mooncake's, prompts are cut at 32,000 tokens.
        rate: Requests/s while it is busy; a tenth of it else.
        busy: From and to, in slots from the board's start.
        guaranteed: GPUs; its budget where each graph has its own.
        priority: Who borrows first.
        profile: Of its workers.
        gpus: Of one replica.
    """

    trace: str
    rate: float
    busy: tuple[float, float]
    guaranteed: int
    priority: PoolPriority = NORMAL
    profile: str = A100
    gpus: int = 1


@dataclass(frozen=True, slots=True)
class Board:
    """One pool and its graphs; who asks first among equals is who stands first.

    Attributes:
        about: What it shows, as a sentence.
        gpus: Of the pool: the sum of the guarantees.
        slots: That it lasts.
        loads: By name.
    """

    about: str
    gpus: int
    slots: int
    loads: Mapping[str, Load]


BOARDS: Mapping[str, Board] = {
    "two": Board(
        "A viral model of low priority fills the pool a slot before the graph becomes busy to which most of it is guaranteed.",
        9,
        3,
        {
            "viral": Load(MOONCAKE, 3.0, (0.0, 3.0), 3, LOW),
            "agents": Load(MOONCAKE, 2.0, (1.0, 2.5), 6, HIGH),
        },
    ),
    "three": Board(
        "One is busy after the other, and in the second slot two are: all have one priority and a third of the pool.",
        9,
        3,
        {
            "chat": Load(AZURE, 5.0, (0.0, 1.0), 3),
            "agents": Load(MOONCAKE, 2.5, (1.0, 2.0), 3),
            "viral": Load(AZURE, 20.0, (1.0, 4 / 3), 3),
        },
    ),
    "five": Board(
        "A viral model of low priority, and four graphs busy one after the other, of which two overlap.",
        15,
        4,
        {
            "viral": Load(MOONCAKE, 3.0, (0.5, 3.5), 3, LOW),
            "chat": Load(AZURE, 15.0, (1.0, 2.0), 3, HIGH),
            "search": Load(MOONCAKE, 1.2, (1.5, 3.0), 3, HIGH),
            "agents": Load(MOONCAKE, 1.2, (2.0, 3.0), 3),
            "code": Load(MOONCAKE, 1.2, (3.0, 4.0), 3),
        },
    ),
    "eight": Board(
        "Replicas of one, two and four GPUs, three priorities, one viral. Of the pool's GPUs 26 are floors, one replica to prefill"
        " and one to decode for each graph: 19 can be lent.",
        45,
        4,
        {
            "viral": Load(MOONCAKE, 8.0, (0.5, 3.5), 4, LOW, H100),
            "chat": Load(AZURE, 15.0, (1.0, 2.0), 3, HIGH, H100),
            "search": Load(MOONCAKE, 5.0, (2.0, 3.0), 4, NORMAL, H100),
            "code": Load(MOONCAKE, 4.0, (1.0, 2.5), 4, NORMAL, H100),
            "notes": Load(MOONCAKE, 3.0, (3.0, 4.0), 4, LOW, H100),
            "large": Load(MOONCAKE, 1.2, (1.5, 2.5), 8, HIGH, H100_TP2, 2),
            "batch": Load(MOONCAKE, 0.8, (0.0, 4.0), 6, LOW, H100_TP2, 2),
            "largest": Load(MOONCAKE, 1.5, (2.0, 3.5), 12, NORMAL, H100_TP4, 4),
        },
    ),
}
