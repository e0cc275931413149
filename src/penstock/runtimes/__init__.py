"""The specifications of a graph's processes, as its runtime defines them. Pure."""

from penstock.runtimes.build import process_specs
from penstock.runtimes.protocol import (
    DISCOVERY_SUFFIX,
    KV_EVENTS_PORT,
    KV_EVENTS_SUFFIX,
    KV_REPLAY_SUFFIX,
    LIVENESS_S,
    PLANNER_ROLE,
    PORT,
    ProcessSpec,
    Runtime,
    RuntimeContext,
    WorkerCommand,
    fill,
    filled_argv,
    filled_env,
    masked_argv,
    masked_env,
    runtime_of,
)

__all__ = [
    "DISCOVERY_SUFFIX",
    "KV_EVENTS_PORT",
    "KV_EVENTS_SUFFIX",
    "KV_REPLAY_SUFFIX",
    "LIVENESS_S",
    "PLANNER_ROLE",
    "PORT",
    "ProcessSpec",
    "Runtime",
    "RuntimeContext",
    "WorkerCommand",
    "fill",
    "filled_argv",
    "filled_env",
    "masked_argv",
    "masked_env",
    "process_specs",
    "runtime_of",
]
