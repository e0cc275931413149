"""Synthetic engines whose figures follow formulas, so that results can be worked out by hand."""

import pytest

from penstock.performance.sweep import DecodePoint, EngineSweep, PrefillPoint, Sweep


def make_engine(
    gpus=1,
    *,
    ttft_s=0.0001,
    kv_tokens=100_000.0,
    contexts=(1000, 3000, 9000),
    step_s=0.01,
    per_request_s=0.0005,
):
    """TTFT = 10 ms + ttft_s · n; ITL = step_s + per_request_s · B, whatever the context."""
    prefill = tuple(PrefillPoint(float(n), 0.01 + ttft_s * n) for n in (500, 1000, 2000, 3000, 6000, 12000))
    decode = []
    for context in contexts:
        most = int(kv_tokens // context)
        for batch in sorted({1, max(1, most // 4), max(1, most // 2), most}):
            itl_s = step_s + per_request_s * batch
            decode.append(DecodePoint(float(context), float(batch), itl_s, batch / itl_s))
    return EngineSweep(gpus, kv_tokens, prefill, tuple(decode))


@pytest.fixture(scope="session")
def engine():
    """Return a function that makes a synthetic engine."""
    return make_engine


@pytest.fixture
def two_sizes():
    """TP2 is faster than TP1, but answers less per GPU."""
    return Sweep(
        (make_engine(1), make_engine(2, ttft_s=0.00006, kv_tokens=250_000.0, step_s=0.007)),
        model="acme/Synthetic-8B",
    )
