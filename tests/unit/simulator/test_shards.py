"""A sweep in shards, as an Indexed Job's pods run it, ends with the bytes of one process."""

import subprocess
import sys
from pathlib import Path

import orjson
import pytest
import yaml
from click.testing import CliRunner

from penstock.cli.main import cli
from penstock.core.errors import ConfigError
from penstock.simulator.cells import CellJournal
from penstock.simulator.indexed_job import SweepJob
from penstock.simulator.plan import SimulateOptions, make_plan
from penstock.simulator.shards import Shard, run_shard

SAMPLE = Path(__file__).resolve().parents[3] / "manifests" / "samples" / "disaggregated.yaml"
ROW = '{"timestamp": %d, "input_length": 900, "output_length": 20, "hash_ids": [1, 2]}\n'
SWEEP = ("--policy", "least-loaded,round-robin", "--rate", "2,4", "--seeds", "2", "--limit", "20")


def run(*arguments):
    """Run the command; errors surface as they are."""
    return CliRunner().invoke(cli, ["simulate", *arguments], catch_exceptions=False)


@pytest.fixture(name="folder")
def made_folder(tmp_path, monkeypatch):
    """A working folder with a graph, and a trace in a folder of it."""
    monkeypatch.chdir(tmp_path)
    Path("graph.yaml").write_text(SAMPLE.read_text())
    Path("own").mkdir()
    Path("own/trace.jsonl").write_text("".join(ROW % (300 * number) for number in range(30)))
    return tmp_path


def laid_out(objects, folder):
    """Lay a Job's files where its pods find them; return how to run the pod of an index, with its results in a folder."""
    data = {key: text for each in objects[:-1] for key, text in each["data"].items()}
    container = objects[-1]["spec"]["template"]["spec"]["containers"][0]
    work = folder / "work"
    for mount in container["volumeMounts"]:
        if mount["name"] == "files":
            path = work / Path(mount["mountPath"]).relative_to(container["workingDir"])
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(data[mount["subPath"]])

    def pod(index):
        given = [each.replace("$(JOB_COMPLETION_INDEX)", str(index)) for each in container["args"]]
        given = [each.replace("/results", str(folder / "results")) for each in given]
        command = [sys.executable, "-m", "penstock.cli", *given]
        return subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)

    return pod


@pytest.mark.slow
def test_the_rendered_pods_end_with_the_bytes_of_one_process(folder):
    """Each pod runs its share; the last one writes and prints the result, and no run is done twice."""
    given = ("--manifest", "graph.yaml", "--trace", "own/trace.jsonl", *SWEEP)
    expected = run(*given, "--jobs", "1", "--json").stdout

    rendered = run(*given, "--render-job", "sweep", "--pods=2", "--jobs", "1")
    pod = laid_out(list(yaml.safe_load_all(rendered.stdout)), folder)
    first, last = pod(1), pod(0)

    results = folder / "results" / "sweep"
    assert (first.returncode, first.stdout) == (0, "4 of 8 runs are done\n"), first.stderr
    assert last.returncode == 0, last.stderr
    assert "round-robin" in last.stdout
    assert (results / "simulate.json").read_text() == expected
    lines = [(results / f"cells-{index}.jsonl").read_bytes().count(b"\n") for index in (0, 1)]
    assert lines == [4, 4]
    assert sorted(path.name for path in results.iterdir()) == [
        "cells-0.jsonl",
        "cells-1.jsonl",
        "simulate.json",
    ]


def test_a_pods_command_is_what_was_given(folder):
    """Without what is said of the Job; a user's text is none of Kubernetes' variables."""
    given = (
        "--trace",
        "own/trace.jsonl",
        "--limit=20",
        "--render-job",
        "sweep",
        "--json",
        "--jobs=2",
        "--image",
        "i:1",
    )
    config_map, job = orjson.loads(run(*given, "--policy", "round-robin").stdout)
    container = job["spec"]["template"]["spec"]["containers"][0]
    assert container["args"][1:-6] == ["--trace", "own/trace.jsonl", "--limit=20", "--policy", "round-robin"]
    assert container["args"][-6:] == [
        *("--jobs", "2"),
        *("--shard", "$(JOB_COMPLETION_INDEX)/1"),
        *("--output-dir", "/results/sweep"),
    ]
    assert container["image"] == "i:1"
    assert container["resources"]["requests"]["cpu"] == "2"
    assert list(config_map["data"].values()) == [Path("own/trace.jsonl").read_text()]
    odd = SweepJob("n", "n", "i", 1, 1, 1, ("--profile", "$(HOME)"), {})
    assert odd.objects()[0]["spec"]["template"]["spec"]["containers"][0]["args"][2] == "$$(HOME)"


def test_a_file_too_large_for_a_config_map_lies_on_the_claim(folder):
    """The smaller ones stay in it, and a note says what to copy where."""
    Path("own/trace.jsonl").write_text("".join(ROW % (300 * number) for number in range(16_000)))
    given = (
        "--manifest",
        "graph.yaml",
        "--trace",
        "own/trace.jsonl",
        "--limit",
        "20",
        "--render-job",
        "sweep",
    )
    result = run(*given, "--claim", "data")
    config_map, job = yaml.safe_load_all(result.stdout)
    pod = job["spec"]["template"]["spec"]
    mounts = {
        each["mountPath"]: (each["name"], each.get("subPath"))
        for each in pod["containers"][0]["volumeMounts"]
    }
    assert mounts["/work/own/trace.jsonl"] == ("results", "sweep/own/trace.jsonl")
    assert mounts["/work/graph.yaml"] == ("files", "file-0")
    assert list(config_map["data"]) == ["file-0"]
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "data"}
    assert "own/trace.jsonl: 1.4 MB" in result.stderr
    assert "copy it to sweep/own/trace.jsonl on claim data" in result.stderr


def test_profiles_and_prompts_of_a_synthetic_load_travel_too(folder):
    """Whatever a run reads from a file; without any there is no ConfigMap."""
    given = ("--trace", "poisson:rate=2,count=20,requests=own/trace.jsonl", "--policy", "round-robin")
    config_map, _ = orjson.loads(run(*given, "--render-job", "sweep", "--json").stdout)
    assert list(config_map["data"].values()) == [Path("own/trace.jsonl").read_text()]
    (job,) = orjson.loads(run("--limit", "20", "--render-job", "sweep", "--json").stdout)
    assert [each["name"] for each in job["spec"]["template"]["spec"]["volumes"]] == ["results", "tmp"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--render-job", "Sweep"), "'Sweep' must be at most 57 letters"),
        (("--render-job", "s", "--claim", "-"), "'-' must be at most"),
        (("--render-job", "s", "--on", "dask"), "--render-job: excludes --on dask"),
        (("--render-job", "s", "--output-dir", "o"), "--render-job: excludes --output-dir o"),
        (("--render-job", "s", "--shard", "0/2"), "--render-job: excludes --shard"),
        (("--render-job", "s", "--manifest", str(SAMPLE)), "run this command in the file's folder"),
        (("--shard", "0/2"), "--shard: needs --output-dir"),
        (("--shard", "2/2", "--output-dir", "o"), "--shard 2/2: must be INDEX/COUNT"),
        (("--shard", "1", "--output-dir", "o"), "--shard 1: must be INDEX/COUNT"),
        (("--shard", "0/2", "--on", "dask", "--output-dir", "o"), "--shard: excludes --on dask"),
    ],
)
def test_what_does_not_go_together_is_refused(folder, options, told):
    """Before anything runs."""
    with pytest.raises(ConfigError, match=told):
        run("--limit", "20", *options)


def test_a_shard_leaves_the_unfinished_line_of_another(tmp_path):
    """It may be one that is being written; its own is of a killed try, and is dropped."""
    plan = make_plan(SimulateOptions(policy="least-loaded", seeds=2, limit=20))
    for index in (0, 1):
        (tmp_path / f"cells-{index}.jsonl").write_bytes(b'{"cell": "torn')
    assert run_shard(plan, Shard(0, 2), tmp_path, processes=1) == (None, 1)
    assert (tmp_path / "cells-1.jsonl").read_bytes() == b'{"cell": "torn'
    assert len(CellJournal(tmp_path, "cells-0.jsonl").figures) == 1
    result, done = run_shard(plan, Shard(1, 2), tmp_path, processes=1)
    assert done == len(plan.runs) == len(result["runs"]) == 2


def test_the_last_shard_prints_the_result_as_json(tmp_path):
    """On one line of others' progress on stderr."""
    given = ("--policy", "least-loaded", "--seeds", "2", "--limit", "20", "--jobs", "1", "--json")
    folder = ("--output-dir", str(tmp_path))
    first = run(*given, *folder, "--shard", "0/2")
    assert (first.stdout, first.stderr) == ("", "1 of 2 runs are done\n")
    assert run(*given, *folder, "--shard", "1/2").stdout == run(*given).stdout
