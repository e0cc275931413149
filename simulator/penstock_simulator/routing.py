"""What the world asks of a router, and its two kinds; both drive the live router's pure bodies.

`PlacedRouting` puts each request into one worker's queue when it arrives; `CentralRouting` keeps one queue for
all workers and chooses when one has room.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from penstock_core.errors import ConfigError
from penstock_graph.models import Role, RouterPolicy
from penstock_router.policy.candidate import Candidate, RoutedRequest
from penstock_router.policy.dualmap import DualMapSettings, PairChoice
from penstock_router.policy.placement import Placement, PlacementSettings
from penstock_router.policy.placer import Arrival, Placer
from penstock_router.policy.prefill_queue import PrefillQueue, Waiting, has_free_slot
from penstock_router.policy.registry import PLACERS, POLICIES, make_policy
from penstock_simulator.jobs import Job
from penstock_simulator.scenario import RouterSpec
from penstock_workload.traces import BLOCK_TOKENS

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

    def ended(self, job: Job, now_s: float) -> None:
        """Note that a computed job has left the first stage's worker."""

    def expired(self, now_s: float) -> list[Job]:
        """Take out and return the jobs that have waited too long."""

    def heard(self, others: Mapping[str, int]) -> None:
        """Take news of the prompt tokens that other routers have pending at each worker."""

    @property
    def reads_usage(self) -> bool:
        """Whether the policy looks at the workers' gauges."""

    def inflight_tokens(self) -> Mapping[str, int]:
        """Return the tokens in flight at each worker, to be told with the gauges that were read now."""

    def heard_usage(self, usage: Mapping[str, float], tokens: Mapping[str, int]) -> None:
        """Take news of the workers' KV usage, and of what was in flight there when it was read."""

    def tick(self, now_s: float) -> None:
        """Do what time alone asks for; called each second."""

    @property
    def waiting(self) -> int:
        """Jobs that wait in the router."""

    def queued_tokens(self, worker: str) -> int:
        """Return the prompt tokens, cached ones left out, that wait in the router for one worker."""

    def pending_tokens(self, worker: str) -> int:
        """Return the prompt tokens that this router has at one worker, waiting ones included."""


class CentralRouting:
    """One queue, first in first out; a policy without memory of prompts chooses among workers with room.

    As live, a request of an aggregated worker without slots weighs until its answer ends.
    """

    def __init__(self, spec: RouterSpec, role: Role) -> None:
        """Choose the policy.

        Raises:
            ConfigError: there is no such policy.
        """
        self._spec = spec
        self._role = role
        self._policy = make_policy(RouterPolicy(spec.policy))
        self._state = self._policy.new_state()
        has_slots = spec.slot_tokens is not None or spec.slot_requests is not None
        self._counts_answers = role is Role.AGGREGATED and not has_slots
        self._usage: Mapping[str, float] = {}
        self._usage_tokens: Mapping[str, int] = {}
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
        usage, then = self._usage, self._usage_tokens
        return [
            Candidate(
                name,
                self._role,
                requests[name],
                tokens[name] + others.get(name, 0),
                usage.get(name),
                then.get(name, 0),
            )
            for name in self._workers
        ]

    def _has_room(self, candidate: Candidate) -> bool:
        most = self._spec.slot_requests
        if most is not None and candidate.inflight_requests >= most:
            return False
        return has_free_slot(candidate, self._spec.slot_tokens)

    def prefilled(self, job: Job, worker: str, now_s: float) -> None:
        """Give the room back, unless the answer counts too."""
        if not self._counts_answers:
            self.lost(job, worker, now_s)

    def lost(self, job: Job, worker: str, now_s: float) -> None:  # noqa: ARG002 - the rule knows no time
        """Give the room back."""
        self._requests[worker] -= 1
        self._tokens[worker] -= job.request.input_tokens

    def ended(self, job: Job, now_s: float) -> None:
        """Give the room back where it was not before."""
        if self._counts_answers:
            self.lost(job, job.worker, now_s)

    def expired(self, now_s: float) -> list[Job]:
        """Take out who has waited as long as may be."""
        return [waiting.item for waiting in self._queue.take_expired(now_s)]

    def heard(self, others: Mapping[str, int]) -> None:
        """Count what other routers' jobs weigh."""
        self._others = others

    @property
    def reads_usage(self) -> bool:
        """Whether the policy looks at the workers' gauges."""
        return self._spec.policy == RouterPolicy.LEAST_LOADED.value

    def inflight_tokens(self) -> Mapping[str, int]:
        """Return the tokens in flight at each worker, as the candidates show them."""
        return {each.name: each.inflight_tokens for each in self._candidates()}

    def heard_usage(self, usage: Mapping[str, float], tokens: Mapping[str, int]) -> None:
        """Keep the gauges for the next choice."""
        self._usage, self._usage_tokens = usage, tokens

    def tick(self, now_s: float) -> None:
        """Do nothing: the rule knows no time."""

    @property
    def waiting(self) -> int:
        """Jobs in the queue."""
        return len(self._queue)

    def queued_tokens(self, worker: str) -> int:  # noqa: ARG002 - the queue belongs to nobody
        """Return 0: nothing waits for one worker."""
        return 0

    def pending_tokens(self, worker: str) -> int:
        """Return the tokens handed to a worker and not computed yet."""
        return self._tokens.get(worker, 0)


class PlacedRouting:
    """A queue per worker, filled by a placing policy; DualMap may move what waits."""

    def __init__(self, placer: Placer, settings: PlacementSettings) -> None:
        self._placement: Placement[Job] = Placement(placer, settings)

    def set_workers(self, names: Sequence[str], now_s: float) -> None:
        """Place anew what waits for workers that are gone."""
        self._placement.set_instances(names, now_s)

    def submit(self, job: Job, now_s: float, *, is_retry: bool = False) -> bool:
        """Place a job."""
        arrival = Arrival(job.chain, job.request.input_tokens, head_parts=job.head_parts)
        return self._placement.submit(job, arrival, now_s, again=is_retry)

    def take(self, now_s: float) -> list[tuple[Job, str]]:
        """Hand out what has room at its worker."""
        return [(handed.item, handed.instance) for handed in self._placement.take(now_s)]

    def prefilled(self, job: Job, worker: str, now_s: float) -> None:  # noqa: ARG002 - the placement knows where
        """Give the room back, and learn the pace."""
        self._placement.computed(job, now_s, cached_tokens=job.cached_tokens)

    def lost(self, job: Job, worker: str, now_s: float) -> None:  # noqa: ARG002 - the placement knows where
        """Give the room back."""
        self._placement.left(job, now_s)

    def ended(self, job: Job, now_s: float) -> None:
        """Count it no more among those that are decoded."""
        self._placement.left(job, now_s)

    def expired(self, now_s: float) -> list[Job]:
        """Take out who has waited as long as may be."""
        return self._placement.expired(now_s)

    def heard(self, others: Mapping[str, int]) -> None:
        """Count what other routers' jobs weigh."""
        for name, tokens in others.items():
            self._placement.heard(name, tokens)

    @property
    def reads_usage(self) -> bool:
        """False: placing policies look at prompts."""
        return False

    def inflight_tokens(self) -> Mapping[str, int]:
        """Return nothing: no gauge is read."""
        return {}

    def heard_usage(self, usage: Mapping[str, float], tokens: Mapping[str, int]) -> None:
        """Do nothing: no gauge is read."""

    def tick(self, now_s: float) -> None:
        """Relieve workers that are bound by decoding."""
        self._placement.rebalance(now_s)

    @property
    def waiting(self) -> int:
        """Jobs in all queues."""
        return self._placement.waiting

    def queued_tokens(self, worker: str) -> int:
        """Return the uncached tokens that wait for one worker."""
        return self._placement.queued_tokens(worker)

    def pending_tokens(self, worker: str) -> int:
        """Return the uncached tokens that wait for a worker or were handed to it."""
        return self._placement.pending_tokens(worker)


def policy_names() -> tuple[str, ...]:
    """Return every policy that `make_routing` knows."""
    return (*PLACERS, *(name.value for name in POLICIES if name.value not in PLACERS))


def make_routing(spec: RouterSpec, role: Role, *, slo_s: float, cache_tokens: int) -> Routing:
    """Return one router.

    Args:
        spec: Its settings.
        role: Of the workers that it chooses among.
        slo_s: TTFT that the policy aims for.
        cache_tokens: What one of those workers caches.

    Raises:
        ConfigError: there is no such policy, or it has no such setting.
    """
    if spec.policy not in policy_names():
        raise ConfigError(f"policy {spec.policy!r}: choose from {', '.join(policy_names())}")
    if spec.policy not in PLACERS:
        return CentralRouting(spec, role)
    settings = PlacementSettings(
        slot_tokens=spec.slot_tokens,
        slot_requests=spec.slot_requests,
        max_requests=spec.max_waiting,
        max_wait_s=spec.max_wait_s,
        order=spec.queue_order,
        cache_blocks=spec.cache_blocks or max(2, cache_tokens // BLOCK_TOKENS),
        slo_s=slo_s,
    )
    return PlacedRouting(_placer(spec, slo_s), settings)


def _placer(spec: RouterSpec, slo_s: float) -> Placer:
    values = dict(spec.settings)
    if "choice" in values:
        values["choice"] = PairChoice(str(values["choice"]))
    try:
        return PLACERS[spec.policy](DualMapSettings(slo_s=slo_s, **values))  # type: ignore[arg-type]  # unknown keys raise
    except TypeError as exc:
        raise ConfigError(f"settings of {spec.policy}: {exc}") from exc
