"""One step's work, as the batcher plans it; the engine carries it out."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.engine.core.preemption import PreemptionKind
from penstock.engine.core.requests import RequestState


@dataclass(frozen=True, slots=True)
class Span:
    """A chunk of one prompt: tokens [start, end) are computed in this step.

    Attributes:
        begins: Whether it is the first chunk since the request was admitted.
        epoch: The request's epoch at planning; another one at the end means that it left meanwhile.
    """

    state: RequestState
    start: int
    end: int
    begins: bool
    epoch: int


@dataclass(slots=True)
class Batch:
    """One step's work.

    Attributes:
        joined: Requests whose KV came from another worker and that run from here on.
        loads: Requests whose blocks were allocated for a transfer that starts now.
        declined: Requests whose KV is computed although it lies on another worker.
        admitted: Requests scheduled for the first time.
        swapped_out: Those of them whose KV is copied to host memory from now on.
        dropped: Those of them that end here.
        swapped_in: Requests whose KV is copied back from now on, and the tokens to copy.
        decode_kv_tokens: Tokens that those attend to.
    """

    spans: list[Span] = field(default_factory=list)
    joined: list[RequestState] = field(default_factory=list)
    loads: list[RequestState] = field(default_factory=list)
    declined: list[RequestState] = field(default_factory=list)
    admitted: list[RequestState] = field(default_factory=list)
    preempted: list[RequestState] = field(default_factory=list)
    swapped_out: list[RequestState] = field(default_factory=list)
    dropped: list[RequestState] = field(default_factory=list)
    swapped_in: list[tuple[RequestState, int]] = field(default_factory=list)
    decode_batch: int = 0
    decode_kv_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Tokens computed, at most the budget."""
        return self.decode_batch + sum(span.end - span.start for span in self.spans)

    def kind_of(self, victim: RequestState) -> PreemptionKind:
        """Return what became of one of ``preempted``."""
        if any(victim is state for state in self.swapped_out):
            return PreemptionKind.SWAP
        is_dropped = any(victim is state for state in self.dropped)
        return PreemptionKind.DROP if is_dropped else PreemptionKind.RECOMPUTE
