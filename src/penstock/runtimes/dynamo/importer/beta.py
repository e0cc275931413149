"""A v1beta1 DynamoGraphDeployment in the places of v1alpha1, which the rest of the importer reads.

Version v1beta1 lists components and gives each a native pod template with a container ``main``; v1alpha1 maps
services and keeps resources, shared memory and the main container apart. Pure.

Source: ai-dynamo/dynamo, deploy/operator/api/v1beta1 and examples/backends/vllm/deploy/v1beta1.
"""

from __future__ import annotations

from typing import Any

from penstock.api.rule import KeyPath
from penstock.runtimes.dynamo.importer.source import Places

MAIN = "main"
GPU_RESOURCE = "nvidia.com/gpu"
_OWN_RESOURCES = {GPU_RESOURCE: "gpu", "cpu": "cpu", "memory": "memory"}
"""Resources that v1alpha1 holds beside the container, and their names there."""


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
        old: KeyPath = ("spec", "components", index)
        places.moved(("spec", "services", name), old)
        services[name] = _Component(component, ("spec", "services", name), old, places).service()
    moved["services"] = services
    return {**manifest, "spec": moved}, places


class _Component:
    """One component on its way to a v1alpha1 service."""

    def __init__(self, component: dict[str, Any], new: KeyPath, old: KeyPath, places: Places) -> None:
        self._component = component
        self._new = new
        self._old = old
        self._places = places

    def service(self) -> dict[str, Any]:
        """Return the service; keys without a place of their own stay, so that they are reported."""
        given = self._component
        apart = {"name", "type", "podTemplate", "sharedMemorySize", "scalingAdapter"}
        service = {key: each for key, each in given.items() if key not in apart}
        self._move(service, "componentType", "type")
        if "sharedMemorySize" in given:
            size = str(given["sharedMemorySize"])
            service["sharedMemory"] = {"disabled": True} if size == "0" else {"size": size}
            self._moved(("sharedMemory",), ("sharedMemorySize",))
        if isinstance(given.get("scalingAdapter"), dict):
            service["scalingAdapter"] = {"enabled": True, **given["scalingAdapter"]}
        template = given.get("podTemplate")
        if isinstance(template, dict):
            self._lay_out(service, template)
        return service

    def _lay_out(self, service: dict[str, Any], template: dict[str, Any]) -> None:
        if "metadata" in template:
            service["extraPodMetadata"] = template["metadata"]
            self._moved(("extraPodMetadata",), ("podTemplate", "metadata"))
        spec = template.get("spec")
        if not isinstance(spec, dict):
            return
        extra = {key: each for key, each in spec.items() if key != "containers"}
        self._moved(("extraPodSpec",), ("podTemplate", "spec"))
        sidecars: list[Any] = []
        containers = spec.get("containers")
        if not isinstance(containers, list):
            service["extraPodSpec"] = spec
            return
        for index, container in enumerate(containers):
            old = ("podTemplate", "spec", "containers", index)
            if isinstance(container, dict) and container.get("name") == MAIN:
                extra["mainContainer"] = self._main(service, container, old)
            else:
                self._moved(("extraPodSpec", "containers", len(sidecars)), old)
                sidecars.append(container)
        if sidecars:
            extra["containers"] = sidecars
        service["extraPodSpec"] = extra

    def _main(self, service: dict[str, Any], container: dict[str, Any], old: KeyPath) -> dict[str, Any]:
        """Return the main container; GPUs, CPU and memory go beside it."""
        self._moved(("extraPodSpec", "mainContainer"), old)
        main = {key: each for key, each in container.items() if key not in {"name", "resources"}}
        resources = container.get("resources")
        if resources is not None and not isinstance(resources, dict):
            return {**main, "resources": resources}
        for kind, amounts in (resources or {}).items():
            if not isinstance(amounts, dict):
                main.setdefault("resources", {})[kind] = amounts
                continue
            for key, amount in amounts.items():
                if key in _OWN_RESOURCES:
                    own = _OWN_RESOURCES[key]
                    service.setdefault("resources", {}).setdefault(kind, {})[own] = amount
                    self._moved(("resources", kind, own), (*old, "resources", kind, key))
                else:
                    main.setdefault("resources", {}).setdefault(kind, {})[key] = amount
        return main

    def _move(self, service: dict[str, Any], new: str, old: str) -> None:
        if old in self._component:
            service[new] = self._component[old]
            self._moved((new,), (old,))

    def _moved(self, new: KeyPath, old: KeyPath) -> None:
        self._places.moved((*self._new, *new), (*self._old, *old))
