"""One worker as discovery reports it, and what it holds. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.api import Role


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


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """A worker that exists or is about to.

    Attributes:
        name: Unique name; the local backend's entry name.
        role: prefill, decode or aggregated.
        url: Base URL without a trailing slash.
        ready: Discovery says that it serves.
        draining: Discovery says that it is leaving: nothing new goes there.
        supervised: It is restarted when it dies, so requests may wait for it.
        incarnation: Changes with every start of the process; what was learnt about the last one is void.
        reason: Why it is not ready, or empty.
        kv_events: Where it publishes KV events; None: at its host on the graph's port, if at all.
        kv_replay: Where it answers for what it published before; of meaning beside ``kv_events``. None: nowhere.
    """

    name: str
    role: Role
    url: str
    ready: bool = True
    draining: bool = False
    supervised: bool = False
    incarnation: str = ""
    reason: str = ""
    kv_events: str | None = None
    kv_replay: str | None = None
