"""Runtime ``dynamo``: NVIDIA Dynamo's own frontend, vLLM workers and mocker.

Dynamo's frontend takes the router's place, because its workers speak Dynamo's request plane, not HTTP;
``{port}`` of a worker is its status server (/health, /metrics). Discovery is by files on one machine and
by the Kubernetes API in a cluster.

Source: docs.nvidia.com/dynamo/v1.6.0/reference: components/runtime-configuration,
components/frontend-configuration, backends/v-llm-configuration, components/mocker-cli-reference and
observability/health-checks. Frontend and mocker are run as rendered here by tests/real/test_dynamo.py and
e2e/test_dynamo.py; the flags of vLLM workers were read, not run.
"""

from __future__ import annotations

import math
import subprocess
from collections.abc import Mapping
from pathlib import PurePath
from typing import Final

from penstock.api.enums import AdmissionMode, Environment, Role
from penstock.api.graph import GraphSpec
from penstock.api.router_queues import AdmissionConfig
from penstock.api.runtimes import DYNAMO_FRONTEND, SHIPPED
from penstock.api.service import ServiceSpec
from penstock.core.errors import InvalidSpecError, ManifestProblem
from penstock.kube.kinds import Kind
from penstock.runtimes.engine_flags import (
    batch_flags,
    cache_variables,
    engine_requests,
    kv_transfer_flags,
    node_flags,
    parallel_flags,
    stream_flags,
)
from penstock.runtimes.protocol import (
    OWN_REQUESTS,
    PORT,
    SIDE_CHANNEL_PORT,
    ClusterNeeds,
    Runtime,
    RuntimeContext,
    WorkerCommand,
)

_IMPORT_S: Final = 30.0
"""Real seconds. Chosen: finding a module takes milliseconds, on a busy machine a second."""
_FIND: Final = "import sys, importlib.util as u; sys.exit(u.find_spec('dynamo.frontend') is None)"

FRONTEND_HEALTH_PATH = "/live"
"""Answers 200 while the process lives; so does its /health, with or without workers."""

WORKER_METADATA: Final = Kind("nvidia.com/v1alpha1", "DynamoWorkerMetadata", "dynamoworkermetadatas")
"""In which workers register in a cluster."""

_MODES = {Role.PREFILL: "prefill", Role.DECODE: "decode"}

_REGISTERED_IS_HEALTHY = {"DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS": '["generate"]'}
"""Without it a mocker's /health answers 503 for ever: its endpoint registers no health check payload."""


class Dynamo(Runtime):
    """NVIDIA Dynamo behind its own frontend."""

    traits = SHIPPED["dynamo"]
    cluster = ClusterNeeds(
        fields={"POD_NAMESPACE": "metadata.namespace", "POD_UID": "metadata.uid"},
        # Source: ai-dynamo/dynamo, lib/runtime/src/discovery/kube/daemon.rs, which watches slices with these.
        service_labels={
            "nvidia.com/dynamo-discovery-backend": "kubernetes",
            "nvidia.com/dynamo-discovery-enabled": "true",
        },
        # Each pod applies its own object, server-side, and watches those of the others; its owner's end removes it.
        verbs={("nvidia.com", "dynamoworkermetadatas"): ("create", "get", "list", "patch", "watch")},
        kind=WORKER_METADATA,
        kind_source="in which workers register, and this cluster does not know it; install Dynamo's "
        "CustomResourceDefinitions, or create manifests/dynamo-discovery.yaml",
    )
    has_discovery_folder = True

    def worker(self, spec: GraphSpec, service: ServiceSpec, context: RuntimeContext) -> WorkerCommand:
        """Return the command of one Dynamo worker: vLLM's, or the mocker's."""
        argv = _mocker(spec, service, context) if spec.engine.mocker else _vllm(spec, service, context)
        env = {**_planes(context), "DYN_SYSTEM_PORT": "{port}"}
        if context.environment is Environment.LOCAL:
            env["DYN_SYSTEM_HOST"] = context.host
        env |= _REGISTERED_IS_HEALTHY if spec.engine.mocker else cache_variables(context)
        ports: tuple[str, ...] = (PORT,)
        if service.role in _MODES and not spec.engine.mocker:
            env["VLLM_NIXL_SIDE_CHANNEL_HOST"] = context.peer_host
            env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = "{side_channel_port}"
            ports = (PORT, SIDE_CHANNEL_PORT)
        elif service.role is Role.PREFILL:
            ports = (PORT, SIDE_CHANNEL_PORT)
        if spec.engine.request_limit is not None:
            env["DYN_ENGINE_REQUEST_LIMIT"] = str(spec.engine.request_limit)
            env["DYN_DYNAMO_REQUEST_QUEUE_LIMIT"] = str(spec.engine.request_queue)
        return WorkerCommand(argv=tuple(argv), ports=ports, env={**env, **_patience(service, context)})

    def frontend(self, spec: GraphSpec, service: ServiceSpec, context: RuntimeContext) -> WorkerCommand:
        """Return the command of Dynamo's frontend, which routes in place of ours."""
        argv = [python_of(spec, context), "-m", "dynamo.frontend", "--http-host", context.host]
        argv += ["--http-port", "{port}"]
        argv += ["--router-mode", DYNAMO_FRONTEND.policies[spec.router.policy]]
        # Without it a request is lost whose worker leaves before it has begun to answer.
        argv += ["--migration-limit", str(spec.router.retries.max_per_request)]
        if spec.router.admission.mode is AdmissionMode.TOKEN_CAPACITY:
            argv += _admission_flags(spec.router.admission)
        env = {**_planes(context), **_patience(service, context)}
        return WorkerCommand(argv=tuple(argv), env=env, health_path=FRONTEND_HEALTH_PATH)

    def pod_environment(self, role: Role) -> Mapping[str, str]:
        """Return the address that a pod registers."""
        del role
        return {"DYN_TCP_RPC_HOST": "$(POD_IP)"}

    def pod_requests(self, spec: GraphSpec, role: Role, gpus: int) -> Mapping[str, str]:
        """Return what vLLM needs; a mocker models it, and a frontend before real workers keeps a core busy, as our router does."""
        if spec.engine.mocker:
            return OWN_REQUESTS
        return engine_requests(spec, gpus) if role.is_worker else {**OWN_REQUESTS, "cpu": "1"}

    def node_args(self, spec: GraphSpec, nodes: int, rank: str) -> list[str]:
        """Return vLLM's own rendezvous; a mocker knows no nodes."""
        return [] if spec.engine.mocker else node_flags(nodes, rank)

    def check_installed(self, spec: GraphSpec, context: RuntimeContext) -> None:
        """Refuse an interpreter without Dynamo, whose processes would end at their start."""
        python = python_of(spec, context)
        try:
            found = subprocess.run([python, "-c", _FIND], capture_output=True, timeout=_IMPORT_S, check=False)  # noqa: S603 - the user's own interpreter
            why = "" if found.returncode == 0 else "has no package `dynamo`"
        except (OSError, subprocess.SubprocessError) as exc:
            why = f"cannot be run ({exc})"
        if why:
            message = (
                f"{python} {why}; give the Python environment that has it, or apply the graph to a cluster, whose images "
                "have it (a clone's `make dynamo` makes .venv-dynamo, docs/dynamo.md)"
            )
            raise InvalidSpecError([ManifestProblem(path="spec.engine.pythonEnvironment", message=message)])


def python_of(spec: GraphSpec, context: RuntimeContext) -> str:
    """Return the interpreter that has Dynamo: of the graph's environment, else Penstock's own."""
    folder = spec.engine.python_environment
    return context.python if folder is None else str(PurePath(folder, "bin", "python"))


def _vllm(spec: GraphSpec, service: ServiceSpec, context: RuntimeContext) -> list[str]:
    argv = [python_of(spec, context), "-m", "dynamo.vllm", "--model", spec.model.name]
    argv += ["--served-model-name", spec.served_name]
    if service.role in _MODES:
        argv += ["--disaggregation-mode", _MODES[service.role]]
    argv += parallel_flags(service) + batch_flags(spec) + stream_flags(spec)
    # Dynamo's examples give both workers kv_both; the mode decides who produces.
    return argv + kv_transfer_flags(spec, service, kv_role="kv_both")


def _mocker(spec: GraphSpec, service: ServiceSpec, context: RuntimeContext) -> list[str]:
    argv = [python_of(spec, context), "-m", "dynamo.mocker", "--model-path", spec.model.name]
    argv += ["--model-name", spec.served_name, "--speedup-ratio", f"{context.speed:g}"]
    if service.role in _MODES:
        argv += ["--disaggregation-mode", _MODES[service.role]]
    if service.role is Role.PREFILL:
        argv += ["--bootstrap-ports", "{side_channel_port}"]
    argv += batch_flags(spec)
    if service.startup_seconds > 0:
        # Unlike its engine's steps, this is in real time.
        argv += ["--startup-time", f"{service.startup_seconds / context.speed:g}"]
    return argv


def _planes(context: RuntimeContext) -> dict[str, str]:
    env = {"DYN_NAMESPACE": context.namespace, "DYN_REQUEST_PLANE": "tcp", "DYN_EVENT_PLANE": "zmq"}
    if context.environment is Environment.KUBERNETES:
        return {**env, "DYN_DISCOVERY_BACKEND": "kubernetes"}
    # Dynamo's requests carry no credentials, and its default is the host's address.
    hosts = ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST")
    env |= dict.fromkeys(hosts, context.host)
    return {**env, "DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": str(context.discovery_folder)}


def _patience(service: ServiceSpec, context: RuntimeContext) -> dict[str, str]:
    """Return how long a process finishes its requests after SIGTERM: as long as its grace period, not 5 or 30 s."""
    seconds = max(1, math.ceil(service.termination_grace_period_seconds / context.speed))
    if service.role is Role.ROUTER:
        return {"DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS": str(seconds)}
    names = ("DYN_RUNTIME_GRACEFUL_SHUTDOWN_TIMEOUT_SECS", "DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT")
    return dict.fromkeys(names, str(seconds))


def _admission_flags(admission: AdmissionConfig) -> list[str]:
    thresholds = (
        ("--active-decode-blocks-threshold", admission.active_decode_blocks_threshold),
        ("--active-prefill-tokens-threshold", admission.active_prefill_tokens_threshold),
        ("--active-prefill-tokens-threshold-frac", admission.active_prefill_tokens_threshold_frac),
    )
    return [word for flag, value in thresholds if value is not None for word in (flag, str(value))]
