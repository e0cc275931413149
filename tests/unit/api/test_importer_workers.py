"""Connectors, devices, roles and start times of imported workers."""

import json

import pytest
import yaml

from penstock.core.errors import InvalidSpecError
from penstock.runtimes.dynamo.importer import import_dgd

NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
PAIR = ("prefill", "decode")
CONTAINER = "extraPodSpec.mainContainer"


def component(*args, extra=None, container=None, module="dynamo.vllm"):
    """A worker component with these arguments."""
    main = {"command": ["python3", "-m", module], "args": ["--model", "Q", *args], **(container or {})}
    pod = {"mainContainer": main, **(extra or {}).get("extraPodSpec", {})}
    return {"componentType": "worker", **(extra or {}), "extraPodSpec": pod}


def imported(**services):
    """Convert components; return the spec and (path, reason) of what was not carried."""
    manifest = {
        "apiVersion": "nvidia.com/v1alpha1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": "chat"},
        "spec": {"services": services},
    }
    result = import_dgd(yaml.safe_dump(manifest, sort_keys=False))
    notes = [(each.path.removeprefix("spec.services."), each.why) for each in result.unconverted]
    return result.graph.to_manifest()["spec"], notes


def pair(*args):
    """A prefill and a decode worker with these arguments."""
    return imported(**{role: component(*args, extra={"subComponentType": role}) for role in PAIR})


@pytest.mark.parametrize("role", ["kv_both", "kv_producer", "kv_consumer"])
def test_the_plain_nixl_connector_is_the_runtimes_own_in_any_role(role):
    """The graph's roles say who produces."""
    spec, notes = pair("--kv-transfer-config", json.dumps({**NIXL, "kv_role": role}))
    assert "args" not in spec["services"]["prefill"]
    assert notes == []


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_connectors_buffer_is_the_engines(device):
    """A graph states it once, so that the connector keeps the graph's lease."""
    spec, notes = pair("--kv-transfer-config", json.dumps({**NIXL, "kv_buffer_device": device}))
    assert spec["engine"] == {"kvBufferDevice": device}
    assert "args" not in spec["services"]["decode"]
    assert notes == []


@pytest.mark.parametrize(
    "config",
    [
        {**NIXL, "kv_buffer_device": "xpu"},
        {**NIXL, "engine_id": "a"},
        {**NIXL, "kv_connector_extra_config": {"backends": ["LIBFABRIC"]}},
        {"kv_connector": "PdConnector", "kv_role": "kv_both"},
        ["NixlConnector"],
        "{",
    ],
)
def test_another_connector_stays_and_the_lost_lease_is_told(config):
    """It stands after the runtime's own, whose lease it undoes."""
    text = config if isinstance(config, str) else json.dumps(config)
    spec, notes = pair("--kv-transfer-config", text)
    assert spec["services"]["prefill"]["args"] == ["--kv-transfer-config", text]
    assert [path for path, _ in notes] == [f"prefill.{CONTAINER}.args", f"decode.{CONTAINER}.args"]
    assert "spec.lease does not reach it" in notes[0][1]


def test_an_older_connector_flag_is_listed():
    """Dynamo 1.6 refuses --connector; the plain one is the runtime's own."""
    _, notes = pair("--connector", "kvbm")
    assert [why for _, why in notes] == [
        "--connector is refused by Dynamo 1.6; write its --kv-transfer-config"
    ] * 2
    assert pair("--connector", "nixl")[1] == []


def test_a_connector_that_only_a_shell_knows_is_told_with_what_its_loss_means():
    """LMCache's sample reads its connection from a mounted file: the note says that it is off, at the script itself."""
    script = 'exec python3 -m dynamo.vllm "$@" --kv-transfer-config "$(cat /etc/lmcache/c.json)"'
    worker = component(container={"command": ["/bin/sh", "-c", script, "--"], "args": ["--model", "m"]})
    _, ((path, why),) = imported(W=worker)
    assert path.endswith(".command")
    assert "LMCache, is off" in why


def test_a_worker_that_transfers_no_kv_keeps_its_connector():
    """Nothing of the runtime's is replaced."""
    config = '{"kv_connector":"DynamoConnector","kv_role":"kv_both"}'
    spec, notes = imported(W=component("--kv-transfer-config", config))
    assert spec["services"]["w"]["args"] == ["--kv-transfer-config", config]
    assert notes == []


def test_a_security_context_says_what_it_implies():
    """The operator's own is restricted, and the API server refuses a contradiction."""
    spec, notes = imported(W=component(container={"securityContext": {"privileged": True, "runAsUser": 0}}))
    main = spec["services"]["w"]["podTemplate"]["spec"]["containers"][0]
    assert main["securityContext"] == {
        "allowPrivilegeEscalation": True,
        "runAsNonRoot": False,
        "privileged": True,
        "runAsUser": 0,
    }
    assert notes == []


def test_placeholders_of_a_template_are_told_once_each():
    """Applied as they stand they would be names of images that do not exist."""
    spec, notes = imported(W=component("--x", "${TAG}", container={"image": "i:${TAG}"}))
    assert spec["image"] == "i:${TAG}"
    assert notes == [
        (
            "(converted) spec.services.w.args[1]",
            "is filled in by envsubst; do that first, or write it into the graph",
        )
    ]


def test_multimodal_stages_are_left_out():
    """A graph has no role for them; the worker that decodes encodes itself."""
    spec, notes = imported(
        Encoder=component("--multimodal-encode-worker"),
        Vlm=component("--multimodal-worker", "--enable-multimodal"),
        Processor=component("--multimodal-processor"),
        Newer=component("--disaggregation-mode", "encode"),
    )
    assert spec["services"] == {"vlm": {"role": "aggregated", "args": ["--enable-multimodal"]}}
    assert [path for path, _ in notes] == ["Encoder", "Processor", "Newer"]


def test_a_second_frontend_that_runs_something_else_is_left_out():
    """As Model Express stands in one of Dynamo's samples; alone it is the router, with what it runs listed."""
    frontend = {"componentType": "frontend"}
    other = {**frontend, "extraPodSpec": {"mainContainer": {"command": ["sh", "-c", "./server & wait $!"]}}}
    spec, notes = imported(W=component(), Frontend=frontend, Cache=other)
    assert list(spec["services"]) == ["w", "frontend"]
    assert [path for path, _ in notes] == ["Cache"]
    spec, notes = imported(W=component(), Cache=other)
    assert spec["services"]["cache"]["role"] == "router"
    assert [path for path, _ in notes] == [f"Cache.{CONTAINER}.command"]


def test_a_sliced_gpu_is_asked_for_as_it_stands():
    """`device` of Dynamo's operator: shares beside the counted GPU, scheduler and placement."""
    device = {
        "resources": {"nvidia.com/gpu": "2", "nvidia.com/gpumem": "3000"},
        "schedulerName": "hami-scheduler",
        "nodeSelector": {"gpu": "a"},
    }
    spec, notes = imported(W=component(extra={"device": device}))
    service = spec["services"]["w"]
    assert (service["gpusPerReplica"], service["nodePool"]) == (2, "a")
    assert service["podTemplate"]["spec"] == {
        "schedulerName": "hami-scheduler",
        "containers": [{"name": "main", "resources": {"limits": {"nvidia.com/gpumem": "3000"}}}],
    }
    assert notes == []


def test_a_claimed_device_is_asked_for_in_place_of_a_gpu():
    """A replica still counts one in the planner's budget; the pod asks for the claim alone."""
    extra = {"extraPodSpec": {"resourceClaims": [{"name": "xpu", "resourceClaimTemplateName": "t"}]}}
    container = {"resources": {"claims": [{"name": "xpu"}]}}
    spec, notes = imported(W=component(extra=extra, container=container))
    main = spec["services"]["w"]["podTemplate"]["spec"]["containers"][0]
    none = {"nvidia.com/gpu": "0"}
    assert main["resources"] == {"claims": [{"name": "xpu"}], "requests": none, "limits": none}
    assert notes == []


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
    """Beside a GPU that the deployment does not ask for, no node would have both."""
    spec, _ = imported(W=component(extra={"resources": resources}))
    limits = spec["services"]["w"]["podTemplate"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits.get("nvidia.com/gpu") == gpus


def test_another_kind_of_gpu_and_custom_resources_are_asked_for_by_name():
    """An extended resource of its own, and what stands beside CPU and memory."""
    resources = {
        "limits": {"gpu": "1", "gpuType": "gpu.intel.com/xe", "custom": {"rdma/ib": 2}},
        "requests": {"custom": {"ephemeral-storage": "2Gi"}},
    }
    spec, notes = imported(W=component(extra={"resources": resources}))
    assert spec["nodePools"] == {"pool": {"gpuResourceName": "gpu.intel.com/xe"}}
    assert spec["services"]["w"]["podTemplate"]["spec"]["containers"][0]["resources"] == {
        "requests": {"ephemeral-storage": "2Gi"},
        "limits": {"rdma/ib": "2"},
    }
    assert notes == []


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
    spec, notes = imported(W=component(container={"startupProbe": probe}))
    assert spec["services"]["w"].get("startupTimeoutSeconds") == (None if seconds == 600 else seconds)
    assert [path for path, _ in notes] == [f"W.{CONTAINER}.startupProbe"]


def test_a_worker_with_another_context_keeps_its_flag():
    """It stands after the graph's own, so nothing is lost."""
    spec, notes = imported(
        P=component("--max-model-len", "1048", extra={"subComponentType": "prefill"}),
        D=component("--max-model-len", "2560", extra={"subComponentType": "decode"}),
    )
    assert spec["model"]["contextTokens"] == 1048
    assert spec["services"]["d"]["args"] == ["--max-model-len", "2560"]
    assert notes == []


def test_engines_beside_each_other_keep_one_gpu_each():
    """Tensor parallelism over a replica's GPUs would ask for more than it has."""
    spec, _ = imported(
        W=component("--data-parallel-size", "4", extra={"resources": {"limits": {"gpu": "4"}}})
    )
    assert spec["services"]["w"]["args"] == [
        *("--data-parallel-size", "4"),
        *("--tensor-parallel-size", "1", "--pipeline-parallel-size", "1"),
    ]


def test_marks_of_dynamos_operator_are_left_out():
    """They would say nothing to another operator."""
    manifest = {
        "apiVersion": "nvidia.com/v1alpha1",
        "kind": "DynamoGraphDeployment",
        "metadata": {
            "name": "chat",
            "annotations": {"nvidia.com/dynamo-discovery-backend": "etcd", "a": "b"},
        },
        "spec": {"services": {"W": component()}},
    }
    result = import_dgd(yaml.safe_dump(manifest))
    assert result.graph.to_manifest()["metadata"] == {"name": "chat", "annotations": {"a": "b"}}
    assert [each.path for each in result.unconverted] == [
        "metadata.annotations.nvidia.com/dynamo-discovery-backend"
    ]


def test_one_of_several_deployments_is_chosen_by_name():
    """The others are reported; without a name, or with a wrong one, their names are told."""
    manifest = {"apiVersion": "nvidia.com/v1alpha1", "kind": "DynamoGraphDeployment"}
    text = yaml.safe_dump_all(
        {**manifest, "metadata": {"name": name}, "spec": {"services": {"W": component()}}} for name in "ab"
    )
    result = import_dgd(text, name="b")
    assert result.graph.name == "b"
    assert [each.value for each in result.unconverted] == ['"DynamoGraphDeployment"']
    for name, count in ((None, 2), ("c", 0)):
        with pytest.raises(InvalidSpecError, match=f"{count} .* or one's name: a, b"):
            import_dgd(text, name=name)


def test_other_objects_of_the_file_are_listed():
    """A graph holds none; some of them its pods need."""
    text = yaml.safe_dump_all(
        [
            {"kind": "ResourceClaimTemplate", "apiVersion": "resource.k8s.io/v1"},
            {
                "apiVersion": "nvidia.com/v1alpha1",
                "kind": "DynamoGraphDeployment",
                "metadata": {"name": "chat"},
                "spec": {"services": {"W": component()}},
            },
            {"kind": "DynamoModel", "apiVersion": "nvidia.com/v1alpha1"},
            ["no object"],
        ]
    )
    assert [(each.value, each.why, each.line is None) for each in import_dgd(text).unconverted] == [
        ('"ResourceClaimTemplate"', "is no part of a graph; apply it by itself", False),
        ('"DynamoModel"', "is read by Dynamo's operator alone", False),
        ("null", "is no part of a graph; apply it by itself", False),
    ]
