"""Dispatches requests that are suspected of crashing workers, each to a worker on which it runs alone. Pure; called by `router`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from penstock.api import Role
from penstock.router.core.dispatch_queue import DispatchQueue
from penstock.router.core.retries import Assignment, Effects
from penstock.router.core.stages import Stages
from penstock.router.core.suspects import ALONE, IsolatedRequests
from penstock.router.core.worker import Worker, WorkerPool
from penstock.router.policy.arrival import QueuedRequest

T = TypeVar("T")


class SuspectDispatch(Generic[T]):
    """Runs each suspect (a request suspected of crashing its worker) alone on a worker, for all stages of one router.

    A worker that is reserved for suspects gets no other requests. ``pool`` contains all workers, ``queues`` the dispatch
    queue of each role, and ``stages`` the workers of each role that can be routed to.

    Attributes:
        has_any: Whether a suspect waits or runs in any stage; while none does, the other methods need not be called.
    """

    def __init__(self, pool: WorkerPool, queues: Mapping[Role, DispatchQueue[T]], stages: Stages[T]) -> None:
        self._pool, self._queues, self._stages = pool, queues, stages
        self._isolated: dict[Role, IsolatedRequests[T]] = {role: IsolatedRequests(role) for role in queues}
        # Suspects that wait or run in a stage, and those in the first stage that must run alone in a later one.
        self._suspects: set[tuple[Role, T]] = set()
        self._awaiting_isolation: set[T] = set()
        self.has_any = False

    def add(self, item: T, role: Role) -> None:
        """Record that the request ``item``, which is suspected of crashing workers, waits for a worker of ``role``."""
        self._suspects.add((role, item))
        self.has_any = True

    def adopt(self, assignment: Assignment[T]) -> None:
        """Record that a request suspected of crashing workers runs alone on its worker, to which another router has sent it.

        ``assignment`` contains the request and the worker. No other request is sent to this worker until `remove` is called
        for the request, or until the assignment says that the request is no longer suspected.
        """
        self.add(assignment.item, assignment.role)
        self._isolated[assignment.role].enter(assignment)

    def remove(self, item: T, role: Role) -> None:
        """Record that a request suspected of crashing workers no longer waits for, or runs on, a worker of ``role``.

        Other requests can then be sent to its worker again. Does nothing for a request that was not added for this role.
        """
        if self.has_any:
            self._suspects.discard((role, item))
            self.has_any = bool(self._suspects)
            self._isolated[role].leave(item)
            self._awaiting_isolation.discard(item)

    def dispatch(
        self, role: Role, now_s: float, assign: Callable[[QueuedRequest[T], Role, float], Assignment[T]]
    ) -> Effects[T]:
        """Assign requests suspected of crashing workers to workers on which each runs alone, the one that has waited longest first.

        Returns their assignments; the caller then sends each request to its worker. The list is empty if none waits in the
        queue of ``role``, or if no worker is free for the first of them. In the first stage (prefill), such a request also
        waits until it can run alone on a worker of the next stage (decode), so that no KV is held while it waits there.

        Args:
            role: Role of the workers.
            now_s: Current time in simulated seconds.
            assign: Called with a request that has left the queue, the role, and the current time; counts the request as
                running on its worker, and returns its assignment.
        """
        queue, isolated = self._queues[role], self._isolated[role]
        effects: Effects[T] = []
        for item, queued in list(queue.isolated.items()):
            later = [each for each in queued.arrival.alone_at if each is not role and each in self._queues]
            if (
                role is self._stages.entry
                and later
                and not all(self._has_free_worker(each, now_s) for each in later)
            ):
                break
            is_alone = role in queued.arrival.alone_at
            if is_alone:
                worker = None if isolated.has_uncleared else self._free_worker(role, now_s)
            else:
                worker = min(self._stages.routable[role], key=lambda each: each.inflight_tokens)
            if worker is None:
                break
            if later:
                self._awaiting_isolation.add(item)
            reason = ALONE if is_alone else "a suspect of deaths at the next stage"
            started = queue.dispatch_isolated(item, worker.name, now_s, reason=reason)
            assignment = assign(started, role, now_s)
            if is_alone:
                isolated.enter(assignment)
            effects.append(assignment)
        return effects

    def are_all_reserved(self, role: Role) -> bool:
        """Return whether every worker of a role is reserved for requests suspected of crashing workers.

        Other requests then have to wait. True if the role has no worker that can be routed to.
        """
        return self._stages.names[role] <= self.reserved_workers(role)

    def _has_free_worker(self, role: Role, now_s: float) -> bool:
        """Return whether a suspect that comes from the first stage would find a worker at once on which it can run alone."""
        self._stages.refresh(role, now_s)
        is_awaited = (
            self._awaiting_isolation or self._queues[role].isolated or self._isolated[role].has_uncleared
        )
        return not is_awaited and self._free_worker(role, now_s) is not None

    def _free_worker(self, role: Role, now_s: float) -> Worker | None:
        peers = self._queues[role].workers
        return self._isolated[role].free(
            self._stages.routable[role],
            self._present_workers(role),
            lambda worker: not (worker.may_be_gone(now_s) or peers.peer_tokens(worker.name)),
        )

    def reserved_workers(self, role: Role) -> frozenset[str]:
        """Return the names of the workers of ``role`` that get only requests suspected of crashing workers now.

        These are the workers on which such a request runs that is still suspected and, if one waits but none runs, the worker
        that is kept free for it.
        """
        entry = self._queues[self._stages.entry]
        is_awaited = bool(self._queues[role].isolated)
        if role is not self._stages.entry:
            is_awaited |= bool(self._awaiting_isolation) or any(
                role in each.arrival.alone_at for each in entry.isolated.values()
            )
        return self._isolated[role].closed(
            self._stages.routable[role], self._present_workers(role), is_awaited=is_awaited
        )

    def _present_workers(self, role: Role) -> list[Worker]:
        """Return the workers of a role that are not draining, whether they serve or not."""
        return [
            each for each in self._pool if each.spec.role is role and not (each.spec.draining or each.drained)
        ]
