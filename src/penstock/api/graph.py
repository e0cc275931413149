"""The two kinds of the API: GraphDeployment and ScalingAdapter."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import Field, JsonValue

from penstock.api.base import (
    AdapterPath,
    DnsLabel,
    Flag,
    Image,
    Integer,
    OperatorClass,
    Replicas,
    ServedName,
    SpecModel,
    Text,
    Tokens,
    entry,
)
from penstock.api.engine import SIMULATED_BATCH_TOKENS, EngineConfig, LeaseConfig
from penstock.api.enums import PlannerMode, Role
from penstock.api.planner import PlannerConfig
from penstock.api.router import RouterConfig
from penstock.api.rule import Rule, immutable
from penstock.api.runtimes import DEFAULT_RUNTIME, PENSTOCK_IMAGE, RuntimeTraits, traits_of
from penstock.api.service import EnvFrom, EnvVar, NodePool, ServiceSpec
from penstock.api.slo import SloConfig
from penstock.api.status import AdapterStatus, GraphStatus
from penstock.kube.objects.names import OPERATOR_CLASS

API_VERSION: Final = "penstock.dev/v1alpha1"


class ObjectMeta(SpecModel):
    """Kubernetes metadata; what the API server fills in is accepted and ignored."""

    name: DnsLabel = Field(description="Object's name; a DNS label.")
    namespace: DnsLabel | None = entry(None, "Namespace; null: the caller's.")
    labels: dict[str, str] = entry({}, "Labels.")
    annotations: dict[str, str] = entry({}, "Annotations.")
    uid: str | None = entry(None, "Written by the API server.")
    resource_version: str | None = entry(None, "Written by the API server.")
    generation: Integer | None = entry(None, "Written by the API server.")
    creation_timestamp: str | None = entry(None, "Written by the API server.")
    deletion_timestamp: str | None = entry(None, "Written by the API server.")
    deletion_grace_period_seconds: Integer | None = entry(None, "Written by the API server; seconds.")
    finalizers: tuple[str, ...] = entry((), "Written by operators.")
    owner_references: tuple[dict[str, JsonValue], ...] = entry((), "Written by operators.")
    managed_fields: tuple[dict[str, JsonValue], ...] = entry((), "Written by the API server.")


class ModelAdapter(SpecModel):
    """A LoRA adapter of the model."""

    name: ServedName = Field(description="Name that clients request, in addition to the model's own.")
    path: AdapterPath = Field(
        description="Hugging Face id of the adapter, or its folder where the workers run."
    )


class ModelSpec(SpecModel):
    """The model that a graph serves."""

    name: Text = Field(description="Hugging Face id or path of the model; immutable.")
    served_name: ServedName | None = entry(None, "Name that clients ask for; null: the model's name.")
    aliases: Annotated[tuple[ServedName, ...], Field(max_length=16)] = entry(
        (),
        "Further names that clients may ask for, at most 16: both at once while one takes the other's place.",
    )
    context_tokens: Tokens | None = entry(
        None, "Maximum number of prompt and output tokens together; null: the model's own limit."
    )
    adapters: Annotated[tuple[ModelAdapter, ...], Field(max_length=32)] = entry(
        (), "LoRA adapters that every worker loads at its start, at most 32."
    )

    rules = (immutable("name", "model"),)


class GraphSpec(SpecModel):
    """What a graph runs."""

    model: ModelSpec = Field(description="The model to serve.")
    runtime: DnsLabel = entry(
        DEFAULT_RUNTIME,
        "Program of the workers: vllm, dynamo, sglang, trtllm, simulated or one that an installed package adds; immutable.",
    )
    operator_class: OperatorClass = entry(
        OPERATOR_CLASS, "Class of the operator and planner that work on it; immutable."
    )
    image: Image | None = entry(None, "Container image of the workers; null: the runtime's default.")
    paused: Flag = entry(
        False,
        "Leave the graph's children as they are; budget, scheduling gates and drains still hold. Annotation "
        "penstock.dev/reconcile: disabled does the same.",
    )
    inherited_annotations: tuple[Text, ...] = entry(
        (),
        "Keys of the graph's annotations that its children carry too, but not its pods, as they do its labels. "
        "Those of kubernetes.io, Helm, Argo CD and Flux stay with the graph.",
        max_length=64,
    )
    env: tuple[EnvVar, ...] = entry((), "Environment of every worker.")
    env_from: tuple[EnvFrom, ...] = entry(
        (), "Secrets and ConfigMaps whose keys every worker gets as environment."
    )
    services: Annotated[dict[DnsLabel, ServiceSpec], Field(min_length=1, max_length=25)] = Field(
        description="Services by name, 1 to 25."
    )
    node_pools: dict[DnsLabel, NodePool] = entry({}, "Node pools by name, at most 25.", max_length=25)
    slo: SloConfig = entry(
        SloConfig(),
        "Latency target of the graph: for its router, planner, profiles, reports and simulations.",
    )
    router: RouterConfig = entry(RouterConfig(), "The router.")
    lease: LeaseConfig = entry(LeaseConfig(), "KV leases between prefill and decode.")
    engine: EngineConfig = entry(EngineConfig(), "The workers.")
    planner: PlannerConfig = entry(PlannerConfig(), "The planner.")

    @property
    def every_rule(self) -> tuple[Rule[Any], ...]:
        """The rules of every graph, and those of its runtime's distribution."""
        return (*self.rules, *self.traits.rules)

    @property
    def traits(self) -> RuntimeTraits:
        """Return what the runtime implies."""
        return traits_of(self.runtime)

    @property
    def models_gpus(self) -> bool:
        """Whether the workers only model their GPUs and the time that they take."""
        return self.traits.is_simulated or self.engine.mocker

    @property
    def stall_real_s(self) -> float:
        """How long a worker may have requests and make no token, real seconds."""
        given = self.router.health.stall_real_seconds
        return self.traits.stall_real_s if given is None else given

    def runs_penstock(self, service: ServiceSpec) -> bool:
        """Whether a service's replicas run Penstock's own program."""
        is_router = service.role is Role.ROUTER
        return self.traits.is_simulated or (is_router and self.traits.frontend is None)

    @property
    def served_name(self) -> str:
        """Name that clients ask for."""
        return self.model.served_name or self.model.name

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names that clients may ask for to get the model itself, its own first."""
        return (self.served_name, *self.model.aliases)

    @property
    def is_disaggregated(self) -> bool:
        """Whether prefill and decode are separate services."""
        return self.service(Role.PREFILL) is not None

    @property
    def batch_tokens(self) -> int | None:
        """Maximum tokens in one step of a worker; None: the runtime's own default, which depends on its machine."""
        engine = self.engine
        if engine.max_batch_tokens is not None or not self.traits.is_simulated:
            return engine.max_batch_tokens
        return max(SIMULATED_BATCH_TOKENS, engine.max_running_requests or 0)

    def service(self, role: Role) -> tuple[str, ServiceSpec] | None:
        """Return name and specification of the first service of ``role``, or None."""
        return next(((name, each) for name, each in self.services.items() if each.role is role), None)

    def services_of(self, role: Role) -> dict[str, ServiceSpec]:
        """Return the services of ``role`` by name."""
        return {name: each for name, each in self.services.items() if each.role is role}

    def lease_of(self, service: ServiceSpec) -> LeaseConfig:
        """Return the lease of one service: its own if set, else the graph's."""
        given = {} if service.lease is None else service.lease.model_dump(exclude_none=True)
        return self.lease.model_copy(update=given)

    @property
    def lease_seconds(self) -> int:
        """First lease of the prefill workers; seconds."""
        prefill = self.service(Role.PREFILL)
        return (self.lease if prefill is None else self.lease_of(prefill[1])).duration_seconds

    @property
    def needs_performance_profile(self) -> bool:
        """Whether the graph's planner plans by a `PerformanceProfile`: ``planner.sla.profile``, or the engine's own."""
        return self.planner.enabled and self.planner.mode == PlannerMode.SLA

    @property
    def engine_gpus(self) -> tuple[int, int] | None:
        """GPUs of one replica that prefills and of one that decodes; None without workers."""
        prefill = self.service(Role.PREFILL) or self.service(Role.AGGREGATED)
        decode = self.service(Role.DECODE) or self.service(Role.AGGREGATED)
        return None if prefill is None or decode is None else (prefill[1].gpus, decode[1].gpus)

    @property
    def worker_scheme(self) -> str:
        """Return the scheme by which workers are reached: http or https."""
        return "http" if self.engine.tls is None else "https"

    @property
    def priorities(self) -> dict[str, int]:
        """``scaling.priority`` by worker service."""
        return {
            name: each.scaling.priority for name, each in self.workers.items() if each.scaling is not None
        }

    @property
    def workers(self) -> dict[str, ServiceSpec]:
        """Services that run the model, by name."""
        return {name: each for name, each in self.services.items() if each.role.is_worker}

    def gpu_resource_of(self, service: str) -> str | None:
        """Return the extended resource that pods of one service ask for; None: they ask for none.

        Workers that model a GPU (simulated ones and Dynamo's mocker) ask only if their service names a node pool, so that
        they run on a cluster without GPUs and yet can be set to hold real ones.
        """
        spec = self.services[service]
        if spec.gpus == 0 or (self.models_gpus and spec.node_pool is None):
            return None
        pool = NodePool() if spec.node_pool is None else self.node_pools[spec.node_pool]
        return pool.gpu_resource_name

    def image_of(self, service: str) -> str:
        """Return the container image of one service."""
        spec = self.services[service]
        if self.needs_router_image(spec):
            return spec.image or PENSTOCK_IMAGE
        return spec.image or self.image or self.traits.image

    def needs_router_image(self, service: ServiceSpec) -> bool:
        """Whether a service is a router that the workers' image does not hold."""
        return self.runs_penstock(service) and not self.traits.is_simulated

    @property
    def planner_image(self) -> str:
        """Container image of the planner; the graph's own only where that is Penstock's."""
        own = self.image if self.traits.is_simulated else None
        return own or PENSTOCK_IMAGE


class KubernetesObject(SpecModel):
    """What every kind has."""

    api_version: Literal["penstock.dev/v1alpha1"] = entry(API_VERSION, "API's version.")
    kind: str = Field(description="Kind.")
    metadata: ObjectMeta = Field(description="Name, namespace, labels.")

    @property
    def name(self) -> str:
        """The object's name."""
        return self.metadata.name

    def to_manifest(self) -> dict[str, Any]:
        """Return plain data with manifest keys, values at their default left out except for the kind."""
        return {"apiVersion": self.api_version, "kind": self.kind, **super().to_manifest()}


class GraphDeployment(KubernetesObject):
    """A graph: router, workers and planner of one model; short name gd."""

    kind: Literal["GraphDeployment"] = entry("GraphDeployment", "Kind.")
    spec: GraphSpec = Field(description="What to run.")
    status: GraphStatus | None = entry(None, "Written by the operator.")


class ScalingAdapterSpec(SpecModel):
    """Which service, and how many replicas."""

    graph: DnsLabel = Field(description="Graph's name.")
    service: DnsLabel = Field(description="Service's name within the graph.")
    replicas: Replicas = entry(1, "Desired replicas; the /scale subresource writes it.")


class ScalingAdapter(KubernetesObject):
    """The number of one service's replicas as an object of its own; short name gsa."""

    kind: Literal["ScalingAdapter"] = entry("ScalingAdapter", "Kind.")
    spec: ScalingAdapterSpec = Field(description="Service and replicas.")
    status: AdapterStatus | None = entry(None, "Written by the operator.")
