"""What the runtime and the operator set themselves on a process: a foreign value would point them at each other's ports.

Each is left out with the reason; called while the services' environment, flags and probes are read.
"""

from __future__ import annotations

import re
from typing import Any

from penstock.api.base import KeyPath
from penstock.runtimes.dynamo.importer.command import Command
from penstock.runtimes.dynamo.importer.source import ManifestSource

_VARIABLES = frozenset(
    {
        "DYN_COMPONENT",
        "DYN_DISCOVERY_BACKEND",
        "DYN_EVENT_PLANE",
        "DYN_HTTP_HOST",
        "DYN_HTTP_PORT",
        "DYN_KUBE_DISCOVERY_MODE",
        "DYN_NAMESPACE",
        "DYN_REQUEST_PLANE",
        "DYN_STORE_KV",
        "DYN_SYSTEM_HOST",
        "DYN_SYSTEM_PORT",
        "DYNAMO_PORT",
        "VLLM_NIXL_SIDE_CHANNEL_HOST",
        "VLLM_NIXL_SIDE_CHANNEL_PORT",
    }
)
"""Of `penstock.runtimes.dynamo`, and of how a process is found; a service's variable would win over the runtime's."""

_FLAGS = (
    "--discovery-backend",
    "--event-plane",
    "--http-host",
    "--http-port",
    "--namespace",
    "--request-plane",
)
_OLD_STORE = "--store-kv"
"""An older flag for the discovery's store."""

_CONTAINER = {
    "livenessProbe": "is set by the runtime; put another into podTemplate",
    "readinessProbe": "is set by the runtime; put another into podTemplate",
    "startupProbe": "is set by the runtime; its time is carried as startupTimeoutSeconds where it states one",
    "ports": "are chosen by the operator",
}
_PROBE_PERIOD_S = 10
"""Of Kubernetes, where a probe states none."""

_FOREIGN_LABEL = re.compile(r"\bnvidia\.com/dynamo|\bgrove\.io/")
"""Labels and annotations that only Dynamo's operator and its schedulers write and read."""

FOREIGN_SELECTION = (
    "goes by labels that Dynamo's operator puts on pods; write it with penstock.dev/graph, penstock.dev/service"
    " and penstock.dev/role"
)


def is_owned_variable(name: object) -> bool:
    """Say whether the runtime sets an environment variable itself."""
    return isinstance(name, str) and name in _VARIABLES


def drop_owned_flags(source: ManifestSource, args_path: KeyPath, command: Command) -> None:
    """Remove the flags that the runtime gives itself."""
    for flag in (*_FLAGS, _OLD_STORE):
        value = command.pop_value(flag)
        if value is not None:
            source.note(args_path, f"{flag} is chosen by the runtime", value)


def read_startup_seconds(source: ManifestSource, container: KeyPath) -> int | None:
    """Leave out a container's probes and ports; return how long its start may take, where its probe states that."""
    probe: Any = source.peek((*container, "startupProbe"))
    for key, why in _CONTAINER.items():
        if source.peek((*container, key)) is not None:
            source.note((*container, key), why)
    if not isinstance(probe, dict) or "failureThreshold" not in probe:
        return None
    period, failures = probe.get("periodSeconds", _PROBE_PERIOD_S), probe["failureThreshold"]
    delay = probe.get("initialDelaySeconds", 0)
    numbers = [each for each in (delay, period, failures) if isinstance(each, int)]
    are_counts = len(numbers) == len((delay, period, failures)) and min(numbers) >= 0
    return delay + period * failures if are_counts else None


def selects_by_foreign_labels(value: object) -> bool:
    """Say whether a part of a pod refers to labels that only Dynamo's operator and its schedulers put on pods."""
    if isinstance(value, dict):
        return any(
            _FOREIGN_LABEL.search(str(key)) or selects_by_foreign_labels(each) for key, each in value.items()
        )
    if isinstance(value, list):
        return any(map(selects_by_foreign_labels, value))
    return isinstance(value, str) and _FOREIGN_LABEL.search(value) is not None


def drop_foreign_marks(source: ManifestSource, metadata: dict[str, Any], path: KeyPath) -> dict[str, Any]:
    """Return labels or annotations without those that only Dynamo's operator reads.

    Args:
        source: Where they are reported.
        metadata: Labels, or annotations.
        path: Theirs.
    """
    foreign = {key for key in metadata if _FOREIGN_LABEL.match(str(key))}
    for key in sorted(foreign):
        source.note((*path, key), "is read by Dynamo's operator alone")
    return {key: value for key, value in metadata.items() if key not in foreign}
