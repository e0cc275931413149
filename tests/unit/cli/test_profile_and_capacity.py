"""`penstock profile` and `penstock capacity`: what they print, write and refuse."""

import json
import re
import shlex
from pathlib import Path

import pytest

from penstock.api.manifests import load_graph
from penstock.performance.profile import profile_from

NAME = "h200-llama-3.1-8b-tp1"
FAMILY = [word for size in (2, 4, 8) for word in ("--profile", f"h100-llama-3.3-70b-tp{size}")]
TARGETS = ("--isl", "3000", "--osl", "150", "--ttft-slo", "200ms", "--itl-slo", "20ms")
LOAD = (*TARGETS, "--rps", "10")


def test_the_four_lines_of_a_latency_profile(run):
    """65.4 ms for 3,000 tokens, 20.7 ms to hand them over and a step of 4.6 ms; nothing is written without a folder."""
    code, out, err = run("profile", "--from", NAME, *TARGETS)

    lines = [line for line in out.splitlines() if line.startswith("Suggested")]
    assert code == 0, err
    assert lines[0].startswith("Suggested prefill TP:1 (TTFT 90.65 ms, throughput 45")
    assert lines[1] == "Suggested planner upper/lower bound for prefill queue size: 2.21/1.14"
    assert len(lines) == 4
    assert "wrote" not in err


ROOT = Path(__file__).parents[3]
SAMPLE = ROOT / "manifests" / "samples" / "disaggregated.yaml"


def test_the_profile_of_the_page_is_what_its_command_prints(run, tmp_path, monkeypatch):
    """docs/profile.md: its first command, on any machine; the graph of its second is there and valid."""
    page = (ROOT / "docs" / "profile.md").read_text(encoding="utf-8")
    commands, shown = re.findall(r"^```\n(.*?)^```", page, re.DOTALL | re.MULTILINE)[:2]
    first, second = commands.splitlines()
    monkeypatch.chdir(tmp_path)
    words = shlex.split(first.replace("manifests/samples/", f"{SAMPLE.parent}/"))
    code, out, err = run(*words[1:])

    assert code == 0, err
    assert [line for line in out.splitlines() if line.startswith("Suggested")] == shown.splitlines()
    assert second == "penstock up profile/graph.yaml"
    assert run("validate", "profile/graph.yaml")[0] == 0
    folder = tmp_path / "profile"
    assert load_graph(folder / "graph.yaml").spec.planner.sla.profile == str(folder / "profile.json")
    profile = profile_from(json.loads((folder / "profile.json").read_text()))
    assert profile.model == "meta-llama/Llama-3.1-8B-Instruct"
    assert 3000 in profile.prefill.prompt_tokens
    assert len(profile.decode.contexts) == 5
    assert {path.name for path in folder.iterdir()} >= {
        "prefill_tp1_interpolation",
        "decode_tp1_interpolation",
        "prefill_performance.png",
        "decode_performance.png",
    }


def test_profile_capacity_and_simulate_agree(run, tmp_path):
    """TTFT of one prompt and ITL of one request on the same idle graph, within 2%."""
    lengths = ("--isl", 3000, "--osl", 150, "--ttft-slo", "250ms", "--itl-slo", "20ms")
    profile = json.loads(run("profile", "--config", SAMPLE, *lengths, "--output-dir", tmp_path, "--json")[1])
    load = ("--rps", 0.001)
    capacity = json.loads(run("capacity", "--profile", tmp_path, *lengths, *load, "--json")[1])["plan"]
    by_name = ("capacity", "--profile", "a100-llama-8b-bf16-tp1", *lengths, *load, "--json")
    named = json.loads(run(*by_name)[1])["plan"]
    trace = "constant:rate=0.1,count=20,input_tokens=3000,output_tokens=150,length_cv=0"
    simulate = ("simulate", "--manifest", SAMPLE, "--trace", trace, "--policy", "least-loaded", "--json")
    simulated = json.loads(run(*simulate)[1])["summary"][0]

    truth_s = simulated["ttft_s"]["p50"]
    assert profile["recommendation"]["prefill"]["ttft_s"] == pytest.approx(truth_s, rel=0.02)
    for plan in (capacity, named):
        assert plan["prefill"]["latency_s"] == pytest.approx(truth_s, rel=0.02)
    (row,) = [
        each
        for each in profile["sweep"]["engines"][0]["decode"]
        if (each["context"], each["concurrency"]) == (3075, 1)
    ]
    assert capacity["decode"]["latency_s"] == pytest.approx(row["itl_s"], rel=0.02)


def test_they_agree_on_an_aggregated_graph(run, tmp_path):
    """No KV goes anywhere, and the first token comes with the prefill's last step."""
    graph = tmp_path / "graph.yaml"
    graph.write_text(
        "apiVersion: penstock.dev/v1alpha1\nkind: GraphDeployment\nmetadata: {name: g}\n"
        "spec: {model: {name: m}, runtime: simulated, engine: {profile: a100-llama-8b-bf16-tp1},"
        " services: {w: {role: aggregated}, r: {role: router}}}\n"
    )
    lengths = ("--isl", 3000, "--osl", 150, "--ttft-slo", "250ms", "--itl-slo", "20ms")
    folder = tmp_path / "profile"
    profile = json.loads(run("profile", "--config", graph, *lengths, "--output-dir", folder, "--json")[1])
    plan = json.loads(run("capacity", "--profile", folder, *lengths, "--rps", 0.001, "--json")[1])["plan"]
    trace = "constant:rate=0.1,count=20,input_tokens=3000,output_tokens=150,length_cv=0"
    simulate = ("simulate", "--manifest", graph, "--trace", trace, "--policy", "least-loaded", "--json")
    truth_s = json.loads(run(*simulate)[1])["summary"][0]["ttft_s"]["p50"]

    assert profile["recommendation"]["prefill"]["ttft_s"] == pytest.approx(truth_s, rel=0.02)
    assert plan["prefill"]["latency_s"] == pytest.approx(truth_s, rel=0.02)


def test_a_target_missed_by_less_than_measurements_differ_counts_as_met(run, tmp_path):
    """By 0.8% it is met, and a warning says so; by 5% it is not."""
    lengths = ("--isl", 3000, "--osl", 150, "--itl-slo", "20ms")
    code, _, err = run("profile", "--from", NAME, *lengths, "--ttft-slo", "90ms")

    assert code == 0
    assert "the nearest is TP1 with 90.7 ms, which counts as met: measurements differ by 2%" in err
    assert run("profile", "--from", NAME, *lengths, "--ttft-slo", "86ms")[0] == 1


def test_a_miss_ends_with_one_and_what_it_takes(run, tmp_path):
    """The profile is written, a graph that misses its target is not."""
    strict = ("--isl", 3000, "--osl", 150, "--ttft-slo", "10ms", "--itl-slo", "20ms")
    code, _, err = run("profile", "--from", NAME, *strict, "--output-dir", tmp_path)

    assert code == 1
    assert "no configuration meets TTFT 10 ms at 3,000 prompt tokens: the nearest is TP1 with 90.7 ms" in err
    assert (tmp_path / "profile.json").exists()
    assert not (tmp_path / "graph.yaml").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--from", NAME, "--dry-run"), "--dry-run: controls the measurement"),
        (("--from", NAME, "--gpus", 8), "--gpus: controls the measurement"),
        (("--from", NAME, "--endpoint", "http://x"), "--endpoint: controls the measurement"),
        (("--from", NAME, "--tp", "1,2"), "--tp: with --from it is the size"),
        (("--endpoint", "http://x", "--tp", 1), "--output-dir: missing; give a folder"),
        (("--output-dir", "x"), "give one of --config GRAPH"),
        (("--from", NAME, "--tp", "two"), "must be whole numbers"),
        (("--from", NAME, "--isl", 500_000), "--isl: 500000 prompt tokens are outside"),
    ],
)
def test_options_without_effect_are_refused(run, arguments, said):
    """With 2, and named."""
    code, _, err = run("profile", "--itl-slo", "50ms", *arguments)

    assert code == 2
    assert said in " ".join(err.split())


def test_the_graph_that_is_profiled_is_not_replaced(run, tmp_path):
    """Its folder is the one that the result would go to."""
    graph = tmp_path / "graph.yaml"
    graph.write_text(
        "apiVersion: penstock.dev/v1alpha1\nkind: GraphDeployment\nmetadata: {name: g}\n"
        "spec: {model: {name: m}, runtime: simulated, services: {w: {role: aggregated}, r: {role: router}}}\n"
    )
    code, _, err = run("profile", "--config", graph, "--itl-slo", "50ms", "--output-dir", tmp_path)

    assert code == 2
    assert "would replace --config" in err


def test_capacity_of_several_sizes(run):
    """Pools, GPUs and their cost."""
    code, out, err = run(
        "capacity", *FAMILY, *LOAD, "--ttft-slo", "500ms", "--itl-slo", "30ms", "--gpu-hour-price", 2
    )
    plain = json.loads(
        run(
            "capacity",
            *FAMILY,
            *LOAD,
            "--ttft-slo",
            "500ms",
            "--itl-slo",
            "30ms",
            "--gpu-hour-price",
            2,
            "--json",
        )[1]
    )

    assert code == 0, err
    assert f"{plain['plan']['gpus']} GPUs, {2 * plain['plan']['gpus']:,.2f} an hour" in out
    assert plain["cost_per_hour"] == 2 * plain["plan"]["gpus"]
    assert plain["miss"] is None


def test_a_missed_target_names_the_nearest(run):
    """Exit status 1."""
    code, _, err = run("capacity", "--profile", NAME, *LOAD, "--ttft-slo", "60ms")

    assert code == 1
    assert "no number of replicas meets TTFT 60 ms: without any wait it is" in err


def test_too_few_gpus_name_what_binds(run):
    """And what to change."""
    code, _, err = run(
        "capacity", *FAMILY, *LOAD, "--ttft-slo", "500ms", "--itl-slo", "30ms", "--max-gpus", 6
    )

    assert code == 1
    assert "more than --max-gpus 6: prefill is bound by" in err
    assert "raise it, lower --rps" in err


def test_an_aggregated_pool(run):
    """One row."""
    code, out, _ = run("capacity", "--profile", NAME, "--aggregated", *LOAD)

    assert code == 0
    assert "aggregated" in out
    assert "decode" not in out


@pytest.mark.parametrize(
    ("profiles", "said"),
    [
        ((NAME, NAME), "give each engine size once"),
        ((NAME, "h100-llama-3.3-70b-tp2"), "profiles of 2 models"),
    ],
)
def test_profiles_that_are_not_sizes_of_one_model(run, profiles, said):
    """They cannot be chosen between."""
    words = [word for each in profiles for word in ("--profile", each)]
    code, _, err = run("capacity", *words, *LOAD)

    assert code == 2
    assert said in err


@pytest.mark.parametrize(
    ("command", "flag", "said"),
    [
        (("capacity",), "--ttft", "write --ttft-slo with a unit, such as 500ms"),
        (("profile",), "--itl", "write --itl-slo with a unit, such as 50ms"),
        (("simulate",), "--qps", "write --rate, requests/s"),
        (("simulate",), "--slo-s", "write --ttft-slo with a unit, such as 5s"),
        (("report",), "--ttft-target-s", "write --ttft-slo with a unit, such as 2s"),
        (("planner", "run"), "--in-time", "write --attainment, a fraction such as 0.99"),
        (("planner", "run"), "--objective-itl", "write --itl-slo with a unit, such as 50ms"),
    ],
)
def test_a_former_flag_is_refused_and_the_new_one_named(run, command, flag, said):
    """Whichever command had it."""
    code, _, err = run(*command, flag, "1")
    assert code == 2
    assert f"{flag}: no longer an option; {said}" in err


def test_a_target_without_a_unit_is_refused(run):
    """It would be read as seconds by one and as milliseconds by the other."""
    code, _, err = run("capacity", "--profile", NAME, "--rps", 1, "--isl", 1, "--osl", 1, "--ttft-slo", 500)
    assert (code, "--ttft-slo 500: must be a duration, such as 500ms, 2s" in err) == (2, True)
