"""Whether a stream whose worker broke it off goes on at another one, and what that one is asked; `handler` calls it."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import xxhash

from penstock.api import GraphSpec
from penstock.api.router import RetriesConfig
from penstock.core.http.streaming import Observe
from penstock.core.logs import get_logger
from penstock.router.core.retries import RetryScope
from penstock.router.metrics import RouterMetrics
from penstock.router.proxy.call import CompletionCall
from penstock.router.proxy.continuation import (
    MAX_DEATHS,
    BegunStream,
    Kept,
    KeptTotal,
    Seam,
    ending,
    refusal_of,
    rest_of,
    said_of,
)
from penstock.router.proxy.failures import StageFailed
from penstock.router.proxy.stream import RelayMeter

log = get_logger(__name__)

_BROKEN: Final = "upstream_broken"
"""The reason of a worker that died, or whose stream did, while it answered."""


class StreamRests:
    """The rests of one router's broken streams."""

    def __init__(self, config: RetriesConfig, graph: GraphSpec | None, metrics: RouterMetrics) -> None:
        self._most = config.max_continuations
        self._tokens_per_event = 1 if graph is None else graph.engine.stream_interval_tokens
        self._metrics = metrics
        self._total = KeptTotal()

    def begin(self, call: CompletionCall) -> BegunStream | None:
        """Return what is to be kept of a stream that begins, or goes on; None where no other worker could."""
        if call.begun is None and self._most and not refusal_of(call.request):
            call.begun = BegunStream(Kept(self._total), call.request)
        return call.begun

    def follow(self, begun: BegunStream, meter: RelayMeter, ttft_s: float | None) -> Observe:
        """Return what takes each read of the worker that speaks now, and gives what to send."""
        if begun.seam is None:
            meter.kept = begun.kept
            return meter.observe
        meter.ttft_s, meter.last_real_s = ttft_s, begun.last_real_s
        return partial(_observe_rest, meter, begun.kept, begun.seam)

    def said(self, begun: BegunStream, meter: RelayMeter) -> tuple[dict[str, Any] | None, int]:
        """Return usage and tokens of the whole, at the end of what a worker says."""
        if meter.tokens:
            begun.speakers += 1
            begun.last_real_s = meter.last_real_s
        if begun.seam is None:
            return meter.usage, meter.tokens
        return begun.seam.usage, begun.seam.tokens + meter.tokens

    def prepare(self, call: CompletionCall, stage: StageFailed) -> bool:
        """Make a call ask for the rest of its stream; return False where only the stream's end is left to be said.

        Raises:
            StageFailed: the stream ends here, as it broke.
        """
        begun, reason = call.begun, stage.failure.reason
        if begun is None:
            self._lose(call, "request", refusal_of(call.request) or "retries.maxContinuations is 0")
            raise stage
        begun.deaths += reason == _BROKEN
        if stage.failure.scope is RetryScope.NOWHERE or begun.continuations >= self._most:
            self._lose(call, "limit", reason)
            raise stage
        if begun.deaths >= MAX_DEATHS:
            digest = xxhash.xxh3_64_hexdigest(begun.request.raw)
            self._lose(call, "deaths", f"{begun.deaths} workers broke off at it; body {digest}")
            raise stage
        said = said_of(begun.kept, begun.request)
        if said.refusal:
            self._lose(call, "said", said.refusal)
            raise stage
        # Each worker's first token comes alone, then so many an event.
        tokens = begun.speakers + (said.events - begun.speakers) * self._tokens_per_event
        rest = None if said.finish_reason else rest_of(begun.request, said, tokens)
        if rest is None:
            counted = call.prompt_tokens if call.prompt_counted else None
            call.responder.write(ending(begun.request, said, tokens, counted))
            return False
        call.request, call.transfer = rest, None
        # The rest has the retries of a request of its own, whatever came before the first token.
        call.tries.retries = 0
        begun.seam = Seam(said.head, tokens)
        return True

    def go_on(self, call: CompletionCall, reason: str) -> None:
        """Count a stream that goes on at another worker."""
        begun = call.begun
        assert begun is not None  # noqa: S101 - prepared
        assert begun.seam is not None  # noqa: S101 - likewise
        begun.continuations += 1
        self._metrics.continuations[reason] += 1
        log.info("stream goes on elsewhere", reason=reason, left=call.worker, tokens=begun.seam.tokens)

    def _lose(self, call: CompletionCall, why: str, words: str) -> None:
        self._metrics.lost_streams[why] += 1
        log.warning("stream broken off", worker=call.worker, why=words)


def _observe_rest(meter: RelayMeter, kept: Kept, seam: Seam, data: bytes, at: int = 0) -> bytes:
    """Take one read of a stream that goes on, and return what to send; as `RelayMeter.observe`."""
    joined = seam.join(meter.observe(data[at:-2] if at else data))
    kept.append(joined)
    kept.count()
    return joined
