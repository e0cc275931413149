"""Compares a live object with the desired one: whether it still has every desired value.

Pure functions. The reconciler writes an object only if this comparison finds a difference. Therefore it must detect
every manual edit of a desired value, and must ignore the API server's defaults, canonical forms and additions of
other writers.

A value that is *no longer* desired cannot be found by comparing the desired values. Therefore `with_content_digest` adds a digest
of the entire desired object as an annotation: removing a value changes the digest, and the apply that follows lets
the API server delete the fields that this field manager owned and no longer names.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

from penstock.kube.objects.names import APPLIED_ANNOTATION
from penstock.kube.objects.quantity import quantity

MERGE_KEYS: Final[Mapping[str, tuple[tuple[str, ...], ...]]] = {
    "containers": (("name",),),
    "initContainers": (("name",),),
    "ephemeralContainers": (("name",),),
    "env": (("name",),),
    "ports": (("containerPort", "protocol"), ("port", "protocol")),
    "volumes": (("name",),),
    "volumeMounts": (("mountPath",),),
    "volumeDevices": (("devicePath",),),
    "imagePullSecrets": (("name",),),
    "secrets": (("name",),),
    "hostAliases": (("ip",),),
    "resourceClaims": (("name",),),
    "claims": (("name",),),
    "schedulingGates": (("name",),),
    "topologySpreadConstraints": (("topologyKey", "whenUnsatisfiable"),),
    "conditions": (("type",),),
    "ownerReferences": (("uid",),),
}
"""Keys of the API's list-maps, by the list's field name. A list with an element that lacks these keys is compared as
atomic."""

ATOMIC_PATHS: Final = ("spec.ingress", "spec.egress")
"""Paths below which ``ports`` are a NetworkPolicy's, which the API treats as one atomic value."""

QUANTITY_MAPS: Final = frozenset({"limits", "requests", "capacity", "hard"})
"""Maps whose values are Kubernetes quantities, so that ``1Gi`` equals ``1024Mi``."""
QUANTITY_FIELDS: Final = frozenset({"sizeLimit", "divisor", "storage"})
"""Fields that are Kubernetes quantities."""

ABSENT_WHEN_ZERO: Final = frozenset(
    {
        "hostIPC",
        "hostNetwork",
        "hostPID",
        "initialDelaySeconds",
        "minReadySeconds",
        "paused",
        "publishNotReadyAddresses",
        "readOnly",
        "stdin",
        "stdinOnce",
        "tty",
    }
)
"""Fields that the API server drops if they are false or 0."""

DEFAULTED_WHEN_ZERO: Final = frozenset(
    {"failureThreshold", "periodSeconds", "successThreshold", "timeoutSeconds"}
)
"""Fields that the API server sets to their default if they are 0."""

ATOMIC_MAPS: Final = frozenset(
    {"labelSelector", "matchLabels", "namespaceSelector", "nodeSelector", "podSelector", "selector"}
)
"""Maps that the API treats as one atomic value, because an additional key changes their meaning."""

MEANINGFUL_WHEN_EMPTY: Final = frozenset({"emptyDir", "podSelector", "namespaceSelector"})
"""Maps whose presence has a meaning even if they are empty."""

DEFAULTS: Final[Mapping[str, str]] = {"protocol": "TCP"}
"""Value that an absent part of a merge key stands for."""

LEFT_OUT_OF_LISTS: Final = frozenset({"apiVersion", "kind"})
"""Paths that the API server leaves out of the items of a list; they are compared only if the live object has them."""


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """One desired value that the object in the cluster does not have.

    Attributes:
        path: Path of the field, such as ``spec.template.spec.containers[name=worker].image``.
        desired: The desired value.
        found: The value in the cluster; None if it is absent.
    """

    path: str
    desired: Any
    found: Any

    def __str__(self) -> str:
        found = "absent" if self.found is None else f"found {_short(self.found)}"
        return f"{self.path}: expected {_short(self.desired)}, {found}"


def with_content_digest(desired: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the object ``desired`` with a digest of its content in the annotation ``penstock.dev/applied``.

    If the object in the cluster has the same digest, the last write of the operator wrote the same content.
    """
    text = orjson.dumps(desired, option=orjson.OPT_SORT_KEYS)
    digest = hashlib.sha256(text).hexdigest()[:16]
    metadata = dict(desired.get("metadata") or {})
    metadata["annotations"] = {**(metadata.get("annotations") or {}), APPLIED_ANNOTATION: digest}
    return {**desired, "metadata": metadata}


def differences(desired: Mapping[str, Any], live: Mapping[str, Any]) -> Iterator[FieldDifference]:
    """Yield the values of the object ``desired`` that ``live``, the same object in the cluster, does not have, sorted by path.

    Additional values in ``live`` are ignored. Yields nothing if ``live`` has every desired value.
    """
    yield from _map_differences("", desired, live)


def _map_differences(
    path: str, desired: Mapping[str, Any], found: Mapping[str, Any]
) -> Iterator[FieldDifference]:
    quantities = path.rpartition(".")[2] in QUANTITY_MAPS
    for key in sorted(desired):
        below = f"{path}.{_escaped(key)}" if path else key
        value, other = desired[key], found.get(key)
        if value is None or (below in LEFT_OUT_OF_LISTS and other is None):
            continue
        if quantities or key in QUANTITY_FIELDS:
            yield from _quantity_differences(below, value, other)
        else:
            yield from _differences(below, key, value, other)


def _differences(path: str, key: str, desired: Any, found: Any) -> Iterator[FieldDifference]:
    if found is None:
        if not _absence_is_fine(key, desired):
            yield FieldDifference(path, desired, None)
    elif desired == found and not isinstance(desired, bool | int):
        return  # fast path for most values; the API's types exclude a nested true that equals 1
    elif isinstance(desired, Mapping):
        if not isinstance(found, Mapping) or (key in ATOMIC_MAPS and found.keys() - desired.keys()):
            yield FieldDifference(path, desired, found)
        else:
            yield from _map_differences(path, desired, found)
    elif _is_list(desired):
        if not _is_list(found):
            yield FieldDifference(path, desired, found)
        elif desired or key not in MERGE_KEYS:  # ignore elements that other writers added to a list-map
            yield from _list_differences(path, key, desired, found)
    elif not _same_scalar(desired, found) and not (key in DEFAULTED_WHEN_ZERO and desired == 0):
        yield FieldDifference(path, desired, found)


def _absence_is_fine(key: str, desired: Any) -> bool:
    if isinstance(desired, Mapping):
        return not desired and key not in MEANINGFUL_WHEN_EMPTY
    if desired is None or desired == "" or _is_list(desired):
        return not desired
    return not desired and key in ABSENT_WHEN_ZERO | DEFAULTED_WHEN_ZERO


def _list_differences(
    path: str, key: str, desired: Sequence[Any], found: Sequence[Any]
) -> Iterator[FieldDifference]:
    names = None if path.startswith(ATOMIC_PATHS) else _merge_key(key, desired)
    if names is not None:
        held = {_identity(names, each): each for each in found if isinstance(each, Mapping)}
        for element in sorted(desired, key=lambda each: _identity(names, each)):
            identity = _identity(names, element)
            below = f"{path}[{','.join(f'{n}={v}' for n, v in zip(names, identity, strict=True))}]"
            other = held.get(identity)
            if other is None:
                yield FieldDifference(below, element, None)
            else:
                yield from _map_differences(below, element, other)
    elif len(desired) != len(found):
        yield FieldDifference(path, desired, found)
    else:
        for index, (element, other) in enumerate(zip(desired, found, strict=True)):
            yield from _differences(f"{path}[{index}]", "", element, other)


def _merge_key(field: str, elements: Sequence[Any]) -> tuple[str, ...] | None:
    for names in MERGE_KEYS.get(field, ()):
        if elements and all(isinstance(each, Mapping) and names[0] in each for each in elements):
            return names
    return None


def _identity(names: tuple[str, ...], element: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(element.get(name) or DEFAULTS.get(name, "")) for name in names)


def _quantity_differences(path: str, desired: Any, found: Any) -> Iterator[FieldDifference]:
    exact = quantity(desired)
    if exact is None:
        yield from _differences(path, "", desired, found)
    elif exact != quantity(found):
        yield FieldDifference(path, desired, found)


def _same_scalar(desired: Any, found: Any) -> bool:
    if isinstance(desired, bool) or isinstance(found, bool):
        return desired is found
    if isinstance(desired, str) != isinstance(found, str):
        return str(desired) == str(found)  # int-or-string
    return bool(desired == found)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _escaped(key: str) -> str:
    return f"[{key}]" if "." in key else key


def _short(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."
