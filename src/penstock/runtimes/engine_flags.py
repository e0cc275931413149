"""Flags that vLLM defines and the simulated worker and Dynamo's vLLM worker share, and what a vLLM needs of its host."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Final

from penstock.api.enums import Environment, KvBufferDevice, KvConnector, Role
from penstock.api.graph import GraphSpec
from penstock.api.service import ServiceSpec
from penstock.kube.objects.names import WORKER_TLS_FOLDER
from penstock.runtimes.kv_stores import store_gib, with_store
from penstock.runtimes.protocol import (
    CACHE_FOLDER,
    KV_EVENTS_PORT,
    KV_EVENTS_SUFFIX,
    KV_REPLAY_SUFFIX,
    RuntimeContext,
)

_KV_EVENTS = "--kv-events-config"
_KV_TRANSFER = "--kv-transfer-config"
_LEASE = "kv_lease_duration"
_LAST_PORT = 65535
_RENDEZVOUS_PORT = "29501"
"""vLLM's default of --master-port."""
_SPLITS = {
    "--tensor-parallel-size": "tensor",
    "-tp": "tensor",
    "--pipeline-parallel-size": "pipeline",
    "-pp": "pipeline",
}
MOONCAKE_CONNECTOR: Final = "MooncakeConnector"
LEADER_RANK = "0"
"""Rank of the node that answers a replica's requests."""
_KV_ROLES = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer"}


_CPU_ENGINE_GIB: Final = 4
"""With one core; measured for manifests/samples/vllm-cpu.yaml: two workers run on two cores and 8 GB."""
_MEMORY_GIB: Final = 4
"""Chosen: of host memory for API server and engine core, and again for each GPU's process; weights are on the GPU."""


def engine_requests(spec: GraphSpec, gpus: int) -> dict[str, str]:
    """Return CPU and memory that a pod of one vLLM requests, so that no neighbour takes its cores or memory.

    Source: docs.vllm.ai/en/latest/configuration/optimization, "CPU Resources for GPU Deployments": API server, engine core
    and one process a GPU, so 2 + N cores at least.
    """
    kept_gib = store_gib(spec.engine.kv_offload)
    if spec.engine.kv_buffer_device is KvBufferDevice.CPU:
        return {"cpu": "1", "memory": f"{_CPU_ENGINE_GIB + kept_gib}Gi"}
    return {"cpu": str(2 + gpus), "memory": f"{_MEMORY_GIB * (1 + gpus) + kept_gib}Gi"}


def batch_flags(spec: GraphSpec) -> list[str]:
    """Return cache and batch flags; a size left at null is left to the runtime."""
    engine = spec.engine
    sizes = (
        ("--max-model-len", spec.model.context_tokens),
        ("--block-size", engine.block_tokens),
        ("--num-gpu-blocks-override", engine.kv_blocks),
        ("--max-num-seqs", engine.max_running_requests),
        ("--max-num-batched-tokens", engine.max_batch_tokens),
    )
    return [word for flag, value in sizes if value is not None for word in (flag, str(value))]


def stream_flags(spec: GraphSpec) -> list[str]:
    """Return the flags of streaming and scheduling order."""
    flags = []
    if spec.engine.stream_interval_tokens != 1:
        flags += ["--stream-interval", str(spec.engine.stream_interval_tokens)]
    if spec.router.tiers.enabled:
        flags += ["--scheduling-policy", "priority"]
    return flags


def adapter_flags(spec: GraphSpec) -> list[str]:
    """Return the flags that load the model's LoRA adapters, all of which may share a batch.

    vLLM's own default computes requests of one adapter at a time. The highest rank is left to it, 16; ``args`` of a service
    come behind these flags and win.
    """
    adapters = spec.model.adapters
    if not adapters:
        return []
    modules = [f"{each.name}={each.path}" for each in adapters]
    return ["--enable-lora", "--max-loras", str(len(adapters)), "--lora-modules", *modules]


def tls_flags(spec: GraphSpec, context: RuntimeContext) -> list[str]:
    """Return the certificate of workers that speak https, as vLLM, SGLang and the simulated worker take it.

    In a pod the workers' Secret is mounted, and both engines read a renewed certificate by themselves.
    """
    tls = spec.engine.tls
    if tls is None:
        return []
    is_local = context.environment is Environment.LOCAL and tls.folder is not None
    folder = PurePath(tls.folder or "") if is_local else PurePath(WORKER_TLS_FOLDER)
    flags = ["--ssl-certfile", str(folder / "tls.crt"), "--ssl-keyfile", str(folder / "tls.key")]
    return flags if spec.traits.is_simulated else [*flags, "--enable-ssl-refresh"]


def names_answered(argv: Sequence[str]) -> Iterator[str]:
    """Yield the names of model and adapters that a worker with these arguments answers to."""
    flag = ""
    for word in argv:
        if word.startswith("--"):
            flag = word.replace("_", "-")  # both spellings are in use
        elif flag in {"--served-model-name", "--lora-modules"}:
            yield word.partition("=")[0]


def preemption_config(spec: GraphSpec) -> dict[str, object] | None:
    """Return the configuration of preemption by tier that simulated workers take; None without tiers."""
    if not spec.router.tiers.enabled:
        return None
    return spec.engine.preemption.model_dump(by_alias=True, exclude_none=True)


def parallel_flags(service: ServiceSpec) -> list[str]:
    """Return tensor parallelism within a node and pipeline parallelism over nodes.

    Source: vLLM's documentation, "Parallelism and Scaling", advises this split.
    """
    flags = ["--tensor-parallel-size", str(service.gpus_per_replica // service.nodes_per_replica)]
    if service.nodes_per_replica > 1:
        flags += ["--pipeline-parallel-size", str(service.nodes_per_replica)]
    return flags


def split_of(argv: Sequence[str]) -> tuple[int, int]:
    """Return the tensor and the pipeline parallelism that a command states; the last of a flag counts, as in vLLM."""
    sizes = {"tensor": 1, "pipeline": 1}
    for at, word in enumerate(argv):
        name, has_value, value = word.partition("=")
        kind = _SPLITS.get(name.replace("_", "-"))
        text = value if has_value else next(iter(argv[at + 1 : at + 2]), "")
        if kind is not None and text.isdecimal():
            sizes[kind] = int(text)
    return sizes["tensor"], sizes["pipeline"]


def node_flags(nodes: int, rank: str) -> list[str]:
    """Return PyTorch's own rendezvous of the nodes of one replica, without Ray; followers answer no requests.

    LeaderWorkerSet gives each container ``LWS_LEADER_ADDRESS``.

    Source: vLLM's documentation, "Parallelism and Scaling", section multiprocessing; vLLM 0.32 and Dynamo's vLLM worker.
    """
    flags = ["--distributed-executor-backend", "mp", "--nnodes", str(nodes), "--node-rank", rank]
    flags += ["--master-addr", "$(LWS_LEADER_ADDRESS)", "--master-port", _RENDEZVOUS_PORT]
    return flags if rank == LEADER_RANK else [*flags, "--headless"]


def kv_event_flags(spec: GraphSpec, role: Role, context: RuntimeContext, local: tuple[str, str]) -> list[str]:
    """Return the publishing of KV events, where the router follows them: of caches that decide who gets a prompt.

    Args:
        spec: Says whether.
        role: The worker's.
        context: In a cluster workers have an address each, and bind the graph's port there and `kv_replay_port`.
        local: What a worker of one host binds in its place, for events and to serve earlier ones.
    """
    port = spec.router.kv_events_port
    if port is None or (role is Role.DECODE and not spec.engine.switchable):
        return []
    endpoint, replay = local
    if context.environment is Environment.KUBERNETES:
        endpoint, replay = f"tcp://*:{port}", f"tcp://*:{kv_replay_port(port)}"
    config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": endpoint,
        "replay_endpoint": replay,
    }
    return [_KV_EVENTS, json.dumps(config)]


def kv_sockets(context: RuntimeContext) -> tuple[str, str]:
    """Return where vLLM and SGLang publish KV events and answer for earlier ones on one machine.

    Of TCP addresses they bind wildcards alone, which would show the prompts' token ids to the machine's network. So they get
    sockets in the folder of the statefile, which its owner alone may enter.
    """
    socket = f"ipc://{PurePath(context.discovery).with_suffix('')}.{{{KV_EVENTS_PORT}}}"
    return f"{socket}{KV_EVENTS_SUFFIX}", f"{socket}{KV_REPLAY_SUFFIX}"


def kv_replay_port(port: int) -> int:
    """Return the port on which workers serve earlier KV events: the one after the graph's, or before the last."""
    return port + 1 if port < _LAST_PORT else port - 1


def kv_events_endpoint(argv: Sequence[str]) -> str | None:
    """Return where a worker of this command publishes KV events; None: nowhere."""
    return _kv_endpoint(argv, "endpoint")


def kv_replay_endpoint(argv: Sequence[str]) -> str | None:
    """Return where a worker of this command serves earlier KV events; None: nowhere."""
    return _kv_endpoint(argv, "replay_endpoint")


def _kv_endpoint(argv: Sequence[str], key: str) -> str | None:
    try:
        endpoint = json.loads(argv[argv.index(_KV_EVENTS) + 1])[key]
    except (ValueError, LookupError, TypeError):
        return None
    return endpoint if isinstance(endpoint, str) else None


def cache_variables(context: RuntimeContext) -> dict[str, str]:
    """Return the folders of what vLLM, Inductor and Triton compile, on one machine; a pod has a file system of its own.

    They are shared by default, and an engine that is killed while it writes leaves a torn file of which the next one dies.
    """
    if context.environment is not Environment.LOCAL:
        return {}
    names = {"VLLM_CACHE_ROOT": "vllm", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
    return {name: f"{{{CACHE_FOLDER}}}/{folder}" for name, folder in names.items()}


def connectors(argv: Sequence[str]) -> tuple[str, ...] | None:
    """Return the names of the KV connectors that a command configures, a MultiConnector's own ones too.

    The last flag counts, as in vLLM.

    Returns:
        None where no flag is given, or its value cannot be read.
    """
    found: tuple[str, ...] | None = None
    for at, word in enumerate(argv):
        name, has_value, value = word.partition("=")
        text = value if has_value else next(iter(argv[at + 1 : at + 2]), "")
        if name.replace("_", "-") == f"{_KV_TRANSFER}.kv-connector":
            found = (text,)
        elif name.replace("_", "-") == _KV_TRANSFER:
            found = _connectors_in(text)
    return found


def _connectors_in(text: str) -> tuple[str, ...] | None:
    try:
        config = json.loads(text)
        extra = config.get("kv_connector_extra_config") or {}
        each = [config["kv_connector"], *(inner["kv_connector"] for inner in extra.get("connectors", ()))]
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return None
    return tuple(each) if all(isinstance(name, str) for name in each) else None


def kv_transfer_flags(spec: GraphSpec, service: ServiceSpec, *, kv_role: str | None = None) -> list[str]:
    """Return the configuration of a worker's connectors: between prefill and decode, and to where KV is kept besides.

    The life of blocks kept for the next turn goes to decode alone, so that changing it rolls no prefill worker. ``kv_role``
    overrides what the service's role implies. Workers that can be of either role have one configuration.
    """
    config = with_store(_kv_transfer_config(spec, service, kv_role), spec.engine.kv_offload)
    return [] if config is None else [_KV_TRANSFER, json.dumps(config, separators=(",", ":"))]


def _kv_transfer_config(
    spec: GraphSpec, service: ServiceSpec, kv_role: str | None
) -> dict[str, object] | None:
    role, lease = service.role, spec.lease_of(service)
    if role not in _KV_ROLES:
        return None
    extra = {_LEASE: lease.duration_seconds}
    if spec.engine.switchable:
        kv_role = "kv_both"
    if role is Role.DECODE or spec.engine.switchable:
        extra["decoder_kv_blocks_ttl"] = lease.decoder_blocks_ttl_seconds
    config: dict[str, object] = {
        "kv_connector": "NixlConnector",
        "kv_role": kv_role or _KV_ROLES[role],
        "kv_connector_extra_config": extra,
    }
    if spec.engine.kv_connector is KvConnector.MOONCAKE:
        config["kv_connector"] = MOONCAKE_CONNECTOR
        del config["kv_connector_extra_config"]
    if spec.engine.kv_buffer_device is not None:
        config["kv_buffer_device"] = spec.engine.kv_buffer_device.value
    return config


def granted_lease_s(argv: Sequence[str]) -> float | None:
    """Return the lease, in seconds, that a command made by `kv_transfer_flags` grants; None: it names none that can be read."""
    given = [argv[at + 1] for at, word in enumerate(argv[:-1]) if word == _KV_TRANSFER]
    try:
        extra = json.loads(given[-1])["kv_connector_extra_config"]
        inner = extra.get("connectors")  # the first hands KV over
        found = (extra if inner is None else inner[0]["kv_connector_extra_config"])[_LEASE]
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return None
    return found if isinstance(found, int | float) else None
