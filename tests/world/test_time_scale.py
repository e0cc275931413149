"""One time scale: the same replay at two speeds has the same modelled latencies."""

import pytest

TOLERANCE = 0.10
"""Of TPOT p50. Batches at two speeds differ a little, because arrivals and steps meet otherwise; a step of the
profile is the same to 1% for one request more or less, and ten times the batch costs about half a step more."""


def replay(world, speed):
    """Replay 30 requests against a fresh graph at ``speed``; return the summary."""
    manifest = world.manifest(profile="a100-llama-8b-bf16-tp1")
    world.up(manifest, speed=speed, flags=("--no-planner",))
    _, summary = world.load(speed=speed, limit=30, rate=1.5).finish()
    world.down()
    return summary


@pytest.mark.nightly
def test_the_same_replay_at_speed_5_and_10_has_the_same_tpot(world):
    """TPOT p50 in simulated seconds differs by less than a tenth, unless the run itself says that it is distorted."""
    slow, fast = replay(world, 5), replay(world, 10)
    for summary in (slow, fast):
        assert summary["requests"]["ok"] == 30
        assert summary["usage_mismatches"]["examples"] == []
        if summary["lag"]["is_distorted"]:
            pytest.skip(f"the run says of itself that it is distorted: {summary['lag']['late']}")
    assert {key: fast["tokens"][key] for key in ("prompt", "output")} == {
        key: slow["tokens"][key] for key in ("prompt", "output")
    }
    expected_s, found_s = (summary["latency"]["tpot_s"]["p50"] for summary in (slow, fast))
    assert found_s == pytest.approx(expected_s, rel=TOLERANCE)
