"""What the chart's values do beyond its defaults: each is known, documented, takes effect, and a wrong one is refused."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from penstock.api import GraphDeployment
from penstock_operator.resources.allowances import allowances_of, profiles_of

sys.path.append(str(Path(__file__).parent))
from test_chart import CHART, KUBE_VERSION, of_kind, rendered, run_helm


def test_every_object_and_pod_carries_the_common_labels():
    """An own label of the kind goes before; selectors, which no upgrade may change, stay as they are."""
    objects = rendered("labelled")
    plain = of_kind(rendered("default"), "Deployment")
    deployments = of_kind(objects, "Deployment")

    assert {each["metadata"]["labels"]["team"] for each in objects} == {"serving"}
    releases = {each["kind"]: each["metadata"]["labels"]["release"] for each in objects}
    assert releases.pop("PodMonitor") == "prometheus"
    assert set(releases.values()) == {"ours"}
    assert {
        name: each["spec"]["template"]["metadata"]["labels"]["team"] for name, each in deployments.items()
    } == {
        "penstock-operator": "platform",
        "penstock-planner": "serving",
        "penstock-tensorboard": "serving",
    }
    for name, each in plain.items():
        assert deployments[name]["spec"]["selector"] == each["spec"]["selector"]


def test_profiles_of_podtemplates_reach_the_operator_and_what_admits_graphs():
    """The operator takes them as one text; the API server refuses only what no namespace may have."""
    objects = rendered("all rights")
    [container] = of_kind(objects, "Deployment")["penstock-operator"]["spec"]["template"]["spec"][
        "containers"
    ]
    [text] = [each for each in container["args"] if each.startswith("--pod-template-profiles=")]
    found = profiles_of(text.partition("=")[2])
    assert sorted(found) == ["local", "rdma"]
    assert found["rdma"] == allowances_of("hostIPC,capabilities=IPC_LOCK")
    assert found["local"] == allowances_of("hostPaths=/mnt/*,serviceAccounts=weights-*")

    def refused(setting):
        policies = of_kind(rendered(setting), "ValidatingAdmissionPolicy")
        [policy] = [each for name, each in policies.items() if name.endswith("-pod-templates")]
        expressions = [each["expression"] for each in policy["spec"]["validations"]]
        return [each for each in expressions if not each.endswith("|| true")]

    assert len(refused("default")) == 4
    assert refused("all rights") == ["size(variables.hostPID) == 0"]


def test_more_volumes_are_mounted():
    """Such as a CA bundle, alongside the pod's own."""
    for component in ("operator", "planner"):
        deployment = of_kind(rendered("everything"), "Deployment")[f"penstock-{component}"]["spec"]
        pod = deployment["template"]["spec"]
        assert {"tmp", "ca"} <= {each["name"] for each in pod["volumes"]}
        mounts = {each["name"]: each["mountPath"] for each in pod["containers"][0]["volumeMounts"]}
        assert mounts["ca"] == "/etc/private-ca"
        assert deployment["revisionHistoryLimit"] == 2


def test_pods_of_the_chart_are_reached_by_ipv6_and_by_ipv4():
    """The operator knows its own pod's address, by whose family it chooses what engines listen on."""
    pods = {
        name: each["spec"]["template"]["spec"]["containers"][0]
        for name, each in of_kind(rendered("everything"), "Deployment").items()
    }
    assert "--host=::" in pods["penstock-operator"]["args"]
    assert "--host=::" in pods["penstock-planner"]["args"]
    assert "--bind_all" in pods["penstock-tensorboard"]["args"]
    (address,) = (
        each for each in pods["penstock-operator"]["env"] if each["name"] == "PENSTOCK_OPERATOR_POD_IP"
    )
    assert address["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}


def test_the_family_policy_reaches_every_service():
    """Those of the chart, and by the operator those of graphs; without it the cluster's default holds."""
    for setting, policy in (("default", None), ("everything", "PreferDualStack")):
        services = of_kind(rendered(setting), "Service").values()
        assert {each["spec"].get("ipFamilyPolicy") for each in services} == {policy}
    operator = of_kind(rendered("everything"), "Deployment")["penstock-operator"]["spec"]
    args = operator["template"]["spec"]["containers"][0]["args"]
    assert "--ip-family-policy=PreferDualStack" in args


@pytest.mark.parametrize("values", [{}, {"operatorClass": "research", "watchNamespaces": ["lab"]}])
def test_the_notes_hold_without_a_clone(tmp_path, values):
    """They name no file: the first graph is in them, valid, of the release's class and in a watched namespace."""
    chart = tmp_path / "chart"
    shutil.copytree(CHART, chart)
    notes = (chart / "templates" / "NOTES.txt").read_text()
    shown = (
        '{{ define "notes" }}' + notes + '{{ end }}\nkind: Notes\ntext: {{ include "notes" . | toJson }}\n'
    )
    (chart / "templates" / "shown.yaml").write_text(shown)
    result = run_helm(
        "template", "p", str(chart), "--namespace", "serving", "--kube-version", KUBE_VERSION,
        "--show-only", "templates/shown.yaml", values=values,
    )  # fmt: skip
    text = yaml.safe_load(result.stdout)["text"]
    namespace, manifest = re.search(
        r"^kubectl --namespace (\S+) apply --filename - <<'EOF'\n(.*?)^EOF$", text, re.MULTILINE | re.DOTALL
    ).groups()

    assert re.findall(r"\S+/\S+\.(?:yaml|md)", text) == []
    assert namespace == values.get("watchNamespaces", ["serving"])[0]
    graph = GraphDeployment.model_validate(yaml.safe_load(manifest))
    assert graph.spec.operator_class == values.get("operatorClass", "penstock")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"operator": {"replcas": 2}}, "additional properties 'replcas' not allowed"),
        ({"operator": {"replicas": 3}}, "/operator/replicas"),
        ({"image": {"digest": "latest"}}, "/image/digest"),
        ({"image": {"tag": 20261127}}, "/image/tag"),
        ({"tensorboard": {"image": {"tag": 1.0}}}, "/tensorboard/image/tag"),
        ({"commonLabels": {"app.kubernetes.io/instance": "other"}}, "invalid propertyName"),
        ({"podTemplates": {"profiles": {"rdma": {"hostIpc": True}}}}, "'hostIpc' not allowed"),
        ({"podTemplates": {"profiles": {"a;b": {}}}}, "invalid propertyName"),
        ({"operator": {"extraVolumeMounts": [{"name": "ca"}]}}, "mountPath"),
        ({"planner": {"logs": {"size": "5 GB"}}}, "/planner/logs/size"),
        ({"tensorboard": {"enabled": True}}, "set planner.logs.size"),
        (
            {"planner": {"enabled": False, "logs": {"size": "5Gi"}}, "tensorboard": {"enabled": True}},
            "set planner.enabled",
        ),
        ({"watchNamespaces": ["Serving"]}, "/watchNamespaces/0"),
    ],
)
def test_wrong_values_are_refused_by_name(values, message):
    """A typo stops the installation and names its place."""
    result = run_helm("template", "p", str(CHART), "--kube-version", KUBE_VERSION, values=values)

    assert result.returncode != 0
    assert message in result.stderr


def test_the_schema_knows_every_value_and_nothing_else():
    """Keys of values.yaml and of its schema are the same, section by section."""

    def keys(schema, path=""):
        for key, inner in schema.get("properties", {}).items():
            yield f"{path}{key}"
            yield from keys(inner, f"{path}{key}.")

    def named(values, path=""):
        for key, inner in values.items():
            yield f"{path}{key}"
            if isinstance(inner, dict):
                yield from named(inner, f"{path}{key}.")

    values = set(named(yaml.safe_load((CHART / "values.yaml").read_text())))
    schema = set(keys(json.loads((CHART / "values.schema.json").read_text())))

    assert schema - values == {
        "global",
        *(f"{each}.resources.claims" for each in ("operator", "planner", "tensorboard")),
    }
    free = {each for each in values - schema if re.search(r"\.(resources|labels)\.", each)}
    assert values - schema == free


def test_every_value_is_in_the_charts_readme():
    """The table of values names each leaf."""
    text = (CHART / "README.md").read_text()

    def leaves(values, path=""):
        for key, inner in values.items():
            if isinstance(inner, dict) and inner and key not in {"resources", "labels"}:
                yield from leaves(inner, f"{path}{key}.")
            else:
                yield f"{path}{key}"

    missing = [
        each
        for each in leaves(yaml.safe_load((CHART / "values.yaml").read_text()))
        if f"`{each}`" not in text
    ]
    assert missing == []
