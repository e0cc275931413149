"""The chart renders in every combination and grants what is needed and no more."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from penstock.api.runtimes import SHIPPED
from penstock.core.safe_yaml import LOADER
from penstock.kube.objects.names import OPERATOR, PLANNER, lease_name
from penstock.runtimes import runtime_of
from penstock_operator.doctor.check import component_of, scope_of
from penstock_operator.rbac import (
    CLUSTER_OPERATOR_RIGHTS,
    CLUSTER_RULES,
    OPERATOR_RIGHTS,
    PLANNER_RIGHTS,
    RULES,
)

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "penstock"
KUBE_VERSION = "1.34.0"

SETTINGS = {
    "default": {},
    "cluster-wide": {"clusterWide": True},
    "labelled": {
        "commonLabels": {"team": "serving", "release": "ours"},
        "monitoring": {"podMonitor": {"enabled": True, "labels": {"release": "prometheus"}}},
        "operator": {"podLabels": {"team": "platform"}},
        "planner": {"logs": {"size": "5Gi"}},
        "tensorboard": {"enabled": True},
        "createNamespace": True,
    },
    "two namespaces": {"watchNamespaces": ["serving", "research"]},
    "everything": {
        "clusterWide": True,
        "createNamespace": True,
        "imagePullSecrets": [{"name": "regcred"}],
        "operator": {
            "replicas": 2,
            "extraArgs": ["--workers=2"],
            "priorityClassName": "high",
            "extraVolumes": [{"name": "ca", "configMap": {"name": "private-ca"}}],
            "extraVolumeMounts": [{"name": "ca", "mountPath": "/etc/private-ca", "readOnly": True}],
            "nodeSelector": {"kubernetes.io/os": "linux"},
        },
        "planner": {
            "replicas": 2,
            "logs": {"size": "5Gi", "accessModes": ["ReadWriteMany"]},
            "extraVolumes": [{"name": "ca", "secret": {"secretName": "private-ca"}}],
            "extraVolumeMounts": [{"name": "ca", "mountPath": "/etc/private-ca", "readOnly": True}],
        },
        "revisionHistoryLimit": 2,
        "ipFamilyPolicy": "PreferDualStack",
        "tensorboard": {"enabled": True},
        "networkPolicy": {"plannerEgress": [{"to": [{"namespaceSelector": {}}]}]},
        "monitoring": {
            "podMonitor": {"enabled": True},
            "serviceMonitor": {"enabled": True},
            "prometheusRule": {"enabled": True},
            "dashboard": {"enabled": True},
        },
    },
    "nothing optional": {
        "crds": {"install": False},
        "rbac": {"create": False},
        "networkPolicy": {"enabled": False},
        "planner": {"enabled": False},
        "operator": {"serviceAccount": {"create": False, "name": "mine"}},
    },
    "all rights": {
        "rbac": {"leaderWorkerSets": True, "inferencePools": True, "dynamo": True},
        "podTemplates": {
            "allow": {"hostNetwork": True},
            "profiles": {
                "rdma": {"hostIPC": True, "capabilities": ["IPC_LOCK"]},
                "local": {"hostPaths": ["/mnt/*"], "serviceAccounts": ["weights-*"]},
            },
        },
    },
    "fewest rights": {
        "rbac": {
            "leaderWorkerSets": False,
            "inferencePools": False,
            "dynamo": False,
            "profileRequests": False,
            "nodes": False,
            "profiles": ["llama-profile"],
        }
    },
    "an own claim": {"planner": {"logs": {"existingClaim": "logs"}}, "tensorboard": {"enabled": True}},
}


def helm():
    """Path of helm, from PATH or alongside the other Kubernetes binaries; skips without."""
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    found = shutil.which("helm", path=assets) if assets else None
    found = found or shutil.which("helm")
    if found is None:
        pytest.skip("no helm on PATH or in KUBEBUILDER_ASSETS")
    return found


def run_helm(*arguments, values=None):
    """Run helm with values on its standard input."""
    given = ["--values", "-"] if values is not None else []
    return subprocess.run(
        [helm(), *arguments, *given],
        input=yaml.safe_dump(values) if values is not None else None,
        capture_output=True,
        text=True,
        check=False,
    )


@functools.cache
def rendered(name):
    """Objects that the chart becomes with one of SETTINGS."""
    result = run_helm(
        "template", "penstock", str(CHART), "--namespace", "serving", "--kube-version", KUBE_VERSION,
        values=SETTINGS[name],
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return [each for each in yaml.load_all(result.stdout, Loader=LOADER) if each]


def of_kind(objects, kind):
    """Objects of one kind by name."""
    return {each["metadata"]["name"]: each for each in objects if each["kind"] == kind}


def rules_of(objects):
    """(apiGroup, resource, verb) that the release's accounts get, by component."""
    granted = {}
    for role in [each for each in objects if each["kind"] in {"Role", "ClusterRole"}]:
        component = role["metadata"]["labels"]["app.kubernetes.io/component"]
        granted.setdefault(component, set()).update(
            (group, resource, verb)
            for rule in role["rules"]
            for group in rule["apiGroups"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
        )
    return granted


@pytest.mark.parametrize("name", SETTINGS)
def test_lint_finds_nothing(name):
    """`helm lint --strict` passes with every combination of values."""
    result = run_helm("lint", "--strict", str(CHART), values=SETTINGS[name])

    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("name", SETTINGS)
def test_every_object_is_named_once_and_labelled(name):
    """No two objects share kind, namespace and name; each says which release it is of."""
    objects = rendered(name)
    keys = [
        (each["kind"], each["metadata"].get("namespace", ""), each["metadata"]["name"]) for each in objects
    ]

    assert len(keys) == len(set(keys))
    assert [
        key
        for key, each in zip(keys, objects, strict=True)
        if each["metadata"]["labels"].get("app.kubernetes.io/instance") != "penstock"
    ] == []


@pytest.mark.parametrize("name", SETTINGS)
def test_every_pod_keeps_to_restricted_pod_security(name):
    """Non-root, read-only root with an own /tmp, no capabilities, seccomp's default; and memory is bounded."""
    objects = rendered(name)
    for deployment in (*of_kind(objects, "Deployment").values(), *of_kind(objects, "Job").values()):
        pod = deployment["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == 1000
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert {"hostNetwork", "hostPID", "hostIPC"}.isdisjoint(pod)
        assert {"configMap", "emptyDir", "persistentVolumeClaim", "secret"} >= {
            key for volume in pod["volumes"] for key in volume if key != "name"
        }
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert {"name": "tmp", "mountPath": "/tmp"} in container["volumeMounts"]
            assert "memory" in container["resources"]["limits"]


@pytest.mark.parametrize(("setting", "reads_nodes"), [("default", True), ("fewest rights", False)])
def test_nothing_is_granted_beyond_the_namespace_but_to_read_nodes(setting, reads_nodes):
    """CRDs, what admits their objects, and the names of nodes are cluster-scoped; all else is in the release's namespace."""
    objects = rendered(setting)
    wide = [each for each in objects if "namespace" not in each["metadata"]]
    reader = {"ClusterRole", "ClusterRoleBinding"} if reads_nodes else set()

    assert {each["kind"] for each in wide} == reader | {
        "CustomResourceDefinition",
        "ValidatingAdmissionPolicy",
        "ValidatingAdmissionPolicyBinding",
    }
    assert [each["rules"] for each in wide if each["kind"] == "ClusterRole"] == [
        [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["list", "watch"]}]
    ] * reads_nodes
    assert {each["metadata"]["namespace"] for each in objects if each not in wide} == {"serving"}


def test_cluster_wide_elects_with_a_role_of_its_own_namespace():
    """ClusterRoles say nothing of Leases: the own one lies where the operator runs."""
    objects = rendered("cluster-wide")

    for role in of_kind(objects, "ClusterRole").values():
        leases = [rule["verbs"] for rule in role["rules"] if "coordination.k8s.io" in rule["apiGroups"]]
        assert leases == []
    named = {
        name
        for role in of_kind(objects, "Role").values()
        for rule in role["rules"]
        for name in rule.get("resourceNames", ())
    }
    assert named == {lease_name(each, cluster_wide=True) for each in (OPERATOR, PLANNER)}
    assert sorted(of_kind(objects, "Role")) == ["penstock-operator-election", "penstock-planner-election"]
    wide, narrow = rules_of(objects), rules_of(rendered("default"))
    more = {(group, resource, verb) for (group, resource), verbs in CLUSTER_RULES.items() for verb in verbs}
    assert wide == {**narrow, "operator": narrow["operator"] | more}
    assert more.isdisjoint(narrow["operator"])


def test_each_watched_namespace_has_a_role_and_an_operator():
    """One operator per namespace, each with a Role there and bound to the account of the release's namespace."""
    objects = rendered("two namespaces")
    bindings = [each for each in objects if each["kind"] == "RoleBinding"]

    assert {each["metadata"]["namespace"] for each in bindings} == {"serving", "research"}
    assert {subject["namespace"] for each in bindings for subject in each["subjects"]} == {"serving"}
    assert {
        name: each["spec"]["template"]["spec"]["containers"][0]["args"][2]
        for name, each in of_kind(objects, "Deployment").items()
        if "operator" in name
    } == {
        "penstock-operator-serving": "--namespace=serving",
        "penstock-operator-research": "--namespace=research",
    }


@pytest.mark.parametrize(
    ("setting", "asked"), [("default", ["operator", "planner"]), ("nothing optional", ["operator"])]
)
def test_helm_test_asks_what_was_installed_whether_it_is_ready(setting, asked):
    """From a pod as confined as any; a policy that names its readers lets it in as well."""
    objects = rendered(setting)
    [pod] = of_kind(objects, "Pod").values()
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    [container] = pod["spec"]["containers"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    urls = container["args"][1:]
    assert urls == [f"http://penstock-{each}.serving.svc:8080/healthz" for each in asked]
    assert {f"penstock-{each}" for each in asked} <= set(of_kind(objects, "Service"))
    compile(container["args"][0], "helm test", "exec")


@pytest.mark.parametrize(
    ("setting", "where", "account"),
    [
        ("default", ["--namespace=serving"], "penstock-operator"),
        ("cluster-wide", ["--all-namespaces"], "penstock-operator"),
        ("two namespaces", ["--namespace=serving", "--namespace=research"], "penstock-operator"),
        ("nothing optional", ["--namespace=serving"], "mine"),
    ],
)
def test_an_uninstallation_waits_for_drains_where_the_operator_looks(setting, where, account):
    """By a Job with the operator's rights that Helm runs before it deletes anything, and in less than Helm's 5 minutes."""
    [job] = of_kind(rendered(setting), "Job").values()
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-delete"
    assert 240 < job["spec"]["activeDeadlineSeconds"] < 300
    pod = job["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == account
    [container] = pod["containers"]
    assert container["args"] == [
        "operator", "finish-drains", *where, "--operator-class=penstock", "--timeout=240",
    ]  # fmt: skip


def test_without_a_limit_an_uninstallation_does_not_wait():
    """`uninstall.drainTimeoutSeconds: 0` leaves the Job out, and its NetworkPolicy."""
    values = {"uninstall": {"drainTimeoutSeconds": 0}}
    result = run_helm("template", "penstock", str(CHART), "--kube-version", KUBE_VERSION, values=values)
    assert result.returncode == 0, result.stderr
    assert "finish-drains" not in result.stdout
    assert "penstock-uninstall" not in result.stdout


@pytest.mark.parametrize("component", ["operator", "planner"])
def test_a_process_that_does_not_work_is_not_ready_and_not_restarted_for_it(component):
    """Its readiness is asked for apart from its life."""
    deployment = of_kind(rendered("default"), "Deployment")[f"penstock-{component}"]
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert container["livenessProbe"]["httpGet"]["path"] in {"/health", "/healthz"}


def test_the_operator_holds_what_it_grants_to_routers_and_profile_jobs():
    """Kubernetes refuses a Role that grants more than its author holds."""
    granted = rules_of(rendered("default"))["operator"]

    assert {("discovery.k8s.io", "endpointslices", verb) for verb in ("get", "list", "watch")} <= granted
    assert {("", "configmaps", verb) for verb in ("get", "patch")} <= granted


def test_the_operator_gets_exactly_what_it_calls():
    """The chart's rules are the operator's own table, what processes of shipped runtimes may do, and writing its own Lease."""
    granted = {}
    for group, resource, verb in rules_of(rendered("all rights"))["operator"]:
        granted.setdefault((group, resource), set()).add(verb)

    leases = granted.pop(("coordination.k8s.io", "leases"))
    assert leases == {"create", "get", "patch", "update"}
    of_runtimes = {
        resource: set(verbs) for name in SHIPPED for resource, verbs in runtime_of(name).cluster.verbs.items()
    }
    assert granted == RULES | of_runtimes


@pytest.mark.parametrize(
    ("component", "rights", "setting"),
    [
        ("operator", OPERATOR_RIGHTS, "default"),
        ("operator", CLUSTER_OPERATOR_RIGHTS, "cluster-wide"),
        ("planner", PLANNER_RIGHTS, "default"),
    ],
)
def test_the_doctor_asks_for_nothing_that_the_chart_does_not_give(component, rights, setting):
    """A right that no installation has would be reported as missing everywhere."""
    asked = {(each.group, each.resource, each.verb) for each in rights}
    assert asked - rules_of(rendered(setting))[component] == set()


def test_the_chart_labels_what_the_doctor_looks_for():
    """Operator and planner are found by label, and so are their scope and account."""
    found = of_kind(rendered("cluster-wide"), "Deployment").values()
    assert sorted(map(component_of, found)) == ["operator", "planner"]
    assert {scope_of(each) for each in found} == {None}
    for each in found:
        assert each["metadata"]["labels"]["app.kubernetes.io/part-of"] == "penstock"
        account = each["spec"]["template"]["spec"]["serviceAccountName"]
        assert account == f"penstock-{component_of(each)}"


OPTIONAL = {
    "LeaderWorkerSet": ("leaderworkerset.x-k8s.io/v1", "leaderworkerset.x-k8s.io"),
    "InferencePool": ("inference.networking.k8s.io/v1", "inference.networking.k8s.io"),
    "DynamoWorkerMetadata": ("nvidia.com/v1alpha1", "nvidia.com"),
}


@pytest.mark.parametrize("kind", OPTIONAL)
def test_kinds_of_others_are_granted_where_the_cluster_has_them(kind):
    """By default; a cluster without them gives the operator no right that it cannot use."""
    version, group = OPTIONAL[kind]
    known = run_helm(
        "template", "penstock", str(CHART), "--kube-version", KUBE_VERSION, "--api-versions", f"{version}/{kind}"
    )  # fmt: skip
    objects = [each for each in yaml.load_all(known.stdout, Loader=LOADER) if each]

    def groups(found):
        return {each for each, _, _ in rules_of(found)["operator"]} & {each for _, each in OPTIONAL.values()}

    assert groups(objects) == {group}
    assert groups(rendered("default")) == set()


def test_the_fewest_rights_name_what_they_can():
    """No Jobs, no kinds of others, and of the ConfigMaps only the named profiles are the planner's to read."""
    objects = rendered("fewest rights")
    groups = {group for group, _, _ in rules_of(objects)["operator"]}
    planner = of_kind(objects, "Role")["penstock-planner"]["rules"]

    assert groups.isdisjoint({"batch", "leaderworkerset.x-k8s.io", "nvidia.com"})
    assert [each for each in planner if each["resources"] == ["configmaps"]] == [
        {"apiGroups": [""], "resources": ["configmaps"], "resourceNames": ["llama-profile"], "verbs": ["get"]}
    ]


def test_disruption_budgets_come_with_a_second_replica():
    """One replica needs no budget, which would only block the drain of its node."""
    assert list(of_kind(rendered("default"), "PodDisruptionBudget")) == ["penstock-operator"]
    assert sorted(of_kind(rendered("everything"), "PodDisruptionBudget")) == [
        "penstock-operator",
        "penstock-planner",
    ]


def test_two_operators_seek_two_nodes():
    """So that the loss of one node leaves one that acts; on a cluster of one node both run there."""
    deployment = of_kind(rendered("default"), "Deployment")["penstock-operator"]["spec"]
    (spread,) = deployment["template"]["spec"]["topologySpreadConstraints"]

    assert deployment["replicas"] == 2
    assert (spread["topologyKey"], spread["whenUnsatisfiable"]) == (
        "kubernetes.io/hostname",
        "ScheduleAnyway",
    )
    assert spread["labelSelector"] == deployment["selector"]


def test_all_that_mount_a_volume_of_one_node_seek_one_node():
    """Each pod with the claim wants to be alongside pods with the claim, and nowhere where there are some elsewhere."""
    pods = {
        name: each["spec"]["template"]
        for name, each in of_kind(rendered("an own claim"), "Deployment").items()
        if name != "penstock-operator"
    }

    assert sorted(pods) == ["penstock-planner", "penstock-tensorboard"]
    for pod in pods.values():
        (term,) = pod["spec"]["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert term["topologyKey"] == "kubernetes.io/hostname"
        assert term["labelSelector"]["matchLabels"] == {
            "app.kubernetes.io/instance": "penstock",
            "penstock.dev/logs": "logs",
        }
        assert term["labelSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()


def test_definitions_outlive_the_release():
    """`helm uninstall` keeps the CRDs, and so the graphs, unless told otherwise."""
    definitions = of_kind(rendered("default"), "CustomResourceDefinition")

    assert sorted(definitions) == [
        "clustergpupools.penstock.dev",
        "gpupools.penstock.dev",
        "graphdeployments.penstock.dev",
        "profilerequests.penstock.dev",
        "scalingadapters.penstock.dev",
    ]
    for each in definitions.values():
        assert each["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert of_kind(rendered("nothing optional"), "CustomResourceDefinition") == {}


def test_chart_and_package_are_of_one_version():
    """A release carries one number."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

    assert (chart["version"], chart["appVersion"]) == (version, version)


def test_the_plain_manifests_are_the_charts():
    """Who changes the chart runs `make manifests`."""
    result = run_helm(
        "template", "penstock", str(CHART), "--namespace", "penstock-system", "--kube-version", KUBE_VERSION,
        "--set", "clusterWide=true", "--set", "createNamespace=true",
        "--set", "rbac.leaderWorkerSets=true", "--set", "rbac.inferencePools=true", "--set", "rbac.dynamo=true",
        "--set", "uninstall.drainTimeoutSeconds=0", "--skip-tests",
    )  # fmt: skip

    assert result.stdout == (ROOT / "manifests" / "install.yaml").read_text()


def test_the_charts_icon_is_a_file_of_the_repository():
    """Artifact Hub fetches it by its address on the main branch."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    _, path = chart["icon"].split("/main/")

    assert chart["icon"].startswith("https://raw.githubusercontent.com/penstock/penstock/")
    assert (ROOT / path).read_text().startswith("<svg")
