"""A foreign manifest that remembers which of its values were carried over.

What is not read is reported at the end, so no key can be dropped in silence. Version v1beta1, which lists components and gives
each a native pod template with a container ``main``, is rearranged into v1alpha1's places, which the rest of the importer reads.

Source: ai-dynamo/dynamo, deploy/operator/api/v1beta1 and examples/backends/vllm/deploy/v1beta1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from penstock.api.manifests.nodes import Document
from penstock.api.manifests.validation import shown
from penstock.api.rule import KeyPath, dotted
from penstock.core.errors import Problem

_Kind = TypeVar("_Kind", dict[str, Any], list[Any])

NO_COUNTERPART = "has no counterpart here"


@dataclass(frozen=True, slots=True)
class Unconverted:
    """A value that the conversion could not carry, or not as it stood.

    Attributes:
        path: Key path in the foreign manifest.
        value: The value, shortened.
        why: The reason, and what to do about it.
        line: 1-based, or None when unknown.
    """

    path: str
    value: str
    why: str
    line: int | None = None

    def __str__(self) -> str:
        place = f"line {self.line}: " if self.line is not None else ""
        return f"{place}{self.path}: {self.value}: {self.why}"


@dataclass(slots=True)
class Places:
    """Where the parts of a rearranged manifest stood in the user's own."""

    _moves: list[tuple[KeyPath, KeyPath]] = field(default_factory=list)

    def moved(self, new: KeyPath, old: KeyPath) -> None:
        """Record that values at or below ``new`` came from ``old`` or below."""
        self._moves.append((new, old))

    def origin(self, path: KeyPath) -> KeyPath:
        """Return where the value at ``path`` stood, by the longest part of the path that was moved."""
        fitting = [(new, old) for new, old in self._moves if path[: len(new)] == new]
        new, old = max(fitting, key=lambda each: len(each[0]), default=((), ()))
        return (*old, *path[len(new) :])


@dataclass(frozen=True, slots=True)
class ManifestSource:
    """One document, or a part of it, and what has been taken from it so far.

    Attributes:
        document: As the user wrote it.
        value: The complete manifest in the form that is read.
        places: Where its parts are in the document.
        file: Its name in problems.
        base: Path of the part; keys that methods take go on from there.
        taken: Paths that were carried, from the root.
        notes: What was not.
        problems: Why it cannot be converted at all.
    """

    document: Document
    value: Any
    places: Places = field(default_factory=Places)
    file: str | None = None
    base: KeyPath = ()
    taken: set[KeyPath] = field(default_factory=set)
    notes: list[Unconverted] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def at(self, *keys: str | int) -> ManifestSource:
        """Return the part below ``keys``."""
        return replace(self, base=(*self.base, *keys))

    def peek(self, *keys: str | int) -> Any:
        """Return the value without taking it; None if there is none."""
        value: Any = self.value
        for key in (*self.base, *keys):
            if isinstance(value, dict):
                value = value.get(str(key))
            elif isinstance(value, list) and isinstance(key, int) and key < len(value):
                value = value[key]
            else:
                return None
        return value

    def take(self, *keys: str | int) -> Any:
        """Return the value and count all of it as carried."""
        self.taken.add((*self.base, *keys))
        return self.peek(*keys)

    def take_map(self, *keys: str | int) -> dict[str, Any]:
        """Return the map, carried; empty if there is none, noted if it is no map."""
        return _taken(self.at(*keys), {}, "a map")

    def take_list(self, *keys: str | int) -> list[Any]:
        """Return the list, carried; empty if there is none, noted if it is no list."""
        return _taken(self.at(*keys), [], "a list")

    def word(self, *keys: str | int) -> str | None:
        """Return the text without taking it; None if there is none, or no text."""
        value = self.peek(*keys)
        return value if isinstance(value, str) else None

    def elements(self, *keys: str | int) -> list[ManifestSource]:
        """Return the elements of the list; none if there is no list."""
        value = self.peek(*keys)
        return [self.at(*keys, index) for index in range(len(value) if isinstance(value, list) else 0)]

    def names(self, *keys: str | int) -> list[str]:
        """Return the keys of the map."""
        value = self.peek(*keys)
        return list(value) if isinstance(value, dict) else []

    def note(self, why: str, value: object = None) -> None:
        """Report this part as not carried, and count it as dealt with."""
        self.taken.add(self.base)
        text = shown(self.peek() if value is None else value)
        origin = self.places.origin(self.base)
        self.notes.append(Unconverted(dotted(origin), text, why, self.document.line_of(origin)))

    def note_keys(self, why: str) -> None:
        """Report each key of this map that is neither carried nor reported yet."""
        for key in self.names():
            path = (*self.base, key)
            if not any(path == taken[: len(path)] for taken in self.taken):
                self.at(key).note(why)

    def refuse(self, message: str) -> None:
        """Report this part as what no graph can express."""
        origin = self.places.origin(self.base)
        self.problems.append(Problem(dotted(origin), message, self.file, self.document.line_of(origin)))

    def note_rest(self) -> None:
        """Report every value that was not read; null is a key that is not set."""
        for path, value in leaves(self.value):
            if value is not None and not any(path[:length] in self.taken for length in range(len(path) + 1)):
                self.at(*path).note(NO_COUNTERPART, value)


def _taken(part: ManifestSource, empty: _Kind, name: str) -> _Kind:
    value = part.take()
    if value is None or isinstance(value, type(empty)):
        return empty if value is None else value
    part.note(f"is not {name}, so it was left out")
    return empty


def leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield each value that is no map and no list, or an empty one, with its path."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, list) and value:
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))
    else:
        yield path, value


MAIN = "main"
GPU_RESOURCE = "nvidia.com/gpu"
_OWN_RESOURCES = {GPU_RESOURCE: "gpu", "cpu": "cpu", "memory": "memory"}
"""Resources that v1alpha1 holds outside the container, and their names there."""
_Moved = Callable[[KeyPath, KeyPath], None]
"""Records that a value at the first path below a service came from the second below its component."""


def as_alpha(manifest: dict[str, Any]) -> tuple[dict[str, Any], Places]:
    """Return the manifest in v1alpha1's form, and where each of its parts stood."""
    spec = manifest.get("spec")
    if not isinstance(spec, dict):
        return manifest, Places()
    places = Places()
    moved = {key: each for key, each in spec.items() if key not in {"components", "env"}}
    if "env" in spec:
        moved["envs"] = spec["env"]
        places.moved(("spec", "envs"), ("spec", "env"))
    services: dict[str, Any] = {}
    components = spec.get("components")
    for index, component in enumerate(components if isinstance(components, list) else []):
        if not isinstance(component, dict):
            continue
        name = str(component.get("name") or f"component-{index}")
        new, old = ("spec", "services", name), ("spec", "components", index)
        places.moved(new, old)

        def moved_within(there: KeyPath, here: KeyPath, new: KeyPath = new, old: KeyPath = old) -> None:
            places.moved((*new, *there), (*old, *here))

        services[name] = _service(component, moved_within)
    moved["services"] = services
    return {**manifest, "spec": moved}, places


def _service(given: dict[str, Any], moved: _Moved) -> dict[str, Any]:
    """Return a component as a service; keys without a place of their own stay, so that they are reported."""
    apart = {"name", "type", "podTemplate", "sharedMemorySize", "scalingAdapter"}
    service = {key: each for key, each in given.items() if key not in apart}
    if "type" in given:
        service["componentType"] = given["type"]
        moved(("componentType",), ("type",))
    if "sharedMemorySize" in given:
        size = str(given["sharedMemorySize"])
        service["sharedMemory"] = {"disabled": True} if size == "0" else {"size": size}
        moved(("sharedMemory",), ("sharedMemorySize",))
    if isinstance(given.get("scalingAdapter"), dict):
        service["scalingAdapter"] = {"enabled": True, **given["scalingAdapter"]}
    template = given.get("podTemplate")
    if isinstance(template, dict):
        _lay_out(service, template, moved)
    return service


def _lay_out(service: dict[str, Any], template: dict[str, Any], moved: _Moved) -> None:
    if "metadata" in template:
        service["extraPodMetadata"] = template["metadata"]
        moved(("extraPodMetadata",), ("podTemplate", "metadata"))
    spec = template.get("spec")
    if not isinstance(spec, dict):
        return
    moved(("extraPodSpec",), ("podTemplate", "spec"))
    containers = spec.get("containers")
    if not isinstance(containers, list):
        service["extraPodSpec"] = spec
        return
    extra = {key: each for key, each in spec.items() if key != "containers"}
    sidecars: list[Any] = []
    for index, container in enumerate(containers):
        old = ("podTemplate", "spec", "containers", index)
        if isinstance(container, dict) and container.get("name") == MAIN:
            moved(("extraPodSpec", "mainContainer"), old)
            extra["mainContainer"] = _main(service, container, old, moved)
        else:
            moved(("extraPodSpec", "containers", len(sidecars)), old)
            sidecars.append(container)
    service["extraPodSpec"] = {**extra, "containers": sidecars} if sidecars else extra


def _main(service: dict[str, Any], container: dict[str, Any], old: KeyPath, moved: _Moved) -> dict[str, Any]:
    """Return the main container; GPUs, CPU and memory stay outside it."""
    main = {key: each for key, each in container.items() if key not in {"name", "resources"}}
    resources = container.get("resources")
    if resources is not None and not isinstance(resources, dict):
        return {**main, "resources": resources}
    for kind, amounts in (resources or {}).items():
        if not isinstance(amounts, dict):
            main.setdefault("resources", {})[kind] = amounts
            continue
        for key, amount in amounts.items():
            own = _OWN_RESOURCES.get(key)
            holder = main if own is None else service
            holder.setdefault("resources", {}).setdefault(kind, {})[own or key] = amount
            if own is not None:
                moved(("resources", kind, own), (*old, "resources", kind, key))
    return main
