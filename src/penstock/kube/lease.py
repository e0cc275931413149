"""Leader election with a Lease: one of several processes works, and another takes over when it has ended.

No clocks are compared. A candidate measures the lease duration from the time at which it last saw the Lease change; a
leader measures from before it sent its last successful renewal. So a leader knows that it has lost the Lease before
any other process can acquire it.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, Final

from penstock.core.errors import ClusterError, ConfigError, ConflictError, NotFoundError
from penstock.core.logs import get_logger
from penstock.core.stamps import micro_stamp
from penstock.kube.client import KubeClient
from penstock.kube.kinds import LEASE
from penstock.kube.objects.names import CLASS_LABEL, COMPONENT_LABEL

log = get_logger(__name__)

FIELD_MANAGER: Final = "penstock-lease"

RENEWALS: Final = 5
"""Renewals per lease duration. With 15 s that is one every 3 s, which leaves seven seconds for retries after a failed
renewal."""

HELD_FRACTION: Final = 2 / 3
"""Fraction of the lease duration after which a leader without a renewal stops; the rest is for its work to end.
client-go uses 10 of 15 s."""

TRIES: Final = 7.5
"""Attempts per lease duration of a candidate; client-go tries every 2 of 15 s."""

REPEATS: Final = 50
"""Attempts per lease duration after a failed write, for a leader and for a candidate that may have the Lease: one every
0.3 s for 15 s. Chosen: an API server that refuses seven of ten calls then costs the leadership once in hundreds of lease
durations. Requested pauses (Retry-After, of which one second is the shortest) are shortened to this: the repeats are
single small writes of one process, whereas a new leader lists everything again."""

STOP_S: Final = 20.0
"""Maximum seconds to wait for the work's end after SIGTERM. Chosen: longer than a lease duration, after which another
process works anyway."""

RELEASE_S: Final = 2.0
"""Maximum seconds to release the Lease at the end; otherwise it expires by itself. Chosen."""


class Election:
    """One candidate of a leader election; all durations are wall-clock seconds.

    Attributes:
        identity: Unique name of this candidate.
        duration_s: Lease duration in seconds.
        holder: Identity of the leader that was seen last; empty if there is none, or before the first read.
        problem: Reason why the Lease cannot be read or written; None if the last call succeeded.
        overdue: Reason why only a restart of this process helps, since its leadership is over but its work has not
            ended; None if all is well.
    """

    def __init__(
        self,
        client: KubeClient,
        *,
        name: str,
        namespace: str,
        identity: str,
        duration_s: float = 15.0,
        labels: Mapping[str, str] | None = None,
        owner: Mapping[str, Any] | None = None,
    ) -> None:
        """Prepare; nothing is read yet.

        Args:
            client: Client of the Kubernetes API.
            name: Name of the Lease, which is created if it does not exist.
            namespace: Namespace of the Lease.
            identity: Name of this candidate, which must be unique among candidates and across restarts.
            duration_s: Lease duration in seconds, at least 1.
            labels: Labels of the Lease.
            owner: Owner reference of the Lease while this process holds it, such as from `own_pod`; None means no
                owner.
        """
        # A renewal that waits behind a hundred slow writes would be too late.
        self._client = client.urgent()
        self._name = name
        self._namespace = namespace
        self.identity = identity
        self.duration_s = duration_s
        self._metadata: dict[str, Any] = {"labels": dict(labels or {})}
        if owner is not None:
            self._metadata["ownerReferences"] = [dict(owner)]
        self._seen: str | None = None
        self._seen_at_s = 0.0
        self._held_until_s: float | None = None
        self._written: dict[str, Any] | None = None  # the Lease as this process wrote it last
        self.holder = ""
        self.problem: str | None = None
        self.overdue: str | None = None

    @property
    def is_leading(self) -> bool:
        """Whether this process is the leader now; False as soon as its Lease has expired, even before `lead` cancels the work."""
        return self._held_until_s is not None and time.monotonic() < self._held_until_s

    async def lead(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Wait until this process is the leader and run ``work``; when leadership is lost, cancel ``work`` and become a candidate again.

        Returns when ``work`` returns, and raises any exception that ``work`` raises. In both cases, and if this call is
        cancelled, the Lease is released.

        Args:
            work: Returns the coroutine to run; it is called again each time this process becomes the leader.
        """
        while True:
            await self._win()
            log.info("leading", lease=self._name, identity=self.identity)
            try:
                if await self._work_while_leading(work):
                    return
            finally:
                self._held_until_s = self._written = None
                await self._release()
            log.warning("leadership lost", lease=self._name, identity=self.identity, problem=self.problem)

    async def _win(self) -> None:
        while not await self._try(self.duration_s * HELD_FRACTION):
            pause_s = self.duration_s / TRIES if self.problem is None else self._repeat_s()
            await asyncio.sleep(pause_s * self._client.rng.uniform(0.8, 1.2))

    async def _work_while_leading(self, work: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        """Run the work and the renewals concurrently; return whether the work ended by itself."""
        task = asyncio.create_task(work(), name=f"leading {self._name}")
        renewals = asyncio.create_task(self._renew(), name=f"renewing {self._name}")
        try:
            await asyncio.wait({task, renewals}, return_when=asyncio.FIRST_COMPLETED)
            is_done = task.done()
        finally:
            await self._end(task)
            renewals.cancel()
            await asyncio.wait({renewals})
        if is_done or not task.cancelled():
            task.result()
        return is_done

    async def _end(self, task: asyncio.Task[None]) -> None:
        """Cancel the work and wait until it has ended, however long that takes: two active processes are worse than none.

        Meanwhile `overdue` reports the problem to the liveness probe, since a restart is the only other way out.
        """
        task.cancel()
        left_s = self.duration_s * (1 - HELD_FRACTION)
        _, late = await asyncio.wait({task}, timeout=left_s)
        if late:
            log.error(
                "work has not stopped after leadership ended; waiting", lease=self._name, after_s=left_s
            )
            self.overdue = (
                f"lease {self._name}: leadership ended, but its work has not stopped within {left_s:g} s;"
                " restart this process"
            )
            await asyncio.wait({task})
            self.overdue = None

    async def _renew(self) -> None:
        """Renew the Lease until leadership is lost."""
        pause_s = self.duration_s / RENEWALS
        while (left_s := self._left_s()) > 0:
            await asyncio.sleep(min(pause_s, left_s))
            # An attempt that gets no answer must leave time for another.
            is_renewed = await self._try(min(self._left_s(), self.duration_s / RENEWALS))
            pause_s = self.duration_s / RENEWALS if is_renewed else self._repeat_s()

    def _repeat_s(self) -> float:
        """Return the pause after a failed call."""
        return self.duration_s / REPEATS

    def _left_s(self) -> float:
        return 0.0 if self._held_until_s is None else max(0.0, self._held_until_s - time.monotonic())

    async def _try(self, limit_s: float) -> bool:
        """Acquire or renew the Lease if that is allowed; return whether this process now holds it."""
        try:
            async with asyncio.timeout(limit_s):
                is_ours = await self._take()
        except ConflictError:
            self._written = None
            return False  # another candidate was first; the next read shows which
        except (ClusterError, ConfigError, TimeoutError) as exc:  # a credential plugin may fail temporarily
            problem = str(exc) or f"no answer within {limit_s:.1f} s"
            if problem != self.problem:
                log.warning("lease not usable", lease=self._name, problem=problem)
            self.problem = problem
            return False
        self.problem = None
        return is_ours

    async def _take(self) -> bool:
        """Write the Lease, which a leader need not read first; return whether this process holds it. Each call is sent only once."""
        lease = self._written
        try:
            lease = lease or await self._client.get(LEASE, self._name, namespace=self._namespace)
            spec = lease.get("spec") or {}
            if self._written is None and not self._may_take(lease["metadata"], spec):
                self._held_until_s = None
                return False
            # Measured from before the write is sent: other candidates see the renewal later than this.
            started_s = time.monotonic()
            self._written = await self._patch(lease["metadata"], self._taken(spec))
        except NotFoundError:
            started_s = time.monotonic()
            self._written = await self._client.create(self._new(), field_manager=FIELD_MANAGER)
        self.holder = self.identity
        self._held_until_s = started_s + self.duration_s * HELD_FRACTION
        return True

    def _may_take(self, metadata: dict[str, Any], spec: dict[str, Any]) -> bool:
        self.holder = spec.get("holderIdentity") or ""
        if self.holder in {"", self.identity}:
            return True
        now_s = time.monotonic()
        version = metadata["resourceVersion"]
        if version != self._seen:
            self._seen, self._seen_at_s = version, now_s
        return now_s - self._seen_at_s > float(spec.get("leaseDurationSeconds") or self.duration_s)

    def _taken(self, spec: dict[str, Any]) -> dict[str, Any]:
        now = micro_stamp(time.time())
        whole_s = max(1, math.ceil(self.duration_s))
        taken = {"holderIdentity": self.identity, "leaseDurationSeconds": whole_s, "renewTime": now}
        if spec.get("holderIdentity") != self.identity:
            taken |= {"acquireTime": now, "leaseTransitions": int(spec.get("leaseTransitions") or 0) + 1}
        return taken

    def _new(self) -> dict[str, Any]:
        metadata = {"name": self._name, "namespace": self._namespace, **self._metadata}
        return LEASE.of(metadata, spec=self._taken({"holderIdentity": None, "leaseTransitions": -1}))

    async def _patch(self, metadata: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
        # With the resource version the write fails if another candidate was first.
        patch = {
            "metadata": {"resourceVersion": metadata["resourceVersion"], **self._metadata},
            "spec": spec,
        }
        return await self._client.patch(
            LEASE, self._name, patch, namespace=self._namespace, field_manager=FIELD_MANAGER
        )

    async def _release(self) -> None:
        """Release the Lease if this process still holds it, so that the next leader does not have to wait."""
        with suppress(ClusterError, ConfigError, TimeoutError):
            async with asyncio.timeout(RELEASE_S):
                lease = await self._client.get(LEASE, self._name, namespace=self._namespace)
                if (lease.get("spec") or {}).get("holderIdentity") == self.identity:
                    freed = {
                        "holderIdentity": "",
                        "leaseDurationSeconds": 1,
                        "renewTime": micro_stamp(time.time()),
                    }
                    await self._patch(lease["metadata"], freed)


def election_of(
    client: KubeClient, component: str, *, namespace: str, name: str, operator_class: str
) -> Election:
    """Return a candidate for an installation's Lease, with this process's identity.

    Args:
        client: Client of the Kubernetes API.
        component: ``operator`` or ``planner``.
        namespace: Namespace of the Lease.
        name: Name of the Lease.
        operator_class: Operator class of the installation, for a label.
    """
    return Election(
        client,
        name=name,
        namespace=namespace,
        identity=f"{instance()}_{uuid.uuid4().hex[:8]}",
        labels={COMPONENT_LABEL: component, CLASS_LABEL: operator_class},
        owner=own_pod(os.environ, namespace),
    )


def instance() -> str:
    """Return the name of this process: its pod's name, or else its host's."""
    return os.environ.get("POD_NAME") or socket.gethostname()


def own_pod(environment: Mapping[str, str], namespace: str) -> dict[str, Any] | None:
    """Return an owner reference to this process's pod, for a Lease; None outside a pod or if the Lease is in another namespace.

    Kubernetes then deletes the Lease together with the pod of its holder. Otherwise `helm uninstall` would remove the
    rights before the process can release the Lease, which would keep a holder that no longer exists. The next holder
    replaces the owner by its own pod. The chart sets ``POD_NAME``, ``POD_NAMESPACE`` and ``POD_UID`` in the
    environment.
    """
    name, uid = environment.get("POD_NAME"), environment.get("POD_UID")
    if not name or not uid or environment.get("POD_NAMESPACE") != namespace:
        return None
    return {"apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid}
