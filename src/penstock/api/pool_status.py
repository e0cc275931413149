"""Status of a GpuPool or ClusterGpuPool, which also stores the state of the allocator."""

from __future__ import annotations

from pydantic import Field

from penstock.api.base import Integer, SpecModel, entry
from penstock.api.status import Condition


class PoolGpusStatus(SpecModel):
    """GPUs of the pool, as counted last."""

    total: Integer = entry(0, "Number of GPUs that the pool's graphs can hold together now.")
    held: Integer = entry(0, "GPUs of existing workers of its graphs, starting and draining ones included.")
    draining: Integer = entry(0, "Part of `held`: GPUs of workers that are draining or terminating.")
    free: Integer = entry(0, "Number of GPUs that no graph holds.")
    unavailable: Integer = entry(
        0,
        "Number of GPUs of `spec.gpus` (or, without that, of the pool's nodes) that the nodes do not offer now.",
    )
    counted: Integer | None = entry(
        None,
        "Number of GPUs that the pool's nodes offered at the last count; null if they were never counted or the pool selects no nodes.",
    )
    borrowed: Integer = entry(0, "Number of GPUs that graphs hold above their guarantees.")


class PoolGraphStatus(SpecModel):
    """Grant of one graph, and the allocator's state about it; numbers are GPUs."""

    name: str = Field(description="Name of the graph; in a ClusterGpuPool namespace/name.")
    guaranteed: Integer = entry(0, "GPUs that the graph gets whenever it requests them.")
    held: Integer = entry(0, "GPUs of the graph's existing workers.")
    granted: Integer = entry(0, "Maximum GPUs that the graph can hold (its grant).")
    wanted: Integer = entry(0, "GPUs that the graph's desired replicas need.")
    target: Integer = entry(0, "GPUs that the graph will be granted when other graphs have returned theirs.")
    borrowed: Integer = entry(0, "GPUs that the graph holds above its guarantee.")
    shortfall: Integer = entry(0, "GPUs of its guarantee that the graph requests but is not granted yet.")
    serial: Integer = entry(0, "Serial number of the grant, which increases with each change.")
    max_held: Integer = entry(0, "GPUs that count for the graph until it has acknowledged its newest grant.")
    gained_time: str | None = entry(None, "Time at which the grant was last raised; RFC 3339.")
    lost_time: str | None = entry(
        None, "Time at which the grant was last lowered below the graph's request; RFC 3339."
    )
    drain_seconds: Integer | None = entry(
        None, "Learned duration of a drain of its workers; null if none has drained yet."
    )
    return_time: str | None = entry(
        None, "Time at which the draining workers are expected to have ended; RFC 3339."
    )


class GpuPoolStatus(SpecModel):
    """Status of a pool."""

    observed_generation: Integer = entry(
        0, "Generation that this status describes; -1 until an operator has observed the object."
    )
    conditions: tuple[Condition, ...] = entry(
        (), "Valid, GuaranteesMet, CeilingRespected and, with a nodeSelector, NodesCounted."
    )
    gpus: PoolGpusStatus = entry(PoolGpusStatus(), "GPUs of the pool.")
    graphs: tuple[PoolGraphStatus, ...] = entry((), "Graphs that get their GPUs from the pool.")
