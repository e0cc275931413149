"""What the operator reports about a graph; users read it and never write it."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import Field

from penstock.api.base import Integer, SpecModel, entry
from penstock.api.enums import GraphPhase

_TYPE: Final = (
    r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?"
    r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])$"
)
_REASON: Final = r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"
"""Patterns of metav1.Condition, https://pkg.go.dev/k8s.io/apimachinery/pkg/apis/meta/v1#Condition."""


class Condition(SpecModel):
    """A Kubernetes condition, with the bounds of metav1.Condition."""

    type: str = Field(
        max_length=316,
        pattern=_TYPE,
        description="Ready, Reconciling, Stalled, Progressing, Degraded, PlannerActive, BudgetRespected or Schedulable.",
    )
    status: Literal["True", "False", "Unknown"] = Field(description="True, False or Unknown.")
    reason: str = Field(
        min_length=1, max_length=1024, pattern=_REASON, description="One word for a program to read."
    )
    message: str = Field(max_length=32768, description="One sentence for a person to read.")
    last_transition_time: str = Field(
        description="When status last changed; RFC 3339.", json_schema_extra={"format": "date-time"}
    )
    observed_generation: Integer = entry(0, "Generation that the condition is about.", ge=0)


class ServiceStatus(SpecModel):
    """Replicas of one service."""

    replicas: Integer = entry(0, "Replicas that exist.")
    ready: Integer = entry(0, "Replicas that pass their probes.")
    updated: Integer = entry(0, "Replicas of the newest revision.")
    desired: Integer = entry(0, "Replicas that the specification asks for now.")
    target: Integer = entry(0, "Replicas that the planner set last.")
    draining: Integer = entry(0, "Replicas that finish their requests before they leave.")
    gpus: Integer = entry(0, "GPUs of existing replicas.")
    selector: str = entry("", "Label selector of the replicas, for /scale.")


class PlannerChange(SpecModel):
    """A decision of the planner that was the last one."""

    decision_id: str = Field(max_length=256, description="Key of the decision in the ledger.")
    decision_time: str = entry("", "When it was decided, RFC 3339; empty: not known.")
    sentence: str = Field(max_length=32768, description="What changed and why, in one line.")


class PlannerStatus(SpecModel):
    """The planner's last decision."""

    last_decision: str = entry("", "What changed and why, in one line.")
    decision_id: str = entry("", "Key of the decision in the ledger.")
    decision_time: str = entry("", "When it was decided, RFC 3339.")
    earlier: tuple[PlannerChange, ...] = entry((), "Decisions before the last one, newest first.")
    served_in_time: str = entry(
        "", "Share of the last half hour's requests in time (mode adaptive), `99.2%`; empty: not known."
    )
    predicted_in_time: str = entry(
        "", "The same share as the planner's model predicts it for the same fleet."
    )
    gpus: Integer = entry(0, "GPUs in use, prefill plus decode.")
    budget: Integer | None = entry(None, "GPUs allowed; null: no ceiling.")
    wants: dict[str, Integer] = entry(
        {},
        "Replicas by role that the planner requests from a GPU pool; empty: the replicas of the ScalingAdapters.",
    )
    wants_time: str = entry(
        "", "Time of the last bid (RFC 3339, minute resolution); it expires after three minutes."
    )


class Address(SpecModel):
    """Where clients reach the graph."""

    url: str = Field(description="URL of the routers' Service, within the cluster.")


class StatusSummary(SpecModel):
    """What the columns of ``kubectl get gd`` show; they cannot join numbers themselves."""

    prefill: str = entry("", "Prefill replicas, ready/target; empty: there is no prefill service.")
    decode: str = entry(
        "", "Decode replicas, ready/target; the aggregated ones where there is no decode service."
    )
    gpus: str = entry("", "GPUs of workers, used/budget; used alone where there is no ceiling.")


class PoolPeerStatus(SpecModel):
    """GPUs of one graph of a GPU pool."""

    name: str = Field(description="Name of the graph; with its namespace in a ClusterGpuPool.")
    guaranteed: Integer = entry(0, "GPUs that the graph gets as soon as it wants them.")
    held: Integer = entry(0, "GPUs of the graph's existing workers.")
    granted: Integer = entry(0, "Maximum GPUs that the graph's workers may hold now.")
    wanted: Integer = entry(0, "GPUs of the replicas that the graph wants.")
    waits_for: tuple[str, ...] = entry(
        (), "Graphs that have to return GPUs before this graph can have more; empty: it waits for none."
    )


class PoolShareStatus(SpecModel):
    """What a pool grants the graph, and the other graphs of the pool."""

    kind: str = entry("GpuPool", "Kind of the pool: GpuPool or ClusterGpuPool.")
    name: str = Field(description="Name of the pool.")
    granted_gpus: Integer = entry(0, "GPUs that the graph's workers may hold now.")
    guaranteed_gpus: Integer = entry(0, "GPUs that the graph gets as soon as it wants them.")
    message: str = entry(
        "",
        "Which graphs hold the GPUs that this one lacks and when they are expected, or what keeps the grant from changing; empty: nothing.",
    )
    pool_gpus: Integer | None = entry(None, "GPUs of the entire pool; null: not known.")
    pool_held_gpus: Integer | None = entry(None, "GPUs that all graphs of the pool hold; null: not known.")
    graphs: tuple[PoolPeerStatus, ...] = entry(
        (),
        "Graphs of the pool, this graph first, then those that hold the most; 20 at most. In a pool of more graphs the "
        "figures can be as old as the graph's last reconcile.",
    )


class GraphStatus(SpecModel):
    """State of a GraphDeployment."""

    observed_generation: Integer = entry(
        0, "Generation that this status describes; -1 until an operator has observed the object."
    )
    served_generation: Integer | None = entry(
        None, "Generation that is carried out: an earlier one while the newest is refused; null: none."
    )
    served_spec: str = entry(
        "", "JSON of that generation's spec, for an operator that is restarted meanwhile."
    )
    operator_version: str = entry("", "Release of the operator that wrote this status.")
    address: Address | None = entry(None, "Where clients reach it; null: no router.")
    served_model: str = entry("", "Name that clients ask for.")
    phase: GraphPhase = entry(GraphPhase.PENDING, "One word for the graph's state.")
    conditions: tuple[Condition, ...] = entry((), "Facts, each with its reason.")
    services: dict[str, ServiceStatus] = entry({}, "Replicas by service.")
    summary: StatusSummary = entry(StatusSummary(), "Columns of kubectl get.")
    pool: PoolShareStatus | None = entry(None, "Its share of a GPU pool; null: it is in none.")
    planner: PlannerStatus = entry(PlannerStatus(), "The planner's last decision.")


class AdapterStatus(SpecModel):
    """State of a ScalingAdapter."""

    replicas: Integer = entry(0, "Replicas that exist.")
    ready: Integer = entry(0, "Replicas that pass their probes.")
    min_replicas: Integer = entry(0, "Minimum replicas that the graph allows.")
    max_replicas: Integer = entry(0, "Maximum replicas that the graph allows.")
    selector: str = entry("", "Label selector of the replicas, for /scale.")
    last_scale_time: str | None = entry(None, "When replicas last changed; RFC 3339.")
    conditions: tuple[Condition, ...] = entry((), "Facts, each with its reason.")
