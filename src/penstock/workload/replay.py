"""Replays requests against a live server at their simulated times: an open loop, unless capped.

Lateness is measured twice: of sending against the schedule, and of a timer in this event loop, which is what every
measured time may be too long by.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from penstock.api import Tier
from penstock.core.clock import LagTracker, SimulatedClock
from penstock.core.errors import PenstockError
from penstock.core.http.client import ConnectionPool
from penstock.workload.exchange import Destination, RequestSender
from penstock.workload.probe import BrokenStreamCount, LagWatch
from penstock.workload.prompts import PromptMaker
from penstock.workload.record import RequestResult, RequestStatus
from penstock.workload.statistics import ScheduleLag
from penstock.workload.traces import TraceRequest

_RESEND_S = 0.5
"""Chosen: far below an answer's time, so that a place is taken soon after it is free; simulated seconds."""
_MOST_RESENDS = 120
"""Chosen: a minute; of a server that has answered nothing until then no request is sent again."""
_LOOP_PROBE_S = 0.05
"""Chosen: 20 real samples a second see a stall of 50 ms and cost nothing."""

_HEAD_START_S = 0.05
"""Chosen: real seconds between the start and the first arrival, so that it is not late by building."""


_NEWEST: Final = 500
"""Chosen: enough for a p99, few enough to show the present."""


@dataclass(slots=True)
class TierProgress:
    """What became of one tier's requests so far."""

    sent: int = 0
    ends: Counter[RequestStatus] = field(default_factory=Counter)
    ttfts_s: deque[float] = field(default_factory=lambda: deque(maxlen=_NEWEST))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """How far a replay is; times are simulated seconds.

    Attributes:
        ttft_p50_s: Median so far, in flight included; None before the first token.
    """

    planned: int
    sent: int
    in_flight: int
    ok: int
    failed: int
    rejected: int
    elapsed_s: float
    ttft_p50_s: float | None
    send_lag_p99_s: float | None
    tiers: Mapping[Tier, TierProgress] = field(default_factory=dict)


class Replayer:
    """One replay; used once, from one event loop.

    Attributes:
        unfinished: Requests cut off in flight by a stop; they are in no count of ends.
    """

    def __init__(
        self,
        pool: ConnectionPool,
        clock: SimulatedClock,
        destination: Destination,
        prompts: PromptMaker,
        *,
        run_id: str,
        concurrency: int | None = None,
        resends_rejected: bool = False,
        on_result: Callable[[RequestResult], None],
    ) -> None:
        self._clock = clock
        self._prompts = prompts
        self._run_id = run_id
        self._slots = asyncio.Semaphore(concurrency) if concurrency is not None else None
        self._resends_rejected = resends_rejected
        self._on_result = on_result
        self._ttfts_s: list[float] = []
        self._sender = RequestSender(pool, clock, destination, on_first=self._ttfts_s.append)
        self._tasks: set[asyncio.Task[None]] = set()
        self._counts = dict.fromkeys(RequestStatus, 0)
        self._tiers: dict[Tier, TierProgress] = {}
        self._planned = self._sent = self.unfinished = 0
        self.zero_s = self._end_s = clock.now_s()
        self.zero_unix_s = time.time()
        self._send_lag = LagTracker()
        self._loop_lag = LagTracker()
        self._lag_watch = LagWatch(pool, destination.url, admin_key=destination.admin_key)
        self.broken_streams = BrokenStreamCount(pool, destination.url)
        self._cpu_share: float | None = None

    @property
    def duration_s(self) -> float:
        """Simulated seconds from zero to the end of the last request."""
        return max(0.0, self._end_s - self.zero_s)

    @property
    def schedule_lag(self) -> ScheduleLag:
        """How well this client, and the servers by their own account, kept up."""
        return ScheduleLag(
            self._send_lag.p99_s(), self._loop_lag.p99_s(), self._cpu_share, self._lag_watch.worst
        )

    def snapshot(self) -> Snapshot:
        """Return how far the replay is."""
        ended = sum(self._counts.values())
        return Snapshot(
            planned=self._planned,
            sent=self._sent,
            in_flight=self._sent - ended - self.unfinished,
            ok=self._counts[RequestStatus.OK],
            failed=self._counts[RequestStatus.FAILED],
            rejected=self._counts[RequestStatus.REJECTED],
            elapsed_s=max(0.0, self._clock.now_s() - self.zero_s),
            ttft_p50_s=float(np.median(self._ttfts_s)) if self._ttfts_s else None,
            send_lag_p99_s=self._send_lag.p99_s(),
            tiers=self._tiers,
        )

    async def run(self, requests: Sequence[TraceRequest], *, stop: asyncio.Event) -> None:
        """Send all requests and wait for their ends, or cut everything off when ``stop`` is set."""
        self._planned = len(requests)
        present = {request.tier for request in requests}
        self._tiers = {tier: TierProgress() for tier in Tier if tier in present}
        # every percentile of sending is over all requests, not over the newest of them
        self._send_lag = LagTracker(window=max(1, len(requests)))
        await self.broken_streams.begin()
        self.zero_s = self._clock.now_s() + self._clock.to_simulated_s(_HEAD_START_S)
        self.zero_unix_s = time.time() + _HEAD_START_S
        cpu_s, real_s = time.process_time(), time.monotonic()
        try:
            await self._run_all(requests, stop)
        except BaseExceptionGroup as group:
            raise _cause(group) from group
        self._end_s = self._clock.now_s()
        self._cpu_share = (time.process_time() - cpu_s) / (time.monotonic() - real_s)
        await self._lag_watch.poll()
        await self.broken_streams.end()

    async def _run_all(self, requests: Sequence[TraceRequest], stop: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as aside:
            watchers = [
                aside.create_task(self._cut_off_on(stop)),
                aside.create_task(self._probe_loop()),
                aside.create_task(self._lag_watch.run()),
            ]
            async with asyncio.TaskGroup() as group:
                self._keep(group.create_task(self._dispatch(requests, group)))
            for watcher in watchers:
                watcher.cancel()

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _cut_off_on(self, stop: asyncio.Event) -> None:
        await stop.wait()
        for task in tuple(self._tasks):
            task.cancel()

    async def _probe_loop(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + _LOOP_PROBE_S
            await asyncio.sleep(_LOOP_PROBE_S)
            self._loop_lag.record(self._clock.to_simulated_s(loop.time() - due_s))

    async def _dispatch(self, requests: Sequence[TraceRequest], group: asyncio.TaskGroup) -> None:
        for request in requests:
            body = self._sender.body(request, self._prompts.make(request))
            due_s = self.zero_s + request.arrival_s
            # a late dispatcher still yields once, so that what it started is sent before it builds the next
            await asyncio.sleep(max(0.0, self._clock.to_real_s(due_s - self._clock.now_s())))
            if self._slots is not None and self._slots.locked():
                await self._slots.acquire()
                due_s = self._clock.now_s()
            elif self._slots is not None:
                await self._slots.acquire()
            self._keep(group.create_task(self._send(request, body, due_s)))

    async def _send(self, request: TraceRequest, body: bytes, due_s: float) -> None:
        self._sent += 1
        if request.tier is not None:
            self._tiers[request.tier].sent += 1
        self._send_lag.record(self._clock.now_s() - due_s)
        try:
            result = await self._round_trip(request, body)
        except asyncio.CancelledError:
            self.unfinished += 1
            raise
        finally:
            if self._slots is not None:
                self._slots.release()
        self._counts[result.status] += 1
        if request.tier is not None:
            tier = self._tiers[request.tier]
            tier.ends[result.status] += 1
            if result.ttft_s is not None:
                tier.ttfts_s.append(result.ttft_s)
        self._on_result(result)

    async def _round_trip(self, request: TraceRequest, body: bytes) -> RequestResult:
        name = f"{self._run_id}-{request.line}"
        result = await self._sender.send(request, body, request_id=name, zero_s=self.zero_s)
        resends = 0
        while self._resends_rejected and result.status is RequestStatus.REJECTED and resends < _MOST_RESENDS:
            await asyncio.sleep(self._clock.to_real_s(_RESEND_S))
            result = await self._sender.send(request, body, request_id=name, zero_s=self.zero_s)
            resends += 1
        if resends == _MOST_RESENDS and not self._counts[RequestStatus.OK]:
            self._resends_rejected = False
        return result


def _cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the one error of a group that holds only Penstock's own, and the group otherwise."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error if isinstance(error, PenstockError) else group
