"""A real API server takes every object of the chart and every sample, and lets the operator do its work."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import subprocess
from pathlib import Path

import pytest
import yaml
from apiserver import asset
from manifest_table import manifest_of
from operating import until

from penstock.api.manifests import load_graph
from penstock.core.errors import ClusterError
from penstock.kube.kinds import GRAPH_DEPLOYMENT
from penstock_operator.resources import BuildContext, children

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = sorted((ROOT / "manifests" / "samples").glob("*.yaml"))
GRAPHS = [path for path in SAMPLES if "kind: GraphDeployment" in path.read_text(encoding="utf-8")]
TYPICAL = {"disaggregated", "dynamo-kubernetes", "overload", "two-node-pools"}
"""Between them they have every kind of child."""
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}
FOREIGN = {"PodMonitor", "PrometheusRule", "ServiceMonitor"}
"""Kinds of the Prometheus operator, which this API server does not know."""

VALUES = {
    "default": {},
    "cluster-wide": {"clusterWide": True},
    "everything": {
        "operator": {"replicas": 2},
        "planner": {"replicas": 2, "logs": {"size": "1Gi", "accessModes": ["ReadWriteMany"]}},
        "tensorboard": {"enabled": True},
        "monitoring": {
            "podMonitor": {"enabled": True},
            "serviceMonitor": {"enabled": True},
            "prometheusRule": {"enabled": True},
            "dashboard": {"enabled": True},
        },
    },
}


def rendered(namespace, values):
    """The chart's objects; skips without helm."""
    if not Path(asset("helm")).is_file():
        pytest.skip("KUBEBUILDER_ASSETS: no helm")
    chart = str(ROOT / "charts" / "penstock")
    command = [asset("helm"), "template", "penstock", chart, "--namespace", namespace]
    command += ["--kube-version", "1.34.0", "--values", "-"]
    text = subprocess.run(
        command, input=yaml.safe_dump(values), capture_output=True, text=True, check=True, timeout=60
    ).stdout
    return [each for each in yaml.safe_load_all(text) if each and each["kind"] not in FOREIGN]


def listed(objects):
    """Objects as one list, for kubectl."""
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})


@pytest.mark.parametrize("name", VALUES)
def test_the_api_server_takes_every_object(api_server, make_namespace, name):
    """Server-side validation finds no unknown field and no wrong value."""
    namespace = make_namespace("chart")

    api_server.kubectl(
        "apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-",
        stdin=listed(rendered(namespace, VALUES[name])),
    )  # fmt: skip


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=() if path.stem in TYPICAL else pytest.mark.nightly)
        for path in GRAPHS
    ],
)
def test_the_operators_account_may_make_all_children(crds, make_namespace, path):
    """With the chart's namespaced Role alone; a Role that grants more than its author holds would be refused."""
    namespace = make_namespace("rights", RESTRICTED)
    chart = rendered(namespace, {"rbac": {"dynamo": "dynamo" in path.stem}})
    rights = [each for each in chart if each["kind"] in {"Role", "RoleBinding", "ServiceAccount"}]
    crds.kubectl("apply", "--server-side", "-f", "-", stdin=listed(rights))
    context = BuildContext(owner_uid="", namespace=namespace)
    objects = children(load_graph(path), context, replicas={}, unavailable={})

    crds.kubectl(
        "apply", "--server-side", "--field-manager=penstock-operator",
        f"--as=system:serviceaccount:{namespace}:penstock-operator", "-f", "-",
        stdin=listed(objects),
    )  # fmt: skip


async def test_the_nodes_things_are_refused_when_they_are_applied(crds, client, make_namespace):
    """In the release's namespaces and class alone; a graph from before can be annotated; the chart's value allows it."""
    namespace, other = make_namespace("paths"), make_namespace("paths")

    async def refusal(name, volume, where=namespace, pod=None, **spec):
        template = {"spec": {"volumes": [{"name": "v", **volume}]} if pod is None else pod}
        volumes = {"services": {"decode": {"podTemplate": template}}}
        graph = manifest_of({"metadata": {"name": name, "namespace": where}, "spec": {**volumes, **spec}})
        try:
            await client.create(graph, field_manager="test")
        except ClusterError as exc:
            return str(exc)
        return ""

    path = {"hostPath": {"path": "/data"}}
    assert await refusal("before", path) == ""
    kinds = {"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"}
    allowing = rendered(namespace, {"podTemplates": {"allow": {"everything": True}}})
    assert not any("pod-templates" in each["metadata"]["name"] for each in allowing)
    policy = listed([each for each in rendered(namespace, {}) if each["kind"] in kinds])
    crds.kubectl("apply", "--server-side", "-f", "-", stdin=policy)
    with contextlib.ExitStack() as stack:
        stack.callback(crds.kubectl, "delete", "-f", "-", stdin=policy)
        names = (f"g{number}" for number in range(100))

        async def is_refused():
            said = await refusal(next(names), path)
            return "spec.services.decode.podTemplate.spec.volumes: hostPath is not allowed" in said

        await until(is_refused, "the policy works")
        assert await refusal("folder", {"emptyDir": {}}) == ""
        for key in ("hostIPC", "hostNetwork", "hostPID"):
            said = await refusal(f"with-{key.lower()}", {}, pod={key: True})
            assert f"podTemplate.spec.{key}: true is not allowed in a podTemplate; remove it" in said
            assert f"podTemplates.allow.{key}: true" in said
            assert await refusal(f"without-{key.lower()}", {}, pod={key: False}) == ""
        assert await refusal("removed", {"hostPath": None, "$patch": "delete"}) == ""
        assert await refusal("elsewhere", path, other) == ""
        assert await refusal("of-others", path, operatorClass="research") == ""
        note = {"metadata": {"annotations": {"note": "kept"}}}
        await client.patch(GRAPH_DEPLOYMENT, "before", note, namespace=namespace, field_manager="test")


async def test_a_foreground_deletion_is_warned_of_and_says_what_to_use(crds, client, make_namespace):
    """Kubernetes would end the workers past the drain. Nothing is said of other ways, classes and namespaces."""
    namespace, other = make_namespace("deletion"), make_namespace("deletion")
    policies = [each for each in rendered(namespace, {}) if "-deletion" in each["metadata"]["name"]]
    crds.kubectl("apply", "--server-side", "-f", "-", stdin=listed(policies))

    async def made(name, where=namespace, **spec):
        metadata = {"name": name, "namespace": where}
        await client.create(manifest_of({"metadata": metadata, "spec": spec}), field_manager="test")

    async def warning(name, cascade="foreground", where=namespace):
        command = [asset("kubectl"), "--kubeconfig", str(crds.kubeconfig), "delete", "gd", name]
        options = ["--namespace", where, "--wait=false", f"--cascade={cascade}"]
        done = await asyncio.to_thread(
            subprocess.run, [*command, *options], capture_output=True, text=True, timeout=60, check=True
        )
        return done.stderr

    with contextlib.ExitStack() as stack:
        stack.callback(crds.kubectl, "delete", "-f", "-", stdin=listed(policies))

        tries, said = itertools.count(), ""

        async def works():
            nonlocal said
            await made(name := f"g-{next(tries)}")
            said = await warning(name)
            return said

        await until(works, "the policy works")
        assert "kubectl delete --cascade=background" in said
        await made("in-background")
        assert await warning("in-background", "background") == ""
        await made("elsewhere", other)
        assert await warning("elsewhere", where=other) == ""
        await made("of-others", operatorClass="research")
        assert await warning("of-others") == ""
