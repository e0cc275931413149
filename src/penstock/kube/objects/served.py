"""Stores in a graph's status which specification the operator applies, so that a later edit that is refused stops nothing.

Pure. The API server validates most of a graph, and the operator the rest, for example the pod that results from a
podTemplate. While the newest edit is refused, budget, drains, scaling and repairs continue with the last
specification that was valid. It is stored as text in the graph's status, in the same write as the observed state. So
an operator that is restarted finds it, and the planner scales the specification that is applied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

MAX_BYTES: Final = 256 * 1024
"""Maximum length in bytes of a stored specification. Chosen: together with the graph itself it is well below etcd's
1.5 MiB per object, and the largest sample has 3 kB. A longer specification is applied too, but is lost when the
operator restarts."""


@dataclass(frozen=True, slots=True)
class ServedSpec:
    """The specification of a graph that the operator applies; it is an earlier one if the newest is refused.

    Attributes:
        generation: ``metadata.generation`` of the graph with this specification.
        text: The specification as JSON; empty if it is too long to be stored.
    """

    generation: int
    text: str


def current_spec(graph: Mapping[str, Any]) -> ServedSpec:
    """Return a graph's newest specification, whether or not the operator applies it."""
    text = orjson.dumps(graph["spec"], option=orjson.OPT_SORT_KEYS)
    short_text = text.decode() if len(text) <= MAX_BYTES else ""
    return ServedSpec(graph["metadata"].get("generation", 0), short_text)


def stored_spec(graph: Mapping[str, Any]) -> ServedSpec | None:
    """Return the specification that is stored in a graph's status; None if there is none or it is unreadable."""
    status = graph.get("status") or {}
    text, generation = status.get("servedSpec"), status.get("servedGeneration")
    if not isinstance(text, str) or not isinstance(generation, int):
        return None
    try:
        spec = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return ServedSpec(generation, text) if isinstance(spec, dict) else None


def with_spec(graph: Mapping[str, Any], served: ServedSpec) -> dict[str, Any]:
    """Return a graph with ``served`` as its specification; ``served.text`` must not be empty."""
    return {**graph, "spec": orjson.loads(served.text)}
