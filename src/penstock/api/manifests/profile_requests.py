"""The graph that a ProfileRequest describes in its template, validated as any other; pure."""

from __future__ import annotations

from penstock.api.graph import API_VERSION, GraphDeployment
from penstock.api.manifests.validation import validate
from penstock.api.profile_request import ProfileRequest
from penstock.api.rule import KeyPath

_TEMPLATE: KeyPath = ("spec", "template")


def template_of(
    request: ProfileRequest,
) -> tuple[list[tuple[KeyPath, str]], GraphDeployment | None]:
    """Return path and message of everything wrong with a request's template, and its graph if nothing is.

    The graph has the request's name. Without a template there is neither.
    """
    template = request.spec.template
    if not template:
        return [], None
    data = {
        "apiVersion": API_VERSION,
        "kind": "GraphDeployment",
        "metadata": {"name": request.name},
        "spec": template,
    }
    found, graph = validate(GraphDeployment, data)
    problems = [((*_TEMPLATE, *(path[1:] if path[:1] == ("spec",) else ())), text) for path, text in found]
    return problems, (graph if isinstance(graph, GraphDeployment) else None)
