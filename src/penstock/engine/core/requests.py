"""A request as the engine sees it: the immutable request, its state in the engine, and the engine's counters.

The engine writes `RequestState` and `EngineCounters`; servers, metrics and simulators only read them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class EngineRole(StrEnum):
    """Role of a worker in disaggregated serving.

    Attributes:
        PREFILL: Computes prompts and keeps their KV for decode workers.
        DECODE: Fetches the KV of prompts and generates tokens.
        AGGREGATED: Does both phases alone, without transfers.
        BOTH: Keeps or fetches KV as each request specifies.
    """

    PREFILL = "prefill"
    DECODE = "decode"
    AGGREGATED = "aggregated"
    BOTH = "both"

    @property
    def keeps(self) -> bool:
        """Whether the worker keeps a prompt's KV for decode if a request asks for it."""
        return self in {EngineRole.PREFILL, EngineRole.BOTH}

    @property
    def fetches(self) -> bool:
        """Whether the worker fetches a prompt's KV if a request asks for it."""
        return self in {EngineRole.DECODE, EngineRole.BOTH}


class FinishReason(StrEnum):
    """Reason why a request ended; the values are those of vLLM's label ``finished_reason``.

    Attributes:
        STOP: The model ended by itself, or a stop string occurred.
        LENGTH: The token limit was reached.
        ABORT: The client disconnected.
        ERROR: The request failed.
    """

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class RequestStage(StrEnum):
    """Stage of a request in the engine.

    The order is ``waiting`` → (``loading`` → ``loaded``) → (``prefilling``) → ``decoding`` → ``finished``. A
    preempted request returns to ``waiting``.

    Attributes:
        WAITING: It is in the waiting queue.
        LOADING: Its KV is being fetched from another worker or from host memory.
        LOADED: Its KV has arrived, and it waits for a batch slot.
        PREFILLING: Its prompt is being computed.
        DECODING: It generates tokens.
        SWAPPING: It was preempted, and its KV is being copied to host memory.
        FINISHED: It has ended, or was removed from queue and batch.
    """

    WAITING = "waiting"
    LOADING = "loading"
    LOADED = "loaded"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    SWAPPING = "swapping"
    FINISHED = "finished"


class PreemptionKind(StrEnum):
    """Treatment of the KV of a preempted request, one that was removed from the batch to make room.

    Attributes:
        SWAP: The KV is copied to host memory, and back later.
        RECOMPUTE: The KV is released, and computed again later.
        DROP: The KV is released, and the request fails.
    """

    SWAP = "swap"
    RECOMPUTE = "recompute"
    DROP = "drop"


class LeaseTerm(StrEnum):
    """Term in which a lease (the time for which a worker keeps a prompt's KV for another one) expired.

    Attributes:
        INITIAL: The first term of a lease that a prefill worker granted.
        EXTENSION: A term after heartbeats have extended the lease.
        DECODER_TTL: The first term of a lease that a decode worker granted.
    """

    INITIAL = "initial"
    EXTENSION = "extension"
    DECODER_TTL = "decoder_ttl"


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One request as the engine sees it; it never changes.

    Attributes:
        request_id: ID, unique among requests in progress.
        prompt_tokens: Number of tokens in the prompt.
        output_tokens: Number of tokens to generate, at least 1.
        arrival_s: Time of arrival in simulated seconds.
        block_keys: Prefix keys of the prompt's complete blocks; empty disables reuse.
        priority: Priority; lower values run first. It has an effect only if `BatchLimits.by_priority` is set.
        ends_by: Finish reason that is recorded after ``output_tokens`` tokens.
        load_remote: Whether the prompt's KV is on another worker and is fetched instead of computed.
        remote_tokens: Number of leading prompt tokens whose KV is on the other worker, at least 1; None means all. The
            other tokens, and at least the last one, are then computed here.
        pin_blocks: Whether the request's blocks are kept after its end for another worker to read.
        prompt: Token IDs of the prompt, 4 bytes each; only the journal of the cache reads them.
        adapter: LoRA adapter, which only the journal of the cache reads; None for the base model.
    """

    request_id: str
    prompt_tokens: int
    output_tokens: int
    arrival_s: float
    block_keys: Sequence[int] = ()
    priority: int = 0
    ends_by: FinishReason = FinishReason.LENGTH
    load_remote: bool = False
    remote_tokens: int | None = None
    pin_blocks: bool = False
    prompt: bytes = b""
    adapter: str | None = None


@dataclass(slots=True, eq=False)
class RequestState:
    """State of a request in the engine; times are simulated seconds.

    While the request decodes, ``computed`` and ``outputs`` keep the values that they had at the step number (tick)
    ``base_tick``: every decoding request advances by one token per step, so the batcher counts the steps for all of
    them together.

    Attributes:
        request: The request.
        index: Number of the request in order of arrival, unique.
        prefill_target: Number of tokens to compute before the next output: the prompt and, after a preemption, the
            outputs.
        remote_pending: Whether its KV still has to be fetched.
        status: Stage of the request in the engine.
        epoch: Number that increases whenever the request enters or leaves the batch. Plans and transfers that were made
            with an older number are void.
        blocks: Its KV blocks.
        registered: Number of its leading blocks that can be found in the prefix cache.
        generated_keys: Prefix keys of blocks with generated tokens.
        computed: Number of tokens whose KV is computed.
        outputs: Number of generated tokens.
        base_tick: Number of completed steps (tick) when it began to decode.
        cached_tokens: Number of prompt tokens found in the local prefix cache at its first admission.
        external_tokens: Number of prompt tokens fetched from another worker.
        preemptions: Number of times that it was preempted.
        host_blocks: Number of blocks in host memory that it uses.
        first_scheduled_s: Time at which it first entered the batch; None before that.
        first_token_s: Time of its first output; None before that.
        last_token_s: Time of its last output before a preemption; None unless it has been preempted and has not
            resumed.
        finished_s: Time at which it ended; None before that.
        finish_reason: Reason why it ended; None before that.
    """

    request: EngineRequest
    index: int
    prefill_target: int
    remote_pending: bool
    status: RequestStage = RequestStage.WAITING
    epoch: int = 0
    blocks: list[int] = field(default_factory=list)
    registered: int = 0
    generated_keys: list[int] = field(default_factory=list)
    computed: int = 0
    outputs: int = 0
    base_tick: int = 0
    cached_tokens: int = 0
    external_tokens: int = 0
    preemptions: int = 0
    host_blocks: int = 0
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None
    finish_reason: FinishReason | None = None

    def note_scheduled(self, now_s: float) -> None:
        """Record the time of the first entry into a batch; fetching KV counts as waiting. Does nothing if already recorded."""
        if self.first_scheduled_s is None:
            self.first_scheduled_s = now_s


@dataclass(slots=True)
class EngineCounters:
    """Cumulative counters since the start, counted as in vLLM.

    Attributes:
        prompt_tokens: Number of prompt tokens of requests that have had their first output token.
        prompt_tokens_cached: Number of those tokens that were not computed here, but found in the prefix cache or
            fetched from another worker.
        generation_tokens: Number of generated tokens.
        preemptions: Number of preemptions of requests.
        prefix_queries: Number of prompt tokens that were looked up in the prefix cache.
        prefix_hits: Number of prompt tokens that were found in the prefix cache.
        external_queries: Number of prompt tokens that were not in the prefix cache, of requests that fetch KV from
            another worker.
        external_hits: Number of prompt tokens whose KV was fetched from another worker.
        lease_renewals: Number of times that a heartbeat extended a lease.
        notifications_after_expiry: Number of reads of prompts that had no lease, or none any more.
        steps: Number of completed steps.
        lease_expiries: Number of expired leases, by the term in which they expired.
        preemptions_by: Number of preemptions, by the kind of preemption and the priority of the preempted request.
    """

    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    external_queries: int = 0
    external_hits: int = 0
    lease_renewals: int = 0
    notifications_after_expiry: int = 0
    steps: int = 0
    lease_expiries: Counter[LeaseTerm] = field(default_factory=Counter)
    preemptions_by: Counter[tuple[PreemptionKind, int]] = field(default_factory=Counter)
