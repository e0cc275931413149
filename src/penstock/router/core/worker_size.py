"""What a worker holds, as its graph's engine section or its own metrics say. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerSize:
    """What a worker of one role holds.

    Attributes:
        kv_tokens: In its KV cache, >= 1; None: read from its metrics.
        batch_tokens: Most tokens of one step; None: it has no such bound, or it is unknown.
        requests: Most requests in its engine; None: likewise.
        slot_requests: Requests dispatched to it at a time, where it computes so many; None: slots are counted in tokens.
    """

    kv_tokens: int | None = None
    batch_tokens: int | None = None
    requests: int | None = None
    slot_requests: int | None = None
