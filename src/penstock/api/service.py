"""One service of a graph: its role, size, placement and scaling bounds; and node pools."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, JsonValue

from penstock.api.base import (
    DnsLabel,
    EngineGpus,
    EnvName,
    Flag,
    Integer,
    Number,
    ProfileText,
    Replicas,
    Seconds,
    SpecModel,
    Text,
    entry,
)
from penstock.api.engine import LeaseOverride
from penstock.api.enums import ManagedBy, Role


class EnvVar(SpecModel):
    """One environment variable; ``valueFrom`` takes Kubernetes' own forms."""

    name: EnvName = Field(description="Variable's name.")
    value: str | None = entry(None, "Literal value; null with valueFrom.")
    value_from: dict[str, JsonValue] | None = entry(
        None, "Kubernetes source such as secretKeyRef {name, key}; excludes value."
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


class ScalingConfig(SpecModel):
    """Bounds within which a planner or another autoscaler may set a service's replicas."""

    min_replicas: Replicas = entry(1, "Fewest replicas, 0 to 1000.")
    max_replicas: Annotated[Integer, Field(ge=1, le=1000)] = entry(8, "Most replicas, 1 to 1000.")
    priority: Annotated[Integer, Field(ge=-1000, le=1000)] = entry(
        0, "Who gets GPUs first when the budget is short; higher first."
    )
    managed_by: ManagedBy = entry(
        ManagedBy.PLANNER,
        "Who sets the number: planner; or external, an HPA, KEDA or a person, whom the planner leaves it to.",
    )


class ServiceSpec(SpecModel):
    """One service: equal replicas of one role.

    ``image`` and ``profile`` are per-service overrides, for graphs that mix GPU models;
    ``startupSeconds`` models a cold start and ``startupTimeoutSeconds`` bounds a real one.
    """

    role: Role = Field(description="router, prefill, decode or aggregated; immutable.")
    replicas: Replicas = entry(1, "Replicas; only the starting value once a ScalingAdapter owns the number.")
    gpus_per_replica: EngineGpus = entry(
        1, "GPUs of one replica over all its nodes; tensor parallelism follows. A router holds none."
    )
    nodes_per_replica: Annotated[Integer, Field(ge=1, le=64)] = entry(
        1, "Nodes that one replica spans; above 1 it becomes a LeaderWorkerSet."
    )
    node_pool: DnsLabel | None = entry(None, "Key of nodePools that places the replicas; null: any node.")
    image: Text | None = entry(None, "Container image; null: the graph's.")
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
        0, "Seconds that a simulated worker takes to load its model."
    )
    startup_timeout_seconds: Seconds = entry(
        600, "Seconds that a replica may take to answer its first health check."
    )
    liveness_timeout_seconds: Seconds | None = entry(
        None,
        "Real seconds without a healthy answer after which a replica that served is killed and started "
        "again. null: 60; 600 for real engines, which may stall for minutes and live.",
    )
    termination_grace_period_seconds: Annotated[Integer, Field(ge=0, le=86400)] = entry(
        900, "Seconds that a replica may take to finish its requests when it leaves."
    )
    pod_template: dict[str, JsonValue] = entry(
        {}, "Strategic-merge overlay on the pod, whose container is `main`; not used by the local backend."
    )

    @property
    def gpus(self) -> int:
        """GPUs that one replica holds; 0 for a router."""
        return self.gpus_per_replica if self.role.is_worker else 0

    @property
    def is_external(self) -> bool:
        """Whether somebody other than the planner sets the replicas."""
        return self.scaling is not None and self.scaling.managed_by is ManagedBy.EXTERNAL

    @property
    def replica_bounds(self) -> tuple[int, int]:
        """Fewest and most replicas; both the fixed number where there is no scaling."""
        if self.scaling is None:
            return self.replicas, self.replicas
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
