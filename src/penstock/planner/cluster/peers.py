"""The planner beside other installations: which graphs are its own, and Events about those that are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from penstock.core.logs import get_logger
from penstock.kube.client import KubeClient
from penstock.kube.events import EventMessage
from penstock.kube.lease import Election
from penstock.kube.lease_scopes import Keys
from penstock.kube.objects.names import COMPONENT_LABEL, GRAPH_LABEL, PLANNER, SCOPE_LABEL, lease_name
from penstock.kube.ownership import ElectionScope, GraphOwnership
from penstock.planner.cluster.fleet import Graphs
from penstock.planner.cluster.watch import Key, Object

LEASE_KEYS: Final = Keys(COMPONENT_LABEL, SCOPE_LABEL, GRAPH_LABEL)

log = get_logger(__name__)


def election_scope(namespace: str, *, all_namespaces: bool, graph: str | None) -> ElectionScope:
    """Return what a planner asks to lead.

    Args:
        namespace: That it plans; its own if it plans all.
        all_namespaces: Whether it plans all.
        graph: The only graph's name; None: all.
    """
    name = lease_name(PLANNER, cluster_wide=all_namespaces, graph=graph)
    return ElectionScope("planner", LEASE_KEYS, (namespace, name), cluster_wide=all_namespaces, graph=graph)


class OwnGraphs:
    """The graphs that no other installation plans; implements `penstock.planner.cluster.fleet.Graphs`.

    Attributes:
        ownership: Which ones those are.
    """

    def __init__(
        self,
        graphs: Graphs,
        client: KubeClient,
        election: Election,
        scope: ElectionScope,
        *,
        emit: Callable[[Object, EventMessage], None],
    ) -> None:
        """Build it.

        Args:
            graphs: All graphs.
            client: Reads.
            election: Won by this process.
            scope: What for.
            emit: Records an Event about an object.
        """
        self.ownership = GraphOwnership(client, election, scope, on_change=self._changed)
        self._graphs = graphs
        self._emit = emit
        self._on_change: Callable[[], None] = lambda: None
        self._message = ""

    def subscribe(self, on_change: Callable[[], None]) -> None:
        """Have ``on_change`` called when other graphs may have become this planner's own."""
        self._on_change = on_change

    def graph(self, key: Key) -> Object | None:
        """Return a graph; None if there is none, it is being deleted, or it is another installation's."""
        return self._graphs.graph(key) if self.ownership.owns(*key) else None

    def _changed(self) -> None:
        leases = ", ".join("/".join(each.lease) for each in self.ownership.preceding[:5])
        message = f"cedes graphs to the installations of these Leases: {leases}" if leases else ""
        if message != self._message:
            self._message = message
            scope = message or "plans every graph that it sees"
            log.info("other installations changed", scope=scope)
            lease = self.ownership.lease
            if lease is not None:
                self._emit(dict(lease), EventMessage("Standby" if message else "LeaderActive", scope))
        self._on_change()
