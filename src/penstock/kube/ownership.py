"""What this process may work on, beside other installations of its component: watches all their Leases.

No process asks another, and no clocks are compared. A process sees its own renewals come back in the same watch that
shows the other Leases, so it knows how old its view is; with a view as old as a renewal that no longer holds
leadership it writes nothing. A new leader in turn waits for one term before its first write, until whoever
worked here before has stopped, unless its predecessor renewed so recently that nobody else can have begun, or
it sees that nobody else is there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from penstock.core.errors import ClusterError
from penstock.core.logs import get_logger
from penstock.kube.client import KubeClient
from penstock.kube.informer import Informer, ObjectKey
from penstock.kube.kinds import ACCESS_REVIEW, LEASE
from penstock.kube.lease import FIELD_MANAGER, HELD_FRACTION, Election
from penstock.kube.lease_scopes import (
    CLUSTER,
    NAMESPACE,
    SETTLED_TERMS,
    Keys,
    LeaseScope,
    ObservedScope,
    lease_scope,
    preceding_scopes,
)

REFRESH_S: Final = 1.0
"""Chosen: between two checks for Leases that have expired."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ElectionScope:
    """What one installation asks to lead.

    Attributes:
        component: ``operator`` or ``planner``.
        keys: Of its Lease's labels.
        lease: Namespace and name of its Lease.
        cluster_wide: Whether it works in all namespaces; else in its Lease's.
        graph: The only graph's name; None: all.
    """

    component: str
    keys: Keys
    lease: ObjectKey
    cluster_wide: bool
    graph: str | None = None

    @property
    def labels(self) -> dict[str, str]:
        """Labels of its Lease."""
        found = {self.keys.component: self.component}
        found[self.keys.scope] = CLUSTER if self.cluster_wide else NAMESPACE
        if self.graph is not None:
            found[self.keys.graph] = self.graph
        return found

    @property
    def selector(self) -> str:
        """Label selector of the Leases of all installations of this component."""
        return f"{self.keys.component}={self.component},{self.keys.scope}"


class GraphOwnership:
    """Which graphs one leader owns, beside the other installations.

    Attributes:
        preceding: Scopes that take precedence over this process's own, the first in order first.
    """

    def __init__(
        self,
        client: KubeClient,
        election: Election,
        election_scope: ElectionScope,
        *,
        on_change: Callable[[], None],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare; nothing is read yet.

        Args:
            client: Reads.
            election: Won by this process.
            election_scope: What for.
            on_change: Called when the answers of `owns` may have changed.
            now_s: The clock by which ``election`` counts, too.
        """
        self._client = client
        self._election = election
        self._election_scope = election_scope
        self._on_change = on_change
        self._now_s = now_s
        self._others: dict[ObjectKey, ObservedScope] = {}
        self._own: LeaseScope | None = None
        self._lease: Mapping[str, Any] | None = None
        self._fresh_s: float | None = None
        self._waits_until_s: float | None = None
        self._was_waiting = True
        self._is_settled = asyncio.Event()
        self._first_observed: asyncio.Future[LeaseScope] = asyncio.get_running_loop().create_future()
        self._informer = Informer(
            client,
            LEASE,
            namespace=None if election_scope.cluster_wide else election_scope.lease[0],
            label_selector=election_scope.selector,
            trim=_whole,
            on_change=self._changed,
        )
        self.preceding: tuple[LeaseScope, ...] = ()

    async def run(self) -> None:
        """Watch until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._informer.run(), name="peers")
            await self._informer.synced.wait()
            await self._settle(await self._first_observed)
            while True:
                self._refresh()
                await asyncio.sleep(REFRESH_S)

    async def settled(self) -> None:
        """Wait until the previous leader must have stopped."""
        await self._is_settled.wait()

    @property
    def lease(self) -> Mapping[str, Any] | None:
        """This process's own Lease, for Events about it; None before it was seen."""
        return self._lease

    @property
    def is_fresh(self) -> bool:
        """Whether the view is so young that a new leader elsewhere still waits for this process to stop."""
        if self._fresh_s is None:
            return False
        return self._now_s() - self._fresh_s < self._election.duration_s * HELD_FRACTION

    @property
    def is_idle(self) -> bool:
        """Whether another installation works on all that this one could."""
        return any(
            each.namespace is None and each.graph in {None, self._election_scope.graph}
            for each in self.preceding
        )

    def owns(self, namespace: str, graph: str | None) -> bool:
        """Return whether this process may work on a graph now; None: on any of the namespace."""
        if self._own is None or self._waits_until_s is None or self._now_s() < self._waits_until_s:
            return False
        others = preceding_scopes(self._own, self._current(self._others.values()))
        return not any(each.covers(namespace, graph) for each in others)

    def may_write_in(self, namespace: str) -> bool:
        """Return whether this process may write into a namespace now; for `KubeClient.within`."""
        return self.is_fresh and self.owns(namespace, self._election_scope.graph)

    def problem(self) -> str | None:
        """Return why nothing is written though this process leads; None if it may write."""
        if self._informer.problem is not None:
            return f"leases: {self._informer.problem}"
        if not self._is_settled.is_set():
            return None
        return None if self.is_fresh else "leases: the watch does not show this process's own renewals"

    def _current(self, observed: Iterable[ObservedScope]) -> list[LeaseScope]:
        """Return the scopes that still count."""
        now_s, term_s = self._now_s(), self._election.duration_s
        return [each.scope for each in observed if each.is_current(now_s, own_term_s=term_s)]

    async def _settle(self, own: LeaseScope) -> None:
        """Find out how long to wait, and wait."""
        term_s = self._election.duration_s
        server_s = await self._server_s()
        if server_s is not None:
            self._backdate(server_s)
        wait_s = 0.0 if self._succeeds(server_s) or await self._is_first(own, server_s) else term_s
        if wait_s:
            log.info("waits until the previous leader has stopped", wait_s=wait_s)
        self._waits_until_s = max(self._waits_until_s or 0.0, self._now_s() + wait_s)
        await asyncio.sleep(wait_s)
        self._refresh()
        self._is_settled.set()

    async def _server_s(self) -> float | None:
        try:
            return await self._client.server_time_s()
        except ClusterError:
            return None

    def _succeeds(self, server_s: float | None) -> bool:
        """Return whether the Lease was renewed so recently that nobody else can have begun meanwhile."""
        changed_s = _changed_at_s(self._election.found)
        if server_s is None or changed_s is None:
            return False
        return server_s - changed_s < SETTLED_TERMS * self._election.duration_s

    async def _is_first(self, own: LeaseScope, server_s: float | None) -> bool:
        """Return whether it is certain that nobody works here whom this process would take over from."""
        if self._election_scope.cluster_wide:
            observed = self._current(self._others.values())
        else:
            leases = await self._list_all_leases()
            if leases is None:
                return False
            observed = self._current([self._observed_earlier(each, server_s) for each in leases])
        return not any(each.overlaps(own) and each.rank > own.rank for each in observed)

    async def _list_all_leases(self) -> list[dict[str, Any]] | None:
        """Return the Leases of all namespaces; None if this process may not see them, as is usual."""
        group = LEASE.api_version.partition("/")[0]
        wanted = {"group": group, "resource": LEASE.plural, "verb": "list", "namespace": ""}
        review = {
            "apiVersion": ACCESS_REVIEW.api_version,
            "kind": ACCESS_REVIEW.kind,
            "metadata": {},
            "spec": {"resourceAttributes": wanted},
        }
        labels = {self._election_scope.keys.component: self._election_scope.component}
        try:
            answer = await self._client.create(review, field_manager=FIELD_MANAGER)
            if not (answer.get("status") or {}).get("allowed"):
                return None
            return (await self._client.list(LEASE, namespace=None, labels=labels)).items
        except ClusterError:
            return None

    def _observed_earlier(self, lease: Mapping[str, Any], server_s: float | None) -> ObservedScope:
        """Return a scope that was observed only now, yet counts from the last change of its Lease.

        Both times are the API servers' own; one term is left for the difference between two of those.
        """
        changed_s = _changed_at_s(lease["metadata"])
        age_s = 0.0
        if changed_s is not None and server_s is not None:
            age_s = max(0.0, server_s - changed_s - self._election.duration_s)
        term_s = float((lease.get("spec") or {}).get("leaseDurationSeconds") or 0.0)
        return ObservedScope(lease_scope(lease, self._election_scope.keys), term_s, self._now_s() - age_s)

    def _backdate(self, server_s: float) -> None:
        """Let Leases count from their last renewal, which may be long ago."""
        for key in self._others:
            lease = self._informer.objects.get(key)
            if lease is not None:
                self._others[key] = self._observed_earlier(lease, server_s)

    def _changed(self, what: str, lease: dict[str, Any]) -> None:
        scope = lease_scope(lease, self._election_scope.keys)
        spec = lease.get("spec") or {}
        if scope.lease == self._election_scope.lease:
            sent_s = self._election.sent_s(str(spec.get("renewTime")))
            if what != "DELETED" and sent_s is not None:
                self._own, self._lease, self._fresh_s = scope, lease, sent_s
                if not self._first_observed.done():
                    self._first_observed.set_result(scope)
        else:
            self._note(what, scope, float(spec.get("leaseDurationSeconds") or 0.0))
        self._refresh()

    def _note(self, what: str, scope: LeaseScope, term_s: float) -> None:
        now_s = self._now_s()
        known = self._others.get(scope.lease)
        if what == "DELETED":
            return  # its holder may write it again; it falls like one that is not renewed
        self._others[scope.lease] = ObservedScope(scope, term_s, now_s)
        if known is None or self._own is None or known.scope == scope:
            return
        if known.scope.rank < self._own.rank < scope.rank:
            # It came first until now, by a Lease that was deleted; it has to see this, too.
            self._waits_until_s = now_s + self._election.duration_s

    def _refresh(self) -> None:
        """Notice what has changed; forget what no longer counts."""
        now_s, term_s = self._now_s(), self._election.duration_s
        for key in [
            key for key, each in self._others.items() if not each.is_current(now_s, own_term_s=term_s)
        ]:
            if key not in self._informer.objects:
                del self._others[key]
        preceding = (
            ()
            if self._own is None
            else tuple(preceding_scopes(self._own, self._current(self._others.values())))
        )
        is_waiting = self._waits_until_s is None or now_s < self._waits_until_s
        if (preceding, is_waiting) != (self.preceding, self._was_waiting):
            self.preceding, self._was_waiting = preceding, is_waiting
            self._on_change()


def _whole(lease: dict[str, Any]) -> dict[str, Any]:
    """Keep all of a Lease: its field owners say when it was changed, and there are few."""
    return lease


def _changed_at_s(metadata: Mapping[str, Any] | None) -> float | None:
    """Return when the API server took an object's last change, seconds since the epoch; None if it does not say."""
    entries = (metadata or {}).get("managedFields") or ()
    times = [each["time"] for each in entries if each.get("time")]
    return max((datetime.fromisoformat(each).timestamp() for each in times), default=None)
