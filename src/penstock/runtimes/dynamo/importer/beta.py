"""A v1beta1 DynamoGraphDeployment in the places of v1alpha1, which the rest of the importer reads.

Version v1beta1 lists components and gives each a native pod template with a container ``main``; v1alpha1 maps
services and keeps resources, shared memory and the main container apart. Pure.

Source: ai-dynamo/dynamo, deploy/operator/api/v1beta1 and examples/backends/vllm/deploy/v1beta1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.api.rule import KeyPath
from penstock.runtimes.dynamo.importer.source import Places

MAIN = "main"
GPU_RESOURCE = "nvidia.com/gpu"
_OWN_RESOURCES = {GPU_RESOURCE: "gpu", "cpu": "cpu", "memory": "memory"}
"""Resources that v1alpha1 holds beside the container, and their names there."""
_Moved = Callable[[KeyPath, KeyPath], None]
"""Records that what lies at the first path below a service stood at the second below its component."""


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
    """Return the main container; GPUs, CPU and memory go beside it."""
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
