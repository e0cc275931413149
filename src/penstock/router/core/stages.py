"""The stages that requests pass: which workers of each role can be routed to, which are busy, and which stage is full. Pure.

`penstock.router.core.router` asks before it admits or dispatches a request, and reports what changes a worker's load.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Generic, TypeVar

from penstock.api import Role
from penstock.router.core.dispatch_queue import DispatchQueue
from penstock.router.core.tiers import FirstStage
from penstock.router.core.waiting import Headroom
from penstock.router.core.worker import Worker, WorkerPool
from penstock.router.policy.busy import BusyWorkers

T = TypeVar("T")


class Stages(Generic[T]):
    """The stages of one router, each with the workers of one role: prefill then decode, or aggregated alone.

    ``pool`` contains all workers; ``queues`` and ``busy`` contain, for each role, the dispatch queue, and which workers are
    above a threshold. All times are in simulated seconds.

    Attributes:
        entry: Role of the first stage.
        routable: For each role, the workers that can be routed to, as of the last `refresh`.
        names: For each role, the names of these workers.
    """

    def __init__(
        self, pool: WorkerPool, queues: Mapping[Role, DispatchQueue[T]], busy: Mapping[Role, BusyWorkers]
    ) -> None:
        self._pool, self._queues, self._busy = pool, queues, busy
        self.entry = next(iter(queues))
        self.routable: dict[Role, Sequence[Worker]] = {role: [] for role in queues}
        self.names: dict[Role, frozenset[str]] = {role: frozenset() for role in queues}

    def full(self, role: Role, now_s: float, *, is_new: bool = True) -> Role | None:
        """Return the role (stage) whose workers are all busy, so that a request cannot be admitted; None if it can be.

        If this applies to several stages, the earliest is returned. The workers that can be routed to are refreshed first.
        For a new request, the stage ``role`` and the later ones are checked against thresholds and refusals of workers. For a
        request that was admitted before (``is_new=False``), only ``role`` is checked, and only workers that have themselves
        refused a request for lack of capacity count as busy.
        """
        if not is_new:
            self.refresh(role, now_s)
            return role if self._busy[role].all_at_capacity(self.names[role]) else None
        for each in self.required(role):
            self.refresh(each, now_s)
            names, busy = self.names[each], self._busy[each]
            if not (busy.is_any or busy.has_thresholds):
                continue
            if busy.are_all_busy(names):
                return each
            backlog = 0 if each is Role.DECODE else self._queues[each].backlog_tokens
            if backlog and names and busy.prefill_limit_exceeded(backlog / len(names)):
                return each
        return None

    def required(self, role: Role) -> Iterable[Role]:
        """Return the roles that must have workers, so that a request can be sent to a worker of ``role``.

        These are ``role`` itself and, if it is the first stage, the role of the second stage, which the request needs next.
        """
        return self._queues if role is self.entry else (role,)

    def refresh(self, role: Role, now_s: float) -> None:
        """Update `routable`, `names` and the queue of ``role`` to the workers of this role that can be sent requests at ``now_s``.

        Called before each decision, because a worker can be excluded, or admitted again, by its circuit breaker as time
        passes, without any event.
        """
        workers = self._pool.routable(role, now_s)
        if workers is not self.routable[role] and workers != self.routable[role]:
            self.routable[role] = workers
            self.names[role] = frozenset(each.name for each in workers)
            quarantined = {each.name for each in self._pool if each.keeps_its_cache}
            # Other workers may become busy through the requests that are assigned again.
            out_of_blocks = self._busy[role].out_of_blocks(self.names[role])
            self._queues[role].set_workers(
                workers, now_s, quarantined=quarantined, out_of_blocks=out_of_blocks
            )
            self.update_all_busy(role, now_s)

    def update_busy(self, role: Role, now_s: float, name: str | None) -> None:
        """Decide again whether the worker ``name`` of ``role`` is busy (above a threshold, so that it gets no new requests).

        None decides for every worker of the role. The result is stored in the role's set of busy workers. Does nothing if
        there are no thresholds.
        """
        busy = self._busy[role]
        if not busy.has_thresholds:
            return
        if name is None:
            self.update_all_busy(role, now_s)
            return
        worker = self._pool.get(name)
        if worker is not None:
            queue, tokens = self._queues[role], self.active_prefill_tokens(worker)
            prompts = queue.prompts_at(name) if tokens and len(worker.kv_ranks) > 1 else ()
            peers = queue.workers.peer_tokens(name)
            busy.refresh(worker, prefill_tokens=tokens, peer_tokens=peers, now_s=now_s, prompts=prompts)

    def update_all_busy(self, role: Role, now_s: float) -> None:
        """Decide again, for every worker of a role that can be routed to, whether it is busy, and store this for the role.

        A busy worker is above a threshold, or has refused a request, and gets no new requests.
        """
        names, busy = self.names[role], self._busy[role]
        busy.keep_only(names, now_s)
        if busy.has_thresholds:
            for name in names:
                self.update_busy(role, now_s, name)

    def active_prefill_tokens(self, worker: Worker) -> int:
        """Return the uncached prompt tokens that a worker still has to compute: dispatched to it, or queued for it in this router.

        Returns 0 for a decode worker.
        """
        role = worker.spec.role
        if role is Role.DECODE or role not in self._queues:
            return 0
        return self._queues[role].prefill_tokens(worker.name)

    def entry_capacity(self, now_s: float) -> FirstStage:
        """Return the capacity of the workers of the first stage (prefill or aggregated) at ``now_s``, in simulated seconds.

        It consists of their number, the tokens at which one is busy, and the prefill throughput of one.
        """
        busy, workers = self._busy[self.entry], len(self.names[self.entry])
        if not busy.has_thresholds:
            return FirstStage(workers)
        limit = busy.thresholds.prefill_limit(busy.batch_tokens)
        return FirstStage(workers, limit or 0.0, busy.computed_tokens_per_s(now_s))

    def headroom_after(self, role: Role) -> Headroom:
        """Return which requests the stages other than ``role`` have capacity for: all, only urgent ones, or none.

        Urgent requests are those of the system and premium tiers. The result limits what may be sent to the workers of
        ``role``, because a prompt is computed to no use while no decode worker can take it. A stage admits all requests if
        any of its workers has free KV blocks, none if each has refused a request, else only urgent ones.
        """
        max_headroom = Headroom.ANY
        for each in self._queues:
            names, busy = self.names[each], self._busy[each]
            if each is role or busy.any_has_blocks(names):
                continue
            max_headroom = min(
                max_headroom, Headroom.NONE if busy.all_at_capacity(names) else Headroom.URGENT
            )
        return max_headroom
