"""Kubernetes Events of operator and planner, which users see in `kubectl describe` and `kubectl get events`.

Equal Events (same object, reason and text) are one object with a count, as client-go's correlator creates them. A
repeated Event is written at most once per minute (`REPEAT_S`). Events are of core/v1, because events.k8s.io refuses the
fields by which `kubectl get events --sort-by=.lastTimestamp` sorts. An Event that cannot be recorded is counted and
dropped: Events are informational, and no action depends on them.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from penstock.core.errors import ClusterError, NotFoundError
from penstock.core.logs import get_logger
from penstock.core.lru_cache import LruCache
from penstock.core.stamps import micro_stamp, stamp
from penstock.kube.client import KubeClient
from penstock.kube.kinds import EVENT

MAX_NOTE: Final = 1024
"""Maximum length of a message in bytes that the API server accepts."""

MAX_INSTANCE: Final = 128
"""Maximum length of a reporting instance in characters that the API server accepts."""

FORGET_S: Final = 3600.0
"""Seconds after which a repeated Event becomes a new object: the API server keeps Events for one hour."""

REPEAT_S: Final = 60.0
"""Minimum seconds between two writes of one Event. Chosen: a repair every second costs one write per minute."""

MAX_REMEMBERED: Final = 4096
"""Number of Events that are remembered to detect repeats; the least recently used are dropped first. Chosen: about
one megabyte."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class EventMessage:
    """Content of an Event about an object.

    Attributes:
        reason: Reason in UpperCamelCase.
        text: One sentence; cut when written, so that the message has at most 1,024 bytes (`MAX_NOTE`).
        action: Action that was taken, one word; empty means the default of the `EventRecorder`.
        is_warning: Whether the Event is of type Warning, so that a person should look at it.
        detail: Text appended in brackets; Events that differ only in it count as repeats.
    """

    reason: str
    text: str
    action: str = ""
    is_warning: bool = False
    detail: str = ""

    @property
    def note(self) -> str:
        """Text and detail as they are written: the text is cut so that both have at most 1,024 bytes (`MAX_NOTE`)."""
        suffix = f" ({self.detail})" if self.detail else ""
        shortened = self.text.encode()[: MAX_NOTE - len(suffix)].decode(errors="ignore")
        return shortened + suffix


@dataclass(slots=True)
class _Repeats:
    name: str
    last_s: float
    written_s: float
    count: int = 1


class EventRecorder:
    """Writes Events, and remembers those that were emitted last, by default 4,096 (`MAX_REMEMBERED`), to count repeats."""

    def __init__(
        self,
        client: KubeClient,
        controller: str,
        instance: str,
        action: str,
        *,
        on_dropped: Callable[[], None] = lambda: None,
        now_s: Callable[[], float] = time.time,
        remembered: int = MAX_REMEMBERED,
    ) -> None:
        """Prepare; nothing is written yet.

        Args:
            client: Client of the Kubernetes API.
            controller: Name of the reporting program.
            instance: Name of this process: its pod's or its host's.
            action: Action of Events whose message names none, one word.
            on_dropped: Called for each Event that could not be written.
            now_s: Unix time in seconds.
            remembered: Number of Events that are remembered to count repeats.
        """
        self._client = client
        self._controller = controller
        self._instance = instance
        self._action = action
        self._on_dropped = on_dropped
        self._now_s = now_s
        self._known: LruCache[tuple[str, str, str], _Repeats] = LruCache(remembered)

    async def emit(self, regarding: Mapping[str, Any], message: EventMessage) -> None:
        """Record ``message`` about an object as an Event; failures of the API server are logged and not raised.

        Args:
            regarding: The object, with apiVersion, kind and metadata.
            message: Content of the Event.
        """
        now_s = self._now_s()
        metadata = regarding["metadata"]
        key = (str(metadata.get("uid", metadata["name"])), message.reason, message.text)
        known = self._known.get(key)
        try:
            if known is not None and now_s - known.last_s <= FORGET_S:
                known.count, known.last_s = known.count + 1, now_s
                if now_s - known.written_s < REPEAT_S or await self._repeat(regarding, known, message):
                    return
            event = self._event(regarding, message, at_s=now_s)
            self._known.put(key, _Repeats(event["metadata"]["name"], now_s, now_s))
            await self._client.create(event, field_manager=self._controller)
        except ClusterError as exc:
            self._on_dropped()
            log.debug("event dropped", reason=message.reason, error=str(exc))

    def _event(self, regarding: Mapping[str, Any], message: EventMessage, *, at_s: float) -> dict[str, Any]:
        metadata = regarding["metadata"]
        shown = ("name", "namespace", "uid", "resourceVersion")
        reference = {key: metadata[key] for key in shown if key in metadata}
        name = {
            "name": f"{metadata['name']}.{uuid.uuid4().hex[:16]}",
            "namespace": metadata.get("namespace", "default"),
        }
        return EVENT.of(
            name,
            eventTime=micro_stamp(at_s),
            firstTimestamp=stamp(at_s),
            lastTimestamp=stamp(at_s),
            count=1,
            source={"component": self._controller},
            reportingComponent=self._controller,
            reportingInstance=self._instance[:MAX_INSTANCE],
            action=message.action or self._action,
            reason=message.reason,
            type="Warning" if message.is_warning else "Normal",
            message=message.note,
            involvedObject={"apiVersion": regarding["apiVersion"], "kind": regarding["kind"], **reference},
        )

    async def _repeat(self, regarding: Mapping[str, Any], known: _Repeats, message: EventMessage) -> bool:
        """Write the new count of an Event; return False if the Event no longer exists."""
        patch = {"count": known.count, "lastTimestamp": stamp(known.last_s), "message": message.note}
        known.written_s = known.last_s
        namespace = regarding["metadata"].get("namespace", "default")
        manager = self._controller
        try:
            await self._client.patch(EVENT, known.name, patch, namespace=namespace, field_manager=manager)
        except NotFoundError:
            return False
        return True
