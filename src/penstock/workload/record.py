"""The result of one replayed request as the client saw it, in simulated seconds."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

from pydantic import PlainValidator

from penstock.api import Tier


class RequestStatus(StrEnum):
    """How a request ended.

    OK: the complete answer came. REJECTED: the server was busy and said so (429 or 503).
    FAILED: everything else.
    """

    OK = "ok"
    FAILED = "failed"
    REJECTED = "rejected"


def _gaps(values: Iterable[float] = ()) -> array[float]:
    return array("f", values)


if TYPE_CHECKING:
    Gaps = array[float]
else:  # at run time arrays have no parameters before Python 3.12
    Gaps = Annotated[array, PlainValidator(_gaps)]


@dataclass(frozen=True, slots=True)
class RequestResult:
    """One request. Times are simulated seconds from the replay's zero; durations count from sending.

    Attributes:
        sent_s: When it was sent; the difference is the client's lag, or its wait for the concurrency cap.
        error_class: ``connect``, ``timeout_<phase>``, ``broken``, ``stream_error``, ``truncated``,
            ``http_<code>``; None when ok. Bounded, for counting.
        block_ids: The trace's, one per begun 512 prompt tokens, so that the traffic can be replayed with the
            prefixes that it shared; None when it has none.
        is_prompt_exact: Whether ``prompt_tokens`` must equal the trace's: on /v1/completions, not on chat,
            where the server's template adds its own.
        prompt_tokens, output_tokens, cached_tokens: As the server's usage says; None when it does not.
        ttft_s: From sending to the first token, queueing included.
        e2e_s: From sending to the last token.
        tpot_s: (e2e - TTFT) / (output tokens - 1); None below two tokens.
        itl_s: Gaps between successive token events.
    """

    id: str
    line: int
    arrival_s: float
    sent_s: float
    ended_s: float
    status: RequestStatus
    http_status: int | None
    error: str | None
    error_class: str | None
    trace_input_tokens: int
    trace_output_tokens: int
    block_ids: tuple[int, ...] | None = None
    is_prompt_exact: bool = True
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    ttft_s: float | None = None
    e2e_s: float | None = None
    tpot_s: float | None = None
    itl_s: Gaps = field(default_factory=_gaps)
    tier: Tier | None = None
