"""A worker that has no room for a request: another is asked, each at most once, before the client is refused."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from penstock.api import Role
from penstock.router.admission import Admission
from penstock.router.metrics import RouterMetrics
from penstock.router.proxy.call import CompletionCall
from penstock.router.proxy.failures import AT_CAPACITY, StageFailed

R = TypeVar("R")


async def asking_others(
    call: CompletionCall,
    role: Role,
    attempt: Callable[[], Awaitable[R]],
    *,
    admission: Admission,
    metrics: RouterMetrics,
) -> R:
    """Make an attempt at a stage again while workers refuse it for want of room.

    Such a refusal is no failure: it costs nothing of the retry budget, and says nothing against the worker.

    Args:
        call: The request; it avoids the workers that have refused it.
        role: Of the stage's workers.
        attempt: Acquires a worker and has it answer.
        admission: Keeps who is at capacity.
        metrics: Counts.

    Returns:
        What the attempt returns.

    Raises:
        AllBusy: every worker has refused it.
        StageFailed: an attempt failed otherwise.
    """
    while True:
        try:
            return await attempt()
        except StageFailed as stage:
            failure = stage.failure
            if failure.reason != AT_CAPACITY or call.responder.started:
                raise
            worker = failure.workers[0]
            admission.refused_at_capacity(worker)
            metrics.retries[failure.reason] += 1
            if worker.name in call.tries.avoid:
                raise admission.all_busy(role) from stage
            call.tries.avoid |= {worker.name}
