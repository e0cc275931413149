"""The Secret by which a graph's routers know each other; the operator makes it once and reads it never."""

from __future__ import annotations

from typing import Any, Final

from penstock.api import GraphDeployment
from penstock.kube.objects.names import GRAPH_SECRET_VARIABLE, child_name
from penstock.operator.resources.context import BuildContext
from penstock.operator.resources.labels import graph_labels
from penstock.operator.resources.metadata import ROUTER_SUFFIX, metadata

_KEY: Final = "secret"
_UID_DIGITS: Final = 8


def graph_secret(graph: GraphDeployment, context: BuildContext, value: str) -> dict[str, Any]:
    """Return the Secret ``GRAPH-router-UID``, with the first digits of the graph's UID.

    A graph of the same name that comes after a deleted one so has another, which the garbage collector leaves alone.

    Args:
        graph: A valid graph.
        context: Of the build.
        value: Random text that nobody else knows.
    """
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(graph, context, _suffix(context), graph_labels(graph)),
        "immutable": True,
        "stringData": {_KEY: value},
    }


def graph_secret_variable(graph: GraphDeployment, context: BuildContext) -> dict[str, Any]:
    """Return the router's variable that holds it."""
    reference = {"name": child_name(graph.name, _suffix(context)), "key": _KEY}
    return {"name": GRAPH_SECRET_VARIABLE, "valueFrom": {"secretKeyRef": reference}}


def _suffix(context: BuildContext) -> str:
    return f"{ROUTER_SUFFIX}-{context.owner_uid[:_UID_DIGITS]}" if context.owner_uid else ROUTER_SUFFIX
