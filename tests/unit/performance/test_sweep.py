"""Measured points become tables, and a profile's text is read or refused."""

import copy
import functools
import json
import operator
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import ConfigError
from penstock.performance import dynamo
from penstock.performance.profile import read_profile
from penstock.performance.sweep import DecodePoint, EngineSweep, PrefillPoint, Sweep

POSITIVE = st.floats(1e-3, 1e6)


@st.composite
def sweeps(draw):
    """Any sweep whose points can be planned by, one size or two."""
    engines = []
    for gpus in sorted(draw(st.sets(st.integers(1, 64), min_size=1, max_size=2))):
        lengths = sorted(draw(st.sets(st.integers(1, 10**6), min_size=2, max_size=6)))
        prefill = tuple(PrefillPoint(float(each), draw(POSITIVE)) for each in lengths)
        decode = []
        for context in sorted(draw(st.sets(st.integers(1, 10**5), min_size=1, max_size=4))):
            counts = sorted(draw(st.sets(st.integers(1, 300), min_size=1, max_size=5)))
            decode += [DecodePoint(float(context), float(n), draw(POSITIVE), draw(POSITIVE)) for n in counts]
        engines.append(EngineSweep(gpus, 3.1e7, prefill, tuple(decode), draw(st.text(max_size=5))))
    return Sweep(tuple(engines), draw(st.text(max_size=5)), draw(st.booleans()))


@given(sweeps())
def test_tables_go_through_every_point(sweep):
    """What was measured is looked up as it was measured."""
    for engine in sweep.engines:
        prefill, decode = engine.prefill_table(), engine.decode_table()
        for point in engine.prefill:
            assert prefill.ttft_of(point.prompt_tokens) == pytest.approx(point.ttft_s)
        for point in engine.decode:
            assert decode.itl_of(point.concurrency, point.context) == pytest.approx(point.itl_s, rel=1e-6)


def test_contexts_of_different_usages_share_a_table():
    """1,000 tokens: 10 and 50 requests; 4,000: 5 and 20. Usages 10, 20, 50 and 80%; beyond its own a context holds."""
    points = (
        DecodePoint(1000, 10, 0.010, 1000),
        DecodePoint(1000, 50, 0.030, 1700),
        DecodePoint(4000, 5, 0.012, 400),
        DecodePoint(4000, 20, 0.026, 800),
    )
    table = EngineSweep(1, 100_000, (), points).decode_table()

    assert table.kv_usage == (0.1, 0.2, 0.5, 0.8)
    assert table.itl_s[0] == pytest.approx((0.010, 0.015, 0.030, 0.030))
    assert table.itl_s[1] == pytest.approx((0.012, 0.012, 0.019, 0.026))


PLAIN = {
    "prefill": {"prompt_tokens": [100, 1000], "ttft_s": [0.01, 0.1]},
    "decode": {
        "contexts": [500, 1000],
        "kv_usage": [0.5, 1.0],
        "itl_s": [[0.01, 0.02], [0.01, 0.02]],
        "tokens_per_s": [[100, 150], [50, 75]],
        "kv_tokens": 100_000,
    },
}


def changed(path, value):
    """Return the profile's text with one value replaced, or removed where it is None."""
    plain = copy.deepcopy(PLAIN)
    *way, last = path
    at = functools.reduce(operator.getitem, way, plain)
    at[last] = value
    if value is None:
        del at[last]
    return json.dumps(plain)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("prefill",), None, "prefill: Field required"),
        (("decode", "contexts"), 3, "not a performance profile"),
        (("prefill", "prompt_tokens"), [100], "prefill.prompt_tokens: Value should have at least 2 items"),
        (("prefill", "prompt_tokens"), [100, 100], "100 follows 100, yet points must increase"),
        (
            ("prefill", "prompt_tokens"),
            [0, 100],
            "prefill.prompt_tokens.0: Value error, 0 must be a number above 0",
        ),
        (("prefill", "ttft_s"), [0.1], "prefill.ttft_s: 1 values for 2 points"),
        (
            ("prefill", "ttft_s"),
            [0.1, float("nan")],
            "prefill.ttft_s.1: Value error, nan must be a number above 0",
        ),
        (("decode", "kv_usage"), [0.5, 1.5], "decode.kv_usage: Value error, 1.5 exceeds 1"),
        (("decode", "itl_s"), [[0.01, 0.02]], "decode.itl_s: 1 values for 2 points"),
        (("decode", "tokens_per_s", 1), [50], "decode.tokens_per_s.1: 1 values for 2 points"),
        (("decode", "kv_tokens"), 0, "decode.kv_tokens: Value error, 0 must be a number above 0"),
        (("prefill_gpus",), -1, "prefill_gpus: Input should be greater than or equal to 0"),
    ],
)
def test_what_keeps_a_profile_from_use_is_named(path, value, words):
    """With the file, and with the command that makes a sound one."""
    with pytest.raises(ConfigError) as caught:
        read_profile(changed(path, value), origin="p.json")
    message = str(caught.value)
    assert message.startswith("p.json: ")
    assert words in message
    assert "penstock profile" in message


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000])
def test_what_is_no_json_is_refused(text):
    """Not a traceback, however deep."""
    with pytest.raises(ConfigError, match=r"p\.json: .*Invalid JSON"):
        read_profile(text, origin="p.json")
    assert read_profile(json.dumps(PLAIN)).prefill.prompt_tokens == (100, 1000)


PREFILL = {"prefill_isl": [100, 1000], "prefill_ttft": [20.0, 50.0], "prefill_thpt_per_gpu": [1250.0, 5000.0]}
DECODE = {
    "x_kv_usage": [0.01, 0.4],
    "y_context_length": [1000, 1000],
    "z_itl": [5.0, 10.0],
    "z_thpt_per_gpu": [50.0, 1000.0],
    "max_kv_tokens": [100_000],
}


def test_a_profile_of_dynamo_is_read():
    """100 tokens in 20 ms on 4 GPUs are 1,250 tokens/s/GPU, 40 requests in 10 ms 1,000; a size that is given counts."""
    without_rate = {key: PREFILL[key] for key in ("prefill_isl", "prefill_ttft")}

    assert dynamo.engine_of(without_rate, DECODE, 2).decode[1].tokens_per_s == 2000
    assert dynamo.engine_of(PREFILL, DECODE, None) == EngineSweep(
        4,
        100_000,
        (PrefillPoint(100, 0.02), PrefillPoint(1000, 0.05)),
        (DecodePoint(1000, 1, 0.005, 200), DecodePoint(1000, 40, 0.01, 4000)),
        "Dynamo's profile",
    )


@given(st.integers(1, 64), st.lists(st.integers(1, 100), min_size=1, max_size=5, unique=True))
def test_what_is_written_is_read_again(gpus, counts):
    """The points of any engine, its size and its cache."""
    prefill = tuple(PrefillPoint(100.0 * n, 0.01 * n) for n in range(1, 4))
    decode = tuple(
        DecodePoint(1000.0, float(n), 0.01 + n / 1e4, n / (0.01 + n / 1e4)) for n in sorted(counts)
    )
    engine = EngineSweep(gpus, 100_000.0, prefill, decode)

    read = dynamo.engine_of(dynamo.prefill_arrays(engine), dynamo.decode_arrays(engine), None)

    assert (read.gpus, read.kv_tokens) == (gpus, 100_000)
    for own, back in zip((*prefill, *decode), (*read.prefill, *read.decode), strict=True):
        assert list(asdict(back).values()) == pytest.approx(list(asdict(own).values()))


@pytest.mark.parametrize(
    ("prefill", "decode", "said"),
    [
        ({"prefill_ttft": None}, {}, "prefill_ttft missing"),
        ({"prefill_isl": [1]}, {}, "arrays differ in length"),
        ({}, {"max_kv_tokens": None}, "max_kv_tokens is missing"),
        ({}, {"z_itl": None}, "z_itl missing"),
        ({"prefill_thpt_per_gpu": None}, {}, "give --tp N"),
        ({"prefill_thpt_per_gpu": [0, 0]}, {"z_thpt_per_gpu": [0, 0]}, "give --tp N"),
        ({}, {"z_thpt_per_gpu": [100, 2000]}, "give --tp N"),
    ],
)
def test_what_is_no_profile_is_refused_by_name(prefill, decode, said):
    """Which array is wrong; a size that is not told, or another for each phase, has to be given."""
    changed = (
        {key: value for key, value in {**plain, **changes}.items() if value is not None}
        for plain, changes in ((PREFILL, prefill), (DECODE, decode))
    )

    with pytest.raises(ValueError, match=said):
        dynamo.engine_of(*changed, None)
