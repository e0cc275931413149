"""Reports in the status of graphs that their planner no longer runs, since a planner that has ended cannot report it itself.

A running planner renews its Lease. No clocks are compared: the Lease is read repeatedly, and a Lease that does not
change for three lease durations has no live holder. The next planner overwrites the reported condition.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from penstock.core.errors import ClusterError, NotFoundError
from penstock.core.logs import get_logger
from penstock.core.stamps import stamp
from penstock.kube.client import KubeClient
from penstock.kube.informer import ObjectKey
from penstock.kube.kinds import GRAPH_DEPLOYMENT, LEASE
from penstock.kube.objects.names import OPERATOR, is_of_class
from penstock_operator.trim import Object

POLL_S: Final = 5.0
"""Wall-clock seconds between two reads of the Lease. Chosen: one GET per installation, a third of the lease duration."""

SILENT_S: Final = 45.0
"""Wall-clock seconds without a renewal after which the planner is reported as not running. Chosen: three lease
durations, within which a successor takes over."""

REPEAT_S: Final = 60.0
"""Wall-clock seconds after which the graphs are checked again, so that new graphs get the condition too. Chosen."""

FIELD_MANAGER: Final = f"{OPERATOR}-silence"
"""Field manager that writes this condition and nothing else; the planner owns the condition while it runs."""

CONDITION: Final = "PlannerActive"
REASON: Final = "PlannerSilent"

log = get_logger(__name__)


class PlannerLeaseMonitor:
    """Monitors the Lease (leader election) of one installation's planner.

    If the planner has stopped renewing the Lease, this is reported in the status of each graph that has a planner.
    """

    def __init__(
        self,
        client: KubeClient,
        lease: ObjectKey,
        *,
        namespace: str | None,
        operator_class: str,
        now_s: Callable[[], float] = time.monotonic,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        """Prepare; `run` starts the checks.

        Args:
            client: Client of the Kubernetes API.
            lease: Namespace and name of the planner's Lease.
            namespace: Namespace of the graphs; None means all.
            operator_class: Only graphs with this ``spec.operatorClass`` are reported.
            now_s: Monotonic clock in seconds.
            wall_s: Unix time in seconds, for the condition's timestamp.
        """
        self._client = client
        self._lease = lease
        self._namespace = namespace
        self._operator_class = operator_class
        self._now_s = now_s
        self._wall_s = wall_s
        self._renewed: str | None = None
        self._renewed_s = now_s()
        self._reported_s = float("-inf")
        # `_reported` has the UIDs of graphs that have the condition. `_active_without_lease` has those whose planner overwrote it
        # without renewing the Lease; such a planner runs without one.
        self._reported: set[str] = set()
        self._active_without_lease: set[str] = set()

    async def run(self) -> None:
        """Check every 5 wall-clock seconds (`POLL_S`), until cancelled, whether the planner still renews its Lease (leader election)."""
        while True:
            try:
                await self.check()
            except ClusterError as exc:  # the API server is temporarily unavailable
                log.debug("planner's lease not read", error=str(exc))
            await asyncio.sleep(POLL_S)

    async def check(self) -> None:
        """Read the planner's Lease once; if it has not been renewed for 45 s (`SILENT_S`), report that in every graph that has a planner.

        Raises:
            ClusterError: The API server does not answer.
        """
        namespace, name = self._lease
        try:
            spec = (await self._client.get(LEASE, name, namespace=namespace)).get("spec") or {}
            renewed = str(spec.get("renewTime", "")) if spec.get("holderIdentity") else ""
        except NotFoundError:
            renewed = ""
        now_s = self._now_s()
        if renewed != self._renewed:
            self._renewed, self._renewed_s = renewed, now_s
            if renewed:
                self._reported.clear()
                self._reported_s = float("-inf")
        if now_s - self._renewed_s < SILENT_S or now_s - self._reported_s < REPEAT_S:
            return
        self._reported_s = now_s
        for graph in (await self._client.list(GRAPH_DEPLOYMENT, namespace=self._namespace)).items:
            await self._report(graph)

    async def _report(self, graph: Object) -> None:
        metadata, spec = graph["metadata"], graph["spec"]
        is_planned = (spec.get("planner") or {}).get("enabled", True) and is_of_class(
            spec, self._operator_class
        )
        conditions = (graph.get("status") or {}).get("conditions") or ()
        condition_now: Object = next((each for each in conditions if each["type"] == CONDITION), {})
        uid = metadata["uid"]
        if uid in self._reported and condition_now.get("reason") != REASON:
            self._active_without_lease.add(uid)
        if not is_planned or condition_now.get("reason") == REASON or uid in self._active_without_lease:
            return
        namespace, name = self._lease
        message = (
            f"no planner has renewed Lease {namespace}/{name} for {SILENT_S:g} s, so replicas stay as they are: "
            f"kubectl get pods -n {namespace} -l app.kubernetes.io/component=planner"
        )
        condition = {
            "type": CONDITION,
            "status": "Unknown",
            "reason": REASON,
            "message": message,
            "observedGeneration": metadata["generation"],
            "lastTransitionTime": stamp(self._wall_s()),
        }
        applied = {
            "apiVersion": graph["apiVersion"],
            "kind": graph["kind"],
            "metadata": {"name": metadata["name"], "namespace": metadata["namespace"]},
            "status": {"conditions": [condition]},
        }
        try:
            await self._client.apply(applied, field_manager=FIELD_MANAGER, subresource="status")
        except NotFoundError:
            return
        self._reported.add(uid)
