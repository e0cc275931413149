"""Where kopf keeps what it has handled: in this process's memory, so that it writes nothing at rest.

After a restart every object is new to kopf, which costs one reconcile that changes nothing. Only a retry that is due
writes, because kopf comes back to an object by an event of it alone. Called by `penstock.operator.handlers`.
"""

from __future__ import annotations

from typing import Any, Final, cast

import kopf

TOUCH_ANNOTATION: Final = "penstock.dev/touch"
"""On a graph whose deletion lasts: when kopf came back to it last."""


class MemoryDiffBase(kopf.DiffBaseStorage):
    """The version of every object that its handlers saw; whatever changes an object is an update."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[str, kopf.BodyEssence] = {}

    def build(self, *, body: kopf.Body, extra_fields: Any = None) -> kopf.BodyEssence:  # noqa: ARG002 - kopf's
        """Return what is compared."""
        return cast(
            "kopf.BodyEssence", {"metadata": {"resourceVersion": body["metadata"]["resourceVersion"]}}
        )

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:
        """Return what was handled last."""
        return self._seen.get(body["metadata"]["uid"])

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:  # noqa: ARG002 - kopf's
        """Remember what is handled now."""
        self._seen[body["metadata"]["uid"]] = essence

    def forget(self, uid: str) -> None:
        """Drop an object that is gone."""
        self._seen.pop(uid, None)


class MemoryProgress(kopf.ProgressStorage):
    """How far each handler of each object is."""

    def __init__(self) -> None:
        super().__init__()
        self._records: dict[tuple[str, str], kopf.ProgressRecord] = {}

    def fetch(self, *, key: str, body: kopf.Body) -> kopf.ProgressRecord | None:
        """Return a handler's record."""
        return self._records.get((body["metadata"]["uid"], key))

    def store(self, *, key: str, record: kopf.ProgressRecord, body: kopf.Body, patch: kopf.Patch) -> None:  # noqa: ARG002 - kopf's
        """Keep a handler's record."""
        self._records[body["metadata"]["uid"], key] = record

    def purge(self, *, key: str, body: kopf.Body, patch: kopf.Patch) -> None:  # noqa: ARG002 - kopf's
        """Drop a handler's record."""
        self._records.pop((body["metadata"]["uid"], key), None)

    def touch(self, *, body: kopf.Body, patch: kopf.Patch, value: str | None) -> None:
        """Change the object, so that its event brings the retry that is due."""
        if value is not None or TOUCH_ANNOTATION in body["metadata"].get("annotations", {}):
            patch.metadata.annotations[TOUCH_ANNOTATION] = value

    def clear(self, *, essence: kopf.BodyEssence) -> kopf.BodyEssence:
        """Return an essence, which holds no records."""
        return essence
