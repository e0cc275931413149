"""The requests of a run: a trace or a synthetic process with arrival times spread, prompts cut, number limited and rate scaled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from penstock.core.errors import ConfigError
from penstock.workload.arrivals import (
    OnLong,
    Selection,
    Spread,
    mean_rate,
    parse_mix,
    rescale,
    select,
    spread,
    with_tiers,
)
from penstock.workload.synthetic import parse_synthetic, synthesise
from penstock.workload.trace_info import ideal_hits
from penstock.workload.traces import Trace, TraceRequest, file_version, load_trace

_IDS_APART = 1 << 48
_LINES_APART = 10_000_000
"""Offset between the line numbers of two copies; more lines than any trace has."""

CACHED_WORKLOADS = 32
"""Number of prepared workloads cached per process, since a sweep uses each with every policy. Chosen: five rates of five seeds."""


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """The source of requests and the transformations of these requests, in the order of the fields; a field that is None changes nothing.

    Attributes:
        source: A trace, a trace file, the name of a packaged trace, or a synthetic process such as ``poisson:rate=4``.
        spread: Rule that spreads batches of equal arrival times, as in Mooncake's trace, over 3 s. POISSON draws new times for each seed.
        max_input_tokens: Maximum prompt length in tokens.
        on_long: Whether longer prompts are cut or their requests left out.
        limit: Maximum number of requests.
        warmup: Number of requests at the start that are served but not counted.
        copies: Number of copies of the workload that run at the same time. Each copy has the same requests, with prefixes and spread
            arrival times of its own; ``limit`` and ``warmup`` apply to each copy. For clusters that are too large for one trace.
        tiers: Proportions in which requests ask for tiers, such as ``premium=20,background=80``.
        block_tokens: Tokens per block id of a trace file; None uses the default of its format.
    """

    source: str | Trace
    spread: Spread | None = None
    max_input_tokens: int | None = None
    on_long: OnLong = OnLong.TRUNCATE
    limit: int | None = None
    warmup: int = 0
    copies: int = 1
    tiers: str | None = None
    block_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.warmup < 0:
            raise ConfigError(f"--warmup: {self.warmup} must be at least 0")
        if self.copies < 1:
            raise ConfigError(f"copies: {self.copies} must be at least 1")
        if self.limit is not None and self.warmup >= self.limit:
            raise ConfigError(f"--warmup: {self.warmup} leaves nothing of --limit {self.limit}")


@dataclass(frozen=True)
class Workload:
    """Requests that are ready to run.

    Attributes:
        name: Description of the source for the reader.
        requests: Requests in order of arrival.
        warmup: Number of requests at the start that are served but not counted.
        rate_rps: Mean rate, requests/s; None if there is only one arrival time.
        truncated: Number of prompts that were cut.
        dropped: Number of requests that were left out because their prompts are too long.
        spread: Rule by which batches of equal arrival times were spread.
    """

    name: str
    requests: tuple[TraceRequest, ...]
    warmup: int
    rate_rps: float | None
    truncated: int
    dropped: int
    spread: Spread

    @cached_property
    def ideal_hits(self) -> Sequence[int]:
        """For each request, the number of prompt tokens that a single cache of unlimited size, shared by all workers, would hold at its arrival."""
        return ideal_hits(self.requests)


@lru_cache(maxsize=4)
def _loaded(source: str, block_tokens: int | None, _version: object) -> Trace:
    return load_trace(source, block_tokens=block_tokens)


def cached_trace(source: str, block_tokens: int | None) -> Trace:
    """Return the trace of a file or a packaged name; it is cached, and read again if its file has changed.

    Args:
        source: Path of a file, or the name of a packaged trace.
        block_tokens: Tokens per block id; None uses the default of the format.

    Raises:
        ConfigError: the trace cannot be read.
    """
    return _loaded(source, block_tokens, file_version(source))


def prepare(spec: WorkloadSpec, *, seed: int, qps: float | None = None) -> Workload:
    """Return the requests of one run, with arrival times, prompt lengths and tiers as the description asks; results are cached.

    Args:
        spec: Source of the requests and the transformations to apply.
        seed: Random seed of arrival times and tiers.
        qps: Mean rate in requests/s to which arrival times are scaled; None keeps the rate of the source.

    Raises:
        ConfigError: the source does not exist, or no requests remain after the transformations.
    """
    return _prepared(spec, seed, qps, _version(spec.source))


def _version(source: str | Trace) -> tuple[str, int, int] | None:
    if isinstance(source, Trace):
        return None
    synthetic = parse_synthetic(source)
    file = source if synthetic is None else synthetic.requests
    return file_version(file) if file else None


@lru_cache(maxsize=CACHED_WORKLOADS)
def _prepared(spec: WorkloadSpec, seed: int, qps: float | None, _version: object) -> Workload:
    rng = np.random.default_rng([seed, 1])
    has_limit = spec.max_input_tokens is not None
    chosen = Selection(
        max_input_tokens=spec.max_input_tokens, on_long=spec.on_long if has_limit else None, limit=spec.limit
    )
    populations = []
    for copy in range(spec.copies):
        name, how, requests = _draw(spec, rng)
        selected, truncated, dropped = select(requests, chosen)
        populations.append(_apart(selected, copy))
    kept: Sequence[TraceRequest] = [request for population in populations for request in population]
    if spec.copies > 1:
        kept = sorted(kept, key=lambda request: (request.arrival_s, request.line))
        name = f"{name}, {spec.copies} copies side by side"
    if qps is not None:
        kept, _ = rescale(kept, rate_rps=qps)
    kept = with_tiers(kept, None if spec.tiers is None else parse_mix(spec.tiers), seed=seed)
    warmup = spec.warmup * spec.copies
    if warmup >= len(kept):
        raise ConfigError(f"--warmup: {warmup} leaves nothing of {len(kept)} requests")
    truncated, dropped = truncated * spec.copies, dropped * spec.copies
    return Workload(name, tuple(kept), warmup, mean_rate(kept), truncated, dropped, how)


def _draw(spec: WorkloadSpec, rng: np.random.Generator) -> tuple[str, Spread, Sequence[TraceRequest]]:
    synthetic = None if isinstance(spec.source, Trace) else parse_synthetic(spec.source)
    if synthetic is not None:
        return synthetic.name, Spread.NONE, synthesise(synthetic, rng)
    trace = spec.source if isinstance(spec.source, Trace) else cached_trace(spec.source, spec.block_tokens)
    default = Spread.POISSON if trace.is_batched else Spread.NONE
    how = default if spec.spread is None else spec.spread
    left_out = f", {len(trace.skipped)} failed requests left out" if trace.skipped else ""
    name = f"{trace.name} (sha256 {trace.sha256[:12]}{left_out})"
    return name, how, spread(trace.requests, how, rng=rng)


def _apart(requests: Sequence[TraceRequest], copy: int) -> list[TraceRequest]:
    """Return the requests with block ids and line numbers that no other copy has."""
    if copy == 0:
        return list(requests)
    return [
        replace(
            request,
            line=request.line + copy * _LINES_APART,
            block_ids=None
            if request.block_ids is None
            else tuple(block_id + copy * _IDS_APART for block_id in request.block_ids),
        )
        for request in requests
    ]
