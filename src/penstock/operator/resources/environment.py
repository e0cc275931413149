"""Environment of the main container: who the pod is, what the runtime needs, what the user wrote.

Values of Secrets are never read here; variables refer to them by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.api import GraphDeployment, Role
from penstock.kube.objects.names import GRAPH_SECRET_VARIABLE, SIDE_CHANNEL_PORT, WORKER_PORT
from penstock.operator.resources.context import BuildContext
from penstock.operator.resources.graph_secret import graph_secret_variable
from penstock.operator.resources.volumes import cache_of, home_of, is_penstock_image
from penstock.runtimes import PORT, ProcessSpec, filled_env, runtime_of
from penstock.runtimes.process import SIDE_CHANNEL_PORT as SIDE_CHANNEL_PLACEHOLDER

PORTS: Mapping[str, int] = {PORT: WORKER_PORT, SIDE_CHANNEL_PLACEHOLDER: SIDE_CHANNEL_PORT}
"""Values of the placeholders in commands and variables."""

_USER = "penstock"
"""User 1000 is in no image's password file; PyTorch asks for its name all the same."""

_IDENTITY: Mapping[str, str] = {"POD_IP": "status.podIP", "POD_NAME": "metadata.name"}


def environment(graph: GraphDeployment, spec: ProcessSpec, context: BuildContext) -> list[dict[str, Any]]:
    """Return the variables; a later one of the same name replaces an earlier one where that stands.

    The pod's own address and name come first, because others refer to them as ``$(POD_IP)``.

    Args:
        graph: The graph.
        spec: The process that the container runs.
        context: Of the build.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, path in {**_IDENTITY, **runtime_of(graph.spec.runtime).cluster.fields}.items():
        found[name] = {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
    for name, value in {**_folders(graph, spec.service), **filled_env(spec, PORTS)}.items():
        found[name] = {"name": name, "value": value}
    if spec.role == Role.ROUTER and graph.spec.traits.frontend is None:
        found[GRAPH_SECRET_VARIABLE] = graph_secret_variable(graph, context)
    for each in spec.env_sources:
        found[each.name] = {"name": each.name, "valueFrom": dict(each.value_from or {})}
    return list(found.values())


def environment_from(spec: ProcessSpec) -> list[dict[str, Any]]:
    """Return the Secrets and ConfigMaps whose keys become variables."""
    return [each.to_manifest() for each in spec.env_from]


def _folders(graph: GraphDeployment, service: str) -> dict[str, str]:
    variables = {"HOME": home_of(graph, service)}
    cache = cache_of(graph, service)
    if cache is not None:
        variables["HF_HOME"] = cache[0]
    if not is_penstock_image(graph, service):
        variables["USER"] = _USER
    return {**variables, **runtime_of(graph.spec.runtime).pod_environment(graph.spec.services[service].role)}
