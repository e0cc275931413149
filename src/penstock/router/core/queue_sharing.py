"""What routers that share the workers' queues out tell each other, beside tokens: which prompts went where. Pure.

Whichever router a request comes to chooses its worker, and passes it on to the router that keeps that worker's queue. It
knows the caches and the load there as of the last exchange, and what it has passed on itself since. The keeper tells what
it has queued, whoever chose it, so that each prompt is told once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Final

from penstock.router.policy.arrival import Arrival

PROMPTS: Final = 4096
"""Chosen: prompts kept for those who ask; four exchanges of 0.1 s at 10,000 requests/s, and what a new router begins with."""
TOLD_KEYS: Final = 1 << 14
"""Chosen: keys told at a time, 0.2 MiB as text and some 10 ms of work; with an exchange each 0.1 s, 4,000 prompts/s of 40 keys
from each router. What is left is told next time."""
PASSED_ON: Final = 1 << 16
"""Chosen: requests passed on and untold, far more than between two exchanges; the oldest are forgotten where none succeeds."""


@dataclass(frozen=True, slots=True)
class QueuedPrompt:
    """A prompt that a router has queued.

    Attributes:
        worker: For which worker.
        arrival: What is told of it: its keys and its session.
    """

    worker: str
    arrival: Arrival


class PromptLog:
    """The latest prompts queued here, numbered from 0."""

    __slots__ = ("_first", "_prompts")

    def __init__(self) -> None:
        """Begin empty."""
        self._prompts: deque[QueuedPrompt] = deque()
        self._first = 0

    def add(self, prompt: QueuedPrompt) -> None:
        """Keep a prompt, and drop the oldest beyond the bound."""
        self._prompts.append(prompt)
        if len(self._prompts) > PROMPTS:
            self._prompts.popleft()
            self._first += 1

    def since(self, number: int) -> tuple[int, list[QueuedPrompt]]:
        """Return prompts from a number on, as far as they are kept, and the number to ask from next.

        Args:
            number: >= 0; one that was never reached is another log's, and gives all.
        """
        at = number - self._first
        if not 0 <= at <= len(self._prompts):
            at = 0
        told: list[QueuedPrompt] = []
        keys = 0
        for prompt in islice(self._prompts, at, None):
            keys += len(prompt.arrival.chain)
            if told and keys > TOLD_KEYS:
                break
            told.append(prompt)
        return self._first + at + len(told), told


class QueueSharing:
    """One router's part.

    Attributes:
        is_on: Other routers ask what is queued here.
        log: What they are told.
    """

    __slots__ = ("_passed_on", "is_on", "log")

    def __init__(self) -> None:
        """Begin alone."""
        self.is_on = False
        self.log = PromptLog()
        self._passed_on: deque[tuple[float, str, int]] = deque(maxlen=PASSED_ON)

    def queued(self, worker: str, arrival: Arrival) -> None:
        """Take note of a request queued here for a worker; empty: for none yet."""
        if self.is_on and worker and (arrival.chain or arrival.session):
            self.log.add(QueuedPrompt(worker, arrival))

    def passed_on(self, worker: str, tokens: int, now_s: float) -> None:
        """Take note of uncached tokens that wait for a worker at another router, which may not have told of them."""
        self._passed_on.append((now_s, worker, tokens))

    def untold(self, workers: Iterable[str], asked_s: float) -> dict[str, int]:
        """Return what was passed on for each worker since others were asked last, and forget what they have told of.

        Args:
            workers: Their names.
            asked_s: When they were asked, simulated seconds.
        """
        while self._passed_on and self._passed_on[0][0] < asked_s:
            self._passed_on.popleft()
        found = dict.fromkeys(workers, 0)
        for _, worker, tokens in self._passed_on:
            if worker in found:
                found[worker] += tokens
        return found
