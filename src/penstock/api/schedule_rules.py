"""The rules that hold ``planner.schedule`` to a graph's services, its budget, and itself. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from penstock.api.budget_rules import role_floor_gpus
from penstock.api.graph import GraphSpec
from penstock.api.rule import Breach, KeyPath, Rule
from penstock.api.schedule import ScheduleEntry


def contradictions(spec: GraphSpec) -> Iterator[Breach]:
    """Yield what of a graph's schedule contradicts its services, its budget, or another entry that can hold at the same time."""
    schedule = spec.planner.schedule
    for number, each in enumerate(schedule):
        if each.name in {other.name for other in schedule[:number]}:
            yield _breach(number, "name", f"{each.name} is the name of an earlier entry", "give each its own")
        yield from _against_services(spec, number)
    for one, second in combinations(range(len(schedule)), 2):
        yield from _between(spec, schedule[one], second)


def _against_services(spec: GraphSpec, number: int) -> Iterator[Breach]:
    each = spec.planner.schedule[number]
    for role, bound in each.bounds.items():
        named = spec.service(role)
        if named is None:
            yield _breach(number, role.value, f"no service has role {role.value}", "remove it")
            continue
        name, service = named
        fewest, most = service.replica_bounds
        floor, ceiling = bound.floor(service.gpus), bound.ceiling(service.gpus)
        if bound.gpus is not None and bound.gpus % service.gpus:
            text = (
                f"{bound.gpus} GPUs are not a whole number of replicas of {service.gpus} of services.{name}"
            )
            yield _breach(number, role.value, text, f"give a multiple of {service.gpus}")
        elif service.scaling is None:
            yield _breach(
                number, role.value, f"services.{name} has no scaling", f"give services.{name}.scaling"
            )
        elif floor is not None and floor > most:
            text = f"{floor} replicas exceed {most} of services.{name}.scaling.maxReplicas"
            yield _breach(number, role.value, text, "lower it, or raise maxReplicas")
        elif ceiling is not None and ceiling < max(1, fewest):
            text = f"{ceiling} replicas are below {max(1, fewest)}, the floor of services.{name}"
            yield _breach(number, role.value, text, "raise it, or lower minReplicas")
    yield from _against_budget(spec, number, each)


def _against_budget(spec: GraphSpec, number: int, *entries: ScheduleEntry) -> Iterator[Breach]:
    """Yield that the floors of entries that hold at once, and those of all services, exceed the budget."""
    least, budget = spec.planner.min_gpu_budget, spec.planner.own_gpu_budget
    needed = 0
    for service in spec.workers.values():
        bounds = [each.bounds[service.role] for each in entries if service.role in each.bounds]
        floors = [(each.floor(service.gpus) or 0) * service.gpus for each in bounds]
        needed += max(role_floor_gpus(service, least), *floors, 0)
    if budget is not None and needed > budget:
        names = " and ".join(each.name for each in entries)
        yield _breach(
            number,
            "name",
            f"{names} and the floors ask for {needed} GPUs, maxGpuBudget is {budget}",
            "raise it",
        )


def _between(spec: GraphSpec, one: ScheduleEntry, number: int) -> Iterator[Breach]:
    other = spec.planner.schedule[number]
    own = any(any(_against_budget(spec, number, each)) for each in (one, other))
    both = [] if own else list(_against_budget(spec, number, one, other))
    if both and one.period.meets(other.period):
        yield from both
    for role in one.bounds.keys() & other.bounds.keys():
        named = spec.service(role)
        gpus = 1 if named is None else named[1].gpus
        a, b = one.bounds[role], other.bounds[role]
        is_apart = any(
            low is not None and high is not None and low > high
            for low, high in ((a.floor(gpus), b.ceiling(gpus)), (b.floor(gpus), a.ceiling(gpus)))
        )
        if is_apart and one.period.meets(other.period):
            text = f"{other.name} and {one.name} can hold at the same time and contradict each other"
            yield _breach(number, role.value, text, "let one end before the other begins, or agree")


def _breach(number: int, key: str, text: str, remedy: str) -> Breach:
    path: KeyPath = ("planner", "schedule", number, key)
    return Breach((text,), path, (), remedy)


SCHEDULE_RULES: tuple[Rule[GraphSpec], ...] = (
    Rule(
        path="planner.schedule",
        must="entries of planner.schedule name services that scale, stay within their bounds and the budget, and two that can hold "
        "at the same time agree",
        cel=None,
        find=contradictions,
        text="%s",
        remedy="mend it",
    ),
)
