"""Engines whose own servers take the place of Dynamo's workers, and Penstock's router that of its frontend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from penstock.api.enums import Role
from penstock_dynamo.importer import sglang, trtllm
from penstock_dynamo.importer.component import Component

_FRONTEND_IMAGE: Final = "holds Dynamo's frontend; the router in its place has Penstock's own image"


@dataclass(frozen=True, slots=True)
class OwnServers:
    """One such engine.

    Attributes:
        module: Of Dynamo, that wraps it.
        runtime: Of the graph.
        title: For people.
        read_worker_flags: Moves a worker's flags to the graph's model and engine.
    """

    module: str
    runtime: str
    title: str
    read_worker_flags: Callable[[Component, dict[str, Any]], None]


_ENGINES: Final = (
    OwnServers("dynamo.sglang", "sglang", "SGLang", sglang.read_worker_flags),
    OwnServers("dynamo.trtllm", "trtllm", "TensorRT-LLM", trtllm.read_worker_flags),
)


def servers_of(components: Sequence[Component]) -> OwnServers | None:
    """Return the engine that a deployment's workers become; None: they stay Dynamo's. Refuses a second one."""
    workers = [each for each in components if each.role is not Role.ROUTER]
    found = next((each for each in _ENGINES if any(_runs(worker, each) for worker in workers)), None)
    for worker in workers:
        if found is not None and not _runs(worker, found):
            worker.args.refuse(
                f"runs another engine than the {found.title} workers alongside it; give each a graph of its own"
            )
    return found


def _runs(worker: Component, engine: OwnServers) -> bool:
    command = worker.command if worker.kind == "worker" else None
    return command is not None and command.module == engine.module


def settle_frontend(component: Component) -> None:
    """Leave out what belongs to Dynamo's own frontend."""
    if component.service.pop("image", None) is not None:
        component.container.at("image").note(_FRONTEND_IMAGE)
    for word in component.service.pop("args", ()):
        component.args.note("is a flag of Dynamo's frontend", word)
