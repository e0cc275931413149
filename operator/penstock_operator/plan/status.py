"""Computes the status of a graph and of its ScalingAdapters, including conditions.

Pure functions. Everything is computed from the observed state; only transition times are taken from the old status.
The planner's part (``status.planner``, condition PlannerActive) is not in the result and remains the planner's own.
Each condition is evaluated independently, and its message is equal for an equal state: sorted, without ages or
counters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Final

from penstock.api import Role
from penstock.api.enums import GraphPhase
from penstock.kube.objects.names import REPLICA_FAILURE
from penstock.kube.objects.served import ServedSpec
from penstock_operator.plan.budget import WAITING_FOR_BUDGET
from penstock_operator.plan.diagnose import worst
from penstock_operator.plan.drain import LimitedReplicas
from penstock_operator.plan.status_input import ServiceStatusInput, StatusInput

READY = "Ready"
PROGRESSING = "Progressing"
DEGRADED = "Degraded"
BUDGET_RESPECTED = "BudgetRespected"
SCHEDULABLE = "Schedulable"
RECONCILING = "Reconciling"
STALLED = "Stalled"

MESSAGE_LIMIT = 1024
"""Maximum length of a condition message in characters. Kubernetes accepts 32768, but terminals cannot show that much."""


@dataclass(frozen=True, slots=True)
class ConditionResult:
    """One condition, without its transition time.

    Attributes:
        type: Type of the condition, such as ``Ready``.
        status: Whether the condition is True.
        reason: CamelCase reason.
        message: Message for users.
    """

    type: str
    status: bool
    reason: str
    message: str


def condition_results(graph: StatusInput) -> tuple[ConditionResult, ...]:
    """Return the conditions (such as Ready) that the operator writes into a graph's status, sorted by type."""
    ready = _ready(graph)
    stalled = _stalled(graph, ready)
    found = (
        ready,
        stalled,
        _reconciling(graph, ready, stalled),
        _progressing(graph),
        _degraded(graph),
        _budget(graph),
        _schedulable(graph),
    )
    return tuple(sorted(found, key=lambda each: each.type))


def conditions(
    found: Iterable[ConditionResult], *, old: Iterable[Mapping[str, Any]], generation: int, now: str
) -> list[dict[str, Any]]:
    """Return conditions in the API's form, with transition times, for a status.

    Args:
        found: The conditions to write.
        old: Conditions in the current status; those of other writers are ignored.
        generation: ``metadata.generation`` that was evaluated.
        now: RFC 3339 time; it becomes the transition time of conditions whose status changes.
    """
    before = {each.get("type"): each for each in old}
    rows = []
    for each in found:
        status = "True" if each.status else "False"
        previous = before.get(each.type, {})
        since = previous.get("lastTransitionTime") if previous.get("status") == status else None
        rows.append(
            {
                "type": each.type,
                "status": status,
                "reason": each.reason,
                "message": _shortened(each.message),
                "lastTransitionTime": since or now,
                "observedGeneration": generation,
            }
        )
    return rows


def _ready(graph: StatusInput) -> ConditionResult:
    """Ready is True if a request would be served now, or would start workers that are scaled to zero."""
    if graph.deleting:
        return ConditionResult(READY, False, "Deleting", "the graph is being deleted")
    if graph.failure is not None and not graph.services:  # the specification could not be read
        return ConditionResult(READY, False, graph.failure.reason, graph.failure.message)
    # If a graph declares no router, its user runs one elsewhere.
    present = {each.role for each in graph.services.values()}
    serving = {role: _serving(graph, role) for role in Role if role in present}
    at_zero = [role for role in serving if graph.is_woken and _is_at_zero(graph, role)]
    absent = [role for role, count in serving.items() if not count and role not in at_zero]
    if not serving:
        return ConditionResult(READY, False, "NoReadyWorker", "no service is known")
    if absent:
        worker = next((role for role in absent if role.is_worker), None)
        reason = "NoReadyRouter" if worker is None else "NoReadyWorker"
        return ConditionResult(READY, False, reason, f"no ready replica of {_listed(absent)}")
    if at_zero:
        verb, them = ("is", "it") if len(at_zero) == 1 else ("are", "them")
        text = f"{_listed(at_zero)} {verb} scaled to zero; the next request starts {them}"
        return ConditionResult(READY, True, "ScaledToZero", text)
    text = ", ".join(f"{role.value} {count}" for role, count in serving.items())
    if Role.ROUTER not in serving:
        text = f"{text}; the graph declares no router, so requests need a router of your own"
    return ConditionResult(READY, True, "Serving", f"ready replicas: {text}")


def _progressing(graph: StatusInput) -> ConditionResult:
    steps = [f"{name}: {step}" for name, each in sorted(graph.services.items()) if (step := _step(each))]
    if graph.deleting:
        return ConditionResult(PROGRESSING, True, "Deleting", graph.deleting)
    if graph.paused:
        stays = "children are not changed, while the GPU budget, scheduling gates and drains remain in effect"
        return ConditionResult(
            PROGRESSING, False, "Paused", f"{graph.paused}: {stays}; remove it to continue"
        )
    if steps:
        return ConditionResult(PROGRESSING, True, _reason(graph), "; ".join(steps))
    if graph.failure is not None:
        return ConditionResult(PROGRESSING, False, graph.failure.reason, graph.failure.message)
    return ConditionResult(PROGRESSING, False, "Stable", "all services match the spec")


def _step(service: ServiceStatusInput) -> str:
    replicas = service.replicas
    parts = []
    if service.hold_reason:
        parts.append(service.hold_reason)
    if service.rolling:
        parts.append("rolls out")
    if replicas.draining:
        parts.append(
            f"{replicas.draining} of its replicas {'is' if replicas.draining == 1 else 'are'} draining or terminating"
        )
    if replicas.serving < service.target:
        parts.append(f"{replicas.serving} of {service.target} replicas are ready")
    elif not parts and (service.desired != service.target or replicas.existing != service.target):
        parts.append(f"scaling to {service.target} replicas")
    return ", ".join(parts)


def _reason(graph: StatusInput) -> str:
    services = graph.services.values()
    if any(each.rolling for each in services):
        return "RollingOut"
    if any(each.replicas.draining for each in services):
        return "Draining"
    return "Scaling"


def _degraded(graph: StatusInput) -> ConditionResult:
    if graph.failure is not None:
        return ConditionResult(DEGRADED, True, graph.failure.reason, graph.failure.message)
    faults = [each for each in graph.diagnoses if each.category.is_fault]
    first = worst(faults)
    if first is None:
        if late := _late(graph):
            return ConditionResult(DEGRADED, True, "ReplicasNotReady", late)
        return ConditionResult(DEGRADED, False, "Healthy", "all pods are healthy")
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return ConditionResult(DEGRADED, True, first.category.value, f"{first}{more}")


def _late(graph: StatusInput) -> str:
    """Return a sentence about the services that have had too few replicas for longer than their startup timeout; empty if none has."""
    # Replicas that wait for the budget are not faults.
    blocked = {each.service for each in graph.waiting}
    services = ((name, graph.services[name]) for name in graph.late)
    late = sorted(
        name for name, each in services if each.missing > (each.replicas.gated if name in blocked else 0)
    )
    if not late:
        return ""
    text = "; ".join(f"{name}: {_step(graph.services[name])}" for name in late)
    return f"{text}, for longer than startupTimeoutSeconds; see kubectl describe of its workload and pods"


def _stalled(graph: StatusInput, ready: ConditionResult) -> ConditionResult:
    """Stalled is True if the newest specification cannot be applied until someone changes something.

    Flux and Helm 4 evaluate it together with Reconciling (kstatus). A graph that serves while its newest edit is
    refused is Ready and Stalled.
    """
    if graph.deleting:
        return ConditionResult(STALLED, False, "Deleting", "the graph is being deleted")
    if graph.failure is not None:
        return ConditionResult(STALLED, True, graph.failure.reason, graph.failure.message)
    is_underway = not ready.status or any(each.rolling for each in graph.services.values())
    if is_underway and (late := _late(graph)):
        return ConditionResult(STALLED, True, "ReplicasNotReady", late)
    return ConditionResult(STALLED, False, "NotStalled", "the specification can be applied")


def _reconciling(graph: StatusInput, ready: ConditionResult, stalled: ConditionResult) -> ConditionResult:
    """Reconciling is True while the newest specification is being applied; scaling by the planner does not count."""
    if graph.deleting:
        return ConditionResult(RECONCILING, True, "Deleting", graph.deleting)
    if graph.paused:
        return ConditionResult(RECONCILING, False, "Paused", f"{graph.paused}: remove it to continue")
    if stalled.status:
        return ConditionResult(RECONCILING, False, "Stalled", "see condition Stalled")
    steps = [f"{name}: {_step(each)}" for name, each in sorted(graph.services.items()) if _is_changing(each)]
    if steps:
        return ConditionResult(RECONCILING, True, _reason(graph), "; ".join(steps))
    if not ready.status:
        return ConditionResult(RECONCILING, True, ready.reason, ready.message)
    return ConditionResult(RECONCILING, False, "Stable", "the newest specification is applied")


def _is_changing(service: ServiceStatusInput) -> bool:
    """Return whether a service does not match the specification yet; a number within its bounds is the planner's choice and matches."""
    lowest, highest = service.bounds
    return service.rolling or bool(service.hold_reason) or (lowest == highest and service.missing > 0)


def _budget(graph: StatusInput) -> ConditionResult:
    used = f"{graph.gpus} GPUs are in use"
    if graph.budget is None:
        return ConditionResult(BUDGET_RESPECTED, True, "NoBudget", f"{used}; there is no limit")
    if graph.gpus > graph.budget:
        message = f"{used}, the budget is {graph.budget}; no new workers start until enough workers exit"
        return ConditionResult(BUDGET_RESPECTED, False, "OverBudget", message)
    return ConditionResult(BUDGET_RESPECTED, True, "WithinBudget", f"{used} of {graph.budget}")


def _schedulable(graph: StatusInput) -> ConditionResult:
    unplaced = [each for each in graph.diagnoses if each.category.is_unplaced]
    first = worst(unplaced)
    if first is not None:
        more = f" (and {len(unplaced) - 1} more)" if len(unplaced) > 1 else ""
        return ConditionResult(SCHEDULABLE, False, first.category.value, f"{first}{more}")
    if graph.waiting:
        text = sorted({f"{each.service}: {each.reason}" for each in graph.waiting})
        cause = next((each.cause for each in graph.waiting if each.cause_is_refusal), WAITING_FOR_BUDGET)
        return ConditionResult(SCHEDULABLE, False, cause, "; ".join(text))
    missing = {
        name: each.replicas.unplaced + max(0, each.target - each.replicas.existing)
        for name, each in sorted(graph.services.items())
    }
    if any(missing.values()):
        pending = "; ".join(
            f"{name}: {number} of {graph.services[name].target} replicas have no node yet"
            for name, number in missing.items()
            if number
        )
        return ConditionResult(SCHEDULABLE, False, "Pending", pending)
    return ConditionResult(SCHEDULABLE, True, "Scheduled", "every pod has a node")


def _serving(graph: StatusInput, role: Role) -> int:
    return sum(each.replicas.serving for each in graph.services.values() if each.role is role)


def _is_at_zero(graph: StatusInput, role: Role) -> bool:
    return role.is_worker and not any(each.target for each in graph.services.values() if each.role is role)


def _listed(roles: Sequence[Role]) -> str:
    return ", ".join(role.value for role in roles)


def _shortened(message: str) -> str:
    return message if len(message) <= MESSAGE_LIMIT else f"{message[: MESSAGE_LIMIT - 3]}..."


_RELEASE: Final = version("penstock")
_OPTIONAL: Final = (
    "pool",
    "address",
    "servedModel",
    "servedGeneration",
    "servedSpec",
    "configMap",
    "job",
    "recommendation",
)
"""Status keys of a graph and of a ProfileRequest that are removed if they have no value."""

SCALING_LIMITED: Final = "ScalingLimited"
"""Condition of a ScalingAdapter: True if the desired number of replicas is outside the graph's bounds."""


def graph_status(graph: StatusInput, *, old: Mapping[str, Any] | None, now: str) -> dict[str, Any]:
    """Return the fields of a graph's status that the operator writes (phase, conditions, services and so on), for server-side apply.

    Args:
        graph: Facts about the graph.
        old: Current status; None if there is none.
        now: RFC 3339 time; used only for conditions whose status changes.
    """
    found = condition_results(graph)
    services = {name: _service(each) for name, each in sorted(graph.services.items())}
    return {
        "observedGeneration": graph.generation,
        **_served(graph.served),
        "operatorVersion": _RELEASE,
        **_address(graph, old or {}),
        "phase": phase(graph, {each.type: each.status for each in found}).value,
        "conditions": conditions(
            found, old=(old or {}).get("conditions") or (), generation=graph.generation, now=now
        ),
        # Leave an empty map out: replacing a full map by an empty one is stored as null, which the API server rejects.
        **({"services": services} if services else {}),
        "summary": _summary(graph),
    }


def phase(graph: StatusInput, values: Mapping[str, bool]) -> GraphPhase:
    """Return a graph's phase, which summarises its conditions.

    Failed means that the specification cannot be applied and nothing is served. Degraded means that something is
    broken. Pending means that nothing runs and nothing is in progress.

    Args:
        graph: Facts about the graph.
        values: Whether each of the operator's conditions is True, by type.
    """
    if graph.failure is not None and not values[READY]:
        return GraphPhase.FAILED
    if values[DEGRADED]:
        return GraphPhase.DEGRADED
    if values[READY] and not values[PROGRESSING]:
        return GraphPhase.READY
    started = any(each.replicas.existing for each in graph.services.values())
    return (
        GraphPhase.PROGRESSING if graph.deleting or (started and values[PROGRESSING]) else GraphPhase.PENDING
    )


def adapter_status(
    service: ServiceStatusInput,
    replicas: LimitedReplicas,
    *,
    generation: int,
    old: Mapping[str, Any] | None,
    now: str,
) -> dict[str, Any]:
    """Return the status of a service's ScalingAdapter, for server-side apply.

    Args:
        service: Facts about the service.
        replicas: Its desired replicas, limited to the allowed range.
        generation: ``metadata.generation`` of the adapter.
        old: Current status of the adapter; None if there is none.
        now: RFC 3339 time; used only for conditions whose status changes and for ``lastScaleTime``.
    """
    previous = old or {}
    limited = ConditionResult(
        SCALING_LIMITED,
        status=bool(replicas.reason),
        reason=replicas.reason or "WithinBounds",
        message=replicas.message or "the requested number is within the bounds",
    )
    refused = ConditionResult(
        REPLICA_FAILURE,
        status=service.refused is not None,
        reason="PodsCreated" if service.refused is None else service.refused.category.value,
        message="no pod was rejected" if service.refused is None else service.refused.message,
    )
    scaled = "replicas" in previous and previous["replicas"] != service.replicas.existing
    since = now if scaled else previous.get("lastScaleTime")
    found = {
        "replicas": service.replicas.existing,
        "ready": service.replicas.ready,
        "minReplicas": service.bounds[0],
        "maxReplicas": service.bounds[1],
        "selector": service.selector,
        "conditions": conditions(
            [limited, refused], old=previous.get("conditions") or (), generation=generation, now=now
        ),
    }
    return {**found, "lastScaleTime": since} if since else found


def _address(graph: StatusInput, old: Mapping[str, Any]) -> dict[str, Any]:
    """Return the graph's URL and model name; the last known ones remain while an invalid specification gives none."""
    address = old.get("address") if graph.url is None else {"url": graph.url} if graph.url else None
    model = old.get("servedModel") if graph.served_model is None else graph.served_model
    return {key: value for key, value in (("address", address), ("servedModel", model)) if value}


def _served(served: ServedSpec | None) -> dict[str, Any]:
    if served is None:
        return {}
    return {"servedGeneration": served.generation, **({"servedSpec": served.text} if served.text else {})}


def is_current(wanted: Mapping[str, Any], live: Mapping[str, Any] | None) -> bool:
    """Return whether a status need not be written, because ``live``, the status in the cluster, already equals ``wanted``.

    Fields and conditions that only other writers set are ignored. Returns False if there is no status.
    """
    if live is None:
        return False
    types = {each["type"] for each in wanted["conditions"]}
    ours = [each for each in live.get("conditions") or () if each.get("type") in types]
    shown = {key: live.get(key) for key in (*wanted, *_OPTIONAL) if key != "conditions" and key in live}
    return shown == {key: each for key, each in wanted.items() if key != "conditions"} and sorted(
        ours, key=lambda each: str(each["type"])
    ) == sorted(wanted["conditions"], key=lambda each: str(each["type"]))


def _service(service: ServiceStatusInput) -> dict[str, Any]:
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


def _summary(graph: StatusInput) -> dict[str, str]:
    decode = _ready_of(graph, Role.DECODE) or _ready_of(graph, Role.AGGREGATED)
    gpus = str(graph.gpus) if graph.budget is None else f"{graph.gpus}/{graph.budget}"
    return {"prefill": _ready_of(graph, Role.PREFILL), "decode": decode, "gpus": gpus}


def _ready_of(graph: StatusInput, role: Role) -> str:
    services = [each for each in graph.services.values() if each.role is role]
    if not services:
        return ""
    return f"{sum(each.replicas.ready for each in services)}/{sum(each.target for each in services)}"
