"""What the world asks of a router, and the router with one queue for all prefill workers.

`CentralRouting` drives the same policy, slot rule and queue as the live router's gate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from penstock_graph.models import Role, RouterPolicy
from penstock_router.policy.candidate import Candidate, RoutedRequest
from penstock_router.policy.prefill_queue import PrefillQueue, Waiting, has_free_slot
from penstock_router.policy.registry import POLICIES, make_policy
from penstock_simulator.jobs import Job
from penstock_simulator.scenario import RouterSpec

_UNBOUNDED = 1 << 60


class Routing(Protocol):
    """A router of the first stage. Whoever calls tells the time; nothing happens by itself."""

    def set_workers(self, names: Sequence[str], now_s: float) -> None:
        """Say who may be chosen from now on; jobs queued for others find a new place."""

    def submit(self, job: Job, now_s: float, *, is_retry: bool = False) -> bool:
        """Queue a job; False when too many wait already."""

    def take(self, now_s: float) -> list[tuple[Job, str]]:
        """Return jobs with the workers that they go to now, in order."""

    def prefilled(self, job: Job, worker: str, now_s: float) -> None:
        """Note that a worker has computed a prompt: it has room for the next."""

    def lost(self, job: Job, worker: str, now_s: float) -> None:
        """Note that a job left a worker without having been computed."""

    def expired(self, now_s: float) -> list[Job]:
        """Take out and return the jobs that have waited too long."""

    def abandon(self) -> list[Job]:
        """Take out and return everything that waits: the end of the world."""

    def heard(self, loads: Mapping[str, int], now_s: float) -> None:
        """Take news of every worker's pending prompt tokens, this router's own jobs included."""

    @property
    def waiting(self) -> int:
        """Jobs that wait in the router."""

    def queued_tokens(self, worker: str) -> int:
        """Return the prompt tokens that wait in the router for one worker."""


class CentralRouting:
    """One queue, first in first out; a policy without memory of prompts chooses among workers with room."""

    def __init__(self, spec: RouterSpec, role: Role) -> None:
        """Choose the policy.

        Raises:
            ConfigError: there is no such policy.
        """
        self._spec = spec
        self._role = role
        self._policy = make_policy(RouterPolicy(spec.policy))
        self._state = self._policy.new_state()
        self._queue: PrefillQueue[Job] = PrefillQueue(
            max_requests=spec.max_waiting or _UNBOUNDED, max_wait_s=spec.max_wait_s or float("inf")
        )
        self._workers: tuple[str, ...] = ()
        self._requests: dict[str, int] = {}
        self._tokens: dict[str, int] = {}
        self._others: Mapping[str, int] = {}

    def set_workers(self, names: Sequence[str], now_s: float) -> None:  # noqa: ARG002 - waiting jobs have no place yet
        """Remember who may be chosen."""
        self._workers = tuple(names)
        for name in names:
            self._requests.setdefault(name, 0)
            self._tokens.setdefault(name, 0)

    def submit(self, job: Job, now_s: float, *, is_retry: bool = False) -> bool:
        """Join the queue, at its front after a failure."""
        if self._queue.is_full and not is_retry:
            return False
        self._queue.join(Waiting(job, job.request.input_tokens, now_s), front=is_retry)
        return True

    def take(self, now_s: float) -> list[tuple[Job, str]]:  # noqa: ARG002 - the rule knows no time
        """Hand out from the head of the queue while a worker has room."""
        taken = []
        while (head := self._queue.head()) is not None:
            key, waiting = head
            free = [each for each in self._candidates() if self._has_room(each)]
            if not free:
                break
            choice = self._policy.choose(free, RoutedRequest(waiting.tokens), self._state)
            name = choice.candidate.name
            self._requests[name] += 1
            self._tokens[name] += waiting.tokens
            self._queue.leave(key)
            taken.append((waiting.item, name))
        return taken

    def _candidates(self) -> list[Candidate]:
        requests, tokens, others = self._requests, self._tokens, self._others
        return [
            Candidate(name, self._role, requests[name], tokens[name] + others.get(name, 0))
            for name in self._workers
        ]

    def _has_room(self, candidate: Candidate) -> bool:
        most = self._spec.slot_requests
        if most is not None and candidate.inflight_requests >= most:
            return False
        return has_free_slot(candidate, self._spec.slot_tokens)

    def prefilled(self, job: Job, worker: str, now_s: float) -> None:  # noqa: ARG002 - the rule knows no time
        """Give the room back."""
        self._requests[worker] -= 1
        self._tokens[worker] -= job.request.input_tokens

    def lost(self, job: Job, worker: str, now_s: float) -> None:
        """Give the room back."""
        self.prefilled(job, worker, now_s)

    def expired(self, now_s: float) -> list[Job]:
        """Take out who has waited as long as may be."""
        return [waiting.item for waiting in self._queue.take_expired(now_s)]

    def abandon(self) -> list[Job]:
        """Take out everybody."""
        left = []
        while (head := self._queue.head()) is not None:
            self._queue.leave(head[0])
            left.append(head[1].item)
        return left

    def heard(self, loads: Mapping[str, int], now_s: float) -> None:  # noqa: ARG002 - news say their own age
        """Count what other routers' jobs weigh, as far as the news tell."""
        self._others = {name: max(0, load - self._tokens.get(name, 0)) for name, load in loads.items()}

    @property
    def waiting(self) -> int:
        """Jobs in the queue."""
        return len(self._queue)

    def queued_tokens(self, worker: str) -> int:  # noqa: ARG002 - the queue belongs to nobody
        """Return 0: nothing waits for one worker."""
        return 0


def make_routing(spec: RouterSpec, role: Role) -> Routing:
    """Return one router.

    Raises:
        ConfigError: there is no such policy.
    """
    return CentralRouting(spec, role)


def policy_names() -> tuple[str, ...]:
    """Return every policy that `make_routing` knows, in the manifest's order."""
    return tuple(name.value for name in RouterPolicy if name in POLICIES)
