"""The rules that hold a graph's services to the planner's GPU budget, and those of scaling to zero. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from penstock.api.enums import WORKER_ROLES, Role
from penstock.api.graph import GraphSpec
from penstock.api.rule import Breach, KeyPath, Rule, quoted
from penstock.api.runtimes import OWN_FRONTEND, PENSTOCK_ROUTER
from penstock.api.service import ServiceSpec


def exists(role: Role) -> str:
    """Return the CEL of whether a graph has a service of a role."""
    return f"self.services.exists(k, self.services[k].role == '{role}')"


def role_floor_gpus(service: ServiceSpec, min_gpu_budget: int) -> int:
    """Return the GPUs below which a planner may not shrink a worker service.

    The fewest whole replicas that satisfy both scaling.minReplicas and the planner's minGpuBudget; the
    fixed number where the service does not scale.
    """
    if service.scaling is None:
        return service.first_replicas * service.gpus
    fewest = max(service.scaling.min_replicas, math.ceil(min_gpu_budget / service.gpus))
    return fewest * service.gpus


def floor_gpus(spec: GraphSpec) -> int:
    """Return the GPUs below which a graph's planner may not shrink it; those that it starts with, without a planner."""
    if not spec.planner.enabled:
        return sum(each.first_replicas * each.gpus for each in spec.workers.values())
    roles = sum(role_floor_gpus(each, spec.planner.min_gpu_budget) for each in spec.workers.values())
    return max(roles, spec.planner.min_total_gpus)


def _of_workers(spec: GraphSpec, *paths: KeyPath) -> tuple[KeyPath, ...]:
    """Return the paths of keys of every worker service."""
    return tuple(("services", name, *keys) for name in spec.workers for keys in paths)


def _above_budget(spec: GraphSpec, gpus: Mapping[str, int], *read: KeyPath) -> Iterator[Breach]:
    budget = spec.planner.own_gpu_budget
    if not spec.planner.enabled or budget is None or sum(gpus.values()) <= budget:
        return
    related = _of_workers(spec, ("replicas",), ("gpusPerReplica",), ("scaling", "minReplicas"))
    parts = " + ".join(f"{name} {count}" for name, count in gpus.items())
    yield Breach((budget, parts, sum(gpus.values())), related=(*related, *read))


def _floors_above_budget(spec: GraphSpec) -> Iterator[Breach]:
    least = spec.planner.min_gpu_budget
    floors = {name: role_floor_gpus(each, least) for name, each in spec.workers.items()}
    yield from _above_budget(spec, floors, ("planner", "minGpuBudget"))


def _starts_above_budget(spec: GraphSpec) -> Iterator[Breach]:
    if not any(_floors_above_budget(spec)):
        starts = {name: each.first_replicas * each.gpus for name, each in spec.workers.items()}
        yield from _above_budget(spec, starts)


def most_gpus(service: ServiceSpec) -> int:
    """Return the GPUs that a worker service may grow to; the fixed number where it does not scale."""
    return service.replica_bounds[1] * service.gpus


def _total_floor_out_of_reach(spec: GraphSpec) -> Iterator[Breach]:
    reach = sum(most_gpus(each) for each in spec.workers.values())
    if not spec.planner.enabled or spec.planner.min_total_gpus <= reach:
        return
    related = _of_workers(spec, ("replicas",), ("gpusPerReplica",), ("scaling", "maxReplicas"))
    yield Breach((spec.planner.min_total_gpus, reach), related=related)


_FIXED = "(has(self.services[k].replicas) ? self.services[k].replicas : 1)"
_FLOOR = (
    f"(!has(self.services[k].scaling) ? {_FIXED} * self.services[k].gpusPerReplica : "
    "[self.services[k].gpusPerReplica > 0 ? (self.planner.minGpuBudget + self.services[k].gpusPerReplica - 1) / "
    "self.services[k].gpusPerReplica : 0].map(n, n > self.services[k].scaling.minReplicas ? n : self.services[k].scaling.minReplicas)[0]"
    " * self.services[k].gpusPerReplica)"
)
_MOST = (
    f"(has(self.services[k].scaling) ? self.services[k].scaling.maxReplicas : {_FIXED})"
    " * self.services[k].gpusPerReplica"
)
_START = (
    "(has(self.services[k].replicas) ? self.services[k].replicas : "
    "has(self.services[k].scaling) && self.services[k].scaling.minReplicas > 1 ? self.services[k].scaling.minReplicas : 1)"
    " * self.services[k].gpusPerReplica"
)
_NO_BUDGET = "!self.planner.enabled || !has(self.planner.maxGpuBudget)"


def _sum(gpus: str) -> str:
    return f"self.services.filter(k, self.services[k].role != 'router').map(k, {gpus}).sum()"


def _sum_message(text: str, remedy: str, gpus: str) -> str:
    """CEL of ``5 GPUs are fewer than …: prefill 2 + decode 4 = 6; …``, which names each worker service."""
    budget, total = "self.planner.maxGpuBudget", _sum(gpus)
    parts = {}
    for role in WORKER_ROLES:
        name = f"self.services.filter(k, self.services[k].role == '{role}')[0]"
        parts[role] = f"{name}, [{name}].map(k, {gpus})[0]"
    one, two = (quoted(f"{text}; {remedy}" % ("%d", each, "%d")) for each in ("%s %d", "%s %d + %s %d"))
    return (
        f"{exists(Role.AGGREGATED)} ? {one}.format([{budget}, {parts[Role.AGGREGATED]}, {total}])"
        f" : {two}.format([{budget}, {parts[Role.PREFILL]}, {parts[Role.DECODE]}, {total}])"
    )


_FLOORS_TEXT = "%s GPUs are fewer than the floors need: %s = %s"
_FLOORS_REMEDY = "raise it, or lower minReplicas, gpusPerReplica or minGpuBudget"
_STARTS_TEXT = "%s GPUs are fewer than the graph starts with: %s = %s"
_STARTS_REMEDY = "raise it or lower replicas"

BUDGET_RULES: tuple[Rule[GraphSpec], ...] = (
    Rule(
        path="planner.maxGpuBudget",
        must=(
            "while the planner is enabled, the floors fit maxGpuBudget: the sum over worker services of gpusPerReplica "
            "times the larger of minReplicas and minGpuBudget in whole replicas"
        ),
        cel=(
            f"{_NO_BUDGET} || self.planner.minGpuBudget > self.planner.maxGpuBudget || "
            f"{_sum(_FLOOR)} <= self.planner.maxGpuBudget"
        ),
        find=_floors_above_budget,
        text=_FLOORS_TEXT,
        remedy=_FLOORS_REMEDY,
        message=_sum_message(_FLOORS_TEXT, _FLOORS_REMEDY, _FLOOR),
    ),
    Rule(
        path="planner.maxGpuBudget",
        must=(
            "while the planner is enabled, what the graph starts with fits maxGpuBudget: the sum over worker services "
            "of gpusPerReplica times replicas"
        ),
        cel=(
            f"{_NO_BUDGET} || {_sum(_FLOOR)} > self.planner.maxGpuBudget || "
            f"{_sum(_START)} <= self.planner.maxGpuBudget"
        ),
        find=_starts_above_budget,
        text=_STARTS_TEXT,
        remedy=_STARTS_REMEDY,
        message=_sum_message(_STARTS_TEXT, _STARTS_REMEDY, _START),
    ),
    Rule(
        path="planner.minTotalGpus",
        must=(
            "while the planner is enabled, the worker services may grow to minTotalGpus: the sum of gpusPerReplica "
            "times maxReplicas"
        ),
        cel=f"!self.planner.enabled || self.planner.minTotalGpus <= {_sum(_MOST)}",
        find=_total_floor_out_of_reach,
        text="%d GPUs are more than the worker services may grow to, %d",
        values=("self.planner.minTotalGpus", _sum(_MOST)),
        remedy="lower it, or raise maxReplicas",
    ),
)


_ABSENT = "!has(self.planner.scaleToZeroAfterSeconds)"
_PATH = "planner.scaleToZeroAfterSeconds"
_STAYS = (
    "self.services[k].role != 'router' && "
    "(!has(self.services[k].scaling) || self.services[k].scaling.minReplicas > 0)"
)
_EXTERNAL = "has(self.services[k].scaling) && self.services[k].scaling.managedBy == 'external'"
_ONE_OF_EACH = _sum("self.services[k].gpusPerReplica")


def _is_off(spec: GraphSpec) -> bool:
    return spec.planner.scale_to_zero_after_seconds is None


def _services_that_stay(spec: GraphSpec) -> Iterator[Breach]:
    for name, service in () if _is_off(spec) else spec.workers.items():
        if service.scaling is None or service.scaling.min_replicas > 0:
            yield Breach((name,), related=(("services", name, "scaling", "minReplicas"),))
            return


def _external_services(spec: GraphSpec) -> Iterator[Breach]:
    for name, service in () if _is_off(spec) else spec.workers.items():
        if service.is_external:
            yield Breach((name,), related=(("services", name, "scaling", "managedBy"),))
            return


def _cannot_wake(spec: GraphSpec) -> Iterator[Breach]:
    budget, needed = spec.planner.own_gpu_budget, sum(each.gpus for each in spec.workers.values())
    if not _is_off(spec) and budget is not None and needed > budget:
        yield Breach((budget, needed), related=_of_workers(spec, ("gpusPerReplica",)))


ZERO_RULES: tuple[Rule[GraphSpec], ...] = (
    Rule(
        path=_PATH,
        must="planner.scaleToZeroAfterSeconds needs scaling.minReplicas 0 of every worker service",
        cel=f"{_ABSENT} || !self.services.exists(k, {_STAYS})",
        find=_services_that_stay,
        first=f"self.services.filter(k, {_STAYS})",
        text="given, but services.%s keeps a replica",
        values=("k",),
        remedy="set its scaling.minReplicas to 0, or remove scaleToZeroAfterSeconds",
    ),
    Rule(
        path=_PATH,
        must="planner.scaleToZeroAfterSeconds needs scaling.managedBy planner of every worker service",
        cel=f"{_ABSENT} || !self.services.exists(k, {_EXTERNAL})",
        find=_external_services,
        first=f"self.services.filter(k, {_EXTERNAL})",
        text="given, but services.%s is scaled by others",
        values=("k",),
        remedy="set its scaling.managedBy to planner, or remove scaleToZeroAfterSeconds",
    ),
    Rule(
        path=_PATH,
        must="planner.scaleToZeroAfterSeconds needs a router service, which counts requests without a worker",
        cel=f"{_ABSENT} || {exists(Role.ROUTER)}",
        holds=lambda spec: _is_off(spec) or bool(spec.services_of(Role.ROUTER)),
        text="given, but no service of role router counts what arrives without a worker",
        remedy="declare a router, or remove it",
    ),
    Rule(
        path=_PATH,
        must="planner.scaleToZeroAfterSeconds needs router.prefillQueue.maxWakeSeconds",
        cel=f"{_ABSENT} || {OWN_FRONTEND.cel} || has(self.router.prefillQueue.maxWakeSeconds)",
        holds=lambda spec: (
            _is_off(spec)
            or OWN_FRONTEND(spec.runtime)
            or spec.router.prefill_queue.max_wake_seconds is not None
        ),
        text="given, but router.prefillQueue.maxWakeSeconds does not bound how long requests wait for a worker's start",
        remedy="give it, above the start-up of the slowest worker",
    ),
    Rule(
        path=_PATH,
        must=f"planner.scaleToZeroAfterSeconds needs runtime {' or '.join(PENSTOCK_ROUTER.names)}",
        cel=f"{_ABSENT} || {PENSTOCK_ROUTER.cel}",
        holds=lambda spec: _is_off(spec) or PENSTOCK_ROUTER(spec.runtime),
        text="given, but runtime %s has its own frontend, which holds no request without a worker",
        values=("self.runtime",),
        remedy="remove it",
    ),
    Rule(
        path="planner.maxGpuBudget",
        must="with planner.scaleToZeroAfterSeconds, one replica of every worker service fits maxGpuBudget",
        cel=f"{_ABSENT} || !has(self.planner.maxGpuBudget) || {_ONE_OF_EACH} <= self.planner.maxGpuBudget",
        find=_cannot_wake,
        text="%d GPUs are fewer than the %d of one replica each, without which nothing comes back from zero",
        values=("self.planner.maxGpuBudget", _ONE_OF_EACH),
        remedy="raise it or lower gpusPerReplica",
    ),
)
