"""The release's life: upgrade under running graphs, uninstall that keeps them, namespaced rights."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from contextlib import suppress
from pathlib import Path

from kube import OUTPUT, SYSTEM, Graph, wait_for
from traffic import IMAGE, client_of

README = Path(__file__).resolve().parents[1] / "README.md"
BLOCKS = re.compile(r"```sh\n(.*?)```", re.DOTALL)


def test_graphs_outlive_an_upgrade_and_an_uninstall(kube, deploy, install):
    """New values roll operator and planner; without both requests are answered; a new installation adopts the graph."""
    graph = deploy()
    before = {pod["metadata"]["uid"] for pod in graph.pods("router,prefill,decode")}

    install(logging={"level": "debug"}, operator={"replicas": 2})

    deployment = kube.get("deployment", "penstock-operator", "--namespace", SYSTEM)
    assert deployment["status"]["readyReplicas"] == 2
    graph.patch({"services": {"frontend": {"replicas": 3}}})
    wait_for("the upgraded operator acts", lambda: graph.ready("router") == 3, 120)

    kube.helm("uninstall", "penstock", "--namespace", SYSTEM, "--wait")

    assert "graphdeployments.penstock.dev" in kube.kubectl("get", "crds", "--output=name")
    with (
        kube.forwarded(graph.namespace, f"service/{graph.name}-frontend", 8000) as url,
        client_of(url) as client,
    ):
        assert client.completions.create(model="llama", prompt="Hello", max_tokens=4).choices
    install()
    graph.patch({"services": {"frontend": {"replicas": 4}}})
    wait_for("the new operator acts", lambda: graph.ready("router") == 4, 120)
    pods = graph.pods("router,prefill,decode")
    assert before <= {pod["metadata"]["uid"] for pod in pods}
    assert sum(pod["status"]["containerStatuses"][0]["restartCount"] for pod in pods) == 0


def test_the_readmes_commands_run_as_written(kube):
    """Install into one namespace with Roles alone, apply, ask, scale, delete, uninstall: each command exits 0."""
    kube.helm("uninstall", "penstock", "--namespace", SYSTEM, "--wait", "--ignore-not-found")
    forget_crds(kube)
    block = next(each for each in BLOCKS.findall(README.read_text()) if "helm install" in each)
    commands = [shlex.split(line, comments=True) for line in block.splitlines()]
    assert [words[0] for words in commands].count("kubectl") >= 8
    repository, tag = IMAGE.rsplit(":", 1)
    try:
        for words in commands:
            if words[0] in {"make", "kind"}:  # the image is on the nodes already
                continue
            if "port-forward" in words:
                ask(kube, commands)
                continue
            if words[0] == "curl":
                continue
            here = [
                word.replace("localhost/penstock", repository).replace("tag=dev", f"tag={tag}")
                for word in words
            ]
            if here[:2] == ["helm", "install"]:
                here.append("--wait")
            kube.run(*here, timeout_s=240)
            if "scale" in here:
                graph = Graph(kube, "serving", "llama")
                wait_for("three decode workers", lambda graph=graph: graph.ready("decode") == 3, 120)
        everything = ("deployments,services,pods", "--namespace=serving")
        wait_for("nothing is left", lambda: kube.get(*everything) == [], 60)
    except BaseException:
        kube.dump(OUTPUT / "readme", ["serving"])  # before it is cleaned up
        raise
    finally:
        with suppress(subprocess.CalledProcessError):  # where the installation failed there is no such kind
            kube.kubectl("delete", "gd", "--all", "--namespace=serving", "--timeout=60s")
        kube.kubectl("config", "set-context", "--current", "--namespace=default")
        kube.helm("uninstall", "penstock", "--namespace=serving", "--wait", "--ignore-not-found")
        kube.kubectl("delete", "namespace", "serving", "--wait=false", "--ignore-not-found")
        forget_crds(kube)


def forget_crds(kube):
    """Delete the CustomResourceDefinitions, which an uninstall keeps and which remember their release."""
    kube.kubectl("delete", "crds", "--selector=app.kubernetes.io/component=crds", "--timeout=60s")


def ask(kube, commands):
    """Run the README's curl through its port-forward, on a free port."""
    forward = next(words for words in commands if "port-forward" in words)
    curl = next(words for words in commands if words[0] == "curl")
    with kube.forwarded("serving", forward[2], int(forward[3])) as url:
        answer = json.loads(kube.run(*(word.replace("http://127.0.0.1:8000", url) for word in curl)))
    assert answer["choices"][0]["finish_reason"] in {"length", "stop"}
