"""Runtime ``sglang``: ``sglang serve`` as it is; prefill and decode meet in a bootstrap room.

Written for SGLang 0.5.23. tests/real/test_sglang.py runs it as rendered here, on a processor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from penstock.api.enums import Environment, KvBufferDevice, Role
from penstock.api.graph import GraphSpec
from penstock.api.runtimes import SHIPPED
from penstock.api.service import ServiceSpec
from penstock.runtimes.engine_flags import engine_requests, kv_event_flags, kv_sockets, tls_flags
from penstock.runtimes.programs import check_program, program_of
from penstock.runtimes.protocol import (
    KV_EVENTS_PORT,
    PORT,
    SIDE_CHANNEL_PORT,
    Runtime,
    RuntimeContext,
    WorkerCommand,
)
from penstock_sglang.bootstrap import Bootstrap

_MODES: Final = {Role.PREFILL: "prefill", Role.DECODE: "decode"}
_RENDEZVOUS_PORT: Final = 5000
"""Port on which the nodes of one replica meet. Chosen: SGLang has no default for it."""

_EVENT_BLOCK_TOKENS: Final = 16

_PROGRAM: Final = "sglang"
_HAS: Final = "SGLang, without a GPU .venv-sglang, which `make sglang` makes (docs/sglang.md)"


class SGLang(Runtime):
    """SGLang behind Penstock's router."""

    traits = SHIPPED["sglang"]
    kv_transfer = Bootstrap()

    def worker(self, spec: GraphSpec, service: ServiceSpec, context: RuntimeContext) -> WorkerCommand:
        """Return the command of one SGLang server."""
        argv = [program_of(spec, _PROGRAM), "serve", "--model-path", spec.model.name]
        argv += ["--served-model-name", spec.served_name, "--host", context.host, "--port", f"{{{PORT}}}"]
        # Without the report usage holds no cached tokens, and the router could not count the prefill worker's hits.
        argv += ["--enable-metrics", "--enable-cache-report"]
        argv += _parallel_flags(service) + _batch_flags(spec) + _schedule_flags(spec) + _device_flags(spec)
        argv += tls_flags(spec, context)
        ports: tuple[str, ...] = (PORT,)
        if service.role in _MODES:
            argv += [
                "--disaggregation-mode",
                _MODES[service.role],
                "--disaggregation-transfer-backend",
                "nixl",
            ]
        if service.role is Role.PREFILL:
            argv += ["--disaggregation-bootstrap-port", f"{{{SIDE_CHANNEL_PORT}}}"]
            ports = (PORT, SIDE_CHANNEL_PORT)
        events = kv_event_flags(spec, service.role, context, kv_sockets(context))
        if events and context.environment is Environment.LOCAL:
            ports = (*ports, KV_EVENTS_PORT)
        argv += events
        return WorkerCommand(
            tuple(argv), ports, _environment(spec, service, context), self.traits.health_path
        )

    def pod_environment(self, role: Role) -> Mapping[str, str]:
        """Return the address at which other workers reach this one."""
        return {"SGLANG_HOST_IP": "$(POD_IP)"} if role.is_worker else {}

    def pod_requests(self, spec: GraphSpec, role: Role, gpus: int) -> Mapping[str, str]:
        """Return what SGLang's processes need: tokenizer, detokenizer and a scheduler for each GPU, as vLLM's."""
        del role
        return engine_requests(spec, gpus)

    def node_args(self, spec: GraphSpec, nodes: int, rank: str) -> list[str]:
        """Return SGLang's own rendezvous, at the leader that LeaderWorkerSet names to each container."""
        del spec
        at_leader = f"$(LWS_LEADER_ADDRESS):{_RENDEZVOUS_PORT}"
        return ["--nnodes", str(nodes), "--node-rank", rank, "--dist-init-addr", at_leader]

    def check_installed(self, spec: GraphSpec, context: RuntimeContext) -> None:
        """Refuse a program that is not there: its workers would end at their start."""
        del context
        check_program(spec, _PROGRAM, _HAS)


def _parallel_flags(service: ServiceSpec) -> list[str]:
    """Return tensor parallelism over all GPUs of a replica, of several nodes too, as SGLang's guides have it."""
    return ["--tensor-parallel-size", str(service.gpus_per_replica)]


def _batch_flags(spec: GraphSpec) -> list[str]:
    """Return cache and batch flags; a size left at null is left to SGLang."""
    engine = spec.engine
    blocks, block_tokens = engine.kv_blocks, engine.block_tokens
    if block_tokens is None and spec.router.kv_events_port is not None:
        block_tokens = _EVENT_BLOCK_TOKENS  # the router's own guess; SGLang's pages may have one token
    sizes = (
        ("--context-length", spec.model.context_tokens),
        ("--page-size", block_tokens),
        ("--max-total-tokens", None if blocks is None else blocks * (block_tokens or 1)),
        ("--max-running-requests", engine.max_running_requests),
        ("--chunked-prefill-size", engine.max_batch_tokens),
    )
    return [word for flag, value in sizes if value is not None for word in (flag, str(value))]


def _schedule_flags(spec: GraphSpec) -> list[str]:
    """Return the flags of streaming and scheduling order; a tier's priority is low where it is served first, as vLLM's."""
    flags = []
    if spec.engine.stream_interval_tokens != 1:
        flags += ["--stream-interval", str(spec.engine.stream_interval_tokens)]
    if spec.router.tiers.enabled:
        flags += ["--enable-priority-scheduling", "--schedule-low-priority-values-first"]
    return flags


def _is_on_processor(spec: GraphSpec) -> bool:
    return spec.engine.kv_buffer_device is KvBufferDevice.CPU


def _device_flags(spec: GraphSpec) -> list[str]:
    """Return what a server without a GPU needs, with kernels that PyTorch itself has."""
    if not _is_on_processor(spec):
        return []
    flags = ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
    return [*flags, "--disable-overlap-schedule"]


def _environment(spec: GraphSpec, service: ServiceSpec, context: RuntimeContext) -> dict[str, str]:
    env = {"SGLANG_USE_CPU_ENGINE": "1"} if _is_on_processor(spec) else {}
    if service.role in _MODES and context.environment is Environment.LOCAL:
        env["SGLANG_HOST_IP"] = context.peer_host
    return env
