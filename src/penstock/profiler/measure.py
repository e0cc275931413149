"""Measures points against an OpenAI server, with the client that replays traces; all times in simulated seconds.

A prompt's text is random and its own, so nothing of it is cached. Servers count in their own tokens: the text's length is
found by asking, and a point carries the length that the server reports.
"""

from __future__ import annotations

import asyncio
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from penstock.core.clock import SimulatedClock
from penstock.core.errors import PenstockError, UpstreamError
from penstock.core.http.client import ConnectionPool
from penstock.core.simulated_tokens import BYTES_PER_TOKEN
from penstock.performance.sweep import DecodePoint, PrefillPoint
from penstock.profiler.points import OUTPUT_TOKENS
from penstock.workload.exchange import NO_TOKENS, Destination, RequestSender
from penstock.workload.prompts import unique_text
from penstock.workload.record import RequestResult, RequestStatus
from penstock.workload.traces import TraceRequest

_REPEATS = 3
"""Prompts per length, whose median TTFT counts. Chosen: one late read does not show."""
_ATTEMPTS = 10
"""Maximum number of prompts per length. A first token may carry no text, part of a letter alone, and then shows no TTFT."""
_LONG_TTFT_S = 0.5
"""Simulated seconds; one prompt is enough above. Chosen: a late read of milliseconds does not show in it."""
MAX_OUTPUT_TOKENS = 8 * OUTPUT_TOKENS
"""Chosen: streams that do not overlap for this long do not run at once."""
_CALIBRATION_TOKENS = (256, 64)
"""Chosen: a tokenizer that knows few words makes four times as many tokens of the text, and models end at 2,048. The longer
one first: it also warms the engine up."""
_CACHED = 0.9
_LARGEST_BLOCK = 128
"""Tokens. A warmed prompt counts as cached from 90% of it, less its last block, which no engine keeps; vLLM's largest."""


class PointSource(Protocol):
    """What measures the points of one engine: a `Measurer`, or `SimulatedMeasurer` in virtual time."""

    async def prefill(self, tokens: int) -> PrefillPoint:
        """Return the TTFT of prompts of about ``tokens``, one at a time."""
        ...

    async def warm(self, context: int, count: int) -> None:
        """Let the engine cache the prompts of ``count`` requests of a context."""
        ...

    async def decode(self, context: int, count: int) -> tuple[DecodePoint | None, tuple[str, ...]]:
        """Measure ``count`` requests that hold ``context`` tokens on average, their prompts warmed before."""
        ...


class Measurer:
    """Measures one server with texts that no cache knows, each beginning as its longer self does."""

    def __init__(self, pool: ConnectionPool, destination: Destination, *, speed: float, seed: int) -> None:
        self._sender = RequestSender(pool, SimulatedClock(speed), destination, on_first=lambda _: None)
        self._seed = seed
        self._line = 0
        self._bytes_per_token = float(BYTES_PER_TOKEN)
        self._overhead_tokens = 0.0

    async def calibrate(self) -> None:
        """Warm the engine up, and learn how long its tokens are.

        Raises:
            UpstreamError: the server fails, or does not report usage.
        """
        sizes = []
        for tokens in _CALIBRATION_TOKENS:
            result = await self._one(tokens, needs_text=False)
            sizes.append((len(self._text(self._line, tokens)), _prompt_tokens(result)))
        (long_bytes, long_tokens), (short_bytes, short_tokens) = sizes
        if (
            long_tokens > short_tokens
        ):  # else what the server reports does not follow the text: a point will show it
            self._bytes_per_token = (long_bytes - short_bytes) / (long_tokens - short_tokens)
            self._overhead_tokens = max(0.0, short_tokens - short_bytes / self._bytes_per_token)

    async def prefill(self, tokens: int) -> PrefillPoint:
        """Return the median TTFT of prompts of about ``tokens``, one at a time.

        Raises:
            UpstreamError: the server fails, hangs, or reports what cannot be.
        """
        results: list[RequestResult] = []
        for attempt in range(_ATTEMPTS):
            result = await self._one(tokens, needs_text=attempt == _ATTEMPTS - 1 and not results)
            results += [result] if result.ttft_s is not None else []
            if results and len(results) >= (1 if _ttft_s(results[0]) > _LONG_TTFT_S else _REPEATS):
                break
        cached = max(result.cached_tokens or 0 for result in results)
        if cached:
            raise UpstreamError(
                f"{cached} tokens of a prompt that was never sent before came from the cache; a profile needs an engine that"
                " computes what it is sent"
            )
        lengths = statistics.median(_prompt_tokens(result) for result in results)
        return PrefillPoint(lengths, statistics.median(_ttft_s(result) for result in results))

    async def warm(self, context: int, count: int) -> None:
        """Let the server cache the prompts of ``count`` requests of a context.

        Raises:
            UpstreamError: the server fails.
        """
        await self._at_once(count, max(1, context - OUTPUT_TOKENS // 2), output_tokens=1, needs_text=False)

    async def decode(self, context: int, count: int) -> tuple[DecodePoint | None, tuple[str, ...]]:
        """Measure ``count`` requests that hold ``context`` tokens on average, their prompts warmed before.

        Returns:
            The batch, None where the engine does not run this many at once, and what makes it less certain.

        Raises:
            UpstreamError: the server fails, hangs, or reports what cannot be.
        """
        output_tokens = OUTPUT_TOKENS
        while output_tokens <= MAX_OUTPUT_TOKENS:
            tokens = max(1, context - output_tokens // 2)
            results = await self._at_once(count, tokens, output_tokens=output_tokens)
            found = steady([_stream_of(result, output_tokens) for result in results])
            if found is not None:
                return DecodePoint(context, count, *found), _doubts(results)
            output_tokens *= 2
        return None, (f"{count} requests of {context:,} tokens do not run at once",)

    async def _at_once(
        self, count: int, tokens: int, *, output_tokens: int, needs_text: bool = True
    ) -> list[RequestResult]:
        """Send prompts that are the same for each ``count``, at the same time."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(
                        self._one(tokens, line=-1 - at, output_tokens=output_tokens, needs_text=needs_text)
                    )
                    for at in range(count)
                ]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from failures
        return [task.result() for task in tasks]

    async def _one(
        self, tokens: int, *, line: int | None = None, output_tokens: int = 1, needs_text: bool
    ) -> RequestResult:
        """Send the prompt of a line, by itself of one that was never sent."""
        self._line += 1
        name, text = f"profile-{self._line}", self._text(self._line if line is None else line, tokens)
        request = TraceRequest(0.0, tokens, output_tokens, None, self._line)
        result = await self._sender.send(
            request, self._sender.body(request, text), request_id=name, zero_s=0.0
        )
        is_textless = result.error_class == NO_TOKENS and not needs_text
        if result.status is not RequestStatus.OK and not is_textless:
            raise UpstreamError(
                f"a request of {tokens:,} prompt and {output_tokens} output tokens failed: {result.error_class}:"
                f" {result.error}; finished points are kept: run the same command again once the server serves"
            )
        return result

    def _text(self, line: int, tokens: float) -> bytes:
        """Return the text of a line, of about this many of the server's tokens."""
        wanted = round(max(1.0, tokens - self._overhead_tokens) * self._bytes_per_token)
        return unique_text(self._seed, line, -(-wanted // BYTES_PER_TOKEN))[:wanted]


def _stream_of(result: RequestResult, asked: int) -> Stream:
    if result.output_tokens is None or not result.itl_s:
        raise UpstreamError(
            "the server's usage holds no completion_tokens, or its stream one event only: ITL is unknown; a profile"
            " needs a server that streams and reports usage (stream_options.include_usage)"
        )
    if result.output_tokens != asked:
        raise UpstreamError(
            f"{asked} tokens were requested with ignore_eos, but usage reports {result.output_tokens}; a profile needs a"
            " server that generates what is requested"
        )
    times = tuple(accumulate(result.itl_s, initial=result.sent_s + _ttft_s(result)))
    return Stream(times, result.output_tokens)


def _prompt_tokens(result: RequestResult) -> int:
    if not result.prompt_tokens:
        raise UpstreamError(
            f"the server's usage reports prompt_tokens {result.prompt_tokens}: the prompt's length is unknown; a profile"
            " needs a server that reports usage (stream_options.include_usage)"
        )
    return result.prompt_tokens


def _ttft_s(result: RequestResult) -> float:
    if result.ttft_s is None:
        raise PenstockError("a finished request has no first token")
    return result.ttft_s


def _doubts(results: Sequence[RequestResult]) -> tuple[str, ...]:
    """Say where the server recomputed prompts that should have been cached: it had no room for them."""
    missed = [
        result
        for result in results
        if result.cached_tokens is not None
        and result.cached_tokens < _CACHED * _prompt_tokens(result) - _LARGEST_BLOCK
    ]
    if not missed:
        return ()
    return (
        f"{len(missed)} of {len(results)} warmed prompts were not in the cache, so prefill may have disturbed ITL",
    )


LEAST_TOKENS = 12
"""Tokens that each stream must show in the window. Chosen: fewer give a mean that one late read can double."""


@dataclass(frozen=True, slots=True)
class Stream:
    """One request's token events.

    Attributes:
        times: When each came, seconds; two at least.
        tokens: Output tokens in all.
    """

    times: tuple[float, ...]
    tokens: int


def steady(streams: Sequence[Stream]) -> tuple[float, float] | None:
    """Return the mean ITL in seconds and the tokens/s of all together while all are in flight; None: too short."""
    begin, end = max(each.times[0] for each in streams), min(each.times[-1] for each in streams)
    itls = []
    for stream in streams:
        first, last = bisect_left(stream.times, begin), bisect_right(stream.times, end) - 1
        tokens = (last - first) * (stream.tokens - 1) / (len(stream.times) - 1)
        if tokens < LEAST_TOKENS or stream.times[last] <= stream.times[first]:
            return None
        itls.append((stream.times[last] - stream.times[first]) / tokens)
    return statistics.fmean(itls), sum(1 / itl_s for itl_s in itls)
