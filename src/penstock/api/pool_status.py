"""What the operator says of a GpuPool or ClusterGpuPool, and what its allocator remembers there."""

from __future__ import annotations

from pydantic import Field

from penstock.api.base import Integer, SpecModel, entry
from penstock.api.status import Condition


class PoolGpusStatus(SpecModel):
    """The pool's GPUs now."""

    total: Integer = entry(0, "That its graphs may hold together now.")
    held: Integer = entry(0, "GPUs of existing workers of its graphs, starting and draining ones included.")
    leaving: Integer = entry(0, "Part of held: GPUs of workers that drain or end.")
    free: Integer = entry(0, "Held by none.")
    unavailable: Integer = entry(
        0, "Part of spec.gpus, or without that of its nodes' GPUs, that the nodes do not offer now."
    )
    counted: Integer | None = entry(
        None, "That its nodes offered when they were counted last; null: never yet, or it selects none."
    )
    borrowed: Integer = entry(0, "Held above guarantees.")


class PoolGraphStatus(SpecModel):
    """What one graph may hold, and what the allocator remembers of it; GPUs."""

    name: str = Field(description="Name of the graph; in a ClusterGpuPool namespace/name.")
    guaranteed: Integer = entry(0, "That it gets whenever it wants them.")
    held: Integer = entry(0, "GPUs of its existing workers.")
    granted: Integer = entry(0, "That it may hold.")
    wanted: Integer = entry(0, "That its desired replicas need.")
    target: Integer = entry(0, "That it is to have once others have given back.")
    borrowed: Integer = entry(0, "Held above its guarantee.")
    owed: Integer = entry(0, "GPUs of its guarantee that it wants and does not have yet.")
    serial: Integer = entry(0, "Number of the grant.")
    exposed: Integer = entry(0, "That count for it until it acts under that grant.")
    gained_time: str | None = entry(None, "When the grant was raised last; RFC 3339.")
    lost_time: str | None = entry(
        None, "Time at which the grant was last lowered below what the graph wanted; RFC 3339."
    )
    drain_seconds: Integer | None = entry(
        None, "How long its workers took to drain; null: none has drained yet."
    )
    return_time: str | None = entry(
        None, "Time at which the draining workers are expected to have ended; RFC 3339."
    )


class GpuPoolStatus(SpecModel):
    """State of a pool."""

    observed_generation: Integer = entry(
        0, "Generation that this status describes; -1 until an operator has observed the object."
    )
    conditions: tuple[Condition, ...] = entry(
        (), "Valid, GuaranteesMet, CeilingRespected and, with a nodeSelector, NodesCounted."
    )
    gpus: PoolGpusStatus = entry(PoolGpusStatus(), "The GPUs.")
    graphs: tuple[PoolGraphStatus, ...] = entry((), "The graphs that draw.")
