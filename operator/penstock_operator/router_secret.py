"""Creates the Secret with which a graph's routers authenticate each other. The operator has no right to read Secrets.

It therefore cannot see that a Secret was deleted; it learns this from a router pod that cannot start without the
Secret.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from typing import Final

from penstock.api import Role
from penstock.kube.events import EventMessage
from penstock.kube.objects.names import ROLE_LABEL
from penstock.kube.objects.refusals import Refusals
from penstock_operator.apply import Applier, name_of
from penstock_operator.observed import ObservedGraph
from penstock_operator.plan.pods import PodView
from penstock_operator.queue import Key
from penstock_operator.resources.router_config import graph_secret
from penstock_operator.trim import Object
from penstock_operator.workloads import WORKLOADS

_BYTES: Final = 32
"""Number of random bytes in the secret: as many as in an AES-256 key."""


class RouterSecrets:
    """Creates the Secret with which a graph's routers authenticate each other, before the routers.

    It remembers the graphs whose Secret could not be created.
    """

    def __init__(self, applier: Applier) -> None:
        self._applier = applier
        self._refused: set[Key] = set()

    def forget(self, key: Key) -> None:
        """Forget a deleted graph, whose Secret may not have been created; does nothing if it is unknown."""
        self._refused.discard(key)

    async def make(
        self, graph: ObservedGraph, wanted: Iterable[Object], refusals: Refusals
    ) -> EventMessage | None:
        """Create the Secret with which a graph's routers authenticate each other, if a router needs it; an existing one is not changed.

        Args:
            graph: The graph with its observed state.
            wanted: The graph's desired objects; the Secret is created if a router's workload among them is about to be
                written.
            refusals: Collects the write if the API server rejects it.

        Returns:
            An Event message if the Secret was recreated while routers run that have the earlier secret value; else
            None.
        """
        if graph.model.spec.traits.frontend is not None:
            return None
        secret = graph_secret(graph.model, graph.context, secrets.token_urlsafe(_BYTES))
        is_missed = _is_missed(secret["metadata"]["name"], graph.snapshot.views())
        if not (is_missed or graph.key in self._refused or self._routers_change(graph, wanted)):
            return None
        was_made = False
        with refusals.of(name_of(secret), "Apply") as attempt:
            was_made = await self._applier.create_once(secret)
        (self._refused.discard if attempt.refusal is None else self._refused.add)(graph.key)
        if not (was_made and is_missed):
            return None
        text = (
            f"{name_of(secret)} was missing and was created again; running routers still use the previous one and share no "
            f"queues with new ones: kubectl rollout restart deployment --selector {ROLE_LABEL}=router"
        )
        return EventMessage("Repaired", text, "Apply")

    def _routers_change(self, graph: ObservedGraph, wanted: Iterable[Object]) -> bool:
        """Return whether the workload of any router is absent or differs from the desired one."""
        live: Mapping[tuple[str, str], Object] = graph.snapshot.children
        for each in wanted:
            if each["kind"] in WORKLOADS and each["metadata"]["labels"].get(ROLE_LABEL) == Role.ROUTER:
                existing = live.get((each["kind"], each["metadata"]["name"]))
                if existing is None or self._applier.differences(each, existing):
                    return True
        return False


def _is_missed(name: str, pods: Iterable[PodView]) -> bool:
    message = f'secret "{name}" not found'
    return any(message in each.waiting_message for pod in pods for each in pod.containers)
