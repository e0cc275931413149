"""Makes the secret by which a graph's routers know each other, before the routers that refer to it.

The operator may create Secrets and read none, so one that is there already stands; its name holds the graph's UID.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from typing import Final

from penstock.api import GraphDeployment, Role
from penstock.core.errors import ForbiddenError, InvalidObjectError
from penstock.kube.objects.names import ROLE_LABEL
from penstock.operator.apply import Applier
from penstock.operator.resources.context import BuildContext
from penstock.operator.resources.graph_secret import graph_secret
from penstock.operator.trim import Object
from penstock.operator.workloads import WORKLOADS

_BYTES: Final = 32
"""Of randomness: as many as an AES-256 key's."""


async def make_router_secret(
    applier: Applier,
    graph: GraphDeployment,
    context: BuildContext,
    desired: Iterable[Object],
    live: Mapping[tuple[str, str], Object],
) -> list[str]:
    """Make the Secret, unless it is there, where a router's workload is about to be written.

    Args:
        applier: Writes.
        graph: A valid graph.
        context: Of the build.
        desired: Its children.
        live: What the watches show, by kind and name.

    Returns:
        Why it cannot be made, in the words of `Applied.refused`.

    Raises:
        ClusterError: the server failed; what follows needs the Secret.
    """
    routers = [each for each in desired if each["kind"] in WORKLOADS and _role(each) == Role.ROUTER]
    there = [live.get((each["kind"], each["metadata"]["name"])) for each in routers]
    is_right = [
        old is not None and not applier.differences(each, old)
        for each, old in zip(routers, there, strict=True)
    ]
    if all(is_right) or graph.spec.traits.frontend is not None:
        return []
    wanted = graph_secret(graph, context, secrets.token_urlsafe(_BYTES))
    try:
        await applier.create_once(wanted)
    except (ForbiddenError, InvalidObjectError) as exc:
        return [f"Secret {wanted['metadata']['name']}: {exc}"]
    return []


def _role(workload: Object) -> str | None:
    """Return the role of a workload's pods."""
    labels: dict[str, str] = workload["metadata"].get("labels", {})
    return labels.get(ROLE_LABEL)
