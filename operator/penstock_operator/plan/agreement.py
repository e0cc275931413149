"""Which side learns a setting first where routers and workers must agree on it.

Pure. A worker refuses a request's priority unless it schedules by priority, and has no use for a request without one
either way. So tiers are switched on at workers first and off at routers first, and the other side's pods keep their
template meanwhile. A served name has no such order: a request carries one name, and each worker answers to one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import yaml

from penstock.kube.kinds import CONFIG_MAP
from penstock_operator.plan.rollout import RolloutView, held_rollouts

TIERS: Final = "spec.router.tiers.enabled"
_PRIORITY: Final = "--scheduling-policy"
_LOADER: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True)
class RolloutOrder:
    """Which objects have to wait.

    Attributes:
        waiting: Why, by service.
        later: The objects.
        lost: What the change costs whatever the order, in words; None: nothing.
    """

    waiting: Mapping[str, str]
    later: Sequence[Mapping[str, Any]]
    lost: str | None = None


def rollout_order(
    wanted: Iterable[Mapping[str, Any]],
    live: Mapping[tuple[str, str], Mapping[str, Any]],
    workloads: Mapping[str, Mapping[str, Any]],
    views: Sequence[RolloutView],
    *,
    changed: Collection[str],
) -> RolloutOrder:
    """Return which of a graph's objects may not be written yet.

    Args:
        wanted: All of them.
        live: What there is.
        workloads: Of the wanted, the services' workloads.
        views: Where every service's workload stands.
        changed: Services whose pod template is about to change.
    """
    waiting = held_rollouts(changed, views)
    file = next((each for each in wanted if each["kind"] == CONFIG_MAP.kind), None)
    there = None if file is None else live.get((file["kind"], file["metadata"]["name"]))
    if file is None or there is None or not (changed or there.get("data") != file["data"]):
        return RolloutOrder(waiting, [workloads[name] for name in waiting])
    prioritised = {
        name
        for name, want in workloads.items()
        if _schedules_by_priority(live.get((want["kind"], want["metadata"]["name"]), {}))
    }
    held = held_by_agreement(file, there, views, changed=changed, prioritised=prioritised)
    waiting |= held
    later = [workloads[name] for name in waiting if name in workloads]
    if any(not view.role.is_worker for view in views if view.service in held):
        return RolloutOrder(waiting, [*later, file])
    return RolloutOrder(waiting, later, _lost_name(file, there))


def held_by_agreement(
    wanted: Mapping[str, Any],
    live: Mapping[str, Any],
    views: Iterable[RolloutView],
    *,
    changed: Collection[str],
    prioritised: Collection[str],
) -> dict[str, str]:
    """Return the services whose new pod template waits for the other side, and why.

    Args:
        wanted: The routers' ConfigMap as it is to be.
        live: As it is.
        views: Where every service's workload stands.
        changed: Services whose pod template is about to change.
        prioritised: Services whose running workers schedule by priority.
    """
    sides: dict[bool, list[RolloutView]] = {True: [], False: []}
    for view in views:
        sides[view.role.is_worker].append(view)
    wants, has = _has_tiers(wanted), _has_tiers(live)
    workers = sorted(each.service for each in sides[True] if each.service in changed or each.rolling)
    if wants and not has and workers:
        reason = f"waits until {', '.join(workers)} schedules by priority: {TIERS} is true for workers first"
        return {each.service: reason for each in sides[False]}
    routers = sorted(each.service for each in sides[False] if each.service in changed or each.rolling)
    if not wants and (has or routers):
        reason = f"waits until routers send no priority any more: {TIERS} is false for routers first"
        return {name: reason for name in changed if name in prioritised}
    return {}


def _lost_name(wanted: Mapping[str, Any], live: Mapping[str, Any]) -> str | None:
    """Return what a changed served name costs, in words; None where it stays."""
    old, new = _served_name(live), _served_name(wanted)
    if old is None or new is None or old == new:
        return None
    return (
        f"the model's served name changes from {old} to {new}: requests are refused while routers and workers roll; "
        "to lose none, apply a second graph with the new name and delete this one once its clients have moved"
    )


def _schedules_by_priority(workload: Mapping[str, Any]) -> bool:
    """Return whether the pods of a live Deployment or LeaderWorkerSet do."""
    spec = workload.get("spec") or {}
    template = spec.get("template") or (spec.get("leaderWorkerTemplate") or {}).get("workerTemplate") or {}
    containers = (template.get("spec") or {}).get("containers") or ()
    return any(_PRIORITY in (each.get("args") or ()) for each in containers)


def _has_tiers(config_map: Mapping[str, Any]) -> bool:
    router = _graph_spec(config_map).get("router") or {}
    return bool((router.get("tiers") or {}).get("enabled"))


def _served_name(config_map: Mapping[str, Any]) -> str | None:
    model = _graph_spec(config_map).get("model") or {}
    name = model.get("servedName") or model.get("name")
    return None if name is None else str(name)


def _graph_spec(config_map: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the specification that routers read; empty where a hand made something else of it."""
    for text in (config_map.get("data") or {}).values():
        try:
            found = yaml.load(text, Loader=_LOADER)  # noqa: S506 - libyaml's safe one
        except yaml.YAMLError:
            return {}
        spec = found.get("spec") if isinstance(found, dict) else None
        return spec if isinstance(spec, dict) else {}
    return {}
