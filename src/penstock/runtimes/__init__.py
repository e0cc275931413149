"""What a graph becomes: the specifications of its processes, as its runtime says. Pure."""

from penstock.runtimes.build import process_specs
from penstock.runtimes.process import (
    DISCOVERY_SUFFIX,
    ENGINE_LIVENESS_S,
    KV_EVENTS_PORT,
    KV_EVENTS_SUFFIX,
    KV_REPLAY_SUFFIX,
    LIVENESS_S,
    PLANNER_ROLE,
    PORT,
    ProcessSpec,
    RuntimeContext,
    WorkerCommand,
    fill,
    filled_argv,
    filled_env,
    masked_argv,
    masked_env,
)
from penstock.runtimes.protocol import ClusterNeeds, Runtime, runtime_of

__all__ = [
    "DISCOVERY_SUFFIX",
    "ENGINE_LIVENESS_S",
    "KV_EVENTS_PORT",
    "KV_EVENTS_SUFFIX",
    "KV_REPLAY_SUFFIX",
    "LIVENESS_S",
    "PLANNER_ROLE",
    "PORT",
    "ClusterNeeds",
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
