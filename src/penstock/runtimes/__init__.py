"""What a graph becomes: the specifications of its processes, for runtimes simulated, vllm and dynamo. Pure."""

from penstock.runtimes.build import process_specs
from penstock.runtimes.process import (
    ENGINE_LIVENESS_S,
    KV_EVENTS_PORT,
    KV_EVENTS_SUFFIX,
    KV_REPLAY_SUFFIX,
    LIVENESS_S,
    PLANNER_ROLE,
    PORT,
    ProcessSpec,
    RuntimeContext,
    fill,
    filled_argv,
    filled_env,
    masked_argv,
    masked_env,
)

__all__ = [
    "ENGINE_LIVENESS_S",
    "KV_EVENTS_PORT",
    "KV_EVENTS_SUFFIX",
    "KV_REPLAY_SUFFIX",
    "LIVENESS_S",
    "PLANNER_ROLE",
    "PORT",
    "ProcessSpec",
    "RuntimeContext",
    "fill",
    "filled_argv",
    "filled_env",
    "masked_argv",
    "masked_env",
    "process_specs",
]
