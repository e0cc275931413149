"""Step times: formulas, tables and their composition, in exact numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine import profiles
from penstock.engine.core.latency import (
    DecodeCurve,
    LatencyModel,
    LinearDecode,
    QuadraticPrefill,
    TableDecode,
    TablePrefill,
)

H200 = LatencyModel(
    QuadraticPrefill(18.6e-3, 0.01411e-3, 4.92e-10), LinearDecode(4.45e-3, 0.0222e-3, 3.16e-8)
)
TABLE = TableDecode(
    (DecodeCurve(100, (1, 11), (0.010, 0.020)), DecodeCurve(1000, (1, 2), (0.014, 0.018))),
    LinearDecode(0.009, 0.001, 0.000004),
)


@pytest.mark.parametrize(
    ("chunks", "batch", "kv_tokens", "expected_ms"),
    [
        ([(0, 1000, True)], 0, 0, 18.6 + 14.11 + 0.492),
        ([], 1, 1000, 4.45 + 0.0222 + 0.0316),
        ([], 64, 128_000, 4.45 + 64 * 0.0222 + 128 * 0.0316),
        # Cached context: 1,000 new tokens after 3,000 pay their own matrix work and attention to all 4,000.
        ([(3000, 4000, True)], 0, 0, 18.6 + 14.11 + 0.492 * (16 - 9)),
        # Two prompts begin in one step: the overhead is paid once.
        ([(0, 1000, True), (0, 1000, True)], 0, 0, 18.6 + 2 * (14.11 + 0.492)),
        # Mixed: the larger fixed part once, the decodes' own terms on top.
        ([(0, 1000, True)], 64, 128_000, 18.6 + 14.11 + 0.492 + 64 * 0.0222 + 128 * 0.0316),
        # A later chunk pays no overhead again; alongside decodes the decode's fixed part.
        ([(1000, 2000, False)], 0, 0, 14.11 + 0.492 * 3),
        ([(1000, 2000, False)], 64, 128_000, 4.45 + 14.11 + 0.492 * 3 + 64 * 0.0222 + 128 * 0.0316),
        # No forward pass is shorter than the fixed part of a decode.
        ([(1000, 1001, False)], 0, 0, 4.45),
    ],
)
def test_composed_steps(chunks, batch, kv_tokens, expected_ms):
    """The documented composition, by hand, on the H200 8B coefficients."""
    assert H200.step_s(chunks, batch, kv_tokens) * 1000 == pytest.approx(expected_ms, rel=1e-9)


@given(st.lists(st.integers(400, 4000), min_size=1, max_size=6))
def test_chunking_does_not_change_ttft(chunks):
    """A prompt alone takes TTFT(n) in any split into chunks that are longer than the floor."""
    start = 0
    total_s = 0.0
    for index, size in enumerate(chunks):
        total_s += H200.step_s([(start, start + size, index == 0)], 0, 0)
        start += size
    assert total_s == pytest.approx(H200.prefill.ttft_s(start))


@pytest.mark.parametrize(
    ("tokens", "expected_s"), [(0, -0.2), (50, -0.05), (100, 0.1), (150, 0.25), (200, 0.4), (300, 0.4 + 0.2)]
)
def test_table_prefill_interpolates_and_extends(tokens, expected_s):
    """Linear between points, the first segment continues below, the fit's growth above."""
    table = TablePrefill((100, 200), (0.1, 0.4), QuadraticPrefill(5.0, 0.002, 0.0))
    assert table.ttft_s(tokens) == pytest.approx(expected_s)


@pytest.mark.parametrize(
    ("batch", "kv_tokens", "expected_s"),
    [
        (1, 100, 0.010),
        (6, 600, 0.015),
        (1, 1000, 0.014),
        (2, 2000, 0.018),
        # Between the curves at K = 1,000: B = 10 takes 19 ms, B = 1 takes 14 ms, so B = 5.5 takes 16.5 ms.
        (5.5, 1000, 0.0165),
        # Past the last point of the short curve the fit's slope continues: 4 more requests of 100 tokens.
        (15, 1500, 0.020 + 4 * (0.001 + 0.0004)),
        # Longer contexts than measured: the long curve at the same K, less the requests that are missing.
        (1, 2000, 0.018 - 1 * 0.001),
        # Shorter contexts: the short curve at the same K, plus the requests that are more.
        (20, 1000, 0.019 + 10 * 0.001),
    ],
)
def test_table_decode_joins_curves_at_equal_kv(batch, kv_tokens, expected_s):
    """Measured points are exact; between and beyond them the documented rule holds."""
    assert TABLE.step_s(batch, kv_tokens) == pytest.approx(expected_s)


def test_curve_of_one_point_has_the_slope_of_the_fit():
    """The longest context was measured with one request only."""
    curve = DecodeCurve(1000, (1,), (0.014,))
    assert curve.step_s(3, LinearDecode(0.009, 0.001, 0.000004)) == pytest.approx(0.014 + 2 * 0.005)


@pytest.mark.parametrize("name", profiles.names())
@pytest.mark.parametrize(("batch", "context"), [(1, 100), (4, 500), (32, 1000), (128, 1200)])
def test_more_work_never_takes_less_time(name, batch, context):
    """Every shipped profile is monotone in prompt length, batch and context; measured ones within their noise."""
    slack = 1.005 if name.endswith("-table") else 1.0
    model = profiles.load(name).latency()
    step_s = model.decode.step_s(batch, batch * context)
    assert 0 < model.decode.step_s(0, 0) <= step_s
    assert step_s <= model.decode.step_s(batch + 1, (batch + 1) * context) * slack
    assert step_s <= model.decode.step_s(batch, batch * context * 2) * slack
    assert model.prefill.ttft_s(batch * context) < model.prefill.ttft_s(batch * context + 100)
