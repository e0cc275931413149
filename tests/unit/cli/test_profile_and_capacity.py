"""`penstock profile --from` and `penstock capacity`: what they print, write and refuse."""

import json

import pytest

NAME = "h200-llama-3.1-8b-tp1"
FAMILY = [word for size in (2, 4, 8) for word in ("--profile", f"h100-llama-3.3-70b-tp{size}")]
TARGETS = ("--isl", "3000", "--osl", "150", "--ttft", "200", "--itl", "20")
LOAD = (*TARGETS, "--rps", "10")


def test_the_four_lines_of_a_latency_profile(run):
    """65.4 ms for 3,000 tokens; nothing is written without a folder."""
    code, out, err = run("profile", "--from", NAME, *TARGETS)

    lines = [line for line in out.splitlines() if line.startswith("Suggested")]
    assert code == 0, err
    assert lines[0].startswith("Suggested prefill TP:1 (TTFT 65.36 ms, throughput 45")
    assert lines[1] == "Suggested planner upper/lower bound for prefill queue size: 2.67/1.45"
    assert len(lines) == 4
    assert "wrote" not in err


def test_a_miss_ends_with_one_and_what_it_takes(run, tmp_path):
    """The profile is written, a graph that misses its target is not."""
    strict = ("--isl", 3000, "--osl", 150, "--ttft", 10, "--itl", 20)
    code, _, err = run("profile", "--from", NAME, *strict, "--output-dir", tmp_path)

    assert code == 1
    assert "no configuration meets TTFT 10 ms at 3,000 prompt tokens: the nearest is TP1 with 65.4 ms" in err
    assert (tmp_path / "profile.json").exists()
    assert not (tmp_path / "graph.yaml").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--from", NAME, "--dry-run"), "--dry-run: decides how to measure"),
        (("--from", NAME, "--gpus", 8), "--gpus: decides how to measure"),
        (("--from", NAME, "--endpoint", "http://x"), "--endpoint: decides how to measure"),
        (("--from", NAME, "--tp", "1,2"), "--tp: with --from it says the size"),
        (("--endpoint", "http://x", "--tp", 1), "--output-dir: give a folder"),
        (("--output-dir", "x"), "give one of --config GRAPH"),
        (("--from", NAME, "--tp", "two"), "must be whole numbers"),
        (("--from", NAME, "--isl", 500_000), "--isl: 500000 prompt tokens lie outside"),
    ],
)
def test_options_without_effect_are_refused(run, arguments, said):
    """With 2, and named."""
    code, _, err = run("profile", *arguments)

    assert code == 2
    assert said in " ".join(err.split())


def test_the_graph_that_is_profiled_is_not_replaced(run, tmp_path):
    """Its folder is the one that the result would go to."""
    graph = tmp_path / "graph.yaml"
    graph.write_text(
        "apiVersion: penstock.dev/v1alpha1\nkind: GraphDeployment\nmetadata: {name: g}\n"
        "spec: {model: {name: m}, runtime: simulated, services: {w: {role: aggregated}, r: {role: router}}}\n"
    )
    code, _, err = run("profile", "--config", graph, "--output-dir", tmp_path)

    assert code == 2
    assert "would replace --config" in err


def test_capacity_of_several_sizes(run):
    """Pools, GPUs and their cost."""
    code, out, err = run("capacity", *FAMILY, *LOAD, "--ttft", 500, "--itl", 30, "--gpu-hour-price", 2)
    plain = json.loads(
        run("capacity", *FAMILY, *LOAD, "--ttft", 500, "--itl", 30, "--gpu-hour-price", 2, "--json")[1]
    )

    assert code == 0, err
    assert f"{plain['plan']['gpus']} GPUs, {2 * plain['plan']['gpus']:,.2f} an hour" in out
    assert plain["cost_per_hour"] == 2 * plain["plan"]["gpus"]
    assert plain["miss"] is None


def test_a_missed_target_names_the_nearest(run):
    """Exit status 1."""
    code, _, err = run("capacity", "--profile", NAME, *LOAD, "--ttft", 60)

    assert code == 1
    assert "no number of replicas meets TTFT 60 ms: without any wait it is" in err


def test_too_few_gpus_name_what_binds(run):
    """And what to change."""
    code, _, err = run("capacity", *FAMILY, *LOAD, "--ttft", 500, "--itl", 30, "--max-gpus", 6)

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
