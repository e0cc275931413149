"""`penstock router`: run the router in front of a graph's workers."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from penstock.api import (
    GraphDeployment,
    GraphSpec,
    LeaseConfig,
    Role,
    RouterConfig,
    TiersConfig,
)
from penstock.api.manifests import load_graph
from penstock.api.router import GatewayTlsConfig
from penstock.cli import fields, option
from penstock.core.errors import ConfigError
from penstock.core.flags import flag, time_scale
from penstock.core.http import loop
from penstock.core.http.inherited_socket import socket_from_environment
from penstock.core.http.tls import NO_FILES, TlsFiles, files_of
from penstock.core.tracing import open_tracing
from penstock.kube.objects.names import GRAPH_SECRET_VARIABLE, WORKER_AUTH_FOLDER
from penstock.router.discovery.statefile import parse_static_workers
from penstock.router.policy.registry import policy_names
from penstock.router.proxy.auth import (
    ADMIN_KEYS,
    API_KEYS,
    TIER_KEYS,
    KeySource,
    TierKeys,
    read_keys,
    read_tier_keys,
)
from penstock.router.server import RouterServer
from penstock.router.settings import GraphReference, RouterSettings

KUBERNETES = "kubernetes"
"""Value of --discovery; a statefile of that name is ``./kubernetes``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterFlags:
    """What `penstock router serve` takes in addition to the admission section."""

    graph: Path | None = flag(
        "Manifest of the graph, whose model and router section are used. Without it give --model.",
        default=None,
        path="file",
    )
    follow: Path | None = flag(
        "Manifest whose sections router.admission and router.tiers are followed while the router runs.",
        unset="--graph",
    )
    discovery: str | None = flag(
        "Source of the list of workers: a statefile of the local backend, read again whenever it "
        "changes, or the graph's EndpointSlices (needs --graph).",
        default=None,
        metavar="FILE|kubernetes",
    )
    namespace: str | None = flag(
        "With --discovery kubernetes: namespace of the graph.",
        unset="the namespace of the pod or of the kubeconfig context",
    )
    workers: tuple[str, ...] = flag(
        "Worker of a fixed fleet, instead of --discovery; repeatable. Example: decode=http://127.0.0.1:8101.",
        name="--worker",
        default=(),
        metavar="ROLE=URL",
    )
    worker_ca_file: Path | None = flag(
        "PEM bundle of the CAs that signed the certificates of workers with https URLs.",
        unset="the system's",
        path="file",
    )
    worker_certificate_file: Path | None = flag(
        "PEM file of the client certificate that the router presents to workers with https URLs.",
        default=None,
        path="file",
    )
    worker_key_file: Path | None = flag(
        "PEM file of the client certificate's key.", default=None, path="file"
    )
    worker_token_file: Path | None = flag(
        "File of the bearer token for workers with https URLs, sent instead of the client's token; "
        "read again when it changes.",
        default=None,
        path="file",
    )
    model: str | None = flag("Model name that clients use in requests.", unset="the graph's")
    policy: str | None = flag(
        "Policy that chooses a worker for each request.",
        choices=policy_names(),
        unset="the graph's policy, or prefix-cost",
    )
    host: str = flag("Address to listen on.", default="127.0.0.1")
    port: int = flag("TCP port to listen on; 0 selects a free one.", default=8000, ge=0, le=65535)
    speed: float = time_scale(more="; durations are simulated unless they are called real")
    api_keys_file: Path | None = flag(
        "File of accepted API keys, one per line, or a folder of such files, such as a mounted "
        f"Secret. {API_KEYS.variable} may hold more, comma-separated.",
        variable="PENSTOCK_API_KEYS_FILE",
        unset="the graph's",
    )
    admin_keys_file: Path | None = flag(
        "File or folder of the admin keys, which allow draining, reading the workers' addresses in "
        f"/workers, and /busy_threshold; {ADMIN_KEYS.variable} may hold more. Without admin keys only "
        "local programs may do this, and only while --host is a loopback address and no API key is "
        "set.",
        default=None,
        variable="PENSTOCK_ADMIN_KEYS_FILE",
    )
    tier_keys_file: Path | None = flag(
        "File or folder with lines KEY TIER [TENANT]: API keys and the tier each one selects. "
        f"{TIER_KEYS.variable} may hold more, comma-separated. Needs spec.router.tiers.enabled.",
        variable="PENSTOCK_TIER_KEYS_FILE",
        unset="the graph's",
    )
    access_log: str | None = flag(
        "Append one JSON line per request to a file; - is stdout.", metavar="FILE", unset="none"
    )
    kv_lease: float | None = flag(
        "Duration of the first KV lease of the prefill workers, as their kv_lease_duration; "
        "simulated seconds.",
        gt=0,
        unset="the graph's value, or 30",
    )
    shutdown_grace: float = flag(
        "Maximum wait for running requests after SIGTERM; simulated seconds.", default=900.0, ge=0
    )


@click.group()
def router() -> None:
    """Run the router: an OpenAI API in front of prefill and decode workers."""


@router.command()
@fields.options(RouterFlags)
@option.admission()
def serve(**given: Any) -> None:
    """Serve the APIs of OpenAI and Anthropic in front of workers.

    It also serves /workers (with drain and undrain), /busy_threshold, /ready, /health and /metrics. After SIGTERM it
    finishes running requests and exits with status 0. The routers of one graph authenticate each other by
    PENSTOCK_GRAPH_SECRET, which must be the same in all of them.
    """
    settings = _settings(given)
    inherited_socket = socket_from_environment(os.environ, settings.port)
    server = RouterServer(settings, open_tracing("penstock-router"), inherited_socket=inherited_socket)
    loop.run(server.serve)


@router.command()
@click.option(
    "--ext-proc",
    type=click.IntRange(0, 65535),
    help="TCP port for the ext_proc calls of the gateway's Envoy; 0 selects a free one.  [default: the "
    "graph's port, or 9002]",
)
@click.option(
    "--ext-proc-tls",
    metavar="own|none|FOLDER",
    help="Certificate of that port. own: self-signed, created at the start; none: plain text; otherwise a "
    "folder with tls.crt and tls.key, which are read again when they change.  [default: the graph's, "
    "or own]",
)
@fields.options(RouterFlags)
@option.admission()
def pick(ext_proc: int | None, ext_proc_tls: str | None, **given: Any) -> None:
    """Choose workers for a Gateway, whose Envoy relays the requests: its endpoint picker.

    It speaks the protocol of the Gateway API Inference Extension. Everything else works as in `serve`, whose HTTP API
    remains available on --port. The prefill of a request is computed before its decode worker is returned.
    """
    try:
        # An extra of the distribution; only those who run a Gateway need it.
        from penstock.router.gateway.certificate import credentials  # noqa: PLC0415
        from penstock.router.gateway.server import GatewayPicker  # noqa: PLC0415
    except ModuleNotFoundError as exc:
        raise ConfigError(
            f"penstock router pick: {exc.name} is not installed; pip install 'penstock[gateway]'"
        ) from exc
    tracing, settings = open_tracing("penstock-router"), _settings(given)
    gateway = settings.config.gateway
    port = gateway.port if ext_proc is None else ext_proc
    is_tls, folder = _gateway_tls(gateway.tls, ext_proc_tls)
    server = GatewayPicker(
        settings,
        tracing,
        ext_proc_port=port,
        credentials=credentials(folder) if is_tls else None,
        inherited_socket=socket_from_environment(os.environ, settings.port),
    )
    loop.run(server.serve)


def _gateway_tls(tls: GatewayTlsConfig, given: str | None) -> tuple[bool, Path | None]:
    """Return whether Envoy is answered by TLS, and the certificate's folder; None: the picker's own certificate."""
    if given is not None:
        return given != "none", None if given in {"own", "none"} else Path(given)
    return tls.enabled, None if tls.folder is None else Path(tls.folder)


def _settings(given: dict[str, Any]) -> RouterSettings:
    flags = fields.take(RouterFlags, given)
    if flags.follow is not None and flags.graph is None:
        raise ConfigError("--follow: has no effect without --graph, whose sections it replaces; add --graph")
    manifest = load_graph(flags.graph, draws=True) if flags.graph is not None else None
    spec = manifest.spec if manifest is not None else None
    config = RouterConfig() if spec is None else spec.router
    if flags.policy is not None:
        config = config.model_copy(update={"policy": flags.policy})
    static = parse_static_workers(flags.workers)
    graph_keys = Path(config.auth.api_keys_file) if config.auth.api_keys_file else None
    discovery = flags.discovery
    return RouterSettings(
        model=_model(flags.model, spec),
        disaggregated=(
            spec.is_disaggregated
            if spec is not None
            else all(each.role is not Role.AGGREGATED for each in static)
        ),
        config=config,
        admission_flags=option.admission_options(given),
        lease_s=_lease_s(flags.kv_lease, spec),
        graph=spec,
        graph_file=flags.follow or flags.graph,
        host=flags.host,
        port=flags.port,
        speed=flags.speed,
        statefile=Path(discovery) if discovery not in {None, KUBERNETES} else None,
        kubernetes=_place(manifest, flags.namespace) if discovery == KUBERNETES else None,
        workers=static,
        api_keys=_keys(API_KEYS, flags.api_keys_file or graph_keys),
        admin_keys=_keys(ADMIN_KEYS, flags.admin_keys_file),
        tier_keys=_tier_keys(config.tiers, flags.tier_keys_file),
        graph_secret=os.environ.get(GRAPH_SECRET_VARIABLE, "").encode(),
        access_log=flags.access_log,
        shutdown_grace_s=flags.shutdown_grace,
        worker_tls=_worker_tls(flags, spec),
    )


def _worker_tls(flags: RouterFlags, spec: GraphSpec | None) -> TlsFiles:
    files = TlsFiles(
        flags.worker_ca_file, flags.worker_certificate_file, flags.worker_key_file, flags.worker_token_file
    )
    tls = None if spec is None or flags.workers else spec.engine.tls
    if tls is not None and files == NO_FILES:
        files = files_of(tls, WORKER_AUTH_FOLDER if flags.discovery == KUBERNETES else tls.folder)
        files.check()
        return files
    if files != NO_FILES and not any(each.partition("=")[2].startswith("https://") for each in flags.workers):
        raise ConfigError("--worker-ca-file and similar: no --worker has an https URL; remove them")
    files.check()
    return files


def _keys(source: KeySource, file: Path | None) -> frozenset[bytes]:
    variable = f"{source.variable}_FILE"
    if os.environ.get(variable, "unset").strip() == "":
        raise ConfigError(f"{variable}: is empty; set it to the path of a file, or unset it")
    return read_keys(source, file, os.environ.get(source.variable))


def _tier_keys(config: TiersConfig, flag: Path | None) -> TierKeys:
    own = Path(config.keys_file) if config.enabled and config.keys_file else None
    file, environment = flag or own, os.environ.get(TIER_KEYS.variable)
    return TierKeys({}) if file is None and environment is None else read_tier_keys(file, environment)


def _place(manifest: GraphDeployment | None, namespace: str | None) -> GraphReference:
    if manifest is None:
        raise ConfigError(
            "--discovery kubernetes: needs --graph, because the graph's name selects the EndpointSlices"
        )
    return GraphReference(manifest.metadata.name, namespace)


def _model(flag: str | None, spec: GraphSpec | None) -> str:
    if flag is not None:
        return flag
    if spec is None:
        raise ConfigError("--model: required without --graph; give the model name that clients use")
    return spec.served_name


def _lease_s(flag: float | None, spec: GraphSpec | None) -> float:
    if flag is not None:
        return flag
    return LeaseConfig().duration_seconds if spec is None else spec.lease_seconds
