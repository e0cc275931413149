"""What a graph needs so that its planner may take the last replica of every role. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.api.budget_rules import exists
from penstock.api.enums import Role
from penstock.api.graph import GraphSpec
from penstock.api.rule import Breach, Rule, unless
from penstock.api.runtimes import OWN_FRONTEND, PENSTOCK_ROUTER

_ABSENT = "!has(self.planner.scaleToZeroAfterSeconds)"
_PATH = "planner.scaleToZeroAfterSeconds"
_STAYS = (
    "self.services[k].role != 'router' && "
    "(!has(self.services[k].scaling) || self.services[k].scaling.minReplicas > 0)"
)
_EXTERNAL = "has(self.services[k].scaling) && self.services[k].scaling.managedBy == 'external'"
_ONE_OF_EACH = (
    "self.services.filter(k, self.services[k].role != 'router').map(k, self.services[k].gpusPerReplica).sum()"
)


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


def _one_of_each_gpus(spec: GraphSpec) -> int:
    return sum(service.gpus for service in spec.workers.values())


def _cannot_wake(spec: GraphSpec) -> Iterator[Breach]:
    budget, needed = spec.planner.max_gpu_budget, _one_of_each_gpus(spec)
    if not _is_off(spec) and budget is not None and needed > budget:
        related = tuple(("services", name, "gpusPerReplica") for name in spec.workers)
        yield Breach((budget, needed), related=related)


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
        find=unless(lambda spec: _is_off(spec) or bool(spec.services_of(Role.ROUTER))),
        text="given, but no service of role router counts what arrives without a worker",
        remedy="declare a router, or remove it",
    ),
    Rule(
        path=_PATH,
        must="planner.scaleToZeroAfterSeconds needs router.prefillQueue.maxWakeSeconds",
        cel=f"{_ABSENT} || {OWN_FRONTEND.cel} || has(self.router.prefillQueue.maxWakeSeconds)",
        find=unless(
            lambda spec: (
                _is_off(spec)
                or OWN_FRONTEND(spec.runtime)
                or spec.router.prefill_queue.max_wake_seconds is not None
            )
        ),
        text="given, but router.prefillQueue.maxWakeSeconds does not bound how long requests wait for a worker's start",
        remedy="give it, above the start-up of the slowest worker",
    ),
    Rule(
        path=_PATH,
        must=f"planner.scaleToZeroAfterSeconds needs runtime {' or '.join(PENSTOCK_ROUTER.names)}",
        cel=f"{_ABSENT} || {PENSTOCK_ROUTER.cel}",
        find=unless(lambda spec: _is_off(spec) or PENSTOCK_ROUTER(spec.runtime)),
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
