"""The operator beside other installations: which graphs are its own, and telling users which are not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from penstock_core.logs import get_logger
from penstock_kube.client import KubeClient
from penstock_kube.events import Note
from penstock_kube.lease import Election
from penstock_kube.peers import Claim, Keys
from penstock_kube.territory import Post, Territory
from penstock_objects.names import COMPONENT_LABEL, GRAPH_LABEL, SCOPE_LABEL
from penstock_operator.events import EventRecorder
from penstock_operator.metrics import OperatorMetrics
from penstock_operator.queue import Key

LEASE_KEYS: Final = Keys(COMPONENT_LABEL, SCOPE_LABEL, GRAPH_LABEL)

SHOWN: Final = 5
"""Chosen: namespaces named in one sentence; the rest is a number."""

log = get_logger(__name__)


class Peers:
    """One leader's place among the installations.

    Attributes:
        territory: Which namespaces are its own.
        words: What it leaves to others; empty if nothing.
        on_change: Called when that has changed.
    """

    def __init__(
        self,
        client: KubeClient,
        election: Election,
        post: Post,
        *,
        recorder: EventRecorder,
        metrics: OperatorMetrics,
    ) -> None:
        self.territory = Territory(client, election, post, on_change=self._changed)
        self.words = ""
        self.on_change: Callable[[], None] = lambda: None
        self._recorder = recorder
        self._metrics = metrics
        self._news = asyncio.Event()

    async def run(self) -> None:
        """Watch and tell until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.territory.run())
                while True:
                    await self._news.wait()
                    self._news.clear()
                    await self._tell()
        finally:
            self._metrics.peers(standby=False, namespaces_ceded=0)

    def owns(self, key: Key) -> bool:
        """Return whether a graph is this operator's."""
        return self.territory.has(*key)

    def _changed(self) -> None:
        rivals = self.territory.rivals
        words = in_words(rivals)
        if words != self.words:
            self.words = words
            self._news.set()
        left = {each.namespace for each in rivals if each.namespace is not None}
        self._metrics.peers(standby=self.territory.is_idle, namespaces_ceded=len(left))
        self.on_change()

    async def _tell(self) -> None:
        words = self.words or "works on every graph that it sees"
        log.info("other installations changed", standing=words)
        lease = self.territory.lease
        if lease is not None:
            await self._recorder.tell(lease, Note("Standby" if self.words else "LeaderActive", words, "Peer"))


def in_words(rivals: tuple[Claim, ...]) -> str:
    """Return what is left to other installations, in one sentence; empty if nothing.

    Args:
        rivals: Claims that come first.
    """
    wide = [each for each in rivals if each.namespace is None]
    if wide:
        namespace, name = wide[0].lease
        return f"standby: the installation of Lease {namespace}/{name} works on all graphs, and is older"
    left = sorted({each.namespace for each in rivals if each.namespace is not None})
    if not left:
        return ""
    shown = ", ".join(left[:SHOWN]) + (f" and {len(left) - SHOWN} more" if len(left) > SHOWN else "")
    return f"cedes {shown} to the operators of those namespaces"
