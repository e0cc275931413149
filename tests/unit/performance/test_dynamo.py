"""Dynamo's profiles are read and written: arrays by name, milliseconds, throughput per GPU."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.performance import dynamo
from penstock.performance.sweep import DecodePoint, EngineSweep, PrefillPoint

PREFILL = {"prefill_isl": [100, 1000], "prefill_ttft": [20.0, 50.0], "prefill_thpt_per_gpu": [1250.0, 5000.0]}
DECODE = {
    "x_kv_usage": [0.01, 0.4],
    "y_context_length": [1000, 1000],
    "z_itl": [5.0, 10.0],
    "z_thpt_per_gpu": [50.0, 1000.0],
    "max_kv_tokens": [100_000],
}


def test_a_profile_of_dynamo_is_read():
    """100 tokens in 20 ms on 4 GPUs are 1,250 tokens/s/GPU; 40 requests in 10 ms are 1,000 tokens/s/GPU."""
    assert dynamo.prefill_points(PREFILL) == (PrefillPoint(100, 0.02), PrefillPoint(1000, 0.05))
    assert (dynamo.prefill_gpus(PREFILL), dynamo.decode_gpus(DECODE)) == (4, 4)
    assert dynamo.decode_points(DECODE, 4) == (
        DecodePoint(1000, 1, 0.005, 200),
        DecodePoint(1000, 40, 0.01, 4000),
    )


@given(st.integers(1, 64), st.lists(st.integers(1, 100), min_size=1, max_size=5, unique=True))
def test_what_is_written_is_read_again(gpus, counts):
    """The points of any engine, its size and its cache."""
    prefill = tuple(PrefillPoint(100.0 * n, 0.01 * n) for n in range(1, 4))
    decode = tuple(
        DecodePoint(1000.0, float(n), 0.01 + n / 1e4, n / (0.01 + n / 1e4)) for n in sorted(counts)
    )
    engine = EngineSweep(gpus, 100_000.0, prefill, decode)
    arrays = dynamo.decode_arrays(engine)

    assert dynamo.prefill_gpus(dynamo.prefill_arrays(engine)) == gpus
    assert dynamo.decode_gpus(arrays) == gpus
    assert dynamo.kv_tokens_of(arrays) == 100_000
    for mine, read in zip(prefill, dynamo.prefill_points(dynamo.prefill_arrays(engine)), strict=True):
        assert (read.prompt_tokens, read.ttft_s) == pytest.approx((mine.prompt_tokens, mine.ttft_s))
    for own, back in zip(decode, dynamo.decode_points(arrays, gpus), strict=True):
        assert (back.concurrency, back.itl_s, back.tokens_per_s) == pytest.approx(
            (own.concurrency, own.itl_s, own.tokens_per_s)
        )


@pytest.mark.parametrize(
    ("read", "said"),
    [
        (lambda: dynamo.prefill_points({"prefill_isl": [1]}), "prefill_ttft missing"),
        (lambda: dynamo.prefill_points({**PREFILL, "prefill_isl": [1]}), "arrays differ in length"),
        (lambda: dynamo.kv_tokens_of({}), "max_kv_tokens is missing"),
    ],
)
def test_what_is_no_profile_is_refused_by_name(read, said):
    """The message says which array or table."""
    with pytest.raises(ValueError, match=said):
        read()


def test_an_unknown_size_stays_unknown():
    """Without throughput per GPU a prefill profile does not tell it."""
    assert dynamo.prefill_gpus({"prefill_isl": [1], "prefill_ttft": [1]}) is None
    assert dynamo.prefill_gpus({**PREFILL, "prefill_thpt_per_gpu": [0, 0]}) is None
    assert dynamo.decode_gpus({**DECODE, "z_thpt_per_gpu": [0, 0]}) is None
