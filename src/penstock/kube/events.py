"""Event objects as operator and planner write them: what a user sees in `kubectl describe`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from penstock.core.stamps import micro_stamp
from penstock.kube.kinds import EVENT

MAX_NOTE: Final = 1024
"""Bytes of a note that the API server takes."""

MAX_INSTANCE: Final = 128
"""Characters of a reporter's instance that the API server takes."""


@dataclass(frozen=True, slots=True)
class EventMessage:
    """One thing to report about an object.

    Attributes:
        reason: One word in UpperCamelCase.
        text: One sentence; cut to `MAX_NOTE` bytes.
        action: What was done, one word; empty: what its reporter always does.
        is_warning: Whether somebody should look.
    """

    reason: str
    text: str
    action: str = ""
    is_warning: bool = False


@dataclass(frozen=True, slots=True)
class EventReporter:
    """Who reports.

    Attributes:
        controller: Program's name.
        instance: Name of this process: the pod's or the host's.
        action: What it always does, one word.
    """

    controller: str
    instance: str
    action: str

    def event(
        self, regarding: Mapping[str, Any], message: EventMessage, *, suffix: str, at_s: float
    ) -> dict[str, Any]:
        """Return an Event of events.k8s.io.

        Args:
            regarding: Object with apiVersion, kind and metadata.
            message: What happened.
            suffix: Distinguishes the Event's name from those of the object's others.
            at_s: When, seconds since the epoch.
        """
        metadata = regarding["metadata"]
        about = {
            "apiVersion": regarding["apiVersion"],
            "kind": regarding["kind"],
            "name": metadata["name"],
            **{key: metadata[key] for key in ("namespace", "uid", "resourceVersion") if key in metadata},
        }
        return {
            "apiVersion": EVENT.api_version,
            "kind": EVENT.kind,
            "metadata": {
                "name": f"{metadata['name']}.{suffix}",
                "namespace": metadata.get("namespace", "default"),
            },
            "eventTime": micro_stamp(at_s),
            "reportingController": self.controller,
            "reportingInstance": self.instance[:MAX_INSTANCE],
            "action": message.action or self.action,
            "reason": message.reason,
            "type": "Warning" if message.is_warning else "Normal",
            "note": truncated(message.text),
            "regarding": about,
        }


def truncated(text: str, max_bytes: int = MAX_NOTE) -> str:
    """Return as much of ``text`` as fits, no character torn."""
    return text.encode()[:max_bytes].decode(errors="ignore")
