"""Conditions of a graph, each judged alone from the same facts.

Pure. A condition's message is the same for the same state: sorted, without ages or counters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.api import GraphSpec, Role
from penstock.kube.kinds import Kind
from penstock.kube.objects.names import DRAINING, GRAPH_LABEL, SERVICE_LABEL
from penstock.operator.plan.budget import Waiting
from penstock.operator.plan.diagnose import Diagnosis, worst
from penstock.operator.plan.pods import PodView
from penstock.operator.resources.metadata import BuildContext
from penstock.runtimes import runtime_of


@dataclass(frozen=True, slots=True)
class Replicas:
    """Replicas of one service.

    Attributes:
        existing: Replicas that neither terminate nor are finished, draining ones included.
        ready: Of those, replicas whose every pod is ready.
        serving: The ready ones that may get requests: workers by their serving label, routers always.
        draining: Replicas that are marked to leave or terminate already.
        gpus: GPUs of all pods that hold some: released and not finished, terminating ones included.
    """

    existing: int
    ready: int
    serving: int
    draining: int
    gpus: int


def count(pods: Iterable[PodView]) -> Replicas:
    """Return the replicas that ``pods`` of one service make; a LeaderWorkerSet group is one."""
    present = [pod for pod in pods if not pod.finished]
    replicas: dict[str, list[PodView]] = defaultdict(list)
    for pod in present:
        if not pod.terminating:
            replicas[f"group {pod.group}" if pod.group else f"pod {pod.name}"].append(pod)
    leaving = [pod for pod in present if pod.terminating and pod.worker_index == 0]
    ready = [pods for pods in replicas.values() if _is_ready(pods)]
    return Replicas(
        existing=len(replicas),
        ready=len(ready),
        serving=sum(any(pod.takes_requests for pod in pods) for pods in ready),
        draining=len(leaving) + sum(_is_marked(pods) for pods in replicas.values()),
        gpus=sum(pod.gpus for pod in present if not pod.gated),
    )


def _is_ready(pods: Sequence[PodView]) -> bool:
    return all(pod.ready for pod in pods) and len(pods) >= max(pod.group_size for pod in pods)


def _is_marked(pods: Sequence[PodView]) -> bool:
    return any(pod.serving == DRAINING for pod in pods)


READY = "Ready"
PROGRESSING = "Progressing"
DEGRADED = "Degraded"
BUDGET_RESPECTED = "BudgetRespected"
SCHEDULABLE = "Schedulable"

MESSAGE_LIMIT = 1024
"""Longest condition message; Kubernetes accepts 32768, a terminal does not."""


@dataclass(frozen=True, slots=True)
class ConditionResult:
    """One condition's status, reason and message, without times."""

    type: str
    status: bool
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class ServiceFacts:
    """What is known of one service.

    Attributes:
        role: Its role.
        replicas: Counts from its pods.
        desired: The workload's ``spec.replicas``; 0 while there is no workload.
        target: Replicas wanted, the desired number within its bounds.
        updated: Replicas of the newest revision.
        selector: Label selector of its pods, as text.
        rolling: Whether a rollout is under way.
        held: Why a step that is due waits, for example for another rollout; empty: none does. A desired number beyond
            its bounds is no such step: it is settled, and its ScalingAdapter says so.
        refused: Why the API server refuses its pods; None: it refuses none.
        bounds: Fewest and most replicas that the graph allows.
    """

    role: Role
    replicas: Replicas
    desired: int
    target: int
    updated: int
    selector: str
    rolling: bool = False
    held: str = ""
    refused: Diagnosis | None = None
    bounds: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why the complete graph cannot be reconciled.

    Attributes:
        reason: One word, for example ``InvalidSpec``, ``MissingCRD`` or ``ApplyFailed``.
        message: What is wrong and what to do.
    """

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class ConditionFacts:
    """What is known of a graph.

    Attributes:
        generation: ``metadata.generation`` that was acted on.
        services: By name, all services of the specification.
        budget: Most GPUs of workers; None: no ceiling.
        waiting: Pods that the budget holds back.
        diagnoses: What is wrong with its pods.
        failure: Why it cannot be brought about; None if it can.
        deleting: What a deletion waits for; empty unless the graph is being deleted.
        is_woken: Whether its routers hold requests until the planner has brought workers back from zero.
        paused: What keeps its children as they are; empty: nothing.
        url: Where clients reach it; empty: nowhere; None: unknown.
        served_model: Name that clients ask for; None: unknown.
    """

    generation: int
    services: Mapping[str, ServiceFacts]
    budget: int | None = None
    waiting: Sequence[Waiting] = ()
    diagnoses: Sequence[Diagnosis] = ()
    failure: Failure | None = None
    deleting: str = field(default="")
    is_woken: bool = False
    paused: str = ""
    url: str | None = None
    served_model: str | None = None

    @property
    def gpus(self) -> int:
        """GPUs that workers hold."""
        return sum(each.replicas.gpus for each in self.services.values() if each.role.is_worker)


def condition_results(facts: ConditionFacts) -> tuple[ConditionResult, ...]:
    """Return the operator's conditions of a graph, sorted by type."""
    found = (_ready(facts), _progressing(facts), _degraded(facts), _budget(facts), _schedulable(facts))
    return tuple(sorted(found, key=lambda each: each.type))


def conditions(
    found: Iterable[ConditionResult], *, old: Iterable[Mapping[str, Any]], generation: int, now: str
) -> list[dict[str, Any]]:
    """Return ``found`` as the API has them; a transition time changes only with the status.

    Args:
        found: What is judged.
        old: The conditions that are there, others' among them.
        generation: Generation that is judged.
        now: RFC 3339.
    """
    before = {each.get("type"): each for each in old}
    rows = []
    for each in found:
        status = "True" if each.status else "False"
        was = before.get(each.type, {})
        since = was.get("lastTransitionTime") if was.get("status") == status else None
        rows.append(
            {
                "type": each.type,
                "status": status,
                "reason": each.reason,
                "message": _cut(each.message),
                "lastTransitionTime": since or now,
                "observedGeneration": generation,
            }
        )
    return rows


def _ready(facts: ConditionFacts) -> ConditionResult:
    """Ready: a request would be served now, or would wake workers scaled to zero."""
    if facts.deleting:
        return ConditionResult(READY, False, "Deleting", "the graph is being deleted")
    if facts.failure is not None and not facts.services:  # nothing of it could even be read
        return ConditionResult(READY, False, facts.failure.reason, facts.failure.message)
    serving = {role: _serving(facts, role) for role in _roles(facts)}
    asleep = [role for role in serving if facts.is_woken and _is_at_zero(facts, role)]
    absent = [role for role, count in serving.items() if not count and role not in asleep]
    if not serving:
        return ConditionResult(READY, False, "NoReadyWorker", "no service is known")
    if absent:
        worker = next((role for role in absent if role.is_worker), None)
        reason = "NoReadyRouter" if worker is None else "NoReadyWorker"
        return ConditionResult(READY, False, reason, f"no ready replica of {_listed(absent)}")
    if asleep:
        text = f"no replica of {_listed(asleep)} is wanted: the next request brings them back"
        return ConditionResult(READY, True, "ScaledToZero", text)
    text = ", ".join(f"{role.value} {count}" for role, count in serving.items())
    if Role.ROUTER not in serving:
        text = f"{text}; the graph declares no router, so requests have to come through one of your own"
    return ConditionResult(READY, True, "Serving", f"ready replicas: {text}")


def _progressing(facts: ConditionFacts) -> ConditionResult:
    steps = [f"{name}: {step}" for name, each in sorted(facts.services.items()) if (step := _step(each))]
    if facts.deleting:
        return ConditionResult(PROGRESSING, True, "Deleting", facts.deleting)
    if facts.paused:
        stays = "children stay as they are, while budget, scheduling gates and drains hold"
        return ConditionResult(PROGRESSING, False, "Paused", f"{facts.paused}: {stays}; remove it to go on")
    if steps:
        return ConditionResult(PROGRESSING, True, _reason(facts), "; ".join(steps))
    return ConditionResult(PROGRESSING, False, "Stable", "everything is as wanted")


def _step(service: ServiceFacts) -> str:
    replicas = service.replicas
    parts = []
    if service.held:
        parts.append(service.held)
    if service.rolling:
        parts.append("rolls out")
    if replicas.draining:
        parts.append(
            f"{replicas.draining} of its replicas {'is' if replicas.draining == 1 else 'are'} leaving"
        )
    if replicas.serving < service.target:
        parts.append(f"{replicas.serving} of {service.target} replicas are ready")
    elif not parts and (service.desired != service.target or replicas.existing != service.target):
        parts.append(f"goes to {service.target} replicas")
    return ", ".join(parts)


def _reason(facts: ConditionFacts) -> str:
    services = facts.services.values()
    if any(each.rolling for each in services):
        return "RollingOut"
    if any(each.replicas.draining for each in services):
        return "Draining"
    return "Scaling"


def _degraded(facts: ConditionFacts) -> ConditionResult:
    if facts.failure is not None:
        return ConditionResult(DEGRADED, True, facts.failure.reason, facts.failure.message)
    faults = [each for each in facts.diagnoses if each.category.is_fault]
    first = worst(faults)
    if first is None:
        return ConditionResult(DEGRADED, False, "Healthy", "no pod is in trouble")
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return ConditionResult(DEGRADED, True, first.category.value, f"{first}{more}")


def _budget(facts: ConditionFacts) -> ConditionResult:
    used = f"{facts.gpus} GPUs are in use"
    if facts.budget is None:
        return ConditionResult(BUDGET_RESPECTED, True, "NoBudget", f"{used}; there is no ceiling")
    if facts.gpus > facts.budget:
        message = f"{used}, the budget is {facts.budget}; no worker starts until enough have ended"
        return ConditionResult(BUDGET_RESPECTED, False, "OverBudget", message)
    return ConditionResult(BUDGET_RESPECTED, True, "WithinBudget", f"{used} of {facts.budget}")


def _schedulable(facts: ConditionFacts) -> ConditionResult:
    unplaced = [each for each in facts.diagnoses if each.category.is_unplaced]
    first = worst(unplaced)
    if first is not None:
        more = f" (and {len(unplaced) - 1} more)" if len(unplaced) > 1 else ""
        return ConditionResult(SCHEDULABLE, False, first.category.value, f"{first}{more}")
    if facts.waiting:
        text = sorted({f"{each.service}: {each.reason}" for each in facts.waiting})
        return ConditionResult(SCHEDULABLE, False, "WaitingForBudget", "; ".join(text))
    return ConditionResult(SCHEDULABLE, True, "Scheduled", "every pod has a node")


def _roles(facts: ConditionFacts) -> list[Role]:
    """Return the declared roles; a graph without a router service is behind a router of its user's own."""
    present = {each.role for each in facts.services.values()}
    return [role for role in Role if role in present]


def _serving(facts: ConditionFacts, role: Role) -> int:
    return sum(each.replicas.serving for each in facts.services.values() if each.role is role)


def _is_at_zero(facts: ConditionFacts, role: Role) -> bool:
    return role.is_worker and not any(each.target for each in facts.services.values() if each.role is role)


def _listed(roles: Sequence[Role]) -> str:
    return ", ".join(role.value for role in roles)


def _cut(message: str) -> str:
    return message if len(message) <= MESSAGE_LIMIT else f"{message[: MESSAGE_LIMIT - 3]}..."


def observed_services(pods: Iterable[PodView]) -> dict[str, ServiceFacts]:
    """Return the services that ``pods`` of one graph belong to, wanted as they are; by name.

    Pods without a service's name or with an unknown role belong to none. How many replicas are of the newest
    revision is not known then; 0 is reported.
    """
    by_service: dict[str, list[PodView]] = defaultdict(list)
    for pod in pods:
        if pod.service and pod.role in set(Role):
            by_service[pod.service].append(pod)
    found: dict[str, ServiceFacts] = {}
    for name, members in sorted(by_service.items()):
        replicas = count(members)
        found[name] = ServiceFacts(
            role=Role(members[0].role),
            replicas=replicas,
            desired=replicas.existing,
            target=replicas.existing,
            updated=0,
            selector=f"{GRAPH_LABEL}={members[0].graph},{SERVICE_LABEL}={name}",
        )
    return found


REASON: Final = "MissingCRD"


def needs_leader_worker_set(spec: GraphSpec) -> bool:
    """Return whether a replica spans several nodes."""
    return bool(_over_nodes(spec))


def kind_of_runtime(spec: GraphSpec) -> Kind | None:
    """Return the kind of another's that the graph's runtime needs, if any."""
    return runtime_of(spec.runtime).cluster.kind


def missing_definition(
    spec: GraphSpec, context: BuildContext, *, has_kind_of_runtime: bool
) -> Failure | None:
    """Return the missing kind and its source; None if the cluster has every kind that the graph needs.

    Args:
        spec: Of the graph.
        context: What kinds the cluster knows.
        has_kind_of_runtime: Whether the cluster knows `kind_of_runtime`.
    """
    kind = kind_of_runtime(spec)
    if kind is not None and not has_kind_of_runtime:
        group = kind.api_version.partition("/")[0]
        source = runtime_of(spec.runtime).cluster.kind_source
        return Failure(REASON, f"runtime {spec.runtime} needs the kind {kind.kind} of {group}, {source}")
    if needs_leader_worker_set(spec) and not context.has_leader_worker_set:
        message = (
            f"{', '.join(_over_nodes(spec))}: nodesPerReplica above 1 needs the kind LeaderWorkerSet, which this "
            "cluster does not know; install https://lws.sigs.k8s.io, or set nodesPerReplica to 1"
        )
        return Failure(REASON, message)
    if spec.router.gateway.enabled and not context.has_inference_pool:
        message = (
            "spec.router.gateway.enabled needs the kind InferencePool of inference.networking.k8s.io, which this cluster "
            "does not know; install https://gateway-api-inference-extension.sigs.k8s.io, or set it to false"
        )
        return Failure(REASON, message)
    return None


def _over_nodes(spec: GraphSpec) -> list[str]:
    return sorted(name for name, each in spec.services.items() if each.nodes_per_replica > 1)
