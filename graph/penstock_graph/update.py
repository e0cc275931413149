"""What may change in a graph that runs: rules that compare the old and the new manifest."""

from __future__ import annotations

from penstock_core.errors import Problem
from penstock_graph.models.graph import GraphDeployment


def validate_update(old: GraphDeployment, new: GraphDeployment) -> tuple[Problem, ...]:
    """Return every forbidden change from ``old`` to ``new``; empty if the update may go ahead.

    Services may be added and removed; the role of one that stays, the model and the runtime may not change.
    Both graphs are valid by themselves.
    """
    changes = [
        ("metadata.name", old.metadata.name, new.metadata.name),
        ("spec.model.name", old.spec.model.name, new.spec.model.name),
        ("spec.runtime", old.spec.runtime.value, new.spec.runtime.value),
    ]
    changes += [
        (f"spec.services.{name}.role", service.role.value, new.spec.services[name].role.value)
        for name, service in old.spec.services.items()
        if name in new.spec.services
    ]
    return tuple(
        Problem(path=path, message=f"{after} was {before} and is immutable; keep it, or make a new graph")
        for path, before, after in changes
        if before != after
    )
