"""Which engines a graph could run, and how they are started to be measured."""

import pytest

from penstock.core.errors import ConfigError
from penstock.performance.recommend import Targets
from penstock.profiler import estimate
from penstock.profiler.candidates import family
from penstock.profiler.plan import ProfileConfig, plan_profile

TARGETS = Targets(isl=3000, osl=150, ttft_s=0.2, itl_s=0.02)


def planned(tmp_path, graph=None, *, found=None, **changes):
    """The plan of a graph, or of an endpoint; ``found`` are the machine's GPUs."""
    config = ProfileConfig(targets=TARGETS, output_dir=tmp_path, graph=graph, **changes)
    return plan_profile(config, detect=lambda: found)


def test_the_family_of_a_latency_profile():
    """One model on one GPU at one precision; tables are a family of their own."""
    assert family("h100-llama-3.3-70b-tp4") == {size: f"h100-llama-3.3-70b-tp{size}" for size in (2, 4, 8)}
    assert family("h200-llama-3.1-8b-tp1") == {1: "h200-llama-3.1-8b-tp1"}


def test_simulated_sizes_are_those_of_the_family_that_fit(build, tmp_path):
    """Prompts are timed in real time, decode at four times it; the notes say what was chosen."""
    graph = build(engine={"profile": "h100-llama-3.3-70b-tp4"}, planner={"maxGpuBudget": 4})
    plan = planned(tmp_path, graph)

    assert [engine.gpus for engine in plan.engines] == [2, 4]
    assert "h100-llama-3.3-70b-tp2" in plan.engines[0].conditions["prefill"]
    assert plan.engines[0].conditions["prefill"].endswith("at speed 1")
    assert plan.engines[0].conditions["decode"].endswith("at speed 4")
    assert "the graph's maxGpuBudget" in plan.notes[0]
    assert "h100-llama-3.3-70b-tp4" in plan.notes[1]


def test_a_worker_is_measured_alone(build, tmp_path):
    """It does both phases, without a partner, admission, a cold start or KV events."""
    graph = build(
        services={"prefill": {"startupSeconds": 90}, "decode": {"startupSeconds": 90}},
        engine={"requestLimit": 5},
        router={"kvEventsPort": 5557},
    )
    argv = planned(tmp_path, graph).engines[0].candidate.decode.process.argv

    assert argv[argv.index("--role") + 1] == "aggregated"
    for flag in ("--startup-seconds", "--engine-request-limit", "--kv-events-config", "--kv-transfer-config"):
        assert flag not in argv


@pytest.mark.parametrize(
    ("changes", "options", "said"),
    [
        ({"runtime": "dynamo"}, {"found": 8}, "profile that with --endpoint"),
        ({"runtime": "vllm"}, {}, "--gpus: nvidia-smi finds no GPU"),
        ({"runtime": "vllm"}, {"found": 8, "speed": 2.0}, "--speed: 2"),
        ({"runtime": "vllm"}, {"found": 2, "sizes": (4,)}, "--tp: 4 exceeds the 2 GPUs"),
        ({}, {"sizes": (2,)}, "--tp: 2: no latency profile"),
        ({"engine": {"profile": "h100-llama-3.3-70b-tp8"}}, {"max_gpus": 1}, "no engine fits 1 GPUs"),
        (
            {"planner": {"enabled": False}},
            {"api_key": "k"},
            "--api-key-file, PENSTOCK_API_KEY: belongs to --endpoint",
        ),
    ],
)
def test_what_cannot_be_measured_here_is_refused(build, tmp_path, changes, options, said):
    """With the remedy."""
    with pytest.raises(ConfigError, match=said):
        planned(tmp_path, build(**changes), **options)


def test_real_engines_are_measured_once_for_both_phases(build, tmp_path):
    """Loading a model takes minutes; powers of two that fit the GPUs found."""
    plan = planned(tmp_path, build(runtime="vllm"), found=6)

    assert [engine.gpus for engine in plan.engines] == [1, 2, 4]
    assert len(plan.engines[0].servers()) == 1
    assert "--tensor-parallel-size 4" in plan.engines[2].conditions["decode"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "give one of --config GRAPH"),
        ({"endpoint": "http://x"}, "--tp: say with how many GPUs"),
        ({"endpoint": "http://x", "sizes": (1, 2)}, "--tp: say with how many GPUs"),
        ({"endpoint": "http://x", "sizes": (1,), "gpus": 4}, "--gpus: belongs to --config"),
    ],
)
def test_an_endpoint_needs_its_size_and_nothing_else(tmp_path, options, said):
    """An option without effect is refused."""
    with pytest.raises(ConfigError, match=said):
        planned(tmp_path, **options)


def test_three_large_engines_are_measured_within_two_minutes(build, tmp_path):
    """By their latency profiles, on a machine that keeps up."""
    graph = build(engine={"profile": "h100-llama-3.3-70b-tp4"}, planner={"maxGpuBudget": 8})
    found = estimate.describe(planned(tmp_path, graph))
    assert [each["gpus"] for each in found["engines"]] == [2, 4, 8]
    assert found["expected_s"] < 120
