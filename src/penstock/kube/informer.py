"""Keeps a local copy of a collection up to date: lists it once, then watches it until cancelled.

After an interruption the watch resumes at the last version; everything is listed again only if the server no longer
has that version. Objects are trimmed before they are stored, which limits the memory of the process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import orjson

from penstock.core.backoff import Backoff
from penstock.core.errors import ClusterError, ConfigError, ExpiredError
from penstock.core.logs import get_logger
from penstock.kube.client import KubeClient, selector_of
from penstock.kube.failures import event_error
from penstock.kube.kinds import Kind

log = get_logger(__name__)


RELISTS: Final = Backoff(first_s=0.2, limit_s=10.0)
"""Pauses between attempts, in wall-clock seconds. Chosen: a server that restarts is tried again at once, one that is
unavailable six times a minute."""

STREAM_S: Final = (300, 600)
"""Range in seconds from which the duration of each watch is drawn; the server then ends it. Chosen, so that clients
spread over the API server's replicas."""

SETTLED_S: Final = 5.0
"""Minimum seconds that a watch must have lasted to count as successful, so that the next one starts without a longer
pause. Chosen."""

ObjectKey = tuple[str, str]
"""Namespace and name of an object; the namespace is empty for cluster-scoped kinds."""
Trim = Callable[[dict[str, Any]], dict[str, Any]]
"""Function that returns the part of an object to store."""
OnChange = Callable[[str, dict[str, Any]], None]
"""Function that is called with ADDED, MODIFIED or DELETED and the trimmed object."""


def without_managed_fields(obj: dict[str, Any]) -> dict[str, Any]:
    """Remove ``metadata.managedFields``, often half of an object, in place, and return the object; the default trim."""
    obj.get("metadata", {}).pop("managedFields", None)
    return obj


def key_of(obj: Mapping[str, Any]) -> ObjectKey:
    """Return ``(namespace, name)`` of an object; the namespace is empty for cluster-scoped kinds."""
    metadata = obj["metadata"]
    return metadata.get("namespace", ""), metadata["name"]


class Informer:
    """A live copy of one collection.

    Attributes:
        objects: Trimmed objects by ``(namespace, name)``; a live view whose content must not be changed.
        synced: Event that is set after the first complete list.
        problem: Reason why the copy may be outdated; None if the watch works.
        resource_version: Resource version of the collection in `objects`; empty before the first list.
    """

    def __init__(
        self,
        client: KubeClient,
        kind: Kind,
        *,
        namespace: str | None,
        labels: Mapping[str, str] | str | None = None,
        trim: Trim = without_managed_fields,
        on_change: OnChange | None = None,
    ) -> None:
        """Prepare; nothing is read yet.

        Args:
            client: Client of the Kubernetes API.
            kind: Kind of the objects.
            namespace: Namespace to watch; None means all.
            labels: Labels that the objects must have, or a label selector in Kubernetes' syntax; None means any
                objects.
            trim: Returns the part of an object to store; it is allowed to change its argument.
            on_change: Called with ADDED, MODIFIED or DELETED and the trimmed object, after `objects` has changed.
        """
        self._client = client
        self._kind = kind
        self._namespace = namespace
        self._selector = selector_of(labels)
        self._trim = trim
        self._on_change = on_change
        self._store: dict[ObjectKey, dict[str, Any]] = {}
        self._failures = 0
        self.objects: Mapping[ObjectKey, dict[str, Any]] = MappingProxyType(self._store)
        self.synced = asyncio.Event()
        self.problem: str | None = None
        self.resource_version = ""

    async def run(self) -> None:
        """List and watch until cancelled; after failures it retries with growing pauses."""
        while True:
            await self._list_and_watch()

    async def _list_and_watch(self) -> None:
        """List if needed, then watch once; pause afterwards."""
        started_s = time.monotonic()
        try:
            if not self.resource_version:
                await self._list()
            await self._watch()
        except ExpiredError as exc:
            log.info("watch cannot be continued; listing again", kind=self._kind.plural, reason=str(exc))
            self.resource_version = ""
        except (ClusterError, ConfigError) as exc:
            self._set_problem(str(exc))
        if time.monotonic() - started_s >= SETTLED_S:
            self._failures = 0
        self._failures += 1
        # Random jitter, so that clients do not retry at the same moment.
        await asyncio.sleep(RELISTS.pause_s(self._failures) * self._client.rng.uniform(0.5, 1.0))

    async def _list(self) -> None:
        listed: dict[ObjectKey, dict[str, Any]] = {}

        def take(obj: dict[str, Any]) -> None:
            listed[key_of(obj)] = self._trim(obj)

        version = await self._client.read_pages(
            self._kind, namespace=self._namespace, selector=self._selector, take=take, restart=listed.clear
        )
        self._replace(listed)
        self.resource_version = version
        self._set_healthy()
        self.synced.set()

    async def _watch(self) -> None:
        """Follow one watch until it ends."""
        params = {
            "allowWatchBookmarks": "true",
            "resourceVersion": self.resource_version,
            "timeoutSeconds": str(self._client.rng.randint(*STREAM_S)),
            **({"labelSelector": self._selector} if self._selector else {}),
        }
        async with self._client.watch(self._kind, namespace=self._namespace, params=params) as lines:
            self._set_healthy()
            async for line in lines:
                self._take_line(line)

    def _take_line(self, line: bytes) -> None:
        try:
            event = orjson.loads(line)
            what, obj = event["type"], event["object"]
        except (ValueError, KeyError, TypeError) as exc:
            raise ClusterError(f"watch {self._kind.plural}: not an event: {line[:100]!r}") from exc
        if what == "ERROR":
            raise event_error(obj, f"watch {self._kind.plural}")
        self._set_healthy()
        version = obj["metadata"]["resourceVersion"]
        if what != "BOOKMARK":
            self._take(what, obj)
        self.resource_version = version

    def _take(self, what: str, obj: dict[str, Any]) -> None:
        key = key_of(obj)
        obj = self._trim(obj)
        if what == "DELETED":
            self._store.pop(key, None)
        else:
            what = "MODIFIED" if key in self._store else "ADDED"
            self._store[key] = obj
        self._notify(what, obj)

    def _replace(self, listed: dict[ObjectKey, dict[str, Any]]) -> None:
        gone = [(key, obj) for key, obj in self._store.items() if key not in listed]
        for key, obj in gone:
            del self._store[key]
            self._notify("DELETED", obj)
        for key, obj in listed.items():
            old = self._store.get(key)
            if old is not None and old == obj:
                continue
            self._store[key] = obj
            self._notify("ADDED" if old is None else "MODIFIED", obj)

    def _notify(self, what: str, obj: dict[str, Any]) -> None:
        if self._on_change is None:
            return
        try:
            self._on_change(what, obj)
        except Exception:  # an error about one object must not end the view of all others
            log.exception(
                "change not handled", kind=self._kind.plural, key="/".join(key_of(obj)), change=what
            )

    def _set_healthy(self) -> None:
        if self.problem is not None:
            log.info("API server answers again", kind=self._kind.plural)
            self.problem = None

    def _set_problem(self, problem: str) -> None:
        if problem != self.problem:
            log.warning("view may be out of date", kind=self._kind.plural, problem=problem)
        self.problem = problem
