"""Which engines a graph could run, on which GPUs, at which points they are measured, and how they are started."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import ConfigError
from penstock.performance.quality import GAP_RATIO
from penstock.performance.recommend import Targets
from penstock.performance.sweep import DecodePoint
from penstock.profiler import points
from penstock.profiler.plan import ProfileConfig, family, plan_profile
from penstock.profiler.points import grid_of
from penstock.profiler.workers import detect_gpus

TARGETS = Targets(isl=3000, osl=150, ttft_s=0.2, itl_s=0.02)


def planned(tmp_path, graph=None, *, found=None, **changes):
    """The plan of a graph, or of an endpoint; ``found`` are the machine's GPUs."""
    config = ProfileConfig(targets=TARGETS, output_dir=tmp_path, graph=graph, **changes)
    return plan_profile(config, detect=lambda: found)


def test_simulated_sizes_are_those_of_the_family_that_fit(build, tmp_path):
    """Tables are a family of their own. No process is started: their points are found in virtual time."""
    assert family("h100-llama-3.3-70b-tp4") == {size: f"h100-llama-3.3-70b-tp{size}" for size in (2, 4, 8)}
    graph = build(engine={"profile": "h100-llama-3.3-70b-tp4"}, planner={"maxGpuBudget": 4})
    plan = planned(tmp_path, graph)

    assert [engine.gpus for engine in plan.engines] == [2, 4]
    assert "h100-llama-3.3-70b-tp2" in plan.engines[0].conditions["prefill"]
    assert plan.engines[0].conditions["decode"].endswith("in virtual time")
    assert {server.process for engine in plan.engines for server in engine.servers} == {None}
    assert "the graph's maxGpuBudget" in plan.note


def test_a_worker_is_measured_alone(build, tmp_path):
    """It does both phases, without a partner, admission, a cold start or KV events."""
    graph = build(runtime="vllm", router={"kvEventsPort": 5557, "tokenizer": "llama"})
    argv = planned(tmp_path, graph, found=1).engines[0].servers[-1].process.argv

    for flag in ("--kv-events-config", "--kv-transfer-config"):
        assert flag not in argv


@pytest.mark.parametrize(
    ("changes", "options", "said"),
    [
        ({"runtime": "dynamo"}, {"found": 8}, "profile that with --endpoint"),
        ({"runtime": "vllm"}, {}, "--gpus: nvidia-smi finds no GPU"),
        ({"runtime": "vllm"}, {"found": 8, "speed": 2.0}, "--speed: belongs to --endpoint"),
        ({"runtime": "vllm"}, {"found": 2, "sizes": (4,)}, "--tp: 4 exceeds the 2 GPUs"),
        ({}, {"sizes": (2,)}, "--tp: 2: no latency profile"),
        ({"engine": {"profile": "h100-llama-3.3-70b-tp8"}}, {"max_gpus": 1}, "no engine fits 1 GPUs"),
        ({}, {"api_key": "k"}, "--api-key-file, PENSTOCK_API_KEY: belongs to --endpoint"),
        (None, {}, "give one of --config GRAPH"),
        (None, {"endpoint": "http://x"}, "--tp: say with how many GPUs"),
        (None, {"endpoint": "http://x", "sizes": (1, 2)}, "--tp: say with how many GPUs"),
        (None, {"endpoint": "http://x", "sizes": (1,), "gpus": 4}, "--gpus: belongs to --config"),
    ],
)
def test_what_cannot_be_measured_here_is_refused(build, tmp_path, changes, options, said):
    """With the remedy; so is an option without effect."""
    with pytest.raises(ConfigError, match=said):
        planned(tmp_path, None if changes is None else build(**changes), **options)


def test_real_engines_are_measured_once_for_both_phases(build, tmp_path):
    """Loading a model takes minutes; powers of two that fit the GPUs found."""
    plan = planned(tmp_path, build(runtime="vllm"), found=6)

    assert [engine.gpus for engine in plan.engines] == [1, 2, 4]
    assert len(plan.engines[0].servers) == 1
    assert "--tensor-parallel-size 4" in plan.engines[2].conditions["decode"]


def test_a_plan_says_its_points_before_anything_starts(build, tmp_path):
    """Of simulated engines by their caches; another engine has to say first what its cache holds."""
    graph = build(engine={"profile": "h100-llama-3.3-70b-tp4"}, planner={"maxGpuBudget": 8})
    simulated = planned(tmp_path, graph).describe()["engines"]
    real = planned(tmp_path, build(runtime="vllm"), found=1).describe()["engines"]

    assert [(each["gpus"], 3000 in each["prompt_tokens"]) for each in simulated] == [
        (2, True),
        (4, True),
        (8, True),
    ]
    assert [(each["gpus"], each["prompt_tokens"]) for each in real] == [(1, [])]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (None, None),
        ("echo 'GPU 0: H100'; echo 'GPU 1: H100'", 2),
        ("echo 'No devices were found'", None),
        ("exit 9", None),
    ],
)
def test_gpus_are_those_that_nvidia_smi_lists(monkeypatch, tmp_path, text, found):
    """A line each; without the program, or where it fails, their number is unknown, not zero."""
    monkeypatch.setenv("PATH", str(tmp_path))
    if text is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)

    assert detect_gpus() == found


@given(st.integers(1, 20_000), st.integers(1, 2000), st.integers(500, 500_000), st.integers(256, 131_072))
def test_points_fit_and_leave_no_gap(isl, osl, kv_tokens, max_context):
    """Whatever is asked for: inside the cache, increasing, without a gap that a check would complain of."""
    targets = Targets(isl, osl, 1, 1)
    limits = {"kv_tokens": kv_tokens, "max_concurrency": 256, "max_context": max_context}
    if isl + osl > min(kv_tokens, max_context):
        with pytest.raises(ConfigError, match="--isl"):
            grid_of(targets, **limits)
        return
    grid = grid_of(targets, **limits)
    for chosen in (grid.prompts, list(grid.batches)):
        assert chosen == sorted(set(chosen))
        assert chosen[0] >= 1
        assert chosen[-1] < min(kv_tokens, max_context)
    inside = [each for each in grid.prompts if each >= points.LEAST_PROMPT]
    assert all(right <= GAP_RATIO * left for left, right in pairwise(inside))
    for context, counts in grid.batches.items():
        assert counts[-1] * context <= kv_tokens or kv_tokens < context + 48


@pytest.mark.parametrize(
    ("most", "sizes"), [(1, [1]), (3, [1, 2, 3]), (6, [1, 2, 3, 4, 5, 6]), (101, [1, 21, 41, 61, 81, 101])]
)
def test_batches_run_from_one_to_what_the_cache_holds(most, sizes):
    """Evenly spaced, both ends included."""
    assert points.batch_sizes(most) == sizes


def row(*measured):
    """Points of one context: (requests in flight, ITL in ms)."""
    return [DecodePoint(1000, count, itl_ms / 1000, 1) for count, itl_ms in measured]


@pytest.mark.parametrize(
    ("measured", "wanted"),
    [
        (row((1, 10), (29, 21), (57, 30)), 15),
        (row((1, 10), (15, 16), (29, 21)), 22),
        (row((27, 19.9), (28, 20.1)), None),
        (row((100, 19), (107, 21)), None),
        (row((1, 30), (29, 40)), None),
        (row((1, 10), (29, 15)), None),
    ],
)
def test_the_step_across_the_target_is_halved(measured, wanted):
    """Until both sides are close; not where the target is outside."""
    assert points.refinement(measured, 0.02) == wanted


def test_refining_ends():
    """From any row of six batches, in six steps."""
    counts = dict.fromkeys(points.batch_sizes(256))
    for _ in range(7):
        found = points.refinement(row(*((n, 10 + n / 10) for n in sorted(counts))), 0.0201)
        if found is None:
            break
        counts[found] = None
    assert found is None
