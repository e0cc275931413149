"""What the operator writes into the status of a graph and of its ScalingAdapters.

Pure. Everything is recomputed from what is observed; from the old status only transition times are taken
over. The planner's part (``status.planner``, condition PlannerActive) is not in the result and so stays its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, Final

from penstock.api import Role
from penstock.api.enums import GraphPhase
from penstock.kube.objects.names import REPLICA_FAILURE
from penstock.operator.plan.bounds import Bounded
from penstock.operator.plan.conditions import (
    DEGRADED,
    PROGRESSING,
    READY,
    ConditionFacts,
    ConditionResult,
    ServiceFacts,
    condition_results,
    conditions,
)

_RELEASE: Final = version("penstock")
_OPTIONAL: Final = ("address", "servedModel")

SCALING_LIMITED: Final = "ScalingLimited"
"""Condition of a ScalingAdapter: the desired number lies outside the graph's bounds."""


def graph_status(facts: ConditionFacts, *, old: Mapping[str, Any] | None, now: str) -> dict[str, Any]:
    """Return the operator's part of a graph's status, for server-side apply.

    Args:
        facts: What is known of the graph.
        old: The status that is there; None if there is none.
        now: RFC 3339; used only for conditions whose status changes.
    """
    found = condition_results(facts)
    return {
        "observedGeneration": facts.generation,
        "operatorVersion": _RELEASE,
        **_address(facts, old or {}),
        "phase": phase(facts, {each.type: each.status for each in found}).value,
        "conditions": conditions(
            found, old=(old or {}).get("conditions") or (), generation=facts.generation, now=now
        ),
        "services": {name: _service(each) for name, each in sorted(facts.services.items())},
        "summary": _summary(facts),
    }


def phase(facts: ConditionFacts, held: Mapping[str, bool]) -> GraphPhase:
    """Return the one word for a graph whose conditions ``held`` (by type) are known.

    Failed: it cannot be brought about and serves nothing. Degraded: something is broken. Pending: nothing
    of it runs and nothing is under way.
    """
    if facts.failure is not None and not held[READY]:
        return GraphPhase.FAILED
    if held[DEGRADED]:
        return GraphPhase.DEGRADED
    if held[READY] and not held[PROGRESSING]:
        return GraphPhase.READY
    started = any(each.replicas.existing for each in facts.services.values())
    return GraphPhase.PROGRESSING if facts.deleting or (started and held[PROGRESSING]) else GraphPhase.PENDING


def adapter_status(
    service: ServiceFacts,
    bounded: Bounded,
    *,
    generation: int,
    old: Mapping[str, Any] | None,
    now: str,
) -> dict[str, Any]:
    """Return the status of a service's ScalingAdapter, for server-side apply.

    Args:
        service: What is known of the service.
        bounded: The desired number and what the bounds made of it.
        generation: The adapter's ``metadata.generation``.
        old: The status that is there; None if there is none.
        now: RFC 3339; used only where something changes.
    """
    was = old or {}
    limited = ConditionResult(
        SCALING_LIMITED,
        status=bool(bounded.reason),
        reason=bounded.reason or "WithinBounds",
        message=bounded.message or "the number asked for is within the bounds",
    )
    refused = ConditionResult(
        REPLICA_FAILURE,
        status=service.refused is not None,
        reason="PodsCreated" if service.refused is None else service.refused.category.value,
        message="no pod is refused" if service.refused is None else service.refused.message,
    )
    scaled = "replicas" in was and was["replicas"] != service.replicas.existing
    since = now if scaled else was.get("lastScaleTime")
    found = {
        "replicas": service.replicas.existing,
        "ready": service.replicas.ready,
        "minReplicas": service.bounds[0],
        "maxReplicas": service.bounds[1],
        "selector": service.selector,
        "conditions": conditions(
            [limited, refused], old=was.get("conditions") or (), generation=generation, now=now
        ),
    }
    return {**found, "lastScaleTime": since} if since else found


def _address(facts: ConditionFacts, old: Mapping[str, Any]) -> dict[str, Any]:
    """Return where clients reach the graph; the last address stays while an invalid specification names none."""
    address = old.get("address") if facts.url is None else {"url": facts.url} if facts.url else None
    model = old.get("servedModel") if facts.served_model is None else facts.served_model
    return {key: value for key, value in (("address", address), ("servedModel", model)) if value}


def is_current(wanted: Mapping[str, Any], live: Mapping[str, Any] | None) -> bool:
    """Return whether ``live`` already contains ``wanted``, and no other fields of ours."""
    if live is None:
        return False
    types = {each["type"] for each in wanted["conditions"]}
    ours = [each for each in live.get("conditions") or () if each.get("type") in types]
    shown = {key: live.get(key) for key in (*wanted, *_OPTIONAL) if key != "conditions" and key in live}
    return shown == {key: each for key, each in wanted.items() if key != "conditions"} and sorted(
        ours, key=lambda each: str(each["type"])
    ) == sorted(wanted["conditions"], key=lambda each: str(each["type"]))


def _service(service: ServiceFacts) -> dict[str, Any]:
    return {
        "replicas": service.replicas.existing,
        "ready": service.replicas.ready,
        "updated": service.updated,
        "desired": service.desired,
        "target": service.target,
        "draining": service.replicas.draining,
        "gpus": service.replicas.gpus,
        "selector": service.selector,
    }


def _summary(facts: ConditionFacts) -> dict[str, str]:
    decode = _ready_of(facts, Role.DECODE) or _ready_of(facts, Role.AGGREGATED)
    gpus = str(facts.gpus) if facts.budget is None else f"{facts.gpus}/{facts.budget}"
    return {"prefill": _ready_of(facts, Role.PREFILL), "decode": decode, "gpus": gpus}


def _ready_of(facts: ConditionFacts, role: Role) -> str:
    services = [each for each in facts.services.values() if each.role is role]
    if not services:
        return ""
    return f"{sum(each.replicas.ready for each in services)}/{sum(each.target for each in services)}"
