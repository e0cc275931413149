"""The kind ProfileRequest: which graph to measure, for which requests and targets, on how many GPUs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from penstock.api.base import DnsLabel, Integer, Number, OperatorClass, SpecModel, Text
from penstock.api.enums import ProfilePhase
from penstock.api.graph import KubernetesObject
from penstock.api.status import Condition
from penstock.kube.objects.names import OPERATOR_CLASS

Tokens = Annotated[Integer, Field(ge=1, le=100_000_000)]
Target = Annotated[Number, Field(gt=0, le=86400)]
EngineGpus = Annotated[Integer, Field(ge=1, le=512)]


class ProfileRequestSpec(SpecModel):
    """What to measure."""

    graph: DnsLabel | None = Field(
        default=None, description="GraphDeployment of this namespace to profile; excludes template."
    )
    template: dict[str, JsonValue] = Field(
        default={},
        description="Specification (`spec`) of a GraphDeployment that need not exist yet; excludes graph.",
    )
    operator_class: OperatorClass = Field(
        default=OPERATOR_CLASS, description="Class of the operator that measures it."
    )
    isl: Tokens = Field(description="Input tokens of a request to plan for.")
    osl: Tokens = Field(description="Output tokens of a request to plan for.")
    ttft_seconds: Target | None = Field(
        default=None, description="TTFT to hold; seconds. null: the graph's planner.sla.ttftSeconds."
    )
    itl_seconds: Target | None = Field(
        default=None, description="ITL to hold; seconds. null: the graph's planner.sla.itlSeconds."
    )
    tensor_parallel: Annotated[tuple[EngineGpus, ...], Field(max_length=16)] = Field(
        default=(),
        description="Tensor-parallel sizes to measure, one after the other; empty: powers of two up to maxGpus.",
    )
    max_gpus: EngineGpus = Field(
        default=1,
        description="Most GPUs that the workers under test hold together; the pod asks for the largest size's.",
    )
    config_map: DnsLabel | None = Field(
        default=None, description="ConfigMap that receives the result; null: the request's name."
    )
    image: Text | None = Field(
        default=None,
        description="Image that holds Penstock and the graph's runtime; null: the release's, for simulated graphs alone.",
    )
    node_pool: DnsLabel | None = Field(
        default=None,
        description="Key of the graph's nodePools where to measure; null: that of its decode or aggregated service.",
    )
    timeout_seconds: Annotated[Integer, Field(ge=10, le=604_800)] = Field(
        default=7200, description="Real seconds after which the Job is ended, all tries together."
    )
    retries: Annotated[Integer, Field(ge=0, le=10)] = Field(
        default=1, description="Further tries after a failed one; Kubernetes waits longer before each."
    )
    pod_template: dict[str, JsonValue] = Field(
        default={}, description="Strategic-merge overlay on the Job's pod, whose container is `main`."
    )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tensor-parallel sizes to measure, ascending, without repetition."""
        if self.tensor_parallel:
            return tuple(sorted(set(self.tensor_parallel)))
        return tuple(1 << power for power in range(self.max_gpus.bit_length()))


class ProfileRecommendation(SpecModel):
    """What the measured profile recommends."""

    prefill_tensor_parallel: Integer | None = Field(
        default=None, description="Best tensor-parallel size for prefill."
    )
    decode_tensor_parallel: Integer | None = Field(
        default=None, description="Best tensor-parallel size for decode."
    )
    summary: tuple[str, ...] = Field(
        default=(), description="Sizes and the planner's bounds, as `penstock profile` prints them."
    )


class ProfileRequestStatus(SpecModel):
    """State of a ProfileRequest."""

    observed_generation: Integer = Field(default=0, description="Generation that this status describes.")
    phase: ProfilePhase = Field(
        default=ProfilePhase.PENDING, description="Pending, Profiling, Succeeded or Failed."
    )
    conditions: tuple[Condition, ...] = Field(default=(), description="Facts, each with its reason.")
    job: str = Field(default="", description="Job that measures.")
    config_map: str = Field(default="", description="ConfigMap of the result, once it is there.")
    start_time: str | None = Field(default=None, description="When the Job began; RFC 3339.")
    completion_time: str | None = Field(default=None, description="When it ended; RFC 3339.")
    recommendation: ProfileRecommendation = Field(
        default=ProfileRecommendation(), description="What the profile recommends."
    )


class ProfileRequest(KubernetesObject):
    """Measures a graph's performance by a Job and keeps the profile in a ConfigMap; short name gpr."""

    kind: Literal["ProfileRequest"] = Field(default="ProfileRequest", description="Kind.")
    spec: ProfileRequestSpec = Field(description="What to measure; immutable.")
    status: ProfileRequestStatus | None = Field(default=None, description="Written by the operator.")

    @property
    def config_map(self) -> str:
        """Name of the ConfigMap that receives the result."""
        return self.spec.config_map or self.name
