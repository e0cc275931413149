"""What a person has changed in a graph's manifest since `penstock up`; `penstock doctor --local` asks.

Router and planner start, and start again after a crash, by the copy that `up` keeps alongside the logs. A running router
follows two sections of the manifest itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from penstock.api.manifests import load_graph
from penstock.local.statefile import ArbiterInfo

_FOLLOWED: Final = ("router.admission", "router.tiers")
"""Sections that a running router takes over from the manifest, except for the following keys."""
_AT_START: Final = ("router.tiers.enabled", "router.tiers.keysFile", "router.tiers.keysSecret")


def kept_path(log_dir: Path, namespace: str) -> Path:
    """Return where `up` keeps the manifest that a graph was started with."""
    return log_dir / f"{namespace}.graph.yaml"


def waiting_edits(arbiter: ArbiterInfo) -> tuple[str, ...]:
    """Return the keys below ``spec`` whose edits wait for the next `up`, sorted.

    Raises:
        InvalidSpecError: the manifest or its copy cannot be read, or is wrong.
    """
    files = (kept_path(Path(arbiter.log_dir), arbiter.namespace), Path(arbiter.graph))
    before, after = (load_graph(file, draws=bool(arbiter.pool)).spec.to_manifest() for file in files)
    changed = sorted(_differences(before, after, ""))
    return tuple(key for key in changed if key.startswith(_AT_START) or not key.startswith(_FOLLOWED))


def _differences(before: Any, after: Any, key: str) -> Iterator[str]:
    if before == after:
        return
    if not (isinstance(before, dict | None) and isinstance(after, dict | None)):
        yield key
        return
    before, after = before or {}, after or {}  # a section that is all default is left out
    for each in {*before, *after}:
        yield from _differences(before.get(each), after.get(each), f"{key}.{each}" if key else each)
