"""Runtime ``simulated``: Penstock's own worker, which answers like vLLM and needs no GPU."""

from __future__ import annotations

import json
from collections.abc import Mapping

from penstock.api.enums import Environment, Role
from penstock.api.graph import GraphSpec
from penstock.api.runtimes import SHIPPED
from penstock.api.service import ServiceSpec
from penstock.runtimes.engine_flags import (
    batch_flags,
    kv_event_flags,
    kv_transfer_flags,
    preemption_config,
    stream_flags,
    tls_flags,
)
from penstock.runtimes.protocol import (
    KV_EVENTS_PORT,
    KV_REPLAY_PORT,
    OWN_REQUESTS,
    PORT,
    Runtime,
    RuntimeContext,
    WorkerCommand,
)


class Simulated(Runtime):
    """Penstock's own workers."""

    traits = SHIPPED["simulated"]

    def worker(self, spec: GraphSpec, service: ServiceSpec, context: RuntimeContext) -> WorkerCommand:
        """Return the command of one simulated worker."""
        argv = [context.python, "-m", "penstock.cli", "engine", "serve", spec.model.name]
        for name in spec.model_names:
            argv += ["--served-model-name", name]
        argv += ["--host", context.own_host, "--port", "{port}"]
        role = "both" if spec.engine.switchable else service.role.value
        argv += ["--role", role, "--profile", service.profile or spec.engine.profile]
        argv += ["--speed", f"{context.speed:g}"]
        argv += batch_flags(spec) + stream_flags(spec) + kv_transfer_flags(spec, service)
        argv += tls_flags(spec, context)
        for each in spec.model.adapters:
            argv += ["--lora-modules", f"{each.name}={each.path}"]
        if (preemption := preemption_config(spec)) is not None:
            argv += ["--preemption-config", json.dumps(preemption, separators=(",", ":"))]
        # Workers of one host need ports each; the router reads them in the statefile.
        ports: tuple[str, ...] = (KV_EVENTS_PORT, KV_REPLAY_PORT)
        host = f"[{context.own_host}]" if ":" in context.own_host else context.own_host
        endpoint, replay = (f"tcp://{host}:{{{port}}}" for port in ports)
        events = kv_event_flags(spec, service.role, context, (endpoint, replay))
        argv += events
        if spec.engine.request_limit is not None:
            argv += ["--engine-request-limit", str(spec.engine.request_limit)]
            argv += ["--engine-request-queue", str(spec.engine.request_queue)]
        if service.startup_seconds > 0:
            argv += ["--startup-seconds", f"{service.startup_seconds:g}"]
        reached_elsewhere = context.peer_host != context.own_host and service.role is not Role.AGGREGATED
        env = {"VLLM_NIXL_SIDE_CHANNEL_HOST": context.peer_host} if reached_elsewhere else {}
        has_own_ports = events and context.environment is Environment.LOCAL
        return WorkerCommand(argv=tuple(argv), ports=(PORT, *ports) if has_own_ports else (PORT,), env=env)

    def pod_requests(self, spec: GraphSpec, role: Role, gpus: int) -> Mapping[str, str]:
        """Return an idle process's need, whatever it models."""
        del spec, role, gpus
        return OWN_REQUESTS
