"""Merges a user's ``podTemplate`` into the built pod template, like ``kubectl patch --type strategic``.

Maps merge key by key, and null deletes a key. Lists of named items merge by name; `_ITEM_KEYS` has these lists. An
item with ``$patch: delete`` removes the item of its name. ``$patch: replace`` in a map or as a list item discards the
built content. Tolerations are added. Every other list is replaced.

There are three differences from Kubernetes, since its rules would give an invalid pod: a variable and a volume
completely replace the one of the same name (two sources are an error), and tolerations are added to the node pool's
instead of replacing them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, Final, NamedTuple

from penstock.core.errors import InvalidSpecError, ManifestProblem
from penstock.kube.objects.quantity import quantity
from penstock_operator.resources.accelerators import GPU_RESOURCES, is_accelerator
from penstock_operator.resources.allowances import Allowances
from penstock_operator.resources.privileges import confined

_PATCH = "$patch"
_DELETE = "delete"
_REPLACE = "replace"

_DIRECTIVES = (_DELETE, _REPLACE, "merge")

_ITEM_KEYS: Mapping[str, tuple[str, ...]] = {
    "containers": ("name",),
    "initContainers": ("name",),
    "env": ("name",),
    "volumes": ("name",),
    "volumeMounts": ("mountPath",),
    "volumeDevices": ("devicePath",),
    "ports": ("containerPort",),
    "imagePullSecrets": ("name",),
    "schedulingGates": ("name",),
    "resourceClaims": ("name",),
    "hostAliases": ("ip",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
}
"""Lists that merge, and the keys that identify their items. Source: patchMergeKey in k8s.io/api/core/v1, and the keys
of its list-maps if those are more."""

_WHOLE_ITEMS = frozenset({"env", "volumes"})
"""Lists whose items have exactly one of several sources, so that merging two items would give two sources."""

_ADDED = "tolerations"


def overlay(base: Mapping[str, Any], patch: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return a pod template, or a map in one, merged with a user's patch.

    Args:
        base: The built template or map; not changed.
        patch: The user's patch.
        path: Path of the patch in the manifest, for messages.

    Raises:
        InvalidSpecError: The patch has a map where the template has a list or vice versa, a list item has no name, or
            a ``$`` directive is unknown.
    """
    directive = _directive(patch, path)
    if directive == _DELETE:
        return {}
    merged: dict[str, Any] = {} if directive == _REPLACE else dict(base)
    for key, value in patch.items():
        if key == _PATCH:
            continue
        if key.startswith("$"):
            raise _refusal(path, f"{key} is not supported; use $patch or spell the value out")
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merge(key, merged.get(key), value, f"{path}.{key}")
    return merged


def _merge(key: str, base: Any, value: Any, path: str) -> Any:
    if isinstance(value, Mapping):
        if base is not None and not isinstance(base, Mapping):
            raise _refusal(path, "is a map where the pod has none; remove it")
        return overlay(base or {}, value, path)
    if isinstance(base, Mapping):
        raise _refusal(path, "is not a map where the pod has one; write its keys, or null to delete it")
    if not isinstance(value, list):
        if isinstance(base, list):
            raise _refusal(path, "is not a list where the pod has one; write a list, or null to delete it")
        return value
    if key == _ADDED:
        return _added(base or [], value, path)
    if key in _ITEM_KEYS:
        return _merge_items(key, base or [], value, path)
    return deepcopy(value)


def _added(base: Sequence[Any], patch: Sequence[Any], path: str) -> list[Any]:
    without_replaced, items = _split(base, patch, path)
    if any(_PATCH in item for item in items):
        raise _refusal(
            path, "has $patch within an item, but items have no name; put {$patch: replace} before them"
        )
    return [*without_replaced, *(item for item in items if item not in without_replaced)]


def _merge_items(key: str, base: Sequence[Any], patch: Sequence[Any], path: str) -> list[Any]:
    name_key = _ITEM_KEYS[key][0]
    without_replaced, items = _split(base, patch, path)
    merged = {_name_of(key, item): item for item in without_replaced}
    for index, item in enumerate(items):
        where = f"{path}[{index}]"
        if not isinstance(item.get(name_key), str | int):
            raise _refusal(where, f"has no {name_key}; give it one")
        name = _name_of(key, item)
        if _directive(item, where) == _DELETE:
            merged.pop(name, None)
            continue
        under = {} if key in _WHOLE_ITEMS else merged.get(name, {})
        merged[name] = overlay(under, item, where)
    return list(merged.values())


def _name_of(key: str, item: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(item.get(each) for each in _ITEM_KEYS[key])


def _split(
    base: Sequence[Any], patch: Sequence[Any], path: str
) -> tuple[Sequence[Any], list[dict[str, Any]]]:
    """Return the remaining items of ``base`` and the items of ``patch`` to merge into them."""
    items = []
    without_replaced = base
    for index, item in enumerate(patch):
        if not isinstance(item, dict):
            raise _refusal(f"{path}[{index}]", "is not a map; write its keys")
        if item == {_PATCH: _REPLACE}:
            without_replaced = []
        else:
            items.append(item)
    return without_replaced, items


def _directive(patch: Mapping[str, Any], path: str) -> str | None:
    directive = patch.get(_PATCH)
    if directive is None or (isinstance(directive, str) and directive in _DIRECTIVES):
        return directive
    raise _refusal(path, f"$patch: {directive!r} must be one of {', '.join(_DIRECTIVES)}")


def _refusal(path: str, message: str) -> InvalidSpecError:
    return InvalidSpecError([ManifestProblem(path=path, message=message)])


MAIN: Final = "main"
"""Name of the container that runs the service's process; overlays refer to it."""


class Counted(NamedTuple):
    """GPUs that a pod counts against its graph's GPU budget.

    Attributes:
        gpus: Number of GPUs.
        resource: Extended resource by which the pod requests these GPUs; empty if the pod requests none.
        key: Manifest key that sets ``gpus``, for messages.
        known: Names, or patterns, of the resources that count as GPUs.
    """

    gpus: int
    resource: str
    key: str
    known: tuple[str, ...] = GPU_RESOURCES


def overlaid(
    built: Mapping[str, Any],
    patch: Mapping[str, Any],
    path: str,
    *,
    counted: Counted,
    allowed: Allowances,
) -> dict[str, Any]:
    """Return a built pod template merged with the user's podTemplate, and checked.

    Args:
        built: The built pod template.
        patch: The user's podTemplate.
        path: Path of the podTemplate in the manifest, for messages.
        counted: GPUs that the budget counts for the pod.
        allowed: Privileges that the podTemplate can use.

    Raises:
        InvalidSpecError: The podTemplate cannot be merged, makes the template unusable, or uses privileges that are
            not allowed.
    """
    template = overlay(built, patch, path)
    _refuse_broken(template, path, counted)
    template = _within_limits(template, built)
    template = _with_grace(template, built["spec"]["terminationGracePeriodSeconds"], path)
    return template if allowed.everything else confined(built, template, path, allowed)


def _within_limits(template: dict[str, Any], built: Mapping[str, Any]) -> dict[str, Any]:
    """Return a template with built requests lowered to the limits that a patch set; the API server would reject higher requests."""
    own = {
        each["name"]: each.get("resources", {}).get("requests", {}) for each in built["spec"]["containers"]
    }
    containers = [_limited(each, own.get(each["name"], {})) for each in template["spec"]["containers"]]
    return {**template, "spec": {**template["spec"], "containers": containers}}


def _limited(container: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    resources = container.get("resources")
    if not isinstance(resources, Mapping):
        return container
    requests, limits = resources.get("requests"), resources.get("limits")
    if not (isinstance(requests, Mapping) and isinstance(limits, Mapping)):
        return container
    lowered = {
        key: limits[key]
        for key in requests.keys() & own.keys() & limits.keys()
        if requests[key] == own[key] and _is_more(own[key], limits[key])
    }
    return (
        {**container, "resources": {**resources, "requests": {**requests, **lowered}}}
        if lowered
        else container
    )


def _is_more(asked: object, limit: object) -> bool:
    numbers = quantity(asked), quantity(limit)
    return numbers[0] is not None and numbers[1] is not None and numbers[0] > numbers[1]


def _with_grace(template: dict[str, Any], grace_s: int, path: str) -> dict[str, Any]:
    """Return a template with the grace period that drains use, even if a patch removed it; a different one is refused."""
    key = "terminationGracePeriodSeconds"
    given = template["spec"].get(key, grace_s)
    if given != grace_s:
        message = f"is {given}, and drains go by {grace_s}; remove it, and set the service's {key}"
        raise _refusal(f"{path}.spec.{key}", message)
    return {**template, "spec": {**template["spec"], key: grace_s}}


def _refuse_broken(template: Mapping[str, Any], path: str, counted: Counted) -> None:
    spec = template.get("spec", {})
    for lists in ("containers", "initContainers", "schedulingGates"):
        if not isinstance(spec.get(lists, []), list):
            raise _refusal(f"{path}.spec.{lists}", "is not a list; write one, or remove it")
    if MAIN not in [each["name"] for each in spec.get("containers", [])]:
        message = f"removes container {MAIN}, which does the work; keep it and change its keys"
        raise _refusal(f"{path}.spec.containers", message)
    for kind in ("containers", "initContainers"):
        for each in spec.get(kind, []):
            gpus = 0 if kind == "containers" and each["name"] != MAIN else counted.gpus
            for what in _other_gpus(each, counted, gpus):
                fix = f"but the budget counts {gpus}; remove it and set {counted.key}"
                raise _refusal(f"{path}.spec.{kind}", f"{what} of {each['name']}, {fix}")


def _other_gpus(container: Mapping[str, Any], counted: Counted, gpus: int) -> Iterator[str]:
    """Yield GPU amounts that differ from the counted number; 0 is allowed, so that an overlay can run on a CPU node."""
    resources = container.get("resources")
    limits = resources.get("limits") if isinstance(resources, Mapping) else None
    for resource, asked in (limits if isinstance(limits, Mapping) else {}).items():
        is_gpu = resource == counted.resource or is_accelerator(resource, counted.known)
        if is_gpu and str(asked) not in {str(gpus), "0"}:
            yield f"{resource} {asked}"
