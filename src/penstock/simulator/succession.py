"""The routers of a simulation and the death of the picker, the router that chooses workers for all.

Clients send requests to the routers in turn; the oldest router is the picker. When it dies, the streams that it relays fail, and no worker
is picked for 0.6 seconds (`ELECTION_S`). Then the next oldest router is the picker. It has received the most recent prompts in advance.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from penstock.router.core.retries import Effects
from penstock.router.picker.relay import RECENT_KEYS
from penstock.simulator.jobs import Job, JobOutcome
from penstock.simulator.kernel import Kernel, Order
from penstock.simulator.routing import VirtualRouter
from penstock.simulator.scenario import SimulatedRouters

ELECTION_S: Final = 0.6
"""Seconds without a picker after the picker was stopped, as measured by `bench/picker.py`; after a kill the time is shorter."""


class Succession:
    """The routers of one run, one of which is the picker: it chooses the workers for all. Times are simulated seconds.

    Attributes:
        pickers: All pickers so far in order of time; the last one is the current picker.
    """

    def __init__(
        self,
        kernel: Kernel,
        group: SimulatedRouters,
        make: Callable[[], VirtualRouter],
        *,
        ready: Callable[[], None],
    ) -> None:
        """Create the first picker.

        Args:
            kernel: Events and virtual time.
            group: Number of routers, their delays, and the times at which the picker dies.
            make: Function that creates a router.
            ready: Callback that gives the newest picker its list of ready workers.
        """
        self._kernel = kernel
        self._group = group
        self._make = make
        self._ready = ready
        # Names (numbers) of the living routers in the order in which they receive requests; the smallest is the oldest.
        self._relays = list(range(group.count))
        self._next_name = group.count
        self._without_until_s = 0.0
        self._open: dict[int, Job] = {}
        self._recent: list[Job] = []
        self.pickers = [make()]

    def start(self, end: Callable[[Job, JobOutcome], None], apply: Callable[[Effects[Job]], None]) -> None:
        """Schedule the deaths of the picker (the router that chooses workers), at the times that the scenario names.

        Args:
            end: Callback that ends a request with an outcome; called for the requests that waited in the router that died, whose
                clients lose their connection.
            apply: Callback that carries out the assignments and refusals of a new picker.
        """
        for at_s in self._group.picker_deaths_s:
            self._kernel.at(at_s, Order.FLEET, self._die, end, apply)

    def arrived(self, job: Job) -> None:
        """Record the arrival of a request (``job``) at one of the routers, which receive requests in turn.

        If the picker (the router that chooses workers) dies later, the next picker takes the request over, unless its client is
        connected to the router that died.
        """
        job.relay = self._relays[job.index % len(self._relays)]
        job.picker_index = len(self.pickers) - 1
        self._open[job.index] = job

    def ended(self, job: Job) -> None:
        """Record the end of a request (``job``), so that a new picker (the router that chooses workers) does not take it over."""
        self._open.pop(job.index, None)

    def prefilled(self, job: Job) -> None:
        """Record that a request's prompt was computed, so that a later picker learns at which worker the prompt's prefix is cached.

        The picker is the router that chooses workers.
        """
        if self._group.picker_deaths_s:
            self._recent.append(job)

    def delay_s(self, job: Job) -> float:
        """Return the simulated seconds until a request (``job``) that arrives now reaches the picker, the router that chooses workers.

        If the picker has died, these include the remaining time until there is a new one.
        """
        way_s = 0.0 if job.relay == min(self._relays) else self._group.pick_delay_s
        return max(way_s, self._without_until_s - self._kernel.now_s)

    def _die(self, end: Callable[[Job, JobOutcome], None], apply: Callable[[Effects[Job]], None]) -> None:
        now_s, dead = self._kernel.now_s, min(self._relays)
        self.pickers[-1].is_down = True
        self._relays[self._relays.index(dead)] = self._next_name
        self._next_name += 1
        self._without_until_s = now_s + ELECTION_S
        for job in [job for job in self._open.values() if job.relay == dead]:
            if self.pickers[-1].remove_waiting(job, now_s):
                end(job, JobOutcome.FAILED)
            else:
                # Its worker continues although no client receives the answer, at most until the answer ends.
                job.is_orphan = True
        self._kernel.at(self._without_until_s, Order.FLEET, self._succeed, apply)

    def _succeed(self, apply: Callable[[Effects[Job]], None]) -> None:
        before, now_s = self.pickers[-1], self._kernel.now_s
        after = self._make()
        self.pickers.append(after)
        self._ready()
        keys, first = 0, len(self._recent)
        while first and keys < RECENT_KEYS:
            first -= 1
            keys += len(self._recent[first].chain)
        for job in self._recent[first:]:
            after.learn_prefix(job)
        for job in [job for job in self._open.values() if not job.is_orphan]:
            job.picker_index = len(self.pickers) - 1
            apply(after.take_over(job, before, now_s))
