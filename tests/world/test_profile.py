"""`penstock profile` on simulated engines: real processes, whose true figures are in their latency profile."""

import json
import re
import signal
from pathlib import Path

import psutil
import pytest
import yaml

from penstock.api.manifests import load_graph
from penstock.engine import profiles
from penstock.performance.profile import profile_from
from penstock.profiler.journal import JOURNAL

SAMPLE = Path(__file__).resolve().parents[2] / "manifests" / "samples" / "disaggregated.yaml"
STATED_ERROR = 0.1
"""bench/RESULTS.md states it, for a machine that keeps up."""
SMALL = (
    "--isl",
    400,
    "--osl",
    50,
    "--ttft",
    500,
    "--itl",
    50,
    "--max-context",
    1024,
    "--max-concurrency",
    12,
)


@pytest.mark.nightly
def test_the_recommendation_is_the_truth_of_the_latency_profile(world, tmp_path):
    """Sizes, TTFT, ITL and batch as the profile has them; or it says that the machine did not keep up."""
    done = world.run(
        *("profile", "--config", SAMPLE, "--isl", 3000, "--osl", 150, "--ttft", 220, "--itl", 20),
        *("--output-dir", tmp_path, "--json"),
        timeout_s=380,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    found = result["recommendation"]
    latency = profiles.load("a100-llama-8b-bf16-tp1").latency()
    truth = {
        "ttft_s": latency.prefill.ttft_s(3000),
        "itl_s": latency.decode.step_s(found["decode"]["concurrency"], found["decode"]["concurrency"] * 3075),
        "concurrency": max(n for n in range(1, 256) if latency.decode.step_s(n, n * 3075) <= 0.02),
    }

    assert (found["prefill"]["gpus"], found["decode"]["gpus"]) == (1, 1)
    if not any("late" in warning for warning in result["warnings"]):
        assert found["prefill"]["ttft_s"] == pytest.approx(truth["ttft_s"], rel=STATED_ERROR)
        assert found["decode"]["itl_s"] == pytest.approx(truth["itl_s"], rel=STATED_ERROR)
        assert found["decode"]["concurrency"] == pytest.approx(truth["concurrency"], rel=2 * STATED_ERROR)
    profile = profile_from(json.loads((tmp_path / "profile.json").read_text()))
    assert profile.model == "meta-llama/Llama-3.1-8B-Instruct"
    assert 3000 in profile.prefill.prompt_tokens
    assert len(profile.decode.contexts) == 5
    assert {path.name for path in tmp_path.iterdir()} >= {
        "profile.json",
        "graph.yaml",
        "prefill_tp1_interpolation",
        "decode_tp1_interpolation",
        "prefill_performance.png",
        "decode_performance.png",
    }
    assert load_graph(tmp_path / "graph.yaml").spec.planner.sla.profile == str(tmp_path / "profile.json")


def workers(folder):
    """The running workers of a profile's folder."""
    record = folder / "worker.json"
    if not record.exists():
        return []
    pid = json.loads(record.read_text())["pid"]
    return [pid] if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE else []


def finished(folder):
    """Lines of the journal that are points."""
    path = folder / JOURNAL
    lines = path.read_text().splitlines() if path.exists() else []
    return [line for line in lines if '"kind":"prefill"' in line or '"kind":"decode"' in line]


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.nightly)])
def test_a_profile_that_was_ended_goes_on_where_it_stopped(world, eventually, tmp_path, number):
    """Finished points are not measured again; no worker stays, neither after Ctrl-C nor after the next run."""
    manifest, folder = world.manifest(), tmp_path / "out"
    command = ("profile", "--config", manifest, *SMALL, "--output-dir", folder)
    first = world.start(*command, name="first")
    eventually(lambda: len(finished(folder)) >= 15, "fifteen points")
    first.send_signal(number)
    first.wait(30)
    kept = finished(folder)
    if number is signal.SIGINT:
        assert (first.returncode, workers(folder)) == (130, [])

    done = world.run(*command)

    assert done.returncode == 0, done.stderr
    assert finished(folder)[: len(kept)] == kept
    assert len(set(finished(folder))) == len(finished(folder))
    assert workers(folder) == []
    assert len(re.findall(r"^Suggested ", done.stdout, re.MULTILINE)) == 4

    changed = yaml.safe_load(manifest.read_text())
    changed["spec"]["engine"]["profile"] = "a100-llama-8b-bf16-tp1"
    manifest.write_text(yaml.safe_dump(changed))
    refused = world.run(*command)
    assert refused.returncode == 2
    assert "measured under other conditions" in refused.stderr
