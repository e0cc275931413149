"""What holds for the children of every graph."""

from __future__ import annotations

import copy
import json

from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from penstock.api import GraphDeployment
from penstock.core.errors import InvalidSpecError
from penstock.kube.kinds import LEADER_WORKER_SET
from penstock_operator.resources import BuildContext, children

CONTEXT = BuildContext(owner_uid="uid-1", namespace="serving", kinds=frozenset({LEADER_WORKER_SET}))
names = st.from_regex(r"\A[a-z]([-a-z0-9]{0,20}[a-z0-9])?\Z").filter(lambda name: name != "planner")


@st.composite
def services(draw, role, pools):
    """One service of a role."""
    nodes = 1 if role == "router" else draw(st.sampled_from([1, 1, 2, 4]))
    replicas = draw(st.integers(0, 3))
    spec = {"role": role, "replicas": replicas, "nodesPerReplica": nodes}
    spec["gpusPerReplica"] = nodes * draw(st.integers(1, 8))
    spec["terminationGracePeriodSeconds"] = draw(st.sampled_from([0, 1, 5, 900]))
    spec["startupTimeoutSeconds"] = draw(st.sampled_from([1, 30, 7200]))
    if draw(st.booleans()):
        spec["scaling"] = {"minReplicas": 0, "maxReplicas": 8}
    if pools and draw(st.booleans()):
        spec["nodePool"] = draw(st.sampled_from(pools))
    return spec


@st.composite
def graphs(draw):
    """A manifest of a valid graph."""
    roles = draw(st.sampled_from([["aggregated"], ["prefill", "decode"]]))
    roles += ["router"] * draw(st.integers(1, 2))
    keys = draw(st.lists(names, min_size=len(roles), max_size=len(roles), unique=True))
    runtime = draw(st.sampled_from(["vllm", "dynamo", "simulated"]))
    is_ours = (
        runtime != "dynamo"
    )  # Dynamo's own frontend has neither keys nor tiers, and asking for them is refused
    router = {"auth": {"apiKeysSecret": draw(st.sampled_from([None, "keys"])) if is_ours else None}}
    router["tiers"] = {"enabled": is_ours and draw(st.booleans())}
    pools = {
        "a": {"nodeSelector": {"gpu": "a"}, "gpuResourceName": "amd.com/gpu"},
        "b": {"cacheMount": "/models", "cacheClaim": "weights"},
    }
    spec = {
        "model": {"name": "meta/llama", "servedName": "llama"},
        "runtime": runtime,
        "services": {key: draw(services(role, list(pools))) for key, role in zip(keys, roles, strict=True)},
        "nodePools": pools,
        "router": router,
        "engine": {"mocker": runtime == "dynamo" and draw(st.booleans())},
        "planner": {"maxGpuBudget": draw(st.sampled_from([None, 1000])), "minGpuBudget": 0},
    }
    return {
        "apiVersion": "penstock.dev/v1alpha1",
        "kind": "GraphDeployment",
        "metadata": {"name": draw(names)},
        "spec": spec,
    }


def objects(manifest):
    """Children by kind and name."""
    graph = GraphDeployment.model_validate(manifest)
    found = children(graph, CONTEXT, replicas={}, unavailable={})
    by_key = {(each["kind"], each["metadata"]["name"]): each for each in found}
    assert len(by_key) == len(found)
    return by_key


def templates(found):
    """Workload, pod template and selector of every workload."""
    for (kind, _), each in found.items():
        spec = each.get("spec", {})
        if kind == "Deployment":
            yield each, spec["template"], spec["selector"]["matchLabels"]
        elif kind == "LeaderWorkerSet":
            for key in ("leaderTemplate", "workerTemplate"):
                yield each, spec["leaderWorkerTemplate"][key], {}


@settings(max_examples=60)
@given(manifest=graphs())
def test_same_graph_same_bytes(manifest):
    """Two builds of equal graphs are equal down to the order of keys, and share nothing."""
    first, second = objects(manifest), objects(copy.deepcopy(manifest))
    assert json.dumps(list(first.values())) == json.dumps(list(second.values()))


@settings(max_examples=60)
@given(manifest=graphs())
def test_names_are_short_and_labels_agree(manifest):
    """Names fit DNS labels; selectors of workloads, Services and budgets match the pods' labels."""
    found = objects(manifest)
    for (_, name), each in found.items():
        assert len(name) <= 63
        assert all(len(value) <= 63 for value in each["metadata"]["labels"].values())
    for workload, template, selector in templates(found):
        labels = template["metadata"]["labels"]
        assert selector.items() <= labels.items()
        name = workload["metadata"]["name"]
        budget = found["PodDisruptionBudget", name]["spec"]["selector"]["matchLabels"]
        assert budget.items() <= labels.items()
        is_follower = "readinessProbe" not in template["spec"]["containers"][0]
        matches = found["Service", name]["spec"]["selector"].items() <= labels.items()
        assert matches is (not is_follower or labels["penstock.dev/role"] == "router")


@settings(max_examples=60)
@given(manifest=graphs())
def test_gpus_of_a_service_add_up(manifest):
    """Pods of a replica count its GPUs together, and ask for all of them or none."""
    found = objects(manifest)
    for name, service in manifest["spec"]["services"].items():
        if service["role"] == "router":
            continue
        key = f"{manifest['metadata']['name']}-{name}"
        pods = [template for each, template, _ in templates(found) if each["metadata"]["name"] == key]
        sizes = [1] if len(pods) == 1 else [1, service["nodesPerReplica"] - 1]
        counted = sum(
            size * int(each["metadata"]["annotations"]["penstock.dev/gpus"])
            for size, each in zip(sizes, pods, strict=True)
        )
        assert counted == service["gpusPerReplica"]
        asked = 0
        for size, each in zip(sizes, pods, strict=True):
            limits = each["spec"]["containers"][0].get("resources", {}).get("limits", {})
            asked += size * sum(int(number) for name, number in limits.items() if name.endswith("/gpu"))
        assert asked in {0, service["gpusPerReplica"]}


@settings(max_examples=60)
@given(
    manifest=graphs().filter(lambda manifest: manifest["spec"]["runtime"] != "dynamo"),
    ttft_s=st.integers(6, 60),
    queue=st.integers(1, 100),
)
def test_a_routers_setting_changes_no_workers_object(manifest, ttft_s, queue):
    """Only the ConfigMap and the routers' Deployments differ; tiers aside, which are the workers' too."""
    changed = copy.deepcopy(manifest)
    changed["spec"]["slo"] = {"ttft": f"{ttft_s}s"}
    changed["spec"]["router"] |= {"prefillQueue": {"maxRequests": queue}}
    before, after = objects(manifest), objects(changed)
    routers = {name for name, each in manifest["spec"]["services"].items() if each["role"] == "router"}
    differing = {key for key in before if before[key] != after[key]}
    graph = manifest["metadata"]["name"]
    workloads = {(kind, f"{graph}-{name}") for kind in ("Deployment", "LeaderWorkerSet") for name in routers}
    assert set() < differing <= {("ConfigMap", f"{graph}-router"), *workloads}


@settings(max_examples=60)
@given(manifest=graphs(), data=st.data())
def test_a_change_of_one_service_changes_its_objects_alone(manifest, data):
    """Whatever a service's size, environment, arguments or pods become, its neighbours stay."""
    name = data.draw(st.sampled_from(sorted(manifest["spec"]["services"])))
    changed = copy.deepcopy(manifest)
    changed["spec"]["services"][name] |= data.draw(
        st.sampled_from(
            [
                {"replicas": 5},
                {"args": ["--new"]},
                {"env": [{"name": "NEW", "value": "1"}]},
                {"image": "other:1"},
                {"podTemplate": {"spec": {"priorityClassName": "high"}}},
                {"terminationGracePeriodSeconds": 77},
                {"gpusPerReplica": 64},
            ]
        )
    )
    before, after = objects(manifest), objects(changed)
    assert set(before) == set(after)
    for key, each in before.items():
        if each != after[key]:
            assert each["metadata"]["labels"]["penstock.dev/service"] == name


_values = st.recursive(
    st.none() | st.integers(0, 2) | st.sampled_from(["main", "x", "delete", "penstock.dev/gpu-budget"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(
                ["name", "image", "resources", "limits", "nvidia.com/gpu", "labels", "annotations", "$patch"]
            ),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)
_pods = st.dictionaries(
    st.sampled_from(["containers", "initContainers", "schedulingGates", "volumes", "securityContext"]),
    _values,
    max_size=3,
)


@settings(max_examples=60)
@given(patch=st.fixed_dictionaries({}, optional={"metadata": _values, "spec": st.none() | _pods}))
def test_any_overlay_is_built_or_refused(patch):
    """A podTemplate of any shape ends in a template with its gate and number, or in a refusal with a path."""
    manifest = {
        "apiVersion": "penstock.dev/v1alpha1",
        "kind": "GraphDeployment",
        "metadata": {"name": "g"},
        "spec": {
            "model": {"name": "m"},
            "services": {"w": {"role": "aggregated", "podTemplate": patch}},
        },
    }
    try:
        found, refused = objects(manifest), ()
    except ValidationError:  # the model refuses keys that no pod has
        return
    except InvalidSpecError as exc:
        found, refused = {}, exc.problems
    assert all(each.path.startswith("spec.services.w.podTemplate") for each in refused)
    if refused:
        return
    template = found["Deployment", "g-w"]["spec"]["template"]
    assert template["metadata"]["annotations"]["penstock.dev/gpus"] == "1"
    assert {"name": "penstock.dev/gpu-budget"} in template["spec"]["schedulingGates"]
    assert template["metadata"]["labels"]["penstock.dev/graph"] == "g"
