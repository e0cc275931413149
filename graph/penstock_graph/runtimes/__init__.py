"""Pure: the services of a graph become process specs."""

from penstock_graph.runtimes.build import process_specs
from penstock_graph.runtimes.process import (
    KV_EVENTS_PORT,
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
    "KV_EVENTS_PORT",
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
