"""Errors forbid planning by a profile, warnings say where it is doubtful; each names key, value and remedy."""

from dataclasses import replace

import pytest

from penstock.core.errors import ConfigError
from penstock.performance.profile import PerformanceProfile
from penstock.performance.quality import check_fits, sweep_warnings
from penstock.performance.sweep import DecodePoint, PrefillPoint, Sweep


def prompts(*points):
    """TTFTs by (prompt tokens, seconds)."""
    return {"prefill": tuple(PrefillPoint(*each) for each in points)}


def batches(*points):
    """ITLs by (context, requests in flight, seconds, tokens/s)."""
    return {"decode": tuple(DecodePoint(*each) for each in points)}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (prompts(), "tp4.prefill: 0 prompt lengths, but a line needs 2"),
        (prompts((100, 0.02)), "tp4.prefill: 1 prompt lengths, but a line needs 2"),
        (prompts((100, float("nan")), (200, 0.02)), "tp4.prefill: .*every value must be a number above 0"),
        (prompts((100, 0.0), (200, 0.02)), "tp4.prefill: .*every value must be a number above 0"),
        (prompts((100, 0.00002), (200, 0.02)), "tp4.prefill: .*is it in another unit"),
        (prompts((100, 0.02), (100, 0.03)), "tp4.prefill: .*they must increase"),
        (batches(), "tp4.decode: 0 points, but a line needs 2"),
        (batches((1000, 1, 0.01, 100)), "tp4.decode: 1 points, but a line needs 2"),
        (batches((1000, 1, 0.01, 100), (1000, 1, 0.01, 100)), r"tp4.decode\[1,000\]: .*they must increase"),
        (batches((1000, 1, 0.01, -1), (1000, 2, 0.01, 1)), "tp4.decode: .*every value must be"),
        (batches((1000, 1, 0.01, 100), (1000, 101, 0.02, 5000)), "101,000 tokens were in flight"),
        ({"kv_tokens": 0.0}, "must be above 0; give --kv-tokens"),
    ],
)
def test_points_that_cannot_be_planned_by(engine, changes, said):
    """Errors, each with its key and what to do."""
    with pytest.raises(ConfigError, match=f"cannot be used:\n(?s:.*){said}"):
        sweep_warnings(Sweep((replace(engine(4), **changes),)))


def test_an_empty_sweep_is_an_error():
    """Nothing was measured."""
    with pytest.raises(ConfigError, match="engines: none was measured"):
        sweep_warnings(Sweep(()))


FALLING = [(float(n), 1.23 if n == 4000 else 0.01 + n * 1e-4) for n in range(1000, 9000, 1000)]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, []),
        (
            prompts((100, 0.02), (500, 0.06), (1000, 0.11)),
            ["tp1.prefill: nothing between 100 and 500 prompt tokens, more than 4 times apart; measure one"],
        ),
        (
            prompts(*FALLING),
            ["tp1.prefill: TTFT falls from 1230.0 ms at 4,000"],
        ),
        (
            batches((1000, 1, 0.01, 100), (1000, 2, 0.02, 100)),
            ["tp1.decode: one context, 1,000 tokens: ITL elsewhere is taken from it"],
        ),
    ],
)
def test_points_that_are_doubtful(engine, changes, said):
    """Warnings: a gap of more than four times, a TTFT that falls as the published sweep's on TP8 does, one context."""
    found = sweep_warnings(Sweep((replace(engine(), **changes),)))

    assert [each[: len(begin)] for each, begin in zip(found, said, strict=True)] == said


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
    """Another model or size than the graph's is not a profile of it."""
    with pytest.raises(ConfigError, match=said):
        check_fits(profile_of(engine, **changes), model="Synthetic-8B", prefill_gpus=1, decode_gpus=1)


@pytest.mark.parametrize("served", ["synthetic-8b", "acme/Synthetic-8B-FP8", "Other/SYNTHETIC-8B"])
def test_publisher_case_and_format_do_not_make_another_model(engine, served):
    """acme/Synthetic-8B is each of them."""
    check_fits(profile_of(engine), model=served, prefill_gpus=1, decode_gpus=1)
