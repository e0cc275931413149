from __future__ import annotations

import textwrap

import pytest
import yaml

from penstock.core.errors import InvalidSpecError
from penstock.runtimes.dynamo.importer import import_dgd
from penstock.runtimes.dynamo.importer.command import parse_command

HEAD = "apiVersion: nvidia.com/v1alpha1\nkind: DynamoGraphDeployment\nmetadata: {name: chat}\n"

DISAGGREGATED = HEAD + textwrap.dedent("""\
    spec:
      services:
        Frontend:
          componentType: frontend
          replicas: 1
          extraPodSpec:
            mainContainer: {image: "repo/vllm-runtime:1.6"}
        VllmDecodeWorker:
          componentType: worker
          subComponentType: decode
          envFromSecret: hf-token
          replicas: 2
          resources: {limits: {gpu: "1"}}
          extraPodSpec:
            mainContainer:
              image: repo/vllm-runtime:1.6
              command: [python3, -m, dynamo.vllm]
              args: [--model, Qwen/Small, --is-decode-worker]
        VllmPrefillWorker:
          componentType: worker
          subComponentType: prefill
          replicas: 1
          resources: {limits: {gpu: "2"}}
          extraPodSpec:
            mainContainer:
              image: repo/vllm-runtime:1.6
              command: [python3]
              args: [-m, dynamo.vllm, --model, Qwen/Small, --disaggregation-mode=prefill, --enforce-eager]
    """)


def worker(extra, name="Worker"):
    """An aggregated graph whose worker component holds `extra`."""
    body = {
        "componentType": "worker",
        "extraPodSpec": {"mainContainer": {"args": ["-m", "x"], "command": ["python3"]}},
    }
    body["extraPodSpec"]["mainContainer"]["args"] = ["-m", "dynamo.vllm", "--model", "Q"]
    for key, value in extra.items():
        if key == "extraPodSpec":
            container = {**body["extraPodSpec"]["mainContainer"], **value.get("mainContainer", {})}
            body["extraPodSpec"] = {**value, "mainContainer": container}
        else:
            body[key] = value
    return HEAD + yaml.safe_dump({"spec": {"services": {name: body}}})


def converted(text):
    """The converted spec, and path and line of what was not carried."""
    result = import_dgd(text)
    return result.graph.to_manifest()["spec"], [(each.path, each.line) for each in result.unconverted]


def test_disaggregated_example():
    """The form that Dynamo's examples have is carried completely."""
    result = import_dgd(DISAGGREGATED)
    assert result.unconverted == ()
    assert result.graph.to_manifest() == {
        "apiVersion": "penstock.dev/v1alpha1",
        "kind": "GraphDeployment",
        "metadata": {"name": "chat"},
        "spec": {
            "model": {"name": "Qwen/Small"},
            "runtime": "dynamo",
            "image": "repo/vllm-runtime:1.6",
            "services": {
                "frontend": {"role": "router"},
                "vllm-decode-worker": {
                    "role": "decode",
                    "replicas": 2,
                    "envFrom": [{"secretRef": {"name": "hf-token"}}],
                },
                "vllm-prefill-worker": {"role": "prefill", "gpusPerReplica": 2, "args": ["--enforce-eager"]},
            },
            "router": {"policy": "round-robin"},
            "planner": {"enabled": False},
        },
    }


def test_nothing_is_dropped_in_silence():
    """A key that is not understood is listed with its line, at any depth."""
    text = DISAGGREGATED + textwrap.dedent("""\
          checkpoint: {enabled: true}
      topologyConstraint: {packDomain: rack}
    status: {state: successful}
    """)
    result = import_dgd(text)
    assert [(each.line, each.path) for each in result.unconverted] == [
        (32, "spec.services.VllmPrefillWorker.checkpoint.enabled"),
        (33, "spec.topologyConstraint.packDomain"),
        (34, "status"),
    ]


@pytest.mark.parametrize(
    ("extra", "path"),
    [
        ({"dynamoNamespace": "x"}, "dynamoNamespace"),
        ({"livenessProbe": {"httpGet": {"path": "/"}}}, "livenessProbe"),
        ({"ingress": {"enabled": True}}, "ingress"),
        ({"modelRef": {"name": "Q"}}, "modelRef"),
        ({"experimental": {"gpuMemoryService": {}}}, "experimental.gpuMemoryService"),
        ({"frontendSidecar": {"image": "i"}}, "frontendSidecar"),
        ({"runtimeVersionOverride": "1.4.0"}, "runtimeVersionOverride"),
        ({"resources": {"limits": {"gpu": "half"}}}, "resources.limits.gpu"),
        ({"sharedMemory": {"disabled": True}}, "sharedMemory"),
        ({"envs": ["A=b"]}, "envs[0]"),
        ({"envs": {"A": "b"}}, "envs"),
        ({"extraPodSpec": {"mainContainer": {"envFrom": [{"x": 1}]}}}, "extraPodSpec.mainContainer.envFrom[0]"),
        ({"extraPodSpec": {"affinity": {"podAffinity": {"x": [{"matchLabels": {"nvidia.com/dynamo-component": "a"}}]}}}}, "extraPodSpec.affinity"),
        ({"extraPodSpec": {"mainContainer": {"env": [{"name": "DYN_SYSTEM_PORT", "value": "9090"}]}}}, "extraPodSpec.mainContainer.env[0]"),
        ({"extraPodSpec": {"mainContainer": {"env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['grove.io/x']"}}}]}}}, "extraPodSpec.mainContainer.env[0]"),
        ({"extraPodSpec": {"mainContainer": {"ports": [{"name": "system", "containerPort": 9090}]}}}, "extraPodSpec.mainContainer.ports"),
        ({"extraPodSpec": {"mainContainer": {"livenessProbe": {"httpGet": {"port": 9090}}}}}, "extraPodSpec.mainContainer.livenessProbe"),
        ({"extraPodMetadata": {"labels": {"nvidia.com/dynamo-x": "a"}}}, "extraPodMetadata.labels.nvidia.com/dynamo-x"),
        ({"extraPodSpec": {"mainContainer": {"args": ["-m", "dynamo.vllm", "--model", "Q", "--load-format", "gms"]}}}, "extraPodSpec.mainContainer.args"),
        ({"extraPodSpec": {"mainContainer": {"args": ["-m", "dynamo.vllm", "--model", "Q", "--store-kv", "mem"]}}}, "extraPodSpec.mainContainer.args"),
    ],
)  # fmt: skip
def test_what_a_graph_cannot_hold_is_listed(extra, path):
    """Each setting without a counterpart is named once."""
    _, notes = converted(worker(extra))
    assert [found for found, _ in notes] == [f"spec.services.Worker.{path}"]


def test_pod_settings_go_to_the_pod_template():
    """Volumes, shared memory, working folder, CPU and memory and labels are kept as an overlay."""
    extra = {
        "sharedMemory": {"size": "8Gi"},
        "pvc": {"name": "cache", "mountPoint": "/cache"},
        "resources": {"limits": {"gpu": "1", "cpu": "10"}, "requests": {"memory": "20Gi"}},
        "labels": {"team": "a"},
        "extraPodMetadata": {"annotations": {"b": "c"}},
        "extraPodSpec": {
            "imagePullSecrets": [{"name": "pull"}],
            "terminationGracePeriodSeconds": 60,
            "mainContainer": {"workingDir": "/w"},
        },
    }
    spec, notes = converted(worker(extra))
    service = spec["services"]["worker"]
    assert notes == []
    assert service["terminationGracePeriodSeconds"] == 60
    assert service["podTemplate"] == {
        "metadata": {"labels": {"team": "a"}, "annotations": {"b": "c"}},
        "spec": {
            "imagePullSecrets": [{"name": "pull"}],
            "volumes": [
                {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}},
                {"name": "cache", "persistentVolumeClaim": {"claimName": "cache"}},
            ],
            "containers": [
                {
                    "name": "main",
                    "workingDir": "/w",
                    "resources": {"limits": {"cpu": "10"}, "requests": {"memory": "20Gi"}},
                    "volumeMounts": [
                        {"name": "shared-memory", "mountPath": "/dev/shm"},
                        {"name": "cache", "mountPath": "/cache"},
                    ],
                }
            ],
        },
    }


def test_placement_becomes_node_pools():
    """Selectors and tolerations become pools; equal ones share a pool, others get a number."""
    services = {
        name: {
            "componentType": "worker",
            "subComponentType": role,
            "extraPodSpec": {
                "nodeSelector": {"gpu": "A100"},
                "tolerations": [{"key": taint, "operator": "Exists"}],
                "mainContainer": {"args": ["--model", "Q"]},
            },
        }
        for name, role, taint in (("P", "prefill", "x"), ("D", "decode", "y"))
    }
    services["F"] = {
        "componentType": "frontend",
        "extraPodSpec": {
            "nodeSelector": {"gpu": "A100"},
            "tolerations": [{"key": "x", "operator": "Exists"}],
        },
    }
    spec, _ = converted(HEAD + yaml.safe_dump({"spec": {"services": services}}, sort_keys=False))
    assert {name: each["nodePool"] for name, each in spec["services"].items()} == {
        "p": "a100",
        "d": "a100-2",
        "f": "a100",
    }
    assert spec["nodePools"]["a100-2"]["tolerations"] == [{"key": "y", "operator": "Exists"}]


def test_nodes_and_parallelism():
    """GPUs of all nodes are counted, and a split unlike the graph's own is kept as arguments."""
    extra = {
        "multinode": {"nodeCount": 2},
        "resources": {"limits": {"gpu": "4"}},
        "extraPodSpec": {
            "mainContainer": {"args": ["-m", "dynamo.vllm", "--model", "Q", "--tensor-parallel-size", "8"]}
        },
    }
    service = converted(worker(extra))[0]["services"]["worker"]
    assert (service["gpusPerReplica"], service["nodesPerReplica"]) == (8, 2)
    assert service["args"] == ["--tensor-parallel-size", "8", "--pipeline-parallel-size", "1"]
    extra["extraPodSpec"]["mainContainer"]["args"][-1:] = ["4", "--pipeline-parallel-size=2"]
    assert "args" not in converted(worker(extra))[0]["services"]["worker"]


def test_model_flags_and_mocker():
    """Names and context length move to the model; the mocker is recognised; its speed is the run's."""
    args = ["-m", "dynamo.mocker", "--model-path", "Q", "--model-name", "q", "--max-model-len", "4096", "--speedup-ratio", "2"]  # fmt: skip
    result = import_dgd(worker({"extraPodSpec": {"mainContainer": {"args": args}}}))
    spec = result.graph.to_manifest()["spec"]
    assert spec["model"] == {"name": "Q", "servedName": "q", "contextTokens": 4096}
    assert spec["engine"] == {"mocker": True}
    assert [each.value for each in result.unconverted] == ['"2"']


def test_workers_of_different_models_are_told():
    """A graph serves one model; the other is listed."""
    text = DISAGGREGATED.replace(
        "[-m, dynamo.vllm, --model, Qwen/Small", "[-m, dynamo.vllm, --model, Qwen/Large"
    )
    result = import_dgd(text)
    assert result.graph.spec.model.name == "Qwen/Small"
    assert [(each.value, "the graph keeps 'Qwen/Small'" in each.why) for each in result.unconverted] == [
        ('"Qwen/Large"', True)
    ]


def test_frontend_flags_become_the_router():
    """Router mode and busy thresholds are carried, from flags or environment; the port is not."""
    frontend = {
        "componentType": "frontend",
        "envs": [{"name": "DYN_ROUTER_MODE", "value": "kv"}, {"name": "A", "value": 1}],
        "extraPodSpec": {
            "mainContainer": {
                "command": ["python3", "-m", "dynamo.frontend"],
                "args": ["--http-port", "8000", "--active-decode-blocks-threshold", "0.7", "--kv-x", "1"],
            }
        },
    }
    manifest = yaml.safe_load(worker({}))
    manifest["spec"]["services"]["Frontend"] = frontend
    spec, notes = converted(yaml.safe_dump(manifest))
    assert spec["router"] == {
        "policy": "kv-cost",
        "admission": {
            "mode": "token-capacity",
            "activeDecodeBlocksThreshold": 0.7,
            "activePrefillTokensThreshold": None,
        },
    }
    assert spec["services"]["frontend"] == {
        "role": "router",
        "args": ["--kv-x", "1"],
        "env": [{"name": "A", "value": "1"}],
    }
    assert [path for path, _ in notes] == ["spec.services.Frontend.extraPodSpec.mainContainer.args"]


def test_unknown_router_mode_is_listed():
    """A mode without a policy here is named, and the default stays."""
    manifest = yaml.safe_load(worker({}))
    manifest["spec"]["services"]["F"] = {"componentType": "frontend", "extraPodSpec": {"mainContainer": {"args": ["--router-mode=random"]}}}  # fmt: skip
    result = import_dgd(yaml.safe_dump(manifest))
    assert [each.value for each in result.unconverted] == ['"random"']


def test_variables_of_the_graph_reach_every_service():
    """Dynamo gives them to the frontend as well."""
    text = DISAGGREGATED.replace("spec:\n", "spec:\n  envs: [{name: A, value: b}]\n", 1)
    spec, _ = converted(text)
    assert spec["env"] == spec["services"]["frontend"]["env"] == [{"name": "A", "value": "b"}]


def test_environment_from_objects_is_kept():
    """Secrets and ConfigMaps of the container are carried."""
    sources = [{"secretRef": {"name": "s"}}, {"configMapRef": {"name": "c"}, "prefix": "C_"}]
    spec, notes = converted(worker({"extraPodSpec": {"mainContainer": {"envFrom": sources}}}))
    assert spec["services"]["worker"]["envFrom"] == sources
    assert notes == []


def test_claims_of_the_graph_are_referred_to():
    """A claim's name is kept; its size belongs to whoever makes it."""
    manifest = yaml.safe_load(worker({"volumeMounts": [{"name": "cache", "mountPoint": "/c"}]}))
    manifest["spec"]["pvcs"] = [{"name": "cache", "create": True, "size": "50Gi"}]
    spec, notes = converted(yaml.safe_dump(manifest))
    volumes = spec["services"]["worker"]["podTemplate"]["spec"]["volumes"]
    assert volumes == [{"name": "cache", "persistentVolumeClaim": {"claimName": "cache"}}]
    assert [path for path, _ in notes] == ["spec.pvcs[0].create", "spec.pvcs[0].size"]


def test_components_without_a_role_are_listed():
    """An endpoint picker has no place in a graph."""
    manifest = yaml.safe_load(worker({}))
    manifest["spec"]["services"]["Epp"] = {"componentType": "epp"}
    _, notes = converted(yaml.safe_dump(manifest))
    assert [path for path, _ in notes] == ["spec.services.Epp"]


def test_old_autoscaling_and_adapter_become_scaling():
    """Bounds of the deprecated section are kept, and a scaling adapter opens scaling."""
    extra = {"autoscaling": {"enabled": True, "minReplicas": 2, "maxReplicas": 4}, "replicas": 2}
    assert converted(worker(extra))[0]["services"]["worker"]["scaling"] == {
        "minReplicas": 2,
        "maxReplicas": 4,
    }
    assert converted(worker({"scalingAdapter": {"enabled": True}}))[0]["services"]["worker"]["scaling"] == {}


def test_what_a_script_does_beside_its_command_is_listed():
    """The command that starts the worker is carried, with the variables set for it; the rest of the script is not."""
    manifest = yaml.safe_load(DISAGGREGATED)
    container = manifest["spec"]["services"]["VllmPrefillWorker"]["extraPodSpec"]["mainContainer"]
    container["command"] = ["/bin/sh", "-c"]
    container["args"] = ["ldconfig\nA=1 DYN_NAMESPACE=x python3 -m dynamo.vllm --seed 1 | tee log"]
    result = import_dgd(yaml.safe_dump(manifest, sort_keys=False))
    prefix = "spec.services.VllmPrefillWorker.extraPodSpec.mainContainer"
    assert [(each.path, each.value) for each in result.unconverted] == [
        (f"{prefix}.command", '"x"'),
        (f"{prefix}.args", '"ldconfig\\nA=1 DYN_NAMESPACE=x python3 -m dynamo.vllm --see…'),
    ]
    service = result.graph.to_manifest()["spec"]["services"]["vllm-prefill-worker"]
    assert service["args"] == ["--seed", "1"]
    assert service["env"] == [{"name": "A", "value": "1"}]


@pytest.mark.parametrize(
    ("container", "program"),
    [
        ({"args": ["-m", "dynamo.mine", "--model", "Q"]}, "starts dynamo.mine"),
        ({"args": ["-m", "dynamo.vllm.omni", "--model", "Q"]}, "starts dynamo.vllm.omni"),
        ({"command": ["dynamo-vllm-sidecar"], "args": ["--grpc-endpoint", "x"]}, "runs dynamo-vllm-sidecar"),
        ({"command": ["sleep"], "args": ["infinity"]}, "runs sleep"),
        ({"command": ["sh", "-c"], "args": ["./start.sh; ./wait.sh"]}, "is a script that starts Dynamo by no command"),
    ],
)  # fmt: skip
def test_workers_that_run_another_program_are_refused(container, program):
    """The runtime's own command in its place would serve something else, or fail to start."""
    with pytest.raises(InvalidSpecError) as caught:
        import_dgd(worker({"extraPodSpec": {"mainContainer": container}}), "f.yaml")
    (problem,) = caught.value.problems
    assert problem.path == "spec.services.Worker.extraPodSpec.mainContainer.command"
    assert problem.message.startswith(program)
    assert "python3 -m dynamo.vllm" in problem.message
    assert (problem.file, problem.line is None) == ("f.yaml", False)


@pytest.mark.parametrize(
    ("container", "path"),
    [
        ({"args": ["-m", "dynamo.sglang", "--model", "Q"]}, "args"),
        ({"image": "nvcr.io/nvidia/ai-dynamo/tensorrtllm-runtime:1.3.1"}, "image"),
        ({"command": ["/bin/sh", "-c"], "args": ["python3 -m dynamo.trtllm --model-path Q"]}, "args"),
    ],
)
def test_workers_of_other_engines_are_refused(container, path):
    """An import that succeeds and cannot start would be worse than none."""
    with pytest.raises(InvalidSpecError) as caught:
        import_dgd(worker({"extraPodSpec": {"mainContainer": container}}))
    (problem,) = caught.value.problems
    assert problem.path == f"spec.services.Worker.extraPodSpec.mainContainer.{path}"
    assert problem.message.startswith("names another engine than vLLM")
    assert problem.line is not None


@pytest.mark.parametrize("framework", ["trtllm", "sglang"])
def test_another_backend_framework_is_refused(framework):
    """At its own line."""
    manifest = yaml.safe_load(worker({}))
    manifest["spec"]["backendFramework"] = framework
    with pytest.raises(InvalidSpecError) as caught:
        import_dgd(yaml.safe_dump(manifest))
    assert [each.path for each in caught.value.problems] == ["spec.backendFramework"]


def test_sidecars_and_other_resources_stay_in_the_pod():
    """Beside the main container, with what the graph counts itself taken out."""
    extra = {
        "extraPodSpec": {
            "mainContainer": {"resources": {"requests": {"ephemeral-storage": "2Gi"}}},
            "containers": [{"name": "log", "image": "l"}],
        },
        "resources": {"requests": {"cpu": "2"}},
    }
    template = converted(worker(extra))[0]["services"]["worker"]["podTemplate"]
    assert template["spec"]["containers"] == [
        {"name": "main", "resources": {"requests": {"ephemeral-storage": "2Gi", "cpu": "2"}}},
        {"name": "log", "image": "l"},
    ]


def test_long_names_fall_back_to_the_role():
    """Names that no child could carry become the role's."""
    spec, _ = converted(worker({}, name="AVeryLongNameForAWorkerThatNobodyWouldEverWantToTypeTwice"))
    assert list(spec["services"]) == ["aggregated"]


@pytest.mark.parametrize(
    ("text", "path", "part"),
    [
        (
            DISAGGREGATED.replace("v1alpha1", "v1"),
            "apiVersion",
            "nvidia.com/v1 is neither nvidia.com/v1alpha1",
        ),
        ("kind: Other\n", "", "0 DynamoGraphDeployment documents"),
        (DISAGGREGATED + "---\n" + DISAGGREGATED, "", "2 DynamoGraphDeployment documents"),
        ("a: [\n", "", "malformed YAML"),
        (
            HEAD + "spec: {services: {W: {componentType: worker}}}\n",
            "spec.services.W.extraPodSpec.mainContainer.args",
            "names no model, nor does another worker; add --model",
        ),
        (HEAD + "spec: {services: {F: {componentType: frontend}}}\n", "spec.services", "hold no worker"),
        (HEAD + "spec: {services: {}}\n", "spec.services", "hold no worker"),
        (
            worker({"subComponentType": "prefill"}),
            "(converted) spec.services",
            "no decode service",
        ),
    ],
)
def test_what_cannot_be_converted_is_refused(text, path, part):
    """Another version or kind, or a deployment that no graph can express, is an error."""
    with pytest.raises(InvalidSpecError) as caught:
        import_dgd(text, "dgd.yaml")
    problem = next(each for each in caught.value.problems if each.path == path)
    assert part in problem.message
    assert problem.file == "dgd.yaml"


@pytest.mark.parametrize(
    ("command", "args", "expected"),
    [
        (["python3", "-m", "dynamo.vllm"], ["--a", "1"], ("dynamo.vllm", ["--a", "1"])),
        (["python3"], ["-m", "dynamo.vllm", "--a"], ("dynamo.vllm", ["--a"])),
        (["/opt/venv/bin/python"], ["-m", "m"], ("m", [])),
        ([], ["--a"], (None, ["--a"])),
        ([], [], (None, [])),
        (["sh", "script.sh"], [], None),
        (["python3", "script.py"], [], None),
    ],
)
def test_command_lines(command, args, expected):
    """A Python module is recognised in each way that Dynamo's examples start one."""
    found = parse_command([*command, *args])
    assert (found and (found.module, found.words)) == expected
