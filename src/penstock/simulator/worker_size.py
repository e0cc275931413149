"""What a simulated worker holds, as a live one tells its router by its metrics and its graph."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.simulator.scenario import PoolSpec, ProfiledModel


@dataclass(frozen=True, slots=True)
class WorkerSize:
    """What a worker of one role holds.

    Attributes:
        kv_tokens: In its KV cache, >= 1.
        batch_tokens: Most tokens of one step; None: it has no such bound.
        requests: Most requests in its engine; None: it has no such bound.
    """

    kv_tokens: int
    batch_tokens: int | None
    requests: int | None = None


def worker_size(pool: PoolSpec, kv_tokens: int) -> WorkerSize:
    """Return the size of a pool's workers, of which each caches ``kv_tokens``."""
    model = pool.model
    if not isinstance(model, ProfiledModel):
        return WorkerSize(kv_tokens, None)
    return WorkerSize(kv_tokens, model.max_num_batched_tokens, model.request_limit)
