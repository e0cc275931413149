"""Measures points against an OpenAI server, with the client that replays traces; all times in simulated seconds.

A prompt's text is random and its own, so nothing of it is cached. Servers count in their own tokens: the text's length is
found by asking, and a point carries the length that the server reports.
"""

from __future__ import annotations

import asyncio
import statistics
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from penstock.core.clock import SimulatedClock
from penstock.core.errors import PenstockError, UpstreamError
from penstock.core.http.client import ConnectionPool
from penstock.core.simulated_tokens import BYTES_PER_TOKEN
from penstock.performance.sweep import DecodePoint, PrefillPoint
from penstock.profiler.points import OUTPUT_TOKENS
from penstock.workload.exchange import NO_TOKENS, RequestSender, SendSettings
from penstock.workload.prompts import unique_text
from penstock.workload.record import RequestResult, RequestStatus
from penstock.workload.traces import TraceRequest

_REPEATS = 3
"""Prompts per length, whose median TTFT counts. Chosen: one late read does not show."""
_ATTEMPTS = 10
"""Most prompts per length. A first token may carry no text, part of a letter alone, and then shows no TTFT."""
_LONG_TTFT_S = 0.5
"""Simulated seconds; one prompt is enough above. Chosen: a late read of milliseconds does not show in it."""
_MAX_OUTPUT_TOKENS = 8 * OUTPUT_TOKENS
"""Chosen: streams that do not overlap for this long do not run at once."""
_CALIBRATION_TOKENS = (256, 64)
"""Chosen: a tokenizer that knows few words makes four times as many tokens of the text, and models end at 2,048. The longer
one first: it also warms the engine up."""
_CACHED = 0.9
_LARGEST_BLOCK = 128
"""Tokens. A warmed prompt counts as cached from 90% of it, less its last block, which no engine keeps; vLLM's largest."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A measured batch.

    Attributes:
        point: None where the engine does not run so many at once.
        doubts: What makes the point less certain, as text.
    """

    point: DecodePoint | None
    doubts: tuple[str, ...] = ()


class Prompts:
    """Texts of any number of tokens, each beginning as its longer self does."""

    def __init__(self, seed: int) -> None:
        """Choose the texts: another seed gives others, that no cache knows."""
        self._seed = seed
        self.bytes_per_token = float(BYTES_PER_TOKEN)
        self.overhead_tokens = 0.0

    def text(self, line: int, tokens: float) -> bytes:
        """Return the text of a line, of about so many of the server's tokens."""
        wanted = max(1.0, tokens - self.overhead_tokens) * self.bytes_per_token
        return unique_text(self._seed, line, -(-round(wanted) // BYTES_PER_TOKEN))[: round(wanted)]

    def calibrate(self, short: tuple[int, int], long: tuple[int, int]) -> None:
        """Learn the server's tokens from two texts: (bytes, tokens reported) of each."""
        if long[1] <= short[1]:
            return  # what the server reports does not follow the text: a point will show it
        self.bytes_per_token = (long[0] - short[0]) / (long[1] - short[1])
        self.overhead_tokens = max(0.0, short[1] - short[0] / self.bytes_per_token)


class Measurer:
    """Measures one server; holds its connections until `close`."""

    def __init__(self, sending: SendSettings, *, speed: float, seed: int) -> None:
        self._pool = ConnectionPool()
        self._clock = SimulatedClock(speed)
        self._sender = RequestSender(self._pool, self._clock, sending, on_first=lambda _: None)
        self._prompts = Prompts(seed)
        self._line = 0

    async def close(self) -> None:
        """Close the connections."""
        await self._pool.close()

    async def calibrate(self) -> None:
        """Warm the engine up, and learn how long its tokens are.

        Raises:
            UpstreamError: the server fails, or does not report usage.
        """
        seen = []
        for tokens in _CALIBRATION_TOKENS:
            text = self._prompts.text(self._next_line(), tokens)
            result = await self._one(text, tokens, output_tokens=1, needs_text=False)
            seen.append((len(text), _prompt_tokens(result)))
        self._prompts.calibrate(short=seen[1], long=seen[0])

    async def prefill(self, tokens: int) -> PrefillPoint:
        """Return the median TTFT of prompts of about ``tokens``, one at a time.

        Raises:
            UpstreamError: the server fails, hangs, or reports what cannot be.
        """
        results: list[RequestResult] = []
        for attempt in range(_ATTEMPTS):
            text = self._prompts.text(self._next_line(), tokens)
            is_last = attempt == _ATTEMPTS - 1 and not results
            result = await self._one(text, tokens, output_tokens=1, needs_text=is_last)
            results += [result] if result.ttft_s is not None else []
            if results and len(results) >= repeats(_ttft_s(results[0])):
                break
        cached = [result.cached_tokens or 0 for result in results]
        if any(cached):
            raise UpstreamError(
                f"{max(cached)} tokens of a prompt that was never sent before came from the cache; a profile needs an"
                " engine that computes what it is sent"
            )
        lengths = statistics.median(_prompt_tokens(result) for result in results)
        return PrefillPoint(lengths, statistics.median(_ttft_s(result) for result in results))

    async def warm(self, context: int, count: int) -> None:
        """Let the server cache the prompts of ``count`` requests of a context.

        Raises:
            UpstreamError: the server fails.
        """
        tokens = max(1, context - OUTPUT_TOKENS // 2)
        texts = [self._prompts.text(-1 - at, tokens) for at in range(count)]
        await self._all([self._one(text, tokens, output_tokens=1, needs_text=False) for text in texts])

    async def decode(self, context: int, count: int) -> Batch:
        """Measure ``count`` requests that hold ``context`` tokens on average, their prompts warmed before.

        Raises:
            UpstreamError: the server fails, hangs, or reports what cannot be.
        """
        output_tokens = OUTPUT_TOKENS
        while output_tokens <= _MAX_OUTPUT_TOKENS:
            prompt_tokens = max(1, context - output_tokens // 2)
            texts = [self._prompts.text(-1 - at, prompt_tokens) for at in range(count)]
            results = await self._all(
                [self._one(text, prompt_tokens, output_tokens=output_tokens) for text in texts]
            )
            found = _steady_of(results, output_tokens)
            if found is not None:
                point = DecodePoint(context, count, found.itl_s, found.tokens_per_s)
                return Batch(point, _doubts(results))
            output_tokens *= 2
        return Batch(None, (f"{count} requests of {context:,} tokens do not run at once",))

    async def _one(
        self, text: bytes, tokens: int, *, output_tokens: int, needs_text: bool = True
    ) -> RequestResult:
        request = TraceRequest(0.0, tokens, output_tokens, None, self._line)
        body = self._sender.body(request, text)
        result = await self._sender.send(request, body, request_id=f"profile-{self._next_line()}", zero_s=0.0)
        is_textless = result.error_class == NO_TOKENS and not needs_text
        if result.status is not RequestStatus.OK and not is_textless:
            raise UpstreamError(
                f"a request of {tokens:,} prompt and {output_tokens} output tokens failed: {result.error_class}:"
                f" {result.error}; finished points are kept: run the same command again once the server serves"
            )
        return result

    async def _all(self, requests: Sequence[asyncio._CoroutineLike[RequestResult]]) -> list[RequestResult]:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(each) for each in requests]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from failures
        return [task.result() for task in tasks]

    def _next_line(self) -> int:
        self._line += 1
        return self._line


def repeats(ttft_s: float) -> int:
    """Return how many prompts of a length are timed, by the first one's TTFT."""
    return 1 if ttft_s > _LONG_TTFT_S else _REPEATS


def _steady_of(results: Sequence[RequestResult], output_tokens: int) -> Steady | None:
    streams = [
        Stream(result.sent_s + _ttft_s(result), result.itl_s, _output_tokens(result, output_tokens))
        for result in results
    ]
    return steady(streams)


def _output_tokens(result: RequestResult, asked: int) -> int:
    """Return how many tokens a stream held."""
    if result.output_tokens is None or not result.itl_s:
        raise UpstreamError(
            "the server's usage holds no completion_tokens, or its stream one event only: ITL cannot be told; a profile"
            " needs a server that streams and reports usage (stream_options.include_usage)"
        )
    if result.output_tokens != asked:
        raise UpstreamError(
            f"{asked} tokens were asked for with ignore_eos, but usage reports {result.output_tokens}; a profile needs a"
            " server that generates what is asked for"
        )
    return result.output_tokens


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
    reported = [
        (result.cached_tokens, _prompt_tokens(result))
        for result in results
        if result.cached_tokens is not None
    ]
    missed = [cached for cached, prompt in reported if cached < _CACHED * prompt - _LARGEST_BLOCK]
    if not missed:
        return ()
    return (
        f"{len(missed)} of {len(results)} warmed prompts were not in the cache, so prefill may have disturbed ITL",
    )


LEAST_TOKENS = 12
"""Tokens that each stream must show in the window. Chosen: fewer give a mean that one late read can double."""


@dataclass(frozen=True, slots=True)
class Stream:
    """Token times of one request.

    Attributes:
        first_s: When its first token came, seconds.
        gaps_s: Between successive token events.
        tokens: Output tokens in all.
    """

    first_s: float
    gaps_s: array[float]
    tokens: int


@dataclass(frozen=True, slots=True)
class Steady:
    """What the window shows.

    Attributes:
        itl_s: Mean over the streams of the time per token.
        tokens_per_s: Of all streams together.
    """

    itl_s: float
    tokens_per_s: float


def steady(streams: Sequence[Stream]) -> Steady | None:
    """Return what the streams do while all are in flight; None: they are not for long enough.

    Args:
        streams: One at least, each of two token events at least.
    """
    times = [list(accumulate(stream.gaps_s, initial=stream.first_s)) for stream in streams]
    begin, end = max(each[0] for each in times), min(each[-1] for each in times)
    itls = [_itl_s(stream, each, begin, end) for stream, each in zip(streams, times, strict=True)]
    known = [itl_s for itl_s in itls if itl_s is not None]
    if len(known) < len(streams):
        return None
    return Steady(sum(known) / len(known), sum(1 / itl_s for itl_s in known))


def _itl_s(stream: Stream, times: Sequence[float], begin: float, end: float) -> float | None:
    first, last = bisect_left(times, begin), bisect_right(times, end) - 1
    tokens = (last - first) * (stream.tokens - 1) / len(stream.gaps_s)
    if tokens < LEAST_TOKENS or times[last] <= times[first]:
        return None
    return (times[last] - times[first]) / tokens
