"""Settings of one router process: the graph's router section plus flags; logged at start, without keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.api import AdmissionConfig, GraphSpec, Role, RouterConfig, SloConfig
from penstock.core.errors import ConfigError
from penstock.core.http.server import ServerLimits
from penstock.core.http.tls import NO_FILES, TlsFiles
from penstock.core.worker_metrics import ENGINE_STALL_REAL_S, METRICS_PATH, OwnNames
from penstock.router.core.limits import worker_wait_s
from penstock.router.core.worker import WorkerSpec
from penstock.router.policy.busy import check_flags
from penstock.router.proxy.auth import ADMIN_KEYS, TIER_KEYS, TierKeys, is_loopback
from penstock.runtimes import runtime_of
from penstock.runtimes.kv_transfer import NIXL, KvTransferProtocol

_FILES_PER_REQUEST = 2
"""Number of open files per request: the client's connection and the worker's."""


@dataclass(frozen=True, slots=True)
class GraphReference:
    """Name and namespace of a graph on Kubernetes.

    Attributes:
        graph: Name of the graph.
        namespace: Namespace; None uses the service account's or the kubeconfig context's.
    """

    graph: str
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """Settings of one router.

    Attributes:
        model: Name under which clients request the model.
        disaggregated: Whether prefill and decode run on separate workers.
        config: Router section of the graph.
        admission_flags: Fields of the admission section that were set by flags and take precedence over it, by name.
        lease_s: Length of the first KV lease of prefill workers, in simulated seconds.
        graph: The graph, from which workers, model and planner settings are taken; None for a fixed fleet without a graph.
        graph_file: Manifest whose admission and tiers sections are followed while the router runs; None follows none.
        host: Address on which the router listens.
        port: Port on which the router listens; 0 chooses a free one.
        speed: Time factor: simulated seconds per real second, 1 in production.
        statefile: File in which the local backend lists the workers; None if workers are found otherwise.
        kubernetes: Graph on Kubernetes whose EndpointSlices list the workers; None if workers are found otherwise.
        workers: Workers of a fixed fleet; empty if ``statefile`` or ``kubernetes`` is set.
        api_keys: Accepted API keys; if empty, clients need no key.
        graph_secret: Secret by which the routers of the graph authenticate to each other; if empty, there is no
            communication between routers.
        admin_keys: Keys for administration (drains, workers' addresses, thresholds); if empty, administration is allowed to
            programs on this machine only, and only while the router listens on loopback without client keys.
        tier_keys: Keys that select a tier; if API keys are required, these are accepted as well.
        access_log: File for one JSON line per request, ``-`` for stdout, None for no access log.
        shutdown_grace_s: Maximum wait at SIGTERM for requests in flight, in simulated seconds.
        worker_tls: Credentials for workers whose URL is https.
    """

    model: str
    disaggregated: bool
    config: RouterConfig = field(default_factory=RouterConfig)
    admission_flags: Mapping[str, Any] = field(default_factory=dict)
    lease_s: float = 30.0
    graph: GraphSpec | None = None
    graph_file: Path | None = None
    host: str = "127.0.0.1"
    port: int = 0
    speed: float = 1.0
    statefile: Path | None = None
    kubernetes: GraphReference | None = None
    workers: tuple[WorkerSpec, ...] = ()
    api_keys: frozenset[bytes] = frozenset()
    graph_secret: bytes = b""
    admin_keys: frozenset[bytes] = frozenset()
    tier_keys: TierKeys = field(default_factory=lambda: TierKeys({}))
    access_log: str | None = None
    shutdown_grace_s: float = 900.0
    worker_tls: TlsFiles = NO_FILES

    def check(self) -> None:
        """Check the settings for contradictions.

        Raises:
            ConfigError: there is no source of workers, or two of them; the workers' roles do not fit; a key is both an API
                and an admin key; or thresholds or tier keys have no effect.
        """
        check_flags(self.admission(self.config.admission), self.admission_flags)
        if self.tier_keys.keys and not self.config.tiers.enabled:
            raise ConfigError(
                f"{TIER_KEYS.variable}: keys carry tiers, but spec.router.tiers.enabled is false; set it to true, or give "
                "no such keys"
            )
        if (self.api_keys | self.tier_keys.keys) & self.admin_keys:
            raise ConfigError(
                f"{ADMIN_KEYS.variable}: a client's API key is an admin key as well; make another one for admins"
            )
        if sum((self.statefile is not None, self.kubernetes is not None, bool(self.workers))) != 1:
            raise ConfigError(
                "workers: give one of --discovery kubernetes, --discovery STATEFILE or --worker role=url, not both"
            )
        if self.workers and {each.role for each in self.workers} != set(self.roles):
            have = ", ".join(sorted({each.role for each in self.workers}))
            want = " and ".join(sorted(self.roles))
            raise ConfigError(f"--worker: roles {have} given; the graph needs {want}")

    def admission(self, section: AdmissionConfig) -> AdmissionConfig:
        """Return ``section``, an admission section of the graph, with the fields replaced that were set by command-line flags."""
        return section.model_copy(update=dict(self.admission_flags))

    @property
    def slo(self) -> SloConfig:
        """SLO targets of the graph; the default targets if `graph` is None."""
        return SloConfig() if self.graph is None else self.graph.slo

    @property
    def aliases(self) -> tuple[str, ...]:
        """Further names of the served model that the workers accept as well."""
        return () if self.graph is None else self.graph.model.aliases

    @property
    def adapters(self) -> Mapping[str, str]:
        """Paths of the LoRA adapters of the served model, by the names that clients request."""
        given = () if self.graph is None else self.graph.model.adapters
        return {each.name: each.path for each in given}

    @property
    def metric_names(self) -> OwnNames:
        """Names of the workers' metrics, by vLLM's name of the same metric; only those that differ."""
        return {} if self.graph is None else self.graph.traits.metric_names

    @property
    def metrics_path(self) -> str:
        """Path of the workers' metrics; vLLM's for a fixed fleet without a graph."""
        return METRICS_PATH if self.graph is None else self.graph.traits.metrics_path

    @property
    def kv_transfer(self) -> KvTransferProtocol:
        """Protocol by which prefill workers transfer KV to decode workers; vLLM's for a fixed fleet without a graph."""
        return NIXL if self.graph is None else runtime_of(self.graph.runtime).kv_transfer_of(self.graph)

    @property
    def health_path(self) -> str:
        """Path of the workers' health check; vLLM's for a fixed fleet without a graph."""
        return "/health" if self.graph is None else self.graph.traits.health_path

    @property
    def roles(self) -> tuple[Role, ...]:
        """Roles of the workers that a request passes, in this order."""
        return (Role.PREFILL, Role.DECODE) if self.disaggregated else (Role.AGGREGATED,)

    @property
    def worker_wait_s(self) -> float:
        """Maximum wait of an interrupted stream for a worker that resumes it, in simulated seconds."""
        services = () if self.graph is None else self.graph.services.values()
        startup_s = [each.startup_timeout_seconds for each in services if each.role in self.roles]
        return worker_wait_s(self.config.retries, startup_s)

    @property
    def pairs_by_version(self) -> bool:
        """Whether workers of different engine versions cannot transfer KV to each other; the value of vLLM if `graph` is None."""
        return self.disaggregated and (self.graph is None or self.graph.traits.pairs_by_version)

    @property
    def stall_real_s(self) -> float:
        """Real seconds after which a worker that has requests and generates no token counts as hanging.

        Without a graph, the value for real engines is used.
        """
        given = self.config.health.stall_real_seconds
        own_s = ENGINE_STALL_REAL_S if self.graph is None else self.graph.traits.stall_real_s
        return own_s if given is None else given

    @property
    def is_local(self) -> bool:
        """Whether only programs on this machine can reach the router, and none of them needs a key."""
        return is_loopback(self.host) and not self.api_keys

    def shown(self) -> dict[str, Any]:
        """Return the settings to log at the start, by name, without secrets: of keys only their number is included."""
        return {
            "model": self.model,
            "disaggregated": self.disaggregated,
            "policy": self.config.policy,
            "speed": self.speed,
            "discovery": self._source(),
            "api_keys": len(self.api_keys),
            "admin_keys": len(self.admin_keys),
            "graph_secret": bool(self.graph_secret),
            "tier_keys": len(self.tier_keys.keys),
            "access_log": self.access_log,
            "lease_s": self.lease_s,
            "admission_flags": dict(self.admission_flags),
            "slo": self.slo.to_manifest(),
            "config": self.config.to_manifest(),
        }

    def _source(self) -> str | list[str]:
        if self.kubernetes is not None:
            return f"kubernetes: {self.kubernetes.graph}"
        return str(self.statefile) if self.statefile else [each.url for each in self.workers]

    def server_limits(self) -> ServerLimits:
        """Return the limits of client connections (sizes, timeouts, number), as the HTTP server applies them."""
        limits = self.config.limits
        return ServerLimits(
            max_header_bytes=limits.max_header_bytes,
            max_body_bytes=limits.max_body_bytes,
            max_buffered_bytes=max(ServerLimits().max_buffered_bytes, 2 * limits.max_body_bytes),
            header_timeout_s=limits.header_timeout_real_seconds,
            body_timeout_s=limits.header_timeout_real_seconds,
            receive_timeout_s=limits.header_timeout_real_seconds,
            keep_alive_s=limits.client_idle_timeout_real_seconds,
            max_connections=limits.max_connections,
            files_per_connection=_FILES_PER_REQUEST,
        )
