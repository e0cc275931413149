"""The gate of placing policies: every request is put into one worker's queue when it arrives.

`Placement` decides, this module only ties it to futures and the fleet. A worker's room is counted in prompt
tokens that it still has to compute; they leave when the prompt is computed, not when the answer ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from penstock_graph.models import RouterConfig, RouterPolicy
from penstock_router.fleet import Fleet, InFlight, Worker
from penstock_router.gate import Stages, Stay, full, timed_out, wait_for
from penstock_router.policy.arrival import Arrival
from penstock_router.policy.dualmap import DualMapSettings
from penstock_router.policy.placement import Handed, Placement, PlacementSettings
from penstock_router.policy.placer import Placer
from penstock_router.policy.prefix_index import PrefixIndex
from penstock_router.policy.registry import PLACERS
from penstock_router.policy.sticky import StickySessions

REBALANCE_S = 1.0
"""Chosen: a third of the shortest silence that `decode_delay_s` takes for a bottleneck by default; modelled
seconds."""


@dataclass(slots=True, eq=False)
class Entry:
    """One request in the placement.

    Attributes:
        future: Gets the worker.
        tokens: Prompt tokens, known or estimated.
        since_s: When it came, modelled seconds.
    """

    future: asyncio.Future[Stay]
    tokens: int
    since_s: float


class PlacedQueue:
    """All waiting requests, as `/workers` and `/metrics` show them."""

    __slots__ = ("_placement",)

    def __init__(self, placement: Placement[Entry]) -> None:
        self._placement = placement

    def __len__(self) -> int:
        return self._placement.waiting

    @property
    def tokens(self) -> int:
        """Prompt tokens of all waiting requests."""
        return self._placement.waiting_tokens

    def oldest_s(self, now_s: float) -> float:
        """Return how long the longest wait has lasted, modelled seconds; 0 when empty."""
        return self._placement.oldest_s(now_s)


class PlacedGate:
    """The way into the first stage under a placing policy; the face is `penstock_router.gate.Entrance`."""

    reads_prompts = True

    def __init__(
        self,
        fleet: Fleet,
        placement: Placement[Entry],
        stages: Stages,
        *,
        max_requests: int,
        rebalances: bool,
        now_s: Callable[[], float],
    ) -> None:
        """Tie placement and fleet.

        Args:
            fleet: The workers.
            placement: Chooses, and holds those who wait.
            stages: Roles that a request needs.
            max_requests: Most waiting requests.
            rebalances: Whether requests that wait for a decode-bound worker may move.
            now_s: The clock, modelled seconds.
        """
        self.queue = PlacedQueue(placement)
        self._fleet = fleet
        self._placement = placement
        self._stages = stages
        self._max_requests = max_requests
        self._rebalances = rebalances
        self._rebalanced_s = now_s()
        self._now_s = now_s
        self._names: list[str] = []
        self._processes: dict[str, tuple[str, str]] = {}
        fleet.on_change(self._fleet_changed)

    async def enter(self, arrival: Arrival, *, again: bool = False) -> Stay:
        """Wait for a worker; see `penstock_router.gate.Entrance`."""
        now_s = self._now_s()
        self._stages.refuse_if_hopeless(now_s)
        self._follow(now_s)
        entry = Entry(asyncio.get_running_loop().create_future(), arrival.tokens, now_s)
        if not self._placement.submit(entry, arrival, now_s, again=again):
            raise full(len(self.queue))
        self._hand_over(now_s)
        if entry.future.done():
            return entry.future.result()
        return await wait_for(entry.future, lambda: self._placement.withdraw(entry))

    def pump(self) -> None:
        """Hand workers to those who wait for them, as long as these have room."""
        if self._placement.waiting:
            now_s = self._now_s()
            self._follow(now_s)
            self._hand_over(now_s)

    def tick(self) -> None:
        """Send away who has waited too long, relieve decode-bound workers, and look for room."""
        now_s = self._now_s()
        for entry in self._placement.expired(now_s):
            if not entry.future.done():
                entry.future.set_exception(timed_out(now_s - entry.since_s))
        if self._rebalances and now_s - self._rebalanced_s >= REBALANCE_S:
            self._rebalanced_s = now_s
            self._placement.rebalance(now_s)
        self._placement.presume(now_s)
        self.pump()

    def index_of(self, name: str) -> PrefixIndex | None:
        """Return what is known of a worker's cache; None while it takes no requests."""
        return self._placement.index_of(name)

    def problems(self) -> list[str]:
        """Return why a request would not be served now; empty when it would."""
        waiting = len(self.queue)
        found = [f"prefill queue full: {waiting} requests wait"] if waiting >= self._max_requests else []
        return found + self._stages.problems(self._now_s())

    # ------------------------------------------------------------------ the fleet

    def _fleet_changed(self) -> None:
        """Take note of new processes, whose caches are empty, and of who may be routed to."""
        found = {each.name: each for each in self._fleet if each.spec.role is self._stages.first}
        processes = {name: (each.spec.url, each.spec.incarnation) for name, each in found.items()}
        for name, process in self._processes.items():
            if processes.get(name, process) != process:
                self._placement.restarted(name)
        self._processes = processes
        self._follow(self._now_s())
        self.pump()

    def _follow(self, now_s: float) -> None:
        """Tell the placement who may be routed to; circuits open and close without a word of the fleet."""
        names = [each.name for each in self._fleet.routable(self._stages.first, now_s)]
        if names != self._names:
            self._names = names
            resting = [each.name for each in self._fleet if _keeps_its_cache(each)]
            self._placement.set_instances(names, now_s, resting=resting)

    # ------------------------------------------------------------------ handing over

    def _hand_over(self, now_s: float) -> None:
        if not self._stages.may_start(now_s):
            return
        # Who has left in this very round gives its room back at once, which makes room for another.
        while any([not self._assign(handed, now_s) for handed in self._placement.take(now_s)]):  # noqa: C419 - all must be assigned
            pass

    def _assign(self, handed: Handed[Entry], now_s: float) -> bool:
        entry = handed.item
        worker = self._fleet.get(handed.instance)
        if worker is None or entry.future.done():
            self._placement.left(entry, now_s)
            return False

        def on_computed(cached_tokens: int | None, *, measured: bool) -> None:
            at_s = self._now_s()
            self._placement.computed(entry, at_s, cached_tokens=cached_tokens, measured=measured)
            self.pump()

        def on_end() -> None:
            self._placement.left(entry, self._now_s())
            self.pump()

        inflight = InFlight(worker, entry.tokens, now_s=now_s, on_end=on_end, on_computed=on_computed)
        entry.future.set_result(Stay(inflight, max(0.0, now_s - entry.since_s), handed.reason))
        return True


def _keeps_its_cache(worker: Worker) -> bool:
    """Return whether a worker that is away comes back as it was, or else as a process known to be new."""
    return worker.spec.supervised or worker.health_problem is None


def make_placed_gate(
    config: RouterConfig, stages: Stages, fleet: Fleet, *, now_s: Callable[[], float]
) -> PlacedGate:
    """Return the gate that a graph's router section asks for; its policy is a placing one."""
    queue, dualmap = config.prefill_queue, config.dualmap
    placer: Placer = PLACERS[config.policy.value](
        DualMapSettings(
            slo_s=config.ttft_slo_seconds,
            rebalance=dualmap.rebalance,
            hot_window=dualmap.hot_window,
            bottleneck_s=dualmap.decode_bottleneck_seconds,
        )
    )
    if config.session_header is not None:
        placer = StickySessions(placer)
    settings = PlacementSettings(
        slot_tokens=queue.worker_tokens,
        max_requests=queue.max_requests,
        max_wait_s=queue.max_wait_seconds,
        order=queue.order,
        slo_s=config.ttft_slo_seconds,
        bottleneck_s=dualmap.decode_bottleneck_seconds,
    )
    return PlacedGate(
        fleet,
        Placement(placer, settings),
        stages,
        max_requests=queue.max_requests,
        rebalances=config.policy is RouterPolicy.DUALMAP and dualmap.rebalance,
        now_s=now_s,
    )
