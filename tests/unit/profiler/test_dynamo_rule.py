"""Dynamo's published points of the 70B model: the same sizes as by its own rule, and the same bounds by its formulas."""

import numpy as np
import pytest

from penstock.engine import profiles
from penstock.performance.recommend import Targets, recommend
from penstock.performance.sweep import DecodePoint, EngineSweep, PrefillPoint, Sweep

KV_TOKENS = 224_133.0
"""What its tables state for every size."""


@pytest.fixture(scope="module")
def published():
    """The points as published, from the latency profiles that come with Penstock."""
    engines = []
    for size in (2, 4, 8):
        profile = profiles.load(f"h100-llama-3.3-70b-tp{size}-table")
        prefill = tuple(PrefillPoint(n, ms / 1000) for n, ms in profile.prefill.points)
        decode = tuple(
            DecodePoint(curve.context, batch, ms / 1000, batch / ms * 1000)
            for curve in profile.decode.curves
            for batch, ms in curve.points
        )
        engines.append(EngineSweep(size, KV_TOKENS, prefill, decode))
    return Sweep(tuple(engines))


def dynamos_choice(latencies, throughputs, target):
    """Its rule: the highest throughput per GPU of those within the target, else the lowest latency."""
    latencies, throughputs = np.array(latencies), np.array(throughputs)
    if latencies.min() > target:
        return int(latencies.argmin())
    return int(np.where(latencies <= target, throughputs, -1).argmax())


@pytest.mark.parametrize("ttft_ms", [200, 800, 1200, 2500])
@pytest.mark.parametrize("itl_ms", [10, 15, 20, 30, 100])
def test_the_same_sizes_and_bounds_at_a_measured_context(published, ttft_ms, itl_ms):
    """Contexts of 16,671 tokens: prompts of 16,371 and 600 of output."""
    targets = Targets(isl=16_371, osl=600, ttft_s=ttft_ms / 1000, itl_s=itl_ms / 1000)
    found = recommend(published, targets)
    ttfts = [engine.prefill_table().ttft_of(16_371) * 1000 for engine in published.engines]
    prefill = dynamos_choice(
        ttfts,
        [16_371 / ms / engine.gpus for ms, engine in zip(ttfts, published.engines, strict=True)],
        ttft_ms,
    )
    batches = [
        (engine.gpus, point)
        for engine in published.engines
        for point in engine.decode
        if point.context == 16_671
    ]
    decode = dynamos_choice(
        [point.itl_s * 1000 for _, point in batches],
        [point.tokens_per_s / gpus for gpus, point in batches],
        itl_ms,
    )
    gpus, point = batches[decode]
    usage = point.concurrency * (16_371 + 300) / KV_TOKENS

    assert found.prefill.gpus == published.engines[prefill].gpus
    assert (found.decode.gpus, found.decode.concurrency) == (gpus, point.concurrency)
    assert found.kv.upper == pytest.approx(min(1, usage + 0.2), abs=0.0051)
    assert found.kv.lower == pytest.approx(max(0.1, usage - 0.2), abs=0.0051)
    if not found.queue.is_spread:
        assert found.queue.upper == pytest.approx(max(0.1, ttft_ms * 1.2 / ttfts[prefill] - 1), abs=0.0051)
        assert found.queue.lower == pytest.approx(max(0.1, ttft_ms * 0.8 / ttfts[prefill] - 1), abs=0.0051)
