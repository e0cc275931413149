"""What is written can be read again, and so can Dynamo's files; the graph that is written back is valid."""

import json
from dataclasses import replace

import numpy as np
import pytest
import yaml

from penstock.core.errors import ConfigError
from penstock.engine import profiles
from penstock.performance.quality import sweep_warnings
from penstock.performance.recommend import Targets, recommend
from penstock.performance.sweep import DecodePoint, EngineSweep, PrefillPoint, Sweep
from penstock.profiler.files import engine_sweep, graph_back, read_sweep, write_result

TARGETS = Targets(isl=3000, osl=150, ttft_s=0.2, itl_s=0.02)
NAME = "h200-llama-3.1-8b-tp1"


@pytest.fixture
def result(tmp_path, build):
    """The folder of a profile of the base graph's engine, read off its latency profile."""
    sweep = engine_sweep(NAME)
    found = recommend(sweep, TARGETS)
    folder = tmp_path / "result"
    manifest = graph_back(build(), found, str(folder / "profile.json"))
    write_result(folder, sweep, found, warnings=["noise"], graph=manifest)
    return folder


def test_the_whole_folder_is_read_again(result):
    """Every point, the model and the size: 3,000 tokens take 18.6 + 0.01411 · 3,000 + 4.92e-7 · 3,000² = 65.4 ms."""
    sweep = engine_sweep(NAME)

    assert sweep_warnings(sweep) == []
    assert sweep.engine(1).prefill_table().ttft_of(3000) == pytest.approx(0.065358)
    assert read_sweep(str(result)) == sweep
    assert read_sweep(str(result / "profile.json")) == sweep
    # Without the profile file, the two folders are read as Dynamo writes them.
    (result / "profile.json").unlink()
    again = recommend(read_sweep(str(result)), TARGETS)
    assert again.decode.concurrency == recommend(sweep, TARGETS).decode.concurrency


DYNAMO = {
    "prefill": {"prefill_isl": [100, 1000], "prefill_ttft": [20, 50], "prefill_thpt_per_gpu": [5000, 20000]},
    "decode": {
        "x_kv_usage": [0.01, 0.4],
        "y_context_length": [1000, 1000],
        "z_itl": [5, 10],
        "z_thpt_per_gpu": [200, 4000],
        "max_kv_tokens": [100_000],
    },
}


@pytest.mark.parametrize("form", ["npz", "json"])
def test_dynamos_own_folders_are_read(tmp_path, form):
    """Npz below selected_…_interpolation, or two JSON files."""
    for role, columns in DYNAMO.items():
        if form == "json":
            (tmp_path / f"{role}_raw_data.json").write_text(json.dumps(columns))
            continue
        folder = tmp_path / f"selected_{role}_interpolation"
        folder.mkdir()
        np.savez(folder / "raw_data.npz", **{key: np.array(value) for key, value in columns.items()})

    (engine,) = read_sweep(str(tmp_path)).engines

    assert (engine.gpus, engine.prefill_table().ttft_of(1000)) == (1, pytest.approx(0.05))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "Expecting"),
        ("[]", "no JSON object"),
        ('{"sweep": {}}', "engines"),
        ("{}", "sweep is missing"),
    ],
)
def test_what_is_no_profile_is_refused(tmp_path, content, said):
    """By what is wrong with it; a folder or name by what was looked for."""
    with pytest.raises(ConfigError, match=r"holds neither profile\.json, nor selected_prefill_interpolation"):
        read_sweep(str(tmp_path))
    with pytest.raises(ConfigError, match="neither a file or folder, nor a latency profile"):
        read_sweep("no-such-thing")
    (tmp_path / "odd.json").write_text(content)

    with pytest.raises(ConfigError, match=f"no profile can be read: .*{said}"):
        read_sweep(str(tmp_path / "odd.json"))


def test_the_graph_written_back_runs_what_was_recommended(result):
    """Sizes, bounds and targets; otherwise the graph as it was."""
    spec = yaml.safe_load((result / "graph.yaml").read_text())["spec"]
    planner = spec["planner"]

    assert planner["mode"] == "sla"
    assert spec["slo"] == {"ttft": "200ms", "itl": "20ms"}
    assert planner["sla"]["profile"] == str(result / "profile.json")
    assert planner["prefillQueueScaleUpThreshold"] > planner["prefillQueueScaleDownThreshold"]
    assert planner["decodeKvScaleUpThreshold"] > planner["decodeKvScaleDownThreshold"]


def test_a_recommendation_beyond_the_budget_is_refused(build):
    """One replica of each role must fit."""
    graph = build(engine={"profile": "h100-llama-3.3-70b-tp2"}, planner={"maxGpuBudget": 3})
    found = recommend(engine_sweep("h100-llama-3.3-70b-tp2"), replace(TARGETS, ttft_s=1.0, itl_s=0.05))

    with pytest.raises(ConfigError, match=r"maxGpuBudget: 3, but one replica each takes 4 GPUs"):
        graph_back(graph, found, "p")


KV_TOKENS = 224_133.0
"""What its tables state for every size."""


@pytest.fixture(scope="module")
def published():
    """The points as published, from the latency profiles that come with Penstock."""
    engines = []
    for size in (2, 4, 8):
        profile = profiles.load(f"h100-llama-3.3-70b-tp{size}-table")
        prefill = tuple(PrefillPoint(n, ms / 1000) for n, ms in profile.prefill.points)
        decode = tuple(
            DecodePoint(curve.context, batch, ms / 1000, batch / ms * 1000)
            for curve in profile.decode.curves
            for batch, ms in curve.points
        )
        engines.append(EngineSweep(size, KV_TOKENS, prefill, decode))
    return Sweep(tuple(engines))


def dynamos_choice(latencies, throughputs, target):
    """Its rule: the highest throughput per GPU of those within the target, else the lowest latency."""
    latencies, throughputs = np.array(latencies), np.array(throughputs)
    if latencies.min() > target:
        return int(latencies.argmin())
    return int(np.where(latencies <= target, throughputs, -1).argmax())


@pytest.mark.parametrize("ttft_ms", [200, 800, 1200, 2500])
@pytest.mark.parametrize("itl_ms", [10, 15, 20, 30, 100])
def test_the_same_sizes_and_bounds_at_a_measured_context(published, ttft_ms, itl_ms):
    """Contexts of 16,671 tokens: prompts of 16,371 and 600 of output."""
    targets = Targets(isl=16_371, osl=600, ttft_s=ttft_ms / 1000, itl_s=itl_ms / 1000)
    found = recommend(published, targets)
    ttfts = [engine.prefill_table().ttft_of(16_371) * 1000 for engine in published.engines]
    prefill = dynamos_choice(
        ttfts,
        [16_371 / ms / engine.gpus for ms, engine in zip(ttfts, published.engines, strict=True)],
        ttft_ms,
    )
    batches = [
        (engine.gpus, point)
        for engine in published.engines
        for point in engine.decode
        if point.context == 16_671
    ]
    decode = dynamos_choice(
        [point.itl_s * 1000 for _, point in batches],
        [point.tokens_per_s / gpus for gpus, point in batches],
        itl_ms,
    )
    gpus, point = batches[decode]
    usage = point.concurrency * (16_371 + 300) / KV_TOKENS

    assert found.prefill.gpus == published.engines[prefill].gpus
    assert (found.decode.gpus, found.decode.concurrency) == (gpus, point.concurrency)
    assert found.kv.upper == pytest.approx(min(1, usage + 0.2), abs=0.0051)
    assert found.kv.lower == pytest.approx(max(0.1, usage - 0.2), abs=0.0051)
    if found.queue.upper - found.queue.lower > 0.1001:
        assert found.queue.upper == pytest.approx(max(0.1, ttft_ms * 1.2 / ttfts[prefill] - 1), abs=0.0051)
        assert found.queue.lower == pytest.approx(max(0.1, ttft_ms * 0.8 / ttfts[prefill] - 1), abs=0.0051)
