"""`penstock demo --kubernetes` against a kubectl and a helm that play a cluster of files: what it does, refuses and leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.cli.demo_kubernetes import graph_line, image_parts, install_values, is_at_rest
from penstock.cli.kubectl import KubectlContext
from penstock.cli.terminal import Terminal
from penstock.core.errors import ClusterError, ConfigError

FAKE = '''#!{python}
"""Plays kubectl and helm: the cluster is the files of this folder."""
import json, os, pathlib, sys
here = pathlib.Path(__file__).parent
words = sys.argv[1:]
program = pathlib.Path(sys.argv[0]).name
with (here / "calls").open("a") as calls:
    calls.write(" ".join([program, *words]) + "\\n")
said = " ".join(words)
has = lambda name: (here / name).exists()
if has("broken") and (here / "broken").read_text() in said:
    sys.exit("the server says no")
if "current-context" in said:
    print((here / "context").read_text()) if has("context") else sys.exit("error: current-context is not set")
elif " version " in said:
    print(json.dumps({{"serverVersion": {{"gitVersion": "v1.34.0"}}}}))
elif "get namespace" in said:
    print("namespace/demo-here" if has("namespace") else "", end="")
elif "get crd" in said:
    print((here / "crds").read_text() if has("crds") else "", end="")
elif "get gd " in said:
    looks = len([line for line in (here / "calls").read_text().splitlines() if "get gd " in line])
    summary = {{"prefill": "2/2" if 1 < looks < 4 else "1/1", "decode": "1/1", "gpus": "2/8"}}
    print(json.dumps({{"status": {{"phase": "Ready", "summary": summary, "planner": {{"lastDecision": "prefill 1 -> 2"}}}}}}))
elif "--all-namespaces" in said:
    print((here / "others").read_text() if has("others") else "", end="")
elif words[0] == "install":
    (here / "namespace").touch()
    if "crds.install=true" in said:
        (here / "crds").write_text("".join(
            f"customresourcedefinition.apiextensions.k8s.io/{{each}}.penstock.dev\\n"
            for each in ("clustergpupools", "gpupools", "graphdeployments", "profilerequests", "scalingadapters")))
elif "delete namespace" in said:
    (here / "namespace").unlink(missing_ok=True)
elif "delete crd" in said:
    (here / "crds").unlink(missing_ok=True)
elif "port-forward" in said:
    port = words[-1].split(":")[0]
    os.execv(sys.executable, [sys.executable, "-m", "penstock.cli", "engine", "serve", "m", "--port", port])
elif "exec" in said:
    sys.exit("no ledger here")
'''


@pytest.fixture
def cluster(tmp_path: Path):
    """A folder that plays a cluster whose context is kind-a; its programs come first on PATH."""
    folder = tmp_path / "cluster"
    folder.mkdir()
    for name in ("kubectl", "helm"):
        (folder / name).write_text(FAKE.format(python=sys.executable))
        (folder / name).chmod(0o755)
    (folder / "context").write_text("kind-a")
    return folder


@pytest.fixture
def on_path(cluster, monkeypatch, run):
    """Run the demo in this process, with the cluster's programs alone on PATH."""
    monkeypatch.setenv("PATH", str(cluster))
    words = ("demo", "--kubernetes", "--namespace", "demo-here", "--output-dir", cluster / "out")
    return lambda *more: run(*words, *more)


def command(tmp_path: Path, *more: str) -> list[str]:
    """The demo's command line, with a load of ten short requests."""
    trace = "poisson:rate=20,count=10,input_tokens=50,output_tokens=5"
    words = ["demo", "--kubernetes", "--namespace", "demo-here", "--output-dir", str(tmp_path / "out")]
    return [sys.executable, "-m", "penstock.cli", *words, "--trace", trace, *more]


def environment(cluster: Path) -> dict[str, str]:
    """Ours, with the cluster's programs before all others."""
    return os.environ | {"PATH": f"{cluster}{os.pathsep}{os.environ['PATH']}"}


def demo(tmp_path: Path, cluster: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Run the demo to its end."""
    return subprocess.run(
        command(tmp_path, *more),
        env=environment(cluster),
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def changes(cluster: Path) -> list[str]:
    """What was done to the cluster, each command by its first words."""
    verbs = ("install", "apply", "wait", "port-forward", "delete", "uninstall")
    lines = (cluster / "calls").read_text().splitlines()
    kept = [line.replace("--context kind-a --namespace demo-here ", "") for line in lines]
    return [" ".join(line.split()[1:3]) for line in kept if line.split()[1] in verbs]


@pytest.mark.slow
def test_the_demo_does_the_readmes_part_and_leaves_nothing(tmp_path, cluster):
    """Install, apply, wait, load, watch; then graph, release, namespace and CRDs go, in this order."""
    done = demo(tmp_path, cluster, "--yes", "--image", "localhost:5000/penstock:dev")
    assert done.returncode == 0, done.stdout + done.stderr
    assert changes(cluster) == [
        "install penstock",
        "apply --filename",
        "wait --for=condition=Ready",
        "port-forward service/llama-frontend",
        "delete gd",
        "uninstall penstock",
        "delete namespace",
        "delete crd",
    ]
    calls = (cluster / "calls").read_text()
    assert "--set-string image.tag=dev" in calls
    assert "--set image.repository=localhost:5000/penstock" in calls
    assert "context kind-a: Kubernetes v1.34.0 answers" in done.stdout
    assert "prefill 2/2" in done.stdout
    assert "Served 10 of 10; " in done.stdout
    assert "everything from the demo was removed from context kind-a" in done.stdout
    assert "operatorClass: demo-here" in (tmp_path / "out" / "graph.yaml").read_text()
    assert not (cluster / "crds").exists()


@pytest.mark.slow
def test_kinds_that_were_there_or_are_used_stay(tmp_path, cluster):
    """Another installation's CRDs are not installed over, and those in use are not deleted."""
    (cluster / "others").write_text("graphdeployment.penstock.dev/theirs\n")
    assert demo(tmp_path, cluster, "--yes").returncode == 0
    assert "delete crd" not in changes(cluster)
    assert (cluster / "crds").exists()
    (cluster / "calls").unlink()
    (cluster / "others").unlink()
    assert demo(tmp_path, cluster, "--yes").returncode == 0
    assert "crds.install=false" in (cluster / "calls").read_text()
    assert (cluster / "crds").exists()


@pytest.mark.slow
def test_ctrl_c_cleans_and_reports(tmp_path, cluster):
    """One signal during the load ends it there: everything is removed, and what was measured is reported."""
    trace = "poisson:rate=5,count=5000,input_tokens=50,output_tokens=5"
    words = command(tmp_path, "--yes", "--trace", trace)
    with subprocess.Popen(
        words, env=environment(cluster), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        results = tmp_path / "out" / "run" / "results.jsonl"
        while not (results.exists() and results.stat().st_size) and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate()
    assert process.returncode == 130, said
    assert "before it was stopped" in said
    assert "everything from the demo was removed" in said
    assert not (cluster / "namespace").exists()


@pytest.mark.slow
def test_a_step_that_fails_cleans_too(tmp_path, cluster):
    """The cluster's own words come last, after all is removed."""
    (cluster / "broken").write_text("apply --filename")
    done = demo(tmp_path, cluster, "--yes")
    assert done.returncode == 1
    assert done.stderr.endswith("the server says no\n")
    assert changes(cluster)[-3:] == ["uninstall penstock", "delete namespace", "delete crd"]


@pytest.mark.slow
def test_what_cannot_be_removed_is_named(tmp_path, cluster):
    """The demo does not say that nothing is left where something is."""
    (cluster / "broken").write_text("delete namespace")
    done = demo(tmp_path, cluster, "--yes")
    assert done.returncode == 1
    assert "namespace/demo-here was left on context kind-a" in done.stderr
    assert "everything from the demo was removed" not in done.stdout


@pytest.mark.parametrize(
    ("prepare", "arguments", "said"),
    [
        ("helm", ["--yes"], "--kubernetes: needs helm on PATH"),
        ("context", ["--yes"], "no current context; name one by --context"),
        ("", [], "would create namespace demo-here on context kind-a"),
        ("namespace", ["--yes"], "--namespace demo-here: exists on context kind-a"),
        ("crds", ["--yes"], "which lacks clustergpupools.penstock.dev, gpupools.penstock.dev, "),
        ("", ["--yes", "--image", "penstock"], "--image penstock: has no tag"),
        ("", ["--yes", "--speed", "9"], "--speed: a cluster's workers run in real time"),
    ],
)
def test_what_cannot_be_done_is_refused_before_the_cluster_changes(
    cluster, on_path, prepare, arguments, said
):
    """With the remedy, and status 2."""
    if prepare == "helm":
        (cluster / "helm").unlink()
    elif prepare == "context":
        (cluster / "context").unlink()
    elif prepare == "namespace":
        (cluster / "namespace").touch()
    elif prepare == "crds":
        (cluster / "crds").write_text("crd/graphdeployments.penstock.dev\ncrd/scalingadapters.penstock.dev\n")
    status, _, err = on_path(*arguments)
    assert status == 2
    assert said in err
    assert not (cluster / "calls").exists() or changes(cluster) == []


def test_flags_of_the_cluster_need_it(run):
    """They would have no effect on this machine."""
    status, _, err = run("demo", "--namespace", "x")
    assert (status, err) == (
        2,
        "penstock: --namespace: has an effect only with --kubernetes; add that, or remove this flag\n",
    )


def test_the_graph_is_told_in_one_line():
    """As far as it is known: a new graph has no status."""
    assert graph_line({}) == "Pending"
    summary = {"prefill": "1/2", "decode": "1/1", "gpus": "2/8"}
    graph = {"status": {"phase": "Ready", "summary": summary}}
    assert graph_line(graph) == "Ready, prefill 1/2, decode 1/1, GPUs 2/8"
    assert is_at_rest(graph, {"decode": "1/1"})
    assert not is_at_rest(graph, {"prefill": "1/1", "decode": "1/1"})
    assert not is_at_rest({}, {})


def test_an_image_is_split_at_its_tag():
    """A registry's port is not a tag; without --image the chart names the release."""
    assert image_parts("localhost:5000/penstock:dev") == ("localhost:5000/penstock", "dev")
    with pytest.raises(ConfigError, match="has no tag"):
        image_parts("localhost:5000/penstock")
    assert not any("image" in word for word in install_values("x", None, has_kinds=False))


async def test_a_command_without_end_is_ended(tmp_path, monkeypatch):
    """Each call is bounded, and the message says which one."""
    program = tmp_path / "kubectl"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(ClusterError, match=r"kubectl .*apply: did not finish within 0\.2 s"):
        await KubectlContext("a", "b", Terminal(quiet=True)).kubectl("apply", limit_s=0.2)


@pytest.mark.slow
def test_json_is_the_report_alone(tmp_path, cluster):
    """Commands and progress go to stderr."""
    done = demo(tmp_path, cluster, "--yes", "--json")
    assert json.loads(done.stdout)["headline"].startswith("Served 10 of 10")
    assert "$ helm install" in done.stderr
