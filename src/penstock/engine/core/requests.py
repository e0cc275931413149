"""The engine's view of a request: the immutable order and the state it passes through; and the counters.

The engine writes `RequestState` and `EngineCounters`; servers, metrics and simulators only read them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class EngineRole(StrEnum):
    """What a worker does with key-value caches of others."""

    PREFILL = "prefill"
    DECODE = "decode"
    AGGREGATED = "aggregated"
    BOTH = "both"

    @property
    def keeps(self) -> bool:
        """Whether it keeps a prompt's KV for decode where a request says so."""
        return self in {EngineRole.PREFILL, EngineRole.BOTH}

    @property
    def fetches(self) -> bool:
        """Whether it fetches a prompt's KV where a request says so."""
        return self in {EngineRole.DECODE, EngineRole.BOTH}


class FinishReason(StrEnum):
    """Why a request ended; vLLM's words, as its ``finished_reason`` label has them."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class RequestStage(StrEnum):
    """Where a request is.

    ``waiting`` → (``loading`` → ``loaded``) → (``prefilling``) → ``decoding`` → ``finished``; a preempted request goes back to
    ``waiting``, by way of ``swapping`` while its KV is copied to host memory.
    """

    WAITING = "waiting"
    LOADING = "loading"
    LOADED = "loaded"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    SWAPPING = "swapping"
    FINISHED = "finished"


class PreemptionKind(StrEnum):
    """What becomes of a victim's KV."""

    SWAP = "swap"
    RECOMPUTE = "recompute"
    DROP = "drop"


class LeaseTerm(StrEnum):
    """Which of its terms a lease ran out of: its first, one that heartbeats moved, or the fixed one of a decode worker."""

    INITIAL = "initial"
    EXTENSION = "extension"
    DECODER_TTL = "decoder_ttl"


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One request, as the engine sees it.

    Attributes:
        request_id: Unique among requests in flight.
        output_tokens: Tokens that it generates, >= 1; ``ends_by`` says what stops it there.
        block_keys: Prefix keys of the prompt's full blocks; empty disables reuse.
        priority: Lower runs first; read under the priority policy only.
        load_remote: The prompt's KV is on another worker and is fetched instead of computed.
        remote_tokens: How many of its tokens are there, from its beginning, >= 1; None: all. What is missing, and at
            least the last token, is then computed here.
        pin_blocks: Keep the blocks when it ends, for another worker to read.
        prompt: Its token ids, packed into 4 bytes each; only a journal of the cache reads it.
        adapter: The LoRA adapter that it asks for, for that journal; None: the model itself.
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
    """A request on its way through the engine.

    While it decodes, ``computed`` and ``outputs`` keep the values of ``base_tick``: every decoding
    request advances by one token per step, so the batcher counts steps once for all of them.

    Attributes:
        index: Order of arrival, unique.
        epoch: Raised whenever the request enters or leaves the batch; entries with an old epoch are void.
        prefill_target: Tokens to compute before the next output; the prompt, plus the outputs after a preemption.
        cached_tokens: Prompt tokens found in the local prefix cache at first admission.
        external_tokens: Prompt tokens fetched from another worker.
        last_token_s: Kept only across preemptions.
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
        """Remember when the request first entered a batch; fetching its KV is still waiting."""
        if self.first_scheduled_s is None:
            self.first_scheduled_s = now_s


@dataclass(slots=True)
class EngineCounters:
    """Monotonic counts since start, in requests or tokens as vLLM counts them; preemptions by kind and the victim's priority."""

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
