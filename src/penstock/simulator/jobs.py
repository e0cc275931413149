"""A request on its way through a simulation, and the prefix keys that router, caches and engines share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import xxhash

from penstock.api import Tier
from penstock.router.core.request import RequestMachine
from penstock.router.core.retries import Assignment, RequestTries
from penstock.router.policy.tiers import PRIORITIES
from penstock.workload.traces import BLOCK_TOKENS, TraceRequest

_UNIQUE_ID = 1 << 62
"""Ids of requests that share nothing begin here; traces' ids are small."""


class JobOutcome(StrEnum):
    """How a job ended, exactly once."""

    OK = "ok"
    FAILED = "failed"
    REJECTED = "rejected"


@dataclass(slots=True, eq=False)
class Job:
    """One request.

    Attributes:
        chain: One chained 64-bit key per begun block of 512 prompt tokens.
        sub_block_keys: Keys that stand for the first block together.
        attempt: Raised when it starts over; names the engines' requests.
        router: Which picker has it, by its place among those so far.
        relay: Name of the router that it came to.
        is_orphan: That router has died since it was dispatched: no client gets its answer.
        priority: That its tier has in engines; 0 without tiers.
        machine: What it does next; None before it has come to the picker, and after its end.
        assignment: Its newest share of a worker; None before the first.
        said_tokens: Of its answer, by workers that have died since; the newest one has them in its prompt.
        broken_s: When the last of them died.
        continuations: How often its stream continued on another worker.
        worker: Prefill (or aggregated) worker that has, or had, it, and its incarnation then.
        pending_tokens: Prompt tokens that its worker is expected to compute; 0 once computed.
        is_deflected: Its decode worker computes its prompt.
        cached_tokens: Prompt tokens found in a cache at the prefill.
        handed_s: When the router let it go to a worker; None while it waits.
    """

    index: int
    request: TraceRequest
    chain: tuple[int, ...]
    sub_block_keys: int = 1
    keys: list[int] | None = None
    attempt: int = 0
    router: int = 0
    relay: int = 0
    is_orphan: bool = False
    tier: Tier = Tier.STANDARD
    priority: int = 0
    tries: RequestTries = field(default_factory=RequestTries)
    machine: RequestMachine | None = None
    assignment: Assignment[Job] | None = None
    said_tokens: int = 0
    broken_s: float = 0.0
    continuations: int = 0
    worker: str = ""
    incarnation: int = 0
    decoder: str = ""
    pending_tokens: int = 0
    is_deflected: bool = False
    cached_tokens: int = 0
    handed_s: float | None = None
    prefilled_s: float | None = None
    first_token_s: float | None = None
    ended_s: float | None = None
    outcome: JobOutcome | None = None

    @property
    def prompt_tokens(self) -> int:
        """Tokens that its worker receives."""
        return self.request.input_tokens + self.said_tokens

    @property
    def outputs_left(self) -> int:
        """Tokens that its worker is to generate."""
        return self.request.output_tokens - self.said_tokens

    @property
    def is_rest(self) -> bool:
        """Whether its client has the beginning of the answer."""
        return self.first_token_s is not None

    @property
    def is_assigned(self) -> bool:
        """Whether it holds a share of a worker."""
        return self.assignment is not None and self.assignment.is_open

    @property
    def name(self) -> str:
        """The engines' id for this attempt."""
        return f"{self.index}.{self.attempt}"


class PrefixChains:
    """Turns a workload's block ids into keys, the same for equal prefixes; one per simulation."""

    sub_block_keys = 1

    def __init__(self, seed: int) -> None:
        """Start an empty table; another seed gives other keys, and so other places on hash rings."""
        self._root = xxhash.xxh3_64_intdigest(b"penstock simulator %d" % seed)
        self._index: dict[int, int] = {}

    def chain(self, request: TraceRequest) -> tuple[int, ...]:
        """Return a key per begun 512-token block, each depending on all before it."""
        ids: Iterable[int] | None = request.block_ids
        if ids is None:
            first = _UNIQUE_ID + request.line * 4096
            ids = range(first, first + -(-request.input_tokens // BLOCK_TOKENS))
        return self._chained(ids, self._root)

    def extend(self, job: Job) -> None:
        """Add the blocks that what was said of a job's answer begins, which it shares with no other job."""
        first, chain = _UNIQUE_ID + job.request.line * 4096, job.chain
        ids = range(first + len(chain), first + -(-job.prompt_tokens // BLOCK_TOKENS))
        job.chain, job.keys = chain + self._chained(ids, chain[-1] if chain else self._root), None

    @staticmethod
    def _chained(ids: Iterable[int], key: int) -> tuple[int, ...]:
        keys = []
        for block_id in ids:
            key = xxhash.xxh3_64_intdigest(block_id.to_bytes(8, "little"), key)
            keys.append(key)
        return tuple(keys)

    def block_keys(self, job: Job, block_size: int) -> list[int]:
        """Return one key per full KV block of the prompt, as hashing its bytes would.

        A trace's id stands for 512 tokens of text, so every block cut out of them follows from the id's
        chained key and the block's place.
        """
        if job.keys is None:
            per_id = BLOCK_TOKENS // block_size
            index = self._index
            keys: list[int] = []
            for key in job.chain:
                first = index.setdefault(key, len(index)) * per_id
                keys.extend(range(first, first + per_id))
            del keys[job.prompt_tokens // block_size :]
            job.keys = keys
        return job.keys


def make_jobs(
    requests: Sequence[TraceRequest], chains: PrefixChains, *, default_tier: Tier | None
) -> list[Job]:
    """Return a job for each request; ``default_tier`` is for requests without one, None where there are no tiers."""
    jobs = []
    for index, request in enumerate(requests):
        job = Job(index, request, chains.chain(request), sub_block_keys=chains.sub_block_keys)
        if default_tier is not None:
            job.tier = request.tier or default_tier
            job.priority = PRIORITIES[job.tier]
        jobs.append(job)
    return jobs
