"""What a user's overlay may not break of a pod template: its lists, its main container, its counted GPUs. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from penstock.core.errors import InvalidSpecError, Problem

MAIN: Final = "main"
"""Name of the container that does the work; an overlay refers to it."""


def refuse_broken(
    template: Mapping[str, Any], path: str, *, gpus: int, resource: str, key: str = "gpusPerReplica"
) -> None:
    """Refuse a template that the overlay made unusable.

    Args:
        template: After the overlay.
        path: Where the overlay stands in the manifest, for messages.
        gpus: GPUs that the pod counts against its budget.
        resource: Extended resource that it asks them of; empty: it asks for none.
        key: Key of the manifest that sets their number.

    Raises:
        InvalidSpecError: a list is none any more, container `MAIN` is gone, or a container asks for other GPUs.
    """
    spec = template.get("spec", {})
    for lists in ("containers", "initContainers", "schedulingGates"):
        if not isinstance(spec.get(lists, []), list):
            message = "is no list; write one, or remove it"
            raise InvalidSpecError([Problem(path=f"{path}.spec.{lists}", message=message)])
    if MAIN not in [each["name"] for each in spec.get("containers", [])]:
        message = f"removes container {MAIN}, which does the work; keep it and change its keys"
        raise InvalidSpecError([Problem(path=f"{path}.spec.containers", message=message)])
    for kind in ("containers", "initContainers"):
        for each in spec.get(kind, []):
            counted = 0 if kind == "containers" and each["name"] != MAIN else gpus
            for what in _other_gpus(each, resource, counted):
                message = (
                    f"{what} of {each['name']}, but the budget counts {counted}; remove it and set {key}"
                )
                raise InvalidSpecError([Problem(path=f"{path}.spec.{kind}", message=message)])


def _other_gpus(container: Mapping[str, Any], pool_resource: str, counted: int) -> Iterator[str]:
    """Yield numbers of GPUs other than the counted one; an overlay may ask for none on a CPU's node."""
    resources = container.get("resources")
    limits = resources.get("limits") if isinstance(resources, Mapping) else None
    for resource, asked in (limits if isinstance(limits, Mapping) else {}).items():
        is_gpu = resource == pool_resource or resource.endswith("/gpu")
        if is_gpu and str(asked) not in {str(counted), "0"}:
            yield f"{resource} {asked}"
