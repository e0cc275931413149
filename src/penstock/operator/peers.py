"""The operator beside other installations: which graphs are its own, and Events about those that are not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from penstock.core.logs import get_logger
from penstock.kube.client import KubeClient
from penstock.kube.events import EventMessage
from penstock.kube.lease import Election
from penstock.kube.lease_scopes import Keys, LeaseScope
from penstock.kube.objects.names import COMPONENT_LABEL, GRAPH_LABEL, SCOPE_LABEL
from penstock.kube.ownership import ElectionScope, GraphOwnership
from penstock.operator.events import EventRecorder
from penstock.operator.metrics import OperatorMetrics
from penstock.operator.queue import Key

LEASE_KEYS: Final = Keys(COMPONENT_LABEL, SCOPE_LABEL, GRAPH_LABEL)

SHOWN: Final = 5
"""Chosen: namespaces named in one sentence; the rest is a number."""

log = get_logger(__name__)


class Peers:
    """One leader among the installations.

    Attributes:
        ownership: Which namespaces are its own.
        message: What it leaves to others; empty if nothing.
        on_change: Called when that has changed.
    """

    def __init__(
        self,
        client: KubeClient,
        election: Election,
        election_scope: ElectionScope,
        *,
        recorder: EventRecorder,
        metrics: OperatorMetrics,
    ) -> None:
        self.ownership = GraphOwnership(client, election, election_scope, on_change=self._changed)
        self.message = ""
        self.on_change: Callable[[], None] = lambda: None
        self._recorder = recorder
        self._metrics = metrics
        self._change = asyncio.Event()

    async def run(self) -> None:
        """Watch and emit Events until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.ownership.run())
                while True:
                    await self._change.wait()
                    self._change.clear()
                    await self._emit()
        finally:
            self._metrics.peers(standby=False, namespaces_ceded=0)

    def owns(self, key: Key) -> bool:
        """Return whether a graph is this operator's."""
        return self.ownership.owns(*key)

    def _changed(self) -> None:
        preceding = self.ownership.preceding
        message = ceded_message(preceding)
        if message != self.message:
            self.message = message
            self._change.set()
        left = {each.namespace for each in preceding if each.namespace is not None}
        self._metrics.peers(standby=self.ownership.is_idle, namespaces_ceded=len(left))
        self.on_change()

    async def _emit(self) -> None:
        message = self.message or "works on every graph that it sees"
        log.info("other installations changed", scope=message)
        lease = self.ownership.lease
        if lease is not None:
            await self._recorder.emit(
                lease, EventMessage("Standby" if self.message else "LeaderActive", message, "Peer")
            )


def ceded_message(preceding: tuple[LeaseScope, ...]) -> str:
    """Return what is left to other installations, in one sentence; empty if nothing.

    Args:
        preceding: Scopes that take precedence.
    """
    wide = [each for each in preceding if each.namespace is None]
    if wide:
        namespace, name = wide[0].lease
        return f"standby: the installation of Lease {namespace}/{name} works on all graphs, and is older"
    left = sorted({each.namespace for each in preceding if each.namespace is not None})
    if not left:
        return ""
    shown = ", ".join(left[:SHOWN]) + (f" and {len(left) - SHOWN} more" if len(left) > SHOWN else "")
    return f"cedes {shown} to the operators of those namespaces"
