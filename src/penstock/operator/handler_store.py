"""Objects of one custom kind as kopf's handlers report them: what the reconciler reads, checked against lists.

Kopf reports every object that its first list holds and every event of its watch. What it does not report are
objects that vanished while its watch was broken for so long that it had to list again. A periodic comparison
with a list of our own removes those, and shows whether kopf falls behind. The comparison adds nothing: an
object is here because a handler was called with it, or not at all. Imports neither kopf nor a client.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from penstock.core.logs import get_logger
from penstock.kube.informer import ObjectKey, OnChange, Trim, key_of
from penstock.kube.kinds import Kind
from penstock.operator.trim import VERSION, Object, version_of

STALLED_S: Final = 60.0
"""Chosen: a listed object that no handler reported for so long was missed; a list of thousands takes seconds."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Listed:
    """What a list says of one object.

    Attributes:
        uid: Its identity.
        version: Its resource version as a number.
    """

    uid: str
    version: int


class HandlerStore:
    """A live copy of one kind's objects.

    Attributes:
        kind: Theirs.
        labels: That an object must carry to be kept.
        objects: By ``(namespace, name)``, trimmed; a live view, do not change what it holds.
        synced: Set once everything that a list showed has been reported.
        relisted: Set when kopf listed again after its watch broke; who compares clears it.
        problem: Why the copy may be out of date, or None.
    """

    def __init__(
        self,
        kind: Kind,
        *,
        labels: Mapping[str, str] | None = None,
        trim: Trim,
        on_change: OnChange,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Hold nothing yet.

        Args:
            kind: Of the objects.
            labels: That objects must carry; one that loses them leaves with a DELETED.
            trim: Returns what is kept of an object.
            on_change: Called with ADDED, MODIFIED or DELETED and the trimmed object, after `objects` changed.
            now_s: Monotonic clock, seconds.
        """
        self.kind = kind
        self.labels = labels or {}
        self._trim = trim
        self._on_change = on_change
        self._now_s = now_s
        self._store: dict[ObjectKey, Object] = {}
        self._late: dict[ObjectKey, tuple[int, float]] = {}
        self._is_compared = False
        self.objects: Mapping[ObjectKey, Object] = MappingProxyType(self._store)
        self.synced = asyncio.Event()
        self.relisted = asyncio.Event()
        self.problem: str | None = None

    def report(self, change: str | None, obj: Object) -> None:
        """Take over what a handler was called with.

        Args:
            change: ADDED, MODIFIED or DELETED; None for an object of a list.
            obj: The object as the API server gave it.
        """
        if change is None and self.synced.is_set():
            self.relisted.set()
        key = key_of(obj)
        held = self._store.get(key)
        version = version_of(obj)
        labels = obj["metadata"].get("labels", {})
        if change == "DELETED" or not self.labels.items() <= labels.items():
            # An object of the same name that was made since has another uid.
            if held is not None and held["metadata"]["uid"] == obj["metadata"]["uid"]:
                self._remove(key, self._trim(obj))
        elif held is None or held[VERSION] < version:
            self._store[key] = kept = self._trim(obj)
            self._on_change("ADDED" if held is None else "MODIFIED", kept)
        if key in self._late and self._late[key][0] <= version:
            del self._late[key]
        self._note_synced()

    def compare(self, listed: Mapping[ObjectKey, Listed], version: int) -> None:
        """Remove what a list does not show any more; remember what it shows and no handler has reported.

        Args:
            listed: A complete list's objects.
            version: Resource version of the list; objects that are newer are none of its business.
        """
        for key, held in list(self._store.items()):
            found = listed.get(key)
            is_same = found is not None and found.uid == held["metadata"]["uid"]
            if not is_same and held[VERSION] <= version:
                log.info(
                    "object vanished while its watch was broken", kind=self.kind.plural, key="/".join(key)
                )
                self._remove(key, held)
        now_s = self._now_s()
        before = self._late
        self._late = {}
        for key, found in listed.items():
            reported = self._store[key][VERSION] if key in self._store else -1
            late = before.get(key)
            if late is not None and reported < late[0]:
                self._late[key] = late
            elif reported < found.version:
                self._late[key] = (found.version, now_s)
        self._is_compared = True
        self._note_synced()

    def stalled(self) -> str | None:
        """Return which object the handlers missed; None if they keep up."""
        limit_s = self._now_s() - STALLED_S
        missed = sorted(key for key, (_, since_s) in self._late.items() if since_s <= limit_s)
        if not missed:
            return None
        more = f" and {len(missed) - 1} more" if len(missed) > 1 else ""
        return f"{self.kind.plural}: kopf has not reported {'/'.join(missed[0])}{more} for {STALLED_S:g} s"

    def restarted(self) -> None:
        """Give what is missing its full time again: kopf lists from the beginning."""
        self._late = {key: (version, self._now_s()) for key, (version, _) in self._late.items()}

    def _remove(self, key: ObjectKey, obj: Object) -> None:
        del self._store[key]
        self._on_change("DELETED", obj)

    def _note_synced(self) -> None:
        if self._is_compared and not self._late:
            self.synced.set()
