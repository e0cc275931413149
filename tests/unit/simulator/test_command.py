"""`penstock simulate` end to end, and what it refuses."""

from pathlib import Path

import orjson
import pytest
from click.testing import CliRunner

from penstock.cli.main import cli
from penstock.core.errors import ConfigError
from penstock_planner.decide import policy as registry
from penstock_planner.ledger import read_ledger
from penstock_planner.replay import replay

FAST = ("--limit", "60", "--jobs", "1")
SAMPLES = Path(__file__).resolve().parents[3] / "manifests" / "samples"
SPLIT, ONE_POOL = (str(SAMPLES / f"{name}.yaml") for name in ("disaggregated", "aggregated"))


def run(*arguments):
    """Run the command; errors surface as they are."""
    return CliRunner().invoke(cli, ["simulate", *arguments], catch_exceptions=False)


def test_the_result_is_the_same_byte_for_byte():
    """Two runs of the same options print the same JSON."""
    options = (*FAST, "--policy", "least-loaded", "--rate", "2,4", "--seeds", "2", "--json")

    first = run(*options)

    assert first.exit_code == 0
    assert run(*options).stdout == first.stdout
    result = orjson.loads(first.stdout)
    assert result["schema"] == "penstock-simulate/2"
    assert [(row["policy"], row["qps"], row["seeds"]) for row in result["summary"]] == [
        ("least-loaded", 2.0, 2),
        ("least-loaded", 4.0, 2),
    ]
    assert len(result["runs"]) == 4


def test_rejection_is_turned_on_by_an_option():
    """Five times what one worker serves: some are rejected, and those served wait less; off, none is."""
    load = ("--trace", "gamma:rate=30,count=300,cv=1")
    options = (*load, "--aggregated", "1", "--policy", "prefix-cost", "--jobs", "1")
    admission = ("--admission-control", "token-capacity", "--active-prefill-tokens-threshold", "3000")
    off, on, none = (
        orjson.loads(run(*options, *more, "--json").stdout)["runs"][0]
        for more in ((), admission, ("--admission-control", "none"))
    )
    assert off == none
    assert on["rejected"] > 0 == off["rejected"]
    assert on["ttft_s"]["p99"] < off["ttft_s"]["p99"] / 2


def test_a_simulated_planner_writes_a_ledger_that_replays(tmp_path):
    """As a live one does: the result is the same as without, every decision is made again from it, and explain reads it."""
    options = ("--trace", "bursts:rate=6,count=400", "--policy", "prefix-cost", "--planner", "--jobs", "1")
    recorded = orjson.loads(run(*options, "--ledger", str(tmp_path / "night"), "--json").stdout)

    assert recorded == orjson.loads(run(*options, "--json").stdout)
    result = replay(read_ledger(tmp_path / "night"))
    assert result.differences == ()
    assert result.decisions > 10
    explained = CliRunner().invoke(
        cli, ["planner", "explain", "--log-dir", str(tmp_path / "night"), "--last", "1"]
    )
    assert explained.exit_code == 0
    assert "2024-01-01 00:0" in explained.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "a ledger holds one run, and these options give \\d+"),
        (("--policy", "prefix-cost"), "no planner decides in this run; add --planner"),
        (("--policy", "prefix-cost", "--planner", "hpa"), "hpa is a baseline without a ledger"),
    ],
)
def test_a_ledger_of_no_single_planner_is_refused(options, message, tmp_path):
    """Several runs, none that decides, or one that keeps none."""
    with pytest.raises(ConfigError, match=message):
        run(*FAST, *options, "--ledger", str(tmp_path))


def test_a_ledger_is_never_overwritten(tmp_path):
    """A folder with a ledger in it, a live planner's perhaps, is refused."""
    (tmp_path / "ledger.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match=r"holds a ledger\.jsonl already"):
        run(*FAST, "--policy", "prefix-cost", "--planner", "--ledger", str(tmp_path))


def test_planners_are_compared_under_one_router():
    """Names give a row each; the bare flag stays one row per router policy."""
    named = run(*FAST, "--planner", "load,hpa", "--max-gpus", "10", "--json")
    bare = run(*FAST, "--planner", "--max-gpus", "10", "--policy", "round-robin", "--json")

    rows = orjson.loads(named.stdout)["summary"]
    assert [(row["label"], row["planner"], row["policy"]) for row in rows] == [
        ("load", "load", "prefix-cost"),
        ("hpa", "hpa", "prefix-cost"),
    ]
    assert {"in_time", "violation_s", "changes", "reversals", "gpu_hours", "lost"} <= set(rows[0])
    assert [row["policy"] for row in orjson.loads(bare.stdout)["summary"]] == ["round-robin"]


@pytest.mark.nightly  # the oracles among them search for their schedules
def test_all_compares_every_planner():
    """A row each."""
    every = run(*FAST, "--planner", "all", "--max-gpus", "10")

    printed = " ".join(every.output.split())
    assert "planner in time p50 p99 GPU-h violation changes reversals lost" in printed
    assert all(f" {name} " in printed for name in registry.policy_names())


def test_what_happens_is_given_by_options():
    """Metrics away, a restart, a cut budget, small nodes; a pool grows at 5 s; a worker dies at 3 s until 8 s."""
    result = run(
        *FAST,
        *("--policy", "least-loaded", "--planner", "--max-gpus", "12", "--json"),
        *("--fault", "metrics-missing:5-9", "--restart", "3", "--budget-change", "4=9", "--node-gpus", "8"),
        *("--resize", "5:prefill=5", "--fail", "3-8:decode-0"),
    )

    settings = orjson.loads(result.stdout)["settings"]
    assert settings["resizes"] == [{"at_s": 5.0, "role": "prefill", "replicas": 5}]
    assert settings["failures"] == [{"at_s": 3.0, "worker": "decode-0", "back_s": 8.0}]
    assert settings["faults"] == {
        "periods": [{"kind": "metrics-missing", "from_s": 5.0, "to_s": 9.0}],
        "restarts": [3.0],
        "budget": [{"at_s": 4.0, "gpus": 9}],
        "node_gpus": 8,
        "failing_starts": 0.0,
    }


@pytest.mark.slow
def test_pictures_are_written(tmp_path):
    """Alongside the JSON."""
    folder = tmp_path / "out"
    compared = ("--policy", "least-loaded,round-robin", "--rate", "2,4", "--planner")
    result = run(*FAST, *compared, "--output-dir", str(folder))

    assert result.exit_code == 0
    pictures = {f"{name}.png" for name in ("capacity", "hits", "ttft_cdf", "imbalance", "replicas")}
    assert {path.name for path in folder.iterdir()} == {"simulate.json", "cells.jsonl", *pictures}


def test_tiers_and_goodput_have_tables_of_their_own():
    """Without a manifest tiers only label the figures; at 80 columns no figure is cut."""
    text = run(
        *FAST, "--policy", "least-loaded", "--rate", "2,4", "--tiers", "premium=20,background=80"
    ).stdout

    assert all(
        word in text for word in ("premium", "background", "compliance", "goodput: requests/s", ">= 4.00")
    )
    assert "…" not in text
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--policy", "fastest"), "--policy fastest: choose from"),
        (("--aggregated", "2", "--prefill", "1"), "--aggregated: excludes"),
        (("--profile", "dualmap-7b", "--decode", "1"), "only prefills"),
        (
            ("--manifest", SPLIT, "--aggregated", "7"),
            "--aggregated: 7, but llama has no aggregated service; give",
        ),
        (("--manifest", ONE_POOL, "--decode", "7"), "--decode: 7, but .* give --aggregated, or leave it out"),
        (("--resize", "soon"), "--resize soon: must be SECONDS:ROLE=REPLICAS"),
        (("--fail", "x:y"), r"--fail x:y: must be SECONDS\[-BACK\]:WORKER"),
        (("--fault", "rain:1-2"), "--fault rain:1-2: must be KIND:FROM-TO"),
        (("--fault", "router-down:5-2"), "--fault router-down: '5-2' must be"),
        (("--fail", "5-4:prefill-0"), "--fail, its return: 4"),
        (("--resize", "1:aggregated=2"), "--resize, its role"),
        (("--budget-change", "1=-4"), "a time and GPUs of at least 0"),
        (("--budget-change", "4"), "--budget-change 4: must be SECONDS=GPUS"),
        (("--planner", "best"), "--planner best: choose from"),
        (("--trace", "nowhere.jsonl"), "no such file"),
        (("--block-size", "48"), "block_size: 48"),
        (("--planner", "--max-gpus", "4"), "--max-gpus: 4 must be at least the 8"),
        (("--warmup", "60"), "--warmup: 60 leaves nothing"),
        (("--routers", "0"), "from 1 to 256"),
        (("--routers", "2,257"), "from 1 to 256"),
        (("--picker-death", "3"), "one router has no successor"),
    ],
)
def test_wrong_options_are_refused_with_their_remedy(options, told):
    """Before anything runs."""
    with pytest.raises(ConfigError, match=told):
        run(*FAST, *options)


def test_numbers_of_routers_are_compared_in_one_table():
    """One of them picks, so the number changes little; its death does more."""
    options = (*FAST, "--profile", "dualmap-7b", "--policy", "prefix-cost,min-ttft", "--rate", "6")
    one = orjson.loads(run(*options, "--routers", "1,4", "--pick-delay-s", "0", "--json").stdout)
    dying = orjson.loads(run(*options, "--routers", "2,4", "--picker-death", "3", "--json").stdout)

    rows = {row["label"]: row for row in one["by_routers"]}
    assert set(rows) == {"prefix-cost", "min-ttft"}
    assert all(row["in_time"]["1"] == row["in_time"]["4"] for row in rows.values())
    assert min(row["behind_best"] for row in rows.values()) == 0
    assert [row["label"] for row in one["summary"]][:2] == [
        "prefix-cost, 1 router",
        "prefix-cost, 4 routers",
    ]
    lost = {row["label"]: row["lost"] for row in dying["summary"]}
    assert lost["prefix-cost, 2 routers"] > lost["prefix-cost, 4 routers"] > 0
    assert "in time, by the number of routers" in run(*options, "--routers", "1,4").stdout


def test_streams_that_went_on_behind_a_dead_worker_are_counted():
    """In the JSON of each run and of the summary, and below the table; without a death there is no such line."""
    options = (*FAST, "--policy", "least-loaded", "--manifest", SPLIT, "--rate", "6")
    dying = (*options, "--fail", "5-60:decode-0")
    result = orjson.loads(run(*dying, "--json").stdout)
    (row,) = result["summary"]
    assert row["continued"] == sum(each["continued"] for each in result["runs"]) > 0
    assert f": {row['continued']} streams continued on another worker" in run(*dying).stdout
    assert "continued" not in run(*options).stdout


MANIFEST = """
apiVersion: penstock.dev/v1alpha1
kind: GraphDeployment
metadata: {name: g}
spec:
  model: {name: m, contextTokens: 131072}
  runtime: simulated
  services:
    frontend: {role: router}
    prefill: {role: prefill, replicas: 2, gpusPerReplica: 2, profile: h100-llama-8b-bf16-tp1}
    decode: {role: decode, replicas: 3, startupTimeoutSeconds: 3600}
  engine: {profile: a100-llama-8b-bf16-tp1, kvBlocks: 9000, maxBatchTokens: 4096}
  lease: {durationSeconds: 12}
  slo: {ttft: 3s}
  router:
    policy: dualmap
    dualmap: {rebalance: false, hotWindow: 50}
    prefillQueue: {order: hit-first, workerTokens: 20000, maxRequests: 7, maxWaitSeconds: 9}
  planner: {maxGpuBudget: 8, metrics: {maxAgeSeconds: 20}}
"""


@pytest.fixture
def manifest(tmp_path):
    """A graph whose every setting that a simulation takes differs from its default."""
    path = tmp_path / "graph.yaml"
    path.write_text(MANIFEST)
    return path


def test_the_command_takes_what_is_not_given_from_the_manifest(manifest):
    """Workers, caches, profiles, router, target and budget are the graph's, unless an option says otherwise."""
    common = ("--manifest", str(manifest), "--policy", "dualmap", "--trace", "poisson:rate=1,count=3")

    def settings(*options):
        return orjson.loads(run(*common, *options, "--json").stdout)["settings"]

    told, asked = (
        settings("--planner"),
        settings("--ttft-slo", "4s", "--slot-tokens", "100", "--prefill", "1"),
    )

    prefill, decode = told["pools"]
    assert (prefill["replicas"], prefill["gpus"]) == (2, 2)
    assert prefill["model"]["profile"] == "h100-llama-8b-bf16-tp1"
    assert (decode["replicas"], decode["model"]["kv_tokens"]) == (3, 9000 * 16)
    queue = told["router"]["prefillQueue"]
    assert (queue["workerTokens"], queue["maxRequests"]) == (20000, 7)
    assert told["router"]["dualmap"]["rebalance"] is False
    assert (told["slo"]["ttft"], told["max_gpus"], told["planner"]["max_gpu_budget"]) == ("3s", 8, 8)
    assert told["patience"] == {"deadline_s": 3600, "max_age_s": 20}
    assert (asked["slo"]["ttft"], asked["router"]["prefillQueue"]["workerTokens"]) == ("4s", 100)
    assert asked["pools"][0]["replicas"] == 1
