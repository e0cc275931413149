"""Which workers' versions can hand KV over: vLLM's NIXL connector refuses a peer of another version. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from penstock.api import Role
from penstock.router.core.worker import Worker, WorkerPool

NONE: Final[frozenset[str]] = frozenset()


def pair(prefill: Worker, decode: Worker) -> bool:
    """Return whether KV may come from one worker to the other; a version that is not known refuses nothing."""
    return prefill.version is None or decode.version is None or prefill.version == decode.version


def unpaired_prefills(pool: WorkerPool, serving: Sequence[Worker]) -> frozenset[str]:
    """Return the names of the prefill workers with which no serving decode worker pairs."""
    return frozenset(
        each.name
        for each in pool
        if each.spec.role is Role.PREFILL and not any(pair(each, decode) for decode in serving)
    )


def unpaired_decodes(pool: WorkerPool, prefill: Worker) -> frozenset[str]:
    """Return the names of the decode workers with which a prefill worker does not pair."""
    return frozenset(each.name for each in pool if each.spec.role is Role.DECODE and not pair(prefill, each))
