"""The planner beside other installations: which graphs are its own, and saying which are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from penstock_core.logs import get_logger
from penstock_kube.client import KubeClient
from penstock_kube.events import Note
from penstock_kube.lease import Election
from penstock_kube.peers import Keys
from penstock_kube.territory import Post, Territory
from penstock_objects.names import COMPONENT_LABEL, GRAPH_LABEL, PLANNER, SCOPE_LABEL, lease_name
from penstock_planner.cluster.fleet import Graphs
from penstock_planner.cluster.watch import Key, Object

LEASE_KEYS: Final = Keys(COMPONENT_LABEL, SCOPE_LABEL, GRAPH_LABEL)

log = get_logger(__name__)


def post_of(namespace: str, *, all_namespaces: bool, graph: str | None) -> Post:
    """Return what a planner stands for election for.

    Args:
        namespace: That it plans; its own if it plans all.
        all_namespaces: Whether it plans all.
        graph: The only graph's name; None: all.
    """
    name = lease_name(PLANNER, cluster_wide=all_namespaces, graph=graph)
    return Post("planner", LEASE_KEYS, (namespace, name), cluster_wide=all_namespaces, graph=graph)


class OwnGraphs:
    """The graphs that no other installation plans; implements `penstock_planner.cluster.fleet.Graphs`.

    Attributes:
        territory: Which ones those are.
    """

    def __init__(
        self,
        graphs: Graphs,
        client: KubeClient,
        election: Election,
        post: Post,
        *,
        tell: Callable[[Object, Note], None],
    ) -> None:
        """Build it.

        Args:
            graphs: All graphs.
            client: Reads.
            election: Won by this process.
            post: What for.
            tell: Records an Event about an object.
        """
        self.territory = Territory(client, election, post, on_change=self._changed)
        self._graphs = graphs
        self._tell = tell
        self._on_change: Callable[[], None] = lambda: None
        self._words = ""

    def subscribe(self, on_change: Callable[[], None]) -> None:
        """Have ``on_change`` called when other graphs may have become this planner's own."""
        self._on_change = on_change

    def graph(self, key: Key) -> Object | None:
        """Return a graph; None if there is none, it is being deleted, or it is another installation's."""
        return self._graphs.graph(key) if self.territory.has(*key) else None

    def _changed(self) -> None:
        leases = ", ".join("/".join(each.lease) for each in self.territory.rivals[:5])
        words = f"cedes graphs to the installations of these Leases: {leases}" if leases else ""
        if words != self._words:
            self._words = words
            standing = words or "plans every graph that it sees"
            log.info("other installations changed", standing=standing)
            lease = self.territory.lease
            if lease is not None:
                self._tell(dict(lease), Note("Standby" if words else "LeaderActive", standing))
        self._on_change()
