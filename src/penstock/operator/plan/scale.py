"""What scaling one service means next: the plan that `drain` makes and the operator carries out.

Pure data. Order of carrying out: `begin`, `restore` and `deletion_costs` on the pods, then `spec_replicas`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

LEAVING_COST: Final = -(2**31)
"""Deletion cost of a pod that may go at once; the lowest that Kubernetes accepts."""

DRAINING_COST: Final = LEAVING_COST + 1
"""Deletion cost of a pod that still finishes its requests: it goes before others, after the idle ones."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a pod does now, by its own metrics.

    Attributes:
        running: Requests in progress.
        waiting: Requests queued in the worker.
        kv_usage_fraction: Share of its KV blocks in use, 0 to 1; None: it reports none, as Dynamo's mocker does for
            prefill.
        keeps_leases: Whether KV in use without requests is another worker's to read; on a decode worker it is a cache
            for the next turn.
        idle_s: Seconds between the first and the newest of consecutive looks that all found nothing
            running, nothing waiting and nothing kept for others; 0 after a single one.
    """

    running: int
    waiting: int
    kv_usage_fraction: float | None
    idle_s: float = 0.0
    keeps_leases: bool = True

    @property
    def requests(self) -> int:
        """Requests that would have to finish first."""
        return self.running + self.waiting

    @property
    def is_idle(self) -> bool:
        """Whether this look found nothing to do and nothing held for another worker to read."""
        return self.requests == 0 and not (self.kv_usage_fraction and self.keeps_leases)


@dataclass(frozen=True, slots=True)
class ScalePlan:
    """The next step of one service towards its desired number of replicas.

    Attributes:
        spec_replicas: What the workload's ``spec.replicas`` should be now.
        begin: Pods to mark as draining (serving label, drain time), sorted.
        restore: Pods to put back into service (serving label, drain time and deletion cost removed), sorted.
        deletion_costs: Pods whose deletion cost differs from what it should be, and what it should be.
            0 for a pod in service.
        draining: Pods that are or will be marked, sorted.
        waiting_on: Why each of them cannot leave yet; the same text for the same state.
        leaving: Marked pods that may go at once, sorted.
        done: Whether nothing is left to do: ``spec_replicas`` is the desired number and no pod is marked.
        held: Why nothing is done although it should; empty otherwise.
    """

    spec_replicas: int
    begin: tuple[str, ...] = ()
    restore: tuple[str, ...] = ()
    deletion_costs: Mapping[str, int] = field(default_factory=dict)
    draining: tuple[str, ...] = ()
    waiting_on: Mapping[str, str] = field(default_factory=dict)
    leaving: tuple[str, ...] = ()
    done: bool = False
    held: str = ""
