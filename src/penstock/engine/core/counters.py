"""What an engine counts; it writes, servers and metrics read."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from penstock.engine.core.lease import LeaseTerm
from penstock.engine.core.preemption import PreemptionKind


@dataclass(slots=True)
class EngineCounters:
    """Monotonic counts since start, in requests or tokens as vLLM counts them.

    ``preemptions_by`` counts the same preemptions by kind and the victim's priority, ``lease_expiries`` leases by the
    term that ran out, ``lease_renewals`` those whose end a heartbeat has moved, each time.
    """

    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    external_queries: int = 0
    external_hits: int = 0
    lease_renewals: int = 0
    notifications_after_expiry: int = 0
    steps: int = 0
    lease_expiries: Counter[LeaseTerm] = field(default_factory=Counter)
    preemptions_by: Counter[tuple[PreemptionKind, int]] = field(default_factory=Counter)
