"""The GPU pool from which the router's graph gets its GPUs, on this machine, for the live page; from files, read-only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from penstock.core.local_state import ARBITER_KEY
from penstock.core.printable import printable
from penstock.gpu_pool.allocator import Grant
from penstock.gpu_pool.waiting import GraphHolding, pool_rows
from penstock.router.ui.planner import MALFORMED_ERRORS


def local_pool(statefile: Path | None) -> dict[str, Any] | None:
    """Return the state of the GPU pool of a graph on this machine: which graphs hold, want and wait for GPUs in it.

    ``statefile`` is the file in which the local backend lists the graph's processes; it names the pool. The result contains
    ``name``, ``gpus`` (size of the pool), ``held`` (GPUs in use by all graphs), ``note`` (empty here) and ``graphs`` (one entry
    per graph). Returns None if ``statefile`` is None, if it names no pool, or if a file cannot be read.
    """
    if statefile is None:
        return None
    try:
        name = orjson.loads(statefile.read_bytes())[ARBITER_KEY].get("pool")
        if not name:
            return None
        pool = printable(orjson.loads((statefile.parent / f"{name}.pool").read_bytes()))
        holdings = {
            graph: GraphHolding(member["guaranteed"], held, Grant(**pool["grants"].get(graph, _NOTHING)))
            for graph, member in sorted(pool["members"].items())
            if (held := _held(statefile.parent / f"{graph}.json", member)) is not None
        }
        rows = [asdict(each) for each in pool_rows(holdings)]
    except (OSError, *MALFORMED_ERRORS):
        return None
    held = sum(each.held for each in holdings.values())
    return {"name": pool["name"], "gpus": pool["gpus"], "held": held, "note": "", "graphs": rows}


_NOTHING = {"gpus": 0, "serial": 0, "target": 0, "wanted": 0}


def _held(statefile: Path, member: Mapping[str, Any]) -> int | None:
    """Return the number of GPUs that a graph holds; None if it has left the pool."""
    try:
        state = orjson.loads(statefile.read_bytes())
    except FileNotFoundError:
        return len(member["starts_on"]) if member["is_arriving"] else None
    return sum(
        len(each.get("resources", {}).get("gpus", ())) for key, each in state.items() if key != ARBITER_KEY
    )
