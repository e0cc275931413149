"""Moves the streams of a draining worker to other workers, so that a drain does not last as long as its longest response.

`handler` reports the streams; the router's tick decides about moves. A stream is moved in the same way as it is resumed after
its worker's death, but only if it can be resumed and another worker has capacity for it.

A tick only compares counts for each stream. The text of a stream is read when it is about to move, and only the part that its
record has not read yet.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from penstock.api import Role
from penstock.core.errors import StreamMoved
from penstock.core.http.streaming import StreamingResponse
from penstock.core.logs import get_logger
from penstock.router.context import RouterContext
from penstock.router.core.moves import (
    MAX_CONCURRENT_MOVES,
    MAX_LOOKUPS,
    cached_tokens,
    is_draining,
    is_worth_moving,
    prefill_token_s,
)
from penstock.router.core.worker import Worker
from penstock.router.proxy.call import CompletionCall
from penstock.router.proxy.stream import RelayMeter
from penstock.router.proxy.stream_continuations import StreamContinuations

log = get_logger(__name__)


class _Stream(NamedTuple):
    """A stream that its worker is sending."""

    meter: RelayMeter
    response: StreamingResponse


class StreamMoves:
    """Moves streams away from workers that are draining (finish their requests and get no new ones), for one router.

    Only streams that another worker could resume are moved. ``context`` contains the objects that the parts of the router
    share, and ``continuations`` resumes the streams.
    """

    def __init__(self, context: RouterContext, continuations: StreamContinuations) -> None:
        self._core = context.admission.core
        self._clock = context.clock
        self._prompt_costs = context.prompt_costs
        self._continuations = continuations
        self._after_s = context.settings.config.drain.migrate_after_seconds
        self._streams: dict[Worker, dict[CompletionCall, _Stream]] = {}
        self._drains_since_s: dict[Worker, float] = {}
        self._moving: set[CompletionCall] = set()
        self._lookups_left = 0

    def follow(self, call: CompletionCall, meter: RelayMeter, response: StreamingResponse) -> None:
        """Record that a worker has started to send the stream of ``call`` as ``response``, which ``meter`` measures.

        If the stream was moved here from a draining worker, the move has ended. `tick` can move it from this worker too,
        if it drains and another worker could resume the stream.
        """
        self._moving.discard(call)
        if call.resumable is not None and self._after_s is not None:
            self._streams.setdefault(meter.assignment.worker, {})[call] = _Stream(meter, response)

    def leave(self, call: CompletionCall, worker: Worker) -> None:
        """Record that ``worker`` no longer sends the stream of ``call``; does nothing if `follow` was not called for it."""
        streams = self._streams.get(worker)
        if streams is not None and streams.pop(call, None) is not None and not streams:
            del self._streams[worker]

    def end(self, call: CompletionCall) -> None:
        """Record that the request of ``call`` has ended, so that it no longer counts as a stream that is being moved.

        At most 8 streams of a router are moved at a time. Does nothing for a stream that is not being moved.
        """
        self._moving.discard(call)

    def tick(self) -> None:
        """Move streams from workers that have been draining for ``migrateAfterSeconds`` (simulated) to other workers.

        Does nothing if that time is not configured. Called several times a second.
        """
        after_s = self._after_s
        if after_s is None:
            return
        now_s, pool = self._clock.now_s(), self._core.pool
        since_s = self._drains_since_s
        for worker in [each for each in since_s if not is_draining(each, pool) or each not in self._streams]:
            del since_s[worker]
        self._lookups_left = MAX_LOOKUPS
        for worker, streams in list(self._streams.items()):
            if is_draining(worker, pool) and now_s - since_s.setdefault(worker, now_s) >= after_s:
                self._move(worker, streams, now_s)

    def _move(self, worker: Worker, streams: dict[CompletionCall, _Stream], now_s: float) -> None:
        answering = worker.spec.role
        roles = {self._core.entry, answering} if answering is Role.DECODE else {answering}
        if not all(self._has_headroom(role, worker, now_s) for role in roles):
            return
        prefill = [each for each in self._core.pool.routable(self._core.entry, now_s) if each is not worker]
        token_s = prefill_token_s(each.speed for each in prefill)
        for call, stream in list(streams.items()):
            if len(self._moving) >= MAX_CONCURRENT_MOVES:
                return
            if not (call.machine.may_move and self._is_worth_moving(call, stream.meter, worker, token_s)):
                continue
            if not self._continuations.can_continue(call):
                del streams[call]
                continue
            self._moving.add(call)
            log.debug("stream leaves a draining worker", worker=worker.name)
            stream.response.break_off(StreamMoved(f"{worker.name} drains"))
        if not streams:
            del self._streams[worker]

    def _is_worth_moving(
        self, call: CompletionCall, meter: RelayMeter, worker: Worker, token_s: float | None
    ) -> bool:
        """Return whether moving a stream is worthwhile; its prompt is looked up only if the cached tokens are decisive."""
        progress = self._continuations.progress_of(call, meter)
        if is_worth_moving(progress, worker.speed, token_s):
            return True
        if not is_worth_moving(
            replace(progress, cached_tokens=progress.prompt_tokens), worker.speed, token_s
        ):
            return False
        if not self._lookups_left:
            return False
        self._lookups_left -= 1
        # Put last, so that the other streams are looked up first the next time.
        streams = self._streams[worker]
        streams[call] = streams.pop(call)
        cached = self._cached_tokens(call, worker)
        return is_worth_moving(replace(progress, cached_tokens=cached), worker.speed, token_s)

    def _cached_tokens(self, call: CompletionCall, worker: Worker) -> int:
        """Return the number of a prompt's tokens expected in the cache of the worker that would compute it again."""
        if call.keyed is None:
            # There is no prefix index, so the number found the first time is assumed.
            return min(call.cached_tokens or 0, call.prompt_tokens)
        entry = self._core.entry
        arrival = call.arrival(entry, frozenset(), self._prompt_costs.bytes_per_token)
        queues = self._core.queues[entry].workers.eligible
        others = (each for name, each in queues.items() if name != worker.name)
        return min(cached_tokens(arrival, others), call.prompt_tokens)

    def _has_headroom(self, role: Role, worker: Worker, now_s: float) -> bool:
        """Return whether another worker of a role has capacity for a stream."""
        others = (each for each in self._core.pool.routable(role, now_s) if each is not worker)
        return any(others) and self._core.stages.full(role, now_s) is None
