"""Checks which workers can transfer KV to each other: vLLM's NIXL connector refuses a peer of another engine version. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from penstock.api import Role
from penstock.router.core.worker import Worker, WorkerPool

NONE: Final[frozenset[str]] = frozenset()


def are_compatible(prefill: Worker, decode: Worker) -> bool:
    """Return whether KV can be transferred from a prefill to a decode worker: their engine versions are equal, or one is unknown."""
    return prefill.version is None or decode.version is None or prefill.version == decode.version


def unpaired_prefills(pool: WorkerPool, serving: Sequence[Worker]) -> frozenset[str]:
    """Return the names of the prefill workers of ``pool`` whose engine version fits none of the decode workers in ``serving``.

    They cannot transfer KV to any of them.
    """
    return frozenset(
        each.name
        for each in pool
        if each.spec.role is Role.PREFILL and not any(are_compatible(each, decode) for decode in serving)
    )


def unpaired_decodes(pool: WorkerPool, prefill: Worker) -> frozenset[str]:
    """Return the names of the decode workers of ``pool`` whose engine version does not fit that of the worker ``prefill``.

    ``prefill`` cannot transfer KV to them.
    """
    return frozenset(
        each.name for each in pool if each.spec.role is Role.DECODE and not are_compatible(prefill, each)
    )
