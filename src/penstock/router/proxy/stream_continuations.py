"""Builds the requests that resume broken streams on other workers, and keeps the records for them; called by `handler`."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from penstock.api import GraphSpec
from penstock.api.enums import ContinueBy
from penstock.api.router_workers import RetriesConfig
from penstock.core.http.streaming import Observe
from penstock.core.logs import get_logger
from penstock.router.core.limits import LIMITS as ROUTER_LIMITS
from penstock.router.core.moves import StreamProgress
from penstock.router.core.request_steps import QueryOfDeath, StreamEnding, StreamLost
from penstock.router.metrics import RouterMetrics
from penstock.router.proxy.call import CompletionCall
from penstock.router.proxy.completion import CompletionRequest
from penstock.router.proxy.continuation import (
    LIMITS,
    CompletionSplicer,
    EmittedPrefix,
    ResumableStream,
    StreamSplicer,
    continuation_request,
    emitted_prefix,
    ending,
    refusal_of_stream,
)
from penstock.router.proxy.hidden_ids import observe_without_ids
from penstock.router.proxy.message_splicer import MessageSplicer
from penstock.router.proxy.not_resumable import ENDING, WITH_IDS, refusal_of, takes_tokens
from penstock.router.proxy.query_of_death import REFUSED_S, QueriesOfDeath
from penstock.router.proxy.response_splicer import ResponseSplicer
from penstock.router.proxy.routes import ApiEndpoint
from penstock.router.proxy.stream import RelayMeter
from penstock.router.proxy.stream_record import RecordedBytes, StreamRecord

log = get_logger(__name__)

_ENDS_UNKNOWN: Final = frozenset({ApiEndpoint.RESPONSES, ApiEndpoint.MESSAGES})
"""APIs whose last events only the worker can write."""
_LIMIT_BY_NAME: Final = {each.name: each for each in ROUTER_LIMITS}


class StreamContinuations:
    """Resumes the interrupted streams of one router on other workers, and counts and logs the outcomes.

    ``config`` contains how often and by what (text or tokens) streams are resumed; ``graph`` contains the model's context
    length, None if there is no graph; ``metrics`` are the counters of the router; ``queries_of_death`` contains the requests
    that are rejected because they have crashed workers.
    """

    def __init__(
        self,
        config: RetriesConfig,
        graph: GraphSpec | None,
        metrics: RouterMetrics,
        queries_of_death: QueriesOfDeath,
    ) -> None:
        self._queries_of_death = queries_of_death
        self._max_continuations = config.max_continuations
        self._by_tokens = config.continue_by is ContinueBy.TOKENS
        self._context_tokens = None if graph is None else graph.model.context_tokens
        self._tokens_per_event = 1 if graph is None else graph.engine.stream_interval_tokens
        self._metrics = metrics
        self._total = RecordedBytes()

    def requests_token_ids(self, request: CompletionRequest) -> bool:
        """Return whether the router asks the worker for token ids, so that another worker can resume the stream by these ids.

        False if the graph resumes no streams or resumes them by text, if ``request`` is not for a stream, or if its stream
        cannot be resumed by tokens.
        """
        return (
            self._by_tokens
            and request.stream
            and self._max_continuations > 0
            and takes_tokens(request, self._context_tokens)
        )

    def resumable_stream_of(self, call: CompletionCall) -> ResumableStream | None:
        """Return the state by which another worker can resume the stream of ``call`` if it breaks off; None if none could.

        Called when a worker starts to send the stream. The first call creates the state and stores it in ``call``: the events
        that the client gets are recorded there from now on. Later calls, for the workers that resume it, return the same
        state.
        """
        if (
            call.resumable is None
            and self._max_continuations
            and (call.requests_token_ids or not refusal_of(call.request))
        ):
            record = StreamRecord(
                call.request,
                self._total,
                tokens_per_event=self._tokens_per_event,
                by_tokens=call.requests_token_ids,
            )
            hides_ids = call.requests_token_ids and not call.request.body.get(WITH_IDS)
            call.resumable = ResumableStream(record, call.request, hides_ids)
        return call.resumable

    def observer_of(self, resumable: ResumableStream, meter: RelayMeter, ttft_s: float | None) -> Observe:
        """Return the function that processes each read from the present worker and returns the bytes for the client.

        Args:
            resumable: State of the stream.
            meter: Measures the present worker's stream, and processes each read if the stream was not resumed.
            ttft_s: TTFT of the stream in simulated seconds; only used for a stream that is resumed, and None if no token
                has arrived.
        """
        meter.record = resumable.record
        observe: Observe = meter.observe
        if resumable.splicer is not None:
            meter.ttft_s, meter.last_real_s = ttft_s, resumable.last_real_s
            observe = partial(_observe_continuation, meter, resumable.splicer)
        return partial(observe_without_ids, observe) if resumable.hides_ids else observe

    def totals_of(self, resumable: ResumableStream, meter: RelayMeter) -> tuple[dict[str, Any] | None, int]:
        """Return the usage object and the number of output tokens of the entire stream, over the parts of all workers.

        Called when the part of the present worker, which ``meter`` has measured, has ended; ``resumable`` is the state of the
        stream. The usage object is None if no worker has sent one.
        """
        if meter.tokens:
            resumable.last_real_s = meter.last_real_s
        if resumable.splicer is None:
            return meter.usage, meter.tokens
        return resumable.splicer.usage, resumable.splicer.tokens + meter.tokens

    def build(
        self, resumable: ResumableStream, prompt_tokens: int | None
    ) -> CompletionRequest | StreamEnding | None:
        """Return the request for the remaining part of an interrupted stream; None if the stream cannot be resumed.

        If only the end of the stream is missing, its events are returned instead. ``resumable`` is the state of the stream,
        which is prepared for the worker that resumes it. ``prompt_tokens`` is the number of prompt tokens as a worker has
        counted them; None if unknown.
        """
        emitted = emitted_prefix(resumable.record, resumable.emitted)
        if emitted.refusal:
            return None
        rest = None if emitted.finish_reason else self._request_of(resumable, emitted)
        if rest is None and resumable.request.endpoint in _ENDS_UNKNOWN:
            return None
        if rest is None:
            if emitted.token_ids:
                prompt_tokens = len(emitted.token_ids) - emitted.tokens
            return StreamEnding(ending(resumable.request, emitted, prompt_tokens))
        resumable.record.drop()
        resumable.emitted, resumable.splicer = emitted, _splicer_of(resumable, emitted)
        return rest

    def _request_of(self, resumable: ResumableStream, emitted: EmittedPrefix) -> CompletionRequest | None:
        return continuation_request(resumable.request, emitted, context_tokens=self._context_tokens)

    def progress_of(self, call: CompletionCall, meter: RelayMeter) -> StreamProgress:
        """Return how many tokens of the stream of ``call`` the client has, and its limits, to decide whether it should be moved.

        The tokens are those that ``meter`` has counted, so that no events have to be parsed.
        """
        resumable = _resumable(call)
        before = 0 if resumable.splicer is None else resumable.splicer.tokens
        limits = (resumable.request.body.get(key) for key in LIMITS)
        limit = next((each for each in limits if isinstance(each, int)), None)
        return StreamProgress(call.prompt_tokens, before + meter.tokens * self._tokens_per_event, limit)

    def can_continue(self, call: CompletionCall) -> bool:
        """Return whether another worker could resume the stream of ``call`` if it breaks off now.

        Once this is False for a stream, it stays False.
        """
        resumable = _resumable(call)
        return not refusal_of_stream(resumable.record, resumable.emitted)

    def count_resumed(self, call: CompletionCall, reason: str) -> None:
        """Count in the router's metrics, and log, that the stream of ``call`` is resumed on another worker.

        ``reason`` is the reason of the failure that broke it off, from a fixed set of values (or ``drain``: it was moved).
        """
        splicer = _resumable(call).splicer
        assert splicer is not None  # noqa: S101 - its rest was read
        self._metrics.continuations[reason] += 1
        log.info("stream continues elsewhere", reason=reason, left=call.worker, tokens=splicer.tokens)

    def record_lost(self, call: CompletionCall, step: StreamLost) -> None:
        """Count in the router's metrics, and log, that the interrupted stream of ``call`` is not resumed.

        ``step`` contains why it is not resumed, and the reason of the failure that broke it off.
        """
        why = step.why
        if why == "request":
            why = "" if call.requests_token_ids else refusal_of(call.request)
            why = why or (
                "a gateway relays it" if self._max_continuations else "retries.maxContinuations is 0"
            )
        elif why == "response":
            resumable = _resumable(call)
            why = refusal_of_stream(resumable.record, resumable.emitted) or str(ENDING)
        elif why in _LIMIT_BY_NAME:
            limit = _LIMIT_BY_NAME[why]
            why = f"{limit.name}: {limit.key}"
        self._metrics.lost_streams[step.why] += 1
        log.warning(
            "stream broken off",
            worker=call.worker,
            why=why,
            cause=step.reason,
            continuations=call.machine.continuations,
        )

    def reject_repeats(self, call: CompletionCall, step: QueryOfDeath) -> None:
        """Reject new requests with the body of ``call`` for 10 simulated minutes, because it has crashed workers; log its hash.

        ``step`` contains the names of the workers that died.
        """
        raw = (call.request if call.resumable is None else call.resumable.request).raw
        digest = self._queries_of_death.add(raw, step.before, step.worker)
        log.warning(
            "request refused that killed a worker",
            worker=step.worker,
            before=step.before,
            body=digest,
            refused_s=REFUSED_S,
        )


def _splicer_of(resumable: ResumableStream, emitted: EmittedPrefix) -> StreamSplicer:
    """Return what joins the next worker's events to those that the client has."""
    endpoint = resumable.request.endpoint
    if endpoint is ApiEndpoint.MESSAGES:
        return MessageSplicer(emitted)
    if endpoint is ApiEndpoint.RESPONSES:
        return ResponseSplicer(
            emitted, resumable.splicer if isinstance(resumable.splicer, ResponseSplicer) else None
        )
    return CompletionSplicer(emitted, resumable.request)


def _resumable(call: CompletionCall) -> ResumableStream:
    assert call.resumable is not None  # noqa: S101 - only a stream that may continue is asked for its rest
    return call.resumable


def _observe_continuation(meter: RelayMeter, splicer: StreamSplicer, data: bytes, at: int = 0) -> bytes:
    """Process one read of a resumed stream, and return the bytes for the client; the arguments are those of `RelayMeter.observe`."""
    return splicer.splice(meter.observe(data[at:-2] if at else data))
