"""Measures a simulated engine in virtual time: the worker's own step machine, driven from step to step.

No clock and no process take part, so that a busy machine stretches no figure and each run finds the same.
"""

from __future__ import annotations

from penstock.api import GraphSpec
from penstock.engine.core.engine import Engine
from penstock.engine.core.requests import EngineRequest, RequestState
from penstock.engine.core.timeline import Timeline
from penstock.engine.serve.settings import ServeFlags, ServeSettings, resolve
from penstock.performance.sweep import DecodePoint, KvTransferCost, PrefillPoint
from penstock.profiler.measure import MAX_OUTPUT_TOKENS, Stream, steady
from penstock.profiler.points import OUTPUT_TOKENS


def simulated_settings(spec: GraphSpec, profile: str) -> ServeSettings:
    """Return the settings of a worker of a graph with another latency profile, as `penstock engine serve` has them.

    Raises:
        ConfigError: the worker would not start; flag, value and remedy are named.
    """
    engine = spec.engine
    chosen: dict[str, int | None] = {
        "block_size": engine.block_tokens,
        "num_gpu_blocks_override": engine.kv_blocks,
        "max_num_seqs": engine.max_running_requests,
        "max_num_batched_tokens": engine.max_batch_tokens,
        "max_model_len": spec.model.context_tokens,
    }
    given = {name: value for name, value in chosen.items() if value is not None}
    return resolve(ServeFlags(spec.model.name, profile=profile, **given))  # type: ignore[arg-type]  # all are counts


def transfer_of(settings: ServeSettings) -> KvTransferCost:
    """Return what the simulated link takes to hand a prompt to another worker."""
    link = settings.engine.link
    return KvTransferCost(link.latency_s, settings.engine.kv_bytes_per_token / link.bytes_per_s)


class SimulatedMeasurer:
    """Measures the points of one simulated engine, each on an engine of its own that has served nothing before."""

    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings
        self._block_size = settings.engine.limits.block_size

    async def prefill(self, tokens: int) -> PrefillPoint:
        """Return the TTFT of a prompt alone."""
        ((state,), _) = self._serve(self._engine(), [self._request(0, tokens, 1)])
        assert state.first_token_s is not None  # noqa: S101 - it has ended
        return PrefillPoint(float(tokens), state.first_token_s - state.request.arrival_s)

    async def warm(self, context: int, count: int) -> None:
        """Do nothing: each batch warms its own engine."""

    async def decode(self, context: int, count: int) -> tuple[DecodePoint | None, tuple[str, ...]]:
        """Return a batch as `Measurer.decode` does; None where the engine does not run this many at once."""
        output_tokens = OUTPUT_TOKENS
        while output_tokens <= MAX_OUTPUT_TOKENS:
            tokens = max(1, context - output_tokens // 2)
            timeline = self._engine()
            self._serve(timeline, [self._request(at, tokens, 1) for at in range(count)])
            start_s = timeline.now_s
            requests = [self._request(at, tokens, output_tokens, start_s) for at in range(count)]
            states, ends = self._serve(timeline, requests)
            found = steady([_stream(state, ends) for state in states])
            if found is not None and not any(state.preemptions for state in states):
                return DecodePoint(float(context), float(count), *found), ()
            output_tokens *= 2
        return None, (f"{count} requests of {context:,} tokens do not run at once",)

    def _engine(self) -> Timeline:
        return Timeline(Engine(self._settings.engine, self._settings.latency()))

    def _request(self, place: int, tokens: int, output_tokens: int, arrival_s: float = 0.0) -> EngineRequest:
        """Return the request of a prompt that is the same for each place, and shares nothing with others."""
        blocks = tokens // self._block_size
        keys = range(place << 32, (place << 32) + blocks)
        return EngineRequest(f"{place}-{arrival_s}", tokens, output_tokens, arrival_s, keys)

    @staticmethod
    def _serve(timeline: Timeline, requests: list[EngineRequest]) -> tuple[list[RequestState], list[float]]:
        """Serve requests to their ends; return them, and when each step ended."""
        for request in requests:
            timeline.submit(request)
        states: list[RequestState] = []
        ends: list[float] = []
        while len(states) < len(requests) and (due_s := timeline.next_due_s()) is not None:
            for outcome in timeline.run_until(due_s, max_steps=1):
                ends.append(outcome.end_s)
                states += outcome.finished
        return states, ends


def _stream(state: RequestState, ends: list[float]) -> Stream:
    """Return a request's token times: a running request brings one in each step."""
    assert state.first_token_s is not None  # noqa: S101 - it has ended
    assert state.finished_s is not None  # noqa: S101 - it has ended
    times = tuple(end_s for end_s in ends if state.first_token_s <= end_s <= state.finished_s)
    return Stream(times, state.request.output_tokens)
