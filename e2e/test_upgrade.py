"""From the release before this one to this one and back, while streams run: chart, definitions and image of either."""

from __future__ import annotations

import os
import subprocess

import pytest
import yaml
from images import NODES, ROOT, put_image
from kube import SYSTEM, Graph, merge, wait_for
from traffic import Load

COMMITS = 60
"""So far back is the release before this one, as long as there is none. Chosen: some hours of work."""

BEFORE = "localhost/penstock:e2e-before"
FIXED = {
    "services": {
        "frontend": {"replicas": 2},
        "prefill": {"replicas": 2, "scaling": {"minReplicas": 2, "maxReplicas": 2}},
        "decode": {"replicas": 2, "scaling": {"minReplicas": 2, "maxReplicas": 2}},
    },
    "model": {"contextTokens": 4096},
    "engine": {"streamIntervalTokens": 8},
    "planner": {"mode": "load", "adjustmentIntervalSeconds": 5},
}


def git(*arguments):
    """Run git in the checkout; skip where it lacks what is asked for, as a shallow one does."""
    done = subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False, timeout=60
    )
    if done.returncode:
        pytest.skip(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


@pytest.fixture(scope="module")
def before(kube, tmp_path_factory):
    """A checkout of the last release's tag, or of this many commits ago; its image is on the nodes."""
    tags = git("tag", "--list", "v*", "--merged", "HEAD~1", "--sort=-version:refname").split()
    folder = tmp_path_factory.mktemp("before") / "checkout"
    git("worktree", "add", "--detach", str(folder), tags[0] if tags else f"HEAD~{COMMITS}")
    flags = os.environ.get("IMAGE_BUILD_FLAGS", "")
    kube.run(
        "make", "-C", str(folder), "image", f"IMAGE={BEFORE}", f"IMAGE_BUILD_FLAGS={flags}", timeout_s=600
    )
    put_image(kube, BEFORE, tmp_path_factory.mktemp("image"), nodes=NODES)
    yield folder
    git("worktree", "remove", "--force", str(folder))


@pytest.mark.nightly
def test_an_upgrade_and_the_way_back_lose_no_stream(kube, before, namespace_for_all, install):
    """Installed of old with a graph of old; upgraded, then rolled back; each version carries an edit out."""
    kube.helm("uninstall", "penstock", "--namespace", SYSTEM, "--wait", "--ignore-not-found")
    repository, tag = BEFORE.rsplit(":", 1)
    image = {"repository": repository, "tag": tag, "pullPolicy": "Never"}
    install(chart=before / "charts" / "penstock", image=image)
    manifest = yaml.safe_load((before / "manifests" / "samples" / "disaggregated.yaml").read_text())
    merge(manifest["spec"], FIXED)
    kube.apply(manifest, namespace=namespace_for_all)
    graph = Graph(kube, namespace_for_all, manifest["metadata"]["name"])
    graph.wait_ready()
    load = Load(graph, "load", concurrency=8, max_tokens=400)

    install()
    edit(graph, 3)
    kube.helm("rollback", "penstock", "--namespace", SYSTEM, "--wait", "--timeout", "180s")
    edit(graph, 2)

    outcome = load.stop()
    assert outcome.lost == []
    assert outcome.answered > 8
    install()
    edit(graph, 3)


def edit(graph, routers):
    """Ask for this many routers, and wait until the graph rests with them, on whatever image its operator gives it."""
    graph.patch({"services": {"frontend": {"replicas": routers}}})
    wait_for(f"{routers} routers are ready", lambda: graph.ready("router") == routers, 240)
    graph.wait_ready(240)
