"""What the rules are set to; built from the options once and recorded in the ledger's header."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock_graph.models import Role

MAX_BACKOFF_INTERVALS = 16
"""Chosen: 8 minutes at the default interval; long enough to stop churn, short enough to notice a repair."""


@dataclass(frozen=True, slots=True)
class DecideConfig:
    """Thresholds, budgets and intervals. Defaults are the planner document's.

    Attributes:
        adjustment_interval_s: Modelled seconds between decisions, > 0.
        metric_pulling_interval_s: Modelled seconds between pulls, in (0, adjustment_interval_s].
        max_gpu_budget: Ceiling of prefill + decode GPUs together, draining workers' included; None: no ceiling.
        min_gpu_budget: Floor of each role's GPUs, >= 0.
        kv_up: Scale decode (or aggregated) up above this mean KV usage fraction, open.
        kv_down: Scale it down below this, open.
        queue_up: Scale prefill up above this many queued requests per prefill worker, open.
        queue_down: Scale it down below this, open.
        decode_gpus: GPUs of one decode or aggregated engine, >= 0.
        prefill_gpus: GPUs of one prefill engine, >= 0.
        no_operation: Decide and record, never act.
        min_replicas: Floor by role beside the GPU floor; absent: 0.
        max_replicas: Ceiling by role beside the GPU ceiling; absent: none.
        decode_grace_intervals: NEW_DECODE_WORKER_GRACE_PERIOD, intervals without scale-down after a new
            decode (or aggregated) worker, >= 0.
        queue_buffer_intervals: NEW_PREFILL_WORKER_QUEUE_BUFFER_PERIOD, intervals over which a falling prefill
            queue is extrapolated, >= 0; 0 looks no further than the interval's end.
    """

    adjustment_interval_s: float = 30.0
    metric_pulling_interval_s: float = 1.0
    max_gpu_budget: int | None = 8
    min_gpu_budget: int = 1
    kv_up: float = 0.9
    kv_down: float = 0.5
    queue_up: float = 0.5
    queue_down: float = 0.2
    decode_gpus: int = 1
    prefill_gpus: int = 1
    no_operation: bool = False
    min_replicas: Mapping[Role, int] = field(default_factory=dict)
    max_replicas: Mapping[Role, int] = field(default_factory=dict)
    decode_grace_intervals: int = 3
    queue_buffer_intervals: int = 3

    def engine_gpus(self, role: Role, observed: int) -> int:
        """Return the GPUs of one engine of ``role``: the larger of configured and observed.

        The larger one keeps the ceiling true in either account.
        """
        return max(self.prefill_gpus if role is Role.PREFILL else self.decode_gpus, observed)

    def floor(self, role: Role, engine_gpus: int) -> int:
        """Return the fewest replicas of ``role``: n x GPUs per engine >= min_gpu_budget, and min_replicas.

        Never below 1: from zero workers load gives no signal to come back on.
        """
        by_gpus = math.ceil(self.min_gpu_budget / engine_gpus) if engine_gpus > 0 else 1
        return max(1, by_gpus, self.min_replicas.get(role, 0))

    def thresholds(self, role: Role) -> tuple[float, float]:
        """Return (down, up) of the role's signal."""
        if role is Role.PREFILL:
            return self.queue_down, self.queue_up
        return self.kv_down, self.kv_up
