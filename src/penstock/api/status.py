"""What the operator reports about a graph; users read it and never write it."""

from __future__ import annotations

from pydantic import Field

from penstock.api.base import Integer, SpecModel
from penstock.api.enums import GraphPhase


class Condition(SpecModel):
    """A Kubernetes condition."""

    type: str = Field(
        description="Ready, Progressing, Degraded, PlannerActive, BudgetRespected or Schedulable."
    )
    status: str = Field(description="True, False or Unknown.")
    reason: str = Field(default="", description="One word for a program to read.")
    message: str = Field(default="", description="One sentence for a person to read.")
    last_transition_time: str | None = Field(default=None, description="When status last changed; RFC 3339.")
    observed_generation: Integer | None = Field(
        default=None, description="Generation that the condition is about."
    )


class ServiceStatus(SpecModel):
    """Replicas of one service."""

    replicas: Integer = Field(default=0, description="Replicas that exist.")
    ready: Integer = Field(default=0, description="Replicas that pass their probes.")
    updated: Integer = Field(default=0, description="Replicas of the newest revision.")
    desired: Integer = Field(default=0, description="Replicas that the specification asks for now.")
    target: Integer = Field(default=0, description="Replicas that the planner set last.")
    draining: Integer = Field(default=0, description="Replicas that finish their requests before they leave.")
    gpus: Integer = Field(default=0, description="GPUs of existing replicas.")
    selector: str = Field(default="", description="Label selector of the replicas, for /scale.")


class PlannerStatus(SpecModel):
    """The planner's last decision."""

    last_decision: str = Field(default="", description="What changed and why, in one line.")
    decision_id: str = Field(default="", description="Key of the decision in the ledger.")
    decision_time: str = Field(default="", description="When it was decided, RFC 3339.")
    gpus: Integer = Field(default=0, description="GPUs in use, prefill plus decode.")
    budget: Integer | None = Field(default=None, description="GPUs allowed; null: no ceiling.")


class Address(SpecModel):
    """Where clients reach the graph."""

    url: str = Field(description="URL of the routers' Service, within the cluster.")


class StatusSummary(SpecModel):
    """What the columns of ``kubectl get gd`` show; they cannot join numbers themselves."""

    prefill: str = Field(
        default="", description="Prefill replicas, ready/target; empty: there is no prefill service."
    )
    decode: str = Field(
        default="",
        description="Decode replicas, ready/target; the aggregated ones where there is no decode service.",
    )
    gpus: str = Field(
        default="", description="GPUs of workers, used/budget; used alone where there is no ceiling."
    )


class GraphStatus(SpecModel):
    """State of a GraphDeployment."""

    observed_generation: Integer = Field(default=0, description="Generation that this status describes.")
    operator_version: str = Field(default="", description="Release of the operator that wrote this status.")
    address: Address | None = Field(default=None, description="Where clients reach it; null: no router.")
    served_model: str = Field(default="", description="Name that clients ask for.")
    phase: GraphPhase = Field(default=GraphPhase.PENDING, description="One word for the graph's state.")
    conditions: tuple[Condition, ...] = Field(default=(), description="Facts, each with its reason.")
    services: dict[str, ServiceStatus] = Field(default={}, description="Replicas by service.")
    summary: StatusSummary = Field(default=StatusSummary(), description="Columns of kubectl get.")
    planner: PlannerStatus = Field(default=PlannerStatus(), description="The planner's last decision.")


class AdapterStatus(SpecModel):
    """State of a ScalingAdapter."""

    replicas: Integer = Field(default=0, description="Replicas that exist.")
    ready: Integer = Field(default=0, description="Replicas that pass their probes.")
    min_replicas: Integer = Field(default=0, description="Fewest replicas that the graph allows.")
    max_replicas: Integer = Field(default=0, description="Most replicas that the graph allows.")
    selector: str = Field(default="", description="Label selector of the replicas, for /scale.")
    last_scale_time: str | None = Field(default=None, description="When replicas last changed; RFC 3339.")
    conditions: tuple[Condition, ...] = Field(default=(), description="Facts, each with its reason.")
