"""Says in the graphs' status that their planner is gone, which a planner that is gone cannot say itself.

The planner renews its Lease while it lives. No clocks are compared: the Lease is looked at repeatedly, and one that
does not change for three terms has no owner. The next planner overwrites what is said here.
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

LOOK_S: Final = 5.0
"""Real seconds between two looks at the Lease. Chosen: one GET per installation, a third of the Lease's term."""

SILENT_S: Final = 45.0
"""Real seconds without a renewal after which no planner works. Chosen: three terms of the Lease, within which a successor
takes over."""

AGAIN_S: Final = 60.0
"""Real seconds after which new graphs are told, too; chosen."""

FIELD_MANAGER: Final = f"{OPERATOR}-silence"
"""Field manager of the condition alone: the condition is the planner's."""

CONDITION: Final = "PlannerActive"
REASON: Final = "PlannerSilent"

log = get_logger(__name__)


class PlannerSilence:
    """Looks after the planner of one installation."""

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
        """Prepare; ``lease`` is the planner's, ``namespace`` that of the graphs, None: all."""
        self._client = client
        self._lease = lease
        self._namespace = namespace
        self._operator_class = operator_class
        self._now_s = now_s
        self._wall_s = wall_s
        self._renewed: str | None = None
        self._renewed_s = now_s()
        self._said_s = float("-inf")
        # Graphs whose planner has overwritten it: one that needs no Lease.
        self._said: set[str] = set()
        self._elsewhere: set[str] = set()

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            try:
                await self.look()
            except ClusterError as exc:  # the API server is away for a moment
                log.debug("planner's lease not looked at", error=str(exc))
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Look at the Lease, and say so in every graph if it has not been renewed for `SILENT_S`.

        Raises:
            ClusterError: the API server does not answer.
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
                self._said.clear()
                self._said_s = float("-inf")
        if now_s - self._renewed_s < SILENT_S or now_s - self._said_s < AGAIN_S:
            return
        self._said_s = now_s
        for graph in (await self._client.list(GRAPH_DEPLOYMENT, namespace=self._namespace)).items:
            await self._say(graph)

    async def _say(self, graph: Object) -> None:
        metadata, spec = graph["metadata"], graph["spec"]
        is_planned = (spec.get("planner") or {}).get("enabled", True) and is_of_class(
            spec, self._operator_class
        )
        conditions = (graph.get("status") or {}).get("conditions") or ()
        said: Object = next((each for each in conditions if each["type"] == CONDITION), {})
        uid = metadata["uid"]
        if uid in self._said and said.get("reason") != REASON:
            self._elsewhere.add(uid)
        if not is_planned or said.get("reason") == REASON or uid in self._elsewhere:
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
        self._said.add(uid)
