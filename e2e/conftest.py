"""A kind cluster with Penstock installed from this checkout, and a fresh namespace for every test or file.

Environment: KIND_NODE_IMAGE (needed), KIND_EXPERIMENTAL_PROVIDER and CONTAINER_TOOL (docker or podman),
IMAGE_BUILD_FLAGS for `make image`, PENSTOCK_E2E_KEEP=1 to keep the cluster and use it again. Nodes with many GPUs need
kwok, on PATH or in KUBEBUILDER_ASSETS.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parent))

from images import CLUSTER, NODES, ROOT, SAMPLES, container_tool, load_image
from kube import OUTPUT, SYSTEM, Graph, Kube, merge, say, wait_for
from traffic import IMAGE

CHART = ROOT / "charts" / "penstock"
KEEP = os.environ.get("PENSTOCK_E2E_KEEP") == "1"
LIMIT_S = 900
"""Of one test, the first one's cluster and image included; a hung cluster then ends with diagnostics."""

RELEASE: dict[str, Any] = {
    "clusterWide": True,
    "createNamespace": False,
    "rbac": {"dynamo": True},  # the kind's definition comes with its test, after the chart
    "image": {"repository": IMAGE.rsplit(":", 1)[0], "tag": IMAGE.rsplit(":", 1)[1], "pullPolicy": "Never"},
    "operator": {"replicas": 1, "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}}},
    "planner": {"resources": {"requests": {"cpu": "10m", "memory": "64Mi"}}},
}


def _missing() -> str | None:
    absent = [each for each in ("kind", "kubectl", "helm") if shutil.which(each) is None]
    if absent:
        return f"not on PATH: {', '.join(absent)}"
    if not os.environ.get("KIND_NODE_IMAGE"):
        return "KIND_NODE_IMAGE names no node image for kind"
    if shutil.which(container_tool()) is None:
        return f"CONTAINER_TOOL: no {container_tool()} on PATH"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests, in the order of their files; skip them with the reason where no cluster can be made."""
    reason = _missing()
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        item.add_marker(pytest.mark.e2e)
        item.add_marker(pytest.mark.timeout(LIMIT_S))
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    """Dump what explains a failure while its namespace is still there."""
    report = yield
    kube = getattr(item, "funcargs", {}).get("kube")
    if report.failed and kube is not None:
        kube.dump(OUTPUT / item.name, [*_NAMESPACES, SYSTEM])
    return report


_NAMESPACES: list[str] = []
"""Those of the tests that exist now."""


@pytest.fixture(scope="session")
def kube(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kube]:
    """The cluster, with the image loaded."""
    kubeconfig = tmp_path_factory.mktemp("kind") / "kubeconfig"
    cluster = Kube(kubeconfig)
    exists = CLUSTER in cluster.run("kind", "get", "clusters").split()
    if exists and not KEEP:
        _delete_cluster(cluster)
        exists = False
    if exists:
        cluster.run("kind", "export", "kubeconfig", "--name", CLUSTER, "--kubeconfig", str(kubeconfig))
    else:
        say("creating a kind cluster of three nodes")
        node_image = os.environ["KIND_NODE_IMAGE"]
        config = str(Path(__file__).with_name("cluster.yaml"))
        cluster.run(
            "kind", "create", "cluster", "--name", CLUSTER, "--image", node_image, "--config", config,
            "--kubeconfig", str(kubeconfig), "--wait", "180s", timeout_s=400.0,
        )  # fmt: skip
    load_image(cluster, IMAGE, tmp_path_factory.mktemp("image"), nodes=NODES)
    yield cluster
    if not KEEP:
        _delete_cluster(cluster)


def _delete_cluster(cluster: Kube) -> None:
    subprocess.run(
        ["kind", "delete", "cluster", "--name", CLUSTER], env=cluster.env, check=False, timeout=400
    )


@pytest.fixture(scope="module")
def install(kube: Kube) -> Callable[..., None]:
    """Installs or upgrades the release ``penstock``; does little if nothing changed."""
    image = kube.run(container_tool(), "image", "inspect", IMAGE, "--format", "{{.Id}}").strip()
    # The tag stays when the image changes; pods of a kept cluster must change all the same.
    built = {"podAnnotations": {"penstock.dev/image": image}}

    def run(namespace: str = SYSTEM, chart: Path = CHART, **values: Any) -> None:
        chosen = {**RELEASE, **values}
        for component in ("operator", "planner"):
            chosen[component] = {**RELEASE[component], **chosen[component], **built}
        path = OUTPUT / "values.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(chosen))
        kube.helm(
            "upgrade", "penstock", str(chart), "--install", "--namespace", namespace, "--create-namespace",
            "--values", str(path), "--wait", "--timeout", "180s",
        )  # fmt: skip

    return run


@pytest.fixture(scope="module")
def release(kube: Kube, install: Callable[..., None]) -> None:
    """The release as the tests expect it: cluster-wide, one operator, one planner."""
    install()


@contextmanager
def _namespace(kube: Kube) -> Iterator[str]:
    """A fresh namespace that demands restricted pod security, deleted in the end."""
    name = f"e2e-{uuid.uuid4().hex[:6]}"
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    kube.apply(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}},
        namespace=name,
    )
    _NAMESPACES.append(name)
    yield name
    _NAMESPACES.remove(name)
    _empty(kube, name)
    kube.kubectl("delete", "namespace", name, "--wait=false", "--ignore-not-found")


def _empty(kube: Kube, namespace: str) -> None:
    """Delete the graphs while their operator runs; without one, take the finalizers off."""
    scope = ("--namespace", namespace)
    kube.kubectl("delete", "gd", *scope, "--all", "--wait=false")
    kube.kubectl("delete", "pods", *scope, "--all", "--grace-period=1", "--wait=false")
    try:
        wait_for("graphs are gone", lambda: not kube.get("gd", *scope), 60)
    except AssertionError as exc:
        say(str(exc))
        for graph in kube.get("gd", *scope):
            patch = '{"metadata":{"finalizers":null}}'
            kube.kubectl("patch", "gd", graph["metadata"]["name"], *scope, "--type=merge", f"--patch={patch}")


@pytest.fixture
def deploy(kube: Kube, release: None) -> Iterator[Callable[..., Graph]]:
    """Deploys into a namespace of the test's own; see `Deploy`."""
    with _namespace(kube) as name:
        yield Deploy(kube, name)


@pytest.fixture
def deploy_beside(kube: Kube, release: None) -> Iterator[Callable[..., Graph]]:
    """Deploys into another namespace of the test's own."""
    with _namespace(kube) as name:
        yield Deploy(kube, name)


@pytest.fixture(scope="module")
def namespace_for_all(kube: Kube) -> Iterator[str]:
    """A namespace that all tests of a file share."""
    with _namespace(kube) as name:
        yield name


@pytest.fixture(scope="module")
def deploy_for_all(kube: Kube, release: None, namespace_for_all: str) -> Deploy:
    """Deploys into a namespace that all tests of a file share."""
    return Deploy(kube, namespace_for_all)


class Deploy:
    """Applies a sample, changed, and waits until it is ready."""

    def __init__(self, kube: Kube, namespace: str) -> None:
        self.kube, self.namespace = kube, namespace

    def __call__(self, sample: str = "disaggregated", *, name: str | None = None, **changes: Any) -> Graph:
        """Return the graph of a sample with ``changes`` laid over its spec, and another ``name`` if one is given."""
        manifest = yaml.safe_load((SAMPLES / f"{sample}.yaml").read_text())
        if name is not None:
            manifest["metadata"]["name"] = name
        merge(manifest["spec"], changes)
        for service in manifest["spec"]["services"].values():
            service["podTemplate"] = _SMALL
        self.kube.apply(manifest, namespace=self.namespace)
        graph = Graph(self.kube, self.namespace, manifest["metadata"]["name"])
        graph.wait_ready()
        return graph


_SMALL = {
    "spec": {"containers": [{"name": "main", "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}}}]}
}
"""So that a dozen workers fit on nodes that share two cores."""
