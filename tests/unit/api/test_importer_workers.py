"""What becomes of each part of a Dynamo component: where it is in the graph, and what is not carried."""

import copy
import json
from functools import reduce
from pathlib import Path

import pytest
import yaml

from penstock.core.errors import InvalidSpecError
from penstock_dynamo.importer import import_dgd

HEAD = {"apiVersion": "nvidia.com/v1alpha1", "kind": "DynamoGraphDeployment", "metadata": {"name": "chat"}}
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
MAIN = "extraPodSpec.mainContainer"
FRONTEND = {"componentType": "frontend"}
CASES = yaml.safe_load((Path(__file__).parent / "imports.yaml").read_text())


def component(*args, module="dynamo.vllm", container=None, pod=None, **extra):
    """A worker component with these arguments."""
    main = {"command": ["python3", "-m", module], "args": ["--model", "Q", *args], **(container or {})}
    return {"componentType": "worker", **extra, "extraPodSpec": {"mainContainer": main, **(pod or {})}}


def imported(services, **spec):
    """Convert components; return the spec, and paths and reasons of what was not carried."""
    manifest = {**HEAD, "spec": {"services": services, **spec}}
    result = import_dgd(yaml.safe_dump(manifest, sort_keys=False))
    notes = [(each.path.removeprefix("spec.services."), each.why) for each in result.unconverted]
    return result.graph.to_manifest()["spec"], notes


def becomes(case):
    """Compare what is at paths of the spec; return the paths of what was not carried."""

    def at(path):
        return reduce(lambda value, key: (value or {}).get(key), path.split("/"), spec)

    given = case["services"].items()
    services = {
        name: each if "componentType" in each else component(*each.pop("args", ()), **each)
        for name, each in copy.deepcopy(dict(given)).items()
    }
    spec, notes = imported(services)
    assert {path: at(path) for path in case["expected"]} == case["expected"]
    return [path for path, _ in notes]


def roles(*args, **extra):
    """A prefill and a decode worker with these arguments."""
    return {
        role[0].upper(): component(*args, subComponentType=role, **extra) for role in ("prefill", "decode")
    }


@pytest.mark.parametrize("case", CASES["carried"], ids=lambda case: " ".join(case["expected"]))
def test_what_a_graph_can_hold_is_carried_completely(case):
    """Each part at its place here: pods, pools, sizes, connectors, devices; nothing is reported."""
    assert becomes(case) == []


@pytest.mark.parametrize(
    ("resources", "gpus"),
    [
        ({"limits": {"custom": {"aws.amazon.com/neuron": "1"}}}, "0"),
        ({"limits": {"custom": {"rdma/ib": "1"}, "gpu": "1"}}, None),
        ({"limits": {"custom": {"rdma/ib": "1"}}, "requests": {"gpu": "1"}}, None),
        ({"limits": {"custom": {"ephemeral-storage": "2Gi"}}}, None),
    ],
)
def test_another_accelerator_is_asked_for_in_place_of_a_gpu(resources, gpus):
    """Alongside a GPU that the deployment does not ask for, no node would have both."""
    spec, _ = imported({"W": component(resources=resources)})
    limits = spec["services"]["w"]["podTemplate"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits.get("nvidia.com/gpu") == gpus


@pytest.mark.parametrize(
    "config",
    [
        {**NIXL, "kv_buffer_device": "xpu"},
        {**NIXL, "engine_id": "a"},
        {**NIXL, "kv_role": "kv_observer"},
        {**NIXL, "kv_connector_extra_config": {"backends": ["LIBFABRIC"]}},
        {"kv_connector": "PdConnector", "kv_role": "kv_both"},
        ["NixlConnector"],
        "{",
    ],
)
def test_another_connector_stays_and_the_lost_lease_is_told(config):
    """It stands after the runtime's own, whose lease it undoes."""
    text = config if isinstance(config, str) else json.dumps(config)
    spec, notes = imported(roles("--kv-transfer-config", text))
    assert spec["services"]["p"]["args"] == ["--kv-transfer-config", text]
    assert [path for path, _ in notes] == [f"P.{MAIN}.args", f"D.{MAIN}.args"]
    assert "spec.lease does not reach it" in notes[0][1]


@pytest.mark.parametrize("case", CASES["beside_losses"], ids=lambda case: " ".join(case["losses"]))
def test_what_is_not_carried_is_listed_beside_what_is(case):
    """Stages and modes that a graph has no word for, the speed of a run, the runtime's own ports."""
    assert becomes(case) == case["losses"]


def test_a_connector_that_only_a_shell_knows_is_told_with_what_its_loss_means():
    """LMCache's sample reads its connection from a mounted file: the note says that it is off, at the script itself."""
    script = 'exec python3 -m dynamo.vllm "$@" --kv-transfer-config "$(cat /etc/lmcache/c.json)"'
    worker = component(container={"command": ["/bin/sh", "-c", script, "--"], "args": ["--model", "m"]})
    _, ((path, why),) = imported({"W": worker})
    assert path.endswith(".command")
    assert "LMCache, is off" in why


def test_placeholders_of_a_template_are_told_once_each():
    """Applied as they stand they would be names of images that do not exist."""
    spec, notes = imported({"W": component("--x", "${TAG}", container={"image": "i:${TAG}"})})
    assert spec["image"] == "i:${TAG}"
    why = "is filled in by envsubst; do that first, or write it into the graph"
    assert notes == [("(converted) spec.services.w.args[1]", why)]


def test_a_second_frontend_that_runs_something_else_is_left_out():
    """As Model Express is in one of Dynamo's samples; alone it is the router, with what it runs listed."""
    other = {**FRONTEND, "extraPodSpec": {"mainContainer": {"command": ["sh", "-c", "./server & wait $!"]}}}
    spec, notes = imported({"W": component(), "Frontend": FRONTEND, "Cache": other})
    assert list(spec["services"]) == ["w", "frontend"]
    assert [path for path, _ in notes] == ["Cache"]
    spec, notes = imported({"W": component(), "Cache": other})
    assert spec["services"]["cache"]["role"] == "router"
    assert [path for path, _ in notes] == [f"Cache.{MAIN}.command"]


@pytest.mark.parametrize(
    ("probe", "seconds"),
    [
        ({"failureThreshold": 60}, 600),
        ({"initialDelaySeconds": 30, "periodSeconds": 5, "failureThreshold": 60}, 330),
        ({"initialDelaySeconds": 180}, None),
        ({"failureThreshold": "many"}, None),
        ("never", None),
    ],
)
def test_the_time_of_a_startup_probe_is_kept(probe, seconds):
    """The probe itself would ask Dynamo's port, and the pod would never be ready."""
    spec, notes = imported({"W": component(container={"startupProbe": probe})})
    assert spec["services"]["w"].get("startupTimeoutSeconds") == (None if seconds == 600 else seconds)
    assert [path for path, _ in notes] == [f"W.{MAIN}.startupProbe"]


def test_claims_and_variables_of_the_graph():
    """A claim's name is kept, and its size belongs to whoever makes it; Dynamo gives variables to the frontend too."""
    spec, notes = imported(
        {"W": component(volumeMounts=[{"name": "cache", "mountPoint": "/c"}]), "F": FRONTEND},
        pvcs=[{"name": "cache", "create": True, "size": "50Gi"}, {"name": "there", "create": False}],
        envs=[{"name": "A", "value": "b"}],
    )
    volumes = spec["services"]["w"]["podTemplate"]["spec"]["volumes"]
    assert volumes == [{"name": "cache", "persistentVolumeClaim": {"claimName": "cache"}}]
    assert spec["env"] == spec["services"]["f"]["env"] == [{"name": "A", "value": "b"}]
    assert [path for path, _ in notes] == ["spec.pvcs[0].create", "spec.pvcs[0].size"]


def test_marks_of_dynamos_operator_are_left_out():
    """They would say nothing to another operator."""
    annotations = {"nvidia.com/dynamo-discovery-backend": "etcd", "a": "b"}
    manifest = {**HEAD, "metadata": {"name": "chat", "annotations": annotations}}
    result = import_dgd(yaml.safe_dump({**manifest, "spec": {"services": {"W": component()}}}))
    assert result.graph.to_manifest()["metadata"] == {"name": "chat", "annotations": {"a": "b"}}
    assert [each.path for each in result.unconverted] == [
        "metadata.annotations.nvidia.com/dynamo-discovery-backend"
    ]


def test_one_of_several_deployments_is_chosen_by_name():
    """The others are reported; without a name, or with a wrong one, their names are told."""
    text = yaml.safe_dump_all(
        {**HEAD, "metadata": {"name": name}, "spec": {"services": {"W": component()}}} for name in "ab"
    )
    result = import_dgd(text, name="b")
    assert result.graph.name == "b"
    assert [each.value for each in result.unconverted] == ['"DynamoGraphDeployment"']
    for name, count in ((None, 2), ("c", 0)):
        with pytest.raises(InvalidSpecError, match=f"{count} .* or one's name: a, b"):
            import_dgd(text, name=name)


@pytest.mark.parametrize(
    "requests",
    [
        [{"exactly": {"deviceClassName": "gpu.nvidia.com", "count": 4}}],
        [
            {"deviceClassName": "gpu.nvidia.com", "count": 3},
            {"exactly": {"deviceClassName": "gpu.nvidia.com"}},
            {"exactly": {"deviceClassName": "nic.example.org", "count": 8}},
        ],
    ],
)
def test_a_claim_of_the_same_file_says_its_gpus(requests):
    """What is held counts, whatever the engine is split over; network cards do not."""
    objects = [
        {
            "kind": "ResourceClaimTemplate",
            "apiVersion": "resource.k8s.io/v1",
            "metadata": {"name": "four"},
            "spec": {"spec": {"devices": {"requests": requests}}},
        },
        {
            **HEAD,
            "spec": {
                "services": {
                    "W": component(
                        container={"resources": {"claims": [{"name": "gpu"}]}},
                        pod={"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "four"}]},
                    )
                }
            },
        },
    ]
    spec = import_dgd(yaml.safe_dump_all(objects)).graph.to_manifest()["spec"]
    assert spec["services"]["w"]["gpusPerReplica"] == 4


def test_other_objects_of_the_file_are_listed():
    """A graph holds none; some of them its pods need."""
    objects = [
        {"kind": "ResourceClaimTemplate", "apiVersion": "resource.k8s.io/v1"},
        {**HEAD, "spec": {"services": {"W": component()}}},
        {"kind": "DynamoModel", "apiVersion": "nvidia.com/v1alpha1"},
        ["no object"],
    ]
    found = import_dgd(yaml.safe_dump_all(objects)).unconverted
    assert [(each.value, each.why, each.line is None) for each in found] == [
        ('"ResourceClaimTemplate"', "is not part of a graph; apply it by itself", False),
        ('"DynamoModel"', "is read by Dynamo's operator alone", False),
        ("null", "is not part of a graph; apply it by itself", False),
    ]
