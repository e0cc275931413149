"""Decides whether workers or routers get a setting first, for settings on which both must agree.

Pure functions. Until the first side has rolled out, the other side's pods keep their template.

- Tiers (priorities): a worker that does not schedule by priority rejects a request with a priority, while requests
without one are always accepted. So tiers are enabled at workers first and disabled at routers first.
- KV lease: a router that assumes a longer lease than prefill grants would trust blocks that are already reused. So a
longer lease is rolled out to prefill workers first, a shorter one to routers first.
- Names: workers answer to an alias or a LoRA adapter before any router serves that name, and until no router serves
it.
- Roles: routers learn of new roles after these have ready workers.

A served name that is replaced at once has no safe order. A new name that was an alias before needs none if the old
name remains as an alias. Model and runtime of a graph are immutable.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Final

import yaml

from penstock.api import LeaseConfig, Role
from penstock.core.safe_yaml import read_yaml
from penstock.kube.kinds import CONFIG_MAP
from penstock.runtimes.engine_flags import granted_lease_s, names_answered
from penstock_operator.plan.rollout import RolloutView, waiting_rollouts

TIERS: Final = "spec.router.tiers.enabled"
LEASE: Final = "lease.durationSeconds"
NAMES: Final = "model.aliases or model.adapters"
ROLES: Final = "spec.services"
_OPPOSITE_ORDERS: Final = (
    "{} and {} change at once, one for workers first and one for routers first: requests may be refused, or KV read after its "
    "lease, while they roll; change one after the other"
)
_PRIORITY: Final = "--scheduling-policy"


@dataclass(frozen=True, slots=True)
class RolloutOrder:
    """Objects of a graph that must not be written yet.

    Attributes:
        waiting: Reason why the new pod template of a workload is not written yet, by the name of the service.
        later: Objects that must not be written yet: the workloads of the services in ``waiting`` and, if routers are
            among them, the routers' ConfigMap.
        disruption: Message about requests that will be refused during the change, whatever the order of the writes; None if
            no request will be refused.
    """

    waiting: Mapping[str, str]
    later: Sequence[Mapping[str, Any]]
    disruption: str | None = None


def rollout_order(
    wanted: Iterable[Mapping[str, Any]],
    live: Mapping[tuple[str, str], Mapping[str, Any]],
    workloads: Mapping[str, Mapping[str, Any]],
    views: Sequence[RolloutView],
    *,
    changed: Collection[str],
) -> RolloutOrder:
    """Return which of a graph's desired objects must not be written yet, because workers or routers must be updated first.

    Workers and routers have to agree on model names, roles, priorities and KV leases, so a change of one of these is
    written to one of them first, and to the other after that rollout. Worker services are also rolled out one at a
    time.

    Args:
        wanted: All desired objects.
        live: Existing objects by kind and name.
        workloads: Desired workload (Deployment or LeaderWorkerSet) of each service, by service.
        views: Rollout state of every service's workload.
        changed: Services whose pod template is about to change.
    """
    waiting = waiting_rollouts(changed, views)
    file = next((each for each in wanted if each["kind"] == CONFIG_MAP.kind), None)
    existing = None if file is None else live.get((file["kind"], file["metadata"]["name"]))
    if file is None or existing is None or not (changed or existing.get("data") != file["data"]):
        return RolloutOrder(waiting, [workloads[name] for name in waiting])
    prioritised = {
        name for name, desired in workloads.items() if _schedules_by_priority(_live(desired, live))
    }
    prefill = next((view.service for view in views if view.role is Role.PREFILL), "")
    granted_s = _granted_s(_live(workloads.get(prefill), live))
    answered = {name: _answered(_live(desired, live)) for name, desired in workloads.items()}
    by_setting = {
        TIERS: waiting_for_tiers(file, existing, views, changed=changed, prioritised=prioritised),
        LEASE: waiting_for_lease(file, existing, views, changed=changed, granted_s=granted_s),
        NAMES: waiting_for_names(file, existing, views, changed=changed, answered=answered),
        ROLES: waiting_for_roles(file, existing, views, workloads),
    }
    routers = {view.service for view in views if not view.role.is_worker}
    waiting_now, conflict = _combined(by_setting, routers)
    waiting |= waiting_now
    routers_wait = not routers.isdisjoint(waiting_now)
    disruption = conflict or (_renamed(file, existing) if changed else None)
    later = [workloads[name] for name in waiting if name in workloads]
    return RolloutOrder(waiting, [*later, file] if routers_wait else later, disruption)


def _combined(
    by_setting: Mapping[str, Mapping[str, str]], routers: AbstractSet[str]
) -> tuple[dict[str, str], str | None]:
    """Return the services that wait by any setting, and a message if two settings need opposite orders; then the first one applies."""
    (first, waiting_now), *others = [(name, each) for name, each in by_setting.items() if each] or [("", {})]
    combined = dict(waiting_now)
    for name, each in others:
        if routers.isdisjoint(waiting_now) != routers.isdisjoint(each):
            return combined, _OPPOSITE_ORDERS.format(first, name)
        combined |= each
    return combined, None


def _live(
    desired: Mapping[str, Any] | None, live: Mapping[tuple[str, str], Mapping[str, Any]]
) -> Mapping[str, Any]:
    """Return the existing object for a desired one; empty if there is none."""
    return {} if desired is None else live.get((desired["kind"], desired["metadata"]["name"]), {})


def waiting_for_tiers(
    wanted: Mapping[str, Any],
    live: Mapping[str, Any],
    views: Iterable[RolloutView],
    *,
    changed: Collection[str],
    prioritised: Collection[str],
) -> dict[str, str]:
    """Return the services whose new pod template has to wait because ``router.tiers.enabled`` changes, each with the reason.

    Workers are updated first if the setting becomes true, and routers first if it becomes false, so that no router
    sends priorities to workers that ignore priorities. Returns an empty dictionary if no service has to wait.

    Args:
        wanted: Desired ConfigMap of the routers.
        live: Existing ConfigMap of the routers.
        views: Rollout state of every service's workload.
        changed: Services whose pod template is about to change.
        prioritised: Services whose running workers schedule requests by priority.
    """
    sides: dict[bool, list[RolloutView]] = {True: [], False: []}
    for view in views:
        sides[view.role.is_worker].append(view)
    new, old = _has_tiers(wanted), _has_tiers(live)
    workers = sorted(each.service for each in sides[True] if each.service in changed or each.rolling)
    if new and not old and workers:
        reason = f"waiting for {', '.join(workers)}: {TIERS} is rolled out to workers before routers"
        return {each.service: reason for each in sides[False]}
    routers = sorted(each.service for each in sides[False] if each.service in changed or each.rolling)
    if not new and (old or routers):
        reason = f"waiting for the routers: they stop sending priorities before workers stop following them ({TIERS})"
        return {name: reason for name in changed if name in prioritised}
    return {}


def waiting_for_lease(
    wanted: Mapping[str, Any],
    live: Mapping[str, Any],
    views: Iterable[RolloutView],
    *,
    changed: Collection[str],
    granted_s: float | None,
) -> dict[str, str]:
    """Return the services whose new pod template has to wait because ``lease.durationSeconds`` changes, each with the reason.

    The lease is the time for which a prefill worker keeps the KV of a finished prompt for decode. Prefill workers are
    updated first if the lease becomes longer, and routers first if it becomes shorter, so that no router expects a
    longer lease than workers grant. Returns an empty dictionary if no service has to wait.

    Args:
        wanted: Desired ConfigMap of the routers.
        live: Existing ConfigMap of the routers.
        views: Rollout state of every service's workload.
        changed: Services whose pod template is about to change.
        granted_s: Lease of the running prefill workers in seconds; None if unknown.
    """
    new_s, old_s = _counted_s(wanted), _counted_s(live)
    if new_s is None or old_s is None:
        return {}
    moving = {
        role: [
            each.service for each in views if each.role is role and (each.service in changed or each.rolling)
        ]
        for role in (Role.PREFILL, Role.ROUTER)
    }
    if new_s > old_s and moving[Role.PREFILL]:
        reason = f"waiting for prefill to grant {new_s:g} s: a longer {LEASE} is rolled out to workers first"
        return {each.service: reason for each in views if each.role is Role.ROUTER}
    if granted_s is not None and granted_s > new_s and (old_s > new_s or moving[Role.ROUTER]):
        reason = (
            f"waiting for the routers to expect {new_s:g} s: a shorter {LEASE} is rolled out to routers first"
        )
        return {
            each.service: reason for each in views if each.role is Role.PREFILL and each.service in changed
        }
    return {}


def waiting_for_names(
    wanted: Mapping[str, Any],
    live: Mapping[str, Any],
    views: Iterable[RolloutView],
    *,
    changed: Collection[str],
    answered: Mapping[str, Collection[str]],
) -> dict[str, str]:
    """Return the services whose new pod template has to wait because model names are added or removed, each with the reason.

    An added name is rolled out to workers first, and a removed name is taken from routers first, so that routers accept
    only names that workers answer to. If names are added and removed in one change, the order for added names applies.
    Returns an empty dictionary if no service has to wait.

    Args:
        wanted: Desired ConfigMap of the routers.
        live: Existing ConfigMap of the routers.
        views: Rollout state of every service's workload.
        changed: Services whose pod template is about to change.
        answered: Model names that the running workers of each service answer to, by service.
    """
    new, old = _names(wanted), _names(live)
    moving: dict[bool, list[str]] = {True: [], False: []}
    for each in views:
        if each.service in changed or each.rolling:
            moving[each.role.is_worker].append(each.service)
    if (added := sorted(new - old)) and moving[True]:
        workers, names = (", ".join(each) for each in (sorted(moving[True]), added))
        reason = f"waiting for {workers} to answer to {names}: a new name is rolled out to workers first"
        return {each.service: reason for each in views if not each.role.is_worker}
    if not added and (old - new or moving[False]):
        return {
            name: f"waiting for the routers to stop serving {', '.join(gone)}: a name is removed from routers first"
            for name in changed
            if (gone := sorted(set(answered.get(name, ())) - new))
        }
    return {}


def waiting_for_roles(
    wanted: Mapping[str, Any],
    live: Mapping[str, Any],
    views: Iterable[RolloutView],
    workloads: Mapping[str, Mapping[str, Any]],
) -> dict[str, str]:
    """Return the router services whose rollout has to wait, each with the reason; empty if none has to wait.

    A new version of the routers waits if it would know other worker roles than the running one (such as prefill and decode
    in place of aggregated) and a worker service of these roles has no ready replica yet. Routers that were replaced
    earlier would send requests to a role without workers.

    Args:
        wanted: Desired ConfigMap of the routers.
        live: Existing ConfigMap of the routers.
        views: Rollout state of every service's workload.
        workloads: Desired workload (Deployment or LeaderWorkerSet) of each service, by service.

    Returns:
        Reason by service.
    """
    roles, before = _worker_roles(wanted), _worker_roles(live)
    if not before or set(roles.values()) == set(before.values()):
        return {}
    ready = {each.service for each in views if each.ready}
    missing = sorted(
        name for name in roles.keys() - ready if workloads.get(name, {}).get("spec", {}).get("replicas")
    )
    if not missing:
        return {}
    reason = (
        f"waiting for {', '.join(missing)} to become ready: routers with the new {ROLES} use no other workers"
    )
    return {name: reason for name in workloads if name not in roles}


def _worker_roles(config_map: Mapping[str, Any]) -> dict[str, str]:
    """Return the role of each worker service in the routers' ConfigMap."""
    services = _graph_spec(config_map).get("services") or {}
    found = {name: str((each or {}).get("role", "")) for name, each in services.items()}
    return {name: role for name, role in found.items() if role != Role.ROUTER}


def _renamed(wanted: Mapping[str, Any], live: Mapping[str, Any]) -> str | None:
    """Return a message about requests that a new served name refuses; None if both names are served before and after the change."""
    name = _served_name(wanted)
    change = _changed(_served_name(live), name)
    if change is None or {_served_name(live), name} <= _names(live) & _names(wanted):
        return None
    cost = f"the model's served name {change}: requests are refused while workers and routers are rolled out"
    return f"{cost}; to lose none, add {name} to model.aliases first, and keep the old name there afterwards"


def _changed(old: object, new: object) -> str | None:
    return None if old is None or new is None or old == new else f"changes from {old} to {new}"


def _names(config_map: Mapping[str, Any]) -> set[str]:
    """Return the names that routers serve, except the model names of tiers."""
    model = _graph_spec(config_map).get("model") or {}
    adapters = (each.get("name") for each in model.get("adapters") or ())
    found = (_served_name(config_map), *(model.get("aliases") or ()), *adapters)
    return {str(each) for each in found if each is not None}


def _answered(workload: Mapping[str, Any]) -> set[str]:
    """Return the model names that the pods of a live workload answer to."""
    return {name for each in _arguments(workload) for name in names_answered(each)}


def _schedules_by_priority(workload: Mapping[str, Any]) -> bool:
    """Return whether the pods of a live workload schedule by priority."""
    return any(_PRIORITY in each for each in _arguments(workload))


def _granted_s(workload: Mapping[str, Any]) -> float | None:
    """Return the KV lease in seconds that the pods of a live workload grant; None if unknown."""
    return next(filter(None, map(granted_lease_s, _arguments(workload))), None)


def _arguments(workload: Mapping[str, Any]) -> list[Sequence[str]]:
    """Return the arguments of each container of a workload."""
    spec = workload.get("spec") or {}
    template = spec.get("template") or (spec.get("leaderWorkerTemplate") or {}).get("workerTemplate") or {}
    containers = (template.get("spec") or {}).get("containers") or ()
    return [each.get("args") or () for each in containers]


def _counted_s(config_map: Mapping[str, Any]) -> float | None:
    """Return the KV lease in seconds that routers assume; None if someone has edited the file into something unreadable."""
    spec = _graph_spec(config_map)
    found = (spec.get("lease") or {}).get("durationSeconds", LeaseConfig().duration_seconds)
    return found if spec and isinstance(found, int | float) else None


def _has_tiers(config_map: Mapping[str, Any]) -> bool:
    router = _graph_spec(config_map).get("router") or {}
    return bool((router.get("tiers") or {}).get("enabled"))


def _served_name(config_map: Mapping[str, Any]) -> str | None:
    model = _graph_spec(config_map).get("model") or {}
    name = model.get("servedName") or model.get("name")
    return None if name is None else str(name)


def _graph_spec(config_map: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the graph specification in the routers' ConfigMap; empty if someone has edited it into something unreadable."""
    for text in (config_map.get("data") or {}).values():
        try:
            found = read_yaml(text)
        except yaml.YAMLError:
            return {}
        spec = found.get("spec") if isinstance(found, dict) else None
        return spec if isinstance(spec, dict) else {}
    return {}
