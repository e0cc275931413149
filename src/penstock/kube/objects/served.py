"""Which edit of a graph is carried out, kept in its status, so that a later edit that is refused stops nothing.

Pure. The API server checks most of a graph and the operator the rest: what a podTemplate makes of a pod, say. While the
newest edit is refused, budget, drains, scaling and repairs continue by the last one that was not. It is kept as the text of
its specification in the graph's status, in the write that says what was observed, so that an operator that is
restarted finds it, and so that the planner scales what is carried out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

MAX_BYTES: Final = 256 * 1024
"""Longest specification that is kept. Chosen: with the graph itself well within etcd's 1.5 MiB for an object; the
largest sample takes 3 kB. A longer one is carried out as well, until the operator restarts."""


@dataclass(frozen=True, slots=True)
class ServedSpec:
    """The edit that is carried out: its generation and its specification as JSON; empty: too long to be kept."""

    generation: int
    text: str


def current_spec(graph: Mapping[str, Any]) -> ServedSpec:
    """Return a graph's newest edit."""
    text = orjson.dumps(graph["spec"], option=orjson.OPT_SORT_KEYS)
    kept = text.decode() if len(text) <= MAX_BYTES else ""
    return ServedSpec(graph["metadata"].get("generation", 0), kept)


def kept_spec(graph: Mapping[str, Any]) -> ServedSpec | None:
    """Return the edit that a graph's status keeps; None: it keeps none that can be read."""
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
    """Return a graph as that edit, whose text is kept, made it."""
    return {**graph, "spec": orjson.loads(served.text)}
