"""Valid settings that this version does not act on yet; `penstock validate` and `penstock up` warn of them.

An entry goes when the part that it names acts on the setting.
"""

from __future__ import annotations

from penstock_api.enums import PlannerMode
from penstock_api.graph import GraphDeployment
from penstock_core.errors import Problem


def unsupported_settings(graph: GraphDeployment) -> tuple[Problem, ...]:
    """Return the settings of a valid graph that have no effect, or that a process will refuse at start."""
    spec = graph.spec
    found: list[tuple[str, str]] = []
    if spec.planner.enabled and spec.planner.mode is PlannerMode.SLA:
        found.append(
            ("spec.planner.mode", f"{spec.planner.mode}: the planner refuses it; use adaptive or load")
        )
    return tuple(Problem(path=path, message=f"{message} (not in this version)") for path, message in found)
