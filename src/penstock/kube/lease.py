"""Leader election by a Lease: one of several processes works, another takes over when it is gone.

No clocks are compared: a candidate counts the term from when it saw the lease change last, a leader from
before it sent its last successful renewal. So a leader knows that it has lost before anybody can win.
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
"""Renewals per term; with 15 s that is every 3 s, so that seven seconds are left for tries after a renewal that failed."""

HELD_FRACTION: Final = 2 / 3
"""Part of the term after which a leader without a renewal stops; the rest is for its work to end. client-go: 10 of 15 s."""

TRIES: Final = 7.5
"""Tries per term of a candidate; client-go: each 2 of 15 s."""

REPEATS: Final = 30
"""Tries per term after a write that failed, of a leader and of a candidate that may have the Lease: every half second of
15 s, or after the pause that the API server asks for. Chosen: an API server that refuses seven of ten calls then costs
leadership once in hundreds of terms."""

STOP_S: Final = 20.0
"""Longest wait for the work's end at SIGTERM; chosen: more than a term of the Lease, behind which another process works
anyway."""

RELEASE_S: Final = 2.0
"""Chosen: longest wait to give the lease back at the end; otherwise it runs out by itself."""


class Election:
    """One candidate.

    Attributes:
        holder: Identity of the leader as last seen; empty when there is none or before the first look.
        problem: Why the lease cannot be read or written, or None.
        overdue: Why only a restart of this process helps: its leadership is over, the work is not. None: all is well.
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

        The Lease is created when absent, and carries the labels and, while this process holds it, the owner (see
        `own_pod`). An identity is unique among candidates and across restarts; a term has at least a second.
        """
        # A renewal behind a hundred slow writes would come too late.
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
        self._pause_s: float | None = None  # what the API server asked for with its last refusal
        self.holder = ""
        self.problem: str | None = None
        self.overdue: str | None = None

    @property
    def is_leading(self) -> bool:
        """Whether this process may act now; false at once when its term is over, even before it notices."""
        return self._held_until_s is not None and time.monotonic() < self._held_until_s

    async def lead(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run ``work`` while leading; cancel it when leadership is lost, and stand again.

        Returns when ``work`` does, and raises what it raises; the lease is then given back, as it is when
        this call is cancelled.
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
        """Run the work and renew alongside it; return whether the work came to its end by itself."""
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
        """Cancel the work and wait for its end, however long that takes: two workers are worse than none.

        Meanwhile `overdue` says so, for the liveness probe: a restart is the only other way out.
        """
        task.cancel()
        left_s = self.duration_s * (1 - HELD_FRACTION)
        _, late = await asyncio.wait({task}, timeout=left_s)
        if late:
            log.error("work continues though leadership is over; waiting", lease=self._name, after_s=left_s)
            self.overdue = (
                f"lease {self._name}: leadership is over, but its work has not ended within {left_s:g} s;"
                " restart this process"
            )
            await asyncio.wait({task})
            self.overdue = None

    async def _renew(self) -> None:
        """Renew until leadership is lost."""
        pause_s = self.duration_s / RENEWALS
        while (left_s := self._left_s()) > 0:
            await asyncio.sleep(min(pause_s, left_s))
            # One that gets no answer must leave time for another.
            is_renewed = await self._try(min(self._left_s(), self.duration_s / RENEWALS))
            pause_s = self.duration_s / RENEWALS if is_renewed else self._repeat_s()

    def _repeat_s(self) -> float:
        """Return the pause after a call that failed; the API server's own wish comes first."""
        return self.duration_s / REPEATS if self._pause_s is None else self._pause_s

    def _left_s(self) -> float:
        return 0.0 if self._held_until_s is None else max(0.0, self._held_until_s - time.monotonic())

    async def _try(self, limit_s: float) -> bool:
        """Take or renew the lease if that is allowed; return whether it was done."""
        self._pause_s = None
        try:
            async with asyncio.timeout(limit_s):
                is_ours = await self._take()
        except ConflictError:
            self._written = None
            return False  # another was first; the next look shows who
        except (ClusterError, ConfigError, TimeoutError) as exc:  # a credential plugin may fail for a while
            problem = str(exc) or f"no answer within {limit_s:.1f} s"
            if problem != self.problem:
                log.warning("lease not usable", lease=self._name, problem=problem)
            self.problem = problem
            self._pause_s = getattr(exc, "retry_after_s", None)
            return False
        self.problem = None
        return is_ours

    async def _take(self) -> bool:
        """Write the lease, which a leader knows and need not read; each call is sent once."""
        lease = self._written
        try:
            lease = lease or await self._client.get(LEASE, self._name, namespace=self._namespace)
            spec = lease.get("spec") or {}
            if self._written is None and not self._may_take(lease["metadata"], spec):
                self._held_until_s = None
                return False
            # Counted from before the write is sent: others see the renewal later than this.
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
        # The version makes it fail if anybody else was first.
        patch = {
            "metadata": {"resourceVersion": metadata["resourceVersion"], **self._metadata},
            "spec": spec,
        }
        return await self._client.patch(
            LEASE, self._name, patch, namespace=self._namespace, field_manager=FIELD_MANAGER
        )

    async def _release(self) -> None:
        """Give the lease back if it is still ours, so that the next leader need not wait."""
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
    """Return this process's candidacy for a Lease of an installation; the component is ``operator`` or ``planner``."""
    return Election(
        client,
        name=name,
        namespace=namespace,
        identity=f"{instance()}_{uuid.uuid4().hex[:8]}",
        labels={COMPONENT_LABEL: component, CLASS_LABEL: operator_class},
        owner=own_pod(os.environ, namespace),
    )


def instance() -> str:
    """Return this process's name: the pod's, or the host's."""
    return os.environ.get("POD_NAME") or socket.gethostname()


def own_pod(environment: Mapping[str, str], namespace: str) -> dict[str, Any] | None:
    """Return this process's pod as the owner of a Lease; None outside a pod or for another namespace's Lease.

    The Lease then goes with the pod of its holder: `helm uninstall` takes the rights away before the process could
    give the Lease back, and would leave it with a holder that is gone. The next holder puts its own pod there.
    The chart sets ``POD_NAME``, ``POD_NAMESPACE`` and ``POD_UID`` in the environment.
    """
    name, uid = environment.get("POD_NAME"), environment.get("POD_UID")
    if not name or not uid or environment.get("POD_NAMESPACE") != namespace:
        return None
    return {"apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid}
