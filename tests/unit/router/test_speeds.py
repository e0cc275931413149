"""How fast workers were, and which are named as slow alongside their equals."""

import pytest

from penstock.router.core.speeds import SpeedCounts, SpeedMeter, WorkerSpeed, slow_workers

ROLES = {"a": "decode", "b": "decode", "c": "decode"}


def fleet(seconds, *, gaps_s, role="decode"):
    """Workers that have streamed this long, each with its own gap between tokens; returns their speeds of the last minute."""
    counts = {name: SpeedCounts() for name in gaps_s}
    meter = SpeedMeter()
    for second in range(seconds + 1):
        meter.tick(counts, float(second))
        for name, gap_s in gaps_s.items():
            counts[name].output_tokens += round(1 / gap_s)
            counts[name].decode_s += 1.0
    return meter.read(counts, dict.fromkeys(gaps_s, role), float(seconds + 1))


def test_a_worker_five_times_slower_is_named_with_its_itl_and_theirs():
    """No tokens/s: a slow worker that has more requests may make as many. The others are not named."""
    speeds = fleet(90, gaps_s={"a": 0.02, "b": 0.02, "c": 0.1})
    assert speeds["c"].itl_s == pytest.approx(0.1)
    assert slow_workers(speeds) == {"c": "5.0 times as slow as its equals: ITL 100.0 ms instead of 20.0 ms"}


@pytest.mark.parametrize(
    "gaps_s",
    [
        {"a": 0.02, "b": 0.02, "c": 0.05},  # a larger batch
        {"c": 0.1},  # no equal
    ],
)
def test_what_differs_little_or_has_no_equal_is_not_slow(gaps_s):
    """Batches of other sizes make ITL differ, and one worker alone is compared with nothing."""
    assert slow_workers(fleet(90, gaps_s=gaps_s)) == {}


def test_a_few_tokens_say_nothing():
    """Forty tokens in the minute do not make a speed, whatever their gaps."""
    meter, counts = SpeedMeter(), {"a": SpeedCounts(), "b": SpeedCounts(10_000, 200.0)}
    meter.tick({name: SpeedCounts() for name in counts}, 0.0)
    counts["a"] = SpeedCounts(40, 40.0)
    speeds = meter.read(counts, ROLES, 30.0)
    assert (speeds["a"].itl_s, speeds["b"].itl_s) == (None, 0.02)
    assert slow_workers(speeds) == {}


def test_a_restarted_worker_counts_from_its_start():
    """Counters that fell are those of a new process: what the old one did is not taken off them."""
    meter = SpeedMeter()
    meter.tick({"a": SpeedCounts(100_000, 900.0)}, 0.0)
    assert meter.read({"a": SpeedCounts(500, 10.0)}, ROLES, 30.0)["a"].itl_s == 0.02


@pytest.mark.parametrize(
    ("own", "named"),
    [
        (WorkerSpeed("prefill", 900.0, 2.0), True),
        (
            WorkerSpeed("prefill", 900.0, 0.02),
            False,
        ),  # ten new tokens behind a cached prompt: a launch's time
        (WorkerSpeed("prefill", 4000.0, 2.0), False),
        (WorkerSpeed("aggregated", 900.0, 2.0), False),
    ],
)
def test_a_slow_prefill_is_few_tokens_a_second_and_no_shorter(own, named):
    """Prompts that caches leave little of are few tokens a second on any worker; another role is not an equal."""
    others = {name: WorkerSpeed("prefill", 5000.0, 0.5) for name in ("x", "y")}
    found = slow_workers({"own": own, **others})
    assert list(found) == (["own"] if named else [])
    if named:
        assert "900 prompt tokens/s against 5,000, a prefill takes 2.00 s against 0.50 s" in found["own"]
