"""One service of a graph: its role, size, placement and scaling bounds; and node pools."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Final

from pydantic import Field, JsonValue

from penstock.api.base import (
    DnsLabel,
    EngineGpus,
    EnvName,
    Flag,
    Image,
    Integer,
    Number,
    ProfileText,
    Replicas,
    SpecModel,
    Text,
    WholeSeconds,
    entry,
)
from penstock.api.engine import PROFILE_RULE, LeaseOverride
from penstock.api.enums import Environment, ManagedBy, Role
from penstock.api.rule import Breach, Rule, immutable
from penstock.kube.objects.pod_template import unknown_fields

DEFAULT_ROUTERS: Final = 2
"""Routers of a graph on Kubernetes: one keeps serving while the other's node is drained or its process restarts."""


class EnvVar(SpecModel):
    """One environment variable; ``valueFrom`` takes Kubernetes' own forms."""

    name: EnvName = Field(description="Variable's name.")
    value: str | None = entry(None, "Literal value; null with valueFrom.")
    value_from: dict[str, JsonValue] | None = entry(
        None, "Kubernetes source such as secretKeyRef {name, key}; excludes value."
    )

    rules = (
        Rule(
            path="valueFrom",
            must="a variable has value or valueFrom, not both",
            cel="!has(self.value) || !has(self.valueFrom)",
            holds=lambda variable: variable.value is None or variable.value_from is None,
            text="value is set too",
            remedy="keep one of value and valueFrom",
        ),
    )


class ObjectReference(SpecModel):
    """Names a Secret or ConfigMap of the graph's namespace."""

    name: Text = Field(description="Object's name.")
    optional: Flag = entry(False, "Start even if the object does not exist.")


class EnvFrom(SpecModel):
    """Takes every key of one Secret or ConfigMap as an environment variable."""

    prefix: str = entry("", "Text put before each key.")
    secret_ref: ObjectReference | None = entry(None, "Secret to read; excludes configMapRef.")
    config_map_ref: ObjectReference | None = entry(None, "ConfigMap to read; excludes secretRef.")

    rules = (
        Rule(
            must="envFrom has one of secretRef and configMapRef",
            cel="has(self.secretRef) != has(self.configMapRef)",
            holds=lambda source: (source.secret_ref is None) != (source.config_map_ref is None),
            text="both or neither of secretRef and configMapRef",
            remedy="give exactly one of secretRef and configMapRef",
        ),
    )


class ScalingConfig(SpecModel):
    """Bounds within which a planner or another autoscaler may set a service's replicas."""

    min_replicas: Replicas = entry(1, "Minimum replicas, 0 to 1000.")
    max_replicas: Annotated[Integer, Field(ge=1, le=1000)] = entry(8, "Maximum replicas, 1 to 1000.")
    priority: Annotated[Integer, Field(ge=-1000, le=1000)] = entry(
        0, "Who gets GPUs first when the budget is short; higher first."
    )
    managed_by: ManagedBy = entry(
        ManagedBy.PLANNER,
        "Who sets the number: planner; or external, an HPA, KEDA or a person, whom the planner leaves it to.",
    )


def _unknown_pod_keys(section: Any) -> Iterator[Breach]:
    for each in unknown_fields(section.pod_template):
        remedy = f"did you mean {each.suggestion}?" if each.suggestion else None
        yield Breach(values=(each.kind,), path=("podTemplate", *each.path), remedy=remedy)


POD_TEMPLATE_RULE: Rule[Any] = Rule(
    path="podTemplate",
    must="podTemplate has only keys of Kubernetes' PodTemplateSpec",
    cel=None,
    find=_unknown_pod_keys,
    text="unknown key of Kubernetes' %s",
    remedy="remove it",
)


class ServiceSpec(SpecModel):
    """One service: equal replicas of one role.

    ``image`` and ``profile`` are per-service overrides, for graphs that mix GPU models;
    ``startupSeconds`` is the expected time of a start, and ``startupTimeoutSeconds`` its limit.
    """

    role: Role = Field(description="router, prefill, decode or aggregated; immutable.")
    replicas: Replicas | None = entry(
        None,
        "Replicas; only the starting value once a ScalingAdapter owns the number. null: 1, of a router on Kubernetes 2, "
        "or the nearest number within scaling's bounds.",
    )
    gpus_per_replica: EngineGpus = entry(
        1, "GPUs of one replica over all its nodes; tensor parallelism follows. A router holds none."
    )
    nodes_per_replica: Annotated[Integer, Field(ge=1, le=64)] = entry(
        1, "Nodes that one replica spans; above 1 it becomes a LeaderWorkerSet."
    )
    node_pool: DnsLabel | None = entry(None, "Key of nodePools that places the replicas; null: any node.")
    image: Image | None = entry(None, "Container image; null: the graph's.")
    profile: ProfileText | None = entry(None, "Latency profile of simulated workers; null: engine.profile.")
    args: tuple[str, ...] = entry((), "Arguments appended to the runtime's own.")
    env: tuple[EnvVar, ...] = entry((), "Environment; wins over the graph's.")
    env_from: tuple[EnvFrom, ...] = entry(
        (), "Secrets and ConfigMaps whose keys become environment variables."
    )
    lease: LeaseOverride | None = entry(
        None, "Lease of this service alone; null: the graph's. Prefill and decode."
    )
    scaling: ScalingConfig | None = entry(
        None, "Bounds for autoscaling; null: the number of replicas is fixed."
    )
    startup_seconds: Annotated[Number, Field(ge=0, le=86400)] = entry(
        0,
        "Seconds that a replica takes to load its model. Simulated workers take this long; for real engines it is the "
        "estimate that the planner uses until it has observed a start. 0: unknown.",
    )
    startup_timeout_seconds: WholeSeconds = entry(
        600, "Seconds that a replica may take to answer its first health check."
    )
    liveness_timeout_seconds: WholeSeconds | None = entry(
        None,
        "Real seconds without a healthy answer after which a replica that served is killed and started "
        "again. null: 60; 600 for real engines, which can stall for minutes without being dead.",
    )
    termination_grace_period_seconds: Annotated[Integer, Field(ge=0, le=86400)] = entry(
        900, "Seconds that a replica may take to finish its requests when it leaves."
    )
    pod_template: dict[str, JsonValue] = entry(
        {}, "Strategic-merge overlay on the pod, whose container is `main`; not used by the local backend."
    )

    rules = (
        Rule(
            path="scaling.minReplicas",
            must="minReplicas is at most maxReplicas",
            cel="!has(self.scaling) || self.scaling.minReplicas <= self.scaling.maxReplicas",
            holds=lambda s: s.scaling is None or s.scaling.min_replicas <= s.scaling.max_replicas,
            text="%d exceeds maxReplicas %d",
            values=("self.scaling.minReplicas", "self.scaling.maxReplicas"),
            remedy="lower it or raise maxReplicas",
        ),
        Rule(
            path="replicas",
            must="replicas are within scaling's minReplicas to maxReplicas",
            cel=(
                "!has(self.replicas) || !has(self.scaling) || self.scaling.minReplicas > self.scaling.maxReplicas || "
                "(self.scaling.minReplicas <= self.replicas && self.replicas <= self.scaling.maxReplicas)"
            ),
            holds=lambda s: (
                s.replicas is None
                or s.scaling is None
                or s.scaling.min_replicas > s.scaling.max_replicas
                or s.scaling.min_replicas <= s.replicas <= s.scaling.max_replicas
            ),
            text="%d is outside scaling's %d to %d",
            values=("self.replicas", "self.scaling.minReplicas", "self.scaling.maxReplicas"),
            remedy="move it or widen the bounds",
        ),
        Rule(
            path="gpusPerReplica",
            must="gpusPerReplica is a multiple of nodesPerReplica",
            cel="self.nodesPerReplica < 1 || self.gpusPerReplica % self.nodesPerReplica == 0",
            holds=lambda s: s.gpus_per_replica % s.nodes_per_replica == 0,
            text="%d GPUs do not divide over %d nodes",
            values=("self.gpusPerReplica", "self.nodesPerReplica"),
            remedy="make gpusPerReplica a multiple of nodesPerReplica",
        ),
        Rule(
            path="nodesPerReplica",
            must="a router has one node",
            cel="self.role != 'router' || self.nodesPerReplica == 1",
            holds=lambda service: service.role is not Role.ROUTER or service.nodes_per_replica == 1,
            text="a router does not span %d nodes",
            values=("self.nodesPerReplica",),
            remedy="remove it; more routers are more replicas",
        ),
        POD_TEMPLATE_RULE,
        Rule(
            path="lease",
            must="lease is set on prefill and decode services alone",
            cel="!has(self.lease) || self.role == 'prefill' || self.role == 'decode'",
            holds=lambda service: service.lease is None or service.role in {Role.PREFILL, Role.DECODE},
            text="a service of role %s hands no KV over",
            values=("self.role",),
            remedy="remove it",
        ),
        Rule(
            path="lease.decoderBlocksTtlSeconds",
            must="a service's lease.decoderBlocksTtlSeconds needs role decode",
            cel="!has(self.lease) || !has(self.lease.decoderBlocksTtlSeconds) || self.role != 'prefill'",
            holds=lambda service: (
                service.lease is None
                or service.lease.decoder_blocks_ttl_seconds is None
                or service.role is not Role.PREFILL
            ),
            text="%d s, but it is decode that keeps blocks for the next turn",
            values=("self.lease.decoderBlocksTtlSeconds",),
            remedy="set it at the decode service",
        ),
        PROFILE_RULE,
        immutable("role", "role of a service that stays"),
    )

    @property
    def gpus(self) -> int:
        """GPUs that one replica holds; 0 for a router."""
        return self.gpus_per_replica if self.role.is_worker else 0

    @property
    def is_external(self) -> bool:
        """Whether another client than the planner sets the replicas."""
        return self.scaling is not None and self.scaling.managed_by is ManagedBy.EXTERNAL

    def replicas_in(self, environment: Environment) -> int:
        """Return the replicas to start with: the given number, or the default of an environment."""
        if self.replicas is not None:
            return self.replicas
        is_spread = self.role is Role.ROUTER and environment is Environment.KUBERNETES
        default = DEFAULT_ROUTERS if is_spread else 1
        if self.scaling is None:
            return default
        return max(self.scaling.min_replicas, min(default, self.scaling.max_replicas))

    @property
    def first_replicas(self) -> int:
        """Replicas to start with on Kubernetes; those of workers are the same everywhere."""
        return self.replicas_in(Environment.KUBERNETES)

    @property
    def replica_bounds(self) -> tuple[int, int]:
        """Minimum and maximum replicas; both the fixed number where there is no scaling."""
        if self.scaling is None:
            return self.first_replicas, self.first_replicas
        return self.scaling.min_replicas, self.scaling.max_replicas


class Toleration(SpecModel):
    """A Kubernetes toleration, field for field."""

    key: str | None = entry(None, "Taint's key; null with operator Exists: all taints.")
    operator: Text = entry("Equal", "Equal, Exists, Lt or Gt.")
    value: str | None = entry(None, "Taint's value.")
    effect: str | None = entry(None, "NoSchedule, PreferNoSchedule, NoExecute or null: all.")
    toleration_seconds: Integer | None = entry(
        None, "Seconds to stay after a NoExecute taint appears; null: for ever."
    )


class NodePool(SpecModel):
    """Nodes of one GPU model and how to ask for them."""

    node_selector: dict[str, str] = entry({}, "Labels that a node must carry.")
    tolerations: tuple[Toleration, ...] = entry((), "Taints that replicas accept.")
    gpu_resource_name: Text = entry("nvidia.com/gpu", "Extended resource that counts the nodes' GPUs.")
    cache_mount: Annotated[str, Field(pattern=r"^/.*$")] | None = entry(
        None,
        "Absolute path of a model cache on the nodes, mounted at the same path. It must exist, be "
        "writable for user 1000, and the namespace must allow hostPath; or give cacheClaim.",
    )
    cache_claim: DnsLabel | None = entry(
        None,
        "PersistentVolumeClaim that holds the cache in place of the nodes' own folder; needs cacheMount.",
    )

    rules = (
        Rule(
            path="cacheClaim",
            must="cacheClaim needs cacheMount",
            cel="!has(self.cacheClaim) || has(self.cacheMount)",
            holds=lambda pool: pool.cache_claim is None or pool.cache_mount is not None,
            text="%s is given, but no cacheMount",
            values=("self.cacheClaim",),
            remedy="say where to mount it",
        ),
    )
