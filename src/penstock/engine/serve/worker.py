"""Drives the engine core in real time: one timer, the response streams, leases, and the worker's lateness.

Every step is processed at its simulated time, or as soon after it as this process wakes up. The schedule itself never
moves, so lateness appears in `lag` and is not added to the simulated times.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Iterable
from typing import Any

from penstock.core.clock import LagTracker, SimulatedClock
from penstock.core.logs import get_logger
from penstock.engine.core.engine import Engine, StepOutcome
from penstock.engine.core.kv_blocks import prefix_keys
from penstock.engine.core.request_slots import RequestSlots
from penstock.engine.core.requests import EngineRequest, EngineRole, FinishReason, RequestState
from penstock.engine.core.timeline import Timeline
from penstock.engine.serve.kv_publisher import KvPublisher
from penstock.engine.serve.metrics import EngineMetrics, IgnoredNotification
from penstock.engine.serve.notifications import KvReading, Notification
from penstock.engine.serve.settings import LoadFailurePolicy, ServeSettings
from penstock.engine.serve.streams import Reply
from penstock.engine.serve.words import adapter_seed

log = get_logger(__name__)

STEPS_PER_WAKE = 256
"""Maximum number of steps that are processed at once. Chosen: a worker that is late sends data and reads its sockets in between."""
_TIMER_S = 0.001
"""Resolution of uvloop's timers: one millisecond."""


class ServedWorker:
    """One simulated engine and its clients.

    Attributes:
        settings: Settings of the worker.
        clock: Clock that converts real to simulated seconds.
        lag: Samples of how late, in simulated seconds, steps were processed.
        timeline: Timeline of the engine.
        engine: The engine.
        metrics: Metrics of the worker.
        reading: Prompts whose KV is read from other workers, and the messages to these workers.
        publisher: Publisher of KV events; None if they are disabled.
        port: Port at which other workers reach this worker; 0 until it listens.
    """

    def __init__(
        self,
        settings: ServeSettings,
        clock: SimulatedClock,
        group: asyncio.TaskGroup,
        slots: RequestSlots[Any],
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.lag = LagTracker()
        self.timeline = Timeline(Engine(settings.engine, settings.latency()), clock.now_s())
        self.engine = self.timeline.engine
        self.metrics = EngineMetrics(settings, self.timeline, self.lag, slots, now_s=clock.now_s)
        self._loop = asyncio.get_running_loop()
        self._replies: dict[str, Reply] = {}
        self.reading = KvReading(
            group, settings, self.metrics, on_lost=self._fail_load, on_confirmed=self._let_go_on
        )
        self.publisher = (
            KvPublisher(settings.kv_events, settings.engine.limits.block_size)
            if settings.kv_events.is_on
            else None
        )
        self.port = 0
        self._engine_id = str(uuid.uuid4())
        self._timer: asyncio.Handle | None = None
        self._timer_due_s = math.inf
        self._early_for_s = -math.inf

    @property
    def is_idle(self) -> bool:
        """Whether no request, transfer, kept prompt, response or notification is left."""
        return self.timeline.is_idle and not self._replies and self.reading.is_idle

    async def close(self) -> None:
        """Stop the timer, and close connections to other workers and subscribers."""
        if self._timer is not None:
            self._timer.cancel()
        if self.publisher is not None:
            self.publisher.close()
        await self.reading.close()

    # -- requests -------------------------------------------------------------------------------------

    def submit(self, reply: Reply) -> None:
        """Pass a request to the engine; ``reply.done`` is set when the response is complete or the client has disconnected."""
        self.reading.track(reply)
        self._submit(reply)

    def _submit(self, reply: Reply, *, is_local: bool = False) -> None:
        self._replies[reply.request_id] = reply
        call = reply.call
        remote = None if is_local else call.remote
        keys = (
            prefix_keys(call.prompt, self.settings.engine.limits.block_size, seed=adapter_seed(call.adapter))
            if self.settings.flags.enable_prefix_caching
            else ()
        )
        self.timeline.submit(
            EngineRequest(
                reply.request_id,
                call.prompt_tokens,
                call.output_tokens,
                self.clock.now_s(),
                keys,
                call.priority,
                FinishReason.STOP if call.ends_by_stop else FinishReason.LENGTH,
                load_remote=remote is not None,
                remote_tokens=None if remote is None else remote.tokens,
                pin_blocks=call.pin,
                prompt=call.prompt,
                adapter=call.adapter,
            )
        )
        self._arm()

    def abort(self, reply: Reply, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request whose client has disconnected, or whose KV could not be fetched; does nothing if it is unknown."""
        if self._replies.pop(reply.request_id, None) is None:
            return
        now_s = self.clock.now_s()
        self.reading.forget(reply, is_read_pending=True)
        # A held request may have ended in the engine although its client has not received the response.
        if self.timeline.abort(reply.request_id, now_s) or reply.is_held:
            self.metrics.finished[reason] += 1
        reply.abandon()
        self.timeline.retry(now_s)
        self._arm()

    def notified(self, message: Notification) -> list[str]:
        """Process a message from another worker; return the IDs of requests that have no lease, which are otherwise ignored."""
        if message.engine_id != self._engine_id:
            self.metrics.ignored[IgnoredNotification.WRONG_ENGINE] += 1
            return message.ids
        now_s = self.clock.now_s()
        self._catch_up(now_s)
        # Heartbeats first: a message may have a heartbeat and, queued slightly later, a read with the same ID.
        unknown = self.engine.pinned.renew(message.heartbeat, now_s)
        self.metrics.heartbeats_received += bool(message.heartbeat)
        self.metrics.ignored[IgnoredNotification.UNKNOWN_REQUEST] += len(unknown)
        unknown += self.engine.pinned.read(message.reads)
        self.timeline.retry(now_s)
        self._arm()
        return unknown

    def clear_cache(self) -> bool:
        """Empty the prefix cache; return False, and change nothing, if any block is in use."""
        is_cleared = self.engine.pool.clear()
        self._publish()
        return is_cleared

    # -- time -----------------------------------------------------------------------------------------

    def _publish(self) -> None:
        if self.publisher is not None and (facts := self.engine.take_kv_facts()):
            self.publisher.publish(facts)

    def _arm(self) -> None:
        self._publish()
        due = [at for at in (self.timeline.next_due_s(), self.reading.next_s()) if at is not None]
        due_s = min(due, default=math.inf)
        if due_s == self._timer_due_s and self._timer is not None:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_due_s = due_s
        if due_s == math.inf:
            return
        delay_s = self.clock.to_real_s(due_s - self.clock.now_s())
        # If a timer fired slightly early, run again in the next turns of the loop instead of setting another
        # timer or starting a short step; at high speeds that would keep the processor busy all the time.
        if delay_s <= 0 or (due_s == self._early_for_s and delay_s < _TIMER_S / 2):
            self._timer = self._loop.call_soon(self._wake)
        else:
            self._timer = self._loop.call_later(max(1, round(delay_s / _TIMER_S)) * _TIMER_S, self._wake)

    def _wake(self) -> None:
        now_s = self.clock.now_s()
        self._early_for_s = self._timer_due_s if now_s < self._timer_due_s else -math.inf
        self._timer = None
        self._timer_due_s = math.inf
        self._catch_up(now_s)
        self.reading.send_due(now_s)
        self._arm()

    def _catch_up(self, now_s: float) -> None:
        outcomes = self.timeline.run_until(now_s, max_steps=STEPS_PER_WAKE)
        self._take_events()
        for outcome in outcomes:
            self.lag.record(now_s - outcome.end_s)
            self.metrics.observe_step(outcome)
            self._deliver_finished(outcome)
        # First tokens are sent before other tokens, because TTFT matters more than that short delay.
        for outcome in outcomes:
            self._pump(outcome.started)
        if outcomes:
            self._pump(self.engine.batcher.decoding)

    def _pump(self, states: Iterable[RequestState]) -> None:
        replies, outputs_of = self._replies, self.engine.batcher.outputs_of
        for state in states:
            reply = replies.get(state.request.request_id)
            if reply is not None and reply.call.stream:
                reply.pump(state, outputs_of(state))

    def _take_events(self) -> None:
        events = self.engine.take_events()
        for transfer in events.transfers:
            self.metrics.observe_transfer(transfer)
            reply = self._replies.get(transfer.state.request.request_id)
            if reply is not None:
                reply.transfer_s = (transfer.started_s, transfer.done_s)
                self.reading.arrived(reply)
        for state in events.declined:
            reply = self._replies.get(state.request.request_id)
            if reply is not None:
                self.reading.declined(reply)
        for state in events.dropped:
            self._fail_dropped(state)
        for request_id in events.expired:
            log.warning("lease expired before the blocks were read", request_id=request_id)

    def _fail_dropped(self, state: RequestState) -> None:
        self.metrics.finished[FinishReason.ERROR] += 1
        reply = self._replies.pop(state.request.request_id, None)
        if reply is not None:
            reply.fail("Preempted by a request of a higher tier; try again later.", 503, "ServiceUnavailable")
            self.reading.forget(reply, is_read_pending=True)
            for peer in reply.peers:
                self._loop.call_soon(self.abort, peer)

    def _deliver_finished(self, outcome: StepOutcome) -> None:
        for state in outcome.finished:
            reply = self._replies.get(state.request.request_id)
            if reply is None:
                continue
            reply.pump(state, state.outputs)
            if not reply.is_held:
                self.metrics.observe_finished(state)
            self._forget_when_done(reply)

    def _forget_when_done(self, reply: Reply) -> None:
        if reply.done.done():
            self._forget(reply)
        else:
            reply.done.add_done_callback(lambda _: self._forget(reply))

    def _forget(self, reply: Reply) -> None:
        self._replies.pop(reply.request_id, None)
        self.reading.forget(reply, is_read_pending=False)

    # -- KV transfer ------------------------------------------------------------------------------------

    def pinned_params(self, state: RequestState) -> dict[str, Any] | None:
        """Return the ``kv_transfer_params`` with which another worker can fetch a request's KV; None if its blocks are not kept."""
        request_id = state.request.request_id
        expiry_s = self.engine.pinned.expiry_s(request_id)
        if expiry_s is None:
            return None
        flags, is_decode = self.settings.flags, self.settings.engine.role is EngineRole.DECODE
        # The last output is not computed again, so decode's blocks lack it.
        tokens = state.request.prompt_tokens + (state.outputs - 1 if is_decode else 0)
        return {
            "do_remote_prefill": not is_decode,
            "do_remote_decode": is_decode,
            # One list per group of layers; the model has one group.
            "remote_block_ids": [self.engine.pinned.blocks_of(request_id)],
            "remote_engine_id": self._engine_id,
            "remote_request_id": request_id,
            "remote_host": flags.kv_host or flags.host,
            "remote_port": self.port,
            "remote_num_tokens": tokens,
            "remote_blocks_expiry_time": expiry_s if is_decode else None,
            "tp_size": self.settings.engine.ranks,
            "dcp_size": 1,
            "pp_size": 1,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": state.cached_tokens,
        }

    def _let_go_on(self, reply: Reply) -> None:
        """Send the held part of a response, now that its KV is known to have been valid when it was read."""
        reply.release()
        if reply.state is not None and reply.state.finish_reason is not None:
            self.metrics.observe_finished(reply.state)

    def _fail_load(self, reply: Reply, why: str) -> None:
        """Apply kv_load_failure_policy: fail the request before its first token, or compute the prompt here.

        Earlier turns of a conversation whose KV is no longer on the decode worker are always computed again.
        """
        self.metrics.failed_transfers += 1
        log.warning("KV could not be fetched", request_id=reply.request_id, why=why)
        is_next_turn = self.settings.engine.role is EngineRole.PREFILL
        if self.settings.load_failure is LoadFailurePolicy.FAIL and not is_next_turn:
            reply.fail(f"The KV cache of the prompt could not be fetched: {why}.", 500, "KVLoadError")
            self.abort(reply, FinishReason.ERROR)
            return
        now_s = self.clock.now_s()
        self.timeline.abort(reply.request_id, now_s)
        del self._replies[reply.request_id]
        reply.restart(f"{reply.request_id}-local")
        self._submit(reply, is_local=True)
