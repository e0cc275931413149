"""The kind ProfileRequest: which graph to measure, for which requests and targets, on how many GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal

from pydantic import Field, JsonValue

from penstock.api.base import (
    DnsLabel,
    EngineGpus,
    Image,
    Integer,
    OperatorClass,
    SpecModel,
    Tokens,
    entry,
)
from penstock.api.enums import ProfilePhase
from penstock.api.graph import KubernetesObject
from penstock.api.rule import Breach, Rule
from penstock.api.service import POD_TEMPLATE_RULE
from penstock.api.slo import ProfileSlo
from penstock.api.status import Condition
from penstock.kube.objects.names import OPERATOR_CLASS


def _too_large(spec: Any) -> Iterator[Breach]:
    above = [size for size in spec.tensor_parallel if size > spec.max_gpus]
    if above:
        yield Breach((above[0], spec.max_gpus))


class ProfileRequestSpec(SpecModel):
    """What to measure."""

    graph: DnsLabel | None = entry(None, "GraphDeployment of this namespace to profile; excludes template.")
    template: dict[str, JsonValue] = entry(
        {}, "Specification (`spec`) of a GraphDeployment that need not exist yet; excludes graph."
    )
    operator_class: OperatorClass = entry(OPERATOR_CLASS, "Class of the operator that measures it.")
    isl: Tokens = Field(description="Input tokens of a request to plan for.")
    osl: Tokens = Field(description="Output tokens of a request to plan for.")
    slo: ProfileSlo = entry(ProfileSlo(), "Targets to plan for, in place of the graph's.")
    tensor_parallel: Annotated[tuple[EngineGpus, ...], Field(max_length=16)] = entry(
        (), "Tensor-parallel sizes to measure, one after the other; empty: powers of two up to maxGpus."
    )
    max_gpus: EngineGpus = entry(
        1, "Maximum GPUs for all workers under test together; the pod requests those of the largest size."
    )
    config_map: DnsLabel | None = entry(None, "ConfigMap that receives the result; null: the request's name.")
    image: Image | None = entry(
        None,
        "Image that holds Penstock and the graph's runtime; null: the release's, for simulated graphs alone.",
    )
    node_pool: DnsLabel | None = entry(
        None, "Key of the graph's nodePools where to measure; null: that of its decode or aggregated service."
    )
    timeout_seconds: Annotated[Integer, Field(ge=10, le=604_800)] = entry(
        7200, "Real seconds after which the Job is ended, all tries together."
    )
    retries: Annotated[Integer, Field(ge=0, le=10)] = entry(
        1, "Further tries after a failed one; Kubernetes waits longer before each."
    )
    pod_template: dict[str, JsonValue] = entry(
        {}, "Strategic-merge overlay on the Job's pod, whose container is `main`."
    )

    rules = (
        Rule(
            path="graph",
            must="a ProfileRequest has graph or template, not both",
            cel="has(self.graph) != has(self.template)",
            holds=lambda spec: (spec.graph is None) == bool(spec.template),
            text="both or neither of graph and template",
            remedy="name a GraphDeployment of the namespace, or write the specification of one",
        ),
        Rule(
            path="tensorParallel",
            must="tensorParallel is at most maxGpus",
            cel="!has(self.tensorParallel) || self.tensorParallel.all(n, n <= self.maxGpus)",
            find=_too_large,
            text="%d exceeds maxGpus %d",
            values=("self.tensorParallel.filter(n, n > self.maxGpus)[0]", "self.maxGpus"),
            remedy="leave the size out or raise maxGpus",
        ),
        POD_TEMPLATE_RULE,
    )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tensor-parallel sizes to measure, ascending, without repetition."""
        if self.tensor_parallel:
            return tuple(sorted(set(self.tensor_parallel)))
        return tuple(1 << power for power in range(self.max_gpus.bit_length()))


class ProfileRecommendation(SpecModel):
    """What the measured profile recommends."""

    prefill_tensor_parallel: Integer | None = entry(None, "Best tensor-parallel size for prefill.")
    decode_tensor_parallel: Integer | None = entry(None, "Best tensor-parallel size for decode.")
    summary: tuple[str, ...] = entry((), "Sizes and the planner's bounds, as `penstock profile` prints them.")


class ProfileRequestStatus(SpecModel):
    """State of a ProfileRequest."""

    observed_generation: Integer = entry(
        0, "Generation that this status describes; -1 until an operator has observed the object."
    )
    phase: ProfilePhase = entry(ProfilePhase.PENDING, "Pending, Profiling, Succeeded or Failed.")
    conditions: tuple[Condition, ...] = entry((), "Facts, each with its reason.")
    job: str = entry("", "Job that measures.")
    config_map: str = entry("", "ConfigMap of the result, once it is there.")
    start_time: str | None = entry(None, "When the Job began; RFC 3339.")
    completion_time: str | None = entry(None, "When it ended; RFC 3339.")
    recommendation: ProfileRecommendation = entry(ProfileRecommendation(), "What the profile recommends.")


MAX_REQUEST_NAME: Final = 52
"""The Job appends ``-profile``, and its name is a label's value of 63 characters on its pods; as for graphs."""


def _long_name(request: Any) -> Iterator[Breach]:
    name = request.metadata.name
    if len(name) > MAX_REQUEST_NAME:
        yield Breach((name, len(name)))


class ProfileRequest(KubernetesObject):
    """Measures a graph's performance by a Job and keeps the profile in a ConfigMap; short name gpr."""

    kind: Literal["ProfileRequest"] = entry("ProfileRequest", "Kind.")
    spec: ProfileRequestSpec = Field(description="What to measure; immutable.")
    status: ProfileRequestStatus | None = entry(None, "Written by the operator.")

    rules = (
        Rule(
            path="metadata.name",
            must=f"a ProfileRequest's name has at most {MAX_REQUEST_NAME} characters",
            cel=f"size(self.metadata.name) <= {MAX_REQUEST_NAME}",
            find=_long_name,
            text="%s has %d characters, which is too long for its Job's",
            values=("self.metadata.name", "size(self.metadata.name)"),
            remedy=f"use at most {MAX_REQUEST_NAME}",
        ),
        Rule(
            path="spec",
            must="the spec of a ProfileRequest is immutable",
            cel="self.spec == oldSelf.spec",
            text="a request is measured once",
            remedy="delete it and apply it again, or give it another name",
        ),
    )

    @property
    def config_map(self) -> str:
        """Name of the ConfigMap that receives the result."""
        return self.spec.config_map or self.name
