"""What this process may work on, beside other installations of its component: watches all their Leases.

Nobody is asked and no clocks are compared. A process sees its own renewals come back in the same watch that
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

from penstock_core.errors import ClusterError
from penstock_core.logs import get_logger
from penstock_kube.client import KubeClient
from penstock_kube.informer import Informer, ObjectKey
from penstock_kube.kinds import ACCESS_REVIEW, LEASE
from penstock_kube.lease import FIELD_MANAGER, HELD_FRACTION, Election
from penstock_kube.peers import CLUSTER, NAMESPACE, SETTLED_TERMS, Claim, Keys, Standing, above, claim_of

LOOK_S: Final = 1.0
"""Chosen: between two looks for Leases that have run out."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Post:
    """What one installation stands for election for.

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


class Territory:
    """One leader's view of the other installations.

    Attributes:
        rivals: Claims that stand and come before this process's own, first things first.
    """

    def __init__(
        self,
        client: KubeClient,
        election: Election,
        post: Post,
        *,
        on_change: Callable[[], None],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare; nothing is read yet.

        Args:
            client: Reads.
            election: Won by this process.
            post: What for.
            on_change: Called when the answers of `has` may have changed.
            now_s: The clock by which ``election`` counts, too.
        """
        self._client = client
        self._election = election
        self._post = post
        self._on_change = on_change
        self._now_s = now_s
        self._others: dict[ObjectKey, Standing] = {}
        self._mine: Claim | None = None
        self._lease: Mapping[str, Any] | None = None
        self._fresh_s: float | None = None
        self._quiet_until_s: float | None = None
        self._was_quiet = True
        self._is_settled = asyncio.Event()
        self._first_sight: asyncio.Future[Claim] = asyncio.get_running_loop().create_future()
        self._informer = Informer(
            client,
            LEASE,
            namespace=None if post.cluster_wide else post.lease[0],
            label_selector=post.selector,
            trim=_whole,
            on_change=self._changed,
        )
        self.rivals: tuple[Claim, ...] = ()

    async def run(self) -> None:
        """Watch until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._informer.run(), name="peers")
            await self._informer.synced.wait()
            await self._settle(await self._first_sight)
            while True:
                self._look()
                await asyncio.sleep(LOOK_S)

    async def settled(self) -> None:
        """Wait until whoever worked here before must have stopped."""
        await self._is_settled.wait()

    @property
    def lease(self) -> Mapping[str, Any] | None:
        """This process's own Lease, to tell users something about; None before it was seen."""
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
        return any(each.namespace is None and each.graph in {None, self._post.graph} for each in self.rivals)

    def has(self, namespace: str, graph: str | None) -> bool:
        """Return whether this process may work on a graph now; None: on any of the namespace."""
        if self._mine is None or self._quiet_until_s is None or self._now_s() < self._quiet_until_s:
            return False
        others = above(self._mine, self._still(self._others.values()))
        return not any(each.covers(namespace, graph) for each in others)

    def may_write_in(self, namespace: str) -> bool:
        """Return whether this process may write into a namespace now; for `KubeClient.within`."""
        return self.is_fresh and self.has(namespace, self._post.graph)

    def problem(self) -> str | None:
        """Return why nothing is written though this process leads; None if it may write."""
        if self._informer.problem is not None:
            return f"leases: {self._informer.problem}"
        if not self._is_settled.is_set():
            return None
        return None if self.is_fresh else "leases: the watch does not show this process's own renewals"

    def _still(self, standing: Iterable[Standing]) -> list[Claim]:
        """Return the claims that have not fallen."""
        now_s, term_s = self._now_s(), self._election.duration_s
        return [each.claim for each in standing if each.holds(now_s, own_term_s=term_s)]

    async def _settle(self, mine: Claim) -> None:
        """Find out how long to wait, and wait."""
        term_s = self._election.duration_s
        server_s = await self._server_s()
        if server_s is not None:
            self._date_back(server_s)
        wait_s = 0.0 if self._succeeds(server_s) or await self._is_first(mine, server_s) else term_s
        if wait_s:
            log.info("waits until whoever worked here before has stopped", wait_s=wait_s)
        self._quiet_until_s = max(self._quiet_until_s or 0.0, self._now_s() + wait_s)
        await asyncio.sleep(wait_s)
        self._look()
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

    async def _is_first(self, mine: Claim, server_s: float | None) -> bool:
        """Return whether it is certain that nobody works here whom this process would take over from."""
        if self._post.cluster_wide:
            standing = self._still(self._others.values())
        else:
            leases = await self._look_around()
            if leases is None:
                return False
            standing = self._still([self._dated(each, server_s) for each in leases])
        return not any(each.meets(mine) and each.rank > mine.rank for each in standing)

    async def _look_around(self) -> list[dict[str, Any]] | None:
        """Return the Leases of all namespaces; None if this process may not see them, as is usual."""
        group = LEASE.api_version.partition("/")[0]
        wanted = {"group": group, "resource": LEASE.plural, "verb": "list", "namespace": ""}
        review = {
            "apiVersion": ACCESS_REVIEW.api_version,
            "kind": ACCESS_REVIEW.kind,
            "metadata": {},
            "spec": {"resourceAttributes": wanted},
        }
        labels = {self._post.keys.component: self._post.component}
        try:
            answer = await self._client.create(review, field_manager=FIELD_MANAGER)
            if not (answer.get("status") or {}).get("allowed"):
                return None
            return (await self._client.list(LEASE, namespace=None, labels=labels)).items
        except ClusterError:
            return None

    def _dated(self, lease: Mapping[str, Any], server_s: float | None) -> Standing:
        """Return a claim that was seen only now, yet counts from when its Lease was changed last.

        Both times are the API servers' own; one term is left for the difference between two of those.
        """
        changed_s = _changed_at_s(lease["metadata"])
        age_s = 0.0
        if changed_s is not None and server_s is not None:
            age_s = max(0.0, server_s - changed_s - self._election.duration_s)
        term_s = float((lease.get("spec") or {}).get("leaseDurationSeconds") or 0.0)
        return Standing(claim_of(lease, self._post.keys), term_s, self._now_s() - age_s)

    def _date_back(self, server_s: float) -> None:
        """Count Leases that nobody has renewed for long as fallen."""
        for key in self._others:
            lease = self._informer.objects.get(key)
            if lease is not None:
                self._others[key] = self._dated(lease, server_s)

    def _changed(self, what: str, lease: dict[str, Any]) -> None:
        claim = claim_of(lease, self._post.keys)
        spec = lease.get("spec") or {}
        if claim.lease == self._post.lease:
            sent_s = self._election.sent_s(str(spec.get("renewTime")))
            if what != "DELETED" and sent_s is not None:
                self._mine, self._lease, self._fresh_s = claim, lease, sent_s
                if not self._first_sight.done():
                    self._first_sight.set_result(claim)
        else:
            self._note(what, claim, float(spec.get("leaseDurationSeconds") or 0.0))
        self._look()

    def _note(self, what: str, claim: Claim, term_s: float) -> None:
        now_s = self._now_s()
        known = self._others.get(claim.lease)
        if what == "DELETED":
            return  # its holder may write it again; it falls like one that is not renewed
        self._others[claim.lease] = Standing(claim, term_s, now_s)
        if known is None or self._mine is None or known.claim == claim:
            return
        if known.claim.rank < self._mine.rank < claim.rank:
            # It came first until now, by a Lease that was deleted; it has to see this, too.
            self._quiet_until_s = now_s + self._election.duration_s

    def _look(self) -> None:
        """Notice what has changed; forget what has fallen."""
        now_s, term_s = self._now_s(), self._election.duration_s
        for key in [key for key, each in self._others.items() if not each.holds(now_s, own_term_s=term_s)]:
            if key not in self._informer.objects:
                del self._others[key]
        rivals = () if self._mine is None else tuple(above(self._mine, self._still(self._others.values())))
        is_quiet = self._quiet_until_s is None or now_s < self._quiet_until_s
        if (rivals, is_quiet) != (self.rivals, self._was_quiet):
            self.rivals, self._was_quiet = rivals, is_quiet
            self._on_change()


def _whole(lease: dict[str, Any]) -> dict[str, Any]:
    """Keep all of a Lease: its field owners say when it was changed, and there are few."""
    return lease


def _changed_at_s(metadata: Mapping[str, Any] | None) -> float | None:
    """Return when the API server took an object's last change, seconds since the epoch; None if it does not say."""
    entries = (metadata or {}).get("managedFields") or ()
    times = [each["time"] for each in entries if each.get("time")]
    return max((datetime.fromisoformat(each).timestamp() for each in times), default=None)
