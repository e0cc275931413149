"""Runtime ``simulated``: Penstock's own worker, which answers like vLLM and needs no GPU."""

from __future__ import annotations

from penstock_graph.models.enums import Role
from penstock_graph.models.graph import GraphSpec
from penstock_graph.models.service import ServiceSpec
from penstock_graph.runtimes.engine_flags import batch_flags, kv_transfer_flags, stream_flags
from penstock_graph.runtimes.process import PORT, RuntimeContext
from penstock_graph.runtimes.worker import WorkerCommand


def worker(spec: GraphSpec, service: ServiceSpec, context: RuntimeContext) -> WorkerCommand:
    """Return the command of one simulated worker."""
    argv = [context.python, "-m", "penstock_cli", "engine", "serve", spec.model.name]
    argv += ["--served-model-name", spec.served_name]
    argv += ["--host", context.host, "--port", "{port}"]
    argv += ["--role", service.role.value, "--profile", service.profile or spec.engine.profile]
    argv += ["--speed", f"{context.speed:g}"]
    argv += batch_flags(spec) + stream_flags(spec) + kv_transfer_flags(spec, service.role)
    if service.startup_seconds > 0:
        argv += ["--startup-seconds", f"{service.startup_seconds:g}"]
    reached_elsewhere = context.peer_host != context.host and service.role is not Role.AGGREGATED
    env = {"VLLM_NIXL_SIDE_CHANNEL_HOST": context.peer_host} if reached_elsewhere else {}
    return WorkerCommand(argv=tuple(argv), ports=(PORT,), env=env)
