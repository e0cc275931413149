"""Errors forbid planning by a profile, warnings say where it is doubtful; each names key, value and remedy."""

from dataclasses import replace

import pytest

from penstock.core.errors import ConfigError
from penstock.performance.profile import PerformanceProfile
from penstock.performance.quality import (
    Severity,
    check_fits,
    decode_findings,
    prefill_findings,
    sweep_findings,
)
from penstock.performance.sweep import DecodePoint, PrefillPoint, Sweep


def texts(found, severity):
    """The findings of a severity, as printed."""
    return [str(each) for each in found if each.severity is severity]


@pytest.mark.parametrize(
    ("points", "said"),
    [
        ((), "0 prompt lengths, but a line needs 2"),
        ((PrefillPoint(100, 0.02),), "1 prompt lengths, but a line needs 2"),
        ((PrefillPoint(100, float("nan")), PrefillPoint(200, 0.02)), "every value must be a number above 0"),
        ((PrefillPoint(100, 0.0), PrefillPoint(200, 0.02)), "every value must be a number above 0"),
        ((PrefillPoint(100, 0.00002), PrefillPoint(200, 0.02)), "is it in another unit"),
        ((PrefillPoint(100, 0.02), PrefillPoint(100, 0.03)), "they must increase"),
    ],
)
def test_prompts_that_cannot_be_planned_by(engine, points, said):
    """Errors, each with what to do."""
    found = prefill_findings(replace(engine(4), prefill=points))

    assert any(said in each and each.startswith("tp4.prefill: ") for each in texts(found, Severity.ERROR))


def test_a_gap_between_prompt_lengths_is_a_warning(engine):
    """More than four times apart."""
    points = tuple(PrefillPoint(float(n), 0.01 + n * 1e-4) for n in (100, 500, 1000))

    found = prefill_findings(replace(engine(), prefill=points))

    assert texts(found, Severity.WARNING) == [
        "tp1.prefill: nothing between 100 and 500 prompt tokens, more than 4 times apart; measure one in between"
    ]


def test_a_ttft_that_falls_is_a_warning(engine):
    """As the published sweep's 6,205 tokens on TP8 do."""
    points = [PrefillPoint(float(n), 0.01 + n * 1e-4) for n in range(1000, 9000, 1000)]
    points[3] = replace(points[3], ttft_s=3 * points[3].ttft_s)

    found = texts(prefill_findings(replace(engine(), prefill=tuple(points))), Severity.WARNING)

    assert any("TTFT falls from 1230.0 ms at 4,000" in each for each in found)


@pytest.mark.parametrize(
    ("points", "said"),
    [
        ((), "0 points, but a line needs 2"),
        ((DecodePoint(1000, 1, 0.01, 100),), "1 points, but a line needs 2"),
        ((DecodePoint(1000, 1, 0.01, 100), DecodePoint(1000, 1, 0.01, 100)), "they must increase"),
        ((DecodePoint(1000, 1, 0.01, -1), DecodePoint(1000, 2, 0.01, 1)), "every value must be"),
        (
            (DecodePoint(1000, 1, 0.01, 100), DecodePoint(1000, 101, 0.02, 5000)),
            "101,000 tokens were in flight",
        ),
    ],
)
def test_batches_that_cannot_be_planned_by(engine, points, said):
    """Errors, each with what to do."""
    found = texts(decode_findings(replace(engine(), decode=points)), Severity.ERROR)

    assert any(said in each for each in found)


def test_one_context_is_a_warning(engine):
    """ITL elsewhere is taken from it."""
    found = texts(decode_findings(engine(contexts=(1000,))), Severity.WARNING)

    assert any("one context, 1,000 tokens" in each for each in found)


def test_an_unknown_cache_is_an_error(engine):
    """Without it no batch has a KV usage."""
    found = texts(decode_findings(engine()), Severity.ERROR)
    unknown = texts(decode_findings(replace(engine(), kv_tokens=0.0)), Severity.ERROR)

    assert (found, len(unknown)) == ([], 1)
    assert "--kv-tokens" in unknown[0]


def test_an_empty_sweep_is_an_error():
    """Nothing was measured."""
    assert texts(sweep_findings(Sweep(())), Severity.ERROR)


def profile_of(engine, **changes) -> PerformanceProfile:
    """A profile of TP1, changed."""
    sound = Sweep((engine(),), model="acme/Synthetic-8B").profile(prefill_gpus=1, decode_gpus=1)
    return replace(sound, **changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "other"}, "model: measured of other, but the graph serves Synthetic-8B"),
        ({"prefill_gpus": 4}, "prefill_gpus: measured with 4, but a replica has 1"),
        ({"decode_gpus": 2}, "set gpusPerReplica 2, or profile with --tp 1"),
    ],
)
def test_a_profile_of_another_engine(engine, changes, said):
    """Another model or size than the graph's is no profile of it."""
    with pytest.raises(ConfigError, match=said):
        check_fits(profile_of(engine, **changes), model="Synthetic-8B", prefill_gpus=1, decode_gpus=1)


@pytest.mark.parametrize("served", ["synthetic-8b", "acme/Synthetic-8B-FP8", "Other/SYNTHETIC-8B"])
def test_publisher_case_and_format_do_not_make_another_model(engine, served):
    """acme/Synthetic-8B is each of them."""
    check_fits(profile_of(engine), model=served, prefill_gpus=1, decode_gpus=1)
