"""Events that a user sees in `kubectl describe`: one per change, repeats as a series.

Equal events (same object, reason and text) within `SERIES_S` are one Event object; a repeat raises its
series' count, and no more often than every `SERIES_STEP_S`. An Event that cannot be recorded is counted and
dropped: it is a courtesy, never a condition of acting.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.core.errors import ClusterError, NotFoundError
from penstock.core.logs import get_logger
from penstock.core.stamps import micro_stamp
from penstock.kube.events import EventMessage, EventReporter
from penstock.kube.kinds import EVENT, Kind
from penstock.kube.objects.names import OPERATOR

SERIES_S = 360.0
"""Repeats within this time belong to one Event; the API server keeps Events for an hour. As client-go does."""

SERIES_STEP_S = 60.0
"""Least time between two writes of one series. Chosen: a repair every second costs one write a minute."""

MAX_REMEMBERED = 4096
"""Events remembered to recognise repeats; the oldest are forgotten first. Chosen: about a megabyte."""

log = get_logger(__name__)


class EventWriter(Protocol):
    """What a recorder needs of a client."""

    async def create(self, obj: Mapping[str, Any], *, field_manager: str) -> dict[str, Any]:
        """Create the object."""
        ...

    async def patch(
        self, kind: Kind, name: str, patch: Any, *, namespace: str | None, field_manager: str
    ) -> dict[str, Any]:
        """Merge the patch."""
        ...


@dataclass(slots=True)
class _Series:
    name: str
    first_s: float
    written_s: float
    count: int = 1


class EventRecorder:
    """Writes Events about graphs; remembers what it wrote to fold repeats."""

    def __init__(
        self,
        client: EventWriter,
        *,
        instance: str,
        on_dropped: Callable[[], None] = lambda: None,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        """Start without memory.

        Args:
            client: Writes.
            instance: Name of this process: the pod's or the host's.
            on_dropped: Called for every Event that could not be recorded.
            now_s: Seconds since the epoch.
        """
        self._client = client
        self._reporter = EventReporter(OPERATOR, instance, "Reconcile")
        self._on_dropped = on_dropped
        self._now_s = now_s
        self._series: OrderedDict[tuple[str, str, str], _Series] = OrderedDict()

    async def emit(self, regarding: Mapping[str, Any], message: EventMessage) -> None:
        """Record ``message`` about an object; never raises for a cluster's refusal.

        Args:
            regarding: Object with apiVersion, kind and metadata.
            message: What happened.
        """
        now_s = self._now_s()
        key = (
            str(regarding["metadata"].get("uid", regarding["metadata"]["name"])),
            message.reason,
            message.text,
        )
        known = self._series.get(key)
        try:
            if known is not None and now_s - known.first_s <= SERIES_S:
                known.count += 1
                if now_s - known.written_s < SERIES_STEP_S or await self._repeat(regarding, known, now_s):
                    return
            event = self._event(regarding, message, key, now_s)
            self._remember(key, _Series(event["metadata"]["name"], now_s, now_s))
            await self._client.create(event, field_manager=OPERATOR)
        except ClusterError as exc:
            self._on_dropped()
            log.debug("event dropped", reason=message.reason, error=str(exc))

    async def _repeat(self, regarding: Mapping[str, Any], series: _Series, now_s: float) -> bool:
        """Raise the count of an Event; return False if the Event is gone."""
        patch = {"series": {"count": series.count, "lastObservedTime": micro_stamp(now_s)}}
        series.written_s = now_s
        namespace = regarding["metadata"].get("namespace", "default")
        try:
            await self._client.patch(EVENT, series.name, patch, namespace=namespace, field_manager=OPERATOR)
        except NotFoundError:
            return False
        return True

    def _remember(self, key: tuple[str, str, str], series: _Series) -> None:
        self._series[key] = series
        self._series.move_to_end(key)
        while len(self._series) > MAX_REMEMBERED:
            self._series.popitem(last=False)

    def _event(
        self, regarding: Mapping[str, Any], message: EventMessage, key: tuple[str, str, str], now_s: float
    ) -> dict[str, Any]:
        digest = hashlib.sha256("\0".join((*key, repr(now_s))).encode()).hexdigest()[:16]
        return self._reporter.event(regarding, message, suffix=digest, at_s=now_s)
